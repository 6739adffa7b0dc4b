//! What follows from what peers answer.

use core::time::Duration;

use disagg_core::failure::FailureKind;
use disagg_core::ids::Ticket;
use disagg_core::pending::{CommandKind, EventKind};
use disagg_core::retry::seconds;

use super::Oracle;
use super::commands::QUERY_GAP;
use super::peers::{Flight, Ready};
use super::requests::Request;
use crate::replies::{Answer, Class, Says};
use crate::setup::TOPOLOGIES;

impl Oracle {
    /// The flight of a ticket that is about to be answered.
    pub fn land(&mut self, ticket: Ticket) -> Flight {
        self.spent.push(ticket);
        self.flights.remove(&ticket).expect("the script answers what is in flight")
    }

    /// An answer came; `decided` requests more are decided since.
    pub fn on_answer(
        &mut self,
        flight: &Flight,
        answer: &Answer,
        instance: Option<&'static str>,
        decided: usize,
    ) {
        let instance = instance.filter(|text| text.len() <= 256);
        if self.unsure {
            return;
        }
        let class = answer.class(flight.is_older_form(), self.setup.options.not_found_is_transient);
        match flight.kind {
            CommandKind::Topology | CommandKind::Heartbeat if !flight.is_check() => {
                self.on_topology(flight, class, instance, decided);
            }
            _ if self.is_other(&flight.addr, instance) => self.restart(&flight.addr),
            CommandKind::Topology | CommandKind::Heartbeat => self.on_check(flight, answer),
            CommandKind::DpRanks => self.on_ranks(flight, answer),
            CommandKind::Endpoint => self.on_endpoint(flight, answer),
            CommandKind::Cancel => unreachable!("a cancellation is not in flight"),
        }
    }

    /// No whole answer came.
    pub fn on_error(&mut self, flight: &Flight, class: Class, decided: usize) {
        if self.unsure {
            return;
        }
        match flight.kind {
            CommandKind::Heartbeat if flight.is_check() => {}
            CommandKind::Topology | CommandKind::Heartbeat => self.on_topology(flight, class, None, decided),
            CommandKind::DpRanks => self.pace("query", flight),
            CommandKind::Endpoint => self.pace(&flight.path, flight),
            CommandKind::Cancel => unreachable!("a cancellation is not in flight"),
        }
    }

    fn on_topology(&mut self, flight: &Flight, class: Class, instance: Option<&'static str>, decided: usize) {
        let addr = flight.addr.as_str();
        if flight.life.is_some() {
            return match class {
                Class::Good(topology) => self.on_read(flight, topology, instance),
                Class::AskOlderForm | Class::Permanent | Class::Transient(_) => self.read_failed(flight),
            };
        }
        match class {
            Class::Good(topology) => self.become_ready(addr, topology, instance),
            Class::AskOlderForm => {
                self.peers.get_mut(addr).unwrap().older_form = Some(flight.started);
            }
            Class::Permanent => self.refuse(addr, FailureKind::NotARegistry),
            Class::Transient(kind) => {
                self.nothing_is_given_up_while_the_scheduler_stands_still(decided);
                let (policy, peer) = (self.setup.policy, self.peers.get_mut(addr).unwrap());
                peer.attempt_failed(&policy, flight.started);
                self.may_fail(addr, kind);
            }
        }
    }

    /// J4: a budget that is spent while the scheduler stands still is looked at by the next poll.
    fn nothing_is_given_up_while_the_scheduler_stands_still(&self, decided: usize) {
        assert!(decided == 0 || !self.clock.stands_still(), "{decided} were given up while it stood still");
    }

    fn become_ready(&mut self, addr: &str, topology: usize, instance: Option<&'static str>) {
        if !TOPOLOGIES[topology].fits {
            return self.refuse(addr, FailureKind::Incompatible);
        }
        let life = self.routes.begin_life(addr, self.peers[addr].met, topology);
        if self.peers[addr].lost {
            self.tell(EventKind::PeerBack, addr);
        }
        self.peers.get_mut(addr).unwrap().become_ready(life, topology, instance);
        let since = self.clock.read();
        self.held_at(addr).for_each(|request| request.begin_stages(since));
    }

