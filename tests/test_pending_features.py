"""What a peer can do beyond SGLang's protocol is used where it says so, and only there."""

from __future__ import annotations

import json

import pytest

from machines import A, Request, add, answer_topology, endpoint, make, make_ready, ranks_of, run, table, topology

ALL = "batch-register, wait-query, table"
FOUR = topology(tp=4)


def ready(pair, body, features=ALL, **identity):
    """Make A ready without anybody's help: one request, whose topology is answered."""
    request = add(pair, "first", A, 0)
    pair.answer(pair.only("topology"), 200, body, features=features, **identity)
    return request


def ask_dp_rank(pair, count=1, room=100):
    return [add(pair, f"room {room + i}", A, room + i) for i in range(count)]


def known(**rooms):
    return json.dumps({room.removeprefix("r"): rank for room, rank in rooms.items()}).encode()


# -- the table


def test_all_endpoints_come_in_one_answer_without_a_confirming_read():
    pair = make(decode={"attn_tp_size": 1, "kv": "mha"})
    request = ready(pair, FOUR)
    (flight,) = pair.flights
    assert (flight.kind, flight.path) == ("endpoint", "/routes?dp_rank=0")
    pair.answer(flight, 200, table(FOUR, ranks_of(FOUR, port=7000)))
    assert [request for request, _ in pair.poll().resolved] == [request]
    route = pair.ends[request]
    assert [(e.tp, e.port) for e in route.endpoints] == [(0, 7000), (1, 7001), (2, 7002), (3, 7003)]
    assert pair.flights == []


def test_the_size_of_the_table_is_bounded_by_the_ranks_of_the_dp_rank():
    pair = make(decode={"attn_tp_size": 1})
    ready(pair, FOUR)
    assert [command[6] for command in pair.commands_seen if command[4].startswith("/routes")] == [1024 + 4 * 128]


def test_a_peer_that_does_not_advertise_the_table_is_asked_rank_by_rank():
    pair = make(decode={"attn_tp_size": 1})
    ready(pair, FOUR, features="tables, wait-query")
    assert len(pair.flights) == 4
    assert all(flight.path.startswith("/route?") for flight in pair.flights)


def test_an_engine_with_more_ranks_than_a_table_may_have_is_asked_rank_by_rank():
    pair = make(decode={"attn_tp_size": 513, "page_size": 64, "kv": "mla"})
    ready(pair, topology(tp=513))
    assert pair.only("endpoint").path.startswith("/route?")


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b""),
        (405, b""),
        (302, b""),
        (413, b""),
        (200, b"<html>"),
        (200, table(FOUR, ranks_of(FOUR)[:3])),
        (200, table(FOUR, ranks_of(FOUR) * 2)),
        (200, table(FOUR, [*ranks_of(FOUR), "x"])),
        (200, json.dumps({"topology": None, "ranks": []}).encode()),
    ],
    ids=["404", "405", "302", "413", "html", "rank left out", "ranks twice", "no rank", "null topology"],
)
def test_a_table_that_cannot_be_used_gives_way_to_look_ups(status, body):
    pair = make(decode={"attn_tp_size": 1})
    request = ready(pair, FOUR)
    pair.answer(pair.only("endpoint"), status, body)
    ranks = sorted(flight.path.split("target_tp_rank=")[1][0] for flight in pair.flights)
    assert ranks == ["0", "1", "2", "3"]
    for flight in list(pair.flights):
        pair.answer(flight, 200, endpoint())
    answer_topology(pair, FOUR)
    pair.poll()
    assert pair.ends[request].endpoints


@pytest.mark.parametrize("what", ["oversized", "cut", "encoding"])
def test_a_table_over_its_bound_or_broken_gives_way_to_look_ups(what):
    """Names of pods as rank_ip, or a large layout in the topology, are over it each time that it is asked for."""
    pair = make(decode={"attn_tp_size": 1})
    request = ready(pair, FOUR)
    pair.fail(pair.only("endpoint"), what, "the body is over 1536 bytes")
    assert len(pair.flights) == 4
    assert all(flight.path.startswith("/route?") for flight in pair.flights)
    while pair.flights:
        flight = pair.flights[0]
        pair.answer(flight, 200, endpoint() if flight.kind == "endpoint" else FOUR)
    pair.poll()
    assert pair.ends[request].endpoints


