"""`Resolver.health()`: about this process's network side only, and by its progress (CASES.md X-06, A5-03, A5-19)."""

from __future__ import annotations

import logging
import threading
import time

import pytest

import disagg
from disagg import resolver as resolver_module
from hostile import answers, black_hole, refusing_address, response, silent
from machines import A, B, Request, add, answer_all, make, topology
from polling import poll_until, until

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
ONCE = disagg.RetryPolicy(max_attempts=1, min_wait_s=0.0)
NO_PROGRESS = "the network has made no progress for "


class Blocks(logging.Handler):
    """As one that writes to a full pipe: it holds up whoever logs until it is let go."""

    def __init__(self):
        super().__init__()
        self.is_in, self.let_go = threading.Event(), threading.Event()

    def emit(self, record):
        self.is_in.set()
        self.let_go.wait(60)


@pytest.fixture
def blocking_handler():
    handler = Blocks()
    logging.getLogger("disagg").addHandler(handler)
    yield handler
    handler.let_go.set()
    logging.getLogger("disagg").removeHandler(handler)


@pytest.fixture
def short_patience(monkeypatch):
    """Over the second at which an idle network thread shows itself."""
    monkeypatch.setattr(resolver_module, "STALLED_S", 2.5)


@pytest.mark.usefixtures("short_patience")
def test_health_is_false_while_a_log_handler_holds_up_the_network_and_true_again_when_it_goes_on(
    host, blocking_handler
):
    """X-06: the thread lives, and yet nothing would ever come of the requests."""
    peer = host.peer(answers())
    with refusing_address() as nobody, disagg.Resolver(DECODE, ONCE) as resolver:
        resolver.add(Request("fails, which is logged"), nobody, 1)
        assert blocking_handler.is_in.wait(20)
        assert resolver.health(), "not at once"
        resolver.add(Request("waits"), peer.addr, 2)
        until(lambda: not resolver.health())
        assert resolver.health().reason.startswith(NO_PROGRESS)
        assert float(resolver.health().reason.removeprefix(NO_PROGRESS).removesuffix(" s")) >= 2.5
        assert peer.requests == 0
        blocking_handler.let_go.set()
        until(resolver.health)
        until(lambda: peer.requests)


@pytest.mark.usefixtures("short_patience")
def test_network_that_waits_for_one_slow_answer_or_for_nothing_is_healthy(host):
    """X-06: slow work is progress, and so is none; nothing that peers do holds up the network side (A5-03)."""
    peer = host.peer(silent())
    limits = {"connect_timeout_s": 60.0, "total_timeout_s": 60.0}
    with black_hole() as hole, disagg.Resolver(DECODE, ONCE, **limits) as busy, disagg.Resolver(DECODE) as idle:
        busy.add(Request("a"), peer.addr, 1)
        busy.add(Request("b"), hole, 2)
        end = time.monotonic() + 4.0
        while time.monotonic() < end:
            assert busy.health()
            assert idle.health()
            time.sleep(0.05)
        assert busy.stats()["in_flight"] == 2


def test_network_without_work_that_shows_no_progress_is_not_called_unhealthy():
    with disagg.Resolver(DECODE) as resolver:
        resolver._transport._driver.progressed_at = float("-inf")
        assert not resolver.driver().has_work()
        assert resolver.health()


def test_driver_has_work_for_a_command_an_awaited_answer_and_a_timer_that_is_due():
    pair = make({"max_attempts": 2, "min_wait_s": 0.0})
    driver = pair.core.driver
    assert not driver.has_work()
    pair.core.resolver.add("a", A, 1)
    assert driver.has_work(), "a command waits"
    ((ticket, *_),) = driver.take_commands(9)
    assert driver.has_work(), "an answer is awaited"
    driver.on_error(ticket, "refused", "")
    assert not driver.has_work(), "the next attempt is due in a second"
    before = driver.next_timer()
    pair.core.set_time_ns(1_000_000_000)
    assert driver.has_work(), "it is due"
    assert (before, driver.next_timer()) == (1.0, 0.0)
    driver.on_timer()
    assert len(driver.take_commands(9)) == 1


def test_asking_whether_there_is_work_takes_no_ring_away():
    pair = make()
    pair.core.resolver.add("a", A, 1)
    assert pair.core.driver.has_work()
    pair.core.resolver.add("b", B, 2)
    assert [command[2] for command in pair.core.driver.take_commands(9)] == [A, B]


def test_dead_peer_with_fifty_pending_leaves_health_true_and_is_counted(host):
    """A5-03: what becomes of a peer is not our health."""
    peer = host.peer(answers(response("503 Service Unavailable", b"")))
    policy = disagg.RetryPolicy(max_attempts=2, interval_s=0.05, min_wait_s=0.0)
    with disagg.Resolver(DECODE, policy) as resolver:
        requests = [Request(room) for room in range(50)]
        for request in requests:
            resolver.add(request, peer.addr, request.name)
        assert resolver.health()
        ends = poll_until(resolver, 50)
        assert {ends[request].kind for request in requests} == {"not_ready"}
        health = resolver.health()
        assert health
        assert (health.reason, health.peers_down) == (None, 1)
        assert repr(health) == "Health(ok, peers_down=1)"


class PanicError(BaseException):
    """As a panic of the core comes out of it: no Exception."""


def test_panic_in_the_network_turns_health_false_with_the_reason_and_ends_what_is_pending(host, monkeypatch):
    """A5-19: nothing waits for a thread that is gone, and whoever comes later is told, too."""
    peer = host.peer(silent())
    with disagg.Resolver(DECODE, total_timeout_s=60.0) as resolver:
        pending = [Request(room) for room in range(10)]
        for request in pending:
            resolver.add(request, peer.addr, request.name)
        until(lambda: peer.requests)
        assert resolver.health()

        def panics(now):
            raise PanicError("index out of bounds")

        monkeypatch.setattr(resolver._transport._driver, "_start_one", panics)
        resolver.add(Request("is to be started"), "127.0.0.1:1", 99)
        ends = poll_until(resolver, 11)
        assert {end.kind for end in ends.values()} == {"internal"}
        assert {end.http_status for end in ends.values()} == {500}
        until(lambda: not resolver.health())
        assert resolver.health().reason == "PanicError: index out of bounds"
        late = Request("late")
        assert resolver.add(late, peer.addr, 100) is None
        assert poll_until(resolver, 1)[late].kind == "internal"


def test_refused_peer_counts_as_down_until_it_is_ready():
    pair = make()
    add(pair, "a")
    pair.answer(pair.only("topology"), 200, topology(page_size=32))
    assert pair.core.stats()["peers"]["marked"] == 1
    pair.advance(15.1)
    answer_all(pair, topology())
    assert pair.core.stats()["peers"]["marked"] == 0
