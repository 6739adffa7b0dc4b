"""How a request gets its dp rank (CASES.md area 4) in virtual time, core and reference side by side."""

from __future__ import annotations

import json

import pytest

from machines import (
    A,
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


def test_rooms_of_one_address_are_asked_for_in_one_query():
    """A4-01: 5 requests, 4 dp ranks that do not follow the room."""
    pair = make()
    requests = [add(pair, room, room=room) for room in (50, 51, 52, 53, 54)]
    answer_topology(pair, topology(dp=4, follow=False))
    query = pair.only("dp_ranks")
    assert (query.path, query.rooms) == ("/query_dp_ranks", [50, 51, 52, 53, 54])
    pair.answer(query, 200, b'{"50": 3, "51": 2, "52": 1, "53": 0, "54": 3}')
    answer_all(pair, topology(dp=4, follow=False))
    pair.poll()
    assert [pair.ends[request].dp_rank for request in requests] == [3, 2, 1, 0, 3]
    assert pair.core.stats()["http"]["dp_ranks"] == 1


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


def test_rank_that_a_router_wrote_into_the_room_is_found_without_a_query():
    """A4-07: room mod dp size is the rank; 10,000 rooms for rank 5 of 8, up to the greatest room there is."""
    pair = make()
    make_ready(pair, topology(dp=8), room=5)
    rooms = [8 * n + 5 for n in range(5000)] + [2**63 - 3 - 8 * n for n in range(5000)]
    assert {pair.add(Request(room), A, room).dp_rank for room in rooms} == {5}
    assert pair.core.stats()["http"]["dp_ranks"] == 0


def test_peer_that_grew_and_says_that_its_size_may_change_is_asked_instead_of_calculated():
    """A4-09: room 2 is on rank 0 of 2; of 4 that may become more, it has to be asked for."""
    pair = make()
    assert make_ready(pair, topology(dp=2), room=2).dp_rank == 0
    grown = topology(dp=4, dynamic_dp_size=True)
    run(pair, 5.1)
    pair.answer(pair.only("heartbeat"), 200, grown)
    assert [event.kind for event in pair.poll().events] == ["peer_restarted"]
    request = add(pair, "asked for", room=2)
    query = pair.only("dp_ranks")
    assert query.rooms == [2]
    pair.answer(query, 200, b'{"2": 3}')
    answer_endpoints(pair)
    answer_topology(pair, grown)
    pair.poll()
    assert pair.ends[request].dp_rank == 3


@pytest.mark.parametrize(("room", "rank"), [(0, 0), (2**63 - 1, 7)])
def test_rank_of_the_least_and_of_the_greatest_room(room, rank):
    """A4-12."""
    assert make_ready(make(), topology(dp=8), room=room).dp_rank == rank


@pytest.mark.parametrize("room", [2**63, -1, "0042"])
def test_room_that_is_no_room_is_the_callers_error(room):
    """A4-12: a remainder of a negative number, or a key that no answer has, would be a silent mistake."""
    pair = make()
    assert pair.add(Request("a"), A, room) is ValueError
    assert not pair.flights


def test_rank_in_an_answer_may_be_a_numeric_string():
    """A4-12."""
    pair = make()
    request = add(pair, "a", room=42)
    answer_topology(pair, topology(dp=4, follow=False))
    pair.answer(pair.only("dp_ranks"), 200, b'{"42":"3"}')
    answer_endpoints(pair)
    answer_topology(pair, topology(dp=4, follow=False))
    pair.poll()
    assert pair.ends[request].dp_rank == 3


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
    query = pair.only("dp_ranks")
    pair.answer(query, 200, b'{"1102": 1}')
    pair.answer_again(query, b'{"1102": 0}')
    assert not [flight for flight in pair.flights if flight.kind == "dp_ranks"], "asked once"
    answer_endpoints(pair)
    answer_topology(pair, topology(dp=2, follow=False))
    pair.poll()
    assert pair.ends[request].dp_rank == 1
