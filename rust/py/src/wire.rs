//! Spellings and answers of the wire, for Python's tools.

use disagg_core::{addr, wire};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::Error;

/// The one spelling of a bootstrap address: `host:port` or `[v6]:port`.
#[pyfunction]
#[pyo3(signature = (text, /, default_port = Some(8998)), text_signature = "(text, /, default_port=8998)")]
pub fn canonical_address(text: &str, default_port: Option<u16>) -> PyResult<String> {
    addr::canonical(text, default_port).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// What a registry that answered 503 says is missing, as a clause; None when it does not say.
#[pyfunction]
#[pyo3(signature = (body, /))]
pub fn parse_not_ready(body: &[u8]) -> Option<String> {
    wire::parse_not_ready(body)
}

/// Where a rank listens, (ip, port), or `ProtocolError`.
#[pyfunction]
#[pyo3(signature = (body, /))]
pub fn parse_endpoint(body: &[u8]) -> PyResult<(String, u16)> {
    let found = wire::parse_endpoint(body).map_err(Error::from)?;
    Ok((found.ip.to_string(), found.port))
}

/// The dp rank of each room in an answer to `query_dp_ranks`, or `ProtocolError` for the first bad one.
#[pyfunction]
#[pyo3(signature = (body, /))]
pub fn parse_dp_ranks<'py>(py: Python<'py>, body: &[u8]) -> PyResult<Bound<'py, PyDict>> {
    let ranks = PyDict::new(py);
    for (room, rank) in wire::parse_dp_ranks(body).map_err(Error::from)? {
        ranks.set_item(room, rank.map_err(Error::from)?)?;
    }
    Ok(ranks)
}
