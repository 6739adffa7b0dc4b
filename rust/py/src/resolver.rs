//! `_core.Resolver`: the machine behind a lock, with the requests that it places.
//!
//! The lock is held for pure Rust only. Python objects are made before or after, and references dropped after:
//! making one may run the garbage collector, and dropping one a `__del__`, which may call back in here.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use disagg_core::TransportError;
use disagg_core::failure::FailureKind;
use disagg_core::ids::{RequestId, Room, RouteId, Ticket};
use disagg_core::pending::{AddError, Added, Command, Machine, Options, Route};
use disagg_core::time::Tick;
use hashbrown::HashMap;
use pyo3::PyTraverseError;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::gc::PyVisit;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyBytes, PyDict, PyInt, PyList};

use crate::bell::Bell;
use crate::retry::RetryPolicy;
use crate::steps::{self, Taken};
use crate::topology::DecodeRank;

/// The pending requests of one decode rank; `disagg.Resolver` adds the network.
#[pyclass(module = "disagg._core", name = "Resolver", frozen, subclass, weakref)]
pub struct Resolver {
    state: Mutex<State>,
    clock: Clock,
    bell: Bell,
    /// This process is a child of the one that made it.
    forked: AtomicBool,
}

/// What the lock guards.
struct State {
    machine: Machine,
    /// The objects of the requests that are held, by slot.
    objects: Vec<Option<(RequestId, Py<PyAny>)>>,
    /// Slots by the identity of their object.
    held: HashMap<usize, RequestId>,
    /// Ready-made `Route`s of what the machine has cached.
    routes: HashMap<RouteId, Py<PyAny>>,
}

enum Clock {
    Monotonic(Instant),
    Virtual(AtomicU64),
}

