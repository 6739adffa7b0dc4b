//! Decode ranks and prefill engines for Python.

mod decode_rank;
mod prefill_info;

use disagg_core::topology::MAX_SIZE;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::Value;

pub use decode_rank::DecodeRank;
pub use prefill_info::PrefillInfo;

use crate::arguments::Whole;
use crate::json;

/// The constructor's arguments of one value, in its order.
type Fields<'py> = Vec<(&'static str, Bound<'py, PyAny>)>;

fn field<'py>(
    py: Python<'py>,
    name: &'static str,
    value: impl IntoPyObject<'py, Error: Into<PyErr>>,
) -> PyResult<(&'static str, Bound<'py, PyAny>)> {
    value.into_bound_py_any(py).map(|value| (name, value))
}

fn tree<'py>(py: Python<'py>, value: Option<&Value>) -> PyResult<Option<Bound<'py, PyAny>>> {
    value.map(|value| json::to_python(py, value)).transpose()
}

fn layout(dict: Option<&Bound<'_, PyDict>>) -> PyResult<Option<Value>> {
    let object = dict.map(|dict| json::to_object("spec_layout", dict));
    Ok(object.transpose()?.map(Value::Object))
}

fn size(name: &str, value: Whole) -> PyResult<u32> {
    value.within(name, 1, MAX_SIZE)
}

fn positive(name: &str, value: Option<Whole>) -> PyResult<Option<u32>> {
    value.map(|value| value.within(name, 1, u32::MAX)).transpose()
}
