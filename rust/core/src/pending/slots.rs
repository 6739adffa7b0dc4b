//! The requests in memory: slots that are used again, linked into lists without further allocation.
//!
//! A slot is in at most three lists at once, one for each [`Link`]. All lists are doubly linked through the
//! slots, so that taking a request out of the middle costs the same as out of the front.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use super::route::Route;
use crate::failure::Failure;
use crate::ids::{RequestId, Room, index};
use crate::time::Tick;

/// Which of a slot's links a list uses.
#[derive(Clone, Copy, Debug)]
pub(super) enum Link {
    /// Undecided requests of everybody in order of arrival, for the request timeout.
    Age,
    /// Requests of everybody in one stage in order of entry, for the stage's deadline.
    Stage,
    /// Requests of one peer that wait for the same thing.
    Peer,
}

/// Where a request is.
///
/// ```text
///   Free ──► NeedInfo ──► NeedDpRank ──► NeedEndpoints ──► Decided ──► Free
///     │          │ │           │    ▲        ▲   │  endpoints    ▲  polled
///     │          │ │           └────┘        │   └───────────────┤
///     │          │ │         asked again     │                   │
///     │          │ └─ dp rank known by rule ─┘                   │
///     └──────────┴─ end known as it comes, or route cached ──────┘
/// ```
///
/// When the peer restarts, all its undecided requests go back to NeedInfo. Each undecided stage is left in time by its
/// deadline, to Decided; a request that is told failed, or whose peer is refused or lost, goes there too, and one that is
/// discarded to Free.
#[derive(Clone, Debug)]
pub(super) enum Stage {
    /// The slot is free, or its request is on its way to its first stage.
    Free,
    /// Waits for the peer's topology.
    NeedInfo,
    /// Waits for its dp rank.
    NeedDpRank(Ask),
    /// Waits for the endpoints of this dp rank.
    NeedEndpoints(u32),
    /// Its end is known and waits for a poll.
    Decided(Outcome),
}

/// Which list of its peer a request in `NeedDpRank` is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Never asked, or unknown the n-th time: waits on list n for its next turn.
    Turn(u8),
    /// Unknown after a waiting query with many rooms.
    Left,
    /// The query that carried it failed.
    Failed,
    /// In the query of this form that is in flight.
    Sent(Form),
}

/// How a peer answers a dp-rank query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// At once.
    Plain,
    /// When it knows a room, or the time is up.
    Waiting,
}

/// How a request ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Placed.
    Routed(Arc<Route>),
    /// Not placed.
    Failed(Arc<Failure>),
}

/// One request.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub generation: u32,
    /// Index of its peer while it is undecided; afterwards that place may be another peer's.
    pub peer: u32,
    pub room: Room,
    /// Whether the index of rooms points here.
    pub owns_room: bool,
    /// Place in the order of arrival.
    pub seq: u64,
    /// On the scheduler's clock.
    pub added: Tick,
    /// On the scheduler's clock.
    pub stage_since: Tick,
    pub next_ask: Tick,
    pub asked: u32,
    pub preset: Option<u32>,
    pub stage: Stage,
    links: [Links; 3],
}

/// Neighbours in one list.
#[derive(Clone, Copy, Debug)]
struct Links {
    before: u32,
    behind: u32,
}

/// A list of slots: first and last.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    first: u32,
    last: u32,
    len: u32,
}

impl List {
    pub const EMPTY: Self = Self { first: NONE, last: NONE, len: 0 };

    pub fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    pub fn len(&self) -> u32 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// All slots, in chunks that never move: one vector that doubles would copy all slots within one `add`, and have
/// half of its memory idle at the worst count (over 220 bytes a request, where 160 is the bar of DESIGN.md section 7).
#[derive(Debug, Default)]
pub(super) struct Slots {
    chunks: Vec<Box<[Slot; CHUNK]>>,
    /// How many were ever in use since memory was at its start.
    len: u32,
    free: Vec<u32>,
    /// Over all slots, so that it also tells apart those of before and after all memory was given back.
    next_generation: u32,
}

impl Slots {
    /// A slot for a new request, in no list.
    pub fn insert(&mut self, room: Room, seq: u64, added: Tick, preset: Option<u32>) -> RequestId {
        let generation = self.next_generation;
        self.next_generation = generation.wrapping_add(1);
        let slot = Slot {
            generation,
            peer: NONE,
            room,
            owns_room: false,
            seq,
            added,
            stage_since: added,
            next_ask: Tick::ZERO,
            asked: 0,
            preset,
            stage: Stage::Free,
            links: [Links::NONE; 3],
        };
        match self.free.pop() {
            Some(free) => {
                *self.at_mut(free) = slot;
                RequestId { slot: free, generation }
            }
            None => RequestId { slot: self.push(slot), generation },
        }
    }

    /// A slot for a new request that waits for the topology, but is in no list.
    #[cfg(test)]
    pub fn insert_waiting(&mut self, room: Room, seq: u64) -> RequestId {
        let id = self.insert(room, seq, Tick::ZERO, None);
        self.at_mut(id.slot).stage = Stage::NeedInfo;
        id
    }

