//! What the machine may ask of whom, and when.

use core::time::Duration;

use disagg_core::ids::Ticket;
use disagg_core::pending::{Command, CommandKind};
use disagg_core::retry::{RetryPolicy, seconds};
use disagg_core::time::Tick;

use super::Oracle;
use super::peers::Flight;
use crate::setup::{SPELLINGS, TOPOLOGIES};

impl Oracle {
    pub fn on_command(&mut self, command: &Command) {
        if command.kind == CommandKind::Cancel {
            return self.only_flights_are_cancelled(command.ticket);
        }
        assert!(self.dead.is_none(), "nobody is asked after the end: {command:?}");
        assert!(command.ticket > self.last_ticket, "tickets are never used again: {command:?}");
        self.last_ticket = command.ticket;
        let place = CommandKind::HTTP.iter().position(|&kind| kind == command.kind).unwrap();
        self.http[place] += 1;
        self.only_known_addresses_are_asked(command);
        self.begin_flight(command);
        self.one_question_of_a_kind_is_in_flight(&command.addr);
        if self.unsure {
            return;
        }
        match command.kind {
            CommandKind::DpRanks => self.queries_ask_for_rooms_that_wait_and_are_spaced(command),
            CommandKind::Endpoint => self.failed_lookups_are_spaced(command),
            CommandKind::Topology | CommandKind::Heartbeat => self.attempts_are_spaced(command),
            CommandKind::Cancel => {}
        }
    }

    /// The network takes no commands for a while.
    pub fn on_deaf(&mut self) {
        self.waited = self.waiting().collect();
    }

    /// It has taken all that there were.
    pub fn after_commands(&mut self) {
        self.waited.clear();
    }

    /// Attempts, probes, and reads of the topology in flight.
    fn reads_of(&self, addr: &str) -> usize {
        let kinds = [CommandKind::Topology, CommandKind::Heartbeat];
        let its = self.flights.values().filter(|it| it.addr == addr && kinds.contains(&it.kind));
        its.filter(|it| !it.is_check()).count()
    }

    fn waiting(&self) -> impl Iterator<Item = (String, u64)> {
        let waiting = self.held.iter().filter(|it| it.owns_room && !it.due && it.preset.is_none());
        waiting.map(|it| (it.addr.clone(), it.room))
    }

    /// J5: whom requests wait for is asked something or will be soon, and who is ready is looked at now and then.
    /// Called when timers were called and all that had ended was taken, so that what is held is undecided.
    pub fn something_is_under_way(&self, next_timer: Option<Tick>) {
        if self.unsure || self.timers_called < self.now() {
            return;
        }
        let RetryPolicy { interval_s, max_interval_s, .. } = self.setup.policy;
        for (addr, peer) in &self.peers {
            let mut within_s = Vec::new();
            if peer.ready.is_some() && self.reads_of(addr) == 0 {
                within_s.push(self.setup.options.heartbeat_interval_s);
            }
            if self.has_held(addr) && self.flights_of(addr, &CommandKind::HTTP) == 0 {
                // A room is asked for each second, a failed query or look-up after an interval.
                let most_s = if peer.ready.is_some() { 1.0 } else { 2.0 * max_interval_s };
                within_s.push(most_s.max(interval_s));
            }
            for within_s in within_s {
                let soon = next_timer.is_some_and(|next| next <= self.now().after(seconds(within_s)));
                assert!(soon, "nothing happens to {addr} within {within_s} s: {next_timer:?} {peer:?}");
            }
        }
    }

    /// J1: a cancellation is of something that the transport has.
    fn only_flights_are_cancelled(&mut self, ticket: Ticket) {
        assert!(self.flights.remove(&ticket).is_some(), "{ticket:?} is cancelled and not in flight");
        self.spent.push(ticket);
    }

    /// J1: nobody is asked whom no request named.
    fn only_known_addresses_are_asked(&self, command: &Command) {
        assert!(SPELLINGS.iter().any(|spellings| *spellings[0] == *command.addr), "{command:?}");
        assert!(self.unsure || self.peers.contains_key(&*command.addr), "{command:?}");
    }

    fn begin_flight(&mut self, command: &Command) {
        let body = command.body.as_deref().map(|body| String::from_utf8(body.to_vec()).unwrap());
        let rooms = body.as_deref().map(rooms_of).unwrap_or_default();
        let peer = self.peers.get(&*command.addr);
        let life = peer.and_then(|peer| Some(peer.ready.as_ref()?.life));
        let flight = Flight {
            ticket: command.ticket,
            kind: command.kind,
            addr: command.addr.to_string(),
            path: command.path.clone(),
            rooms,
            started: self.now(),
            life,
        };
        let is_attempt = command.kind == CommandKind::Topology;
        assert!(self.unsure || life.is_some() || is_attempt, "it is not ready: {command:?}");
        self.flights.insert(command.ticket, flight);
    }

