//! J3, J4 and J7 to the nanosecond: one peer that fails for a while and then answers, polled all the time.

use core::time::Duration;

use disagg_core::TransportError;
use disagg_core::failure::FailureKind;
use disagg_core::ids::{RequestId, Room, Ticket};
use disagg_core::pending::{Added, Command, CommandKind, Headers, Machine, Options, Outcome, Step};
use disagg_core::retry::RetryPolicy;
use disagg_core::time::Tick;
use disagg_core::topology::{DecodeRank, DecodeRankSpec};
use proptest::prelude::*;
use proptest::sample::select;

use crate::replies::{Class, class_of_error};
use crate::setup::{self, TOPOLOGIES};

/// How the peer behaves and who asks.
#[derive(Clone, Debug)]
pub struct Story {
    policy: RetryPolicy,
    seed: u64,
    /// How each attempt ends but the last, which is answered well; and how long each takes.
    attempts: Vec<(Trouble, u64)>,
    /// When requests come.
    adds_ms: Vec<u64>,
    poll_ms: u64,
}

/// One way in which an attempt fails.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    Error(TransportError),
    NotReady,
    Junk,
    /// 400 to the newer form, and then to the older one something transient.
    OldAndNotReady,
}

/// An attempt or a probe in flight.
#[derive(Clone, Copy, Debug)]
struct Attempt {
    ticket: Ticket,
    started: Tick,
    lands: Tick,
    is_probe: bool,
}

/// A request that waits, and when it came.
type Waiting = (RequestId, Tick);

pub struct Run {
    story: Story,
    machine: Machine,
    now: Tick,
    flight: Option<Attempt>,
    last: Option<Attempt>,
    failed: u32,
    /// When the budget was spent.
    spent: Option<Tick>,
    waiting: Vec<Waiting>,
    /// Ends that the next poll has to give out.
    due: Vec<(RequestId, FailureKind, u32)>,
    /// The poll since the last failure was not yet, or is now.
    polling: bool,
    last_poll: Tick,
    answered: bool,
}

pub fn story() -> impl Strategy<Value = Story> {
    let trouble = prop_oneof![
        select(vec![TransportError::Refused, TransportError::Timeout, TransportError::Cut])
            .prop_map(Trouble::Error),
        Just(Trouble::NotReady),
        Just(Trouble::Junk),
        Just(Trouble::OldAndNotReady),
    ];
    let attempts = proptest::collection::vec((trouble, 1..2_500_u64), 1..10);
    let adds_ms = proptest::collection::vec(1..20_000_u64, 0..6);
    (setup::policy(), any::<u64>(), attempts, adds_ms, 50..950_u64).prop_map(
        |(policy, seed, attempts, mut adds_ms, poll_ms)| {
            adds_ms.sort_unstable();
            Story { policy, seed, attempts, adds_ms, poll_ms }
        },
    )
}

impl Run {
    pub fn new(story: Story) -> Self {
        let options = Options { seed: story.seed, request_timeout_s: 1e5, ..Options::DEFAULT };
        let decode = DecodeRank::new(DecodeRankSpec::default()).unwrap();
        Self {
            machine: Machine::new(decode, story.policy, options, Tick::ZERO),
            story,
            now: Tick::ZERO,
            flight: None,
            last: None,
            failed: 0,
            spent: None,
            waiting: Vec::new(),
            due: Vec::new(),
            polling: false,
            last_poll: Tick::ZERO,
            answered: false,
        }
    }

    /// Play the story to its end: the peer answers, and who waits or comes then is placed.
    pub fn play(&mut self) {
        self.add();
        let mut adds = std::mem::take(&mut self.story.adds_ms).into_iter().peekable();
        while !self.answered {
            let add = adds.peek().map(|&at| millis(at));
            let poll = self.last_poll.after(Duration::from_millis(self.story.poll_ms));
            let lands = self.flight.map(|flight| flight.lands);
            let timer = self.machine.poll_timer().map(|at| at.max(self.now));
            let next = [add, lands, timer, Some(poll)].into_iter().flatten().min().unwrap();
            assert!(next < millis(1_000_000), "nobody asks any more: {:?}", self.machine);
            self.now = next;
            if lands == Some(next) {
                self.land();
            } else if timer == Some(next) {
                self.call_timers();
            } else if add == Some(next) {
                adds.next();
                self.add();
            } else {
                self.poll();
            }
        }
        self.everybody_is_placed();
    }

