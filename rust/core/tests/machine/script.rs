//! What happens to a machine: a script, drawn. It names requests and flights by their place among those that there
//! are, so that a shorter script still means something.

use disagg_core::TransportError;
use disagg_core::failure::FailureKind;
use proptest::prelude::*;
use proptest::sample::select;

use crate::replies::{BAD_BODIES, Reply, STATUSES};
use crate::setup::{PEERS, TOPOLOGIES};

/// One event.
#[derive(Clone, Debug)]
pub enum Op {
    Add {
        peer: usize,
        spelling: usize,
        room: u64,
        preset: Option<u32>,
    },
    /// A burst with rooms of their own.
    AddMany {
        peer: usize,
        count: u64,
    },
    /// A warm-up transfer, or a text that is no address.
    AddElsewhere {
        text: &'static str,
        room: u64,
    },
    Discard(usize),
    /// A request that has ended or was discarded before.
    DiscardGone(usize),
    DiscardAll,
    Poll {
        limit: usize,
    },
    Answer {
        flight: usize,
        reply: Reply,
        instance: Option<&'static str>,
    },
    Fail {
        flight: usize,
        error: TransportError,
    },
    /// A ticket that was answered or cancelled before, or that never was.
    AnswerGone {
        ticket: usize,
        reply: Reply,
    },
    FailGone {
        ticket: usize,
    },
    /// The network works: everything in flight is answered well, some rounds long.
    Work {
        rounds: u8,
    },
    /// Peers answer, but their ranks are not there, some rounds long.
    RanksAreNotFound {
        rounds: u8,
    },
    /// Nobody calls anything meanwhile but the timers, if those are called.
    Wait {
        millis: u64,
        timers: Timers,
    },
    /// The scheduler polls four times a second meanwhile, and the timers are punctual.
    Live {
        millis: u64,
    },
    /// The clock goes back; then it goes on from there.
    Back {
        millis: u64,
    },
    Pause,
    Resume,
    FailRoom {
        room: u64,
        status: u16,
    },
    Release {
        room: u64,
    },
    Lost {
        peer: usize,
        spelling: usize,
    },
    Restarted {
        peer: usize,
        spelling: usize,
    },
    PeerChanges {
        peer: usize,
        topology: usize,
    },
    FailAll(FailureKind),
    /// The network does not come to take commands during the next events, unless time passes.
    Deaf {
        events: u8,
    },
}

/// How the driver treats timers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timers {
    /// At each time that was announced.
    Punctual,
    /// Once, when the wait is over.
    Late,
    Never,
}

pub fn script(longest: usize) -> impl Strategy<Value = Vec<Op>> {
    proptest::collection::vec(op(), 1..longest)
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => requests(),
        6 => network(),
        4 => time(),
        2 => told(),
    ]
}

fn requests() -> impl Strategy<Value = Op> {
    let preset = prop_oneof![3 => Just(None), 1 => (0..4_u32).prop_map(Some)];
    prop_oneof![
        12 => (0..PEERS, 0..3_usize, 0..7_u64, preset)
            .prop_map(|(peer, spelling, room, preset)| Op::Add { peer, spelling, room, preset }),
        3 => (0..PEERS, 2..20_u64).prop_map(|(peer, count)| Op::AddMany { peer, count }),
        1 => (select(ELSEWHERE.to_vec()), 0..7_u64).prop_map(|(text, room)| Op::AddElsewhere { text, room }),
        3 => (0..64_usize).prop_map(Op::Discard),
        1 => (0..64_usize).prop_map(Op::DiscardGone),
        1 => Just(Op::DiscardAll),
        6 => select(vec![1, 3, 4096, usize::MAX]).prop_map(|limit| Op::Poll { limit }),
    ]
}

fn network() -> impl Strategy<Value = Op> {
    let instance = || select(vec![None, None, None, Some("a"), Some("b"), Some(TOO_LONG)]);
    prop_oneof![
        6 => (1..5_u8).prop_map(|rounds| Op::Work { rounds }),
        8 => (0..16_usize, reply(), instance())
            .prop_map(|(flight, reply, instance)| Op::Answer { flight, reply, instance }),
        4 => (0..16_usize, select(ERRORS.to_vec())).prop_map(|(flight, error)| Op::Fail { flight, error }),
        2 => (0..64_usize, reply()).prop_map(|(ticket, reply)| Op::AnswerGone { ticket, reply }),
        1 => (0..64_usize).prop_map(|ticket| Op::FailGone { ticket }),
        2 => (1..4_u8).prop_map(|rounds| Op::RanksAreNotFound { rounds }),
        1 => (1..5_u8).prop_map(|events| Op::Deaf { events }),
    ]
}

fn reply() -> impl Strategy<Value = Reply> {
    prop_oneof![
        6 => Just(Reply::Good),
        1 => (0..TOPOLOGIES.len()).prop_map(Reply::Topology),
        1 => Just(Reply::Endpoint),
        2 => (0..4_u32, any::<bool>()).prop_map(|(rank, all)| Reply::Ranks { rank, all }),
        1 => Just(Reply::MalformedRanks),
        3 => select(STATUSES.to_vec()).prop_map(Reply::Status),
        2 => (0..BAD_BODIES.len()).prop_map(Reply::BadBody),
    ]
}

fn time() -> impl Strategy<Value = Op> {
    let timers = || select(vec![Timers::Punctual, Timers::Punctual, Timers::Late, Timers::Never]);
    prop_oneof![
        6 => (select(STEPS_MS.to_vec()), timers()).prop_map(|(millis, timers)| Op::Wait { millis, timers }),
        2 => (select(LEAPS_MS.to_vec()), timers()).prop_map(|(millis, timers)| Op::Wait { millis, timers }),
        4 => select(LIVES_MS.to_vec()).prop_map(|millis| Op::Live { millis }),
        1 => (1..3_000_u64).prop_map(|millis| Op::Back { millis }),
        1 => Just(Op::Pause),
        2 => Just(Op::Resume),
    ]
}

fn told() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..7_u64, select(vec![400, 503])).prop_map(|(room, status)| Op::FailRoom { room, status }),
        4 => (0..7_u64).prop_map(|room| Op::Release { room }),
        4 => (0..PEERS, 0..3_usize).prop_map(|(peer, spelling)| Op::Lost { peer, spelling }),
        4 => (0..PEERS, 0..3_usize).prop_map(|(peer, spelling)| Op::Restarted { peer, spelling }),
        6 => (0..PEERS, 0..TOPOLOGIES.len())
            .prop_map(|(peer, topology)| Op::PeerChanges { peer, topology }),
        1 => select(vec![FailureKind::Closed, FailureKind::Internal]).prop_map(Op::FailAll),
    ]
}

const ELSEWHERE: [&str; 6] = ["2.2.2.2:8998", "2.2.2.2", "http://p", "p:0", "", "::1:80"];
/// 257 characters: taken for none.
const TOO_LONG: &str = concat!(
    "iiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiii",
    "iiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiii",
    "iiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiii",
    "iiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiiii",
);
const ERRORS: [TransportError; 8] = [
    TransportError::Refused,
    TransportError::Timeout,
    TransportError::Reset,
    TransportError::Cut,
    TransportError::Oversized,
    TransportError::Dns,
    TransportError::Encoding,
    TransportError::Other,
];
const STEPS_MS: [u64; 9] = [0, 1, 10, 20, 100, 300, 500, 1_000, 2_000];
const LEAPS_MS: [u64; 6] = [5_000, 11_000, 16_000, 121_000, 601_000, 901_000];
const LIVES_MS: [u64; 6] = [20, 100, 500, 2_000, 6_000, 16_000];
