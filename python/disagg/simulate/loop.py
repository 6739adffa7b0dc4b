"""The scheduler's loop: a cycle each millisecond with fixed work in it, with a Resolver or without one."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from disagg.simulate.shared import (
    FAILED,
    RAISED,
    ROUTED,
    ArrivalLog,
    End,
    EndLog,
    Field,
    StatusPage,
)
from disagg.values import Route, Step

__all__ = ["Loop", "LoopSetup", "Places", "Request", "Samples", "spin", "turns_for"]

# Checks for the end of the run and for a dead parent happen every so many cycles.
CHECK_CYCLES = 64
# After the last request has ended the loop polls this long, to see if one ends a second time.
QUIET_NS = 300_000_000


class Request:
    """What the scheduler hands to `add`: any object will do."""

    __slots__ = ("added_ns", "number", "peer")

    def __init__(self, number: int, peer: int, added_ns: int) -> None:
        self.number = number
        self.peer = peer
        self.added_ns = added_ns


class Places(Protocol):
    """The part of `disagg.Resolver` that the loop uses."""

    def add(self, request: object, addr: str, room: int, /, *, dp_rank: int | None = None) -> Route | None:
        """Place a request."""

    def poll(self, limit: int = 4096) -> Step:
        """Take what was decided."""


@dataclass(frozen=True, slots=True)
class LoopSetup:
    """How the loop turns: `turns` of fixed work in each cycle, at most `cycles` samples kept."""

    period_ns: int
    turns: int
    cycles: int
    requests: int


class Samples:
    """What the loop measured, in ns, in arrays of their final size: nothing grows while it is measured.

    `cycle` runs from when a cycle should have begun to its end: waking up late, waiting for the GIL, the work
    and everything done for requests. `calls` are the single `add` and `poll` calls.
    """

    def __init__(self, setup: LoopSetup) -> None:
        self.cycle = array("q", bytes(8 * setup.cycles))
        self.calls = array("q", bytes(8 * (setup.cycles + setup.requests)))
        self.added_ns = array("q", bytes(8 * setup.requests))
        self.cycles = 0
        self.call_count = 0
        self.overruns = 0

    def on_cycle(self, took_ns: int) -> None:
        """Note one cycle."""
        if self.cycles < len(self.cycle):
            self.cycle[self.cycles] = took_ns
        self.cycles += 1

    def on_call(self, took_ns: int) -> None:
        """Note one call of `add` or `poll`."""
        if self.call_count < len(self.calls):
            self.calls[self.call_count] = took_ns
        self.call_count += 1

    def trim(self) -> None:
        """Cut the arrays to what was measured."""
        del self.cycle[self.cycles :]
        del self.calls[self.call_count :]


class Loop:
    """Runs until every request has ended, or the parent closes the run."""

    def __init__(
        self,
        setup: LoopSetup,
        arrivals: ArrivalLog,
        ends: EndLog,
        status: StatusPage,
        addresses: dict[int, str],
    ) -> None:
        self.setup = setup
        self.samples = Samples(setup)
        self.details: list[object] = []
        self.events: dict[str, int] = {}
        self.disorders = 0
        self._arrivals = arrivals
        self._ends = ends
        self._status = status
        self._addresses = addresses
        self._known: dict[int, int] = {}
        self._routed = self._failed = self._added = self._worst = 0

    def run(self, places: Places, start_ns: int, *, until_closed: bool) -> None:
        """Turn from `start_ns` on; with `until_closed` the end of all requests is not the end."""
        setup, samples = self.setup, self.samples
        parent = os.getppid()
        quiet_from = 0
        due = start_ns
        while True:
            if (left := due - time.monotonic_ns()) > 0:
                time.sleep(left / 1e9)
            self._turn(places)
            spin(setup.turns)
            now = time.monotonic_ns()
            samples.on_cycle(now - due)
            self._worst = max(self._worst, now - due)
            if samples.cycles % CHECK_CYCLES == 0:
                self._show()
                if self._status[Field.CLOSE] or os.getppid() != parent:
                    self._turn(places)  # arrivals that were written before the run was closed
                    return
                if until_closed or not self._all_ended():
                    quiet_from = now
                elif now - quiet_from > QUIET_NS:
                    return
            due += setup.period_ns
            if due < now:
                samples.overruns += 1
                due = now

    def _turn(self, places: Places) -> None:
        clock = time.perf_counter_ns
        samples = self.samples
        while (arrival := self._arrivals.read()) is not None:
            request = Request(arrival.request, arrival.peer, time.monotonic_ns())
            samples.added_ns[arrival.request] = request.added_ns
            self._added += 1
            addr = self._addresses[arrival.peer]
            before = clock()
            try:
                route = places.add(request, addr, arrival.room, dp_rank=arrival.preset)
            except Exception as error:  # noqa: BLE001  (whatever it raises is this request's end, and is judged)
                self._note(request, RAISED, f"{type(error).__name__}: {error}", 0)
                continue
            samples.on_call(clock() - before)
            if route is not None:
                self._note(request, ROUTED, route, 0)
        before = clock()
        step = places.poll()
        samples.on_call(clock() - before)
        self.take(step)

    def take(self, step: Step) -> None:
        """Write down what a step says; also for the step that closing gives."""
        if step.resolved:
            self._take_ends(step.resolved, ROUTED, step.seq)
        if step.failed:
            self._take_ends(step.failed, FAILED, step.seq)
        for event in step.events:
            self.events[event.kind] = self.events.get(event.kind, 0) + 1

    def _take_ends(self, ends: Iterable[tuple[object, object]], kind: int, step: int) -> None:
        last: dict[int, int] = {}
        for request, detail in ends:
            if not isinstance(request, Request):
                self._ends.write(End(None, kind, self._number(detail), step, 0, time.monotonic_ns()))
                continue
            self._note(request, kind, detail, step)
            # Within a step the requests of one address come in order of arrival.
            if last.get(request.peer, -1) > request.number:
                self.disorders += 1
            last[request.peer] = request.number

    def _note(self, request: Request, kind: int, detail: object, step: int) -> None:
        now = time.monotonic_ns()
        self._ends.write(End(request.number, kind, self._number(detail), step, request.added_ns, now))
        if kind == ROUTED:
            self._routed += 1
        else:
            self._failed += 1

    def _number(self, detail: object) -> int:
        """Return the number of a route or failure; it is shared and kept, so its id is its own."""
        number = self._known.get(id(detail))
        if number is None:
            number = self._known[id(detail)] = len(self.details)
            self.details.append(detail)
        return number

    def _all_ended(self) -> bool:
        status = self._status
        sent_all = bool(status[Field.SENT_ALL]) and self._added == status[Field.SENT]
        return sent_all and self._routed + self._failed >= self._added

    def _show(self) -> None:
        status = self._status
        status[Field.ADDED] = self._added
        status[Field.ROUTED] = self._routed
        status[Field.FAILED] = self._failed
        status[Field.WORST_CYCLE_NS] = self._worst
        status[Field.CYCLES] = self.samples.cycles


def spin(turns: int) -> None:
    """Do a fixed amount of Python work: what a scheduler's own bookkeeping costs in each cycle.

    The amount is fixed, not the time, so that time lost to another thread is seen and not absorbed.
    """
    number = 1
    for _ in range(turns):
        number = number * 48_271 % 2_147_483_647


def turns_for(work_ns: int) -> int:
    """Find how many turns of `spin` take `work_ns` on this machine when it is not disturbed."""
    probe = 2_000
    best = min(_timed_spin(probe) for _ in range(20))
    return max(0, round(probe * work_ns / best))


def _timed_spin(turns: int) -> int:
    before = time.perf_counter_ns()
    spin(turns)
    return time.perf_counter_ns() - before
