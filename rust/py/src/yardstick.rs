//! `_core._EmptyAdd`: what a call costs that does nothing.
//!
//! For benches only, and here because nothing else is comparable: the same compiler, the same build, the same kind of
//! class, and an `add` whose arguments are read as `Resolver.add` reads them.

use pyo3::prelude::*;

/// Has an `add` with the signature of `Resolver.add`.
#[pyclass(module = "disagg._core", name = "_EmptyAdd", frozen, subclass, weakref)]
pub struct EmptyAdd;

#[pymethods]
impl EmptyAdd {
    #[new]
    fn new() -> Self {
        Self
    }

    #[pyo3(signature = (request, addr, room, dp_rank = None))]
    #[expect(unused_variables, reason = "it is empty")]
    fn add(
        &self,
        request: &Bound<'_, PyAny>,
        addr: &str,
        room: &Bound<'_, PyAny>,
        dp_rank: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Py<PyAny>>> {
        Ok(None)
    }
}
