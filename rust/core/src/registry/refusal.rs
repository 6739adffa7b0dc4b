//! Why a request is refused, as data.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use super::layout::{Coordinate, MAX_RANKS, Sizes};
use super::rooms::MAX_ROOMS_IN_QUERY;

/// A request that is wrong whatever the tables hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BadInput {
    /// The body is not JSON, or an object in it has a key twice.
    Json {
        /// What the parser said.
        reason: String,
    },
    /// The body is JSON, but not an object.
    NotAnObject,
    /// A field that must be there is absent, null or empty.
    Missing {
        /// Its name on the wire.
        field: &'static str,
    },
    /// A field has a value of the wrong type or form.
    Value {
        /// Its name on the wire.
        field: &'static str,
        /// The value as sent, cut to a readable length.
        value: String,
        /// What it should have been.
        rule: &'static str,
    },
    /// An integer is out of its range.
    Range {
        /// Its name on the wire.
        field: &'static str,
        /// The value as sent, cut to a readable length.
        value: String,
        /// The least value allowed.
        min: u64,
        /// The greatest value allowed.
        max: u64,
    },
    /// A rank is not below the size it counts in.
    RankNotBelowSize {
        /// The rank's name on the wire.
        field: &'static str,
        /// The rank.
        rank: u64,
        /// The size.
        size: u64,
    },
    /// The sizes multiply to more ranks than a registry holds.
    TooManyRanks(Sizes),
    /// One query asks for too many rooms.
    TooManyRooms {
        /// How many it asks for.
        count: usize,
    },
}

impl BadInput {
    /// The wire name of the field that is wrong, where it is one field.
    #[must_use]
    pub fn field(&self) -> Option<&'static str> {
        match self {
            Self::Missing { field }
            | Self::Value { field, .. }
            | Self::Range { field, .. }
            | Self::RankNotBelowSize { field, .. } => Some(field),
            Self::TooManyRooms { .. } => Some("bootstrap_rooms"),
            Self::Json { .. } | Self::NotAnObject | Self::TooManyRanks(_) => None,
        }
    }
}

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json { reason } => write!(f, "body is not the JSON expected: {reason}"),
            Self::NotAnObject => write!(f, "body is not a JSON object"),
            Self::Missing { field } => write!(f, "{field} is missing"),
            Self::Value { field, value, rule } => write!(f, "{field} is {value}: {rule}"),
            Self::Range { field, value, min, max } => {
                write!(f, "{field} is {value}: must be in {min}..{max}")
            }
            Self::RankNotBelowSize { field, rank, size } => {
                write!(f, "{field} is {rank}: must be below the size {size}")
            }
            Self::TooManyRanks(sizes) => write!(
                f,
                "dp {} x cp {} x tp {} x pp {} are more than {MAX_RANKS} ranks",
                sizes.dp, sizes.cp, sizes.tp, sizes.pp
            ),
            Self::TooManyRooms { count } => {
                write!(f, "{count} rooms in one query: at most {MAX_ROOMS_IN_QUERY} are answered")
            }
        }
    }
}

impl core::error::Error for BadInput {}

/// Not every rank has registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotReady {
    /// Ranks registered so far.
    pub registered: usize,
    /// The engine's sizes; `None` while no rank has registered.
    pub sizes: Option<Sizes>,
    /// The first missing ranks, at most [`NotReady::NAMED`].
    pub missing: Vec<Coordinate>,
}

impl NotReady {
    /// How many missing ranks are named.
    pub const NAMED: usize = 16;
    /// Key of the number of registered ranks in the body of a 503.
    pub const REGISTERED: &'static str = "registered";
    /// Key of [dp, cp, tp, pp] sizes, null while no rank has registered.
    pub const SIZES: &'static str = "sizes";
    /// Key of the first missing ranks, each [dp, cp, tp, pp].
    pub const MISSING: &'static str = "missing";
}

impl fmt::Display for NotReady {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(expected) = self.sizes.map(Sizes::ranks) else {
            return write!(f, "not ready: no rank has registered");
        };
        write!(
            f,
            "not ready: {} of {expected} ranks registered; missing (dp, cp, tp, pp):",
            self.registered
        )?;
        for at in &self.missing {
            write!(f, " ({}, {}, {}, {})", at.dp, at.cp, at.tp, at.pp)?;
        }
        let unnamed = expected.saturating_sub(self.registered).saturating_sub(self.missing.len());
        if unnamed > 0 {
            write!(f, " and {unnamed} more")?;
        }
        Ok(())
    }
}

impl core::error::Error for NotReady {}

/// Why a rank's endpoint is not given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LookupError {
    /// Nothing is served yet.
    NotReady(NotReady),
    /// The engine has no such rank.
    Unknown,
}

impl fmt::Display for LookupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotReady(why) => why.fmt(f),
            Self::Unknown => write!(f, "the engine has no such rank"),
        }
    }
}

impl core::error::Error for LookupError {}
