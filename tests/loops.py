"""The transport under each of its starters, for tests that run on a plain thread."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import contextmanager

import pytest

import disagg
from disagg.transport import LoopTransport, Transport
from fake_machine import FakeMachine, options
from machines import Request

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
QUICK = disagg.RetryPolicy(max_attempts=2, interval_s=0.1, min_wait_s=0.0)
NOBODY = "127.0.0.1:1"
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


# A Resolver on the loop that runs.


def on_loop(**more):
    return disagg.Resolver(DECODE, QUICK, event_loop=asyncio.get_running_loop(), **more)


async def ends_of(resolver, count, within_s=30):
    ends = {}
    until = time.monotonic() + within_s
    while len(ends) < count:
        assert time.monotonic() < until, ends
        step = resolver.poll()
        ends |= dict(step.resolved + step.failed)
        await asyncio.sleep(0.001)
    return ends


async def one_pending_at(peer):
    """A Resolver with one request, of which `peer` has been asked and whose answer may take a minute."""
    resolver = on_loop(total_timeout_s=60)
    request = Request("pending")
    resolver.add(request, peer.addr, 1)
    await until_asked(peer)
    return resolver, request


async def until_asked(peer):
    until = time.monotonic() + 30
    while not peer.requests:
        assert time.monotonic() < until
        await asyncio.sleep(0.001)


def run(kind, coroutine):
    """What asyncio.run does, on a loop of that kind, with asyncio's own checks; then collects what is left."""
    with asyncio.Runner(loop_factory=lambda: new_loop(kind), debug=True) as runner:
        returned = runner.run(coroutine)
    gc.collect()
    return returned