def test_other_dp_ranks_of_the_same_peer_do_not_ask_for_the_table_again():
    pair = make(decode={"attn_tp_size": 1}, max_endpoint_lookups_per_peer=8)
    body = topology(tp=2, dp=3)
    ready(pair, body)
    add(pair, "second", A, 1)
    first, second = pair.flights
    pair.answer(first, 404)
    assert second not in pair.flights, "the table of the other dp rank was withdrawn"
    assert len(pair.flights) == 4
    add(pair, "third", A, 2)
    assert len(pair.flights) == 6
    assert not any(flight.path.startswith("/routes") for flight in pair.flights)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_table_that_is_not_there_yet_is_asked_for_again_after_the_interval(status):
    pair = make(decode={"attn_tp_size": 1})
    request = ready(pair, FOUR)
    pair.answer(pair.only("endpoint"), status)
    pair.advance(0.9)
    assert pair.flights == []
    pair.advance(0.1)
    pair.answer(pair.only("endpoint"), 200, table(FOUR, ranks_of(FOUR)))
    pair.poll()
    assert pair.ends[request].endpoints


def test_a_table_with_another_topology_is_a_restart():
    pair = make(decode={"attn_tp_size": 1})
    request = ready(pair, FOUR, instance="a")
    two = topology(tp=2)
    pair.answer(pair.only("endpoint"), 200, table(two, ranks_of(two), "b"), features=ALL)
    (event,) = pair.poll().events
    assert (event.kind, event.old_instance, event.new_instance) == ("peer_restarted", "a", "b")
    pair.answer(pair.only("endpoint"), 200, table(two, ranks_of(two), "b"), instance="b")
    pair.poll()
    assert len(pair.ends[request].endpoints) == 2


def test_an_endpoint_of_the_table_outside_the_allowed_hosts_is_in_no_route():
    pair = make(decode={"attn_tp_size": 1}, allowed_rank_hosts=["10.0.0.0/8"])
    request = ready(pair, topology())
    pair.answer(pair.only("endpoint"), 200, table(topology(), ranks_of(topology())))
    pair.answer(pair.only("endpoint"), 200, endpoint())
    run(pair, 11, step=0.5, on_flight=lambda flight: None)
    assert pair.ends[request].kind == "endpoint_timeout"
    assert "allowed_rank_hosts" in pair.ends[request].reason


# -- the waiting query


def waiting_pair(rooms=0, **options):
    pair = make(**options)
    add(pair, "preset", A, 1, dp_rank=0)
    ask_dp_rank(pair, rooms)
    pair.answer(pair.only("topology"), 200, topology(dp=4, follow=False), features="wait-query")
    return pair


def queries(pair):
    return [flight for flight in pair.flights if flight.kind == "dp_ranks"]


def waits(flight):
    return json.loads(flight.body).get("wait_ms", 0)


def test_a_peer_that_can_wait_is_asked_once_for_rooms_that_it_does_not_know_yet():
    pair = waiting_pair()
    ask_dp_rank(pair)
    (query,) = queries(pair)
    assert (query.rooms, waits(query)) == ([100], 5000)
    run(pair, 4, on_flight=lambda flight: None)
    assert queries(pair) == [query], "nothing is asked beside it"
    assert pair.core.stats()["queries"] == 1


def test_rooms_that_come_while_a_peer_waits_are_asked_for_plainly():
    pair = waiting_pair()
    ask_dp_rank(pair)
    (waiting,) = queries(pair)
    ask_dp_rank(pair, 2, room=200)
    pair.advance(0.02)
    plain = queries(pair)[1]
    assert (plain.rooms, waits(plain)) == ([200, 201], 0)
    pair.answer(plain, 200, known(r200=1))
    run(
        pair,
        3,
        on_flight=lambda flight: (
            pair.answer(flight, 200, b"{}") if flight.kind == "dp_ranks" and flight is not waiting else None
        ),
    )
    assert 5 < pair.core.stats()["queries"] < 12, "the one that stays unknown is asked for ever more rarely"
    pair.answer(waiting, 200, known(r100=2))
    run(pair, 1.0, on_flight=lambda flight: None)
    (again,) = [query for query in queries(pair) if waits(query)]
    assert again.rooms == [201], "the next waiting query takes it along, whenever it was its turn"


def test_the_rest_is_asked_for_at_once_when_one_room_became_known():
    pair = waiting_pair(rooms=3)
    pair.advance(1.0)
    pair.answer(*queries(pair), 200, known(r101=3))
    (query,) = queries(pair)
    assert (query.rooms, waits(query)) == ([100, 102], 5000)


