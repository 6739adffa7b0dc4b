"""Fork, other processes, what is left behind, and what of the process the library leaves alone."""

from __future__ import annotations

import asyncio
import copy
import gc
import multiprocessing
import os
import pickle
import select
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

import across_processes
import disagg
from hostile import silent
from machines import Request
from python_process import run_python

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
NOBODY = "127.0.0.1:1"
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")


# -- fork


@needs_fork
def test_forked_child_neither_rings_nor_closes_its_parents_bell():
    loop = asyncio.new_event_loop()

    async def main():
        return disagg.Resolver(DECODE, event_loop=asyncio.get_running_loop())

    resolver = loop.run_until_complete(main())  # from here on the loop stands still: nobody answers the bell
    bell = resolver._driver.bell_fileno()
    resolver.add(Request("before"), NOBODY, 1)
    resolver._driver.take_commands(64)
    assert select.select([bell], [], [], 0)[0] == []
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            refused = 0
            for call in (lambda: resolver.add(Request("child's"), NOBODY, 2), resolver.poll, resolver.close):
                try:
                    call()
                except RuntimeError:
                    refused += 1
            resolver.discard(Request("child's"))
            del resolver, call
            gc.collect()
            status = 0 if refused == 3 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert select.select([bell], [], [], 0)[0] == [], "as before the fork"
    assert resolver.poll().failed == (), "what is pending here is still"
    resolver.add(Request("after"), NOBODY, 3)
    resolver.resume()
    assert len(resolver.close().failed) == 2
    assert select.select([bell], [], [], 0)[0] == [bell], "it is open and rings"
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()


@needs_fork
def test_forked_child_that_exits_normally_leaves_resolver_and_server_to_its_parent():
    status, out, err = run_python(
        """
        import gc, os, sys
        import disagg
        from machines import Request
        from polling import poll_until
        from registry_client import register

        server, another = disagg.BootstrapServer(), disagg.BootstrapServer()
        register(server.address)
        resolver = disagg.Resolver(disagg.DecodeRank(attn_tp_size=1, engine_rank=0))
        resolver.add(Request("before"), server.address, 1)
        assert poll_until(resolver, 1)
        resolver.add(Request("across the fork"), another.address, 2)  # which has no ranks yet
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            assert repr(server).endswith("closed>")
            server.close()
            del server, resolver
            gc.collect()
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        register(another.address)
        print([request.name for request in poll_until(resolver, 1)], bool(resolver.health()))
        resolver.close()
        """
    )
    assert (status, out, err) == (0, "['across the fork'] True\n", "")


# -- other processes


@pytest.fixture(scope="module", params=["spawn", "forkserver"])
def another_process(request):
    context = multiprocessing.get_context(request.param)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        yield pool


def test_values_and_errors_are_equal_in_another_process(another_process):
    values, errors = across_processes.values(), across_processes.errors()
    pid, values_back, errors_back = another_process.submit(across_processes.echo, values, errors).result(60)
    assert pid != os.getpid()
    assert values_back == values
    assert [across_processes.fields(e) for e in errors_back] == [across_processes.fields(e) for e in errors]


def test_every_value_and_error_class_of_the_api_is_among_those_sent():
    sent = {type(value) for value in across_processes.values() + across_processes.errors()}
    api = {thing for thing in vars(disagg).values() if isinstance(thing, type)}
    enums = {disagg.ReasonKind, disagg.Severity}  # in the reasons
    not_values = {disagg.Resolver, disagg.BootstrapServer, disagg.ResolverOptions, disagg.Health}
    parts = {disagg.DisaggError, disagg.Contact}  # the root of the errors; what makes up a RankMapping
    assert api - sent == enums | not_values | parts


@pytest.mark.parametrize("number", range(len(across_processes.errors())))
def test_error_raised_in_another_process_arrives_whole(another_process, number):
    error = another_process.submit(across_processes.raise_nth, number).exception(60)
    assert across_processes.fields(error) == across_processes.fields(across_processes.errors()[number])


def test_resolver_and_server_made_in_another_process_work_there(another_process):
    ((request, failure),) = another_process.submit(across_processes.fail_with_own, None).result(60)
    assert (request, failure.kind) == ("request", "unreachable")


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_resolver_and_server_made_in_a_forked_child_work_beside_those_of_the_parent():
    with disagg.BootstrapServer(), disagg.Resolver(DECODE) as resolver:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
            ((request, failure),) = pool.submit(across_processes.fail_with_own, None).result(60)
        assert (request, failure.kind) == ("request", "unreachable")
        assert resolver.health()


@pytest.mark.parametrize("attempt", [pickle.dumps, copy.copy, copy.deepcopy])
def test_resolver_and_server_say_why_they_do_not_pickle(attempt):
    with disagg.Resolver(DECODE) as resolver, pytest.raises(TypeError, match="cannot pickle a Resolver: it owns"):
        attempt(resolver)
    with disagg.BootstrapServer() as server, pytest.raises(TypeError, match="cannot pickle a BootstrapServer: it owns"):
        attempt(server)


