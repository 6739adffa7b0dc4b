//! Which dp rank holds which room: entries expire one by one, and the oldest make room when full.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

use hashbrown::HashMap;
use serde_json::Value;

use super::fields::{Fields, integer, refused};
use super::refusal::BadInput;

/// Most rooms that one query may ask for.
pub const MAX_ROOMS_IN_QUERY: usize = 10_000;

/// Greatest room id: routers draw them from signed 64-bit integers.
pub const MAX_ROOM: u64 = u64::MAX >> 1;

/// The body of `POST /register_dp_rank`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoomPut {
    /// The room, at most 2^63-1.
    pub room: u64,
    /// The data-parallel group that holds it; not compared with the dp size, as upstream.
    pub dp_rank: u16,
}

impl RoomPut {
    /// Reads a body.
    ///
    /// # Errors
    /// [`BadInput`].
    pub fn from_json(body: &[u8]) -> Result<Self, BadInput> {
        let fields = Fields::from_json(body)?;
        let room = fields.integer("bootstrap_room", 0, MAX_ROOM)?;
        let dp_rank = fields.integer("dp_rank", 0, u64::from(u16::MAX))?;
        Ok(Self { room, dp_rank: u16::try_from(dp_rank).unwrap_or(u16::MAX) })
    }
}

/// The body of `POST /query_dp_ranks`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoomQuery {
    /// The rooms, each at most 2^63-1, in the order asked for.
    pub rooms: Vec<u64>,
}

impl RoomQuery {
    /// Reads a body.
    ///
    /// # Errors
    /// [`BadInput`]; one bad room refuses the whole query.
    pub fn from_json(body: &[u8]) -> Result<Self, BadInput> {
        let field = "bootstrap_rooms";
        let fields = Fields::from_json(body)?;
        let rooms = match fields.required(field)? {
            Value::Array(rooms) => rooms,
            value => return Err(refused(field, value, "must be a list")),
        };
        if rooms.len() > MAX_ROOMS_IN_QUERY {
            return Err(BadInput::TooManyRooms { count: rooms.len() });
        }
        let rooms = rooms.iter().map(|room| integer(field, room, 0, MAX_ROOM));
        Ok(Self { rooms: rooms.collect::<Result<_, _>>()? })
    }
}

/// The entries. A room that is registered again leaves its old place in `order` behind; those are
/// recognised by their number and swept when they are more than half.
#[derive(Debug)]
pub struct Rooms {
    ttl: Duration,
    cap: usize,
    entries: HashMap<u64, Entry>,
    order: VecDeque<Place>,
    /// Number of the place at the front of `order`.
    front: u64,
    evictions: u64,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    place: u64,
    dp_rank: u16,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    room: u64,
    expires: Duration,
}

impl Rooms {
    /// An empty table that holds `cap` rooms for `ttl` each; `cap` 0 counts as 1.
    #[must_use]
    pub fn new(ttl: Duration, cap: usize) -> Self {
        Self { ttl, cap: cap.max(1), entries: HashMap::new(), order: VecDeque::new(), front: 0, evictions: 0 }
    }

    /// Registers a room, afresh if it is known. `now` must not go back.
    pub fn insert(&mut self, now: Duration, put: &RoomPut) {
        self.expire(now, SWEPT_PER_INSERT);
        let place = self.front.saturating_add(u64::try_from(self.order.len()).unwrap_or(u64::MAX));
        let (room, dp_rank) = (put.room, put.dp_rank);
        let expires = now.saturating_add(self.ttl);
        self.entries.insert(room, Entry { place, dp_rank });
        self.order.push_back(Place { room, expires });
        while self.entries.len() > self.cap {
            self.evict_oldest(now);
        }
        if self.order.len() > self.entries.len().saturating_mul(2).saturating_add(SLACK) {
            self.compact();
        }
    }

    /// The dp rank of `room` unless it is unknown or its time is up.
    #[must_use]
    pub fn dp_rank(&self, now: Duration, room: u64) -> Option<u16> {
        let entry = self.entries.get(&room)?;
        let index = usize::try_from(entry.place.checked_sub(self.front)?).ok()?;
        (now < self.order.get(index)?.expires).then_some(entry.dp_rank)
    }

    /// Removes expired entries, looking at `limit` places at most.
    pub fn expire(&mut self, now: Duration, limit: usize) {
        for _ in 0..limit {
            match self.order.front() {
                Some(place) if place.expires <= now || !self.is_live(place.room) => self.pop(),
                _ => break,
            };
        }
        // A burst's memory goes back once it is over.
        if self.entries.is_empty() && self.entries.capacity() > SLACK {
            self.entries.shrink_to_fit();
            self.order.shrink_to_fit();
        }
    }

    /// How many entries are held, expired ones that were not swept included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no entry is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// How many entries went before their time because the table was full.
    #[must_use]
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    #[cfg(test)]
    pub(super) fn places(&self) -> usize {
        self.order.len()
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.entries.capacity().max(self.order.capacity())
    }

    fn evict_oldest(&mut self, now: Duration) {
        let Some(place) = self.order.front().copied() else {
            return;
        };
        if self.pop() && now < place.expires {
            self.evictions = self.evictions.saturating_add(1);
        }
    }

    /// Takes the front place away; says whether an entry went with it.
    fn pop(&mut self) -> bool {
        let Some(place) = self.order.front().copied() else {
            return false;
        };
        let was_live = self.is_live(place.room);
        if was_live {
            self.entries.remove(&place.room);
        }
        self.order.pop_front();
        self.front = self.front.saturating_add(1);
        was_live
    }

    /// Whether the place at the front is where `room` stands now.
    fn is_live(&self, room: u64) -> bool {
        self.entries.get(&room).is_some_and(|entry| entry.place == self.front)
    }

    fn compact(&mut self) {
        let (entries, mut number, mut next) = (&mut self.entries, self.front, self.front);
        self.order.retain(|place| {
            let old = number;
            number = number.saturating_add(1);
            match entries.get_mut(&place.room) {
                Some(entry) if entry.place == old => {
                    entry.place = next;
                    next = next.saturating_add(1);
                    true
                }
                _ => false,
            }
        });
    }
}

/// Two for one: expired entries go faster than new ones come.
const SWEPT_PER_INSERT: usize = 2;
const SLACK: usize = 1024;
