"""Cases from practice (CASES.md areas 2, 3 and 4) in virtual time, core and reference side by side."""

from __future__ import annotations

import json

import pytest

from machines import (
    A,
    B,
    Request,
    add,
    answer_endpoints,
    answer_topology,
    endpoint,
    make,
    make_ready,
    run,
    topology,
)


def test_attempts_are_counted_and_spaced_by_wall_clock():
    """A2-06: 15 attempts 1 s apart end between 14 and 16 s, however often the loop polls."""
    pair = make()
    request = add(pair, "a")
    tried = 0

    def refuse(flight):
        nonlocal tried
        tried += 1
        pair.fail(flight)

    refuse(pair.only("topology"))
    while request not in pair.ends:
        run(pair, 0.05, on_flight=refuse)
        assert pair.now < 17e9
    assert 14e9 <= pair.now <= 16e9
    assert tried == 15
    assert pair.ends[request].kind == "unreachable"
    assert pair.ends[request].attempts == 15


def test_late_request_gets_its_own_minimum_wait_and_the_next_fails_fast():
    """A2-13: the budget is the address's, the wait is each request's."""
    pair = make()
    first = add(pair, "A")
    pair.fail(pair.only("topology"))
    run(pair, 13.5, on_flight=pair.fail)
    second = add(pair, "B")
    run(pair, 1.5, on_flight=pair.fail)
    assert pair.ends[first].kind == "unreachable"
    assert second in pair.held
    third = add(pair, "C")
    pair.poll()
    assert pair.ends[third].kind == "cooldown"
    run(pair, 5, on_flight=pair.fail)
    assert pair.ends[second].kind == "unreachable"


def test_a_success_while_a_younger_one_waits_admits_it():
    pair = make({"max_attempts": 1})
    old = add(pair, "old")
    run(pair, 4.9)
    young = add(pair, "young")
    run(pair, 0.2)
    pair.fail(pair.only("topology"), "timeout", "no answer")
    pair.poll()
    assert pair.ends[old].kind == "unreachable"
    run(pair, 0.1)
    answer_topology(pair, topology())
    answer_endpoints(pair)
    answer_topology(pair, topology())
    pair.poll()
    assert pair.ends[young].dp_rank == 0


def test_the_last_attempts_success_admits():
    """A2-07: counted when it fails, so the last one may still succeed."""
    pair = make({"max_attempts": 2, "min_wait_s": 0.0})
    request = add(pair, "a")
    pair.fail(pair.only("topology"))
    run(pair, 1.0)
    answer_topology(pair, topology())
    answer_endpoints(pair)
    answer_topology(pair, topology())
    pair.poll()
    assert pair.ends[request].endpoints[0].port == 5000


@pytest.mark.parametrize("status", [302, 401, 403, 404, 405, 415, 422])
def test_permanent_answer_fails_at_once_and_burns_no_attempts(status):
    """A2-14: another attempt would get the same answer."""
    pair = make()
    request = add(pair, "a")
    pair.answer(pair.only("topology"), status)
    pair.poll()
    failure = pair.ends[request]
    assert (failure.kind, failure.attempts) == ("not_a_registry", 1)
    assert str(status) in failure.reason
    assert not pair.flights


def test_400_is_asked_in_the_older_form_within_the_same_attempt():
    pair = make({"max_attempts": 1, "min_wait_s": 0.0})
    request = add(pair, "a", room=5)
    pair.answer(pair.only("topology"), 400)
    older = pair.only("topology")
    assert older.path == "/route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1"
    body = json.dumps({"prefill_attn_tp_size": 1, "prefill_dp_size": 4, "prefill_pp_size": 1}).encode()
    pair.answer(older, 200, body)
    answer_endpoints(pair)
    answer_topology(pair, body)
    pair.poll()
    assert pair.ends[request].dp_rank == 1, "that era has no dp-rank routes: room modulo dp size"


def test_mismatch_concerns_its_peer_only_and_is_checked_again():
    """A2-10, A5-20: both values in the text, no retries, and usable again after the mark's time."""
    pair = make()
    bad, good = add(pair, "bad", A), add(pair, "good", B)
    at_a, at_b = sorted(pair.flights, key=lambda flight: flight.addr)
    pair.answer(at_a, 200, topology(page_size=32))
    pair.answer(at_b, 200, topology())
    answer_endpoints(pair)
    answer_topology(pair, topology())
    pair.poll()
    failure = pair.ends[bad]
    assert (failure.kind, failure.http_status) == ("incompatible", 409)
    assert "64" in failure.reason
    assert "32" in failure.reason
    assert pair.ends[good].addr == B
    again = add(pair, "again", A)
    pair.poll()
    assert pair.ends[again].kind == "incompatible"
    run(pair, 15.1)
    probe = [flight for flight in pair.flights if flight.addr == A]
    pair.answer(probe[0], 200, topology())
    assert pair.add(Request("now"), A, 77) is None
    pair.poll()
    assert "now" not in [request.name for request in pair.ends]


