"""Requests in the queue and their ends (CASES.md area 3) in virtual time, core and reference side by side."""

from __future__ import annotations

import json
import random

import pytest

import disagg
from machines import (
    MS,
    SECOND,
    A,
    B,
    Core,
    Request,
    add,
    answer_all,
    answer_endpoints,
    answer_topology,
    endpoint,
    make,
    make_ready,
    run,
    topology,
)


def test_told_failure_reaches_a_request_that_comes_later():
    """A3-09, X-03: the first reason wins, with its status."""
    pair = make()
    assert pair.both("fail_room", 77, "input too long", 400) == [False, False]
    pair.both("fail_room", 77, "something else", 503)
    request = add(pair, "a", room=77)
    pair.poll()
    failure = pair.ends[request]
    assert (failure.kind, failure.reason, failure.http_status) == ("told", "input too long", 400)
    reused = add(pair, "b", room=77)
    pair.poll()
    assert reused in pair.held, "A3-15: a room used again is not haunted"


def test_late_answer_for_a_discarded_request_leaves_the_next_one_of_its_room_alone():
    """A3-15: room 9 twice; what was asked for the first one is not for the second."""
    pair = make()
    first = add(pair, "g1", room=9)
    answer_topology(pair, topology(dp=2, follow=False))
    query = pair.only("dp_ranks")
    pair.discard(first)
    second = add(pair, "g2", room=9)
    pair.answer(query, 200, b'{"9": 7}')
    pair.advance(0.02)
    assert pair.held == [second]
    pair.answer(pair.only("dp_ranks"), 200, b'{"9": 1}')
    answer_endpoints(pair)
    answer_topology(pair, topology(dp=2, follow=False))
    pair.poll()
    assert pair.ends == {second: pair.ends[second]}
    assert pair.ends[second].dp_rank == 1


def test_duplicate_room_is_the_newcomers_failure_and_names_both():
    """A3-14."""
    pair = make()
    first, second = add(pair, "a", A, room=42), add(pair, "b", B, room=42)
    pair.poll()
    failure = pair.ends[second]
    assert (failure.kind, failure.http_status, failure.addr) == ("duplicate_room", 409, B)
    assert A in failure.reason
    assert B in failure.reason
    pair.discard(first)
    third = add(pair, "c", A, room=42)
    pair.poll()
    assert third in pair.held


def test_tracked_rooms_stay_taken_until_released():
    pair = make(track_rooms=True)
    make_ready(pair, topology(), room=5)
    second = add(pair, "b", A, room=5)
    pair.poll()
    assert pair.ends[second].kind == "duplicate_room"
    pair.both("release", 5)
    assert pair.add(Request("c"), A, 5) is not None, "cached and free again"
    assert pair.both("peer_lost", A) == [True, True]
    (event,) = pair.poll().events
    assert (event.kind, event.rooms) == ("peer_lost", (5,))


def test_loss_of_a_peer_names_its_routed_rooms_in_the_next_poll():
    """A3-05: they ended when they were routed, so it is an event that names all four."""
    pair = make(track_rooms=True)
    make_ready(pair, topology(), room=1)
    assert all(pair.add(Request(room), A, room) for room in (2, 3, 4)), "routed and idle"
    while not (events := pair.poll().events):
        pair.advance(1.0)
        for beat in list(pair.flights):
            pair.fail(beat, "timeout", "no answer")
        assert pair.now < 60e9
    assert [(event.kind, event.addr, event.rooms) for event in events] == [("peer_lost", A, (1, 2, 3, 4))]
    run(pair, 5.0, on_flight=pair.fail)
    assert len(pair.ends) == 4, "no second end"


