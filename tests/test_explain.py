"""What `explain`, `explain_peer` and `stats` tell a person on call; test_pending_model compares core and reference."""

from __future__ import annotations

import json

import pytest

import disagg
import registry_client
from machines import A, B, add, answer_endpoints, answer_topology, endpoint, make, make_ready, run, topology
from polling import poll_until


def explained(pair, request):
    core, reference = pair.both("explain", request)
    assert core == reference
    return core


def peer(pair, addr=A):
    core, reference = pair.both("explain_peer", addr)
    assert core == reference
    return core


def waiting_for(*missing, registered, sizes):
    return json.dumps({"error": "", "registered": registered, "sizes": sizes, "missing": missing}).encode()


def test_a_request_that_waits_for_its_dp_rank_says_where_how_often_and_how_long():
    pair = make()
    request = add(pair, "a", "10.0.0.7", room=77)
    answer_topology(pair, topology(dp=4, follow=False))
    pair.answer(pair.only("dp_ranks"), 200, b"{}")

    def unknown(flight):
        pair.answer(flight, 200, b"{}")

    run(pair, 0.15, step=0.01, on_flight=unknown)
    assert pair.reference.requests[0].asked == 4
    for _ in range(195):
        pair.advance(0.01)
    assert explained(pair, request) == (
        "waiting for the dp rank of room 77 at 10.0.0.7:8998, asked 5 times, 2.1 s of 30 s"
    )


def test_a_request_whose_peer_is_not_ready_says_which_ranks_are_missing():
    pair = make({"max_attempts": 15})
    request = add(pair, "a")
    pair.answer(pair.only("topology"), 503, waiting_for([0, 0, 3, 1], registered=5, sizes=[1, 1, 4, 2]))
    pair.advance(0.4)
    waits = "not ready: waiting for tp3/pp1 and 2 more; attempt 2 of 15 in 0.6 s"
    assert explained(pair, request) == f"waiting for the topology of {A}, 0.4 s of 120 s: {waits}"
    assert peer(pair) == f"{A}: {waits}; 1 request waits"
    pair.advance(0.6)
    assert explained(pair, request).endswith("2 more; attempt 2 of 15 is under way")
    run(pair, 20, on_flight=lambda flight: pair.answer(flight, 503, waiting_for(registered=0, sizes=None)))
    assert pair.ends[request].reason == f"{A}: gave up after 15 attempts: not ready: no rank has registered"


def test_our_registry_names_the_missing_ranks_to_the_requests_that_wait():
    decode = disagg.DecodeRank(attn_tp_size=4, engine_rank=0, page_size=64)
    retry = disagg.RetryPolicy(max_attempts=2, interval_s=0.01, min_wait_s=0.0)
    with disagg.BootstrapServer() as server, disagg.Resolver(decode, retry) as resolver:
        for tp, pp in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]:
            body = registry_client.registration(4, tp, pp_size=2, pp_rank=pp)
            assert registry_client.send(server.address, "PUT", "/route", body).status == 200
        resolver.add(object(), server.address, 1)
        (failure,) = poll_until(resolver, 1).values()
    assert failure.kind == "not_ready"
    assert failure.reason.endswith("not ready: waiting for tp2/pp1 and 2 more")


def test_a_request_that_waits_for_endpoints_says_how_many_were_read():
    pair = make({}, {"attn_tp_size": 1, "engine_rank": 0, "kv": "mha"})
    request = add(pair, "a")
    answer_topology(pair, topology(tp=2))
    first, second = (flight for flight in pair.flights if flight.kind == "endpoint")
    pair.answer(first, 200, endpoint())
    pair.fail(second, "timeout", "no answer within 2 s")
    pair.advance(0.2)
    assert explained(pair, request) == (
        f"waiting for the endpoints of dp rank 0 at {A}, 1 of 2 read, 0.2 s of 10 s; last error: no answer within 2 s"
    )
    pair.advance(0.8)
    answer_endpoints(pair)
    assert "2 of 2 read, the topology is read again" in explained(pair, request)


