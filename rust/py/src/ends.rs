//! The ends that were given a moment ago, for `state_of`.

use std::mem;
use std::sync::Arc;

use disagg_core::pending::Outcome;
use hashbrown::HashMap;
use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
use pyo3::prelude::*;

use crate::steps::Delivery;

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
/// Whoever gives ends only leaves them here, so that `add` and `poll` pay next to nothing for it (a poll that took a
/// reference of its own to each of 4,096 requests was 0.1 to 0.2 ms slower); the index is made by the first question.
/// The objects are kept alive, so that an address in memory stands for one of them.
#[derive(Default)]
pub struct Ends {
    newer: Given,
    older: Given,
}

/// Ends that were given between two polls.
#[derive(Default)]
pub struct Given {
    by_poll: Option<Arc<Delivery>>,
    by_add: Vec<Py<PyAny>>,
    index: HashMap<usize, End>,
    /// Whether the index has the poll's, and how many of the others.
    indexed: (bool, usize),
}

impl Ends {
    /// `add` gave a route at once. What comes back is to be dropped after unlocking: between two polls, which make
    /// room, at least the last [`MOST_AT_ONCE`] are remembered.
    pub fn give_at_once(&mut self, object: Py<PyAny>) -> Option<Given> {
        let full = self.newer.by_add.len() >= MOST_AT_ONCE;
        let forgotten = full.then(|| self.turn());
        self.newer.by_add.push(object);
        forgotten
    }

    /// A poll gives these; call [`Ends::turn`] before.
    pub fn give(&mut self, delivery: Arc<Delivery>) {
        self.newer.by_poll = Some(delivery);
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
        self.newer.len() + self.older.len()
    }

    /// Show all objects to the garbage collector.
    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        [&self.newer, &self.older].into_iter().try_for_each(|given| given.traverse(visit))
    }
}

impl Given {
    fn len(&self) -> usize {
        self.by_poll.as_ref().map_or(0, |delivery| delivery.taken.len()) + self.by_add.len()
    }

    fn find(&mut self, identity: usize) -> Option<End> {
        // A request may have ended in the poll and been added again since: the last end counts.
        let (poll_indexed, added) =
            mem::replace(&mut self.indexed, (self.by_poll.is_some(), self.by_add.len()));
        if let Some(delivery) = self.by_poll.as_ref().filter(|_| !poll_indexed) {
            let ends =
                delivery.taken.iter().map(|taken| (taken.object.as_ptr().addr(), End::from(&taken.outcome)));
            self.index.extend(ends);
        }
        let routed = self.by_add.iter().skip(added).map(|object| (object.as_ptr().addr(), End::Routed));
        self.index.extend(routed);
        self.index.get(&identity).copied()
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        if let Some(delivery) = &self.by_poll {
            delivery.traverse(visit)?;
        }
        self.by_add.iter().try_for_each(|object| visit.call(object))
    }
}

/// Routes that `add` gives without a poll in between, after which the earlier ones are forgotten.
const MOST_AT_ONCE: usize = 65_536;
