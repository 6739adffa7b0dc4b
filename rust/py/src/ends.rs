//! The ends that were given a moment ago, for `state_of`.

use std::mem;

use disagg_core::pending::Outcome;
use hashbrown::HashMap;
use pyo3::prelude::*;

use crate::steps::Taken;

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
/// Whoever gives ends only notes them here, so that `add` and `poll` pay next to nothing for it; the index is made by the
/// first question. A request is known by its address in memory, so it is kept alive: by a step's own tuples, because a
/// reference more to each of its requests made resolving a third slower, most of which wait for their memory.
#[derive(Default)]
pub struct Ends {
    newer: Given,
    older: Given,
}

/// Ends that were given between two polls.
#[derive(Default)]
pub struct Given {
    ends: Vec<(usize, End)>,
    /// Requests, and tuples with requests.
    kept: Vec<Py<PyAny>>,
    index: HashMap<usize, End>,
    indexed: usize,
}

impl Ends {
    /// `add` gave a route at once. What comes back is to be dropped after unlocking: between two polls, which make
    /// room, at least the last [`MOST_AT_ONCE`] are remembered.
    pub fn give_at_once(&mut self, object: Py<PyAny>) -> Option<Given> {
        let full = self.newer.kept.len() >= MOST_AT_ONCE;
        let forgotten = full.then(|| self.turn());
        self.newer.ends.push((identity(&object), End::Routed));
        self.newer.kept.push(object);
        forgotten
    }

    /// A poll has taken these, and keeps them alive until [`Ends::keep`]. Call [`Ends::turn`] before.
    pub fn give(&mut self, taken: &[Taken]) {
        self.newer
            .ends
            .extend(taken.iter().map(|taken| (identity(&taken.object), End::from(&taken.outcome))));
    }

    /// Keep a request, or what holds requests, as long as the ends that were given just now.
    pub fn keep(&mut self, object: Py<PyAny>) {
        self.newer.kept.push(object);
    }

    /// The scheduler polled: what was given before the last poll is forgotten. To be dropped after unlocking.
    pub fn turn(&mut self) -> Given {
        mem::replace(&mut self.older, mem::take(&mut self.newer))
    }

    /// How the request last ended, if that is remembered.
    pub fn find(&mut self, object: &Py<PyAny>) -> Option<End> {
        self.newer.find(identity(object)).or_else(|| self.older.find(identity(object)))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.newer.ends.len() + self.older.ends.len()
    }

    /// All objects.
    pub fn iter(&self) -> impl Iterator<Item = &Py<PyAny>> {
        self.newer.kept.iter().chain(&self.older.kept)
    }
}

impl Given {
    fn find(&mut self, identity: usize) -> Option<End> {
        // A request may have ended and been added again: the last end counts.
        let indexed = mem::replace(&mut self.indexed, self.ends.len());
        self.index.extend(self.ends.iter().skip(indexed).copied());
        self.index.get(&identity).copied()
    }
}

fn identity(object: &Py<PyAny>) -> usize {
    object.as_ptr().addr()
}

/// Routes that `add` gives without a poll in between, after which the earlier ones are forgotten.
const MOST_AT_ONCE: usize = 65_536;
