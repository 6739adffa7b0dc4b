//! `Driver.counters()` and `Driver.take_changes()` as dicts.

use disagg_core::pending::{
    ByKind, Change, CommandKind, Counters, EventKind, PeerCounters, RequestCounters, Wait,
};
use disagg_core::time::Tick;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::stats::named;

/// What was done so far, for metrics.
pub fn to_python<'py>(py: Python<'py>, counters: &Counters) -> PyResult<Bound<'py, PyDict>> {
    let Counters { added, routed_at_once, requests, peers, changes_dropped } = counters;
    let attempts = [
        ("good", named(py, [("none", peers.good)])?),
        ("transient", by_kind(py, &peers.transient, &PeerCounters::TRANSIENT)?),
        ("permanent", by_kind(py, &peers.permanent, &PeerCounters::PERMANENT)?),
    ];
    let failed = requests.failed.iter().map(|(kind, count)| (kind.as_str(), count));
    let http = CommandKind::HTTP.iter().map(|kind| kind.as_str()).zip(peers.http);
    let events = EventKind::ALL.iter().map(|kind| kind.as_str()).zip(peers.events);
    let dict = PyDict::new(py);
    dict.set_item("added", added)?;
    dict.set_item("ended", ended(py, *routed_at_once, requests)?)?;
    dict.set_item("failed", named(py, failed)?)?;
    dict.set_item("attempts", named(py, attempts)?)?;
    dict.set_item("http", named(py, http)?)?;
    dict.set_item("rooms_asked", peers.rooms_asked)?;
    dict.set_item("rooms_resolved", peers.rooms_resolved)?;
    dict.set_item("events", named(py, events)?)?;
    dict.set_item("evictions", peers.evictions)?;
    dict.set_item("changes_dropped", changes_dropped)?;
    dict.set_item("wait_bounds_s", Wait::BOUNDS.map(|bound| bound.as_secs_f64()))?;
    dict.set_item("waits", waits(py, requests)?)?;
    Ok(dict)
}

/// One change; `now` tells how old it is.
pub fn change_to_python(py: Python<'_>, change: Change, now: Tick) -> PyResult<Bound<'_, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("event", change.kind.as_str())?;
    dict.set_item("addr", &*change.addr)?;
    dict.set_item("attempt", change.attempt.map(|(attempt, _)| attempt))?;
    dict.set_item("budget", change.attempt.map(|(_, budget)| budget))?;
    dict.set_item("kind", change.failure.map(disagg_core::failure::FailureKind::as_str))?;
    dict.set_item("waiting", change.waiting)?;
    dict.set_item("epoch", change.epoch)?;
    let sizes =
        change.sizes.map(|[dp, cp, tp, pp]| named(py, [("dp", dp), ("cp", cp), ("tp", tp), ("pp", pp)]));
    dict.set_item("sizes", sizes.transpose()?)?;
    dict.set_item("text", change.text)?;
    dict.set_item("age_s", now.since(change.at).as_secs_f64())?;
    Ok(dict)
}

fn ended<'py>(
    py: Python<'py>,
    routed_at_once: u64,
    requests: &RequestCounters,
) -> PyResult<Bound<'py, PyDict>> {
    let ends = [
        ("routed_at_once", routed_at_once),
        ("fake", requests.fake),
        ("resolved", requests.resolved),
        ("failed", requests.failed.sum()),
        ("discarded", requests.discarded),
    ];
    named(py, ends)
}

fn by_kind<'py>(
    py: Python<'py>,
    counts: &ByKind,
    kinds: &[disagg_core::failure::FailureKind],
) -> PyResult<Bound<'py, PyDict>> {
    let shown = counts.iter().filter(|(kind, _)| kinds.contains(kind));
    named(py, shown.map(|(kind, count)| (kind.as_str(), count)))
}

fn waits<'py>(py: Python<'py>, requests: &RequestCounters) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (wait, waits) in Wait::ALL.iter().zip(&requests.waits) {
        let one = PyDict::new(py);
        one.set_item("sum_s", waits.sum.as_secs_f64())?;
        one.set_item("buckets", waits.buckets)?;
        dict.set_item(wait.as_str(), one)?;
    }
    Ok(dict)
}
