//! One interpreter in a process: what the modules of several would share is not made for that.

use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::exceptions::PyImportError;
use pyo3::prelude::*;

/// Where the `sys` of the interpreter lives that imported this module first.
static FIRST: AtomicUsize = AtomicUsize::new(0);

/// Refuse every interpreter but the first one; PyO3's own check does not see all of them.
///
/// # Errors
/// `ImportError` in another interpreter of the same process.
pub fn refuse_a_second_one(py: Python<'_>) -> PyResult<()> {
    let sys = py.import("sys")?.as_ptr().addr();
    match FIRST.compare_exchange(0, sys, Ordering::Relaxed, Ordering::Relaxed) {
        Err(first) if first != sys => Err(PyImportError::new_err(
            "disagg does not work in subinterpreters: another interpreter of this process has imported it",
        )),
        Ok(_) | Err(_) => Ok(()),
    }
}
