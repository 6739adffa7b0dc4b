"""One resolver called from many threads, from finalizers wherever they run, and from signal handlers."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
import weakref

import pytest

import disagg
from hammer import Hammer, Ledger, join_all
from machines import SECOND, A, B, Core, Request, endpoint, topology

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
QUICK = disagg.RetryPolicy(max_attempts=2, interval_s=0.1, min_wait_s=0.0)
NOBODY = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def _no_deadlock(capfd):
    """A deadlock that holds the interpreter stops every other way of noticing it: print the stacks and exit."""
    with capfd.disabled():
        uncaptured = os.dup(2)
    with os.fdopen(uncaptured, "wb") as stderr:
        faulthandler.dump_traceback_later(90, exit=True, file=stderr)
        yield
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def hasty_threads():
    """Threads that change places some hundred times as often as usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


# -- threads


@pytest.mark.usefixtures("hasty_threads")
@pytest.mark.parametrize("clearing", [False, True], ids=["without discard_all", "with discard_all"])
def test_each_request_ends_once_whatever_threads_call(clearing):
    """A5-12: heartbeats, polls, discards and failures told of, at few addresses, and all counts fit in the end."""
    seed = int(os.environ.get("DISAGG_HAMMER_SEED") or random.randrange(2**32))
    print(f"DISAGG_HAMMER_SEED={seed}")  # noqa: T201  (shown when it fails)
    hammer = Hammer(seed, clearing=clearing)
    hammer.run()
    hammer.check()
    kinds = {end.kind for step, _ in hammer.ledger.steps for _, end in step.failed}
    assert hammer.ledger.routed or any(step.resolved for step, _ in hammer.ledger.steps)
    assert {"told", "duplicate_room", "dp_rank_out_of_range"} <= kinds, "it did what it is for"


@pytest.mark.usefixtures("hasty_threads")
def test_threads_and_the_real_network_thread_share_one_resolver():
    errors, stop = [], threading.Event()

    def reported(work):
        def run(*arguments):
            try:
                work(*arguments)
            except BaseException as error:  # noqa: BLE001  (whatever it is, the test reports it)
                errors.append(error)

        return run

    @reported
    def add_many(first):
        for room in range(first, first + 1000):
            request = Request(room)
            ledger.add(request, f"127.0.0.1:{1 + room % 4}", room)
            if room % 5 == 0:
                ledger.discard(request)

    @reported
    def poll_often():
        while not stop.is_set():
            ledger.poll(64)

    with disagg.Resolver(DECODE, QUICK) as resolver:
        ledger = Ledger(resolver)
        adders = [threading.Thread(target=add_many, args=(10_000 * n,), daemon=True) for n in range(3)]
        pollers = [threading.Thread(target=poll_often, daemon=True) for _ in range(2)]
        for thread in adders + pollers:
            thread.start()
        join_all(adders)
        until = time.monotonic() + 20
        while any(resolver.stats()["pending"].values()) and time.monotonic() < until:
            time.sleep(0.01)
        stop.set()
        join_all(pollers)
        assert not any(resolver.stats()["pending"].values())
    assert errors == []
    ledger.check()


# -- finalizers


def ready_core(count=1):
    """A core with `count` requests to A that are placed and not polled, in virtual time."""
    core = Core(DECODE, QUICK)
    requests = [Request(f"placed {n}") for n in range(count)]
    for room, request in enumerate(requests):
        core.add(request, A, room)
    while commands := core.take_commands(100):
        for ticket, kind, *_ in commands:
            core.on_response(ticket, 200, endpoint() if kind == "endpoint" else topology())
    assert core.stats()["pending"]["decided"] == count
    return core, requests


class Garbage:
    """A cycle, so that it dies in the collector, wherever that runs."""

    def __init__(self, act):
        self.act, self.myself = act, self

    def __del__(self):
        self.act()


def collecting(call, *arguments):
    """Make the call with the collector on: it runs at the call's own allocations, and nowhere else."""
    gc.enable()
    try:
        return call(*arguments)
    finally:
        gc.disable()


@pytest.fixture
def greedy_collector():
    """The collector is off, but where a test turns it on it runs at every allocation."""
    usual = gc.get_threshold()
    gc.collect()
    gc.disable()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*usual)
    gc.enable()


