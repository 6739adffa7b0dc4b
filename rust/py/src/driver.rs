//! `_core.Driver`: the network's side of a resolver.
//!
//! Apart from `Resolver`, so that the network thread does not keep a resolver alive that everybody else dropped.

use std::sync::Arc;

use disagg_core::TransportError;
use disagg_core::failure::FailureKind;
use disagg_core::ids::Ticket;
use disagg_core::pending::{Command, Headers};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::counters;
use crate::shared::Shared;

/// Instance, epoch and features of an answer, each None where the header is absent.
type PeerHeaders<'a> = (Option<&'a str>, Option<&'a str>, Option<&'a str>);

/// The network's side of one resolver: commands out, facts in.
#[pyclass(module = "disagg._core", frozen)]
pub struct Driver(pub Arc<Shared>);

#[pymethods]
impl Driver {
    fn bell_fileno(&self) -> i32 {
        self.0.bell.fileno()
    }

    fn take_commands<'py>(&self, py: Python<'py>, limit: usize) -> PyResult<Bound<'py, PyList>> {
        let mut commands: Vec<Command> = Vec::new();
        let retired = {
            let mut state = self.0.lock(py);
            while commands.len() < limit {
                let Some(command) = state.machine.poll_command() else {
                    self.0.bell.silence();
                    break;
                };
                commands.push(command);
            }
            state.retire()
        };
        drop(retired);
        let tuples = commands.into_iter().map(|command| {
            (
                command.ticket.0,
                command.kind.as_str(),
                command.addr.to_string(),
                if command.body.is_some() { "POST" } else { "GET" },
                command.path,
                command.body.map(|body| PyBytes::new(py, &body)),
                command.max_body,
                command.wait_ms,
            )
        });
        PyList::new(py, tuples.collect::<Vec<_>>())
    }

    #[pyo3(signature = (ticket, status, body, headers = None))]
    fn on_response(
        &self,
        py: Python<'_>,
        ticket: u64,
        status: u16,
        body: &[u8],
        headers: Option<PeerHeaders<'_>>,
    ) -> PyResult<()> {
        let (instance, epoch, features) = headers.unwrap_or_default();
        let headers = Headers { instance, epoch, features };
        let mut state = self.0.lock(py);
        state.machine.on_response(self.0.clock.now(), Ticket(ticket), status, body, headers);
        let completed = state.machine.poll_completed();
        self.0.ring_if_needed(&mut state);
        drop(state);
        for route in completed {
            // 2 us and more each, which the scheduler's next poll is spared. It makes what could not be made here.
            match self.0.make_route(py, &route) {
                Err(error) if !error.is_instance_of::<PyException>(py) => return Err(error),
                Ok(_) | Err(_) => {}
            }
        }
        Ok(())
    }

    fn on_error(&self, py: Python<'_>, ticket: u64, what: &str, message: &str) {
        let message = if message.is_empty() { what } else { message };
        let mut state = self.0.lock(py);
        let error = TransportError::from_name(what);
        state.machine.on_error(self.0.clock.now(), Ticket(ticket), error, message);
        self.0.ring_if_needed(&mut state);
    }

    fn on_timer(&self, py: Python<'_>) {
        let mut state = self.0.lock(py);
        state.machine.on_timer(self.0.clock.now());
        self.0.ring_if_needed(&mut state);
    }

    fn next_timer(&self, py: Python<'_>) -> Option<f64> {
        let now = self.0.clock.now();
        let due = self.0.lock(py).machine.poll_timer()?;
        Some(due.since(now).as_secs_f64())
    }

    fn has_work(&self, py: Python<'_>) -> bool {
        let now = self.0.clock.now();
        self.0.lock(py).machine.has_work(now)
    }

    #[pyo3(signature = (reason, *, closed = false))]
    fn fail_all(&self, py: Python<'_>, reason: &str, closed: bool) {
        let kind = if closed { FailureKind::Closed } else { FailureKind::Internal };
        let mut state = self.0.lock(py);
        state.machine.fail_all(self.0.clock.now(), kind, reason);
        self.0.ring_if_needed(&mut state);
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.0.stats(py)
    }

    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.0.lock(py).machine.counters();
        counters::to_python(py, &counters)
    }

    fn take_changes<'py>(&self, py: Python<'py>, limit: usize) -> PyResult<Bound<'py, PyList>> {
        let changes = self.0.lock(py).machine.poll_changes(limit);
        let now = self.0.clock.now();
        let dicts: PyResult<Vec<_>> =
            changes.into_iter().map(|change| counters::change_to_python(py, change, now)).collect();
        PyList::new(py, dicts?)
    }
}
