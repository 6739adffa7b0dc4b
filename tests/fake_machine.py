"""A machine for the transport's tests: commands are put in by hand, facts are recorded."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import NamedTuple

from disagg.transport import Transport, TransportOptions


class Fact(NamedTuple):
    """What the transport said about one ticket: a status, or an error's word; and when (monotonic)."""

    ticket: int
    status: int | None
    body: bytes
    headers: tuple | None
    what: str | None
    message: str
    at: float


class FakeMachine:
    """Has the machine's driving functions, and `ask`, `cancel` and `wait` for the test."""

    def __init__(self):
        self.facts: dict[int, Fact] = {}
        self.facts_in_order: list[Fact] = []
        self.failed_all: list[str] = []
        self.timers_fired = 0
        self.timer_at: float | None = None
        self.commands = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._changed = threading.Condition()
        self._tickets = 0

    def close(self):
        os.close(self._bell)

    # -- the test's side

    def ask(self, addr, path="/route", *, kind="topology", method="GET", body=None, max_body=65536, wait_ms=0):
        with self._changed:
            self._tickets += 1
            self.commands.append((self._tickets, kind, addr, method, path, body, max_body, wait_ms))
            os.eventfd_write(self._bell, 1)
            return self._tickets

    def cancel(self, ticket):
        with self._changed:
            self.commands.append((ticket, "cancel", "", "", "", None, 0, 0))
            os.eventfd_write(self._bell, 1)

    def ring(self):
        os.eventfd_write(self._bell, 1)

    def wait(self, ticket, timeout_s=10.0) -> Fact:
        with self._changed:
            assert self._changed.wait_for(lambda: ticket in self.facts, timeout_s), f"no fact for {ticket}"
            return self.facts[ticket]

    def fetch(self, addr, path="/route", **options) -> Fact:
        return self.wait(self.ask(addr, path, **options))

    def wait_until(self, holds, timeout_s=10.0):
        with self._changed:
            assert self._changed.wait_for(holds, timeout_s)

    # -- the transport's side

    def bell_fileno(self):
        return self._bell

    def take_commands(self, limit, /):
        with self._changed:
            taken = [self.commands.popleft() for _ in range(min(limit, len(self.commands)))]
            if not self.commands:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            return taken

    def on_response(self, ticket, status, body, headers, /):
        self._record(Fact(ticket, status, body, headers, None, "", time.monotonic()))

    def on_error(self, ticket, what, message, /):
        self._record(Fact(ticket, None, b"", None, what, message, time.monotonic()))

    def on_timer(self):
        with self._changed:
            if self.timer_at is not None and time.monotonic() >= self.timer_at:
                self.timer_at = None
                self.timers_fired += 1
                self._changed.notify_all()

    def next_timer(self):
        at = self.timer_at
        return None if at is None else max(0.0, at - time.monotonic())

    def fail_all(self, reason, /):
        with self._changed:
            self.failed_all.append(reason)
            self._changed.notify_all()

    def _record(self, fact):
        with self._changed:
            self.facts[fact.ticket] = fact
            self.facts_in_order.append(fact)
            self._changed.notify_all()


def options(**changes):
    values = {
        "connect_timeout_s": 1.0,
        "total_timeout_s": 2.0,
        "heartbeat_timeout_s": 3.0,
        "max_in_flight": 1024,
    }
    return TransportOptions(**(values | changes))


@contextmanager
def running(**changes):
    machine = FakeMachine()
    transport = Transport(machine, options(**changes))
    try:
        transport.start()
        yield machine, transport
    finally:
        assert transport.stop()
        machine.close()
