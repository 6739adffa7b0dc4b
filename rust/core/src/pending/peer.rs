//! One bootstrap address: what is kept of it in each state.

use alloc::collections::BTreeSet;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;

use hashbrown::HashMap;

use super::endpoints::Wanted;
use super::headers::{Features, Identity};
use super::peer_state::{PeerEvent, PeerState};
use super::route::{Endpoint, Route};
use super::slots::{Ask, Form, List};
use crate::answer::Dialect;
use crate::failure::{Failure, FailureKind};
use crate::ids::Ticket;
use crate::rank_mapping::{Contact, RankMapping};
use crate::time::Tick;
use crate::topology::PrefillInfo;

/// What is kept per address in every state.
#[derive(Debug)]
pub(super) struct Peer {
    pub addr: Arc<str>,
    state: PeerState,
    pub last_add: Tick,
    pub dialect: Dialect,
    pub budget: Budget,
    /// The attempt or probe in flight.
    pub fetch: Option<Ticket>,
    pub identity: Identity,
    pub epoch: u64,
    /// A restart before this instant is followed by a pause.
    pub restart_not_before: Tick,
    /// Restarts since it last gave a route.
    pub restarts: u32,
    /// Whether `PeerLost` was told and `PeerBack` was not yet.
    pub lost: bool,
    /// Whether it was ready once, so that what is odd about it was noted.
    pub was_ready: bool,
    /// Requests that wait for the topology.
    pub need_info: List,
    /// Undecided requests in all stages.
    pub pending: u32,
    /// The instant at which the timer heap will wake this peer.
    pub wake: Option<Tick>,
}

/// How often an address was tried since it last answered.
#[derive(Debug, Default)]
pub(super) struct Budget {
    /// Attempts that failed.
    pub failed: u32,
    pub last_error: Option<(FailureKind, String)>,
    /// Since when the budget is spent, and what newcomers are told.
    pub spent: Option<(Tick, Arc<Failure>)>,
    /// The budget ran out while the scheduler stood still: the next poll decides.
    pub deferred: bool,
}

/// What is kept of a ready peer: all of one epoch, dropped as one.
#[derive(Debug)]
pub(super) struct Ready {
    pub info: Arc<PrefillInfo>,
    pub mapping: Arc<RankMapping>,
    pub features: Features,
    /// The ranks to contact, in contact order.
    pub contacts: Vec<Contact>,
    pub query: Query,
    pub read: Read,
    pub groups: HashMap<u32, Group>,
    /// (creation number, dp rank) of the groups with look-ups to start.
    pub looking: BTreeSet<(u64, u32)>,
    /// (due, dp rank) of the groups that wait after a failed look-up.
    pub waiting: BTreeSet<(Tick, u32)>,
    /// dp ranks of the groups that need a read of the topology.
    pub reading: BTreeSet<u32>,
    pub lookups_in_flight: u32,
    pub groups_created: u64,
}

/// The dp-rank queries of a peer.
///
/// A room is asked for at once, and while the peer does not know it 20, 40, ... ms and at most 1 s after it was
/// asked for last; one query is in flight at a time, and two start at least 20 ms apart.
///
/// A peer with `wait-query` is asked for all of them by one query that it answers when it knows one; beside it the plain
/// query goes on, for rooms that came later. A waiting query that failed may have been cut by something on the way, for
/// it takes long: plain ones follow until one is answered, and the second time in a row for the rest of this life.
#[derive(Debug)]
pub(super) struct Query {
    pub plain: Sent,
    pub waiting: Sent,
    pub not_before: Tick,
    pub error: String,
    /// Rooms by how often they were unknown, each list in order of when it is their turn.
    pub turns: [List; TURNS],
    /// Rooms left over of a waiting query that had many.
    pub left: List,
    pub failed: List,
    /// Waiting queries that failed in a row.
    pub waits_failed: u8,
    /// Whether only plain queries are sent, until one is answered.
    pub plainly: bool,
}

