"""What bounds the network side, where the bound is the Resolver's: sizes, proxies, connections, addresses, fairness."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import disagg
from disagg.transport.options import Command
from disagg.transport.queues import FairQueue
from fake_machine import running
from hostile import TOPOLOGY, answers, prefill, response, silent
from machines import A, Core, Request, endpoint, topology
from polling import poll_until, until

DECODE = disagg.DecodeRank(attn_tp_size=4, engine_rank=0, page_size=64)
ONE_RANK = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
ONCE = disagg.RetryPolicy(max_attempts=1, min_wait_s=0.0)


# -- sizes


def test_each_kind_of_answer_has_a_limit_of_its_own():
    """64 KiB for a topology, a heartbeat and a rank; 1 KiB and 64 bytes a room for dp ranks."""
    core = Core(ONE_RANK)
    limits = {}
    for room in range(100):
        core.add(Request(room), A, room)
    while commands := core.take_commands(100):
        for command in map(Command._make, commands):
            kind = command.kind
            limits.setdefault(kind, set()).add(command.max_body)
            if kind == "dp_ranks":
                assert command.max_body == 1024 + 64 * len(json.loads(command.body)["bootstrap_rooms"])
                answer = json.dumps({str(room): 0 for room in range(100)}).encode()
            else:
                answer = endpoint() if kind == "endpoint" else topology(dp=2, follow=False)
            core.on_response(command.ticket, 200, answer)
    core.set_time_ns(10**10)
    core.on_timer()
    beats = [command for command in map(Command._make, core.take_commands(9)) if command.kind == "heartbeat"]
    limits["heartbeat"] = {beat.max_body for beat in beats}
    assert limits == {
        "topology": {65536}, "heartbeat": {65536}, "endpoint": {65536}, "dp_ranks": {1024 + 64 * 100},
    }  # fmt: skip


@pytest.mark.parametrize(("size", "kind"), [(65536, None), (65537, "protocol_error")])
def test_topology_of_64_kib_is_read_and_one_byte_more_is_not(host, size, kind):
    padded = TOPOLOGY[:-1] + b" " * (size - len(TOPOLOGY)) + b"}"
    peer = host.peer(prefill(topology=padded))
    with disagg.Resolver(DECODE, ONCE) as resolver:
        request = Request("a")
        resolver.add(request, peer.addr, 1)
        end = poll_until(resolver, 1)[request]
    assert getattr(end, "kind", None) == kind
    assert kind is None or "65537 bytes, over 65536" in end.reason


def test_dp_ranks_that_come_in_too_many_bytes_are_none(host):
    """The query is asked again until the request's own deadline, and the rank that the answer hid is not used."""
    asks = topology(tp=4, dp=2, follow=False)

    async def behave(connection):
        while request := await connection.request():
            if b"/query_dp_ranks" in request[0]:
                await connection.send(response(body=b'{"7": 1' + b" " * 1088 + b"}"))
            else:
                await connection.send(response(body=asks))

    peer = host.peer(behave)
    with disagg.Resolver(DECODE, ONCE, dp_rank_timeout_s=0.5) as resolver:
        request = Request("a")
        resolver.add(request, peer.addr, 7)
        failure = poll_until(resolver, 1)[request]
    assert failure.kind == "dp_rank_timeout"
    assert "1096 bytes, over 1088" in failure.reason


# -- the environment

PROXIED = """
import sys, time
import disagg
decode = disagg.DecodeRank(attn_tp_size=4, engine_rank=0, page_size=64)
with disagg.Resolver(decode) as resolver:
    resolver.add("a", sys.argv[1], 1)
    while not (step := resolver.poll()).seq:
        time.sleep(0.001)
    print([route.endpoints[0].port for _, route in step.resolved])
"""


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_proxies_of_the_environment_are_ignored(host, name):
    """Set before Python starts, as operators do; NO_PROXY has nothing to except either."""
    peer, proxy = host.peer(prefill(port=7000)), host.peer(answers())
    environment = os.environ | {name: f"http://{proxy.addr}", "NO_PROXY": "elsewhere.invalid", "no_proxy": ""}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROXIED, peer.addr],
        env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert (run.stdout.strip(), run.stderr) == ("[7000]", "")
    assert proxy.connections == 0


