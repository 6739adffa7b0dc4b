//! The scheduler's side: requests come in, ends go out.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::peer::{GroupState, Peer};
use super::peer_state::PeerState;
use super::requests::Ended;
use super::rooms::RoomOwner;
use super::route::{Route, Step};
use super::slots::{Outcome, Stage};
use super::told::told_failure;
use super::{Machine, failure};
use crate::addr::{self, AddrError};
use crate::allow::Verdict;
use crate::failure::{Failure, FailureKind};
use crate::ids::{RequestId, Room, RouteId};
use crate::time::Tick;

/// What became of a request at once.
#[derive(Debug)]
pub enum Added<'a> {
    /// Everything is cached: it has ended already.
    Routed(&'a Arc<Route>),
    /// A warm-up transfer: it has ended already and touched nothing.
    Fake(Arc<Route>),
    /// Its end will come out of a poll.
    Pending(RequestId),
}

/// The caller's mistake; nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddError {
    /// The address is none.
    Addr(AddrError),
}

impl Machine {
    /// Place a request whose route is cached, the address written as it was before; None is nothing done.
    ///
    /// As [`Machine::add`] does at the time of the latest call, so that the common case needs no clock: reading one is a
    /// quarter of it (23 of 98 ns). The address then counts as used at that time.
    pub fn add_cached(&mut self, address: &str, room: Room, preset: Option<u32>) -> Option<&Arc<Route>> {
        let at = self.peers.find(address).or_else(|| self.peers.find_spelled(address))?;
        if !self.is_unhindered(room) {
            return None;
        }
        let dp_rank = self.cached_dp_rank(at, room, preset)?;
        Some(self.route_at_once(at, room, dp_rank))
    }