def test_a_peer_that_waited_as_long_as_it_was_asked_to_is_asked_again_at_once():
    pair = waiting_pair(decode={"attn_tp_size": 1})
    ask_dp_rank(pair)
    (query,) = queries(pair)
    run(pair, 5, on_flight=lambda flight: None)
    pair.answer(query, 200, b"{}")
    assert [waits(query) for query in queries(pair)] == [5000]


def test_a_peer_that_answers_at_once_that_it_knows_nothing_is_paced():
    pair = waiting_pair()
    ask_dp_rank(pair)
    run(
        pair,
        10,
        step=0.01,
        on_flight=lambda flight: pair.answer(flight, 200, b"{}") if flight.kind == "dp_ranks" else None,
    )
    assert pair.core.stats()["queries"] < 20


@pytest.mark.parametrize("status", [400, 404, 405, 413])
def test_a_peer_that_refuses_to_wait_is_asked_plainly(status):
    pair = waiting_pair()
    ask_dp_rank(pair)
    pair.answer(*queries(pair), status)
    pair.advance(1.0)
    (query,) = queries(pair)
    assert waits(query) == 0


def fail_waiting(pair, how):
    (query,) = queries(pair)
    assert waits(query) == 5000
    how(pair, query)


WAITING_FAILURES = {
    "reset": lambda pair, query: pair.fail(query, "reset", "connection reset"),
    "timeout": lambda pair, query: pair.fail(query, "timeout", "no answer within 7 s"),
    "503": lambda pair, query: pair.answer(query, 503),
    "429": lambda pair, query: pair.answer(query, 429),
    "html": lambda pair, query: pair.answer(query, 200, b"<html>"),
}


@pytest.mark.parametrize("how", WAITING_FAILURES.values(), ids=WAITING_FAILURES.keys())
def test_after_a_waiting_query_failed_rooms_are_asked_for_plainly_until_one_is_answered(how):
    """Something between us and the peer may cut what takes long; what takes it no time gets through."""
    pair = waiting_pair()
    ask_dp_rank(pair)
    fail_waiting(pair, how)
    pair.advance(0.9)
    assert queries(pair) == []
    pair.advance(0.1)
    (plain,) = queries(pair)
    assert waits(plain) == 0
    pair.answer(plain, 200, b"{}")
    pair.advance(1.0)
    assert [waits(query) for query in queries(pair)] == [5000]


def test_a_plain_query_that_fails_too_is_no_reason_to_wait_again():
    pair = waiting_pair()
    ask_dp_rank(pair)
    fail_waiting(pair, WAITING_FAILURES["reset"])
    pair.advance(1.0)
    pair.fail(*queries(pair), "reset", "connection reset")
    pair.advance(1.0)
    assert [waits(query) for query in queries(pair)] == [0]


def test_a_peer_whose_waiting_queries_fail_twice_in_a_row_is_asked_plainly_for_the_rest_of_its_life():
    pair = waiting_pair()
    (request,) = ask_dp_rank(pair)
    for _ in range(2):
        fail_waiting(pair, WAITING_FAILURES["timeout"])
        pair.advance(1.0)
        pair.answer(*queries(pair), 200, b"{}")
        pair.advance(1.0)
    (query,) = queries(pair)
    assert waits(query) == 0
    pair.answer(query, 200, known(r100=0))
    assert pair.only("endpoint")
    assert request not in pair.ends


def test_waiting_queries_that_fail_now_and_then_go_on():
    pair = waiting_pair()
    ask_dp_rank(pair, 3)
    for room in (100, 101):
        fail_waiting(pair, WAITING_FAILURES["timeout"])
        pair.advance(1.0)
        pair.answer(*queries(pair), 200, b"{}")
        pair.advance(1.0)
        pair.answer(*[query for query in queries(pair) if waits(query)], 200, known(**{f"r{room}": 1}))
        pair.advance(0.02)
    assert [waits(query) for query in queries(pair)] == [5000]


def test_the_failure_of_an_old_waiting_query_brings_no_query_forward():
    pair = waiting_pair()
    ask_dp_rank(pair)
    (waiting,) = queries(pair)
    pair.advance(4.5)
    ask_dp_rank(pair, room=200)
    (plain,) = [query for query in queries(pair) if query is not waiting]
    pair.fail(plain, "reset", "connection reset")
    pair.advance(0.1)
    pair.fail(waiting, "timeout", "no answer within 7 s")
    assert queries(pair) == [], "the plain query failed 0.1 s ago"
    pair.advance(0.9)
    assert len(queries(pair)) == 1


