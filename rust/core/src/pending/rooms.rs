//! Who has which room.

use alloc::sync::Arc;
use alloc::vec::Vec;

use hashbrown::HashMap;

use super::slots::Slots;
use crate::ids::Room;
use crate::slot_table::SlotTable;

/// Who has a room.
#[derive(Clone, Copy, Debug)]
pub(super) enum RoomOwner<'a> {
    /// A request that is held; its slot.
    Pending(u32),
    /// A routed request that was not released, at this address.
    Routed(&'a Arc<str>),
}

/// The rooms of all requests that are held, and of the routed ones when they are tracked.
#[derive(Debug, Default)]
pub(super) struct Rooms {
    pending: SlotTable,
    routed: HashMap<Room, Arc<str>>,
}

impl Rooms {
    pub fn owner(&self, slots: &Slots, room: Room) -> Option<RoomOwner<'_>> {
        if let Some(at) = self.pending.find(room.number(), |at| slots.at(at).room == room) {
            return Some(RoomOwner::Pending(at));
        }
        self.routed.get(&room).map(RoomOwner::Routed)
    }

    pub fn is_free(&self, slots: &Slots, room: Room) -> bool {
        self.owner(slots, room).is_none()
    }

    pub fn len(&self) -> usize {
        self.pending.len() + self.routed.len()
    }

    /// The request in a slot takes its room, which nobody has.
    pub fn take(&mut self, slots: &Slots, at: u32) {
        self.pending.insert(slots.at(at).room.number(), at);
    }

    /// The request that was in a slot has its room no more.
    pub fn give_back(&mut self, room: Room, at: u32) {
        self.pending.remove(room.number(), at);
    }

    /// A routed request has a room until it is released.
    pub fn track(&mut self, room: Room, addr: &Arc<str>) {
        self.routed.insert(room, Arc::clone(addr));
    }

    /// A routed request has its room no more.
    pub fn release(&mut self, room: Room) {
        self.routed.remove(&room);
        if self.routed.is_empty() {
            self.routed = HashMap::new();
        }
    }

    /// The tracked rooms at an address, ascending.
    pub fn routed_at(&self, addr: &str) -> Vec<Room> {
        let at_addr = self.routed.iter().filter(|(_, holder)| ***holder == *addr);
        let mut rooms: Vec<Room> = at_addr.map(|(&room, _)| room).collect();
        rooms.sort_unstable();
        rooms
    }
}
