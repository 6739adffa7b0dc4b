"""`disagg.Resolver(event_loop=...)` when its loop, its task, its process or itself goes."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import time
import weakref

import pytest

from disagg.transport import LoopTransport
from fake_machine import FakeMachine, options
from hostile import answers, silent
from loops import LOOPS, NOBODY, ends_of, new_loop, on_loop, one_pending_at, run
from machines import Request
from python_process import run_python

CANCELLED = "task was cancelled"


@pytest.fixture(params=LOOPS)
def kind(request):
    return request.param


def test_requests_fail_and_health_tells_when_all_tasks_are_cancelled(kind, host):
    peer = host.peer(silent())

    async def main():
        resolver, request = await one_pending_at(peer)
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
    class Held:
        """Something of a request's."""

    async def main():
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


def test_process_whose_loop_ends_with_requests_pending_ends_quietly():
    status, out, err = run_python(
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
        "-Xdev",
    )
    assert (status, out) == (0, "100\n"), err
    assert "took" in err or not err, err  # asyncio's word on slow callbacks
    for word in ("Unclosed", "unclosed", "Traceback", "destroyed", "never"):
        assert word not in err, err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_has_no_network_and_harms_none():
    status, out, err = run_python(
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
        """
    )
    assert (status, out, err) == (0, "", "")