def test_a_peer_that_learns_rooms_one_by_one_is_asked_for_hundreds_ten_times_a_second():
    pair = waiting_pair(rooms=300)
    asked = []
    for room in range(100, 110):
        (query,) = [query for query in queries(pair) if waits(query)]
        asked.append((pair.now, len(query.rooms)))
        pair.answer(query, 200, known(**{f"r{room}": 1}))
        assert queries(pair) == []
        pair.advance(0.1)
    assert [count for _, count in asked] == list(range(300, 290, -1))
    ask_dp_rank(pair, room=900)
    pair.advance(0.02)
    assert [query.rooms for query in queries(pair)][-1][-1] == 900, "one that comes later is asked for as ever"


def test_at_most_256_peers_are_asked_to_wait_at_a_time():
    pair = make()
    for number in range(258):
        add(pair, f"to {number}", f"10.1.{number // 200}.{number % 200}:8998", 1000 + number)
    for flight in list(pair.flights):
        pair.answer(flight, 200, topology(dp=4, follow=False), features="wait-query")
    assert sorted(waits(query) for query in queries(pair)) == [0] * 2 + [5000] * 256
    pair.answer(next(query for query in queries(pair) if waits(query)), 200, b"{}")
    pair.answer(next(query for query in queries(pair) if not waits(query)), 200, b"{}")
    pair.advance(0.02)
    assert sum(waits(query) > 0 for query in queries(pair)) == 256, "the place that became free is used"


def test_the_transport_is_told_how_long_the_peer_may_wait():
    pair = waiting_pair()
    ask_dp_rank(pair)
    assert [command[7] for command in pair.commands_seen if command[1] == "dp_ranks"] == [5000]


# -- restarts


def test_a_changed_epoch_of_the_registry_is_a_restart_with_or_without_an_instance():
    for instance in (None, "x"):
        pair = make()
        request = add(pair, "first")
        pair.answer(pair.only("topology"), 200, topology(), instance=instance, epoch="1")
        pair.answer(pair.only("endpoint"), 200, endpoint(1), instance=instance, epoch="1")
        pair.answer(pair.only("topology"), 200, topology(), instance=instance, epoch="1")
        pair.poll()
        assert pair.ends[request].endpoints[0].port == 1
        pair.advance(5.0)
        pair.answer(pair.only("heartbeat"), 200, topology(), instance=instance, epoch="2")
        assert [event.kind for event in pair.poll().events] == ["peer_restarted"]
        later = add(pair, "second")
        pair.answer(pair.only("endpoint"), 200, endpoint(2), instance=instance, epoch="2")
        pair.answer(pair.only("topology"), 200, topology(), instance=instance, epoch="2")
        pair.poll()
        assert (pair.ends[later].endpoints[0].port, pair.ends[later].epoch) == (2, 2)


def test_an_epoch_on_a_dp_rank_answer_is_seen_before_the_next_heartbeat():
    pair = make()
    add(pair, "preset", A, 1, dp_rank=0)
    pair.answer(pair.only("topology"), 200, topology(dp=2, follow=False), epoch="1")
    ask_dp_rank(pair)
    pair.answer(*queries(pair), 200, known(r100=1), epoch="2")
    assert [event.kind for event in pair.poll().events] == ["peer_restarted"]
    assert pair.only("topology")


def test_a_key_that_nobody_understands_may_change_with_each_answer():
    """A2-12: what is unknown is kept, not trusted to be of a life: an uptime is another one each time."""
    pair = make()
    route = make_ready(pair, topology(uptime_s=1))
    pair.advance(5.0)
    pair.answer(pair.only("heartbeat"), 200, topology(uptime_s=6, other=[]))
    assert pair.poll().events == ()
    (later,) = ask_dp_rank(pair)
    pair.poll()
    assert pair.ends[later] == route


def test_a_table_whose_unknown_keys_changed_is_no_restart():
    pair = make(decode={"attn_tp_size": 1})
    request = ready(pair, topology(tp=4, uptime_s=1))
    later = topology(tp=4, uptime_s=2)
    pair.answer(pair.only("endpoint"), 200, table(later, ranks_of(later)))
    assert pair.poll().events == ()
    assert pair.ends[request].endpoints


def test_an_empty_instance_states_nothing():
    pair = make()
    route = make_ready(pair, topology(), port=5000)
    pair.advance(5.0)
    pair.answer(pair.only("heartbeat"), 200, topology(), instance="", epoch="")
    assert pair.only("heartbeat"), "its endpoints are looked up, as nothing else tells of a restart"
    assert route.epoch == 1