# -- connections, addresses, requests in flight


def test_thousand_queries_to_one_peer_open_few_connections(host):
    """Not more than are under way at once, however they come."""
    peer = host.peer(answers())
    with running() as (machine, _):
        tickets = [machine.ask(peer.addr) for _ in range(1000)]
        assert {machine.wait(ticket, 60).status for ticket in tickets} == {200}
    assert peer.requests == 1000
    assert peer.connections <= 16


def test_many_requests_to_one_peer_take_few_connections_of_a_resolver(host):
    peer = host.peer(prefill(topology=topology(tp=4, dp=64)))
    with disagg.Resolver(DECODE) as resolver:
        requests = [Request(room) for room in range(640)]
        for request in requests:
            resolver.add(request, peer.addr, request.name)
        ends = poll_until(resolver, 640)
    assert {ends[request].dp_rank for request in requests} == set(range(64))
    assert peer.requests >= 64, "each dp rank has an endpoint"
    assert peer.connections <= 16


def test_addresses_over_the_cap_are_refused_and_never_dialled(host):
    """A6-12: whoever sends requests may name any number of them."""
    peers = [host.peer(silent()) for _ in range(12)]
    with disagg.Resolver(DECODE, ONCE, max_addresses=8, total_timeout_s=60.0) as resolver:
        requests = [Request(number) for number in range(12)]
        for request, peer in zip(requests, peers, strict=True):
            assert resolver.add(request, peer.addr, request.name) is None
        ends = poll_until(resolver, 4)
        assert [request.name for request in ends] == [8, 9, 10, 11]
        assert {(end.kind, end.http_status) for end in ends.values()} == {("too_many_addresses", 429)}
        until(lambda: sum(peer.requests for peer in peers) == 8)
        resolver.discard(requests[0])
        late = Request("late")
        resolver.add(late, peers[11].addr, 100)  # takes the place that nobody needs any more
        until(lambda: peers[11].requests == 1)
        assert sum(peer.requests for peer in peers[8:11]) == 0


def test_requests_over_the_cap_in_flight_wait_for_their_turn(host):
    peers = [host.peer(silent()) for _ in range(10)]
    with disagg.Resolver(DECODE, ONCE, max_in_flight=4, total_timeout_s=0.5) as resolver:
        requests = [Request(number) for number in range(10)]
        for request, peer in zip(requests, peers, strict=True):
            resolver.add(request, peer.addr, request.name)
        until(lambda: sum(peer.connections for peer in peers) == 4)
        assert resolver.stats()["in_flight"] == 10
        ends = poll_until(resolver, 10)
    assert {ends[request].kind for request in requests} == {"unreachable"}
    assert [peer.connections for peer in peers] == [1] * 10, "each had its turn"


# -- fairness


def test_peer_with_ten_thousand_that_wait_delays_another_by_one_start():
    queue = FairQueue(per_peer=16)
    for ticket in range(10_000):
        queue.put(Command(ticket, "topology", "busy:1", "GET", "/", None, 0))
    assert queue.next().addr == "busy:1"
    queue.put(Command(10_000, "topology", "other:1", "GET", "/", None, 0))
    assert [queue.next().addr for _ in range(2)].count("other:1") == 1


def test_request_to_another_peer_starts_among_ten_thousand_that_were_there_before(host):
    """Counted in starts: taking commands goes on beside them, so it is not the second one, but far from the last."""
    other_came_after = []
    busy = host.peer(answers())

    async def behave(connection):
        await connection.request()
        other_came_after.append(busy.requests)
        await connection.send(response())

    other = host.peer(behave)
    with running() as (machine, _):
        for _ in range(10_000):
            machine.ask(busy.addr)
        before = busy.requests
        assert machine.fetch(other.addr).status == 200
        assert other_came_after[0] - before < 200
