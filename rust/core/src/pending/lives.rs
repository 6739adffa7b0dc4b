//! The lives of a peer: it becomes ready, is refused, restarts, is lost, is forgotten.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::add::AddError;
use super::headers::{Features, Headers, Identity};
use super::peer::{Budget, Ready};
use super::peer_state::{PeerEvent, PeerState};
use super::route::{Event, EventKind};
use super::slots::{Outcome, Stage};
use super::{Machine, failure};
use crate::addr;
use crate::answer::Dialect;
use crate::failure::{Failure, FailureKind};
use crate::rank_mapping::map_ranks;
use crate::retry::{seconds, unit_interval};
use crate::time::Tick;
use crate::topology::PrefillInfo;

impl Machine {
    /// The engine saw that the peer is gone, or that its life of that `epoch` is; false when the address is not known, or
    /// that epoch is over.
    ///
    /// # Errors
    /// A malformed address; nothing changed then.
    pub fn peer_lost(&mut self, now: Tick, address: &str, epoch: Option<u64>) -> Result<bool, AddError> {
        self.advance_to(now);
        let Some(at) = self.find_life(address, epoch)? else {
            return Ok(false);
        };
        self.lose(at, "lost: the engine said so");
        self.rearm(at);
        Ok(true)
    }

    /// The engine saw that the peer is another one now than in `epoch`, if it says which; false when the address is not
    /// known, or that epoch is over.
    ///
    /// # Errors
    /// A malformed address; nothing changed then.
    pub fn peer_restarted(&mut self, now: Tick, address: &str, epoch: Option<u64>) -> Result<bool, AddError> {
        self.advance_to(now);
        let Some(at) = self.find_life(address, epoch)? else {
            return Ok(false);
        };
        self.start_over(at, Identity::default());
        self.ask_again(at);
        self.rearm(at);
        Ok(true)
    }

    pub(super) fn find_spelled(&self, address: &str) -> Result<Option<u32>, AddError> {
        let addr = addr::canonical(address, self.options.default_port).map_err(AddError::Addr)?;
        Ok(self.peers.find(&addr))
    }

    /// The peer, unless what is said concerns an epoch that is over.
    fn find_life(&self, address: &str, epoch: Option<u64>) -> Result<Option<u32>, AddError> {
        let found = self.find_spelled(address)?;
        let is_current = |&at: &u32| {
            let peer = self.peers.at(at);
            epoch.is_none_or(|epoch| peer.epoch == epoch && peer.ready().is_some())
        };
        Ok(found.filter(is_current))
    }

    pub(super) fn refuse(&mut self, at: u32, kind: FailureKind, text: &str) {
        let peer = self.peers.at_mut(at);
        peer.budget.failed += 1;
        let failure = failure(kind, &peer.addr, text, peer.budget.failed);
        self.note_refused(at, kind, text);
        self.fail_pending(at, &failure);
        self.reset(at);
        let until = self.now.after(seconds(self.policy.cooldown_s));
        self.peers.at_mut(at).on(PeerEvent::Refused { failure, until });
    }

    /// The name of a peer that was ready leads where it may not: what waits fails, and what is routed is told.
    pub(super) fn forbid(&mut self, at: u32, text: &str) {
        self.tell(EventKind::PeerLost, at, None);
        self.peers.at_mut(at).lost = true;
        self.refuse(at, FailureKind::NotAllowed, text);
    }

    /// A complete topology is here: a new epoch begins, if the engines fit.
    pub(super) fn become_ready(&mut self, at: u32, info: PrefillInfo, headers: Headers<'_>) {
        let mapping = match map_ranks(&self.decode, &info) {
            Ok(mapping) => mapping,
            Err(incompatible) => {
                // It quotes the peer, and is kept for each address that is refused.
                let text: String = incompatible.to_string().chars().take(MAX_INCOMPATIBLE).collect();
                return self.refuse(at, FailureKind::Incompatible, &text);
            }
        };
        let peer = self.peers.at_mut(at);
        peer.epoch += 1;
        let identity = Identity::of(headers.or_of_topology(&info));
        let back = core::mem::take(&mut peer.lost).then(|| Event {
            kind: EventKind::PeerBack,
            addr: Arc::clone(&peer.addr),
            epoch: peer.epoch,
            old_instance: peer.identity.instance.clone(),
            new_instance: identity.instance.clone(),
            rooms: Vec::new(),
        });
        peer.identity = identity;
        peer.budget = Budget::default();
        let phase = 0.5 + 0.5 * unit_interval(self.options.seed, &peer.addr, 0);
        let beat = self.now.after(seconds(self.options.heartbeat_interval_s * phase));
        let contacts = mapping.contacts().collect();
        peer.on(PeerEvent::Answered(Box::new(Ready::new(
            info,
            mapping,
            contacts,
            Features::of(headers),
            beat,
        ))));
        self.note_ready(at, back.is_some());
        if let Some(back) = back {
            self.push_event(back);
        }
        while let Some(first) = self.peers.at(at).need_info.first() {
            self.place(at, first);
        }
    }

    /// The peer is another one now, and this is what it is.
    pub(super) fn replace(&mut self, at: u32, info: PrefillInfo, headers: Headers<'_>) {
        let dialect = self.peers.at(at).dialect;
        self.note_restarted(at);
        self.tell(EventKind::PeerRestarted, at, headers.or_of_topology(&info).instance);
        self.reset(at);
        self.peers.at_mut(at).restarts += 1;
        if !self.rests_after_restart(at) {
            self.peers.at_mut(at).dialect = dialect;
            self.become_ready(at, info, headers);
        }
    }