def test_a_peer_that_is_another_one_each_time_is_said_to_restart():
    pair = make(request_timeout_s=10.0)
    request = add(pair, "first")
    lives = iter(range(1_000))

    def answer(flight):
        pair.answer(flight, 200, endpoint() if flight.kind == "endpoint" else topology(), instance=str(next(lives)))

    run(pair, 11, step=0.25, on_flight=answer)
    assert pair.ends[request].kind == "request_timeout"
    assert "the peer restarted " in pair.ends[request].reason
    assert " times since it last gave a route" in pair.ends[request].reason


def test_an_instance_in_the_topology_counts_where_no_header_states_one():
    pair = make()
    make_ready(pair, topology(instance_id="a"))
    pair.advance(5.0)
    pair.answer(pair.only("heartbeat"), 200, topology(instance_id="b"))
    (event,) = pair.poll().events
    assert (event.kind, event.old_instance, event.new_instance) == ("peer_restarted", "a", "b")


def test_a_restart_on_other_ports_is_seen_without_any_header():
    """A5-07: the topology is the same again; only the endpoints tell."""
    pair = make()
    old = make_ready(pair, topology(), port=5000)
    pair.advance(5.0)
    pair.answer(pair.only("heartbeat"), 200, topology())
    check = pair.only("heartbeat")
    assert "prefill_dp_rank=0" in check.path
    pair.answer(check, 200, endpoint(6000))
    (event,) = pair.poll().events
    assert (event.kind, event.epoch) == ("peer_restarted", old.epoch)
    new = make_ready(pair, topology(), room=2, port=6000)
    assert (new.epoch, new.endpoints[0].port) == (old.epoch + 1, 6000)


def test_the_same_endpoint_or_no_clear_answer_is_no_restart():
    pair = make()
    make_ready(pair, topology(), port=5000)
    for answer in [(200, endpoint(5000)), (503, b""), (200, b"<html>"), (500, b"")]:
        pair.advance(5.0)
        pair.answer(pair.only("heartbeat"), 200, topology())
        pair.answer(pair.only("heartbeat"), *answer)
    pair.advance(5.0)
    pair.answer(pair.only("heartbeat"), 200, topology())
    pair.fail(pair.only("heartbeat"), "timeout", "no answer")
    assert pair.poll().events == ()


def test_a_cached_rank_that_is_not_registered_any_more_is_a_restart():
    pair = make()
    make_ready(pair, topology())
    pair.advance(5.0)
    pair.answer(pair.only("heartbeat"), 200, topology())
    pair.answer(pair.only("heartbeat"), 404)
    assert [event.kind for event in pair.poll().events] == ["peer_restarted"]


def test_the_checks_go_round_all_cached_endpoints():
    pair = make(decode={"attn_tp_size": 1})
    body = topology(tp=2, dp=2)
    make_ready(pair, body, room=0)
    make_ready_again = add(pair, "other dp rank", A, 1)
    for flight in list(pair.flights):
        pair.answer(flight, 200, endpoint())
    answer_topology(pair, body)
    pair.poll()
    assert make_ready_again in pair.ends
    paths = []
    for _ in range(8):
        pair.advance(5.0)
        pair.answer(pair.only("heartbeat"), 200, body)
        paths.append(pair.only("heartbeat").path)
        pair.answer(pair.only("heartbeat"), 200, endpoint())
    assert len(set(paths[:4])) == 4
    assert paths[:4] == paths[4:]


def test_a_peer_that_states_an_instance_is_not_asked_for_endpoints_again():
    pair = make()
    make_ready(pair, topology(), instance="a")
    pair.advance(5.0)
    pair.answer(pair.only("heartbeat"), 200, topology(), "a")
    assert pair.flights == []


def test_what_is_said_of_an_epoch_that_is_over_changes_nothing():
    """A5-08: A fails on what B has read anew already."""
    pair = make()
    old = make_ready(pair, topology(), port=1)
    assert pair.both("peer_restarted", A, old.epoch) == [True, True]
    assert pair.both("peer_restarted", A, old.epoch) == [False, False], "it is being asked already"
    new = make_ready(pair, topology(), room=2, port=2)
    for name in ("peer_restarted", "peer_lost"):
        assert pair.both(name, A, old.epoch) == [False, False]
    assert pair.add(Request("next"), A, 3) == new
    assert pair.both("peer_lost", A, new.epoch) == [True, True]
    assert [event.kind for event in pair.poll().events] == ["peer_lost"]