/// The query of one form that is in flight, and its rooms.
#[derive(Debug)]
pub(super) struct Sent {
    pub ticket: Option<Ticket>,
    pub rooms: List,
}

/// Reads of a ready peer's topology: heartbeats, and confirmations after look-ups.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub in_flight: Option<Ticket>,
    /// The look-up of a cached endpoint in flight, and how many there were.
    pub check: Option<Ticket>,
    pub checks: u32,
    pub not_before: Tick,
    pub next_heartbeat: Tick,
    pub missed: u32,
    pub missed_since: Tick,
}

/// The endpoints of one dp rank in one epoch.
#[derive(Debug)]
pub(super) struct Group {
    pub created: u64,
    pub state: GroupState,
    pub found: Vec<Option<Endpoint>>,
    /// What is to be looked up, the next one last.
    pub wanted: Vec<Wanted>,
    pub in_flight: Vec<Ticket>,
    /// A rank was not found once; the next time it is missing.
    pub not_found: bool,
    pub last_error: String,
    /// Requests that wait for this dp rank.
    pub waiters: List,
}

/// ```text
///   Looking ── all found ──► Reading ── unchanged ──► Ready
///    ▲   │ failed               ▲  │ unchanged, but ranks are wanted: Looking
///    │   ▼                      │
///   Waiting(until)   a rank is not found: Reading, the second time Waiting
/// ```
#[derive(Debug)]
pub(super) enum GroupState {
    /// Look-ups are wanted or in flight.
    Looking,
    /// A look-up failed; go on at `until`.
    Waiting { until: Tick },
    /// The topology has to be read by a read whose ticket is at least `from`.
    Reading { from: Ticket },
    /// Everything is here.
    Ready(Arc<Route>),
}

/// Lists by how often a room was unknown: never, once (20 ms), ... seven times or more (1 s).
pub(super) const TURNS: usize = 8;

impl Peer {
    pub fn new(addr: Arc<str>, now: Tick) -> Self {
        Self {
            addr,
            state: PeerState::Unknown,
            last_add: now,
            dialect: Dialect::E3,
            budget: Budget::default(),
            fetch: None,
            identity: Identity::default(),
            epoch: 0,
            restart_not_before: Tick::ZERO,
            restarts: 0,
            lost: false,
            was_ready: false,
            need_info: List::EMPTY,
            pending: 0,
            wake: None,
        }
    }

    pub fn state(&self) -> &PeerState {
        &self.state
    }

    /// Let something happen to it; returns the state before.
    pub fn on(&mut self, event: PeerEvent) -> PeerState {
        let next = self.state.after(event);
        core::mem::replace(&mut self.state, next)
    }

    pub fn ready(&self) -> Option<&Ready> {
        match &self.state {
            PeerState::Ready(ready) => Some(ready),
            PeerState::Unknown
            | PeerState::Fetching
            | PeerState::Waiting { .. }
            | PeerState::Marked { .. } => None,
        }
    }

    pub fn ready_mut(&mut self) -> Option<&mut Ready> {
        match &mut self.state {
            PeerState::Ready(ready) => Some(ready),
            PeerState::Unknown
            | PeerState::Fetching
            | PeerState::Waiting { .. }
            | PeerState::Marked { .. } => None,
        }
    }

    /// What a request is told that comes now, if it has to fail at once.
    pub fn refusal(&self) -> Option<&Arc<Failure>> {
        match &self.state {
            PeerState::Marked { failure, .. } => Some(failure),
            PeerState::Unknown | PeerState::Fetching | PeerState::Waiting { .. } | PeerState::Ready(_) => {
                self.budget.spent.as_ref().map(|(_, failure)| failure)
            }
        }
    }
}

impl Ready {
    pub fn new(
        info: PrefillInfo,
        mapping: RankMapping,
        contacts: Vec<Contact>,
        features: Features,
        next_heartbeat: Tick,
    ) -> Self {
        Self {
            info: Arc::new(info),
            mapping: Arc::new(mapping),
            contacts,
            features,
            query: Query::new(),
            read: Read { next_heartbeat, ..Read::default() },
            groups: HashMap::new(),
            looking: BTreeSet::new(),
            waiting: BTreeSet::new(),
            reading: BTreeSet::new(),
            lookups_in_flight: 0,
            groups_created: 0,
        }
    }

