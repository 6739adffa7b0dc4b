//! `BootstrapServer`: a registry that this process hosts.

use std::fmt::Display;
use std::time::Duration;

use disagg_server::{BindError, BootstrapServer, Options};
use pyo3::exceptions::{PyOSError, PyTypeError, PyValueError};
use pyo3::prelude::*;

/// A bootstrap registry over HTTP, on threads of its own; it listens when this returns.
#[pyclass(frozen, module = "disagg", name = "BootstrapServer")]
pub struct PyBootstrapServer {
    server: BootstrapServer,
}

#[pymethods]
impl PyBootstrapServer {
    #[new]
    #[pyo3(
        signature = (
            host = "127.0.0.1",
            port = 0,
            *,
            old_decodes = Options::DEFAULT.old_decodes,
            room_ttl_s = Options::DEFAULT.room_ttl.as_secs_f64(),
            room_cap = i64::from(Options::DEFAULT.room_cap),
        ),
        text_signature = "(host='127.0.0.1', port=0, *, old_decodes=False, room_ttl_s=600.0, room_cap=1000000)"
    )]
    fn new(
        py: Python<'_>,
        host: &str,
        port: i64,
        old_decodes: bool,
        room_ttl_s: f64,
        room_cap: i64,
    ) -> PyResult<Self> {
        let port = in_range("port", port)?;
        let options = Options {
            old_decodes,
            room_ttl: seconds("room_ttl_s", room_ttl_s)?,
            room_cap: in_range("room_cap", room_cap)?,
        };
        let options = options.checked().map_err(value_error)?;
        // Looking a name up may take seconds.
        let server = py.detach(|| BootstrapServer::bind(host, port, &options));
        Ok(Self { server: server.map_err(os_error)? })
    }

    #[getter]
    fn address(&self) -> String {
        self.server.address().to_string()
    }

    #[getter]
    fn url(&self) -> String {
        format!("http://{}", self.server.address())
    }

    #[getter]
    fn port(&self) -> u16 {
        self.server.address().port()
    }

    #[pyo3(signature = (timeout_s = 2.0))]
    fn close(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        let timeout = seconds("timeout_s", timeout_s)?;
        py.detach(|| self.server.close(timeout));
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _class: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close(py, 2.0)
    }

    fn __repr__(&self) -> String {
        let state = if self.server.is_open() { "listening" } else { "closed" };
        format!("<BootstrapServer {} {state}>", self.server.address())
    }

    fn __reduce__(&self) -> PyResult<()> {
        let text = "cannot pickle a BootstrapServer: it owns a socket and threads";
        Err(PyTypeError::new_err(text))
    }
}

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|_| PyValueError::new_err(format!("{name} is {value}: must be seconds, at least 0")))
}

fn in_range<T: TryFrom<i64>>(name: &str, value: i64) -> PyResult<T> {
    T::try_from(value).map_err(|_| PyValueError::new_err(format!("{name} is {value}: out of range")))
}

fn value_error(error: impl Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// With an errno Python picks the subclass, such as `PermissionError`.
fn os_error(error: BindError) -> PyErr {
    match error.os_error() {
        Some(errno) => PyOSError::new_err((errno, error.to_string())),
        None => PyOSError::new_err(error.to_string()),
    }
}
