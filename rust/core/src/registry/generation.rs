//! Lives of an engine behind one registry, without an instance id to tell them apart.
//!
//! ```text
//!          register              complete                 other scalar, or other endpoint
//!  Empty ────────────► First ────────────────► Serving ─────────────────────────────────► Replacing
//!                      │   ▲                    ▲   ▲ ▲        complete: takes over            │
//!                      └───┘                    │   │ └────────────────────────────────────────┤
//!          other scalar at a known coordinate:  │   └── 2 s quiet, only endpoints differ: merged│
//!          starts over                          └────── 60 s without progress: dropped ────────┘
//! ```
//! What is served changes in whole steps only: a generation is complete or it is not seen.
//! `First` is never dropped by time alone (upstream waits for ever, and its ranks register once);
//! after 60 s without progress a rank that contradicts it starts it over from any coordinate.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::mem;
use core::time::Duration;

use super::layout::{Coordinate, Layout};
use super::refusal::NotReady;
use super::registration::Registration;

/// How long no rank registers before a generation that differs in endpoints only is merged.
pub const MERGE_AFTER: Duration = Duration::from_secs(2);

/// How long a generation may make no progress while another one is served.
pub const FORMING_TTL: Duration = Duration::from_secs(60);

/// Where a rank listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Address as the rank stated it.
    pub ip: String,
    /// TCP port, not 0.
    pub port: u16,
}

/// A rank that contradicts what other ranks of its generation said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// Wire name of the scalar.
    pub field: &'static str,
    /// Its value in the table.
    pub registered: String,
    /// Its value in the request.
    pub sent: String,
    /// Whether upstream refuses this one too, with 400; otherwise it is 409.
    pub as_upstream: bool,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is {} here and {} at the ranks that registered before",
            self.field, self.sent, self.registered
        )
    }
}

impl core::error::Error for Conflict {}

/// What happened to the snapshot that is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Change {
    /// Nothing.
    None,
    /// The first generation is complete.
    First,
    /// Endpoints of some ranks changed; the engine lives on.
    Merged,
    /// Another life of the engine is served.
    TakenOver,
}

/// One life of an engine: what its ranks agree on, and where they listen.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// What all ranks agree on.
    pub layout: Layout,
    /// Port of the prefill's HTTP API: the first one stated counts.
    pub prefill_http_port: Option<u16>,
    /// Whether any rank sent a key that decodes before 0.5.20 or so do not know.
    pub has_newer_keys: bool,
    rows: BTreeMap<Coordinate, Endpoint>,
}

/// A generation that is not served yet, and when it last moved.
#[derive(Debug, Clone, PartialEq)]
pub struct Forming {
    generation: Generation,
    last_put: Duration,
    last_progress: Duration,
}

/// The machine drawn above.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Table {
    /// No rank has registered.
    #[default]
    Empty,
    /// The first generation is being formed; nothing is served.
    First(Forming),
    /// A complete generation is served.
    Serving(Generation),
    /// Another one is being formed behind the one that is served.
    Replacing {
        /// What is served.
        serving: Generation,
        /// What may take over.
        forming: Forming,
    },
}

enum Plan {
    Keep,
    Open,
    Add,
}

impl Table {
    /// Takes in one rank; call [`Table::settle`] with the same `now` before.
    ///
    /// # Errors
    /// [`Conflict`], and nothing changes.
    pub fn on_register(&mut self, now: Duration, put: Registration) -> Result<Change, Conflict> {
        let plan = self.plan(now, &put)?;
        let (state, change) = match (plan, mem::take(self)) {
            (Plan::Keep, state) => (state, Change::None),
            (Plan::Add, Self::First(mut forming)) => {
                forming.add(now, put);
                promote(None, forming)
            }
            (Plan::Add, Self::Replacing { serving, mut forming }) => {
                forming.add(now, put);
                promote(Some(serving), forming)
            }
            (Plan::Open | Plan::Add, Self::Empty | Self::First(_)) => promote(None, Forming::open(now, put)),
            (Plan::Open | Plan::Add, Self::Serving(serving))
            | (Plan::Open, Self::Replacing { serving, .. }) => {
                promote(Some(serving), Forming::open(now, put))
            }
        };
        *self = state;
        Ok(change)
    }

    /// Takes in what time alone decides.
    pub fn settle(&mut self, now: Duration) -> Change {
        let Self::Replacing { serving, forming } = self else {
            return Change::None;
        };
        let is_stale = forming.is_stale(now);
        let is_quiet = now.saturating_sub(forming.last_put) >= MERGE_AFTER;
        let is_mergeable = serving.layout.difference(&forming.generation.layout).is_none();
        if !(is_stale || is_mergeable && is_quiet) {
            return Change::None;
        }
        let (state, change) = match mem::take(self) {
            Self::Replacing { mut serving, forming } if is_mergeable => {
                let change = serving.merge(forming.generation);
                (Self::Serving(serving), change)
            }
            Self::Replacing { serving, .. } => (Self::Serving(serving), Change::None),
            state @ (Self::Empty | Self::First(_) | Self::Serving(_)) => (state, Change::None),
        };
        *self = state;
        change
    }