    /// J1: at most one attempt, probe or read, at most one dp-rank query and one look-up that checks, and as many
    /// look-ups as are allowed.
    fn one_question_of_a_kind_is_in_flight(&self, addr: &str) {
        let most = usize::try_from(self.setup.options.max_endpoint_lookups_per_peer).unwrap();
        for (kinds, most) in [
            (&[CommandKind::Topology][..], 1),
            (&[CommandKind::DpRanks], 1),
            (&[CommandKind::Endpoint], most),
        ] {
            assert!(self.flights_of(addr, kinds) <= most, "{kinds:?} at {addr}: {:?}", self.flights);
        }
        let checks =
            self.flights_of(addr, &[CommandKind::Topology, CommandKind::Heartbeat]) - self.reads_of(addr);
        assert!(self.reads_of(addr) <= 1 && checks <= 1, "reads at {addr}: {:?}", self.flights);
    }

    /// J3: attempts and probes start as far apart as the policy says; the older form belongs to the same attempt.
    /// The exact gaps are the business of the test of retries.
    fn attempts_are_spaced(&mut self, command: &Command) {
        let (now, per_cycle) = (self.now(), self.setup.policy.per_cycle);
        let flight = self.flights.get_mut(&command.ticket).unwrap();
        let peer = self.peers.get_mut(&*command.addr).unwrap();
        if flight.is_check() {
            let ready = peer.ready.as_ref().expect("only a ready peer has cached endpoints");
            return assert!(ready.instance.is_none(), "its restart shows in the instance: {command:?}");
        }
        if flight.life.is_some() {
            if command.kind == CommandKind::Topology {
                let not_before = peer.paced.get("read").copied().unwrap_or_default();
                assert!(now >= not_before, "a read follows a failed one too early: {command:?}");
            }
            return;
        }
        if flight.is_older_form() {
            let started = peer.older_form.take();
            flight.started = started.expect("the older form follows the newer form only, and once");
            return;
        }
        let released = per_cycle && !peer.failed_since_poll;
        assert!(now >= peer.not_before || released, "{now:?} is before {:?}: {command:?}", peer.not_before);
    }

    /// J3: two queries start 20 ms apart, after a failed one more, those for one room ever farther; and they ask for
    /// what is pending there.
    fn queries_ask_for_rooms_that_wait_and_are_spaced(&mut self, command: &Command) {
        let flight = &self.flights[&command.ticket];
        assert!(!flight.rooms.is_empty(), "{command:?}");
        for &room in &flight.rooms {
            let place = (command.addr.to_string(), room);
            let waits = self.waited.contains(&place) || self.waiting().any(|waiting| waiting == place);
            assert!(waits, "nobody waits there for room {room}: {command:?}");
        }
        let now = self.now();
        for request in self.held.iter_mut().filter(|it| it.owns_room && flight.rooms.contains(&it.room)) {
            let Some(stages) = request.stages.as_mut().filter(|_| request.addr == *command.addr) else {
                continue;
            };
            stages.asked += 1;
            assert!(now >= stages.next_ask, "{now:?} is before {:?}: {command:?}", stages.next_ask);
        }
        let peer = self.peers.get_mut(&*command.addr).unwrap();
        let not_before = peer.paced.insert("query".into(), now.after(QUERY_GAP)).unwrap_or_default();
        assert!(now >= not_before, "{now:?} is before {not_before:?}: {command:?}");
    }

    /// J3: a look-up that failed is not asked again at once.
    fn failed_lookups_are_spaced(&mut self, command: &Command) {
        let now = self.now();
        let peer = self.peers.get_mut(&*command.addr).unwrap();
        let not_before = peer.paced.remove(&command.path).unwrap_or_default();
        assert!(now >= not_before, "{now:?} is before {not_before:?}: {command:?}");
        let ready = peer.ready.as_ref().unwrap();
        let flight = &self.flights[&command.ticket];
        let below = (0..TOPOLOGIES[ready.topology].dp_size).any(|dp| flight.is_of_dp_rank(dp));
        assert!(below, "there is no such dp rank: {command:?}");
    }
}

fn rooms_of(body: &str) -> Vec<u64> {
    let list = body.strip_prefix("{\"bootstrap_rooms\":[").and_then(|rest| rest.strip_suffix("]}"));
    list.unwrap_or_else(|| panic!("{body}")).split(',').map(|room| room.parse().unwrap()).collect()
}

pub const QUERY_GAP: Duration = Duration::from_millis(20);
