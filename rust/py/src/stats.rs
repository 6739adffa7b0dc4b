//! `Resolver.stats()` as a dict.

use disagg_core::pending::{CommandKind, Stats};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Counts of everything, for people and metrics; `ends` are those that `state_of` remembers.
pub fn to_python<'py>(py: Python<'py>, stats: &Stats, ends: usize) -> PyResult<Bound<'py, PyDict>> {
    let [unknown, fetching, waiting, ready, marked] = stats.peers;
    let pending = [
        ("need_info", stats.need_info),
        ("need_dp_rank", stats.need_dp_rank),
        ("need_endpoints", stats.need_endpoints),
        ("decided", stats.decided),
    ];
    let peers = [
        ("unknown", unknown),
        ("fetching", fetching),
        ("waiting", waiting),
        ("ready", ready),
        ("marked", marked),
    ];
    let stages = ["need_info", "need_dp_rank", "need_endpoints"];
    let oldest = stages.into_iter().zip(stats.oldest.map(|age| age.as_secs_f64()));
    let http = CommandKind::HTTP.iter().map(|kind| kind.as_str()).zip(stats.http);
    let dict = PyDict::new(py);
    dict.set_item("pending", named(py, pending)?)?;
    dict.set_item("oldest_s", named(py, oldest)?)?;
    dict.set_item("peers", named(py, peers)?)?;
    dict.set_item("rooms", stats.rooms)?;
    dict.set_item("tombstones", stats.tombstones)?;
    dict.set_item("in_flight", stats.in_flight)?;
    dict.set_item("remembered_ends", ends)?;
    dict.set_item("http", named(py, http)?)?;
    dict.set_item("attempts", stats.attempts)?;
    dict.set_item("attempts_failed", stats.attempts_failed)?;
    dict.set_item("queries", stats.handed_out(CommandKind::DpRanks))?;
    dict.set_item("evictions", stats.evictions)?;
    Ok(dict)
}

/// A dict of names and values.
pub fn named<'py, T: IntoPyObject<'py>>(
    py: Python<'py>,
    pairs: impl IntoIterator<Item = (&'static str, T)>,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    pairs.into_iter().try_for_each(|(name, value)| dict.set_item(name, value))?;
    Ok(dict)
}