    /// Give a slot back; it must be in no list.
    pub fn release(&mut self, at: u32) -> Stage {
        let stage = core::mem::replace(&mut self.at_mut(at).stage, Stage::Free);
        self.free.push(at);
        if self.free.len() == index(self.len) {
            // All is done: memory goes back to its start.
            self.chunks = Vec::new();
            self.len = 0;
            self.free = Vec::new();
        }
        stage
    }

    pub fn at(&self, at: u32) -> &Slot {
        let Some(slot) = self.get(at) else { unreachable!("lists hold only slots that exist") };
        slot
    }

    pub fn at_mut(&mut self, at: u32) -> &mut Slot {
        let chunk = self.chunks.get_mut(index(at) / CHUNK);
        let Some(slot) = chunk.and_then(|chunk| chunk.get_mut(index(at) % CHUNK)) else {
            unreachable!("lists hold only slots that exist")
        };
        slot
    }

    pub fn id(&self, at: u32) -> RequestId {
        RequestId { slot: at, generation: self.at(at).generation }
    }

    /// The slot of a request that is still held.
    pub fn find(&self, id: RequestId) -> Option<&Slot> {
        let slot = self.get(id.slot)?;
        (slot.generation == id.generation && !matches!(slot.stage, Stage::Free)).then_some(slot)
    }

    pub fn push_back(&mut self, list: &mut List, link: Link, at: u32) {
        *self.links_mut(at, link) = Links { before: list.last, behind: NONE };
        match list.last {
            NONE => list.first = at,
            last => self.links_mut(last, link).behind = at,
        }
        list.last = at;
        list.len += 1;
    }

    pub fn unlink(&mut self, list: &mut List, link: Link, at: u32) {
        let Links { before, behind } = core::mem::replace(self.links_mut(at, link), Links::NONE);
        match before {
            NONE => list.first = behind,
            before => self.links_mut(before, link).behind = behind,
        }
        match behind {
            NONE => list.last = before,
            behind => self.links_mut(behind, link).before = before,
        }
        list.len -= 1;
    }

    /// The slots of a list, front to back.
    pub fn iter<'a>(&'a self, list: &List, link: Link) -> impl Iterator<Item = u32> + 'a {
        core::iter::successors(list.first(), move |&at| {
            let behind = self.links(at, link).behind;
            (behind != NONE).then_some(behind)
        })
    }

    fn push(&mut self, slot: Slot) -> u32 {
        let at = self.len;
        if index(at).is_multiple_of(CHUNK) {
            let Ok(chunk) = Box::try_from(vec![slot.clone(); CHUNK]) else { unreachable!("it is that long") };
            self.chunks.push(chunk);
        }
        self.len += 1;
        *self.at_mut(at) = slot;
        at
    }

    fn get(&self, at: u32) -> Option<&Slot> {
        self.chunks.get(index(at) / CHUNK)?.get(index(at) % CHUNK)
    }

    fn links(&self, at: u32, link: Link) -> &Links {
        let [age, stage, peer] = &self.at(at).links;
        match link {
            Link::Age => age,
            Link::Stage => stage,
            Link::Peer => peer,
        }
    }

    fn links_mut(&mut self, at: u32, link: Link) -> &mut Links {
        let [age, stage, peer] = &mut self.at_mut(at).links;
        match link {
            Link::Age => age,
            Link::Stage => stage,
            Link::Peer => peer,
        }
    }
}

impl Links {
    const NONE: Self = Self { before: NONE, behind: NONE };
}

/// No slot.
pub(super) const NONE: u32 = u32::MAX;
/// Slots of a chunk: 26 KB, so that few requests hold little.
const CHUNK: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_is_small_enough_for_a_hundred_thousand_pending() {
        // tests/memory.rs counts all that a request costs.
        assert!(size_of::<Slot>() <= 104, "{}", size_of::<Slot>());
    }

    #[test]
    fn unlinking_keeps_the_order_of_the_rest() {
        let mut slots = Slots::default();
        let mut list = List::EMPTY;
        let Some(room) = Room::new(1) else { unreachable!() };
        let ids: Vec<u32> = (0..5)
            .map(|seq| {
                let at = slots.insert(room, seq, Tick::ZERO, None).slot;
                slots.push_back(&mut list, Link::Age, at);
                at
            })
            .collect();
        for &at in &[ids[2], ids[0], ids[4]] {
            slots.unlink(&mut list, Link::Age, at);
        }
        assert_eq!(slots.iter(&list, Link::Age).collect::<Vec<_>>(), [ids[1], ids[3]]);
        assert_eq!(list.len(), 2);
    }

    #[test]
    fn reused_slot_has_another_generation() {
        let mut slots = Slots::default();
        let Some(room) = Room::new(1) else { unreachable!() };
        let kept = slots.insert_waiting(room, 0);
        let old = slots.insert_waiting(room, 1);
        slots.release(old.slot);
        let new = slots.insert_waiting(room, 2);
        assert_eq!(new.slot, old.slot);
        assert!(slots.find(old).is_none() && slots.find(new).is_some() && slots.find(kept).is_some());
    }
}
