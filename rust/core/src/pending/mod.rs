//! The machine: which requests wait for what, what to ask whom, and how each request ends.

mod add;
mod attempts;
mod changes;
mod counters;
mod deadlines;
mod decided;
mod dp_rank;
mod driver;
mod endpoints;
mod explain;
mod headers;
mod lives;
mod options;
mod peer;
mod peer_state;
mod peers;
mod reads;
mod requests;
mod rooms;
mod route;
mod slots;
mod stats;
mod table;
mod told;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use hashbrown::HashMap;

pub use add::{AddError, Added};
pub use changes::{Change, ChangeKind};
pub use counters::{ByKind, Counters, PeerCounters, RequestCounters, Wait, Waits};
pub use headers::Headers;
pub use options::{Allowed, OptionError, Options};
pub use route::{Command, CommandKind, Endpoint, Event, EventKind, Route, Step};
pub use slots::Outcome;
pub use stats::Stats;

use crate::failure::{Failure, FailureKind};
use crate::ids::{Room, RouteId, Ticket};
use crate::printable::Printable;
use crate::retry::RetryPolicy;
use crate::time::{SchedulerClock, Tick};
use crate::topology::DecodeRank;
use changes::Changes;
use endpoints::Wanted;
use peers::Peers;
use requests::Requests;
use slots::Form;

/// The pending requests of one decode rank, and all that is known of the prefill engines.
///
/// See the crate's documentation for how to drive it. Every function takes the time; it never goes back.
pub struct Machine {
    decode: DecodeRank,
    policy: RetryPolicy,
    options: Options,
    /// Boxed, as the quick path of `add` does not read it.
    allowed: Box<Allowed>,
    now: Tick,
    clock: SchedulerClock,
    requests: Requests,
    peers: Peers,
    flights: HashMap<Ticket, Flight>,
    commands: VecDeque<Command>,
    /// Waiting queries in flight.
    waiting_queries: u32,
    /// Peers that the next poll looks at: budgets spent while the scheduler stood still, and `per_cycle`.
    for_poll: Vec<u32>,
    events: Vec<Event>,
    tombstones: HashMap<Room, Tombstone>,
    tombstones_by_age: VecDeque<(Tick, Room)>,
    last_ticket: u64,
    last_route: u64,
    last_step: u64,
    retired: Vec<RouteId>,
    /// What the latest answer completed.
    completed: Vec<Arc<Route>>,
    /// No request is placed any more, and why.
    dead: Option<(FailureKind, String)>,
    /// Apart from the other counters, which are boxed to keep what the quick path of `add` reads together.
    routed_at_once: u64,
    counters: Box<PeerCounters>,
    changes: Changes,
    /// When the driver means to call `on_timer` next, as far as it was told.
    announced: Option<Tick>,
    rung: bool,
}

/// One HTTP request that was handed out.
#[derive(Clone, Copy, Debug)]
struct Flight {
    peer: u32,
    purpose: Purpose,
    started: Tick,
    /// Whether the transport has it; a command that it has not is just dropped when cancelled.
    taken: bool,
}

/// Who waits for an HTTP request.
#[derive(Clone, Copy, Debug)]
enum Purpose {
    /// The topology, for requests that wait.
    Attempt,
    /// The topology of a peer that is refused or down.
    Probe,
    /// The topology of a ready peer: a heartbeat or a confirmation.
    Read { heartbeat: bool },
    /// A cached endpoint once more, to see whether the peer is still the same.
    Check { dp_rank: u32, contact: u32 },
    /// dp ranks.
    Query(Form),
    /// Endpoints of a dp rank.
    Lookup { dp_rank: u32, wanted: Wanted },
}

/// A room that was told failed before its request came.
#[derive(Clone, Debug)]
struct Tombstone {
    reason: String,
    http_status: u16,
    until: Tick,
}

