//! Python binding of disagg: conversion only.

use pyo3::prelude::*;

mod arguments;
mod bell;
mod counters;
mod driver;
mod ends;
mod errors;
mod held;
mod hosts;
mod interpreter;
mod json;
mod rank_mapping;
mod resolver;
mod retry;
mod served_ranks;
mod server;
mod shared;
mod stats;
mod steps;
mod topology;
mod wire;
mod yardstick;

#[pymodule]
mod _core {
    use disagg_core::Dialect;
    use disagg_core::failure::FailureKind;
    use disagg_core::pending::MAX_TOPOLOGY_BYTES;
    use disagg_core::topology::{MAX_RANKS, MAX_SIZE};
    use pyo3::prelude::*;
    use pyo3::types::PyDict;

    #[pymodule_export]
    use super::driver::Driver;
    #[pymodule_export]
    use super::hosts::HostList;
    #[pymodule_export]
    use super::rank_mapping::{Contact, RankMapping, compatibility, kv_head_range, map_ranks};
    #[pymodule_export]
    use super::resolver::Resolver;
    #[pymodule_export]
    use super::retry::RetryPolicy;
    #[pymodule_export]
    use super::served_ranks::{ServedRanks, serve_ranks};
    #[pymodule_export]
    use super::server::PyBootstrapServer;
    #[pymodule_export]
    use super::topology::{DecodeRank, PrefillInfo};
    #[pymodule_export]
    use super::wire::{canonical_address, parse_dp_ranks, parse_endpoint, parse_not_ready};
    use super::yardstick::EmptyAdd;

    /// The failure kinds with their HTTP statuses, limits, the topology queries, the version, and the benches' yardstick.
    #[pymodule_init]
    fn constants(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::interpreter::refuse_a_second_one(module.py())?;
        let kinds = PyDict::new(module.py());
        for kind in FailureKind::ALL {
            kinds.set_item(kind.as_str(), kind.http_status())?;
        }
        module.add("FAILURE_KINDS", kinds)?;
        module.add("MAX_RANKS", MAX_RANKS)?;
        module.add("MAX_SIZE", MAX_SIZE)?;
        module.add("MAX_TOPOLOGY_BYTES", MAX_TOPOLOGY_BYTES)?;
        module.add("TOPOLOGY_QUERIES", (Dialect::E3.topology_query(), Dialect::E2.topology_query()))?;
        // Not by `add`, which would put it into `__all__`.
        module.setattr("_EmptyAdd", module.py().get_type::<EmptyAdd>())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