    /// Move a group to a state, keeping the indexes of groups by state true.
    pub fn set_group(&mut self, dp_rank: u32, state: GroupState) {
        let Some(group) = self.groups.get_mut(&dp_rank) else {
            return;
        };
        match &group.state {
            GroupState::Looking => self.looking.remove(&(group.created, dp_rank)),
            GroupState::Waiting { until } => self.waiting.remove(&(*until, dp_rank)),
            GroupState::Reading { .. } => self.reading.remove(&dp_rank),
            GroupState::Ready(_) => false,
        };
        match &state {
            GroupState::Looking => self.looking.insert((group.created, dp_rank)),
            GroupState::Waiting { until } => self.waiting.insert((*until, dp_rank)),
            GroupState::Reading { .. } => self.reading.insert(dp_rank),
            GroupState::Ready(_) => false,
        };
        group.state = state;
    }

    /// A new group with everything to look up; replaces nothing.
    pub fn create_group(&mut self, dp_rank: u32) {
        self.groups_created += 1;
        let count = crate::ids::number(self.contacts.len());
        let group = Group {
            created: self.groups_created,
            state: GroupState::Looking,
            found: (0..count).map(|_| None).collect(),
            wanted: self.everything_wanted(),
            in_flight: Vec::new(),
            not_found: false,
            last_error: String::new(),
            waiters: List::EMPTY,
        };
        self.looking.insert((group.created, dp_rank));
        self.groups.insert(dp_rank, group);
    }

    /// Take a group out of the maps; its waiters and requests in flight are the caller's to end.
    pub fn remove_group(&mut self, dp_rank: u32) -> Option<Group> {
        let group = self.groups.remove(&dp_rank)?;
        self.looking.remove(&(group.created, dp_rank));
        if let GroupState::Waiting { until } = group.state {
            self.waiting.remove(&(until, dp_rank));
        }
        self.reading.remove(&dp_rank);
        Some(group)
    }
}

impl Query {
    fn new() -> Self {
        Self {
            plain: Sent::NOTHING,
            waiting: Sent::NOTHING,
            not_before: Tick::ZERO,
            error: String::new(),
            turns: [List::EMPTY; TURNS],
            left: List::EMPTY,
            failed: List::EMPTY,
            waits_failed: 0,
            plainly: false,
        }
    }

    pub fn list_mut(&mut self, ask: Ask) -> &mut List {
        match ask {
            Ask::Turn(turn) => {
                let Some(list) = self.turns.get_mut(usize::from(turn)) else {
                    unreachable!("turns are made by `Query::turn_after`")
                };
                list
            }
            Ask::Left => &mut self.left,
            Ask::Failed => &mut self.failed,
            Ask::Sent(form) => &mut self.sent_mut(form).rooms,
        }
    }

    pub fn sent(&self, form: Form) -> &Sent {
        match form {
            Form::Plain => &self.plain,
            Form::Waiting => &self.waiting,
        }
    }

    pub fn sent_mut(&mut self, form: Form) -> &mut Sent {
        match form {
            Form::Plain => &mut self.plain,
            Form::Waiting => &mut self.waiting,
        }
    }

    /// The list for a room that was asked for `asked` times and is unknown.
    pub fn turn_after(asked: u32) -> Ask {
        Ask::Turn(u8::try_from(asked).map_or(LAST_TURN, |asked| asked.min(LAST_TURN)))
    }

    /// The lists that wait for their turn.
    pub fn unsent(&self) -> impl Iterator<Item = &List> {
        self.turns.iter().chain([&self.left, &self.failed])
    }
}

impl Sent {
    const NOTHING: Self = Self { ticket: None, rooms: List::EMPTY };
}

const LAST_TURN: u8 = 7;
