//! `RetryPolicy`: how an address is tried.

use disagg_core::retry::RetryPolicy as Core;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// How an address is tried; see the stub for the fields.
#[pyclass(module = "disagg._core", name = "RetryPolicy", frozen, eq)]
#[derive(Clone, Debug, PartialEq)]
pub struct RetryPolicy(pub Core);

#[pymethods]
impl RetryPolicy {
    #[new]
    #[pyo3(signature = (
        max_attempts = Core::DEFAULT.max_attempts, interval_s = Core::DEFAULT.interval_s,
        multiplier = Core::DEFAULT.multiplier, max_interval_s = Core::DEFAULT.max_interval_s,
        jitter = Core::DEFAULT.jitter, cooldown_s = Core::DEFAULT.cooldown_s,
        min_wait_s = Core::DEFAULT.min_wait_s,
    ), text_signature = "(max_attempts=15, interval_s=1.0, multiplier=1.0, max_interval_s=30.0, jitter=0.0, cooldown_s=15.0, min_wait_s=5.0)")]
    fn new(
        max_attempts: u32,
        interval_s: f64,
        multiplier: f64,
        max_interval_s: f64,
        jitter: f64,
        cooldown_s: f64,
        min_wait_s: f64,
    ) -> PyResult<Self> {
        let policy = Core {
            max_attempts,
            interval_s,
            multiplier,
            max_interval_s,
            jitter,
            cooldown_s,
            min_wait_s,
            per_cycle: false,
        };
        policy.validated().map(Self).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Attempts spaced by wall clock: the defaults.
    #[staticmethod]
    fn spaced() -> Self {
        Self(Core::DEFAULT)
    }

    /// The first upstream form: the first `poll()` after a failure releases the next attempt.
    #[staticmethod]
    #[pyo3(signature = (max_attempts = 30))]
    fn per_cycle(max_attempts: u32) -> PyResult<Self> {
        let policy = Core { max_attempts, per_cycle: true, ..Core::DEFAULT };
        policy.validated().map(Self).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    #[getter]
    fn max_attempts(&self) -> u32 {
        self.0.max_attempts
    }

    #[getter]
    fn interval_s(&self) -> f64 {
        self.0.interval_s
    }

    #[getter]
    fn multiplier(&self) -> f64 {
        self.0.multiplier
    }

    #[getter]
    fn max_interval_s(&self) -> f64 {
        self.0.max_interval_s
    }

    #[getter]
    fn jitter(&self) -> f64 {
        self.0.jitter
    }

    #[getter]
    fn cooldown_s(&self) -> f64 {
        self.0.cooldown_s
    }

    #[getter]
    fn min_wait_s(&self) -> f64 {
        self.0.min_wait_s
    }

    #[getter]
    fn paced_by_poll(&self) -> bool {
        self.0.per_cycle
    }

    fn __repr__(&self) -> String {
        let Core {
            max_attempts,
            interval_s,
            multiplier,
            max_interval_s,
            jitter,
            cooldown_s,
            min_wait_s,
            per_cycle,
        } = self.0;
        if per_cycle {
            return format!("RetryPolicy.per_cycle({max_attempts})");
        }
        format!(
            "RetryPolicy(max_attempts={max_attempts}, interval_s={interval_s:?}, multiplier={multiplier:?}, \
             max_interval_s={max_interval_s:?}, jitter={jitter:?}, cooldown_s={cooldown_s:?}, \
             min_wait_s={min_wait_s:?})"
        )
    }

    fn __hash__(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        (self.0.max_attempts, self.0.per_cycle).hash(&mut hasher);
        for number in
            [self.0.interval_s, self.0.multiplier, self.0.jitter, self.0.cooldown_s, self.0.min_wait_s]
        {
            number.to_bits().hash(&mut hasher);
        }
        hasher.finish()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let (py, policy) = (slf.py(), slf.get().0);
        if policy.per_cycle {
            let make = slf.get_type().getattr("per_cycle")?;
            return Ok((make, (policy.max_attempts,).into_pyobject(py)?));
        }
        let fields = (
            policy.max_attempts,
            policy.interval_s,
            policy.multiplier,
            policy.max_interval_s,
            policy.jitter,
            policy.cooldown_s,
            policy.min_wait_s,
        );
        Ok((slf.get_type().into_any(), fields.into_pyobject(py)?))
    }
}
