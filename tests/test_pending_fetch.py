"""The topology fetch and its budget (CASES.md area 2) in virtual time, core and reference side by side."""

from __future__ import annotations

import json

import pytest

from machines import (
    A,
    B,
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


def test_the_last_attempts_mismatch_is_said_instead_of_the_spent_budget():
    """A2-07: what an answer says counts, also when another failure would have been the last."""
    pair = make({"max_attempts": 2, "min_wait_s": 0.0})
    request = add(pair, "a")
    pair.fail(pair.only("topology"))
    run(pair, 1.0)
    answer_topology(pair, topology(page_size=32))
    pair.poll()
    assert (pair.ends[request].kind, pair.ends[request].attempts) == ("incompatible", 2)


def test_cycles_while_an_answer_is_awaited_ask_nothing_and_spend_nothing():
    """A2-07: four peers that accept and never answer, 3 s of a loop at 1 kHz."""
    pair = make({"max_attempts": 1, "min_wait_s": 0.0})
    addresses = [f"10.0.1.{n}:8998" for n in range(4)]
    requests = [add(pair, addr, addr) for addr in addresses]
    for _ in range(3000):
        pair.advance(0.001)
        assert sorted(flight.addr for flight in pair.flights) == addresses
    assert pair.core.stats()["http"]["topology"] == 4
    assert pair.held == requests
    # Within 1 s of the attempt's start or not: an answer is used when it comes, and by the only attempt there is.
    answer_all(pair, topology())
    assert [request for request, _ in pair.poll().resolved] == requests


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


def test_503_is_not_ready_and_asked_again_on_the_budget():
    """A2-04, the client's half: a registry that is not complete yet is no error."""
    pair = make({"max_attempts": 3, "min_wait_s": 0.0})
    early = add(pair, "early")
    for _ in range(2):
        pair.answer(pair.only("topology"), 503)
        run(pair, 1.0)
    answer_topology(pair, topology())
    answer_endpoints(pair)
    answer_topology(pair, topology())
    pair.poll()
    assert pair.ends[early].dp_rank == 0
    never = add(pair, "never", B)
    run(pair, 3.0, on_flight=lambda flight: pair.answer(flight, 503 if flight.addr == B else 200, topology()))
    failure = pair.ends[never]
    assert (failure.kind, failure.http_status, failure.attempts) == ("not_ready", 503, 3)


def test_failure_names_the_address_that_was_dialled():
    """A2-02: the peer is on port 8998, requests say 8997."""
    pair = make({"max_attempts": 2, "min_wait_s": 0.0})
    right, wrong = add(pair, "right", "localhost:8998"), add(pair, "wrong", "localhost:8997")

    def answer(flight):
        if flight.addr == "localhost:8997":
            pair.fail(flight)
        else:
            pair.answer(flight, 200, endpoint() if flight.kind == "endpoint" else topology())

    run(pair, 2.0, on_flight=answer)
    failure = pair.ends[wrong]
    assert (failure.kind, failure.addr) == ("unreachable", "localhost:8997")
    assert failure.reason.startswith("localhost:8997: ")
    assert pair.ends[right].addr == "localhost:8998"


def test_failed_request_stays_failed_whatever_is_answered_later():
    """A2-03: the topology is good, the rank's look-up says 404."""
    pair = make()
    request = add(pair, "a")
    answer_topology(pair, topology())
    lookups = []
    for _ in range(2):
        lookups.append(pair.only("endpoint"))
        pair.answer(lookups[-1], 404)
        for read in [flight for flight in pair.flights if flight.kind == "topology"]:
            pair.answer(read, 200, topology())
    pair.poll()
    failure = pair.ends[request]
    assert failure.kind == "rank_missing"
    for lookup in lookups:
        pair.answer_again(lookup, endpoint())
    run(pair, 20, on_flight=lambda flight: pair.answer(flight, 200, topology()))
    assert pair.ends == {request: failure}
    assert pair.ends[request] is failure, "no second end, and not another one"


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


def test_what_a_peer_sent_reaches_no_terminal_raw():
    pair = make({"max_attempts": 1, "min_wait_s": 0.0})
    request = add(pair, "a")
    pair.fail(pair.only("topology"), "reset", "\x1b[31mred\r\nand a new line\x00")
    pair.poll()
    assert pair.ends[request].reason.isprintable()


def test_address_without_a_port_gets_the_default_one():
    """A2-16: routers leave the port out."""
    pair = make(default_port=8998)
    add(pair, "a", "p1")
    assert pair.only("topology").addr == "p1:8998"


@pytest.mark.parametrize(("addr", "default_port"), [("p1", None), ("p1:None", 8998), ("p1:null", 8998), ("p1:", 8998)])
def test_address_whose_port_is_missing_is_refused_at_add(addr, default_port):
    """A2-16: no default, or a null that was printed; the caller's error, and nothing of it stays."""
    pair = make(default_port=default_port)
    assert pair.add(Request("a"), addr, 1) is ValueError
    assert not pair.flights
    assert not any(pair.core.stats()["pending"].values())


def test_rooms_of_a_batch_are_distinct():
    """A2-16: a router that gives one room to a batch means room + i for the i-th."""
    pair = make()
    make_ready(pair, topology(dp=4), room=99)
    batch = [add(pair, i, room=100 + i) for i in range(4)]
    answer_all(pair, topology(dp=4))
    pair.poll()
    assert [pair.ends[request].dp_rank for request in batch] == [0, 1, 2, 3]


def test_engine_that_does_not_fit_is_quoted_at_moderate_length():
    """Its answer is kept as the reason for `cooldown_s`, for each of up to 4,096 addresses, and is in a log line."""
    pair = make()
    request = add(pair, "a")
    pair.answer(pair.only("topology"), body=topology(page_size=7, kv_cache_dtype="x" * 60_000))
    pair.poll()
    failure = pair.ends[request]
    assert failure.kind == "incompatible"
    assert failure.reason.startswith(f"{A}: page_size 64 here, 7 at the prefill")
    assert len(failure.reason) == len(f"{A}: ") + 2048
    assert [len(change["text"]) for change in pair.core.take_changes(9)] == [2048]
