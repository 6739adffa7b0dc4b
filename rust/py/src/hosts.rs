//! `HostList`: which hosts may be dialled.

use disagg_core::allow::HostList as Core;
use disagg_core::pending::Allowed;
use pyo3::prelude::*;

use crate::errors::python::ConfigError;

/// Names, wildcards and networks; see the stub.
#[pyclass(module = "disagg._core", frozen)]
pub struct HostList(Core);

#[pymethods]
impl HostList {
    #[new]
    #[pyo3(signature = (entries, /, option = "allowed_hosts"))]
    #[expect(clippy::needless_pass_by_value, reason = "what PyO3 makes of a sequence")]
    fn new(entries: Vec<String>, option: &str) -> PyResult<Self> {
        parse(&entries, option).map(Self)
    }

    #[pyo3(signature = (host, /))]
    fn verdict(&self, host: &str) -> &'static str {
        self.0.verdict(host).as_str()
    }

    #[pyo3(signature = (ip, /))]
    fn allows_resolved(&self, ip: &str) -> bool {
        self.0.allows_resolved(ip)
    }
}

/// The two lists of a resolver; `ConfigError` names the option, the entry and its fault.
pub fn allowed(hosts: Option<&[String]>, rank_hosts: Option<&[String]>) -> PyResult<Allowed> {
    Ok(Allowed {
        hosts: hosts.map(|entries| parse(entries, "allowed_hosts")).transpose()?,
        rank_hosts: rank_hosts.map(|entries| parse(entries, "allowed_rank_hosts")).transpose()?,
    })
}

fn parse(entries: &[String], option: &str) -> PyResult<Core> {
    Core::new(entries).map_err(|error| ConfigError::new_err((option.to_owned(), error.to_string())))
}
