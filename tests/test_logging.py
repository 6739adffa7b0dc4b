"""Log lines about peers: one for each change of state, with exact fields, and no harm from whoever reads them."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import time

import pytest

import disagg
from disagg.peer_log import BURST, LINES, REFILL_S, PeerLog
from hostile import refusing_address
from machines import A, B, Request, add, answer_all, answer_topology, make, make_ready, topology
from polling import poll_until

NAMES = ("event", "addr", "attempt", "budget", "kind", "waiting", "epoch", "sizes", "reason", "suppressed")


class Logged:
    """A pair of machines, and what is logged of the core's one."""

    def __init__(self, caplog, policy=None, decode=None, **options):
        caplog.set_level(logging.DEBUG, logger="disagg")
        self.caplog = caplog
        self.pair = make(policy, decode, **options)
        self.log = PeerLog(self.pair.core.driver)

    def write(self, now=None):
        """Write; returns the new records."""
        self.caplog.clear()
        while self.log.write(self.pair.now / 1e9 if now is None else now):
            pass
        return list(self.caplog.records)

    def events(self):
        return [record.event for record in self.write()]


def fields(record):
    return {name: getattr(record, name) for name in NAMES if getattr(record, name) is not None}


def only(records):
    (record,) = records
    return record.levelname, record.getMessage(), fields(record)


@pytest.fixture
def logged(caplog):
    return Logged(caplog, {"max_attempts": 3, "min_wait_s": 0.0})


SIZES = {"dp": 1, "cp": 1, "tp": 1, "pp": 1}


def test_the_life_of_a_peer_is_told_line_by_line(logged):
    """X-05: each with the address, attempt and budget, the kind of failure and how many requests it concerns."""
    pair = logged.pair
    base = {"addr": A, "epoch": 0, "suppressed": 0}
    add(pair, "a")
    add(pair, "b")
    assert logged.write() == []
    pair.fail(pair.only("topology"), "refused", "connection refused")
    failed = base | {"event": "fetch_failed", "attempt": 1, "budget": 3, "kind": "unreachable", "waiting": 2}
    assert only(logged.write()) == (
        "WARNING",
        f"{A}: attempt 1 of 3 failed, 2 waiting: connection refused",
        failed | {"reason": "connection refused"},
    )
    pair.advance(1.0)
    pair.fail(pair.only("topology"), "timeout", "no answer")
    assert logged.write() == [], "not each attempt"
    pair.advance(1.0)
    pair.answer(pair.only("topology"), 503)
    spent = failed | {"event": "budget_spent", "attempt": 3, "kind": "not_ready", "reason": "answered 503: not ready"}
    assert only(logged.write()) == (
        "ERROR",
        f"{A}: gave up after 3 attempts, 2 waiting: answered 503: not ready",
        spent,
    )
    pair.advance(15.1)
    pair.fail(pair.only("topology"))
    assert logged.write() == [], "a probe that fails changes nothing"
    pair.advance(1.1)
    answer_topology(pair, topology())
    ready = base | {"event": "ready", "epoch": 1, "sizes": SIZES, "waiting": 0, "reason": ""}
    assert only(logged.write()) == ("INFO", f"{A}: ready: dp 1, cp 1, tp 1, pp 1 (epoch 1), 0 waiting", ready)
    add(pair, "c")
    pair.both("peer_lost", A)
    lost = base | {"event": "lost", "epoch": 1, "kind": "peer_lost", "waiting": 1, "reason": "lost: the engine said so"}
    assert only(logged.write()) == ("ERROR", f"{A}: lost: the engine said so, 1 waiting", lost)
    pair.advance(15.1)
    answer_topology(pair, topology())
    back = ready | {"event": "back", "epoch": 2}
    assert only(logged.write()) == ("INFO", f"{A}: back: dp 1, cp 1, tp 1, pp 1 (epoch 2), 0 waiting", back)
    add(pair, "d")
    pair.both("peer_restarted", A)
    restarted = base | {"event": "restarted", "epoch": 2, "waiting": 1, "reason": ""}
    text = f"{A}: restarted, 1 waiting start over (epoch 2 ended)"
    assert only(logged.write()) == ("WARNING", text, restarted)


def test_a_budget_of_one_attempt_is_told_once(caplog):
    logged = Logged(caplog, {"max_attempts": 1, "min_wait_s": 0.0})
    add(logged.pair, "a")
    logged.pair.fail(logged.pair.only("topology"))
    assert logged.events() == ["budget_spent"]


