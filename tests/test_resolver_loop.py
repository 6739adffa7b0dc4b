"""`disagg.Resolver(event_loop=...)`: the network on the loop of an asyncio engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import disagg
from disagg.transport import LoopTransport
from fake_machine import FakeMachine, options
from hostile import answers, silent
from loops import LOOPS, LoopThread, new_loop
from machines import Request
from registry_client import register

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
QUICK = disagg.RetryPolicy(max_attempts=2, interval_s=0.1, min_wait_s=0.0)
NOBODY = "127.0.0.1:1"
CANCELLED = "task was cancelled"


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
        resolver = on_loop(total_timeout_s=60)
        request = Request("pending")
        resolver.add(request, peer.addr, 1)
        await until_asked(peer)
        step = await resolver.aclose()
        assert [(ended, failure.kind) for ended, failure in step.failed] == [(request, "closed")]
        assert asyncio.all_tasks() == before
        assert (await resolver.aclose()).failed == ()
        assert resolver.close().failed == ()

    run(kind, main())


def test_cancelled_aclose_loses_no_end(kind, host):
    peer = host.peer(silent())

    async def main():
        resolver = on_loop(total_timeout_s=60)
        request = Request("pending")
        resolver.add(request, peer.addr, 1)
        await until_asked(peer)
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
        resolver = on_loop(total_timeout_s=60)
        request = Request("pending")
        resolver.add(request, peer.addr, 1)
        await until_asked(peer)
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


# -- the loop goes


def test_requests_fail_and_health_tells_when_all_tasks_are_cancelled(kind, host):
    peer = host.peer(silent())

    async def main():
        resolver = on_loop(total_timeout_s=60)
        request = Request("pending")
        resolver.add(request, peer.addr, 1)
        await until_asked(peer)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        failure = (await ends_of(resolver, 1))[request]
        assert failure.kind == "internal"
        assert CANCELLED in failure.reason
        assert not resolver.health()
        assert CANCELLED in resolver.health().reason
        late = Request("late")
        resolver.add(late, peer.addr, 2)
        assert (await ends_of(resolver, 1))[late].kind == "internal"
        await resolver.aclose()

    run(kind, main())


@pytest.mark.parametrize("turns", [0, 3])
def test_requests_fail_and_health_tells_when_asyncio_run_ends(kind, host, turns):
    peer = host.peer(silent())
    held = []

    async def main():
        held.append(on_loop(total_timeout_s=60))
        held.append(Request("pending"))
        held[0].add(held[1], peer.addr, 1)
        for _ in range(turns):
            await asyncio.sleep(0.01)

    run(kind, main())
    resolver, request = held
    assert CANCELLED in resolver.health().reason
    (ended, failure), *_ = resolver.poll().failed
    assert ended is request
    assert CANCELLED in failure.reason
    assert resolver.close().failed == ()


def test_requests_fail_and_health_tells_when_the_loop_is_closed(kind):
    loop = new_loop(kind)

    async def main():
        return on_loop()

    resolver = loop.run_until_complete(main())
    request = Request("pending")
    resolver.add(request, NOBODY, 1)
    resolver._transport._task._log_destroy_pending = False  # who closes a loop with tasks hears of it from asyncio
    loop.close()
    assert resolver.health().reason == "the event loop was closed"
    ((ended, failure),) = resolver.poll().failed
    assert (ended, failure.kind, failure.reason) == (request, "internal", f"{NOBODY}: the event loop was closed")
    began = time.monotonic()
    resolver.close(timeout_s=60)
    assert time.monotonic() - began < 30
    del resolver
    gc.collect()


def test_requests_stand_still_while_the_loop_does_and_health_tells(kind):
    loop = new_loop(kind)

    async def main():
        return on_loop()

    async def later():
        assert resolver.health()
        ends = await ends_of(resolver, 1)
        await resolver.aclose()
        return ends

    resolver = loop.run_until_complete(main())
    request = Request("pending")
    resolver.add(request, NOBODY, 1)
    assert resolver.health().reason == "the event loop is not running"
    assert loop.run_until_complete(later())[request].kind == "unreachable"
    loop.close()


def test_close_does_not_wait_for_a_loop_that_does_not_run(kind):
    loop = new_loop(kind)

    async def main():
        return on_loop()

    resolver = loop.run_until_complete(main())
    began = time.monotonic()
    resolver.close(timeout_s=60)
    assert time.monotonic() - began < 30
    loop.run_until_complete(asyncio.sleep(0.01))
    assert resolver._transport._task.done()
    loop.close()


def test_ctrl_c_in_a_step_of_the_network_reaches_who_runs_the_loop(kind, host):
    peer = host.peer(answers())

    class Interrupted(FakeMachine):
        def on_response(self, *fact):
            raise KeyboardInterrupt

    async def main():
        transport.start()
        machine.ask(peer.addr)
        await asyncio.sleep(30)

    machine, loop = Interrupted(), new_loop(kind)
    transport = LoopTransport(machine, options(), loop)
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(main())
    for task in asyncio.all_tasks(loop):
        if task is not transport._task:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
    loop.run_until_complete(asyncio.wait([transport._task], timeout=30))
    assert machine.failed_all == ["RuntimeError: broken off by KeyboardInterrupt()"]
    assert not transport.is_alive()
    loop.close()
    machine.close()


def test_resolver_that_is_dropped_ends_its_task_and_says_so(kind, host):
    peer = host.peer(silent())

    async def main():
        def drop_one():
            on_loop(total_timeout_s=60).add(Request("held by the resolver"), peer.addr, 1)
            gc.collect()

        with pytest.warns(ResourceWarning, match=r"unclosed disagg\.Resolver"):
            drop_one()
        until = time.monotonic() + 30
        while len(asyncio.all_tasks()) > 1:
            assert time.monotonic() < until
            await asyncio.sleep(0.001)

    run(kind, main())


def test_task_is_not_in_the_context_of_who_made_the_resolver(kind):
    import contextvars

    class Held:
        """Something of a request's."""

    async def main():
        import weakref

        variable, held = contextvars.ContextVar("held"), Held()
        token = variable.set(held)
        async with on_loop():
            variable.reset(token)
            seen = weakref.ref(held)
            del token, held
            gc.collect()
            assert seen() is None

    run(kind, main())