def test_sub_interpreter_gets_an_import_error_and_no_crash():
    status, out, err = run_python(
        """
        import disagg
        code = "try:\\n import disagg\\nexcept ImportError as e:\\n print('no:', e, flush=True)\\nelse:\\n print('yes')"
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        made = interpreters.create()
        getattr(interpreters, "exec", interpreters.run_string)(made, code)
        interpreters.destroy(made)
        with disagg.Resolver(disagg.DecodeRank(attn_tp_size=1, engine_rank=0)) as resolver:
            print(bool(resolver.health()))
        """,
        "-Wignore",
    )
    assert (status, err) == (0, "")
    assert out.startswith("no: ")
    assert "subinterpreter" in out
    assert out.endswith("\nTrue\n")


# -- what is left behind


def used():
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def assert_gives_back(before, within_s=30):
    until = time.monotonic() + within_s
    while any(now > then for now, then in zip(used(), before, strict=True)):
        assert time.monotonic() < until, (used(), before)
        time.sleep(0.05)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
@pytest.mark.parametrize("on_loop", [False, True])
def test_fifty_resolvers_one_after_another_leave_no_thread_and_no_descriptor(host, on_loop):
    peers = [host.peer(silent()) for _ in range(2)]

    async def use(resolver):
        async with resolver:
            for room, addr in enumerate([peers[0].addr, peers[1].addr, NOBODY, "localhost:1"]):
                resolver.add(Request(room), addr, room)
            while resolver.stats()["http"]["topology"] < 4:
                await asyncio.sleep(0.001)
            assert resolver.health()

    async def main():
        loop = asyncio.get_running_loop() if on_loop else None
        await use(disagg.Resolver(DECODE, event_loop=loop))
        await asyncio.sleep(0.1)
        before = used()
        for _ in range(50):
            await use(disagg.Resolver(DECODE, event_loop=loop))
        await asyncio.to_thread(assert_gives_back, (before[0] + 1, before[1]))  # to_thread has a thread itself

    asyncio.run(main())


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_resolver_that_is_dropped_in_a_cycle_with_its_request_ends():
    def drop_one():
        resolver = disagg.Resolver(DECODE)
        request = [resolver]
        resolver.itself = resolver
        resolver.add(request, NOBODY, 1)

    disagg.Resolver(DECODE).close()
    before = used()
    drop_one()
    with pytest.warns(ResourceWarning, match=r"unclosed disagg\.Resolver"):
        gc.collect()
    assert_gives_back(before)


SETTINGS = """
import gc, logging, os, signal, socket, sys, threading, warnings

def settings():
    umask = os.umask(0o22)
    os.umask(umask)
    return {
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(gc.callbacks), gc.get_freeze_count()),
        "logging": (
            list(logging.root.handlers), logging.root.level, logging.root.manager.disable, logging.raiseExceptions,
            logging.lastResort, logging.getLoggerClass(), logging.getLogRecordFactory(),
            logging.getLogger("disagg").level, logging.getLogger("disagg").propagate,
            logging.getLogger("asyncio").handlers, logging.getLogger("asyncio").level,
        ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "wakeup descriptor": signal.set_wakeup_fd(-1),
        "masked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "umask": umask,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile()),
        "warnings": list(warnings.filters),
        "socket timeout": socket.getdefaulttimeout(),
        "stack size": threading.stack_size(),
    }

"""
USE = """
import asyncio
from polling import poll_until
from machines import Request
from registry_client import register

before = settings()
import disagg
seen = {"import": settings()}
with disagg.BootstrapServer() as server:
    register(server.address)
    decode = disagg.DecodeRank(attn_tp_size=1, engine_rank=0)
    retry = disagg.RetryPolicy(max_attempts=1, min_wait_s=0.0)
    resolver = disagg.Resolver(decode, retry)
    seen["make"] = settings()
    requests = [Request(room) for room in range(2)]
    resolver.add(requests[0], server.address, 0)
    resolver.add(requests[1], "127.0.0.1:1", 1)
    poll_until(resolver, 2)
    seen["use"] = settings()
    resolver.close()
    seen["close"] = settings()

    async def engine():
        async with disagg.Resolver(decode, retry, event_loop=asyncio.get_running_loop()) as resolver:
            resolver.add(requests[0], server.address, 0)
            while not resolver.poll().resolved:
                await asyncio.sleep(0.001)

    asyncio.run(engine())
    seen["event loop"] = settings()
for when, now in seen.items():
    for name, value in now.items():
        if value != before[name]:
            print(when, name, before[name], value)
print([name for name in ("prometheus_client", "typer") if name in sys.modules])
"""


def test_library_leaves_the_settings_of_the_process_alone():
    assert run_python(SETTINGS + USE) == (0, "[]\n", "")