    fn held_at(&mut self, addr: &str) -> impl Iterator<Item = &mut Request> {
        self.held.iter_mut().filter(move |request| request.addr == addr && request.owns_room)
    }

    /// J7: all that wait for a peer that refuses end with that, in the next step.
    fn refuse(&mut self, addr: &str, kind: FailureKind) {
        let (policy, now) = (self.setup.policy, self.now());
        self.peers.get_mut(addr).unwrap().refuse(&policy, kind, now);
        self.must_end(addr, kind);
    }

    pub(super) fn lose(&mut self, addr: &str) {
        self.tell(EventKind::PeerLost, addr);
        let (policy, now) = (self.setup.policy, self.now());
        self.peers.get_mut(addr).unwrap().lose(&policy, now);
        self.must_end(addr, FailureKind::PeerLost);
    }

    fn may_fail(&mut self, addr: &str, kind: FailureKind) {
        let failed = self.peers[addr].failed;
        for request in self.held_at(addr) {
            request.ceiling = request.ceiling.max(failed);
            request.may_fail_with(kind);
        }
    }

    pub(super) fn must_end(&mut self, addr: &str, kind: FailureKind) {
        self.may_fail(addr, kind);
        for request in self.held_at(addr) {
            request.due = true;
            request.stages = None;
        }
    }

    fn on_read(&mut self, flight: &Flight, topology: usize, instance: Option<&'static str>) {
        let addr = flight.addr.as_str();
        let other = self.is_other(addr, instance);
        let (policy, now) = (self.setup.policy, self.now());
        let peer = self.peers.get_mut(addr).unwrap();
        peer.paced.remove("read");
        let ready = peer.ready.as_mut().unwrap();
        if ready.topology == topology && !other {
            ready.missed = 0;
            ready.instance = ready.instance.or(instance);
            let life = ready.life;
            return self.routes.confirm(life, flight.ticket);
        }
        let rests = peer.rests_after_restart(&policy, now);
        let not_before = peer.not_before;
        self.tell(EventKind::PeerRestarted, addr);
        self.start_over(addr);
        if rests {
            self.peers.get_mut(addr).unwrap().not_before = not_before;
        } else {
            self.become_ready(addr, topology, instance);
        }
    }

    fn read_failed(&mut self, flight: &Flight) {
        let (options, now) = (self.setup.options, self.now());
        let again = flight.started.after(seconds(self.setup.policy.interval_s));
        let peer = self.peers.get_mut(&flight.addr).unwrap();
        // Endpoints that nobody waits for are dropped, so that they may be looked up again.
        peer.paced.retain(|key, _| key == "query");
        peer.paced.insert("read".into(), again);
        let Some(Ready { missed, missed_since, .. }) = &mut peer.ready else { panic!("{flight:?}") };
        *missed += 1;
        if *missed == 1 {
            *missed_since = flight.started;
        }
        let down = now.since(*missed_since);
        if *missed >= options.heartbeat_failures && down >= seconds(options.heartbeat_min_down_s) {
            self.lose(&flight.addr);
        }
    }

    fn on_ranks(&mut self, flight: &Flight, answer: &Answer) {
        let is_object = answer.status == 200 && answer.body.starts_with('{');
        if !is_object {
            return self.pace("query", flight);
        }
        let ranks = if let Says::Ranks(ranks) = &answer.says { ranks.as_slice() } else { &[] };
        for request in self.held_at(&flight.addr).filter(|it| flight.rooms.contains(&it.room)) {
            let known = ranks.iter().any(|&(room, _)| room == request.room);
            if let (false, Some(stages)) = (known, &mut request.stages) {
                stages.next_ask = flight.started.after(wait_after(stages.asked));
            }
        }
        for &(room, rank) in ranks {
            self.routes.find_rank(flight.life.unwrap(), room, rank);
            let asked = self.held.iter_mut().filter(|it| it.room == room && it.addr == flight.addr);
            asked.for_each(|request| request.may_fail_with(FailureKind::DpRankOutOfRange));
        }
    }

