//! What the engine tells about rooms: failed ones, and routed ones that are over.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::time::Duration;

use super::rooms::RoomOwner;
use super::route::EventKind;
use super::slots::{Outcome, Stage};
use super::{Machine, Tombstone, failure_with_status};
use crate::failure::{Failure, FailureKind};
use crate::ids::Room;
use crate::time::Tick;

impl Machine {
    /// With `track_rooms`: the routed request of `room` is over.
    pub fn release(&mut self, room: Room) {
        self.requests.rooms.release(room);
    }

    /// Fail the request of `room`, or the one that will come; true when one was pending.
    pub fn fail_room(&mut self, now: Tick, room: Room, reason: &str, http_status: u16) -> bool {
        self.advance_to(now);
        let reason: String = reason.chars().take(MAX_REASON).collect();
        match self.requests.rooms.owner(&self.requests.slots, room) {
            Some(RoomOwner::Pending(at)) => self.fail_told(at, reason, http_status),
            Some(RoomOwner::Routed(_)) => false,
            None => {
                self.bury(room, reason, http_status);
                false
            }
        }
    }

    fn fail_told(&mut self, at: u32, reason: String, http_status: u16) -> bool {
        let slot = self.requests.slots.at(at);
        if matches!(slot.stage, Stage::Decided(_)) {
            return false;
        }
        let peer_index = slot.peer;
        let peer = self.peers.at_mut(peer_index);
        let told = told_failure(&peer.addr, reason, http_status);
        self.requests.decide(peer, at, Outcome::Failed(told));
        self.rearm(peer_index);
        true
    }

    fn bury(&mut self, room: Room, reason: String, http_status: u16) {
        self.sweep_tombstones();
        if self.tombstones.contains_key(&room) {
            return;
        }
        while self.tombstones.len() >= TOMBSTONES {
            self.drop_oldest_tombstone();
        }
        let until = self.now.after(TOMBSTONE_TTL);
        self.tombstones.insert(room, Tombstone { reason, http_status, until });
        self.tombstones_by_age.push_back((until, room));
    }

    /// Drop those whose time is up, and the places of those whose request came when they are more than half.
    fn sweep_tombstones(&mut self) {
        while self.tombstones_by_age.front().is_some_and(|&(until, _)| until <= self.now) {
            self.drop_oldest_tombstone();
        }
        if self.tombstones_by_age.len() > 2 * self.tombstones.len() + 64 {
            let live = &self.tombstones;
            self.tombstones_by_age
                .retain(|(until, room)| live.get(room).is_some_and(|told| told.until == *until));
        }
    }

    fn drop_oldest_tombstone(&mut self) {
        if let Some((until, oldest)) = self.tombstones_by_age.pop_front()
            && self.tombstones.get(&oldest).is_some_and(|told| told.until == until)
        {
            self.tombstones.remove(&oldest);
        }
    }

    /// Routed rooms at `addr`, for an event of that kind.
    pub(super) fn routed_rooms(&self, kind: EventKind, addr: &str) -> Vec<Room> {
        if !self.options.track_rooms || kind == EventKind::PeerBack {
            return Vec::new();
        }
        self.requests.rooms.routed_at(addr)
    }
}

pub(super) fn told_failure(addr: &Arc<str>, reason: String, http_status: u16) -> Arc<Failure> {
    let mut told = failure_with_status(FailureKind::Told, addr, "", 0, http_status);
    if let Some(told) = Arc::get_mut(&mut told) {
        told.reason = reason;
    }
    told
}

const MAX_REASON: usize = 1024;
const TOMBSTONES: usize = 65_536;
const TOMBSTONE_TTL: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pending::{Added, Options};
    use crate::retry::RetryPolicy;
    use crate::topology::{DecodeRank, DecodeRankSpec};

    const ADDR: &str = "10.0.0.1:8998";

    fn machine() -> Machine {
        let decode = DecodeRank::new(DecodeRankSpec::default()).unwrap();
        Machine::new(decode, RetryPolicy::DEFAULT, Options::DEFAULT, Tick::ZERO)
    }

    fn tell(machine: &mut Machine, number: usize) {
        let room = Room::new(number.try_into().unwrap()).unwrap();
        assert!(!machine.fail_room(Tick::ZERO, room, "too long", 400));
    }

    /// Whether the request of that room ends as told.
    fn is_told(machine: &mut Machine, number: usize) -> bool {
        let room = Room::new(number.try_into().unwrap()).unwrap();
        assert!(matches!(machine.add(Tick::ZERO, ADDR, room, None), Ok(Added::Pending(_))));
        machine.poll(Tick::ZERO, 1).ended.len() == 1
    }

    #[test]
    fn a_tombstone_outlives_any_number_of_others_whose_requests_came() {
        let mut machine = machine();
        tell(&mut machine, 0);
        for number in 1..=TOMBSTONES {
            tell(&mut machine, number);
            assert!(is_told(&mut machine, number));
            assert!(machine.tombstones_by_age.len() <= 67);
        }
        assert!(is_told(&mut machine, 0));
    }

    #[test]
    fn the_oldest_tombstone_gives_way_to_a_new_room_only() {
        let mut machine = machine();
        for number in 0..TOMBSTONES {
            tell(&mut machine, number);
        }
        tell(&mut machine, TOMBSTONES - 1);
        assert_eq!(machine.tombstones.len(), TOMBSTONES, "told again");
        tell(&mut machine, TOMBSTONES);
        assert_eq!(machine.tombstones.len(), TOMBSTONES);
        assert!(!is_told(&mut machine, 0));
        assert!(is_told(&mut machine, 1));
    }
}
