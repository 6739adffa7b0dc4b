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
        while let Some(&(until, oldest)) = self.tombstones_by_age.front()
            && (until <= self.now || self.tombstones_by_age.len() >= TOMBSTONES)
        {
            self.tombstones_by_age.pop_front();
            if self.tombstones.get(&oldest).is_some_and(|told| told.until == until) {
                self.tombstones.remove(&oldest);
            }
        }
        if !self.tombstones.contains_key(&room) {
            let until = self.now.after(TOMBSTONE_TTL);
            self.tombstones.insert(room, Tombstone { reason, http_status, until });
            self.tombstones_by_age.push_back((until, room));
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
