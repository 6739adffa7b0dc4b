//! The one table from core errors to Python exceptions. The classes live in `disagg.errors`.

use disagg_core::compat::{Incompatible, Reason, Side};
use disagg_core::error::{InvalidValue, ProtocolError};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyType};

use crate::json;

/// The exception classes of `disagg.errors` that Rust raises.
pub mod python {
    pyo3::import_exception!(disagg.errors, ConfigError);
    pyo3::import_exception!(disagg.errors, IncompatiblePeer);
    pyo3::import_exception!(disagg.errors, ProtocolError);
}

/// Every error that the core hands to the binding.
pub enum Error {
    /// The caller's mistake.
    Invalid(InvalidValue),
    /// The other server's mistake.
    Protocol(ProtocolError),
    /// A pair that cannot work.
    Incompatible(Incompatible),
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        match error {
            Error::Invalid(error) => PyValueError::new_err(error.to_string()),
            Error::Protocol(ProtocolError { field, value, rule }) => {
                python::ProtocolError::new_err((field, value, rule.to_string()))
            }
            Error::Incompatible(Incompatible { reasons }) => Python::attach(|py| {
                reasons_to_python(py, &reasons).map_or_else(
                    |error| error,
                    |reasons| python::IncompatiblePeer::new_err((reasons.unbind(),)),
                )
            }),
        }
    }
}

impl From<InvalidValue> for Error {
    fn from(error: InvalidValue) -> Self {
        Self::Invalid(error)
    }
}

impl From<ProtocolError> for Error {
    fn from(error: ProtocolError) -> Self {
        Self::Protocol(error)
    }
}

impl From<Incompatible> for Error {
    fn from(error: Incompatible) -> Self {
        Self::Incompatible(error)
    }
}

/// A list of `disagg.errors.Reason`.
pub fn reasons_to_python<'py>(py: Python<'py>, reasons: &[Reason]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for reason in reasons {
        list.append(reason_to_python(py, reason)?)?;
    }
    Ok(list)
}

fn reason_to_python<'py>(py: Python<'py>, reason: &Reason) -> PyResult<Bound<'py, PyAny>> {
    static REASON: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static KIND: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static SEVERITY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    const MODULE: &str = "disagg.errors";
    REASON.import(py, MODULE, "Reason")?.call1((
        KIND.import(py, MODULE, "ReasonKind")?.call1((reason.kind.name(),))?,
        SEVERITY.import(py, MODULE, "Severity")?.call1((reason.severity.name(),))?,
        side_to_python(py, &reason.local)?,
        side_to_python(py, &reason.remote)?,
        reason.to_string(),
    ))
}

fn side_to_python<'py>(py: Python<'py>, side: &Side) -> PyResult<Bound<'py, PyAny>> {
    match side {
        Side::Absent => Ok(py.None().into_bound(py)),
        Side::Number(number) => Ok(number.into_pyobject(py)?.into_any()),
        Side::Switch(on) => Ok(on.into_pyobject(py)?.to_owned().into_any()),
        Side::Text(text) => Ok(text.into_pyobject(py)?.into_any()),
        Side::Json(tree) => json::to_python(py, tree),
        Side::Heads { heads, tp } => Ok((heads, tp).into_pyobject(py)?.into_any()),
        Side::Sizes { tp, cp, pp } => Ok((tp, cp, pp).into_pyobject(py)?.into_any()),
    }
}