class Opaque(Request):
    """A request whose comparison would touch tensors."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        raise AssertionError("requests are told apart by identity")


@pytest.mark.parametrize("polled", [True, False], ids=["polled between", "both before a poll"])
def test_request_that_failed_by_itself_does_not_end_again_with_its_peers_budget(polled):
    """A3-01: one end each, and neighbours live on; compared by identity, never by value."""
    pair = make({"max_attempts": 2, "min_wait_s": 0.0})
    failed, neighbour, elsewhere = Opaque("failed"), Opaque("neighbour"), Opaque("elsewhere")
    for room, (request, addr) in enumerate([(failed, A), (neighbour, A), (elsewhere, B)]):
        assert pair.add(request, addr, room) is None
    assert pair.both("fail_room", 0, "handshake failed", 500) == [True, True]
    if polled:
        pair.poll()
        assert [request.name for request in pair.held] == ["neighbour", "elsewhere"]
    for _ in range(2):
        pair.fail(next(flight for flight in pair.flights if flight.addr == A))
        if polled:
            pair.advance(1.0)
        else:
            pair.advance(0.9, poll=False)
            pair.advance(0.1, poll=False)
    pair.poll()
    assert (pair.ends[failed].kind, pair.ends[neighbour].kind) == ("told", "unreachable")
    answer_all(pair, topology())
    pair.poll()
    assert pair.ends[elsewhere].addr == B
    assert not pair.held
    assert not any(pair.core.stats()["pending"].values())


def test_requests_are_placed_and_their_ranks_known_before_the_engine_has_room_for_them():
    """A3-10: 32 requests against a window of 4; only the taking waits for the window, no placing does."""
    pair = make()
    requests = [add(pair, n) for n in range(32)]
    answer_all(pair, topology())
    assert pair.core.stats()["pending"]["decided"] == 32, "before anything was taken"
    for window in range(0, 32, 4):
        step = pair.poll(limit=4)
        assert [request for request, _ in step.resolved] == requests[window : window + 4]
        assert all(route.endpoints for _, route in step.resolved)
        assert not pair.flights


def test_discard_takes_effect_in_every_state():
    """A3-03, A3-13: while fetching, between attempts, asking, looking up, decided."""
    pair = make({"max_attempts": 1, "min_wait_s": 0.0})
    fetching = add(pair, "fetching")
    pair.discard(fetching)
    answer_topology(pair, topology(dp=2, follow=False))
    asking = add(pair, "asking", room=4)
    pair.discard(asking)
    looking = add(pair, "looking", dp_rank=1)
    pair.discard(looking)
    decided = add(pair, "decided", dp_rank=7)
    pair.discard(decided)
    pair.discard(decided)
    run(pair, 200, step=1.0, on_flight=lambda flight: pair.fail(flight, "timeout", ""))
    assert not pair.ends
    stats = pair.core.stats()
    assert not any(stats["pending"].values())
    assert stats["rooms"] == 0


def test_ten_thousand_discards_in_random_states_leave_nothing():
    """A3-13: the core alone, since it is for its counts; the model test compares it with the reference."""
    chance = random.Random(13)
    core = Core(disagg.DecodeRank(attn_tp_size=1, engine_rank=0), disagg.RetryPolicy(max_attempts=2, min_wait_s=0.0))
    held, stages, now = [], set(), 0
    for room in range(10_000):
        held.append(Request(room))
        if core.add(held[-1], f"10.0.0.{room % 5}:8998", room, chance.choice([None, 0, 1, 9])) is not None:
            held.pop()
        for ticket, kind, *_, body, _, _ in core.take_commands(chance.randrange(3)):
            answer = {"topology": topology(dp=2, follow=False), "endpoint": endpoint(), "heartbeat": topology(dp=2)}
            answer["dp_ranks"] = b"{}" if body is None else json.dumps(dict.fromkeys(rooms_of(body), 1)).encode()
            if kind != "cancel":
                core.on_response(ticket, chance.choice([200, 200, 404, 503]), answer[kind])
        now += chance.choice([0, MS, SECOND])
        core.set_time_ns(now)
        core.on_timer()
        if room < 9_900 and chance.random() < 0.1:  # at last there are ends that were not polled, too
            core.poll()
        stages.update(stage for stage, count in core.stats()["pending"].items() if count)
        if len(held) > 50:
            core.discard(held.pop(chance.randrange(len(held))))
    assert stages == {"need_info", "need_dp_rank", "need_endpoints", "decided"}
    for request in held:
        core.discard(request)
    stats = core.stats()
    assert not any(stats["pending"].values())
    assert (stats["rooms"], stats["tombstones"]) == (0, 0)
    step = core.poll()
    assert (step.resolved, step.failed) == ((), ())
    core.fail_all("the end", closed=True)
    stats = core.stats()
    assert not any(stats["peers"].values())
    assert stats["in_flight"] == 0


def rooms_of(body):
    return [str(room) for room in json.loads(body)["bootstrap_rooms"]]


def test_deadlines_stand_still_while_the_scheduler_does():
    pair = make(request_timeout_s=10.0)
    request = add(pair, "a")
    for _ in range(60):  # a minute without a poll; attempts go on
        pair.advance(1.0, poll=False)
        for flight in list(pair.flights):
            pair.answer(flight, 503)
    pair.poll()
    assert request not in pair.ends, "a budget spent meanwhile is decided with the time that the scheduler lived"
    run(pair, 9.5, on_flight=lambda flight: pair.answer(flight, 503))
    assert pair.ends[request].kind == "not_ready"


def test_fake_transfer_resolves_at_once_and_never_reaches_the_network():
    pair = make()
    route = pair.add(Request("warm-up"), "2.2.2.2:8998", 0)
    again = pair.add(Request("another"), "2.2.2.2:8998", 0)
    assert (route.fake, route.dp_rank, route.mapping, route.endpoints) == (True, 0, None, ())
    assert again.fake
    assert not pair.flights


def test_steps_are_numbered_and_cut_by_their_limit():
    pair = make()
    requests = [add(pair, n, dp_rank=9) for n in range(5)]
    answer_topology(pair, topology())
    steps = []
    while not steps or steps[-1].more:
        steps.append(pair.poll(2))
    assert [step.seq for step in steps] == [1, 2, 3]
    assert [request for step in steps for request, _ in step.failed] == requests
    assert pair.poll().seq == 0
