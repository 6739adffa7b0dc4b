"""What a registry advertises, over real HTTP: one table for all endpoints, and queries that wait for a room."""

from __future__ import annotations

import asyncio
import json

import disagg
from hostile import response
from machines import Request, endpoint, ranks_of, table, topology
from polling import poll_until

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
SAID = topology(tp=4, dp=2, follow=False)


class Registry:
    """Advertises its features and answers `GET /routes`; a waiting query is answered when a room becomes known."""

    def __init__(self, features="batch-register, wait-query, table"):
        self.epoch = 1
        self.paths = []
        self.waited_ms = []
        self.ranks = {}
        self.known = asyncio.Event()
        self.features = features

    async def __call__(self, connection):
        while request := await connection.request():
            head, body = request
            path = head.split(b" ")[1].decode()
            self.paths.append(path)
            headers = [f"X-Disagg-Epoch: {self.epoch}", f"X-Disagg-Features: {self.features}"]
            await connection.send(response("200 OK", await self.answer(path, body), *headers))

    async def answer(self, path, body):
        if path.startswith("/routes"):
            ranks = ranks_of(SAID, int(path.partition("=")[2]), port=1000 * self.epoch)
            return table(SAID, ranks, epoch=str(self.epoch))
        if path == "/query_dp_ranks":
            asked = json.loads(body)
            self.waited_ms.append(asked.get("wait_ms", 0))
            if not self.ranks.keys() & asked["bootstrap_rooms"] and self.waited_ms[-1]:
                await self.known.wait()
            return json.dumps(
                {room: rank for room, rank in self.ranks.items() if room in asked["bootstrap_rooms"]}
            ).encode()
        return SAID if "=-1" in path else endpoint(4000)


def test_a_route_takes_two_requests_where_the_registry_has_a_table(host):
    registry = Registry()
    peer = host.peer(registry)
    with disagg.Resolver(DECODE) as resolver:
        request = Request("first")
        resolver.add(request, peer.addr, 7, dp_rank=1)
        route = poll_until(resolver, 1)[request]
    assert [endpoint.port for endpoint in route.endpoints] == [1000, 1001, 1002, 1003]
    assert (len(registry.paths), registry.paths[1]) == (2, "/routes?dp_rank=1")


def test_a_room_that_becomes_known_after_longer_than_the_total_timeout_costs_one_query(host):
    registry = Registry()
    peer = host.peer(registry)
    with disagg.Resolver(DECODE, total_timeout_s=0.3) as resolver:
        request = Request("first")
        resolver.add(request, peer.addr, 7)

        async def learn():
            while not registry.waited_ms:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.8)
            registry.ranks[7] = 1
            registry.known.set()

        host._call(learn())
        assert poll_until(resolver, 1)[request].dp_rank == 1
    assert registry.waited_ms == [5000]


def test_a_registry_that_advertises_nothing_is_asked_as_sglang_is(host):
    registry = Registry(features="")
    registry.ranks[7] = 0
    peer = host.peer(registry)
    with disagg.Resolver(DECODE) as resolver:
        request = Request("first")
        resolver.add(request, peer.addr, 7)
        assert len(poll_until(resolver, 1)[request].endpoints) == 4
    assert registry.waited_ms == [0]
    assert not any(path.startswith("/routes") for path in registry.paths)


def test_a_new_epoch_on_any_answer_drops_the_cached_route(host):
    registry = Registry()
    peer = host.peer(registry)
    with disagg.Resolver(DECODE, heartbeat_interval_s=0.1) as resolver:
        first, second = Request("first"), Request("second")
        resolver.add(first, peer.addr, 7, dp_rank=0)
        old = poll_until(resolver, 1)[first]
        registry.epoch = 2
        events = []
        while not events:
            events += resolver.poll().events
        assert [(event.kind, event.epoch) for event in events] == [("peer_restarted", old.epoch)]
        new = resolver.add(second, peer.addr, 8, dp_rank=0) or poll_until(resolver, 1)[second]
    assert (new.endpoints[0].port, new.epoch) == (2000, old.epoch + 1)