    fn on_endpoint(&mut self, flight: &Flight, answer: &Answer) {
        match (answer.status, &answer.says) {
            (200, &Says::Endpoint(port)) => self.routes.find_endpoint(port, flight, self.last_ticket),
            (404, _) => {
                let peer = self.peers.get_mut(&flight.addr).unwrap();
                // All of that dp rank is looked up again after the next read.
                peer.paced.retain(|key, _| key == "query" || key == "read");
                peer.ranks_not_found += 1;
                if peer.ranks_not_found > 1 {
                    self.may_fail(&flight.addr, FailureKind::RankMissing);
                }
                self.rank_not_found(flight);
            }
            _ => self.pace(&flight.path, flight),
        }
    }

    /// A cached endpoint that is another one now, or not there, means another life.
    fn on_check(&mut self, flight: &Flight, answer: &Answer) {
        let known = self.routes.port(flight);
        match (answer.status, &answer.says) {
            (200, &Says::Endpoint(port)) if Some(port) != known => self.restart(&flight.addr),
            (404, _) => self.restart(&flight.addr),
            _ => {}
        }
    }

    fn restart(&mut self, addr: &str) {
        self.tell(EventKind::PeerRestarted, addr);
        self.start_over(addr);
        let (policy, now) = (self.setup.policy, self.now());
        self.peers.get_mut(addr).unwrap().rests_after_restart(&policy, now);
    }

    /// A request that was twice told that a rank of its dp rank is not there has ended.
    fn rank_not_found(&mut self, flight: &Flight) {
        let size = TOPOLOGIES[self.peers[&flight.addr].ready.as_ref().unwrap().topology].dp_size;
        for request in self.held_at(&flight.addr) {
            let its = request.preset.or((size == 1).then_some(0)).is_some_and(|dp| flight.is_of_dp_rank(dp));
            let Some(stages) = request.stages.as_mut().filter(|_| its) else { continue };
            stages.ranks_not_found += 1;
            request.due |= stages.ranks_not_found > 1;
        }
    }

    /// What failed is asked again only after an interval.
    fn pace(&mut self, what: &str, flight: &Flight) {
        let gap = seconds(self.setup.policy.interval_s).max(QUERY_GAP);
        let peer = self.peers.get_mut(&flight.addr).unwrap();
        peer.paced.insert(what.into(), flight.started.after(gap));
    }

    fn is_other(&self, addr: &str, instance: Option<&'static str>) -> bool {
        let known = self.peers[addr].ready.as_ref().and_then(|ready| ready.instance);
        known.is_some() && instance.is_some() && known != instance
    }

    pub(super) fn start_over(&mut self, addr: &str) {
        self.peers.get_mut(addr).unwrap().start_over();
        self.held_at(addr).for_each(|request| request.stages = None);
    }

    /// An event that the next step has to hold.
    pub(super) fn tell(&mut self, kind: EventKind, addr: &str) {
        let its = self.tracked.iter().filter(|(_, holder)| *holder == addr).map(|(&room, _)| room);
        let rooms = if kind == EventKind::PeerBack { Vec::new() } else { its.collect() };
        self.events.push((kind, addr.into(), rooms));
    }
}

/// How long after it was asked for the n-th time a room is asked for again, if the peer does not know it.
fn wait_after(asked: u32) -> Duration {
    let doubled = QUERY_GAP * 2_u32.saturating_pow(asked.saturating_sub(1).min(16));
    doubled.min(Duration::from_secs(1))
}
