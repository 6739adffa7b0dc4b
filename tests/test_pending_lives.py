"""Restarts, losses and hostile changes of a peer (CASES.md area 5) in virtual time, core and reference side by side."""

from __future__ import annotations

import itertools

import pytest

from machines import A, B, Request, add, answer_endpoints, answer_topology, endpoint, make, make_ready, run, topology


def test_replaced_peer_is_a_restart_with_both_ids_and_its_new_ports_are_used():
    """A5-07, A5-09, A5-17: seen between two beats, topology and endpoints go together."""
    pair = make({}, {"attn_tp_size": 4, "engine_rank": 1})
    old = make_ready(pair, topology(tp=4), instance="x", port=5000)
    assert old.mapping.target_tp_ranks == (1,)
    run(pair, 5.1)
    pair.answer(pair.only("heartbeat"), 200, topology(tp=8), "y")
    request = add(pair, "next", room=9)
    answer_endpoints(pair, 6000)
    answer_topology(pair, topology(tp=8), "y")
    step = pair.poll()
    assert [(e.kind, e.old_instance, e.new_instance) for e in step.events] == [("peer_restarted", "x", "y")]
    route = pair.ends[request]
    assert route.mapping.target_tp_ranks == (2, 3)
    assert {end.port for end in route.endpoints} == {6000}
    assert route.epoch == old.epoch + 1


def test_slow_is_not_down_and_a_lost_peer_comes_back_without_restart():
    """A5-04, A5-05, A5-10: two missed beats within the minimum time lose nothing."""
    pair = make()
    make_ready(pair, topology())
    run(pair, 5.1)
    for _ in range(2):
        pair.fail(pair.only("heartbeat"), "timeout", "no answer")
        assert not pair.poll().events
        run(pair, 4.0)
        if not [f for f in pair.flights if f.kind == "heartbeat"]:
            run(pair, 1.1)
    events = []
    while not events:
        for flight in list(pair.flights):
            pair.fail(flight, "timeout", "no answer")
        events = pair.poll().events or pair.advance(1.0).events
        assert pair.now < 60e9
    assert [event.kind for event in events] == ["peer_lost"]
    request = add(pair, "while down")
    pair.poll()
    assert pair.ends[request].kind == "cooldown"
    run(pair, 15.1)
    answer_topology(pair, topology())
    assert [event.kind for event in pair.poll().events] == ["peer_back"]


def test_results_of_an_old_epoch_are_dropped():
    """J9, A5-08: look-ups that were in flight when the peer restarted count for nothing."""
    pair = make()
    request = add(pair, "a", room=1)
    answer_topology(pair, topology())
    stale = pair.only("endpoint")
    pair.both("peer_restarted", A)
    assert stale not in pair.flights, "cancelled"
    pair.answer_again(stale, endpoint(1111))
    answer_topology(pair, topology())
    answer_endpoints(pair, 2222)
    answer_topology(pair, topology())
    pair.poll()
    assert pair.ends[request].endpoints[0].port == 2222


def test_rank_that_is_not_found_is_looked_up_once_more_and_then_missing():
    pair = make()
    request = add(pair, "a")
    answer_topology(pair, topology())
    pair.answer(pair.only("endpoint"), 404)
    answer_topology(pair, topology())
    pair.answer(pair.only("endpoint"), 404)
    pair.poll()
    failure = pair.ends[request]
    assert (failure.kind, failure.http_status) == ("rank_missing", 502)
    assert "dp0/cp0/tp0/pp0" in failure.reason


def test_failure_lists_the_ranks_that_had_been_read():
    """A3-11: none before any contact, afterwards those that may have heard of the request."""
    pair = make({}, {"attn_tp_size": 1, "engine_rank": 0, "kv": "mla"})
    early, request = add(pair, "early", B), add(pair, "a")
    pair.both("peer_lost", B)
    pair.poll()
    assert pair.ends[early].contacted == ()
    answer_topology(pair, topology(tp=2))
    pair.answer(next(f for f in pair.flights if "target_tp_rank=0" in f.path), 200, endpoint())
    pair.both("peer_lost", A)
    pair.poll()
    assert pair.ends[request].contacted == ((0, 0, 0, 0),)


def answer_by(instances, bodies):
    """Answers every topology query with the next instance and body, every look-up well."""

    def answer(pair, flight):
        body = endpoint() if flight.kind == "endpoint" else next(bodies)
        pair.answer(flight, 200, body, next(instances))

    return answer


@pytest.mark.parametrize("changes", ["instance", "topology"])
def test_peer_that_is_another_one_at_each_answer_is_asked_at_the_retry_interval(changes):
    """A6-12: no loop as fast as the peer answers, a bounded number of events, and the requests end."""
    numbers = itertools.count(1)
    instances = (f"i{next(numbers)}" if changes == "instance" else None for _ in itertools.count())
    bodies = (topology(cp=next(numbers) % 7 + 1 if changes == "topology" else 1) for _ in itertools.count())
    answer = answer_by(instances, bodies)
    pair = make(request_timeout_s=10.0)
    request = add(pair, "a")
    seen, events = 0, 0
    for _ in range(1100):
        events += len(pair.advance(0.01).events)
        for flight in list(pair.flights):
            if flight in pair.flights:
                seen += 1
                answer(pair, flight)
    assert pair.ends[request].kind == "request_timeout"
    assert seen <= 60, "about 11 s at 1 s, a few requests each"
    assert events <= 20


def test_addresses_match_exactly_never_by_prefix():
    """A3-04 for peers."""
    pair = make()
    one, ten = add(pair, "1", "10.0.0.1:899"), add(pair, "10", "10.0.0.1:8998")
    pair.both("peer_lost", "10.0.0.1:899")
    pair.poll()
    assert pair.ends[one].kind == "peer_lost"
    assert ten in pair.held


@pytest.mark.parametrize("newcomer", [None, "10.0.0.3:8998"])
def test_room_of_an_end_that_was_not_polled_names_its_own_address_though_its_peer_is_forgotten(newcomer):
    """An end outlives its peer: what is known of it must not be looked up at the peer's place."""
    pair = make({"max_attempts": 1, "min_wait_s": 0.0}, max_addresses=2, peer_ttl_s=10.0)
    pair.add(Request("ended"), A, 3)
    pair.fail(pair.only("topology"))
    pair.advance(20.0, poll=False)
    if newcomer:
        pair.add(Request("in its place"), newcomer, 4)
    late = Request("late")
    pair.add(late, B, 3)
    pair.poll()
    assert pair.ends[late].kind == "duplicate_room"
    assert f"a request to {A}" in pair.ends[late].reason
