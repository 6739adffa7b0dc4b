"""Cases of CASES.md areas 2 and 4 where both sides are ours: `disagg.Resolver` against `disagg.BootstrapServer`."""

from __future__ import annotations

import json
import time

import pytest

import disagg
from machines import Request
from polling import poll_until
from registry_client import TOPOLOGY, rank_path, register, registration, send

DECODE = disagg.DecodeRank(attn_tp_size=4, engine_rank=2, page_size=64)


@pytest.fixture
def server():
    with disagg.BootstrapServer() as server:
        yield server


def post(server, path, body):
    answer = send(server.address, "POST", path, json.dumps(body))
    assert answer.status == 200
    return answer.value


def put_dp_rank(server, dp_size, dp_rank, **more):
    """Register the one rank of a dp group of plain data parallelism: its attention dp size is 1."""
    changes = {"system_dp_size": dp_size, "system_dp_rank": dp_rank, "rank_port": 3000 + dp_rank} | more
    answer = send(server.address, "PUT", "/route", registration(**changes))
    assert (answer.status, answer.value) == (200, "OK")


def test_decode_that_asks_before_any_rank_registered_waits_until_the_last_one_has(server):
    """A2-04: 503 before the first PUT and after 3 of 4, 200 after the fourth; for the client it is no error."""
    policy = disagg.RetryPolicy(max_attempts=1000, interval_s=0.02)
    with disagg.Resolver(DECODE, policy) as resolver:
        request = Request("early")
        assert send(server.address, "GET", TOPOLOGY).status == 503
        assert resolver.add(request, server.address, 1) is None
        for rank in range(4):
            assert send(server.address, "GET", TOPOLOGY).status == 503, f"after {rank} of 4"
            wait_for_another_attempt(resolver)
            assert resolver.stats()["pending"]["need_info"] == 1
            send(server.address, "PUT", "/route", registration(4, rank))
        assert send(server.address, "GET", TOPOLOGY).status == 200
        route = poll_until(resolver, 1)[request]
    assert [(end.tp, end.port) for end in route.endpoints] == [(2, 2002)]


def wait_for_another_attempt(resolver):
    seen = resolver.stats()["http"]["topology"]
    until = time.monotonic() + 10
    while resolver.stats()["http"]["topology"] < seen + 2:  # so that one began and was answered after this call
        assert not resolver.poll().seq, "nothing is decided"
        assert time.monotonic() < until
        time.sleep(0.001)


def test_plain_data_parallelism_is_known_by_its_system_ranks(server):
    """A4-06: attention dp 1, rank 0 everywhere; the system's dp size and ranks are what counts."""
    put_dp_rank(server, 2, 0)
    assert send(server.address, "GET", TOPOLOGY).status == 503, "one of two"
    put_dp_rank(server, 2, 1)
    assert send(server.address, "GET", TOPOLOGY).json()["dp_size"] == 2
    with disagg.Resolver(disagg.DecodeRank(attn_tp_size=1, engine_rank=0)) as resolver:
        even, odd = Request("even"), Request("odd")
        resolver.add(even, server.address, 42)
        resolver.add(odd, server.address, 43)
        ends = poll_until(resolver, 2)
    found = [(ends[request].dp_rank, ends[request].endpoints[0].port) for request in (even, odd)]
    assert found == [(0, 3000), (1, 3001)]


def test_request_whose_room_has_expired_ends_at_its_deadline():
    """A4-11: time to live 2 s; while the room is known it is found, afterwards its request does not wait for ever."""
    decode = disagg.DecodeRank(attn_tp_size=1, engine_rank=0)
    with (
        disagg.BootstrapServer(room_ttl_s=2.0) as server,
        disagg.Resolver(decode, dp_rank_timeout_s=0.5) as resolver,
    ):
        for rank in (0, 1):
            put_dp_rank(server, 2, rank, load_balance_method="round_robin")
        post(server, "/register_dp_rank", {"bootstrap_room": 7, "dp_rank": 1})
        hit, miss = Request("hit"), Request("miss")
        resolver.add(hit, server.address, 7)
        assert poll_until(resolver, 1)[hit].dp_rank == 1
        until = time.monotonic() + 5.0
        while post(server, "/query_dp_ranks", {"bootstrap_rooms": [7]}):
            assert time.monotonic() < until, "known for ever"
            time.sleep(0.05)
        resolver.add(miss, server.address, 7)
        failure = poll_until(resolver, 1)[miss]
    assert (failure.kind, failure.http_status) == ("dp_rank_timeout", 504)
    assert "room 7 within 0.5 s" in failure.reason


def test_room_has_one_key_however_it_was_written(server):
    """A4-12: leading zeros, strings and the greatest room; both sides mean the same one."""
    greatest = 2**63 - 1
    rooms = [("0042", 1), (0, 0), (str(greatest), "1")]
    for room, rank in rooms:
        post(server, "/register_dp_rank", {"bootstrap_room": room, "dp_rank": rank})
    known = post(server, "/query_dp_ranks", {"bootstrap_rooms": ["0042", 42, "0", greatest]})
    assert known == {"42": 1, "0": 0, str(greatest): 1}
    for rank in (0, 1):
        put_dp_rank(server, 2, rank, load_balance_method="round_robin")
    with disagg.Resolver(disagg.DecodeRank(attn_tp_size=1, engine_rank=0)) as resolver:
        requests = [Request(room) for room in (42, 0, greatest)]
        for request in requests:
            resolver.add(request, server.address, request.name)
        ends = poll_until(resolver, 3)
    assert [ends[request].dp_rank for request in requests] == [1, 0, 1]


@pytest.mark.parametrize("room", [2**63, -1, "-1"])
def test_registry_refuses_a_room_that_no_request_can_have(server, room):
    """A4-12."""
    body = json.dumps({"bootstrap_room": room, "dp_rank": 0})
    assert send(server.address, "POST", "/register_dp_rank", body).status == 400
    assert send(server.address, "POST", "/query_dp_ranks", json.dumps({"bootstrap_rooms": [room]})).status == 400


def test_second_engine_at_a_rank_that_is_taken_overwrites_nothing_silently(server):
    """A4-14, without an instance id: two engines that both register as dp rank 0, each of a size of its own.

    The first one stays what the registry serves, as a whole, until another one is complete.
    """
    register(server.address, rank_ip="10.0.0.1")
    before = send(server.address, "GET", TOPOLOGY)
    assert send(server.address, "PUT", "/route", registration(2, 0, rank_ip="10.0.0.2")).status == 200
    time.sleep(2.2)  # longer than a rank that only moved would wait to be merged
    after = send(server.address, "GET", TOPOLOGY)
    assert after.value == before.value
    assert after.headers["X-Disagg-Epoch"] == before.headers["X-Disagg-Epoch"]
    assert send(server.address, "GET", rank_path(0)).json()["rank_ip"] == "10.0.0.1"
    refused = send(server.address, "PUT", "/route", registration(4, 3, rank_ip="10.0.0.3"))
    assert refused.status == 409
    assert (refused.json()["registered"], refused.json()["sent"]) == ("2", "4"), "both values"
