"""Hostile peers and `disagg.Resolver`: the right kind for their requests, and no harm to a healthy peer beside each."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest

import disagg
from hostile import (
    TOPOLOGY,
    answers,
    big_body,
    black_hole,
    closes_half_way,
    continues_for_ever,
    dies_between_requests,
    drips,
    garbage,
    gzip_bomb,
    gzipped,
    hangs_up,
    html,
    huge_headers,
    many_headers,
    not_ready,
    prefill,
    redirects,
    refusing_address,
    resets,
    response,
    says,
    silent,
    wrong_length,
)
from machines import Request
from polling import poll_until

DECODE = disagg.DecodeRank(attn_tp_size=4, engine_rank=1, page_size=64)
TWICE = disagg.RetryPolicy(max_attempts=2, interval_s=0.05, min_wait_s=0.0)
TIMEOUTS = {"connect_timeout_s": 0.4, "total_timeout_s": 0.6}


@pytest.fixture(scope="module")
def resolver():
    """One for all of them, so that what an earlier peer did would show with a later one."""
    with disagg.Resolver(DECODE, TWICE, **TIMEOUTS) as resolver:
        yield resolver
        assert resolver.health()
        assert not any(resolver.stats()["pending"].values())


ROOMS = iter(range(1, 10**6))


def end_beside_a_healthy_peer(host, resolver, addr, *, is_slow=False):
    """Returns how the request to `addr` ended; one to a new healthy peer was placed meanwhile, or at least as well."""
    healthy = host.peer(prefill(port=6000))
    hurt, well = Request("hurt"), Request("well")
    assert resolver.add(hurt, addr, next(ROOMS)) is None
    assert resolver.add(well, healthy.addr, next(ROOMS)) is None
    ends = poll_until(resolver, 1)
    if is_slow:
        assert list(ends) == [well], "placed while the other one waits for its peer"
    if len(ends) < 2:
        ends |= poll_until(resolver, 1)
    assert [endpoint.port for endpoint in ends[well].endpoints] == [6001]
    assert resolver.health()
    return ends[hurt]


NO_ANSWER = "no complete answer within 0.6 s"
NOT_HTTP = "the answer is not HTTP/1.1"


@pytest.mark.parametrize(
    ("behave", "kind", "text"),
    [
        (silent(), "unreachable", NO_ANSWER),
        (drips(interval_s=1.0), "unreachable", NO_ANSWER),
        (drips(interval_s=0.01), "unreachable", NO_ANSWER),
        (continues_for_ever(), "unreachable", NO_ANSWER),
        (resets(), "unreachable", "connection reset by peer"),
        (resets(after_request=False), "unreachable", "(ECONNRESET)"),
        (hangs_up(), "unreachable", "closed before an answer"),
        (closes_half_way(), "protocol_error", "ended before it was complete"),
        (says(response(body=TOPOLOGY[:9], length=99), then="reset"), "protocol_error", "ended before it was complete"),
        (redirects("127.0.0.1:1"), "not_a_registry", "answered 302"),
        (big_body(), "protocol_error", "announced with 10000000 bytes, over 65536"),
        (big_body(announced=False), "protocol_error", "the body is over 65536 bytes"),
        (html(), "protocol_error", "protocol error"),
        (gzipped(), "protocol_error", "content encoding 'gzip'"),
        (gzip_bomb(), "protocol_error", "content encoding 'gzip'"),
        (wrong_length("too long"), "protocol_error", "ended before it was complete"),
        (wrong_length("too short"), "protocol_error", "protocol error"),
        (wrong_length("negative"), "unreachable", NOT_HTTP),
        (wrong_length("duplicate"), "unreachable", NOT_HTTP),
        (huge_headers(), "protocol_error", "a header is over 8190 bytes"),
        (many_headers(), "unreachable", ""),
        (garbage(), "unreachable", NOT_HTTP),
        (not_ready(), "not_ready", "answered 503"),
        (answers(response("404 Not Found", b"")), "not_a_registry", "answered 404"),
        (answers(response(body=TOPOLOGY.replace(b":4", b":4.0"))), "protocol_error", "attn_tp_size"),
    ],
    ids=[
        "silent", "drips a byte a second", "drips", "continues for ever", "resets", "resets at once", "hangs up",
        "closes half-way", "resets half-way", "redirects", "10 MB", "10 MB in chunks", "HTML", "gzip", "gzip bomb",
        "length too long", "length too short", "length negative", "length twice", "huge header", "many headers",
        "no HTTP", "503 for ever", "404", "a size that is none",
    ],
)  # fmt: skip
def test_peer_costs_its_own_request_only_which_ends_with_the_kind_of_what_it_did(host, resolver, behave, kind, text):
    """Among them A2-14: 404 is what a server says that is no prefill, and is not asked twice."""
    peer = host.peer(behave)
    is_slow = text == NO_ANSWER
    end = end_beside_a_healthy_peer(host, resolver, peer.addr, is_slow=is_slow)
    assert isinstance(end, disagg.Failure), "not routed to whatever it said"
    assert (end.kind, end.addr, end.attempts) == (kind, peer.addr, 1 if kind == "not_a_registry" else 2)
    assert text in end.reason
    assert "secret-of-the-peer" not in end.reason


def test_address_that_refuses_and_one_that_drops_connection_requests(host, resolver):
    with refusing_address() as nobody:
        end = end_beside_a_healthy_peer(host, resolver, nobody)
    assert (end.kind, "refused" in end.reason) == ("unreachable", True)
    with black_hole() as hole:
        end = end_beside_a_healthy_peer(host, resolver, hole, is_slow=True)
    assert (end.kind, end.reason.endswith("no connection within 0.4 s")) == ("unreachable", True)


def test_redirect_reaches_nobody_else(host, resolver):
    elsewhere = host.peer(prefill())
    assert end_beside_a_healthy_peer(host, resolver, host.peer(redirects(elsewhere.addr)).addr).kind == "not_a_registry"
    assert elsewhere.connections == 0


def test_gzip_bomb_is_not_unpacked(host, resolver):
    peer = host.peer(gzip_bomb())
    tracemalloc.start()
    try:
        assert end_beside_a_healthy_peer(host, resolver, peer.addr).kind == "protocol_error"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20, "of 64 MiB"


@pytest.mark.parametrize("answers_per_connection", [1, 2])
def test_kept_connections_that_die_cost_nothing(host, resolver, answers_per_connection):
    """Closed after each or after every second answer: topology, look-up and confirmation all come through."""
    peer = host.peer(prefill(port=7000, answers_per_connection=answers_per_connection))
    route = end_beside_a_healthy_peer(host, resolver, peer.addr)
    assert [endpoint.port for endpoint in route.endpoints] == [7001]
    assert peer.requests == 3


def test_connection_that_is_reset_under_each_reused_request_costs_the_peer_nothing(host, resolver):
    peer = host.peer(dies_between_requests(response(body=json.dumps({"rank_ip": "10.0.0.1", "rank_port": 1}).encode())))
    end = end_beside_a_healthy_peer(host, resolver, peer.addr)
    assert end.kind == "protocol_error", "it answers, though with something that is no topology"
    assert peer.requests == end.attempts == 2, "and the request that was cut off was made again"


def test_flapping_peer_is_lost_and_back_each_time_and_its_neighbour_notices_nothing(host):
    """Up, down, up, down, up: each request ends by the state of its time."""
    options = {"heartbeat_interval_s": 0.05, "heartbeat_min_down_s": 0.1, "heartbeat_timeout_s": 0.3}
    policy = disagg.RetryPolicy(max_attempts=2, interval_s=0.05, min_wait_s=0.0, cooldown_s=0.1)
    flapping, neighbour = host.peer(prefill(port=7000)), host.peer(prefill(port=8000))
    with disagg.Resolver(DECODE, policy, **options) as resolver:
        first, other = Request("first"), Request("other")
        resolver.add(first, flapping.addr, 1)
        resolver.add(other, neighbour.addr, 2)
        routes = poll_until(resolver, 2)
        for room in (10, 20):
            flapping.behave = resets()
            host.cut_connections(flapping)
            wait_for_event(resolver, "peer_lost", flapping.addr)
            refused = Request("while down")
            assert resolver.add(refused, flapping.addr, room) is None
            assert poll_until(resolver, 1)[refused].kind == "cooldown"
            assert resolver.add(Request("other"), neighbour.addr, room + 1) is routes[other]
            flapping.behave = prefill(port=7000)
            wait_for_event(resolver, "peer_back", flapping.addr)
            again = Request("again")
            resolver.add(again, flapping.addr, room + 2)
            assert [endpoint.port for endpoint in poll_until(resolver, 1)[again].endpoints] == [7001]
        counted = resolver.driver().counters()["events"]
        assert (counted["peer_lost"], counted["peer_back"], counted["peer_restarted"]) == (2, 2, 0)


def wait_for_event(resolver, kind, addr, within_s=20):
    until = time.monotonic() + within_s
    while True:
        step = resolver.poll()
        assert not step.resolved + step.failed
        if step.events:
            assert [(event.kind, event.addr) for event in step.events] == [(kind, addr)]
            return step.events[0]
        assert time.monotonic() < until
        time.sleep(0.005)