    fn call_timers(&mut self) {
        for _ in 0..2 {
            self.machine.on_timer(self.now);
            self.take_commands();
        }
        let next = self.machine.poll_timer();
        assert!(next.is_none_or(|next| next > self.now), "{next:?} is due and not done");
    }

    fn add(&mut self) {
        let room = Room::new(self.now.as_nanos() / 1_000_000).unwrap();
        // Two that come in the same millisecond would have the same room.
        if self.waiting.last().is_some_and(|&(_, added)| added == self.now) {
            return;
        }
        let added = self.machine.add(self.now, ADDR, room, None);
        let Ok(Added::Pending(id)) = added else { panic!("{added:?}") };
        match self.spent {
            Some(_) => self.due.push((id, FailureKind::Cooldown, self.failed)),
            None => self.waiting.push((id, self.now)),
        }
        self.take_commands();
    }

    fn poll(&mut self) {
        self.last_poll = self.now;
        let step = self.machine.poll(self.now, usize::MAX);
        self.ends_are_those_that_are_due(&step);
        self.polling = true;
        self.take_commands();
        self.polling = false;
    }

    /// J4: a request ends with the first failure after its least wait that leaves the budget spent, not before, not
    /// after; and it says how many there were.
    fn ends_are_those_that_are_due(&mut self, step: &Step) {
        let ended: Vec<_> = step
            .ended
            .iter()
            .map(|(id, outcome)| {
                let Outcome::Failed(failure) = outcome else { panic!("{outcome:?}") };
                (*id, failure.kind, failure.attempts)
            })
            .collect();
        let mut due = std::mem::take(&mut self.due);
        due.sort_by_key(|&(id, ..)| ended.iter().position(|&(other, ..)| other == id));
        assert_eq!(ended, due, "at {:?}", self.now);
    }

    fn take_commands(&mut self) {
        while let Some(command) = self.machine.poll_command() {
            assert_eq!(command.kind, CommandKind::Topology, "{command:?}");
            self.begin(&command);
        }
    }

    fn begin(&mut self, command: &Command) {
        assert!(self.flight.is_none(), "J1: {command:?} beside {:?}", self.flight);
        self.attempts_start_when_the_policy_says();
        let failures = usize::try_from(self.failed).unwrap();
        let latency = self.story.attempts.get(failures).map_or(7, |&(_, latency)| latency);
        let lands = self.now.after(Duration::from_millis(latency));
        let is_probe = self.is_probe();
        self.flight = Some(Attempt { ticket: command.ticket, started: self.now, lands, is_probe });
    }

    /// Whether the next attempt is one for nobody.
    fn is_probe(&self) -> bool {
        self.spent.is_some() && self.waiting.is_empty()
    }

    /// J3: from start to start, the back-off of the last failure; or as soon as that attempt is over.
    fn attempts_start_when_the_policy_says(&self) {
        let Some(last) = self.last else {
            return assert_eq!(self.now, Tick::ZERO);
        };
        let policy = &self.story.policy;
        let back_off = self.back_off();
        let (mut least, mut most) = (back_off * (1.0 - policy.jitter), back_off);
        let is_probe = self.is_probe();
        if last.is_probe {
            (least, most) = (policy.interval_s, policy.interval_s);
        } else if policy.per_cycle && !is_probe {
            return assert!(self.polling, "the poll after a failure starts the next attempt");
        }
        let cooled =
            if is_probe { self.spent.unwrap().after(seconds(policy.cooldown_s)) } else { Tick::ZERO };
        let bound = |gap: f64| last.started.after(seconds(gap)).max(cooled).max(last.lands);
        let (least, most) = (bound(least), bound(most));
        assert!((least..=most).contains(&self.now), "{:?} is not {least:?} to {most:?}", self.now);
    }

