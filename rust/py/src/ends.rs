//! The ends that were given a moment ago, for `state_of`.

use std::mem;

use disagg_core::pending::Outcome;
use hashbrown::HashMap;
use pyo3::prelude::*;

/// How a request ended, as the numbers of which an engine's ranks take the MIN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Failed,
    Routed,
}

impl End {
    /// 0 failed, 2 routed; 1 is pending.
    pub const fn state(self) -> u8 {
        match self {
            Self::Failed => 0,
            Self::Routed => 2,
        }
    }

    /// What `explain` calls it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Routed => "routed",
        }
    }
}

impl From<&Outcome> for End {
    fn from(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Routed(_) => Self::Routed,
            Outcome::Failed(_) => Self::Failed,
        }
    }
}

/// The ends of the last two steps and of the routes that `add` gave since.
///
/// Whoever gives an end only appends to a list, so that `add` and `poll` pay next to nothing for it; the index over the
/// list is made by the first question. The objects are kept alive, so that an address in memory stands for one of them.
#[derive(Default)]
pub struct Ends {
    newer: Given,
    older: Given,
}

/// Ends in the order in which they were given.
#[derive(Default)]
pub struct Given {
    ends: Vec<(Py<PyAny>, End)>,
    by_identity: HashMap<usize, End>,
    indexed: usize,
}

impl Ends {
    /// `add` gave a route at once. What comes back is to be dropped after unlocking: between two polls, which make
    /// room, at least the last [`MOST_AT_ONCE`] are remembered.
    pub fn give_at_once(&mut self, object: Py<PyAny>) -> Option<Given> {
        let full = self.newer.ends.len() >= MOST_AT_ONCE;
        let forgotten = full.then(|| self.turn());
        self.newer.ends.push((object, End::Routed));
        forgotten
    }

    /// A step gives these; call [`Ends::turn`] before.
    pub fn give(&mut self, ends: impl Iterator<Item = (Py<PyAny>, End)>) {
        self.newer.ends.extend(ends);
    }

    /// The scheduler polled: what was given before the last poll is forgotten. To be dropped after unlocking.
    pub fn turn(&mut self) -> Given {
        mem::replace(&mut self.older, mem::take(&mut self.newer))
    }

    /// How the request last ended, if that is remembered.
    pub fn find(&mut self, object: &Py<PyAny>) -> Option<End> {
        let identity = object.as_ptr().addr();
        self.newer.find(identity).or_else(|| self.older.find(identity))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.newer.ends.len() + self.older.ends.len()
    }

    /// All objects.
    pub fn iter(&self) -> impl Iterator<Item = &Py<PyAny>> {
        self.newer.ends.iter().chain(&self.older.ends).map(|(object, _)| object)
    }
}

impl Given {
    fn find(&mut self, identity: usize) -> Option<End> {
        // A request may have ended and been added again: the last end counts.
        for (object, end) in self.ends.iter().skip(self.indexed) {
            self.by_identity.insert(object.as_ptr().addr(), *end);
        }
        self.indexed = self.ends.len();
        self.by_identity.get(&identity).copied()
    }
}

/// Routes that `add` gives without a poll in between, after which the earlier ones are forgotten.
const MOST_AT_ONCE: usize = 65_536;