    /// The peer is another one now; what it is has to be asked.
    fn start_over(&mut self, at: u32, identity: Identity) {
        self.note_restarted(at);
        self.tell(EventKind::PeerRestarted, at, identity.instance.as_deref());
        self.reset(at);
        let peer = self.peers.at_mut(at);
        peer.restarts += 1;
        peer.budget = Budget::default();
        peer.identity = identity;
    }

    /// Ask for the topology at once, if somebody waits.
    fn ask_again(&mut self, at: u32) {
        if self.peers.at(at).pending > 0 {
            self.start_attempt(at);
        }
    }

    /// A peer said that it is another one: start over, at once the first time.
    pub(super) fn restart(&mut self, at: u32, identity: Identity) {
        self.start_over(at, identity);
        if !self.rests_after_restart(at) {
            self.ask_again(at);
        }
    }

    /// Whether the peer has to wait because it restarted a moment ago. One that gives another answer each time
    /// would otherwise be asked as fast as it answers.
    fn rests_after_restart(&mut self, at: u32) -> bool {
        let (now, interval) = (self.now, self.interval());
        let peer = self.peers.at_mut(at);
        let until = peer.restart_not_before;
        peer.restart_not_before = until.max(now).after(interval);
        if until <= now {
            return false;
        }
        peer.on(PeerEvent::Rests { until });
        true
    }

    /// The peer is gone: its requests fail, newcomers too until a probe is answered.
    pub(super) fn lose(&mut self, at: u32, text: &str) {
        let peer = self.peers.at(at);
        if peer.lost && matches!(peer.state(), PeerState::Marked { .. }) {
            return;
        }
        if !peer.lost {
            self.note_lost(at, text);
            self.tell(EventKind::PeerLost, at, None);
        }
        let peer = self.peers.at(at);
        let failure_of = |kind, text: &str| failure(kind, &peer.addr, text, peer.budget.failed);
        let lost = failure_of(FailureKind::PeerLost, text);
        let mark =
            failure_of(FailureKind::Cooldown, &format!("not tried again until it answers a probe; {text}"));
        self.fail_pending(at, &lost);
        self.reset(at);
        let until = self.now.after(seconds(self.policy.cooldown_s));
        let peer = self.peers.at_mut(at);
        peer.lost = true;
        peer.budget.last_error = Some((FailureKind::PeerLost, text.to_string()));
        peer.on(PeerEvent::Refused { failure: mark, until });
    }

    /// Drop the address with all that is in flight; nobody waits for it.
    pub(super) fn forget(&mut self, at: u32) {
        self.reset(at);
        self.peers.remove(at);
    }

    /// Drop all that belongs to the epoch; requests that wait go back to the first stage.
    pub(super) fn reset(&mut self, at: u32) {
        let waiting = self.requests.of_peer(self.peers.at(at));
        for request in waiting {
            let peer = self.peers.at_mut(at);
            // Also those that are in the first stage, to keep the order of arrival.
            self.requests.transition(peer, request, Stage::NeedInfo);
            self.requests.slots.at_mut(request).asked = 0;
        }
        let peer = self.peers.at_mut(at);
        let mut tickets: Vec<_> = peer.fetch.take().into_iter().collect();
        peer.dialect = Dialect::E3;
        peer.budget.spent = None;
        peer.budget.deferred = false;
        if let PeerState::Ready(ready) = peer.on(PeerEvent::Dropped) {
            tickets.extend(
                [
                    ready.read.in_flight,
                    ready.read.check,
                    ready.query.plain.ticket,
                    ready.query.waiting.ticket,
                ]
                .into_iter()
                .flatten(),
            );
            tickets.extend(ready.groups.values().flat_map(|group| group.in_flight.iter().copied()));
            self.retired.extend(ready.groups.values().filter_map(super::peer::Group::route_id));
        }
        tickets.sort_unstable();
        for ticket in tickets {
            self.cancel(ticket);
        }
    }

    /// End every undecided request of a peer.
    pub(super) fn fail_pending(&mut self, at: u32, shared: &Arc<Failure>) {
        let mut by_dp_rank = hashbrown::HashMap::new();
        for request in self.requests.of_peer(self.peers.at(at)) {
            let failure = match self.requests.slots.at(request).stage {
                Stage::NeedEndpoints(dp_rank) => by_dp_rank
                    .entry(dp_rank)
                    .or_insert_with(|| self.with_contacted(at, request, shared))
                    .clone(),
                Stage::NeedInfo | Stage::NeedDpRank(_) | Stage::Free | Stage::Decided(_) => {
                    Arc::clone(shared)
                }
            };
            self.requests.decide(self.peers.at_mut(at), request, Outcome::Failed(failure));
        }
    }

    /// Note an event of the epoch that ends.
    pub(super) fn tell(&mut self, kind: EventKind, at: u32, new_instance: Option<&str>) {
        let peer = self.peers.at(at);
        let event = Event {
            kind,
            addr: Arc::clone(&peer.addr),
            epoch: peer.epoch,
            old_instance: peer.identity.instance.clone(),
            new_instance: new_instance.map(Arc::from),
            rooms: self.routed_rooms(kind, &peer.addr),
        };
        self.push_event(event);
    }
}

/// Characters; all reasons with values as engines have them are a third of that.
const MAX_INCOMPATIBLE: usize = 2048;
