//! The tables of a bootstrap registry: which rank of a prefill engine listens where, and which
//! data-parallel group holds which room. No socket, no clock: time since the registry started is
//! an argument of every call whose answer depends on it.
//!
//! Parsing is apart from the tables ([`Put::from_json`], [`RoomPut::from_json`],
//! [`RoomQuery::from_json`], [`RouteQuery::from_pairs`]), so that a server parses without holding
//! its lock, and every refusal is decided before anything changes.

mod answer;
mod fields;
mod generation;
mod layout;
mod refusal;
mod registration;
mod rooms;
mod route_query;
#[cfg(test)]
mod tests;

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use core::fmt;
use core::time::Duration;

pub use answer::View;
pub use generation::{Change, Conflict, Endpoint, FORMING_TTL, Generation, MERGE_AFTER, Table};
pub use layout::{Coordinate, Layout, Sizes};
pub use refusal::{BadInput, LookupError, NotReady};
pub use registration::{Put, Registration};
pub use rooms::{MAX_ROOMS_IN_QUERY, RoomPut, RoomQuery, Rooms};
pub use route_query::{Dialect, RouteQuery};

/// What an operator may set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Keep topology answers readable for decodes that reject keys they don't know.
    pub old_decodes: bool,
    /// How long a room's dp rank is kept after it was registered.
    pub room_ttl: Duration,
    /// How many rooms are kept; the oldest go first.
    pub room_cap: u32,
}

impl Options {
    /// 600 s is twice SGLang's own bootstrap timeout: no request still waits for an entry that went.
    pub const DEFAULT: Self =
        Self { old_decodes: false, room_ttl: Duration::from_secs(600), room_cap: 1_000_000 };

    /// Checks the bounds.
    ///
    /// # Errors
    /// [`OptionError`] when no room could ever be held.
    pub fn checked(self) -> Result<Self, OptionError> {
        if self.room_ttl.is_zero() {
            return Err(OptionError::RoomTtl);
        }
        if self.room_cap == 0 {
            return Err(OptionError::RoomCap);
        }
        Ok(self)
    }
}

/// An option is out of its bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptionError {
    /// Rooms would expire at once.
    RoomTtl,
    /// Rooms would be evicted at once.
    RoomCap,
}

impl fmt::Display for OptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RoomTtl => f.write_str("room ttl is 0: must be above 0"),
            Self::RoomCap => f.write_str("room cap is 0: must be at least 1"),
        }
    }
}

impl core::error::Error for OptionError {}

/// Which life of the engine, and which snapshot of it, an answer was read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamp {
    /// One life of the prefill engine; compare for equality only.
    pub instance: String,
    /// Counts the snapshots that were served; 0 before the first.
    pub epoch: u64,
}

/// All that one registry knows.
#[derive(Debug)]
pub struct Registry {
    old_decodes: bool,
    table: Table,
    rooms: Rooms,
    identity: u128,
    life: u64,
    epoch: u64,
}

impl Registry {
    /// An empty registry. `identity` is a random number of the caller's: instance ids start with it.
    #[must_use]
    pub fn new(options: &Options, identity: u128) -> Self {
        Self {
            old_decodes: options.old_decodes,
            table: Table::Empty,
            rooms: Rooms::new(options.room_ttl, usize::try_from(options.room_cap).unwrap_or(usize::MAX)),
            identity,
            life: 0,
            epoch: 0,
        }
    }

    /// Takes in what time alone changes. Answers don't depend on how often this is called: every
    /// other function that takes `now` decides the same first.
    pub fn on_timer(&mut self, now: Duration) {
        self.settle(now);
        self.rooms.expire(now, ROOMS_PER_TICK);
    }

    /// Takes in the registration of one rank.
    ///
    /// # Errors
    /// [`Conflict`] when it contradicts a generation that is being formed; nothing changes then.
    pub fn on_register(&mut self, now: Duration, put: Registration) -> Result<(), Conflict> {
        self.settle(now);
        let change = self.table.on_register(now, put)?;
        self.count(change);
        Ok(())
    }

    /// Takes in the dp rank of one room; the last one wins.
    pub fn on_room(&mut self, now: Duration, put: &RoomPut) {
        self.rooms.insert(now, put);
    }

    /// The dp ranks of those of `query`'s rooms that are known.
    #[must_use]
    pub fn dp_ranks(&self, now: Duration, query: &RoomQuery) -> BTreeMap<u64, u16> {
        query.rooms.iter().filter_map(|&room| Some((room, self.rooms.dp_rank(now, room)?))).collect()
    }

    /// The topology answer as JSON text.
    ///
    /// # Errors
    /// [`NotReady`] until every rank has registered.
    pub fn topology(&mut self, now: Duration, view: View) -> Result<String, NotReady> {
        self.settle(now);
        let serving = self.table.serving().ok_or_else(|| self.table.not_ready())?;
        Ok(answer::topology(serving, view, self.old_decodes))
    }

    /// Where the rank at `at` listens; `None` stands for a coordinate that no engine can have.
    ///
    /// # Errors
    /// [`LookupError::NotReady`] until every rank has registered, then [`LookupError::Unknown`].
    pub fn endpoint(&mut self, now: Duration, at: Option<Coordinate>) -> Result<&Endpoint, LookupError> {
        self.settle(now);
        let Some(serving) = self.table.serving() else {
            return Err(LookupError::NotReady(self.table.not_ready()));
        };
        at.and_then(|at| serving.endpoint(at)).ok_or(LookupError::Unknown)
    }

    /// Whether every rank has registered.
    pub fn is_ready(&mut self, now: Duration) -> bool {
        self.settle(now);
        self.table.serving().is_some()
    }

    /// What is missing, for an answer that says so; meaningful while [`Self::is_ready`] is false.
    #[must_use]
    pub fn not_ready(&self) -> NotReady {
        self.table.not_ready()
    }

    /// What every answer given now is stamped with.
    pub fn stamp(&mut self, now: Duration) -> Stamp {
        self.settle(now);
        Stamp { instance: format!("{:032x}-{}", self.identity, self.life), epoch: self.epoch }
    }

    /// How many rooms are held, those included that expired but were not swept yet.
    #[must_use]
    pub fn room_count(&self) -> usize {
        self.rooms.len()
    }

    /// How many rooms were evicted because the cap was reached.
    #[must_use]
    pub fn room_evictions(&self) -> u64 {
        self.rooms.evictions()
    }

    fn settle(&mut self, now: Duration) {
        let change = self.table.settle(now);
        self.count(change);
    }

    fn count(&mut self, change: Change) {
        match change {
            Change::None => {}
            // The id of life 0 was in answers before the first snapshot: it is not a new life.
            Change::First | Change::Merged => self.epoch = self.epoch.saturating_add(1),
            Change::TakenOver => {
                self.epoch = self.epoch.saturating_add(1);
                self.life = self.life.saturating_add(1);
            }
        }
    }
}

/// Rooms swept by one timer call: a million expiring together must not hold up an answer.
const ROOMS_PER_TICK: usize = 20_000;