@pytest.mark.parametrize(
    ("answer", "kind", "reason"),
    [
        ((404, b""), "not_a_registry", "answered 404 to the topology query"),
        ((200, topology(page_size=32)), "incompatible", "page_size"),
    ],
)
def test_a_refusal_is_told_once_however_often_a_probe_finds_it_again(logged, answer, kind, reason):
    pair = logged.pair
    add(pair, "a")
    pair.answer(pair.only("topology"), *answer)
    (record,) = logged.write()
    assert (record.event, record.levelname, record.kind, record.waiting) == ("refused", "ERROR", kind, 1)
    assert reason in record.reason
    for _ in range(3):
        pair.advance(15.1)
        pair.answer(pair.only("topology"), *answer)
    assert logged.write() == []
    pair.advance(15.1)
    answer_topology(pair, topology())
    assert logged.events() == ["ready"]


def test_a_restart_that_a_heartbeat_finds_is_told_with_what_came_of_it(logged):
    make_ready(logged.pair, topology())
    logged.pair.advance(5.1)
    logged.write()
    logged.pair.answer(logged.pair.only("heartbeat"), 200, topology(dp=2))
    old, new = logged.write()
    assert (old.event, old.epoch, new.event, new.epoch, new.sizes["dp"]) == ("restarted", 1, "ready", 2, 2)


def test_heartbeats_that_fail_end_in_one_line(logged):
    make_ready(logged.pair, topology())
    logged.write()
    for _ in range(25):
        logged.pair.advance(1.0)
        for flight in list(logged.pair.flights):
            logged.pair.fail(flight, "timeout", "no answer")
    lost, *others = logged.write()
    assert (lost.event, lost.kind, others) == ("lost", "peer_lost", [])
    assert lost.reason.endswith(": no answer")


def test_unequal_tp_is_warned_of_once_for_an_address(caplog):
    """A1-03: keys and values are per head, so each rank reads from several."""
    logged = Logged(caplog, decode={"attn_tp_size": 2, "engine_rank": 0})
    pair = logged.pair
    add(pair, "a")
    answer_topology(pair, topology(tp=4))
    ready, warning = logged.write()
    assert (ready.event, warning.event, warning.levelname, warning.addr) == ("ready", "unequal_tp", "WARNING", A)
    assert "2" in warning.reason
    assert "4" in warning.reason
    pair.both("peer_restarted", A)
    answer_topology(pair, topology(tp=4))
    assert logged.events() == ["restarted", "ready"]
    add(pair, "b", B)
    answer_topology(pair, topology(tp=4))
    assert logged.events() == ["ready", "unequal_tp"]


@pytest.mark.parametrize(("kv", "tp"), [("mha", 2), ("mla", 4)])
def test_equal_tp_and_mla_are_not_warned_of(caplog, kv, tp):
    logged = Logged(caplog, decode={"attn_tp_size": 2, "engine_rank": 0, "kv": kv})
    add(logged.pair, "a")
    answer_topology(logged.pair, topology(tp=tp))
    assert logged.events() == ["ready"]


def test_there_is_no_line_for_a_request(logged):
    for room in range(50):
        add(logged.pair, room)
    answer_all(logged.pair, topology())
    for room in range(50):
        add(logged.pair, room)
    add(logged.pair, "never", room=5000)
    logged.pair.both("fail_room", 5000, "no", 400)
    assert logged.events() == ["ready"]


def test_what_a_peer_sent_is_escaped(logged):
    add(logged.pair, "a")
    logged.pair.fail(logged.pair.only("topology"), "other", "evil\n2026 ERROR \x1b[2Jfake\u202e")
    (record,) = logged.write()
    assert record.reason == "evil\\x0a2026 ERROR \\x1b[2Jfake\\x202e"
    assert record.getMessage().endswith(record.reason)


def test_age_is_that_of_the_change(logged):
    add(logged.pair, "a")
    logged.pair.fail(logged.pair.only("topology"))
    logged.pair.advance(0.5)
    (record,) = logged.write()
    assert record.age_s == 0.5


def flap(pair):
    pair.both("peer_restarted", A)


def test_a_flapping_peer_gets_its_burst_and_later_one_line_that_is_the_newest(logged):
    pair = logged.pair
    make_ready(pair, topology())
    for _ in range(200):
        flap(pair)
    records = logged.write(now=0.0)
    assert [record.event for record in records] == ["ready", *["restarted"] * (BURST - 1)]
    add(pair, "next")
    answer_topology(pair, topology())
    assert logged.write(now=1.0) == []
    assert logged.write(now=REFILL_S - 0.1) == []
    (record,) = logged.write(now=REFILL_S)
    assert (record.event, record.suppressed) == ("ready", 201 - BURST)
    assert logged.write(now=2 * REFILL_S) == []
    flap(pair)
    (record,) = logged.write(now=2 * REFILL_S)
    assert record.suppressed == 0


