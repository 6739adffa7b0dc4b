//! Bookkeeping of what goes in and comes out, with the laws that must hold between the two.

mod clock;
mod commands;
mod ends;
mod facts;
mod peers;
mod requests;
mod routes;
mod told;

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use disagg_core::failure::FailureKind;
use disagg_core::ids::{RequestId, Ticket};
use disagg_core::pending::{CommandKind, EventKind, Stats};
use disagg_core::retry::seconds;
use disagg_core::time::Tick;

use crate::setup::Setup;
use clock::Lived;
use peers::{Flight, Peer};
use requests::Request;
use routes::Routes;

/// What must be so, from all that happened so far.
pub struct Oracle {
    setup: Setup,
    clock: Lived,
    pub held: Vec<Request>,
    /// Requests that ended or were discarded.
    pub gone: Vec<RequestId>,
    pub flights: BTreeMap<Ticket, Flight>,
    /// Tickets that were answered or cancelled.
    pub spent: Vec<Ticket>,
    peers: BTreeMap<String, Peer>,
    routes: Routes,
    /// Rooms of routed requests, when they are tracked, and where they are.
    tracked: BTreeMap<u64, String>,
    tombstones: BTreeMap<u64, Tombstone>,
    dead: Option<(FailureKind, String)>,
    /// What the next step has to tell.
    events: Vec<(EventKind, String, Vec<u64>)>,
    last_ticket: Ticket,
    last_seq: u64,
    last_step: u64,
    http: [u64; 4],
    timers_called: Tick,
    /// Rooms that waited, and where, since the network stopped to take commands: those may still be asked for.
    waited: BTreeSet<(String, u64)>,
    /// It cannot be told which address the machine forgot, as nobody outside can tell a decided request from an
    /// undecided one. What depends on the peers is not judged from then on; rare.
    pub unsure: bool,
}

/// A room that was told failed before its request came.
struct Tombstone {
    reason: String,
    status: u16,
    until: Tick,
}

impl Oracle {
    pub fn new(setup: &Setup) -> Self {
        Self {
            setup: setup.clone(),
            clock: Lived::new(),
            held: Vec::new(),
            gone: Vec::new(),
            flights: BTreeMap::new(),
            spent: Vec::new(),
            peers: BTreeMap::new(),
            routes: Routes::default(),
            tracked: BTreeMap::new(),
            tombstones: BTreeMap::new(),
            dead: None,
            events: Vec::new(),
            last_ticket: Ticket(0),
            last_seq: 0,
            last_step: 0,
            http: [0; 4],
            timers_called: Tick::ZERO,
            waited: BTreeSet::new(),
            unsure: false,
        }
    }

    /// The port that a peer which is the same as before gives again.
    pub fn known_port(&self, flight: &Flight) -> Option<u16> {
        flight.is_check().then(|| self.routes.port(flight)).flatten()
    }

    pub fn pass(&mut self, to: Tick) {
        self.clock.pass(to);
    }

    pub fn now(&self) -> Tick {
        self.clock.now
    }

