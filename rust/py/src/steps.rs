//! What a poll took, as the values of `disagg.values`.

use std::sync::Arc;

use disagg_core::failure::Failure;
use disagg_core::ids::RouteId;
use disagg_core::pending::{Event, Outcome, Route, Step};
use hashbrown::{HashMap, HashSet};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};

use crate::rank_mapping::RankMapping;
use crate::shared::Shared;
use crate::topology::PrefillInfo;

/// One request of a step, out of the lock.
pub struct Taken {
    /// The caller's object.
    pub object: Py<PyAny>,
    /// How it ended.
    pub outcome: Outcome,
    /// Its `Route` or `Failure`, as soon as there is one.
    pub made: Option<Py<PyAny>>,
}

/// What a poll took, until its `Step` is given.
pub struct Delivery {
    /// Its ends are in `taken`.
    pub step: Step,
    /// The requests that ended, but for those that were discarded meanwhile.
    pub taken: Vec<Taken>,
    /// Somebody makes its values just now, so that no other poll gives it.
    pub is_claimed: bool,
}

/// The values of a delivery, made while it can still be changed: making them runs Python code.
pub struct Values {
    routes: HashMap<RouteId, Py<PyAny>>,
    failures: HashMap<*const Failure, Py<PyAny>>,
    step: Py<PyAny>,
    set_attribute: Py<PyAny>,
}

/// A `Step`, and the tuples in it that hold its requests.
pub struct Made {
    pub step: Py<PyAny>,
    pub resolved: Py<PyAny>,
    pub failed: Py<PyAny>,
}

/// The one step of polls at which nothing was decided.
pub fn empty(py: Python<'_>) -> PyResult<Py<PyAny>> {
    static EMPTY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let step = EMPTY.get_or_try_init(py, || class(py, &STEP, "Step")?.call1((0,)).map(Bound::unbind))?;
    Ok(step.clone_ref(py))
}

impl Delivery {
    /// The outcomes for which there is no value yet, each once.
    pub fn unmade(&self) -> Vec<Outcome> {
        let (mut routes, mut failures) = (HashSet::new(), HashSet::new());
        let unmade =
            self.taken.iter().filter(|taken| taken.made.is_none()).filter(|taken| match &taken.outcome {
                Outcome::Routed(route) => routes.insert(route.id),
                Outcome::Failed(failure) => failures.insert(Arc::as_ptr(failure)),
            });
        unmade.map(|taken| taken.outcome.clone()).collect()
    }
}

impl Values {
    /// Whatever a step needs that takes Python code, in which a signal handler may raise and anybody may discard.
    pub fn make(
        py: Python<'_>,
        shared: &Shared,
        unmade: &[Outcome],
        (seq, events, more): (u64, &[Event], bool),
    ) -> PyResult<Self> {
        let (mut routes, mut failures) = (HashMap::new(), HashMap::new());
        for outcome in unmade {
            match outcome {
                Outcome::Routed(route) => {
                    routes.insert(route.id, shared.make_route(py, route)?);
                }
                Outcome::Failed(failure) => {
                    failures.insert(Arc::as_ptr(failure), failure_to_python(py, failure)?);
                }
            }
        }
        let events = events.iter().map(|event| event_to_python(py, event));
        let events = PyTuple::new(py, events.collect::<PyResult<Vec<_>>>()?)?;
        let step = class(py, &STEP, "Step")?.call1((seq, (), (), events, more))?.unbind();
        Ok(Self { routes, failures, step, set_attribute: set_attribute(py)?.unbind() })
    }

    /// The `Step` with the requests in it.
    ///
    /// Nothing here runs Python code: only a signal of these last microseconds is handled when the interpreter has the
    /// step, and may drop it.
    pub fn fill(self, py: Python<'_>, taken: Vec<Taken>) -> PyResult<Made> {
        let (mut resolved, mut failed) = (Vec::with_capacity(taken.len()), Vec::new());
        for Taken { object, outcome, made } in taken {
            let value = |values: Option<&Py<PyAny>>| made.or_else(|| values.map(|value| value.clone_ref(py)));
            match outcome {
                Outcome::Routed(route) => resolved.push((object, value(self.routes.get(&route.id)))),
                Outcome::Failed(failure) => {
                    failed.push((object, value(self.failures.get(&Arc::as_ptr(&failure)))));
                }
            }
        }
        let (resolved, failed) = (PyTuple::new(py, resolved)?, PyTuple::new(py, failed)?);
        self.set_attribute.call1(py, (&self.step, intern!(py, "resolved"), &resolved))?;
        self.set_attribute.call1(py, (&self.step, intern!(py, "failed"), &failed))?;
        Ok(Made {
            step: self.step,
            resolved: resolved.into_any().unbind(),
            failed: failed.into_any().unbind(),
        })
    }
}

/// `object.__setattr__`, with which a frozen dataclass sets its own fields; unlike its `__init__` it is no Python code.
fn set_attribute<'py>(py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
    py.get_type::<PyAny>().getattr(intern!(py, "__setattr__"))
}

/// A `Route` with its endpoints.
pub fn route_to_python(py: Python<'_>, route: &Route) -> PyResult<Py<PyAny>> {
    static ROUTE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static ENDPOINT: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let make = class(py, &ENDPOINT, "Endpoint")?;
    let endpoints = route
        .endpoints
        .iter()
        .map(|end| make.call1((route.dp_rank, end.cp, end.tp, end.pp, &end.ip, end.port, end.dummy)))
        .collect::<PyResult<Vec<_>>>()?;
    let mapping = route.mapping.as_deref().map(|mapping| RankMapping::from(*mapping));
    let info = route.info.as_deref().map(|info| PrefillInfo::from(info.clone()));
    let fields = (
        route.addr.as_ref(),
        route.dp_rank,
        mapping,
        PyTuple::new(py, endpoints)?,
        info,
        route.epoch,
        route.fake,
    );
    class(py, &ROUTE, "Route")?.call1(fields).map(Bound::unbind)
}

fn failure_to_python(py: Python<'_>, failure: &Failure) -> PyResult<Py<PyAny>> {
    static FAILURE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let fields = (
        failure.kind.as_str(),
        &failure.reason,
        failure.http_status,
        failure.addr.as_ref(),
        failure.attempts,
        PyTuple::new(py, &failure.contacted)?,
    );
    class(py, &FAILURE, "Failure")?.call1(fields).map(Bound::unbind)
}

fn event_to_python(py: Python<'_>, event: &Event) -> PyResult<Py<PyAny>> {
    static EVENT: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let fields = (
        event.kind.as_str(),
        event.addr.as_ref(),
        event.epoch,
        event.old_instance.as_deref(),
        event.new_instance.as_deref(),
        PyTuple::new(py, event.rooms.iter().map(|room| room.number()).collect::<Vec<_>>())?,
    );
    class(py, &EVENT, "Event")?.call1(fields).map(Bound::unbind)
}

fn class<'py>(
    py: Python<'py>,
    cell: &'static PyOnceLock<Py<PyType>>,
    name: &str,
) -> PyResult<&'py Bound<'py, PyType>> {
    cell.import(py, "disagg.values", name)
}

static STEP: PyOnceLock<Py<PyType>> = PyOnceLock::new();