def test_an_end_that_no_poll_gave_yet_is_told_and_one_that_was_given_is_named():
    pair = make({"max_attempts": 1, "min_wait_s": 0.0})
    failed = add(pair, "failed")
    pair.fail(pair.only("topology"))
    assert explained(pair, failed) == (
        f"failed (unreachable): {A}: gave up after 1 attempt: connection refused; the next poll gives it"
    )
    pair.poll()
    assert explained(pair, failed) == "has ended: failed"
    pair.poll()
    pair.poll()
    with pytest.raises(KeyError):
        pair.core.explain(failed)
    routed = add(pair, "routed", B, room=8)
    answer_topology(pair, topology())
    answer_endpoints(pair)
    answer_topology(pair, topology())
    assert explained(pair, routed) == f"routed to dp rank 0 at {B}; the next poll gives it"


def test_each_state_of_a_peer_has_its_sentence():
    pair = make({"max_attempts": 1, "min_wait_s": 0.0, "cooldown_s": 5.0})
    with pytest.raises(KeyError, match="no request named"):
        pair.core.explain_peer(A)
    with pytest.raises(ValueError, match="address"):
        pair.core.explain_peer("http://x")
    first = add(pair, "a")
    assert peer(pair, "10.0.0.1") == f"{A}: attempt 1 of 1 is under way; 1 request waits"
    pair.fail(pair.only("topology"))
    assert peer(pair) == (
        f"{A}: not tried again until it answers a probe; gave up after 1 attempt: connection refused; "
        "probe in 5.0 s; no request waits"
    )
    pair.advance(5.0)
    assert peer(pair).endswith("probe under way; no request waits")
    answer_topology(pair, topology(tp=1, cp=1, dp=2, pp=1))
    assert peer(pair) == f"{A}: ready, epoch 1, tp 1 x cp 1 x pp 1 x dp 2; no request waits"
    pair.discard(first)
    run(pair, 5.1)
    pair.fail(pair.only("heartbeat"), "timeout", "no answer")
    assert "1 looks at it in a row failed" in peer(pair)


def test_what_a_peer_sent_is_escaped():
    pair = make({"max_attempts": 3})
    request = add(pair, "a")
    pair.fail(pair.only("topology"), "reset", "\x1b[2J\nlost")
    assert "\\x1b[2J\\x0alost" in explained(pair, request)
    assert peer(pair).isprintable()


def test_ages_are_of_the_first_in_each_stage_and_stand_still_with_the_scheduler():
    pair = make()
    add(pair, "info", A)
    pair.advance(0.5)
    asking = add(pair, "asking", B, room=9)
    pair.answer(next(f for f in pair.flights if f.addr == B), 200, topology(dp=2, follow=False))
    pair.advance(0.25)
    add(pair, "asking later", B, room=10)
    oldest = pair.core.stats()["oldest_s"]
    assert oldest == {"need_info": 0.75, "need_dp_rank": 0.25, "need_endpoints": 0.0}
    pair.both("pause")
    pair.advance(60.0, poll=False)
    assert pair.core.stats()["oldest_s"] == oldest
    pair.both("resume")
    pair.discard(asking)
    assert pair.core.stats()["oldest_s"]["need_dp_rank"] == 0.0


def test_counters_count_and_all_that_is_held_is_zero_again():
    pair = make({"max_attempts": 2, "min_wait_s": 0.0}, max_addresses=2)
    add(pair, "a", A)
    pair.fail(pair.only("topology"))
    pair.advance(1.0)
    pair.answer(pair.only("topology"), 400)  # the older form belongs to the same attempt
    pair.fail(pair.only("topology"))
    make_ready(pair, topology(), B)
    add(pair, "in a's place", "10.0.0.3")
    pair.advance(0.01)
    stats = pair.core.stats()
    assert (stats["attempts"], stats["attempts_failed"], stats["evictions"]) == (4, 2, 1)
    assert stats["http"]["topology"] == 6, "four attempts, one of them in two forms, and a confirmation"
    pair.both("discard_all")
    run(pair, 2000, step=1.0, on_flight=lambda flight: pair.fail(flight, "timeout", ""))
    stats = pair.core.stats()
    counters = ("http", "attempts", "attempts_failed", "queries", "evictions")
    held = {name: value for name, value in stats.items() if name not in counters}
    assert not any(any(value.values()) if isinstance(value, dict) else value for value in held.values()), held


def test_queries_are_counted():
    pair = make()
    add(pair, "a", room=3)
    answer_topology(pair, topology(dp=2, follow=False))
    pair.answer(pair.only("dp_ranks"), 200, b'{"3": 1}')
    assert pair.core.stats()["queries"] == 1
