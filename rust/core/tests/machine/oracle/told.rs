//! What the scheduler and the engine tell: requests, discards, rooms, peers.

use core::time::Duration;

use disagg_core::failure::FailureKind;
use disagg_core::ids::{RequestId, RouteId};
use disagg_core::pending::{EventKind, Machine, Route, Stats};
use std::collections::BTreeSet;
use std::sync::Arc;

use super::peers::Peer;
use super::requests::{MustFail, Request};
use super::{Oracle, Tombstone};

impl Oracle {
    /// J9: what is routed at once is of the life that is known now.
    pub fn on_routed_at_once(
        &mut self,
        machine: &Machine,
        route: &Arc<Route>,
        (addr, room, preset): (&str, u64, Option<u32>),
    ) {
        let free = !self.is_held(room) && !self.tracked.contains_key(&room);
        assert!(free, "room {room} is held and routed again: {route:?}");
        assert!(self.dead.is_none() && !self.is_told(room), "{route:?}");
        assert!(machine.is_cached(route), "{route:?}");
        self.routes.check_not_retired(route);
        assert_eq!(*route.addr, *addr);
        self.track(room, addr);
        if self.unsure {
            return;
        }
        let life = self.routes.check(route);
        self.routes.check_rank(route, room, preset, self.setup.options.force_query);
        let now = self.now();
        let peer = self.peers.get_mut(addr).unwrap();
        assert_eq!(peer.ready.as_ref().map(|ready| ready.life), Some(life), "{route:?}");
        peer.last_add = now;
    }

    /// A request is held; what the machine counted before and after.
    pub fn on_pending(
        &mut self,
        id: RequestId,
        (addr, room, preset): (&str, u64, Option<u32>),
        before: &Stats,
        after: &Stats,
    ) {
        let known = self.held.iter().any(|it| it.id == id) || self.gone.contains(&id);
        assert!(!known, "{id:?} was given out before");
        let owns_room = after.rooms > before.rooms;
        let must_fail_with = self.end_at_once(addr, room);
        if must_fail_with.is_some() {
            assert!(!owns_room, "it has ended already and takes room {room}");
        } else {
            self.meet(addr, before, after);
        }
        self.last_seq += 1;
        let request = self.new_request(id, (addr, room, preset), owns_room, must_fail_with);
        if owns_room {
            self.waited.insert((addr.into(), room));
        }
        self.held.push(request);
    }

    fn new_request(
        &self,
        id: RequestId,
        (addr, room, preset): (&str, u64, Option<u32>),
        owns_room: bool,
        must_fail_with: Option<MustFail>,
    ) -> Request {
        let peer = self.peers.get(addr);
        let life = peer.and_then(|peer| Some(peer.ready.as_ref()?.life));
        let mut request = Request {
            id,
            seq: self.last_seq,
            addr: addr.into(),
            room,
            preset,
            owns_room,
            due: !owns_room,
            added: self.clock.read(),
            ceiling: peer.map_or(0, |peer| peer.failed),
            may_fail_with: BTreeSet::new(),
            must_fail_with,
            least_life: life.unwrap_or(self.routes.last_life() + 1),
            stages: None,
            first_ready: None,
        };
        if life.is_some() {
            request.begin_stages(self.clock.read());
        }
        if !owns_room {
            request.may_fail_with(FailureKind::Cooldown);
            peer.and_then(|peer| peer.refused).into_iter().for_each(|kind| request.may_fail_with(kind));
            if peer.is_none() || self.unsure {
                request.may_fail_with(FailureKind::TooManyAddresses);
            }
        }
        request
    }

    /// The end that a request has before any peer is looked at.
    fn end_at_once(&mut self, addr: &str, room: u64) -> Option<MustFail> {
        let must = |kind, reason: &str, status| Some(MustFail { kind, reason: reason.into(), status });
        if let Some((kind, reason)) = &self.dead {
            return must(*kind, reason, None);
        }
        if let Some(told) = self.tombstones.remove(&room)
            && told.until > self.now()
        {
            return must(FailureKind::Told, &told.reason, Some(told.status));
        }
        let holder = self.held.iter().find(|it| it.owns_room && it.room == room).map(|it| it.addr.as_str());
        let holder = holder.or(self.tracked.get(&room).map(String::as_str))?;
        let reason = format!("{addr}: room {room} is held by a request to {holder} already");
        must(FailureKind::DuplicateRoom, &reason, None)
    }