@pytest.mark.usefixtures("greedy_collector")
@pytest.mark.parametrize("act", ["add", "add and discard", "poll"])
@pytest.mark.parametrize("call", ["add", "poll"])
def test_collector_may_run_finalizers_that_call_back_inside_a_call(call, act):
    for _ in range(10):
        core, placed = ready_core(5)
        ledger, ran = Ledger(core.resolver), []
        ledger.added += [(request, -1) for request in placed]

        def call_back(ledger=ledger, ran=ran):
            ran.append(act)
            if act == "poll":
                ledger.poll(1)
            else:
                request = Request(f"in a finalizer {len(ran)}")
                ledger.add(request, [A, B][len(ran) % 2], 1000 + len(ran))
                if act == "add and discard":
                    ledger.discard(request)
            if len(ran) < 20:
                Garbage(call_back)  # so that the next collection within the call has something to do

        Garbage(call_back)
        if call == "add":
            # A warm-up route is made in the call; others are made when the answers come.
            assert collecting(core.resolver.add, Request("now"), "2.2.2.2", 0).fake
        else:
            ledger.steps.append((collecting(core.resolver.poll), -1))
        assert ran, "the collector ran inside"
        gc.collect()
        core.fail_all("the end", closed=True)
        ledger.poll()
        ledger.check()


def test_add_and_discard_from_a_finalizer_do_not_deadlock():
    with disagg.Resolver(DECODE, QUICK) as resolver:
        added = []

        class Calls:
            def __del__(self):
                request = Request(len(added))
                added.append(request)
                resolver.add(request, NOBODY, 10_000 + len(added))
                resolver.discard(request)

        for room in range(200):
            # Held by the resolver alone, so it dies inside `poll` or `discard_all`; a cycle dies in the collector.
            request = Calls()
            request.myself = request if room % 2 else None
            resolver.add(request, NOBODY, room)
            del request
        resolver.discard_all()
        gc.collect()
        assert len(added) == 200


class Dying:
    """A request that only the resolver holds, and that acts when it dies."""

    def __init__(self, name, act):
        self.name, self.act = name, act

    def __del__(self):
        self.act(self)


def forget_ends(core):
    """Poll as often as `state_of` remembers an end, which keeps its request alive."""
    for _ in range(2):
        core.poll()
    gc.collect()


def test_requests_that_die_with_a_polls_result_may_add_and_discard():
    core = Core(DECODE, QUICK)
    added, others = [], weakref.WeakValueDictionary()

    def act(dying):
        added.append(Request(f"after {dying.name}"))
        core.add(added[-1], B, 1000 + dying.name)
        # The next one: in the same result, still to be polled, or dead already.
        other = others.get(dying.name + 1)
        if other is not None and dying.name % 3 == 0:
            core.discard(other)

    for room in range(300):
        others[room] = request = Dying(room, act)
        core.add(request, A, room)
        del request
    core.peer_lost(A)
    while core.poll(7).more:
        pass
    forget_ends(core)
    assert len(others) == 0
    assert len(added) == 300
    core.fail_all("the end", closed=True)
    assert [request for request, _ in core.poll().failed] == added
    assert not any(core.stats()["pending"].values())


def test_finalizer_may_poll():
    core = Core(DECODE, QUICK)
    dead = []

    def act(dying):
        dead.append(dying.name)
        core.poll(1)  # the next one dies in here

    for room in range(100):
        core.add(Dying(room, act), A, room)
    core.peer_lost(A)
    for _ in range(3 * 100):  # each dies in the second poll after its own
        core.poll(1)
    assert sorted(dead) == list(range(100))
    assert not any(core.stats()["pending"].values())


def test_request_may_add_itself_when_it_dies():
    core = Core(DECODE, QUICK)
    core.add(Dying("reborn", lambda dying: core.add(dying, B, 2)), A, 1)
    core.peer_lost(A)
    core.poll()
    forget_ends(core)
    assert core.stats()["pending"]["need_info"] == 1
    core.peer_lost(B)
    ((request, failure),) = core.poll().failed
    assert (request.name, failure.addr) == ("reborn", B)


# -- signals


def test_signal_handler_may_add_and_poll_and_discard_wherever_it_runs():
    core = Core(DECODE, QUICK)
    ledger, handled, now = Ledger(core.resolver), [], 0

    def on_signal(_number, _frame):
        request = Request(f"in handler {len(handled)}")
        handled.append(request)
        ledger.add(request, B, 10**9 + len(handled))
        ledger.poll(3)
        if len(handled) % 2:
            ledger.discard(request)

    usual = signal.signal(signal.SIGVTALRM, on_signal)  # SIGALRM is pytest-timeout's
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
    try:
        for room in range(10**8):
            if len(handled) >= 100:
                break
            ledger.add(Request(room), A, room)
            if room % 10 == 0:
                for ticket, *_ in core.take_commands(10):
                    core.on_error(ticket, "refused", "connection refused")
                now += SECOND
                core.set_time_ns(now)
                core.on_timer()
                ledger.poll()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, usual)
    core.fail_all("the end", closed=True)
    ledger.poll(2**31)
    ledger.check()
