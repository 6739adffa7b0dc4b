//! Numbers that must not be swapped for one another.

/// A request's id shared by both engines, 0..=2^63-1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Room(u64);

impl Room {
    /// The largest room, 2^63-1.
    pub const MAX: Self = Self(u64::MAX >> 1);

    /// A room, or None when `number` is over [`Room::MAX`].
    #[must_use]
    pub const fn new(number: u64) -> Option<Self> {
        if number <= Self::MAX.0 { Some(Self(number)) } else { None }
    }

    /// The number.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }
}

impl core::fmt::Display for Room {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.fmt(f)
    }
}

/// One HTTP request that was handed out; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// A pending request: a slot, and which of its lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId {
    /// Index of the slot; small, and used again after the request ended.
    pub slot: u32,
    /// Which request of that slot.
    pub generation: u32,
}

/// One route as long as it is cached; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteId(pub u64);

/// `u32` index of something that lives in memory, as `usize`.
#[must_use]
pub fn index(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Length or position as `u32`; nothing here grows past that.
#[must_use]
pub(crate) fn number(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}
