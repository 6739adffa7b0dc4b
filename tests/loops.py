"""The transport under each of its starters, for tests that run on a plain thread."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import pytest

from disagg.transport import LoopTransport, Transport
from fake_machine import FakeMachine, options

LOOPS = ["asyncio", "uvloop"]
STARTERS = ["thread", *LOOPS]


def new_loop(kind):
    """A loop of that kind, not running yet."""
    if kind == "uvloop":
        return pytest.importorskip("uvloop").new_event_loop()
    return asyncio.new_event_loop()


class LoopThread:
    """Stands for an asyncio engine: a loop that runs on a thread, until the `with` block is left."""

    def __init__(self, kind):
        self.loop = new_loop(kind)
        self.thread = threading.Thread(target=self.loop.run_forever, name="engine", daemon=True)

    def call(self, function, *arguments):
        """Call it on the loop's thread and return what it returns."""

        async def on_loop():
            return function(*arguments)

        return self.run(on_loop())

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.loop.close()


class Turns:
    """Counts the turns of a transport's loop, from any thread's view."""

    def __init__(self, transport):
        self.count = 0
        self._loop = transport._loop
        self._loop.call_soon_threadsafe(self._next)

    def _next(self):
        self.count += 1
        if self.count >= 0:
            self._loop.call_soon(self._next)

    def stop(self):
        self.count = -(2**40)


@contextmanager
def started(kind, machine=None, **changes):
    """A machine and the transport that drives it; both end with the block."""
    machine = FakeMachine() if machine is None else machine
    try:
        if kind == "thread":
            transport = Transport(machine, options(**changes))
            transport.start()
            yield machine, transport
            assert transport.stop()
        else:
            with LoopThread(kind) as engine:
                transport = LoopTransport(machine, options(**changes), engine.loop)
                engine.call(transport.start)
                yield machine, transport
                assert transport.stop(30)
    finally:
        machine.close()
