"""Cases of the topology fetch (CASES.md area 2) with `disagg.Resolver` on real sockets."""

from __future__ import annotations

import time

import disagg
from hostile import black_hole, refusing_address, silent
from machines import Request
from polling import poll_until
from registry_client import register

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
QUICK = disagg.RetryPolicy(max_attempts=3, interval_s=0.1, min_wait_s=0.0)


def test_address_that_refuses_costs_its_requests_only():
    """A2-01: the bad request ends when the budget does; the others are served before and after."""
    with disagg.BootstrapServer() as server, refusing_address() as nobody, disagg.Resolver(DECODE, QUICK) as resolver:
        register(server.address)
        bad, good = Request("bad"), Request("good")
        assert resolver.add(bad, nobody, 1) is None
        assert resolver.add(good, server.address, 2) is None
        ends = poll_until(resolver, 2)
        assert (ends[bad].kind, ends[bad].http_status, ends[bad].attempts) == ("unreachable", 503, 3)
        assert ends[good].endpoints[0].port == 2000
        assert resolver.add(Request("next"), server.address, 3) == ends[good]
        assert resolver.health()


def test_wrong_port_is_named_in_the_failure():
    """A2-02: the peer is up, but requests name another port of its host."""
    with disagg.BootstrapServer() as server, refusing_address() as wrong, disagg.Resolver(DECODE, QUICK) as resolver:
        register(server.address)
        request = Request("a")
        assert resolver.add(request, wrong, 1) is None
        failure = poll_until(resolver, 1)[request]
        assert failure.reason.startswith(f"{wrong}: gave up after 3 attempts: ")
        assert "refused" in failure.reason
        assert server.address not in failure.reason
        assert resolver.health()


def test_requests_to_a_black_hole_fail_with_503_and_no_cycle_waits_for_it():
    """A2-05: three requests; the scheduler goes on while the first attempt is under way."""
    policy = disagg.RetryPolicy(max_attempts=2, interval_s=0.1, min_wait_s=0.0)
    with black_hole() as addr, disagg.Resolver(DECODE, policy, connect_timeout_s=1.5) as resolver:
        requests = [Request(room) for room in range(3)]
        assert [resolver.add(request, addr, request.name) for request in requests] == [None] * 3
        while not resolver.stats()["http"]["topology"]:
            time.sleep(0.001)
        assert {resolver.poll().seq for _ in range(1000)} == {0}
        stats = resolver.stats()
        # Had one call waited for the attempt, it would be over now.
        assert (stats["in_flight"], stats["http"]["topology"], stats["peers"]["fetching"]) == (1, 1, 1)
        ends = poll_until(resolver, 3)
    assert {(ends[request].kind, ends[request].http_status, ends[request].attempts) for request in requests} == {
        ("unreachable", 503, 2)
    }


def test_connect_timeout_ends_an_attempt_at_an_address_that_drops_connection_requests():
    """A2-08: 2 s are respected, though the whole request may take longer."""
    policy = disagg.RetryPolicy(max_attempts=1, min_wait_s=0.0)
    with black_hole() as addr, disagg.Resolver(DECODE, policy, connect_timeout_s=2.0, total_timeout_s=20.0) as resolver:
        request = Request("a")
        began = time.monotonic()
        resolver.add(request, addr, 1)
        failure = poll_until(resolver, 1)[request]
        took_s = time.monotonic() - began
    assert failure.kind == "unreachable"
    assert failure.reason.endswith("no connection within 2 s")
    assert 2.0 <= took_s < 10.0


def test_peers_that_accept_and_never_answer_are_asked_once_and_delay_no_other(host):
    """A2-07: four of them; neither more requests nor more cycles ask again while an answer is awaited."""
    tarpits = [host.peer(silent()) for _ in range(4)]
    with disagg.BootstrapServer() as server, disagg.Resolver(DECODE, QUICK, total_timeout_s=60.0) as resolver:
        register(server.address)
        for room in range(40):
            assert resolver.add(Request(room), tarpits[room % 4].addr, room) is None
        healthy = Request("healthy")
        resolver.add(healthy, server.address, 100)
        assert list(poll_until(resolver, 1)) == [healthy]
        for _ in range(1000):
            resolver.poll()
        assert [tarpit.requests for tarpit in tarpits] == [1] * 4
        assert resolver.stats()["in_flight"] == 4
        assert resolver.stats()["pending"]["need_info"] == 40
