"""Requests in the queue and their ends (CASES.md area 3) in virtual time, core and reference side by side."""

from __future__ import annotations

from machines import (
    A,
    B,
    Request,
    add,
    answer_topology,
    make,
    make_ready,
    run,
    topology,
)


def test_told_failure_reaches_a_request_that_comes_later():
    """A3-09: the first reason wins, with its status."""
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