    /// A request reached its peer, which may be a new one.
    fn meet(&mut self, addr: &str, before: &Stats, after: &Stats) {
        if self.unsure {
            return;
        }
        if after.evictions > before.evictions {
            self.evict();
        }
        let known = after.peers.iter().sum::<usize>();
        let now = self.now();
        if let Some(peer) = self.peers.get_mut(addr) {
            peer.last_add = now;
        } else if known > self.peers.len() {
            self.peers.insert(addr.into(), Peer::new(now, self.last_seq));
        } else {
            let most = usize::try_from(self.setup.options.max_addresses).unwrap();
            assert!(self.unsure || known >= most, "there is room for {addr}: {after:?}");
        }
    }

    pub fn on_discard(&mut self, id: RequestId) {
        self.held.retain(|request| request.id != id);
        self.gone.push(id);
    }

    pub fn on_discard_all(&mut self) {
        self.gone.extend(self.held.drain(..).map(|request| request.id));
    }

    pub fn on_pause(&mut self) {
        self.clock.pause();
    }

    pub fn on_resume(&mut self) {
        self.clock.resume();
    }

    /// A room was told failed, which met a request or not; the first word about a room that is to come stays.
    pub fn on_fail_room(&mut self, room: u64, reason: &str, status: u16, met: bool) {
        let now = self.now();
        let owner = self.held.iter_mut().find(|it| it.owns_room && it.room == room);
        assert!(owner.is_some() || !met, "room {room} is not held");
        if let Some(owner) = owner {
            assert!(!met || !owner.due, "it had ended: {owner:?}");
            if met {
                let (kind, status) = (FailureKind::Told, Some(status));
                owner.must_fail_with = Some(MustFail { kind, reason: reason.into(), status });
            }
            owner.due = true;
        } else if !self.tracked.contains_key(&room) {
            self.tombstones.retain(|_, told| told.until > now);
            let until = now.after(Duration::from_secs(600));
            let told = || Tombstone { reason: reason.into(), status, until };
            self.tombstones.entry(room).or_insert_with(told);
        }
    }

    pub fn on_release(&mut self, room: u64) {
        self.tracked.remove(&room);
    }

    pub fn release_all(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.tracked).into_keys().collect()
    }

    pub fn on_peer_lost(&mut self, addr: &str, known: bool) {
        self.told_of_known_peers(addr, known);
        if self.unsure || !known {
            return;
        }
        if self.peers[addr].lost {
            // It is not back since, but may have been said to have restarted; then requests wait again.
            self.must_end(addr, FailureKind::PeerLost);
        } else {
            self.lose(addr);
        }
    }

    pub fn on_peer_restarted(&mut self, addr: &str, known: bool) {
        self.told_of_known_peers(addr, known);
        if !self.unsure && known {
            self.tell(EventKind::PeerRestarted, addr);
            self.start_over(addr);
        }
    }

    fn told_of_known_peers(&self, addr: &str, known: bool) {
        assert!(self.unsure || known == self.peers.contains_key(addr), "{addr}: {known}");
    }

    /// Everything ends; what came before the first such call stays its reason.
    pub fn on_fail_all(&mut self, kind: FailureKind, reason: &str) {
        for request in &mut self.held {
            request.may_fail_with(kind);
            request.due = true;
        }
        self.peers.clear();
        self.held.iter_mut().for_each(|request| request.stages = None);
        self.dead.get_or_insert((kind, reason.into()));
    }

    pub fn on_retired(&mut self, ids: Vec<RouteId>) {
        ids.into_iter().for_each(|id| self.routes.retire(id));
    }

    /// What was made of routes can go when they are not given out any more; all of them come to that.
    pub fn check_all_routes_are_retired(&self) {
        self.routes.check_all_are_retired();
    }

    pub(super) fn track(&mut self, room: u64, addr: &str) {
        if self.setup.options.track_rooms {
            self.tracked.insert(room, addr.into());
        }
    }

    fn is_held(&self, room: u64) -> bool {
        self.held.iter().any(|request| request.owns_room && request.room == room)
    }

    fn is_told(&self, room: u64) -> bool {
        self.tombstones.get(&room).is_some_and(|told| told.until > self.now())
    }
}
