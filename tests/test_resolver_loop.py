"""`disagg.Resolver(event_loop=...)`: the network on the loop of an asyncio engine."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import disagg
from disagg.transport import LoopTransport
from fake_machine import FakeMachine, options
from hostile import answers, silent
from loops import DECODE, LOOPS, NOBODY, LoopThread, ends_of, on_loop, one_pending_at, run, until_asked
from machines import Request
from registry_client import register


@pytest.fixture(params=LOOPS)
def kind(request):
    return request.param


def test_requests_are_placed_without_a_thread(kind):
    async def main():
        threads = set(threading.enumerate())
        async with on_loop() as resolver:
            assert resolver.health()
            served, lost = Request("served"), Request("lost")
            assert resolver.add(served, server.address, 1) is None
            assert resolver.add(lost, NOBODY, 2) is None
            ends = await ends_of(resolver, 2)
            assert ends[served].endpoints[0].port == 2000
            assert (ends[lost].kind, ends[lost].attempts) == ("unreachable", 2)
            assert resolver.add(Request("next"), server.address, 3) == ends[served]
            assert set(threading.enumerate()) <= threads
        assert resolver.health().reason == "the resolver was closed"

    with disagg.BootstrapServer() as server:
        register(server.address)
        run(kind, main())


def test_two_resolvers_share_a_loop(kind):
    async def main():
        async with on_loop() as one, on_loop() as other:
            requests = [Request("one"), Request("other")]
            for resolver, request in zip((one, other), requests, strict=True):
                resolver.add(request, server.address, 1)
            routes = [(await ends_of(one, 1))[requests[0]], (await ends_of(other, 1))[requests[1]]]
            assert routes[0] == routes[1]

    with disagg.BootstrapServer() as server:
        register(server.address)
        run(kind, main())


def test_aclose_fails_what_is_pending_and_waits_for_the_task(kind, host):
    peer = host.peer(silent())

    async def main():
        before = asyncio.all_tasks()
        resolver, request = await one_pending_at(peer)
        step = await resolver.aclose()
        assert [(ended, failure.kind) for ended, failure in step.failed] == [(request, "closed")]
        assert asyncio.all_tasks() == before
        assert (await resolver.aclose()).failed == ()
        assert resolver.close().failed == ()

    run(kind, main())


def test_cancelled_aclose_loses_no_end(kind, host):
    peer = host.peer(silent())

    async def main():
        resolver, request = await one_pending_at(peer)
        closing = asyncio.create_task(resolver.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert [ended for ended, _ in (await resolver.aclose()).failed] == [request]
        assert len(asyncio.all_tasks()) == 1

    run(kind, main())


def test_close_on_the_loops_own_thread_ends_everything_without_waiting(kind, host):
    peer = host.peer(silent())

    async def main():
        resolver, request = await one_pending_at(peer)
        task = resolver._transport._task
        step = resolver.close(timeout_s=60)
        assert [(ended, failure.kind) for ended, failure in step.failed] == [(request, "closed")]
        assert not task.done(), "it has had no turn"
        await asyncio.wait([task], timeout=30)
        assert task.done()
        assert not task.cancelled()
        assert task.exception() is None

    run(kind, main())


def test_close_as_the_last_thing_of_a_loop_leaves_nothing_open(kind, host):
    peer = host.peer(answers())

    async def main():
        resolver = on_loop()
        resolver.add(Request("a"), peer.addr, 1)
        await until_asked(peer)
        resolver.close()

    run(kind, main())


def test_close_on_another_thread_waits_until_the_task_has_ended(kind):
    with LoopThread(kind) as engine:
        resolver = engine.call(on_loop)
        request = Request("pending")
        resolver.add(request, NOBODY, 1)
        step = resolver.close(timeout_s=30)
        assert [ended for ended, _ in step.failed] == [request]
        assert resolver._transport._task.done()


def test_add_and_poll_may_be_called_on_any_thread(kind):
    with disagg.BootstrapServer() as server, LoopThread(kind) as engine, engine.call(on_loop) as resolver:
        register(server.address)
        request = Request("a")
        resolver.add(request, server.address, 1)
        until = time.monotonic() + 30
        while not (step := resolver.poll()).resolved:
            assert time.monotonic() < until
            time.sleep(0.001)
        assert step.resolved[0][0] is request


def test_resolver_with_a_thread_is_closed_by_async_with_as_well(host):
    peer = host.peer(silent())

    async def main():
        threads = set(threading.enumerate())
        async with disagg.Resolver(DECODE, total_timeout_s=60) as resolver:
            assert len(set(threading.enumerate()) - threads) == 1
            request = Request("pending")
            resolver.add(request, peer.addr, 1)
            await until_asked(peer)
            assert [ended for ended, _ in (await resolver.aclose()).failed] == [request]
        assert not resolver._transport.is_alive()

    asyncio.run(main())


def test_resolver_is_made_where_its_loop_runs(kind):
    async def made_for(loop):
        with pytest.raises(RuntimeError, match="event_loop must be the loop that runs in this thread"):
            disagg.Resolver(DECODE, event_loop=loop)

    with LoopThread(kind) as engine:
        asyncio.run(made_for(engine.loop))
        with pytest.raises(RuntimeError, match="event_loop must be the loop that runs in this thread"):
            disagg.Resolver(DECODE, event_loop=engine.loop)
    with pytest.raises(RuntimeError, match="event_loop must be the loop that runs in this thread"):
        disagg.Resolver(DECODE, event_loop=engine.loop)
    with pytest.raises(TypeError, match="event_loop must be an asyncio event loop or None, not str"):
        disagg.Resolver(DECODE, event_loop="mine")


def test_start_that_fails_says_why(kind):
    class NoBell(FakeMachine):
        def bell_fileno(self):
            return -1

    async def main():
        transport = LoopTransport(machine, options(), asyncio.get_running_loop())
        with pytest.raises(RuntimeError, match="did not start: "):
            transport.start()
        await asyncio.wait([transport._task], timeout=30)
        assert len(machine.failed_all) == 1
        assert not transport.is_alive()

    machine = NoBell()
    run(kind, main())
    machine.close()