    /// The generation that is served.
    #[must_use]
    pub fn serving(&self) -> Option<&Generation> {
        match self {
            Self::Serving(serving) | Self::Replacing { serving, .. } => Some(serving),
            Self::Empty | Self::First(_) => None,
        }
    }

    /// What is missing from the generation that is served, or else from the first.
    #[must_use]
    pub fn not_ready(&self) -> NotReady {
        match self {
            Self::Empty => NotReady { registered: 0, sizes: None, missing: Vec::new() },
            Self::First(Forming { generation, .. })
            | Self::Serving(generation)
            | Self::Replacing { serving: generation, .. } => generation.not_ready(),
        }
    }

    fn plan(&self, now: Duration, put: &Registration) -> Result<Plan, Conflict> {
        match self {
            Self::Empty => Ok(Plan::Open),
            Self::First(forming) => match forming.plan(put) {
                Err(_) if forming.is_stale(now) => Ok(Plan::Open),
                plan => plan,
            },
            Self::Serving(serving) if serving.has(put) => Ok(Plan::Keep),
            Self::Serving(_) => Ok(Plan::Open),
            // A late repetition from the ranks that are served says nothing about the newcomers.
            Self::Replacing { serving, forming }
                if serving.has(put) && forming.generation.layout.difference(&put.layout).is_some() =>
            {
                Ok(Plan::Keep)
            }
            Self::Replacing { forming, .. } => forming.plan(put),
        }
    }
}

impl Generation {
    /// Where the rank at `at` listens.
    #[must_use]
    pub fn endpoint(&self, at: Coordinate) -> Option<&Endpoint> {
        self.rows.get(&at)
    }

    /// All ranks in the order of their coordinates.
    pub fn rows(&self) -> impl Iterator<Item = (Coordinate, &Endpoint)> {
        self.rows.iter().map(|(at, endpoint)| (*at, endpoint))
    }

    fn is_complete(&self) -> bool {
        // Coordinates are below the sizes, so as many as there are ranks is all of them.
        self.rows.len() == self.layout.sizes.ranks()
    }

    fn has(&self, put: &Registration) -> bool {
        self.rows.get(&put.at) == Some(&put.endpoint) && self.layout.difference(&put.layout).is_none()
    }

    /// Every rank came back to where it was: nothing to tell anyone.
    fn is_same(&self, other: &Self) -> bool {
        self.rows == other.rows && self.layout.difference(&other.layout).is_none()
    }

    fn merge(&mut self, newer: Generation) -> Change {
        let mut change = Change::None;
        for (at, endpoint) in newer.rows {
            if self.rows.get(&at) != Some(&endpoint) {
                self.rows.insert(at, endpoint);
                change = Change::Merged;
            }
        }
        change
    }

    fn not_ready(&self) -> NotReady {
        let missing = self.layout.sizes.coordinates().filter(|at| !self.rows.contains_key(at));
        NotReady {
            registered: self.rows.len(),
            sizes: Some(self.layout.sizes),
            missing: missing.take(NotReady::NAMED).collect(),
        }
    }
}

impl Forming {
    fn open(now: Duration, put: Registration) -> Self {
        Self {
            generation: Generation {
                layout: put.layout,
                prefill_http_port: put.prefill_http_port,
                has_newer_keys: put.has_newer_keys,
                rows: BTreeMap::from([(put.at, put.endpoint)]),
            },
            last_put: now,
            last_progress: now,
        }
    }

    fn add(&mut self, now: Duration, put: Registration) {
        let generation = &mut self.generation;
        generation.layout.fill_from(&put.layout);
        generation.prefill_http_port = generation.prefill_http_port.or(put.prefill_http_port);
        generation.has_newer_keys |= put.has_newer_keys;
        if generation.rows.get(&put.at) != Some(&put.endpoint) {
            generation.rows.insert(put.at, put.endpoint);
            self.last_progress = now;
        }
        self.last_put = now;
    }

    fn plan(&self, put: &Registration) -> Result<Plan, Conflict> {
        match self.generation.layout.difference(&put.layout) {
            None => Ok(Plan::Add),
            Some(_) if self.generation.rows.contains_key(&put.at) => Ok(Plan::Open),
            Some(conflict) => Err(conflict),
        }
    }

    fn is_stale(&self, now: Duration) -> bool {
        now.saturating_sub(self.last_progress) >= FORMING_TTL
    }
}

/// The state in which `forming` is complete, or not yet.
fn promote(serving: Option<Generation>, forming: Forming) -> (Table, Change) {
    let is_complete = forming.generation.is_complete();
    match serving {
        None if is_complete => (Table::Serving(forming.generation), Change::First),
        None => (Table::First(forming), Change::None),
        Some(serving) if is_complete && serving.is_same(&forming.generation) => {
            (Table::Serving(serving), Change::None)
        }
        Some(_) if is_complete => (Table::Serving(forming.generation), Change::TakenOver),
        Some(serving) => (Table::Replacing { serving, forming }, Change::None),
    }
}
