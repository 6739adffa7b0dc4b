//! The topology of an address: attempts, probes, and the budget.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;

use super::changes::ChangeKind;
use super::headers::Headers;
use super::peer::Budget;
use super::peer_state::{PeerEvent, PeerState};
use super::route::CommandKind;
use super::slots::Outcome;
use super::{Flight, HttpRequest, MAX_TOPOLOGY_BYTES, Machine, Purpose, failure};
use crate::answer::{Answer, Dialect};
use crate::failure::{Failure, FailureKind};
use crate::retry::{seconds, unit_interval};
use crate::time::Tick;

impl Machine {
    pub(super) fn start_attempt(&mut self, at: u32) {
        self.peers.at_mut(at).on(PeerEvent::AttemptStarts);
        self.counters.attempts += 1;
        self.fetch(at, Purpose::Attempt, self.now);
    }

    /// Ask a marked peer whether it is back.
    pub(super) fn start_probe(&mut self, at: u32) {
        self.counters.attempts += 1;
        self.fetch(at, Purpose::Probe, self.now);
    }

    fn fetch(&mut self, at: u32, purpose: Purpose, started: Tick) {
        let ticket =
            self.send(at, purpose, started, sentinel(CommandKind::Topology, self.peers.at(at).dialect));
        self.peers.at_mut(at).fetch = Some(ticket);
    }

    /// An attempt or a probe was answered.
    pub(super) fn on_attempt(&mut self, at: u32, flight: Flight, answer: Answer, headers: Headers<'_>) {
        match answer {
            Answer::Good(info) => {
                self.become_ready(at, *info, headers);
                match self.peers.at(at).ready() {
                    Some(_) => self.counters.good += 1,
                    None => self.counters.permanent.count(FailureKind::Incompatible),
                }
            }
            Answer::AskOlderForm => {
                self.peers.at_mut(at).dialect = Dialect::E2;
                return self.fetch(at, flight.purpose, flight.started);
            }
            Answer::Permanent { kind, text } => {
                self.counters.permanent.count(kind);
                self.refuse(at, kind, &text);
            }
            Answer::Transient { kind, text } => {
                self.counters.transient.count(kind);
                self.attempt_failed(at, flight, kind, text);
            }
        }
        if self.peers.at(at).ready().is_none() {
            self.counters.attempts_failed += 1;
        }
    }

    fn attempt_failed(&mut self, at: u32, flight: Flight, kind: FailureKind, text: String) {
        let (policy, seed, now) = (self.policy, self.options.seed, self.now);
        let peer = self.peers.at_mut(at);
        peer.dialect = Dialect::E3;
        peer.budget.failed += 1;
        peer.budget.last_error = Some((kind, text));
        let cooldown = cooldown(&peer.addr, &peer.budget);
        if matches!(flight.purpose, Purpose::Probe) {
            let until = flight.started.after(seconds(policy.interval_s));
            peer.on(PeerEvent::ProbeFailed { failure: cooldown, until });
            return;
        }
        let gap = policy.gap(peer.budget.failed, unit_interval(seed, &peer.addr, peer.budget.failed));
        let until = flight.started.after(gap);
        peer.on(PeerEvent::AttemptFailed { until, for_poll: policy.per_cycle });
        match &mut peer.budget.spent {
            Some((_, failure)) => *failure = cooldown,
            None if peer.budget.failed >= policy.max_attempts => {
                peer.budget.spent = Some((now, cooldown));
                self.note_attempt(at, ChangeKind::BudgetSpent);
            }
            None if peer.budget.failed == 1 => self.note_attempt(at, ChangeKind::FetchFailed),
            None => {}
        }
        if policy.per_cycle {
            self.for_poll.push(at);
        }
        self.settle(at);
        self.mark_down_if_nobody_waits(at);
    }

    /// The budget is spent: fail those that waited long enough, unless the scheduler stands still.
    fn settle(&mut self, at: u32) {
        let (now, lived) = (self.now, self.lived());
        let peer = self.peers.at_mut(at);
        if peer.budget.spent.is_none() || !matches!(peer.state(), PeerState::Waiting { .. }) {
            return;
        }
        if self.clock.stands_still(now) {
            peer.budget.deferred = true;
            self.for_poll.push(at);
            return;
        }
        let Some((kind, _)) = &peer.budget.last_error else {
            return;
        };
        let failure = failure(*kind, &peer.addr, &gave_up(&peer.budget), peer.budget.failed);
        let min_wait = seconds(self.policy.min_wait_s);
        while let Some(first) = peer.need_info.first()
            && lived.since(self.requests.slots.at(first).added) >= min_wait
        {
            self.requests.decide(peer, first, Outcome::Failed(Arc::clone(&failure)));
        }
    }

    fn mark_down_if_nobody_waits(&mut self, at: u32) {
        let cooldown_s = seconds(self.policy.cooldown_s);
        let peer = self.peers.at_mut(at);
        if peer.pending > 0 {
            return;
        }
        if let (Some((since, failure)), &PeerState::Waiting { until, .. }) =
            (&peer.budget.spent, peer.state())
        {
            let until = until.max(since.after(cooldown_s));
            let failure = Arc::clone(failure);
            peer.on(PeerEvent::GivenUp { failure, until });
            peer.budget.deferred = false;
        }
    }

    /// The time between two attempts is over.
    pub(super) fn leave_waiting(&mut self, at: u32) {
        let peer = self.peers.at_mut(at);
        if peer.pending > 0 {
            self.start_attempt(at);
        } else if peer.budget.spent.is_some() {
            self.mark_down_if_nobody_waits(at);
        } else {
            peer.on(PeerEvent::NobodyWaits);
            peer.budget = Budget::default();
        }
    }

    /// Budgets spent while the scheduler stood still, and attempts that wait for a poll.
    pub(super) fn look_at_peers_for_poll(&mut self) {
        for at in core::mem::take(&mut self.for_poll) {
            let Some(peer) = self.peers.get(at) else {
                continue;
            };
            if peer.budget.deferred {
                self.peers.at_mut(at).budget.deferred = false;
                self.settle(at);
                self.mark_down_if_nobody_waits(at);
            }
            if matches!(self.peers.at(at).state(), PeerState::Waiting { for_poll: true, .. }) {
                self.leave_waiting(at);
            }
            self.rearm(at);
        }
    }
}

/// The topology query, in the form that the peer understands.
pub(super) fn sentinel(kind: CommandKind, dialect: Dialect) -> HttpRequest {
    HttpRequest::get(kind, dialect.topology_query().to_string(), MAX_TOPOLOGY_BYTES)
}

fn gave_up(budget: &Budget) -> String {
    let text = budget.last_error.as_ref().map_or("", |(_, text)| text);
    match budget.failed {
        1 => format!("gave up after 1 attempt: {text}"),
        many => format!("gave up after {many} attempts: {text}"),
    }
}

fn cooldown(addr: &Arc<str>, budget: &Budget) -> Arc<Failure> {
    let text = format!("not tried again until it answers a probe; {}", gave_up(budget));
    failure(FailureKind::Cooldown, addr, &text, budget.failed)
}