impl Clock {
    fn now(&self) -> Tick {
        Tick::from_nanos(match self {
            Self::Monotonic(start) => u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
            Self::Virtual(nanos) => nanos.load(Ordering::Relaxed),
        })
    }
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
        force_query = false, track_rooms = false, not_found_is_transient = false, seed = 0, virtual_time = false,
    ), text_signature = "(decode, retry=None, *, default_port=8998, dp_rank_timeout_s=30.0, \
        endpoint_timeout_s=10.0, request_timeout_s=120.0, heartbeat_interval_s=5.0, heartbeat_failures=2, \
        heartbeat_min_down_s=10.0, peer_ttl_s=900.0, max_addresses=4096, max_endpoint_lookups_per_peer=8, \
        force_query=False, track_rooms=False, not_found_is_transient=False, seed=0, virtual_time=False)")]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments of a Python constructor"
    )]
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
        let options = options
            .validated()
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let policy = retry.map_or(disagg_core::retry::RetryPolicy::DEFAULT, |retry| {
            retry.get().0
        });
        let clock = if virtual_time {
            Clock::Virtual(AtomicU64::new(0))
        } else {
            Clock::Monotonic(Instant::now())
        };
        let machine = Machine::new(decode.get().inner().clone(), policy, options, clock.now());
        let state = State {
            machine,
            objects: Vec::new(),
            held: HashMap::new(),
            routes: HashMap::new(),
        };
        Ok(Self {
            state: Mutex::new(state),
            clock,
            bell: Bell::new()?,
            forked: AtomicBool::new(false),
        })
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
        let identity = request.as_ptr().addr();
        let kept = request.clone().unbind();
        let mut state = self.live(py)?;
        if state.held.contains_key(&identity) {
            drop(state);
            return Err(PyValueError::new_err(
                "request is pending already; discard it first",
            ));
        }
        let found = match state.machine.add(self.clock.now(), addr, room, preset) {
            Err(AddError::Addr(error)) => {
                drop(state);
                return Err(PyValueError::new_err(format!("address {addr:?}: {error}")));
            }
            Ok(Added::Fake(route)) => Found::ToMake(route),
            Ok(Added::Routed(route)) => {
                let route = Arc::clone(route);
                match state.routes.get(&route.id) {
                    Some(made) => Found::Ready(made.clone_ref(py)),
                    None => Found::ToMake(route),
                }
            }
            Ok(Added::Pending(id)) => {
                state.keep(id, identity, kept);
                self.ring_if_needed(&mut state);
                return Ok(None);
            }
        };
        drop(state);
        match found {
            Found::Ready(route) => Ok(Some(route)),
            Found::ToMake(route) => self.make_route(py, &route).map(Some),
        }
    }

    #[pyo3(signature = (limit = 4096))]
    fn poll(&self, py: Python<'_>, limit: usize) -> PyResult<Py<PyAny>> {
        if limit == 0 {
            return Err(PyValueError::new_err("limit 0 must be at least 1"));
        }
        let (step, taken, retired) = {
            let mut state = self.live(py)?;
            let mut step = state.machine.poll(self.clock.now(), limit);
            self.ring_if_needed(&mut state);
            if step.seq == 0 {
                drop(state);
                return steps::empty(py);
            }
            let ended = mem::take(&mut step.ended);
            (step, state.take(py, ended), state.retire())
        };
        drop(retired);
        steps::to_python(py, self, step, taken)
    }

    fn discard(&self, request: &Bound<'_, PyAny>) {
        let py = request.py();
        let object = {
            let mut state = self.lock(py);
            let Some(id) = state.held.remove(&request.as_ptr().addr()) else {
                return;
            };
            state.machine.discard(self.clock.now(), id);
            self.ring_if_needed(&mut state);
            state.let_go(id)
        };
        drop(object);
    }

    fn discard_all(&self, py: Python<'_>) {
        let objects = {
            let mut state = self.lock(py);
            state.machine.discard_all(self.clock.now());
            state.held = HashMap::new();
            mem::take(&mut state.objects)
        };
        drop(objects);
    }

    fn release(&self, py: Python<'_>, room: &Bound<'_, PyAny>) -> PyResult<()> {
        let room = room_of(room)?;
        self.lock(py).machine.release(room);
        Ok(())
    }

    fn fail_room(&self, room: &Bound<'_, PyAny>, reason: &str, http_status: u16) -> PyResult<bool> {
        let number = room_of(room)?;
        if !(400..600).contains(&http_status) {
            return Err(PyValueError::new_err(format!(
                "http_status {http_status} is not from 400 to 599"
            )));
        }
        let mut state = self.lock(room.py());
        let failed = state
            .machine
            .fail_room(self.clock.now(), number, reason, http_status);
        self.ring_if_needed(&mut state);
        Ok(failed)
    }

    fn peer_lost(&self, py: Python<'_>, addr: &str) -> PyResult<bool> {
        self.told(py, addr, Machine::peer_lost)
    }

    fn peer_restarted(&self, py: Python<'_>, addr: &str) -> PyResult<bool> {
        self.told(py, addr, Machine::peer_restarted)
    }

    fn pause(&self, py: Python<'_>) {
        let mut state = self.lock(py);
        state.machine.pause(self.clock.now());
    }

    fn resume(&self, py: Python<'_>) {
        let mut state = self.lock(py);
        state.machine.resume(self.clock.now());
        self.ring_if_needed(&mut state);
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.lock(py).machine.stats();
        steps::stats_to_python(py, &stats)
    }

    // The network's side.

    fn bell_fileno(&self) -> i32 {
        self.bell.fileno()
    }

    fn take_commands<'py>(&self, py: Python<'py>, limit: usize) -> PyResult<Bound<'py, PyList>> {
        let mut commands: Vec<Command> = Vec::new();
        let retired = {
            let mut state = self.lock(py);
            while commands.len() < limit {
                let Some(command) = state.machine.poll_command() else {
                    self.bell.silence();
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
                if command.body.is_some() {
                    "POST"
                } else {
                    "GET"
                },
                command.path,
                command.body.map(|body| PyBytes::new(py, &body)),
                command.max_body,
            )
        });
        PyList::new(py, tuples.collect::<Vec<_>>())
    }

    #[pyo3(signature = (ticket, status, body, instance = None))]
    fn on_response(
        &self,
        py: Python<'_>,
        ticket: u64,
        status: u16,
        body: &[u8],
        instance: Option<&str>,
    ) {
        let mut state = self.lock(py);
        state
            .machine
            .on_response(self.clock.now(), Ticket(ticket), status, body, instance);
        self.ring_if_needed(&mut state);
    }

    fn on_error(&self, py: Python<'_>, ticket: u64, what: &str, message: &str) {
        let message = if message.is_empty() { what } else { message };
        let mut state = self.lock(py);
        let error = TransportError::from_name(what);
        state
            .machine
            .on_error(self.clock.now(), Ticket(ticket), error, message);
        self.ring_if_needed(&mut state);
    }

    fn on_timer(&self, py: Python<'_>) {
        let mut state = self.lock(py);
        state.machine.on_timer(self.clock.now());
        self.ring_if_needed(&mut state);
    }

    fn next_timer(&self, py: Python<'_>) -> Option<f64> {
        let now = self.clock.now();
        let due = self.lock(py).machine.poll_timer()?;
        Some(due.since(now).as_secs_f64())
    }

    #[pyo3(signature = (reason, *, closed = false))]
    fn fail_all(&self, py: Python<'_>, reason: &str, closed: bool) {
        let kind = if closed {
            FailureKind::Closed
        } else {
            FailureKind::Internal
        };
        let mut state = self.lock(py);
        state.machine.fail_all(self.clock.now(), kind, reason);
        self.ring_if_needed(&mut state);
    }

    /// Set the time in nanoseconds; only with `virtual_time`.
    fn set_time_ns(&self, now: u64) -> PyResult<()> {
        match &self.clock {
            Clock::Virtual(nanos) => {
                nanos.fetch_max(now, Ordering::Relaxed);
                Ok(())
            }
            Clock::Monotonic(_) => Err(PyRuntimeError::new_err(
                "this resolver runs on the real clock",
            )),
        }
    }

    /// This process is a forked child: nothing here works any more.
    fn mark_forked(&self) {
        self.forked.store(true, Ordering::Relaxed);
    }

    fn __reduce__(slf: &Bound<'_, Self>) -> PyResult<()> {
        let name = slf.get_type().name()?;
        Err(PyTypeError::new_err(format!(
            "cannot pickle {name}: it belongs to one process"
        )))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // The lock is free whenever the collector can run: nothing is allocated in Python under it.
        let Ok(state) = self.state.try_lock() else {
            return Ok(());
        };
        for (_, object) in state.objects.iter().flatten() {
            visit.call(object)?;
        }
        state
            .routes
            .values()
            .try_for_each(|route| visit.call(route))
    }

    fn __clear__(&self) {
        let Ok(mut state) = self.state.try_lock() else {
            return;
        };
        state.held = HashMap::new();
        let dropped = (mem::take(&mut state.objects), mem::take(&mut state.routes));
        drop(state);
        drop(dropped);
    }
}