def test_128_requests_cost_one_fetch_one_confirmation_and_one_lookup():
    """A1-03."""
    pair = make()
    for name in range(128):
        add(pair, name)
    seen = []

    def answer(flight):
        seen.append(flight.kind)
        pair.answer(flight, 200, endpoint() if flight.kind == "endpoint" else topology(tp=2))

    pair = make()
    requests = [add(pair, name) for name in range(128)]
    while pair.flights:
        answer(pair.flights[0])
    pair.poll()
    assert sorted(seen) == ["endpoint", "endpoint", "topology", "topology"]
    assert len({id(pair.ends[request]) for request in requests}) == 1


def test_dp_rank_that_never_comes_ends_the_request_alone_at_its_deadline():
    """A3-06, A4-03: asked at once, then spaced and backing off; the other rooms are used."""
    pair = make(dp_rank_timeout_s=2.0)
    rooms = [add(pair, room, room=room) for room in range(8)]
    answer_topology(pair, topology(dp=4, follow=False))
    first = pair.only("dp_ranks")
    assert first.rooms == list(range(8)), "one query for all"
    pair.answer(first, 200, json.dumps({"0": 3, "1": "2"}).encode())
    asked = []

    def answer(flight):
        if flight.kind == "dp_ranks":
            asked.append(len(flight.rooms))
            pair.answer(flight, 200, b"{}")
        else:
            pair.answer(flight, 200, endpoint() if flight.kind == "endpoint" else topology(dp=4, follow=False))

    run(pair, 2.2, step=0.005, on_flight=answer)
    assert [pair.ends[request].dp_rank for request in rooms[:2]] == [3, 2]
    assert {pair.ends[request].kind for request in rooms[2:]} == {"dp_rank_timeout"}
    assert set(asked) == {6}, "only those that are unknown are asked for again"
    assert 5 <= len(asked) <= 8, "20 ms doubling to 1 s"
    assert "asked" in pair.ends[rooms[7]].reason


def test_room_that_arrives_during_a_query_is_asked_for_separately():
    """A4-04."""
    pair = make()
    first = add(pair, "7", room=7)
    answer_topology(pair, topology(dp=2, follow=False))
    second = add(pair, "8", room=8)
    query = pair.only("dp_ranks")
    assert query.rooms == [7]
    pair.answer(query, 200, b'{"7": 0}')
    pair.advance(0.02)
    assert pair.only("dp_ranks").rooms == [8]
    assert {first, second} <= set(pair.held)


@pytest.mark.parametrize("force_query", [False, True])
def test_one_dp_rank_needs_no_query(force_query):
    """A4-02: even when the query is forced and the peer does not follow the room."""
    pair = make(force_query=force_query)
    route = make_ready(pair, topology(dp=1, follow=False))
    assert route.dp_rank == 0


@pytest.mark.parametrize(("preset", "force_query", "expected"), [(None, False, 1), (0, False, 0), (0, True, 0)])
def test_preset_wins_over_the_room_and_over_a_forced_query(preset, force_query, expected):
    """A4-05."""
    pair = make(force_query=force_query)
    request = add(pair, "a", room=43, dp_rank=preset)
    answer_topology(pair, topology(dp=2))
    answer_endpoints(pair)
    answer_topology(pair, topology(dp=2))
    pair.poll()
    assert pair.ends[request].dp_rank == expected


def test_dp_rank_out_of_range_fails_that_request_only():
    """A4-10: 400 when the caller preset it, 502 when the peer said so."""
    pair = make()
    preset = add(pair, "preset", room=1, dp_rank=5)
    told, fine = add(pair, "told", room=2), add(pair, "fine", room=3)
    answer_topology(pair, topology(dp=2, follow=False))
    pair.answer(pair.only("dp_ranks"), 200, b'{"2": 2, "3": 1}')
    answer_endpoints(pair)
    answer_topology(pair, topology(dp=2, follow=False))
    pair.poll()
    assert [(pair.ends[r].kind, pair.ends[r].http_status) for r in (preset, told)] == [
        ("dp_rank_out_of_range", 400),
        ("dp_rank_out_of_range", 502),
    ]
    assert pair.ends[fine].dp_rank == 1


def test_a_bound_request_keeps_its_dp_rank():
    """A4-08: what the registry says later moves no route that was given."""
    pair = make()
    request = add(pair, "a", room=1102)
    answer_topology(pair, topology(dp=2, follow=False))
    pair.answer(pair.only("dp_ranks"), 200, b'{"1102": 1}')
    answer_endpoints(pair)
    answer_topology(pair, topology(dp=2, follow=False))
    pair.poll()
    assert pair.ends[request].dp_rank == 1


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


def test_per_cycle_attempts_are_released_by_polls():
    pair = make({"max_attempts": 3}, per_cycle=True, request_timeout_s=1000.0)
    add(pair, "a")
    for _ in range(2):
        pair.fail(pair.only("topology"))
        assert not pair.flights
        pair.poll()
    pair.fail(pair.only("topology"))
    run(pair, 5.1, on_flight=pair.fail)
    assert not pair.held


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


def test_what_a_peer_sent_reaches_no_terminal_raw():
    pair = make({"max_attempts": 1, "min_wait_s": 0.0})
    request = add(pair, "a")
    pair.fail(pair.only("topology"), "reset", "\x1b[31mred\r\nand a new line\x00")
    pair.poll()
    assert pair.ends[request].reason.isprintable()