    /// What the machine says it holds is what it was given and has not given back.
    pub fn check_counts(&self, stats: &Stats, all_commands_taken: bool) {
        let undecided = stats.need_info + stats.need_dp_rank + stats.need_endpoints;
        assert_eq!(undecided + stats.decided, self.held.len(), "{stats:?}");
        let due = self.held.iter().filter(|request| request.due).count();
        assert!(stats.decided >= due, "{due} are decided at least: {stats:?}");
        let owners = self.held.iter().filter(|request| request.owns_room).count();
        assert_eq!(stats.rooms, owners + self.tracked.len(), "{stats:?}");
        assert_eq!(stats.tombstones, self.tombstones.len(), "{stats:?}");
        let stages = [stats.need_info, stats.need_dp_rank, stats.need_endpoints];
        for (waiting, age) in stages.into_iter().zip(stats.oldest) {
            assert!(waiting > 0 || age.is_zero(), "{stats:?}");
        }
        assert!(stats.attempts_failed <= stats.attempts, "{stats:?}");
        let [_, fetching, waiting, ready, _] = stats.peers;
        assert!(stats.need_info == 0 || fetching + waiting > 0, "nobody asks for them: {stats:?}");
        assert!(undecided == stats.need_info || ready > 0, "nobody asks for them: {stats:?}");
        let known: usize = stats.peers.iter().sum();
        assert!(known <= usize::try_from(self.setup.options.max_addresses).unwrap(), "{stats:?}");
        if all_commands_taken {
            // Also says that each flight that was abandoned was cancelled.
            assert_eq!(stats.in_flight, self.flights.len(), "{stats:?} {:?}", self.flights);
            assert_eq!(stats.http, self.http, "{stats:?}");
        }
        if !self.unsure {
            assert_eq!(known, self.peers.len(), "{stats:?}, known are {:?}", self.peers.keys());
            let ready = self.peers.values().filter(|peer| peer.ready.is_some()).count();
            assert_eq!(stats.peers[3], ready, "ready peers: {stats:?}, {:?}", self.peers);
        }
    }

    /// Everything went back to the start but the counters.
    pub fn check_nothing_is_left(&self, stats: &Stats) {
        let counters = Stats {
            tombstones: self.tombstones.len(),
            http: stats.http,
            attempts: stats.attempts,
            attempts_failed: stats.attempts_failed,
            evictions: stats.evictions,
            ..Stats::default()
        };
        assert_eq!(*stats, counters);
        assert!(self.held.is_empty() && self.flights.is_empty());
    }

    /// Timers were called: addresses that nobody asked for in a long time are forgotten.
    pub fn after_timers(&mut self, stats: &Stats) {
        self.timers_called = self.now();
        if self.unsure {
            return;
        }
        let ttl = seconds(self.setup.options.peer_ttl_s);
        let old: Vec<String> = self.known_where(|peer| peer.last_add.after(ttl) <= self.clock.now);
        let unused: Vec<String> = old.iter().filter(|addr| !self.has_held(addr)).cloned().collect();
        let known: usize = stats.peers.iter().sum();
        let forgotten = self.peers.len() - known;
        assert!(forgotten >= unused.len(), "unused addresses are forgotten after their time: {unused:?}");
        let which = if forgotten == unused.len() { unused } else { old };
        self.unsure = forgotten != which.len();
        for addr in which {
            self.peers.remove(&addr);
        }
    }

    /// Somebody else took the place of the longest unused address that is not ready.
    fn evict(&mut self) {
        let idle = self.known_where(|peer| peer.ready.is_none());
        let victim = |addrs: &mut dyn Iterator<Item = &String>| {
            addrs.min_by_key(|addr| (self.peers[*addr].last_add, (*addr).clone())).cloned()
        };
        let unused = victim(&mut idle.iter().filter(|addr| !self.has_held(addr)));
        let any = victim(&mut idle.iter());
        self.unsure |= unused != any || any.is_none();
        if let (Some(addr), false) = (any, self.unsure) {
            self.peers.remove(&addr);
        }
    }

    fn known_where(&self, test: impl Fn(&Peer) -> bool) -> Vec<String> {
        self.peers.iter().filter(|(_, peer)| test(peer)).map(|(addr, _)| addr.clone()).collect()
    }

    fn has_held(&self, addr: &str) -> bool {
        self.held.iter().any(|request| request.addr == addr && request.owns_room)
    }

    /// How long a request has waited on the scheduler's clock.
    fn age(&self, request: &Request) -> Duration {
        self.clock.read() - request.added
    }

    fn flights_of(&self, addr: &str, kinds: &[CommandKind]) -> usize {
        let its = |flight: &&Flight| flight.addr == addr && kinds.contains(&flight.kind);
        self.flights.values().filter(its).count()
    }
}