impl Resolver {
    /// The `Route` object of a route, made on its first use.
    pub fn make_route(&self, py: Python<'_>, route: &Arc<Route>) -> PyResult<Py<PyAny>> {
        let made = steps::route_to_python(py, route)?;
        if !route.fake {
            let mut state = self.lock(py);
            // One that has been retired meanwhile would never be dropped again.
            if state.machine.is_cached(route) {
                let kept = state.routes.insert(route.id, made.clone_ref(py));
                drop(state);
                drop(kept);
            }
        }
        Ok(made)
    }

    fn told(
        &self,
        py: Python<'_>,
        addr: &str,
        tell: impl FnOnce(&mut Machine, Tick, &str) -> Result<bool, AddError>,
    ) -> PyResult<bool> {
        let mut state = self.lock(py);
        let known = tell(&mut state.machine, self.clock.now(), addr);
        self.ring_if_needed(&mut state);
        drop(state);
        known.map_err(|AddError::Addr(error)| {
            PyValueError::new_err(format!("address {addr:?}: {error}"))
        })
    }

    fn live(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, State>> {
        if self.forked.load(Ordering::Relaxed) {
            return Err(PyRuntimeError::new_err(
                "this resolver was made before a fork; make one in the child process",
            ));
        }
        Ok(self.lock(py))
    }

    fn lock(&self, py: Python<'_>) -> MutexGuard<'_, State> {
        // A panic under the lock is a bug that PyO3 has raised already; the machine's functions leave no list
        // half-linked on the paths that can be met, so later calls go on rather than stop the scheduler.
        self.state
            .lock_py_attached(py)
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn ring_if_needed(&self, state: &mut State) {
        if state.machine.take_bell() {
            self.bell.ring();
        }
    }
}

impl State {
    fn keep(&mut self, id: RequestId, identity: usize, object: Py<PyAny>) {
        let slot = usize::try_from(id.slot).unwrap_or(usize::MAX);
        if self.objects.len() <= slot {
            self.objects.resize_with(slot + 1, || None);
        }
        if let Some(place) = self.objects.get_mut(slot) {
            *place = Some((id, object));
        }
        self.held.insert(identity, id);
    }

    fn let_go(&mut self, id: RequestId) -> Option<Py<PyAny>> {
        let slot = usize::try_from(id.slot).unwrap_or(usize::MAX);
        let (_, object) = self.objects.get_mut(slot)?.take()?;
        self.held.remove(&object.as_ptr().addr());
        if self.held.is_empty() {
            self.objects = Vec::new();
            self.held = HashMap::new();
        }
        Some(object)
    }

    /// The objects and ready-made routes of a step.
    fn take(
        &mut self,
        py: Python<'_>,
        ended: Vec<(RequestId, disagg_core::pending::Outcome)>,
    ) -> Vec<Taken> {
        use disagg_core::pending::Outcome::{Failed, Routed};
        let mut taken = Vec::with_capacity(ended.len());
        for (id, outcome) in ended {
            let Some(object) = self.let_go(id) else {
                continue;
            };
            let made = match &outcome {
                Routed(route) => self.routes.get(&route.id).map(|made| made.clone_ref(py)),
                Failed(_) => None,
            };
            taken.push(Taken {
                object,
                outcome,
                made,
            });
        }
        taken
    }

    /// The objects of routes that are not given out any more, to be dropped after unlocking.
    fn retire(&mut self) -> Vec<Py<PyAny>> {
        let retired = self.machine.poll_retired();
        retired
            .iter()
            .filter_map(|id| self.routes.remove(id))
            .collect()
    }
}

fn room_of(room: &Bound<'_, PyAny>) -> PyResult<Room> {
    let number = room
        .cast_exact::<PyInt>()
        .ok()
        .and_then(|room| room.extract::<u64>().ok());
    number.and_then(Room::new).ok_or_else(|| {
        PyValueError::new_err(format!(
            "room {} is not an int from 0 to 9223372036854775807",
            shown(room)
        ))
    })
}

fn preset_of(dp_rank: &Bound<'_, PyAny>) -> PyResult<u32> {
    let number = dp_rank
        .cast_exact::<PyInt>()
        .ok()
        .and_then(|rank| rank.extract::<u64>().ok());
    let number = number.filter(|&rank| rank < 1 << 63).ok_or_else(|| {
        PyValueError::new_err(format!(
            "dp_rank {} is not an int from 0 to 9223372036854775807",
            shown(dp_rank)
        ))
    })?;
    // No engine has that many: the request fails when the peer is known, with the largest number that fits.
    Ok(u32::try_from(number).unwrap_or(u32::MAX))
}

fn shown(value: &Bound<'_, PyAny>) -> String {
    value.repr().map_or_else(
        |_| String::from("?"),
        |text| text.to_string().chars().take(80).collect(),
    )
}
