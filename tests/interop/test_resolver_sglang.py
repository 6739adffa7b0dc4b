"""Our Resolver against a real prefill engine: SGLang 0.5.23's own bootstrap server, managers and senders."""

import json
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import disagg
import sglang_wheel

SCRIPT = Path(__file__).with_name("sglang_engine.py")
PATIENT = disagg.RetryPolicy(max_attempts=20, interval_s=0.5)

# A first run fetches 40 MB.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def engine(shared):
    """Start a real prefill engine; gives its address and its ranks' ports, dp by dp."""
    site = sglang_wheel.site_or_skip("0.5.23")

    @contextmanager
    def run(tp, dp, load_balance_method="follow_bootstrap_room", rooms=None, port=None):
        port = port or free_port()
        options = {"tp": tp, "dp": dp, "load_balance_method": load_balance_method, "rooms": rooms or {}}
        command = [sys.executable, str(SCRIPT), str(shared / "tools"), str(site), str(port), json.dumps(options)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                line = process.stdout.readline()
                assert line, f"the engine ended with {process.wait(10)}"
                yield f"127.0.0.1:{port}", json.loads(line)
            finally:
                process.kill()

    return run


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def resolve(resolver, requests):
    """Add (room, addr) pairs; return the end of each room."""
    ends = {}
    for room, addr in requests:
        route = resolver.add(Room(room), addr, room)
        if route is not None:
            ends[room] = route
    until = time.monotonic() + 30
    while len(ends) < len(requests):
        assert time.monotonic() < until, ends
        step = resolver.poll()
        ends |= {request.number: end for request, end in [*step.resolved, *step.failed]}
        time.sleep(0.002)
    return ends


class Room:
    """A request that knows its room."""

    def __init__(self, number):
        self.number = number


def ports_of(route):
    return [endpoint.port for endpoint in route.endpoints]


def test_dp_rank_follows_the_room_and_every_rank_of_the_block_is_found(engine):
    decode = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64, kv="mla")
    with engine(tp=2, dp=2) as (addr, ports), disagg.Resolver(decode, PATIENT) as resolver:
        ends = resolve(resolver, [(4, addr), (5, addr)])
        assert [ends[room].dp_rank for room in (4, 5)] == [0, 1]
        assert [ports_of(ends[room]) for room in (4, 5)] == [ports[:2], ports[2:]]
        assert [endpoint.dummy for endpoint in ends[4].endpoints] == [False, True]


def test_dp_ranks_that_the_senders_registered_are_asked_for(engine):
    decode = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
    rooms = {"40": 1, "41": 0}
    with (
        engine(tp=1, dp=2, load_balance_method="round_robin", rooms=rooms) as (addr, ports),
        disagg.Resolver(decode, PATIENT, dp_rank_timeout_s=1.5) as resolver,
    ):
        ends = resolve(resolver, [(40, addr), (41, addr), (42, addr)])
        assert [ends[room].dp_rank for room in (40, 41)] == [1, 0]
        assert [ports_of(ends[room]) for room in (40, 41)] == [[ports[1]], [ports[0]]]
        assert ends[42].kind == "dp_rank_timeout", "a room that nobody registers ends by itself"


def test_page_size_that_differs_fails_the_requests_of_that_engine_only(engine):
    decode = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=32)
    with engine(tp=1, dp=1) as (addr, _), disagg.Resolver(decode, PATIENT) as resolver:
        ends = resolve(resolver, [(1, addr)])
        assert ends[1].kind == "incompatible"
        assert "32" in ends[1].reason
        assert "64" in ends[1].reason


def test_engine_that_is_replaced_by_one_of_another_size_is_seen_by_the_heartbeat(engine):
    """A5-09: that server states no instance, so the topology tells."""
    decode = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
    with disagg.Resolver(decode, PATIENT, heartbeat_interval_s=0.3) as resolver:
        port = free_port()
        with engine(tp=1, dp=1, port=port) as (addr, ports):
            assert ports_of(resolve(resolver, [(1, addr)])[1]) == ports
        with engine(tp=2, dp=1, port=port) as (addr, ports):
            events = []
            until = time.monotonic() + 20
            while not events:
                events = resolver.poll().events
                assert time.monotonic() < until
                time.sleep(0.01)
            assert [event.kind for event in events] == ["peer_restarted"]
            assert ports_of(resolve(resolver, [(2, addr)])[2]) == ports
