"""How a request gets its dp rank (CASES.md area 4) in virtual time, core and reference side by side."""

from __future__ import annotations

import json

import pytest

from machines import (
    add,
    answer_endpoints,
    answer_topology,
    endpoint,
    make,
    make_ready,
    run,
    topology,
)


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
