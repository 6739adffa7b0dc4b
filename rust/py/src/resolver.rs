//! `_core.Resolver`: the scheduler's side.

use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use disagg_core::pending::{AddError, Added, Machine, Options, Route};
use disagg_core::time::Tick;
use hashbrown::HashMap;
use pyo3::PyTraverseError;
use pyo3::exceptions::{PyKeyError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{preset_of, room_of};
use crate::bell::Bell;
use crate::driver::Driver;
use crate::ends::{End, Ends};
use crate::held::Held;
use crate::hosts;
use crate::retry::RetryPolicy;
use crate::shared::{Clock, Shared, State};
use crate::steps::{self, Delivery, Taken};
use crate::topology::DecodeRank;

/// The pending requests of one decode rank; `disagg.Resolver` adds the network.
#[pyclass(module = "disagg._core", name = "Resolver", frozen, subclass, weakref)]
pub struct Resolver {
    shared: Arc<Shared>,
}

/// What `add` found, carried out of the lock.
enum Found {
    Ready(Py<PyAny>),
    ToMake(Arc<Route>),
}

#[pymethods]
impl Resolver {
    #[new]
    #[pyo3(signature = (
        decode, retry = None, *, default_port = Options::DEFAULT.default_port,
        dp_rank_timeout_s = Options::DEFAULT.dp_rank_timeout_s,
        endpoint_timeout_s = Options::DEFAULT.endpoint_timeout_s,
        request_timeout_s = Options::DEFAULT.request_timeout_s,
        heartbeat_interval_s = Options::DEFAULT.heartbeat_interval_s,
        heartbeat_failures = Options::DEFAULT.heartbeat_failures,
        heartbeat_min_down_s = Options::DEFAULT.heartbeat_min_down_s,
        peer_ttl_s = Options::DEFAULT.peer_ttl_s, max_addresses = Options::DEFAULT.max_addresses,
        max_endpoint_lookups_per_peer = Options::DEFAULT.max_endpoint_lookups_per_peer,
        force_query = false, track_rooms = false, not_found_is_transient = false, seed = 0, allowed_hosts = None, allowed_rank_hosts = None,
        virtual_time = false,
    ), text_signature = "(decode, retry=None, *, default_port=8998, dp_rank_timeout_s=30.0, \
        endpoint_timeout_s=10.0, request_timeout_s=120.0, heartbeat_interval_s=5.0, heartbeat_failures=2, \
        heartbeat_min_down_s=10.0, peer_ttl_s=900.0, max_addresses=4096, max_endpoint_lookups_per_peer=8, \
        force_query=False, track_rooms=False, not_found_is_transient=False, seed=0, allowed_hosts=None, \
        allowed_rank_hosts=None, virtual_time=False)")]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python constructor")]
    #[expect(clippy::needless_pass_by_value, reason = "what PyO3 makes of sequences")]
    fn new(
        decode: &Bound<'_, DecodeRank>,
        retry: Option<&Bound<'_, RetryPolicy>>,
        default_port: Option<u16>,
        dp_rank_timeout_s: f64,
        endpoint_timeout_s: f64,
        request_timeout_s: f64,
        heartbeat_interval_s: f64,
        heartbeat_failures: u32,
        heartbeat_min_down_s: f64,
        peer_ttl_s: f64,
        max_addresses: u32,
        max_endpoint_lookups_per_peer: u32,
        force_query: bool,
        track_rooms: bool,
        not_found_is_transient: bool,
        seed: u64,
        allowed_hosts: Option<Vec<String>>,
        allowed_rank_hosts: Option<Vec<String>>,
        virtual_time: bool,
    ) -> PyResult<Self> {
        let options = Options {
            default_port,
            dp_rank_timeout_s,
            endpoint_timeout_s,
            request_timeout_s,
            heartbeat_interval_s,
            heartbeat_failures,
            heartbeat_min_down_s,
            peer_ttl_s,
            max_addresses,
            max_endpoint_lookups_per_peer,
            force_query,
            track_rooms,
            not_found_is_transient,
            seed,
        };
        let options = options.validated().map_err(|error| PyValueError::new_err(error.to_string()))?;
        let allowed = hosts::allowed(allowed_hosts.as_deref(), allowed_rank_hosts.as_deref())?;
        let policy = retry.map_or(disagg_core::retry::RetryPolicy::DEFAULT, |retry| retry.get().0);
        let clock =
            if virtual_time { Clock::Virtual(AtomicU64::new(0)) } else { Clock::Monotonic(Instant::now()) };
        let machine = Machine::new(decode.get().inner().clone(), policy, options, clock.now());
        let machine = machine.with_allowed(allowed);
        let state = State {
            machine,
            held: Held::default(),
            ends: Ends::default(),
            undelivered: VecDeque::new(),
            routes: HashMap::new(),
        };
        let shared =
            Shared { state: Mutex::new(state), clock, bell: Bell::new()?, forked: AtomicBool::new(false) };
        Ok(Self { shared: Arc::new(shared) })
    }

    #[pyo3(signature = (request, addr, room, dp_rank = None))]
    fn add(
        &self,
        request: &Bound<'_, PyAny>,
        addr: &str,
        room: &Bound<'_, PyAny>,
        dp_rank: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let py = request.py();
        let room = room_of(room)?;
        let preset = dp_rank.map(preset_of).transpose()?;
        let mut state = self.shared.live(py)?;
        if state.is_pending(request.as_unbound()) {
            drop(state);
            return Err(PyValueError::new_err("request is pending already; discard it first"));
        }
        let State { machine, routes, ends, .. } = &mut *state;
        let found = |route: &Arc<Route>| match routes.get(&route.id) {
            Some(made) => Found::Ready(made.clone_ref(py)),
            None => Found::ToMake(Arc::clone(route)),
        };
        let found = match machine.add_cached(addr, room, preset).map(&found) {
            Some(found) => found,
            None => match machine.add(self.shared.clock.now(), addr, room, preset) {
                Err(error) => {
                    drop(state);
                    return Err(bad_address(addr, error));
                }
                Ok(Added::Fake(route)) => Found::ToMake(route),
                Ok(Added::Routed(route)) => found(route),
                Ok(Added::Pending(id)) => {
                    state.held.keep(id, request.clone().unbind());
                    self.shared.ring_if_needed(&mut state);
                    return Ok(None);
                }
            },
        };
        let forgotten = ends.give_at_once(request.clone().unbind());
        drop(state);
        drop(forgotten);
        match found {
            Found::Ready(route) => Ok(Some(route)),
            Found::ToMake(route) => self.shared.make_route(py, &route).map(Some),
        }
    }

    #[pyo3(signature = (limit = 4096))]
    fn poll(&self, py: Python<'_>, limit: usize) -> PyResult<Py<PyAny>> {
        if limit == 0 {
            return Err(PyValueError::new_err("limit 0 must be at least 1"));
        }
        let mut state = self.shared.live(py)?;
        if let Some(delivery) = state.undelivered.iter_mut().find(|delivery| !delivery.is_claimed) {
            delivery.is_claimed = true;
            let (seq, unmade, events) = (delivery.step.seq, delivery.unmade(), delivery.step.events.clone());
            drop(state);
            // By now there may be more, and a poll that finds nothing is harmless.
            return self.shared.deliver(py, &unmade, (seq, &events, true));
        }
        let mut step = state.machine.poll(self.shared.clock.now(), limit);
        self.shared.ring_if_needed(&mut state);
        let forgotten = state.ends.turn();
        if step.seq == 0 {
            drop(state);
            drop(forgotten);
            return steps::empty(py);
        }
        let ended = mem::take(&mut step.ended);
        let (seq, events, more) = (step.seq, step.events.clone(), step.more);
        let delivery = Delivery { step, taken: state.take(py, ended), is_claimed: true };
        let unmade = delivery.unmade();
        state.undelivered.push_back(delivery);
        let retired = state.retire();
        drop(state);
        drop((retired, forgotten));
        self.shared.deliver(py, &unmade, (seq, &events, more))
    }

    fn discard(&self, request: &Bound<'_, PyAny>) {
        let py = request.py();
        let object = {
            let mut state = self.shared.lock(py);
            let Some(id) = state.held.find(request.as_unbound()) else {
                let left = state.take_back(request.as_unbound());
                drop(state);
                drop(left);
                return;
            };
            state.machine.discard(self.shared.clock.now(), id);
            self.shared.ring_if_needed(&mut state);
            state.held.let_go(id)
        };
        drop(object);
    }

    fn discard_all(&self, py: Python<'_>) {
        let objects = {
            let mut state = self.shared.lock(py);
            state.machine.discard_all(self.shared.clock.now());
            self.shared.ring_if_needed(&mut state);
            (state.held.let_all_go(), state.take_all_back())
        };
        drop(objects);
    }

    fn release(&self, py: Python<'_>, room: &Bound<'_, PyAny>) -> PyResult<()> {
        let room = room_of(room)?;
        self.shared.lock(py).machine.release(room);
        Ok(())
    }

    fn fail_room(&self, room: &Bound<'_, PyAny>, reason: &str, http_status: u16) -> PyResult<bool> {
        let number = room_of(room)?;
        if !(400..600).contains(&http_status) {
            return Err(PyValueError::new_err(format!("http_status {http_status} is not from 400 to 599")));
        }
        let mut state = self.shared.lock(room.py());
        let failed = state.machine.fail_room(self.shared.clock.now(), number, reason, http_status);
        self.shared.ring_if_needed(&mut state);
        Ok(failed)
    }

    #[pyo3(signature = (addr, epoch = None))]
    fn peer_lost(&self, py: Python<'_>, addr: &str, epoch: Option<u64>) -> PyResult<bool> {
        self.told(py, addr, |machine, now, addr| machine.peer_lost(now, addr, epoch))
    }

    #[pyo3(signature = (addr, epoch = None))]
    fn peer_restarted(&self, py: Python<'_>, addr: &str, epoch: Option<u64>) -> PyResult<bool> {
        self.told(py, addr, |machine, now, addr| machine.peer_restarted(now, addr, epoch))
    }

    fn pause(&self, py: Python<'_>) {
        let mut state = self.shared.lock(py);
        state.machine.pause(self.shared.clock.now());
    }

    fn resume(&self, py: Python<'_>) {
        let mut state = self.shared.lock(py);
        state.machine.resume(self.shared.clock.now());
        self.shared.ring_if_needed(&mut state);
    }

    fn state_of(&self, request: &Bound<'_, PyAny>) -> PyResult<u8> {
        let mut state = self.shared.live(request.py())?;
        if state.is_pending(request.as_unbound()) {
            return Ok(PENDING);
        }
        let end = state.ends.find(request.as_unbound());
        drop(state);
        end.map(End::state).ok_or_else(unknown_request)
    }

    fn explain(&self, request: &Bound<'_, PyAny>) -> PyResult<String> {
        let mut state = self.shared.live(request.py())?;
        let now = self.shared.clock.now();
        let held = state.held.find(request.as_unbound());
        let text = match held.and_then(|id| state.machine.explain(now, id)) {
            Some(text) => Some(text),
            None => match state.undelivered(request.as_unbound()) {
                Some(outcome) => Some(outcome.explain()),
                None => {
                    state.ends.find(request.as_unbound()).map(|end| format!("has ended: {}", end.as_str()))
                }
            },
        };
        drop(state);
        text.ok_or_else(unknown_request)
    }

    fn explain_peer(&self, py: Python<'_>, addr: &str) -> PyResult<String> {
        let state = self.shared.live(py)?;
        let text = state.machine.explain_peer(self.shared.clock.now(), addr);
        drop(state);
        let text = text.map_err(|error| bad_address(addr, error))?;
        text.ok_or_else(|| PyKeyError::new_err(format!("no request named {addr} yet, or not for long")))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.shared.stats(py)
    }

    /// What the network side drives.
    fn driver(&self) -> Driver {
        Driver(Arc::clone(&self.shared))
    }

    /// Set the time in nanoseconds; only with `virtual_time`.
    fn set_time_ns(&self, now: u64) -> PyResult<()> {
        match &self.shared.clock {
            Clock::Virtual(nanos) => {
                nanos.fetch_max(now, Ordering::Relaxed);
                Ok(())
            }
            Clock::Monotonic(_) => Err(PyRuntimeError::new_err("this resolver runs on the real clock")),
        }
    }

    /// This process is a forked child: nothing here works any more.
    fn mark_forked(&self) {
        self.shared.forked.store(true, Ordering::Relaxed);
    }

    fn __reduce__(slf: &Bound<'_, Self>) -> PyResult<()> {
        let name = slf.get_type().name()?;
        Err(PyTypeError::new_err(format!("cannot pickle {name}: it belongs to one process")))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // The lock is free whenever the collector can run: nothing is allocated in Python under it.
        let Ok(state) = self.shared.state.try_lock() else {
            return Ok(());
        };
        for object in state.held.iter().chain(state.ends.iter()) {
            visit.call(object)?;
        }
        for Taken { object, made, .. } in state.undelivered.iter().flat_map(|delivery| &delivery.taken) {
            visit.call(object)?;
            visit.call(made)?;
        }
        state.routes.values().try_for_each(|route| visit.call(route))
    }

    fn __clear__(&self) {
        let Ok(mut state) = self.shared.state.try_lock() else {
            return;
        };
        let dropped = (
            state.held.let_all_go(),
            mem::take(&mut state.ends),
            mem::take(&mut state.undelivered),
            mem::take(&mut state.routes),
        );
        drop(state);
        drop(dropped);
    }
}

impl Resolver {
    fn told(
        &self,
        py: Python<'_>,
        addr: &str,
        tell: impl FnOnce(&mut Machine, Tick, &str) -> Result<bool, AddError>,
    ) -> PyResult<bool> {
        let mut state = self.shared.lock(py);
        let known = tell(&mut state.machine, self.shared.clock.now(), addr);
        self.shared.ring_if_needed(&mut state);
        drop(state);
        known.map_err(|error| bad_address(addr, error))
    }
}

fn bad_address(addr: &str, AddError::Addr(error): AddError) -> PyErr {
    PyValueError::new_err(format!("address {addr:?}: {error}"))
}

fn unknown_request() -> PyErr {
    PyKeyError::new_err("request is not pending, and did not end within the last two polls")
}

/// The state of a request that has no end yet, between those of [`End`].
const PENDING: u8 = 1;
