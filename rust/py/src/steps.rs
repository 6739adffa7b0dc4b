//! What a poll took, as the values of `disagg.values`.

use std::sync::Arc;

use disagg_core::failure::Failure;
use disagg_core::ids::RouteId;
use disagg_core::pending::{Event, Outcome, Route, Step};
use hashbrown::{HashMap, HashSet};
use pyo3::PyTraverseError;
use pyo3::gc::PyVisit;
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
    /// Its `Route`, if one was made before.
    pub made: Option<Py<PyAny>>,
}

/// What a poll took.
pub struct Delivery {
    /// Its ends are in `taken`.
    pub step: Step,
    /// The requests that ended.
    pub taken: Vec<Taken>,
}

impl Delivery {
    /// Show all objects to the garbage collector. One that is shared is shown too often then, which is why only
    /// `Ends` shows what it holds.
    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        for Taken { object, made, .. } in &self.taken {
            visit.call(object)?;
            visit.call(made)?;
        }
        Ok(())
    }
}

/// The one step of polls at which nothing was decided.
pub fn empty(py: Python<'_>) -> PyResult<Py<PyAny>> {
    static EMPTY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let step = EMPTY.get_or_try_init(py, || class(py, &STEP, "Step")?.call1((0,)).map(Bound::unbind))?;
    Ok(step.clone_ref(py))
}

/// A delivery whose `Step` was not made, because a signal handler raised meanwhile.
pub struct Undelivered {
    /// What the next poll gives.
    pub delivery: Arc<Delivery>,
    /// Places in `taken` of requests that were discarded since.
    pub discarded: HashSet<usize>,
}

impl Undelivered {
    /// The first try comes to an end in the poll that took it.
    pub fn new(delivery: Arc<Delivery>) -> Self {
        Self { delivery, discarded: HashSet::new() }
    }

    /// Leave a request out; false when it is not in it.
    pub fn discard(&mut self, object: &Py<PyAny>) -> bool {
        let place = self.delivery.taken.iter().position(|taken| taken.object.is(object));
        place.is_some_and(|place| self.discarded.insert(place))
    }
}

/// A `Step`; makes each `Route` and `Failure` once.
///
/// That runs Python code, in which a signal handler may raise: what is delivered stays whole, for another try.
pub fn to_python(
    py: Python<'_>,
    shared: &Shared,
    Undelivered { delivery, discarded }: &Undelivered,
    more: bool,
) -> PyResult<Py<PyAny>> {
    let Delivery { step, taken } = &**delivery;
    let mut routes: HashMap<RouteId, Py<PyAny>> = HashMap::new();
    let mut failures: HashMap<*const Failure, Py<PyAny>> = HashMap::new();
    let (mut resolved, mut failed) = (Vec::with_capacity(taken.len()), Vec::new());
    for (place, Taken { object, outcome, made }) in taken.iter().enumerate() {
        if !discarded.is_empty() && discarded.contains(&place) {
            continue;
        }
        match outcome {
            Outcome::Routed(route) => {
                let made = match (made, routes.get(&route.id)) {
                    (Some(made), _) => made.clone_ref(py),
                    (None, Some(made)) => made.clone_ref(py),
                    (None, None) => {
                        let made = shared.make_route(py, route)?;
                        routes.insert(route.id, made.clone_ref(py));
                        made
                    }
                };
                resolved.push((object.clone_ref(py), made));
            }
            Outcome::Failed(failure) => {
                let made = match failures.get(&Arc::as_ptr(failure)) {
                    Some(made) => made.clone_ref(py),
                    None => {
                        let made = failure_to_python(py, failure)?;
                        failures.insert(Arc::as_ptr(failure), made.clone_ref(py));
                        made
                    }
                };
                failed.push((object.clone_ref(py), made));
            }
        }
    }
    let events = step.events.iter().map(|event| event_to_python(py, event)).collect::<PyResult<Vec<_>>>()?;
    let fields =
        (step.seq, PyTuple::new(py, resolved)?, PyTuple::new(py, failed)?, PyTuple::new(py, events)?, more);
    class(py, &STEP, "Step")?.call1(fields).map(Bound::unbind)
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