def test_a_flapping_peer_costs_another_one_no_line(logged):
    make_ready(logged.pair, topology())
    for _ in range(100):
        flap(logged.pair)
    add(logged.pair, "b", B)
    logged.pair.fail(logged.pair.only("topology"))
    assert [record.event for record in logged.write() if record.addr == B] == ["fetch_failed"]


def test_what_is_over_the_queue_is_counted(logged):
    make_ready(logged.pair, topology())
    for _ in range(600):
        flap(logged.pair)
    dropped = [record for record in logged.write() if record.event == "dropped"]
    assert [record.count for record in dropped] == [601 - 512]
    assert dropped[0].getMessage() == "89 changes of peers were too many to log"
    assert logged.pair.core.counters()["changes_dropped"] == 89


def test_one_call_writes_few_lines(logged):
    for number in range(40):
        add(logged.pair, number, f"10.0.2.{number}:8998")
    for flight in list(logged.pair.flights):
        logged.pair.fail(flight)
    logged.caplog.clear()
    assert logged.log.write(0.0)
    assert len(logged.caplog.records) == LINES
    assert len(logged.write()) == 40 - LINES


def test_memory_of_idle_addresses_is_bounded(logged):
    pair = logged.pair
    for number in range(3000):
        addr = f"10.0.{number // 250}.{number % 250}:8998"
        request = add(pair, number, addr)
        pair.fail(pair.only("topology"))
        pair.discard(request)
        pair.advance(1.1)
        logged.log.write(pair.now / 1e9)
    assert len(logged.log._full_at) <= 1100


def test_the_end_tells_what_was_held_back(logged):
    pair = logged.pair
    make_ready(pair, topology())
    for _ in range(20):
        flap(pair)
    logged.write()
    logged.caplog.clear()
    logged.log.write_rest(1.0)
    (record,) = logged.caplog.records
    assert (record.event, record.suppressed) == ("restarted", 20 - BURST)


class Chokes(logging.Handler):
    """Raises without asking `handleError`."""

    def __init__(self, error):
        super().__init__()
        self.error = error
        self.seen = 0

    def emit(self, record):
        self.seen += 1
        raise self.error


@pytest.fixture
def handler(request):
    logger = logging.getLogger("disagg")
    logger.addHandler(request.param)
    yield request.param
    logger.removeHandler(request.param)


@pytest.mark.parametrize("handler", [Chokes(RuntimeError("full")), Chokes(SystemExit(3))], indirect=True)
def test_a_handler_that_raises_does_not_hurt_the_network(handler):
    policy = disagg.RetryPolicy(max_attempts=2, interval_s=0.05, min_wait_s=0.0)
    decode = disagg.DecodeRank(attn_tp_size=1, engine_rank=0)
    with refusing_address() as one, refusing_address() as other, disagg.Resolver(decode, policy) as resolver:
        resolver.add(Request("a"), one, 1)
        poll_until(resolver, 1)
        end = time.monotonic() + 10
        while handler.seen < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert handler.seen == 2
        resolver.add(Request("b"), other, 2)
        poll_until(resolver, 1)
        assert resolver.health()
    assert handler.seen == 4, "the rest at the end"


def test_a_live_resolver_logs_within_two_seconds_on_its_own_thread(caplog):
    decode = disagg.DecodeRank(attn_tp_size=1, engine_rank=0)
    with refusing_address() as nobody, disagg.Resolver(decode) as resolver:
        resolver.add(Request("a"), nobody, 1)
        end = time.monotonic() + 10
        while not caplog.records and time.monotonic() < end:
            resolver.poll()
            time.sleep(0.01)
        (record,) = caplog.records
    assert (record.event, record.addr, record.threadName) == ("fetch_failed", nobody, "disagg-transport")
    assert 0 <= record.age_s < 2


def test_logging_is_left_alone():
    """Nothing is configured, printed or imported: there is one NullHandler, once a resolver was made."""
    code = """
        import sys
        import disagg
        print("disagg.metrics" in sys.modules, "disagg.peer_log" in sys.modules)
        policy = disagg.RetryPolicy(max_attempts=1, min_wait_s=0.0)
        for _ in range(2):
            with disagg.Resolver(disagg.DecodeRank(attn_tp_size=1, engine_rank=0), policy) as resolver:
                resolver.add("a", "127.0.0.1:1", 1)
                while not resolver.poll().failed:
                    pass
        import logging
        logger = logging.getLogger("disagg")
        print([type(handler).__name__ for handler in logger.handlers], logging.getLogger().handlers)
        print(logger.level, logger.propagate, logger.disabled)
    """
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == ["False False", "['NullHandler'] []", "0 True False"]
