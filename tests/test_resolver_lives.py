"""Lives of a peer (CASES.md area 5) with `disagg.Resolver` on real sockets: loss, return, replacement."""

from __future__ import annotations

import logging
import threading

import pytest

import disagg
from hostile import prefill, refusing_address, silent
from machines import Request, topology
from polling import poll_until, until

DECODE = disagg.DecodeRank(attn_tp_size=4, engine_rank=0, page_size=64)
QUICK = disagg.RetryPolicy(max_attempts=2, interval_s=0.05, min_wait_s=0.0, cooldown_s=0.2)
BEATS = {"heartbeat_interval_s": 0.05, "heartbeat_failures": 2, "heartbeat_min_down_s": 0.1}
ASKS = topology(tp=4, dp=2, follow=False)
"""Of a peer that is asked for each room's dp rank, so that its requests wait."""


def next_step(resolver, within_s=20):
    """The first step in which something is decided."""
    steps = []
    until(lambda: steps.append(resolver.poll()) or steps[-1].seq, within_s)
    return steps[-1]


def place(resolver, addr, room):
    """Place a request; returns its route."""
    request = Request(room)
    route = resolver.add(request, addr, room)
    return poll_until(resolver, 1)[request] if route is None else route


def ports(route):
    return [endpoint.port for endpoint in route.endpoints]


def pull_down(host, peer):
    """End the process behind an address: nobody listens, connections are closed."""
    host.hang_up(peer)
    host.cut_connections(peer)


def come_back(host, peer, behave):
    """Start another process behind the address of one that ended."""
    return host.peer(behave, port=int(peer.addr.rpartition(":")[2]))


def test_peer_that_dies_fails_its_rooms_and_no_others(host):
    """A5-01: what is pending fails, what is routed (its request has ended) is named in the event."""
    dies, lives = host.peer(prefill(topology=ASKS)), host.peer(prefill(topology=ASKS))
    with disagg.Resolver(DECODE, QUICK, track_rooms=True, **BEATS) as resolver:
        routed = Request("routed")
        assert resolver.add(routed, dies.addr, 1, dp_rank=0) is None
        assert ports(poll_until(resolver, 1)[routed]) == [5000]
        pending = [Request(room) for room in range(10, 13)]
        others = [Request(room) for room in range(20, 23)]
        for requests, peer in ((pending, dies), (others, lives)):
            for request in requests:
                assert resolver.add(request, peer.addr, request.name) is None
        until(lambda: resolver.stats()["pending"]["need_dp_rank"] == 6)
        pull_down(host, dies)
        step = next_step(resolver)
        assert [(event.kind, event.addr, event.rooms) for event in step.events] == [("peer_lost", dies.addr, (1,))]
        assert [(request, end.kind, end.http_status) for request, end in step.failed] == [
            (request, "peer_lost", 503) for request in pending
        ]
        assert step.resolved == ()
        assert resolver.stats()["pending"]["need_dp_rank"] == 3, "of the other peer"
        assert resolver.health()


def test_peer_that_returns_on_its_port_with_new_rank_ports_is_used_without_any_restart(host):
    """A5-02: there is nothing but a Resolver, no transfer backend that would have to take part."""
    peer = host.peer(prefill(port=5000))
    with disagg.Resolver(DECODE, QUICK, **BEATS) as resolver:
        assert ports(place(resolver, peer.addr, 1)) == [5000]
        pull_down(host, peer)
        assert [event.kind for event in next_step(resolver).events] == ["peer_lost"]
        come_back(host, peer, prefill(port=6000))
        assert [event.kind for event in next_step(resolver).events] == ["peer_back"]
        assert ports(place(resolver, peer.addr, 2)) == [6000]


def test_engine_that_says_a_peer_is_lost_waits_neither_for_its_stuck_answer_nor_for_the_network(host):
    """A5-06: both are held up for good, and the very next poll has the failures all the same."""
    stuck = host.peer(silent())
    logger, blocked, let_go = logging.getLogger("disagg"), threading.Event(), threading.Event()

    class Blocks(logging.Handler):
        def emit(self, record):
            blocked.set()
            let_go.wait(60)

    handler = Blocks()
    with (
        refusing_address() as nobody,
        disagg.Resolver(DECODE, QUICK, total_timeout_s=60.0, heartbeat_timeout_s=60.0) as resolver,
    ):
        requests = [Request(room) for room in range(5)]
        for request in requests:
            resolver.add(request, stuck.addr, request.name)
        until(lambda: stuck.requests == 1)
        logger.addHandler(handler)
        try:
            resolver.add(Request("its failure is logged"), nobody, 100)
            assert blocked.wait(20)
            assert resolver.peer_lost(stuck.addr)
            failed = dict(resolver.poll().failed)
            assert [failed[request].kind for request in requests] == ["peer_lost"] * 5
        finally:
            let_go.set()
            logger.removeHandler(handler)
        until(lambda: not stuck.writers)  # the request that was abandoned holds no connection


@pytest.mark.parametrize("ids", [("old", "new"), (None, None)], ids=["by instance id", "by its endpoints"])
def test_server_that_is_swapped_between_two_beats_is_one_restart_event_and_its_new_ports_are_used(host, ids):
    """A5-07, A5-17: no beat is missed, and kept connections lead to the old process, which drains."""
    old, new = ids
    peer = host.peer(prefill(port=5000, instance=old))
    beats = {"heartbeat_interval_s": 0.3, "heartbeat_failures": 100}
    with disagg.Resolver(DECODE, QUICK, **beats) as resolver:
        before = place(resolver, peer.addr, 1)
        assert ports(before) == [5000]
        peer.behave = prefill(port=6000, instance=new)  # of connections that are made from now on
        step = next_step(resolver)
        (event,) = step.events
        assert (event.kind, event.addr, event.epoch) == ("peer_restarted", peer.addr, before.epoch)
        assert (event.old_instance, event.new_instance) == ids
        assert step.resolved == step.failed == ()
        after = place(resolver, peer.addr, 2)
        assert (ports(after), after.epoch) == ([6000], before.epoch + 1)
        assert after.info == before.info, "the topology is the same"
        assert resolver.driver().counters()["events"] == {"peer_lost": 0, "peer_restarted": 1, "peer_back": 0}


def test_thousand_rooms_of_an_unreachable_address_are_gone_with_their_requests():
    """A5-16: no heartbeat and no answer has to come for that."""
    with refusing_address() as nobody, disagg.Resolver(DECODE, track_rooms=True) as resolver:
        for _ in range(2):
            requests = [Request(room) for room in range(1000)]
            for request in requests:
                assert resolver.add(request, nobody, request.name) is None
            assert resolver.stats()["rooms"] == 1000
            for request in requests:
                resolver.discard(request)
            stats = resolver.stats()
            assert (stats["rooms"], stats["tombstones"], sum(stats["pending"].values())) == (0, 0, 0)
            assert resolver.poll().failed == (), "no room is taken the second time either"
