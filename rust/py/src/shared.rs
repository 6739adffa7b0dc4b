//! What `Resolver` and `Driver` share: the machine behind a lock, with the requests that it places.
//!
//! The lock is held for pure Rust only. Python objects are made before or after, and references dropped after:
//! making one may run the garbage collector, and dropping one a `__del__`, which may call back in here.

use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use disagg_core::ids::{RequestId, RouteId};
use disagg_core::pending::{Event, Machine, Outcome, Route};
use disagg_core::time::Tick;
use hashbrown::HashMap;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyDict;

use crate::bell::Bell;
use crate::ends::Ends;
use crate::held::Held;
use crate::stats;
use crate::steps::{self, Delivery, Made, Taken, Values};

/// One machine, its time and its bell.
pub struct Shared {
    /// Take it with [`Shared::lock`].
    pub state: Mutex<State>,
    /// Where time comes from.
    pub clock: Clock,
    /// Wakes the network side.
    pub bell: Bell,
    /// This process is a child of the one that made it.
    pub forked: AtomicBool,
}

/// What the lock guards.
pub struct State {
    /// Decides everything.
    pub machine: Machine,
    /// The objects of the requests that are held.
    pub held: Held,
    /// Ends that were given a moment ago.
    pub ends: Ends,
    /// Steps that were not given yet, oldest first: being made, or for the next polls where a signal handler broke that
    /// off.
    pub undelivered: VecDeque<Delivery>,
    /// Ready-made `Route`s of what the machine has cached.
    pub routes: HashMap<RouteId, Py<PyAny>>,
}

/// Where time comes from.
pub enum Clock {
    /// From the system.
    Monotonic(Instant),
    /// From the caller, in nanoseconds.
    Virtual(AtomicU64),
}

impl Clock {
    /// The time now.
    pub fn now(&self) -> Tick {
        Tick::from_nanos(match self {
            Self::Monotonic(start) => u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
            Self::Virtual(nanos) => nanos.load(Ordering::Relaxed),
        })
    }
}

impl Shared {
    /// The one `Route` object of a route, made if there is none yet.
    pub fn make_route(&self, py: Python<'_>, route: &Arc<Route>) -> PyResult<Py<PyAny>> {
        if let Some(made) = self.lock(py).routes.get(&route.id) {
            return Ok(made.clone_ref(py));
        }
        let made = steps::route_to_python(py, route)?;
        let mut state = self.lock(py);
        // One that has been retired meanwhile would never be dropped again, and a warm-up one is used once.
        if route.fake || !state.machine.is_cached(route) {
            return Ok(made);
        }
        // Another thread may have made it meanwhile.
        let kept = state.routes.entry(route.id).or_insert_with(|| made.clone_ref(py)).clone_ref(py);
        drop(state);
        drop(made);
        Ok(kept)
    }

    /// The state, unless this process is a forked child.
    pub fn live(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, State>> {
        if self.forked.load(Ordering::Relaxed) {
            return Err(PyRuntimeError::new_err(
                "this resolver was made before a fork; make one in the child process",
            ));
        }
        Ok(self.lock(py))
    }

    /// The state.
    pub fn lock(&self, py: Python<'_>) -> MutexGuard<'_, State> {
        // A panic under the lock is a bug that PyO3 has raised already; the machine's functions leave no list
        // half-linked on the paths that can be met, so later calls go on rather than stop the scheduler.
        self.state.lock_py_attached(py).unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Make and give a step that is claimed. Until its values are made it stays where `discard` finds its requests.
    pub fn deliver(
        &self,
        py: Python<'_>,
        unmade: &[Outcome],
        head: (u64, &[Event], bool),
    ) -> PyResult<Py<PyAny>> {
        let (seq, ..) = head;
        let values = Values::make(py, self, unmade, head);
        let mut state = self.lock(py);
        let values = match values {
            Ok(values) => values,
            Err(error) => {
                state.unclaim(seq);
                return Err(error);
            }
        };
        let taken = state.claimed(seq).map(|delivery| delivery.taken).unwrap_or_default();
        state.ends.give(&taken);
        drop(state);
        let Made { step, resolved, failed } = values.fill(py, taken)?;
        let mut state = self.lock(py);
        state.ends.keep(resolved);
        state.ends.keep(failed);
        Ok(step)
    }

    /// Counts of everything.
    pub fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (stats, ends) = {
            let state = self.lock(py);
            let mut stats = state.machine.stats(self.clock.now());
            stats.decided += state.undelivered.iter().map(|delivery| delivery.taken.len()).sum::<usize>();
            (stats, state.ends.len())
        };
        stats::to_python(py, &stats, ends)
    }

    /// Wake the network side if it has something to do that it does not know of.
    pub fn ring_if_needed(&self, state: &mut State) {
        if state.machine.take_bell() {
            self.bell.ring();
        }
    }
}

impl State {
    /// The objects and ready-made routes of a step.
    pub fn take(&mut self, py: Python<'_>, ended: Vec<(RequestId, Outcome)>) -> Vec<Taken> {
        let taken = self.held.let_many_go(ended).into_iter().map(|(_, object, outcome)| {
            let made = match &outcome {
                Outcome::Routed(route) => self.routes.get(&route.id).map(|made| made.clone_ref(py)),
                Outcome::Failed(_) => None,
            };
            Taken { object, outcome, made }
        });
        taken.collect()
    }

    /// Whether the end of a request was not given yet.
    pub fn is_pending(&self, object: &Py<PyAny>) -> bool {
        // Looked at first, as `add` is here each time.
        let may_be_undelivered = !self.undelivered.is_empty();
        self.held.find(object).is_some() || (may_be_undelivered && self.undelivered(object).is_some())
    }

    /// How a request in a step that was not given yet ended.
    pub fn undelivered(&self, object: &Py<PyAny>) -> Option<&Outcome> {
        let mut taken = self.undelivered.iter().flat_map(|delivery| &delivery.taken);
        taken.find(|taken| taken.object.is(object)).map(|taken| &taken.outcome)
    }

    /// Let the step be given whose values are made; it is gone when the collector cleared everything.
    pub fn claimed(&mut self, seq: u64) -> Option<Delivery> {
        let place = self.undelivered.iter().position(|delivery| delivery.step.seq == seq)?;
        self.undelivered.remove(place)
    }

    /// Leave a step whose making was broken off to the next poll.
    pub fn unclaim(&mut self, seq: u64) {
        if let Some(delivery) = self.undelivered.iter_mut().find(|delivery| delivery.step.seq == seq) {
            delivery.is_claimed = false;
        }
    }

    /// Take a request that was discarded out of a step that was not given yet. To be dropped after unlocking.
    pub fn take_back(&mut self, object: &Py<PyAny>) -> Option<Taken> {
        self.undelivered.iter_mut().find_map(|delivery| {
            let place = delivery.taken.iter().position(|taken| taken.object.is(object))?;
            Some(delivery.taken.remove(place))
        })
    }

    /// Take all requests out of the steps that were not given yet, which keep their events. To be dropped after
    /// unlocking.
    pub fn take_all_back(&mut self) -> Vec<Taken> {
        let taken = self.undelivered.iter_mut().flat_map(|delivery| mem::take(&mut delivery.taken)).collect();
        self.undelivered.retain(|delivery| delivery.is_claimed || !delivery.step.events.is_empty());
        taken
    }

    /// The objects of routes that are not given out any more, to be dropped after unlocking.
    pub fn retire(&mut self) -> Vec<Py<PyAny>> {
        let retired = self.machine.poll_retired();
        retired.iter().filter_map(|id| self.routes.remove(id)).collect()
    }
}