    /// Place a request at the prefill engine behind `address`.
    ///
    /// # Errors
    /// A malformed address; nothing changed then.
    pub fn add(
        &mut self,
        now: Tick,
        address: &str,
        room: Room,
        preset: Option<u32>,
    ) -> Result<Added<'_>, AddError> {
        // Not `advance_to`, whose clock for waits only what is pending needs.
        self.now = self.now.max(now);
        // Known names are canonical, so the common spelling needs no parsing.
        let known = self.peers.find(address).or_else(|| self.peers.find_spelled(address));
        let (known, parsed) = match known {
            Some(known) => (Some(known), None),
            None => {
                let parsed = addr::canonical(address, self.options.default_port).map_err(AddError::Addr)?;
                if addr::host_of(&parsed) == addr::FAKE_HOST {
                    self.requests.counters.fake += 1;
                    return Ok(Added::Fake(Arc::new(fake_route(parsed))));
                }
                let known = self.peers.find(&parsed);
                if let Some(at) = known {
                    self.peers.remember_spelling(address, at);
                }
                (known, Some(parsed))
            }
        };
        if let Some(at) = known
            && self.is_unhindered(room)
            && let Some(dp_rank) = self.cached_dp_rank(at, room, preset)
        {
            return Ok(Added::Routed(self.route_at_once(at, room, dp_rank)));
        }
        let addr = match known {
            Some(at) => Arc::clone(&self.peers.at(at).addr),
            None => Arc::from(parsed.as_deref().unwrap_or(address)),
        };
        Ok(Added::Pending(self.add_pending(&addr, room, preset)))
    }

    /// Take what was decided, at most `limit` ends; call once per scheduling cycle.
    #[must_use]
    pub fn poll(&mut self, now: Tick, limit: usize) -> Step {
        self.advance_to(now);
        self.clock.on_poll(self.now);
        if !self.for_poll.is_empty() {
            self.look_at_peers_for_poll();
        }
        if self.requests.decided.is_empty() && self.events.is_empty() {
            return Step::default();
        }
        self.last_step += 1;
        let mut ended = self.requests.take_decided(limit);
        if self.options.track_rooms {
            for Ended { room, outcome, .. } in &ended {
                if let Outcome::Routed(route) = outcome {
                    self.requests.rooms.track(*room, &route.addr);
                }
            }
        }
        // Mostly in order already, which this sort recognises.
        ended.sort_by_key(|ended| ended.seq);
        Step {
            seq: self.last_step,
            ended: ended.into_iter().map(|Ended { id, outcome, .. }| (id, outcome)).collect(),
            events: core::mem::take(&mut self.events),
            more: !self.requests.decided.is_empty(),
        }
    }

    /// Forget a request in whatever state it is; one that is not held is no error.
    pub fn discard(&mut self, now: Tick, id: RequestId) {
        self.advance_to(now);
        let Some(slot) = self.requests.slots.find(id) else {
            return;
        };
        if matches!(slot.stage, Stage::Decided(_)) {
            self.requests.drop_decided(id.slot);
        } else {
            let at = slot.peer;
            self.requests.withdraw(self.peers.at_mut(at), id.slot);
            self.rearm(at);
        }
    }

    /// Forget every request.
    pub fn discard_all(&mut self, now: Tick) {
        self.advance_to(now);
        self.requests.take_decided(usize::MAX);
        while let Some(at) = self.requests.ages.first() {
            let peer = self.requests.slots.at(at).peer;
            self.requests.withdraw(self.peers.at_mut(peer), at);
            self.rearm(peer);
        }
    }

    /// The engine stands still: deadlines do too, until [`Machine::resume`].
    pub fn pause(&mut self, now: Tick) {
        self.advance_to(now);
        self.clock.pause(self.now);
    }

    /// The engine goes on.
    pub fn resume(&mut self, now: Tick) {
        self.advance_to(now);
        self.clock.resume(self.now);
    }

    /// End every pending request, and every later one at once.
    pub fn fail_all(&mut self, now: Tick, kind: FailureKind, reason: &str) {
        self.advance_to(now);
        let all: Vec<u32> = self.peers.iter().map(|(at, _)| at).collect();
        for at in all {
            let failure = failure(kind, &self.peers.at(at).addr, reason, 0);
            self.fail_pending(at, &failure);
            self.forget(at);
        }
        self.dead.get_or_insert_with(|| (kind, reason.to_string()));
    }

    fn is_unhindered(&self, room: Room) -> bool {
        self.dead.is_none()
            && self.requests.rooms.is_free(&self.requests.slots, room)
            && (self.tombstones.is_empty()
                || self.tombstones.get(&room).is_none_or(|told| told.until <= self.now))
    }

    /// The dp rank of a request if its route is cached.
    fn cached_dp_rank(&self, at: u32, room: Room, preset: Option<u32>) -> Option<u32> {
        let peer = self.peers.at(at);
        let ready = peer.ready()?;
        let dp_rank = self.dp_rank_without_asking(peer, ready, room, preset)?;
        matches!(ready.groups.get(&dp_rank)?.state, GroupState::Ready(_)).then_some(dp_rank)
    }

    fn route_at_once(&mut self, at: u32, room: Room, dp_rank: u32) -> &Arc<Route> {
        self.routed_at_once += 1;
        let peer = self.peers.at_mut(at);
        peer.last_add = self.now;
        let Some(GroupState::Ready(route)) =
            peer.ready().and_then(|ready| ready.groups.get(&dp_rank)).map(|group| &group.state)
        else {
            unreachable!("the caller has just looked")
        };
        if self.options.track_rooms {
            self.requests.rooms.track(room, &route.addr);
        }
        route
    }

    fn add_pending(&mut self, addr: &Arc<str>, room: Room, preset: Option<u32>) -> RequestId {
        self.advance_to(self.now);
        let lived = self.requests.lived;
        let end = self.known_end(addr, room);
        let id = self.requests.insert(room, preset, lived);
        let at = match end {
            Err(failure) => {
                self.requests.decide_unlinked(id.slot, Outcome::Failed(failure));
                return id;
            }
            Ok(at) => at,
        };
        let peer = self.peers.at_mut(at);
        peer.last_add = self.now;
        self.requests.join(peer, at, id.slot);
        match peer.state() {
            PeerState::Ready(_) => {
                self.place(at, id.slot);
                self.pump(at);
            }
            PeerState::Unknown => self.start_attempt(at),
            PeerState::Fetching | PeerState::Waiting { .. } => {}
            PeerState::Marked { .. } => unreachable!("`known_end` refuses those"),
        }
        self.rearm(at);
        id
    }

    /// The peer to wait for, or why the request has ended already.
    fn known_end(&mut self, addr: &Arc<str>, room: Room) -> Result<u32, Arc<Failure>> {
        if let Some((kind, reason)) = &self.dead {
            return Err(failure(*kind, addr, reason, 0));
        }
        if let Some(told) = self.tombstones.remove(&room)
            && told.until > self.now
        {
            return Err(told_failure(addr, told.reason, told.http_status));
        }
        let holder = match self.requests.rooms.owner(&self.requests.slots, room) {
            Some(RoomOwner::Pending(at)) => Some(self.addr_of(at)),
            Some(RoomOwner::Routed(holder)) => Some(holder),
            None => None,
        };
        if let Some(holder) = holder {
            let text = format!("room {room} is held by a request to {holder} already");
            return Err(failure(FailureKind::DuplicateRoom, addr, &text, 0));
        }
        self.known_peer(addr)
    }

    /// Where a request goes. The peer of a decided one may be forgotten, and its place taken by another.
    fn addr_of(&self, at: u32) -> &Arc<str> {
        let slot = self.requests.slots.at(at);
        match &slot.stage {
            Stage::Decided(Outcome::Routed(route)) => &route.addr,
            Stage::Decided(Outcome::Failed(failure)) => &failure.addr,
            Stage::Free | Stage::NeedInfo | Stage::NeedDpRank(_) | Stage::NeedEndpoints(_) => {
                &self.peers.at(slot.peer).addr
            }
        }
    }

    fn known_peer(&mut self, addr: &Arc<str>) -> Result<u32, Arc<Failure>> {
        if let Some(at) = self.peers.find(addr) {
            let peer = self.peers.at_mut(at);
            peer.last_add = self.now;
            return match peer.refusal() {
                Some(refusal) => Err(Arc::clone(refusal)),
                None => Ok(at),
            };
        }
        let host = addr::host_of(addr);
        if self.allowed.hosts.as_ref().is_some_and(|hosts| hosts.verdict(host) == Verdict::Refused) {
            let text = format!("host {host} is not in allowed_hosts");
            return Err(failure(FailureKind::NotAllowed, addr, &text, 0));
        }
        let most = self.options.max_addresses;
        if self.peers.len() >= crate::ids::index(most) && !self.evict() {
            let text = format!("{most} addresses are in use already");
            return Err(failure(FailureKind::TooManyAddresses, addr, &text, 0));
        }
        Ok(self.peers.insert(Peer::new(Arc::clone(addr), self.now)))
    }

    /// Make room for a new address: the longest unused one that nobody waits for and that is not ready.
    fn evict(&mut self) -> bool {
        let idle = self.peers.iter().filter(|(_, peer)| peer.pending == 0 && peer.ready().is_none());
        let Some((at, _)) = idle.min_by_key(|(_, peer)| (peer.last_add, Arc::clone(&peer.addr))) else {
            return false;
        };
        self.counters.evictions += 1;
        self.forget(at);
        true
    }
}

fn fake_route(addr: String) -> Route {
    Route {
        id: RouteId(0),
        addr: Arc::from(addr),
        dp_rank: 0,
        mapping: None,
        endpoints: Vec::new(),
        info: None,
        epoch: 0,
        fake: true,
    }
}