# -- processes


def run_python(code, *flags):
    return subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__)},
    )


def test_process_whose_loop_ends_with_requests_pending_ends_quietly():
    done = run_python(
        """
        import asyncio, disagg
        from hostile import HostileHost, silent, answers

        async def main(peers):
            global resolver
            resolver = disagg.Resolver(
                disagg.DecodeRank(attn_tp_size=1, engine_rank=0), event_loop=asyncio.get_running_loop()
            )
            for room in range(100):
                resolver.add(object(), peers[room % 10].addr, room)
            while not all(peer.requests for peer in peers):
                await asyncio.sleep(0.01)

        with HostileHost() as host:
            asyncio.run(main([host.peer(silent()) for _ in range(5)] + [host.peer(answers()) for _ in range(5)]))
        print(len(resolver.poll().failed))
        """,
        "-X",
        "dev",
    )
    assert (done.returncode, done.stdout) == (0, "100\n"), done.stderr
    assert "took" in done.stderr or not done.stderr, done.stderr  # asyncio's word on slow callbacks
    for word in ("Unclosed", "unclosed", "Traceback", "destroyed", "never"):
        assert word not in done.stderr, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_has_no_network_and_harms_none():
    done = run_python(
        """
        import asyncio, gc, os
        import disagg
        from registry_client import register

        async def route_of(resolver, addr):
            request = object()
            if resolver.add(request, addr, 1) is None:
                while not (step := resolver.poll()).resolved:
                    assert not step.failed, step
                    await asyncio.sleep(0.001)

        def child(resolver):
            for call in (lambda: resolver.add(object(), "127.0.0.1:1", 1), resolver.poll):
                try:
                    call()
                except RuntimeError as error:
                    assert "fork" in str(error)
                else:
                    raise AssertionError("no error")
            assert "fork" in resolver.health().reason
            resolver._transport.stop()
            gc.collect()

        async def main():
            loop = asyncio.get_running_loop()
            async with disagg.Resolver(disagg.DecodeRank(attn_tp_size=1, engine_rank=0), event_loop=loop) as resolver:
                await route_of(resolver, servers[0].address)
                pid = os.fork()
                if pid == 0:
                    status = 1
                    try:
                        child(resolver)
                        status = 0
                    finally:
                        os._exit(status)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
                assert resolver.health()
                await route_of(resolver, servers[1].address)

        servers = [disagg.BootstrapServer() for _ in range(2)]
        for server in servers:
            register(server.address)
        asyncio.run(main())
        for server in servers:
            server.close()
        """,
        "-W",
        "error",
    )
    assert (done.returncode, done.stderr) == (0, "")