impl Machine {
    /// A machine with nothing pending.
    #[must_use]
    pub fn new(decode: DecodeRank, policy: RetryPolicy, options: Options, now: Tick) -> Self {
        Self {
            decode,
            policy,
            options,
            allowed: Box::default(),
            now,
            clock: SchedulerClock::new(now),
            requests: Requests::new(),
            peers: Peers::default(),
            flights: HashMap::new(),
            commands: VecDeque::new(),
            waiting_queries: 0,
            for_poll: Vec::new(),
            events: Vec::new(),
            tombstones: HashMap::new(),
            tombstones_by_age: VecDeque::new(),
            last_ticket: 0,
            last_route: 0,
            last_step: 0,
            retired: Vec::new(),
            completed: Vec::new(),
            dead: None,
            routed_at_once: 0,
            counters: Box::default(),
            changes: Changes::default(),
            announced: None,
            rung: false,
        }
    }

    /// The same machine, with limits to where requests and answers may lead. For a machine with nothing pending.
    #[must_use]
    pub fn with_allowed(mut self, allowed: Allowed) -> Self {
        *self.allowed = allowed;
        self
    }

    fn advance_to(&mut self, now: Tick) {
        self.now = self.now.max(now);
        self.requests.lived = self.lived();
    }

    fn lived(&self) -> Tick {
        self.clock.read(self.now)
    }

    fn interval(&self) -> Duration {
        crate::retry::seconds(self.policy.interval_s)
    }

    fn push_event(&mut self, event: Event) {
        self.counters.on_event(event.kind);
        // Only a scheduler that never polls gets here; the newest events say most.
        if self.events.len() >= MAX_EVENTS {
            self.events.remove(0);
        }
        self.events.push(event);
    }

    /// Hand out an HTTP request.
    fn send(&mut self, peer_index: u32, purpose: Purpose, started: Tick, request: HttpRequest) -> Ticket {
        self.last_ticket += 1;
        let ticket = Ticket(self.last_ticket);
        self.flights.insert(ticket, Flight { peer: peer_index, purpose, started, taken: false });
        self.commands.push_back(Command {
            ticket,
            kind: request.kind,
            addr: Arc::clone(&self.peers.at(peer_index).addr),
            path: request.path,
            body: request.body,
            max_body: request.max_body,
            wait_ms: request.wait_ms,
        });
        ticket
    }

    fn cancel(&mut self, ticket: Ticket) {
        let Some(flight) = self.flights.remove(&ticket) else {
            return;
        };
        if matches!(flight.purpose, Purpose::Query(Form::Waiting)) {
            self.waiting_queries -= 1;
        }
        if flight.taken {
            self.commands.push_back(Command {
                ticket,
                kind: CommandKind::Cancel,
                addr: Arc::from(""),
                path: String::new(),
                body: None,
                max_body: 0,
                wait_ms: 0,
            });
        }
    }
}

/// The part of a command that depends on what is asked.
struct HttpRequest {
    kind: CommandKind,
    path: String,
    body: Option<Vec<u8>>,
    max_body: usize,
    wait_ms: u32,
}

impl HttpRequest {
    /// A GET that is answered at once.
    const fn get(kind: CommandKind, path: String, max_body: usize) -> Self {
        Self { kind, path, body: None, max_body, wait_ms: 0 }
    }
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine").field("stats", &self.stats(self.now)).finish_non_exhaustive()
    }
}

/// A failure with the kind's own status; the text begins with the address.
fn failure(kind: FailureKind, addr: &Arc<str>, text: &str, attempts: u32) -> Arc<Failure> {
    failure_with_status(kind, addr, text, attempts, kind.http_status())
}

fn failure_with_status(
    kind: FailureKind,
    addr: &Arc<str>,
    text: &str,
    attempts: u32,
    http_status: u16,
) -> Arc<Failure> {
    Arc::new(Failure {
        kind,
        reason: format!("{}", Printable(format_args!("{addr}: {text}"))),
        http_status,
        addr: Arc::clone(addr),
        attempts,
        contacted: Vec::new(),
    })
}

fn and_last_error(error: &str) -> String {
    if error.is_empty() { String::new() } else { format!("; last error: {error}") }
}

const MAX_EVENTS: usize = 65_536;
/// Most bytes of a topology or endpoint answer.
pub const MAX_TOPOLOGY_BYTES: usize = 64 * 1024;
