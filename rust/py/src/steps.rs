//! What a poll took, as the values of `disagg.values`.

use std::sync::Arc;

use disagg_core::failure::Failure;
use disagg_core::ids::RouteId;
use disagg_core::pending::{Event, Outcome, Route, Step};
use hashbrown::HashMap;
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

/// What a poll took, until its `Step` is made.
pub struct Delivery {
    /// Its ends are in `taken`.
    pub step: Step,
    /// The requests that ended.
    pub taken: Vec<Taken>,
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
    /// Its `Step`, which takes the requests.
    ///
    /// Making values runs Python code, in which a signal handler may raise. So that comes first: when it fails, the
    /// delivery is whole, for another try. Afterwards nothing runs Python code: only a signal of these last
    /// microseconds is handled when the interpreter has the step, and may drop it.
    pub fn make(&mut self, py: Python<'_>, shared: &Shared, more: bool) -> PyResult<Made> {
        make_values(py, shared, &mut self.taken)?;
        let events = self.step.events.iter().map(|event| event_to_python(py, event));
        let events = PyTuple::new(py, events.collect::<PyResult<Vec<_>>>()?)?;
        let step = class(py, &STEP, "Step")?.call1((self.step.seq, (), (), events, more))?;
        let set = set_attribute(py)?;
        let (mut resolved, mut failed) = (Vec::with_capacity(self.taken.len()), Vec::new());
        for Taken { object, outcome, made } in self.taken.drain(..) {
            match outcome {
                Outcome::Routed(_) => resolved.push((object, made)),
                Outcome::Failed(_) => failed.push((object, made)),
            }
        }
        let (resolved, failed) = (PyTuple::new(py, resolved)?, PyTuple::new(py, failed)?);
        set.call1((&step, intern!(py, "resolved"), &resolved))?;
        set.call1((&step, intern!(py, "failed"), &failed))?;
        Ok(Made {
            step: step.unbind(),
            resolved: resolved.into_any().unbind(),
            failed: failed.into_any().unbind(),
        })
    }
}

/// Makes each `Route` and `Failure` that there is not yet, and each once.
fn make_values(py: Python<'_>, shared: &Shared, taken: &mut [Taken]) -> PyResult<()> {
    let mut routes: HashMap<RouteId, Py<PyAny>> = HashMap::new();
    let mut failures: HashMap<*const Failure, Py<PyAny>> = HashMap::new();
    for Taken { outcome, made, .. } in taken {
        if made.is_some() {
            continue;
        }
        let value = match outcome {
            Outcome::Routed(route) => match routes.get(&route.id) {
                Some(value) => value.clone_ref(py),
                None => {
                    let value = shared.make_route(py, route)?;
                    routes.insert(route.id, value.clone_ref(py));
                    value
                }
            },
            Outcome::Failed(failure) => match failures.get(&Arc::as_ptr(failure)) {
                Some(value) => value.clone_ref(py),
                None => {
                    let value = failure_to_python(py, failure)?;
                    failures.insert(Arc::as_ptr(failure), value.clone_ref(py));
                    value
                }
            },
        };
        *made = Some(value);
    }
    Ok(())
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