    /// It grows by its factor with each failure, up to the cap.
    fn back_off(&self) -> f64 {
        let RetryPolicy { interval_s, multiplier, max_interval_s, .. } = self.story.policy;
        let grown = (1..self.failed).fold(interval_s, |interval, _| interval * multiplier);
        grown.min(max_interval_s)
    }

    fn land(&mut self) {
        let attempt = self.flight.take().unwrap();
        let failures = usize::try_from(self.failed).unwrap();
        let trouble = self.story.attempts.get(failures).map(|&(trouble, _)| trouble);
        let (now, ticket) = (self.now, attempt.ticket);
        match trouble {
            Some(Trouble::Error(error)) => self.machine.on_error(now, ticket, error, "it broke"),
            Some(Trouble::NotReady) => self.machine.on_response(now, ticket, 503, b"", Headers::default()),
            Some(Trouble::Junk) => self.machine.on_response(now, ticket, 200, b"<html>", Headers::default()),
            Some(Trouble::OldAndNotReady) => {
                self.machine.on_response(now, ticket, 400, b"", Headers::default());
                let older = self.machine.poll_command().expect("the older form is asked at once");
                assert!(older.path.contains("engine_rank=-1"), "{older:?}");
                self.machine.on_response(now, older.ticket, 503, b"", Headers::default());
            }
            None => {
                self.answered = true;
                let body = TOPOLOGIES[0].body.as_bytes();
                return self.machine.on_response(now, ticket, 200, body, Headers::default());
            }
        }
        self.last = Some(attempt);
        self.fail(trouble.unwrap().kind());
        self.take_commands();
    }

    fn fail(&mut self, kind: FailureKind) {
        let policy = self.story.policy;
        self.failed += 1;
        if self.failed < policy.max_attempts {
            return;
        }
        self.spent.get_or_insert(self.now);
        let (now, failed) = (self.now, self.failed);
        let over = |&&(_, added): &&Waiting| now.since(added) >= seconds(policy.min_wait_s);
        self.due.extend(self.waiting.iter().filter(over).map(|&(id, _)| (id, kind, failed)));
        self.waiting.retain(|waiting| !over(&waiting));
    }

    /// J4: the last attempt's success admits all that still wait, and newcomers too.
    fn everybody_is_placed(&mut self) {
        self.add_one_more();
        while let Some(command) = self.machine.poll_command() {
            let body = match command.kind {
                CommandKind::Endpoint => r#"{"rank_ip":"10.9.9.9","rank_port":41000}"#,
                CommandKind::Topology => TOPOLOGIES[0].body,
                CommandKind::Heartbeat | CommandKind::DpRanks | CommandKind::Cancel => {
                    panic!("{command:?}")
                }
            };
            self.machine.on_response(self.now, command.ticket, 200, body.as_bytes(), Headers::default());
        }
        let step = self.machine.poll(self.now, usize::MAX);
        let routed = step.ended.iter().filter(|(_, outcome)| matches!(outcome, Outcome::Routed(_)));
        let routed: Vec<RequestId> = routed.map(|&(id, _)| id).collect();
        assert_eq!(routed, self.waiting.iter().map(|&(id, _)| id).collect::<Vec<_>>(), "{step:?}");
        assert_eq!(step.ended.len(), routed.len() + self.due.len(), "{step:?}");
    }

    fn add_one_more(&mut self) {
        let added = self.machine.add(self.now, ADDR, Room::new(1 << 40).unwrap(), None);
        let Ok(Added::Pending(id)) = added else { panic!("{added:?}") };
        self.waiting.push((id, self.now));
    }
}

impl Trouble {
    fn kind(self) -> FailureKind {
        match self {
            Self::Error(error) => match class_of_error(error) {
                Class::Transient(kind) => kind,
                other => unreachable!("{other:?}"),
            },
            Self::NotReady | Self::OldAndNotReady => FailureKind::NotReady,
            Self::Junk => FailureKind::ProtocolError,
        }
    }
}

fn millis(number: u64) -> Tick {
    Tick::ZERO.after(Duration::from_millis(number))
}

fn seconds(number: f64) -> Duration {
    disagg_core::retry::seconds(number)
}

const ADDR: &str = "10.0.0.1:8998";
