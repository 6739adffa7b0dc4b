"""Peers that are slow, down and up again (CASES.md area 5) in virtual time, core and reference side by side."""

from __future__ import annotations

import pytest

import disagg
from machines import A, B, Request, add, answer_all, endpoint, make, make_ready, topology


def serve(pair, *, down=(), refuse="refused"):
    """Answer everything that is in flight well, but for the addresses that are down."""
    for flight in list(pair.flights):
        if flight not in pair.flights:
            continue
        if flight.addr in down:
            pair.fail(flight, refuse)
        else:
            pair.answer(flight, 200, endpoint() if flight.kind == "endpoint" else topology())


def test_minute_without_a_peer_hurts_no_other_and_needs_no_restart_here():
    """A5-04: 60 s down, a request a second to it and to another one; then the first is used again."""
    pair = make()
    for addr, room in ((A, 1), (B, 2)):
        make_ready(pair, topology(), addr, room)
    events, at_a, at_b = [], [], []
    for second in range(60):
        at_a.append(add(pair, f"A {second}", A))
        at_b.append(add(pair, f"B {second}", B))
        for _ in range(10):
            serve(pair, down={A})
            events += tick(pair, 0.1)
    assert [(event.kind, event.addr) for event in events] == [("peer_lost", A)]
    assert {type(pair.ends[request]) for request in at_b} == {disagg.Route}
    ends = [pair.ends[request] for request in at_a]
    lost_after = sum(isinstance(end, disagg.Route) for end in ends)
    assert 10 <= lost_after <= 20, "cached until it was down for 10 s and over two beats"
    assert {end.kind for end in ends[lost_after:]} == {"cooldown"}
    for _ in range(200):
        serve(pair)
        events += tick(pair, 0.1)
    assert [event.kind for event in events] == ["peer_lost", "peer_back"]
    assert isinstance(place(pair, A), disagg.Route)


def tick(pair, seconds):
    """Let time pass; returns the events of it."""
    pair.advance(seconds, poll=False)
    return pair.poll().events


def place(pair, addr):
    request = add(pair, "again", addr)
    answer_all(pair, topology())
    pair.poll()
    return pair.ends[request]


def test_requests_that_are_given_up_leave_no_spent_budget_behind():
    """A5-04: after an abort a newcomer has all attempts, not those that were left."""
    pair = make({"max_attempts": 3, "min_wait_s": 0.0})
    given_up = add(pair, "given up")
    pair.fail(pair.only("topology"))
    pair.advance(1.0)
    pair.fail(pair.only("topology"))
    pair.discard(given_up)
    for _ in range(20):
        pair.advance(1.0)
        serve(pair, down={A})
    fresh = add(pair, "fresh")
    failed = 0
    while fresh in pair.held:
        failed += len(pair.flights)
        serve(pair, down={A})
        pair.advance(1.0)
        assert failed <= 3
    assert (pair.ends[fresh].kind, pair.ends[fresh].attempts) == ("unreachable", 3)


def test_two_read_timeouts_and_then_an_answer_are_no_loss():
    """A5-05, the client's half: down needs 15 s here, and rooms that make progress go on."""
    pair = make(heartbeat_min_down_s=15.0, dp_rank_timeout_s=100.0)
    waiting = add(pair, "waits for its dp rank", room=7)
    pair.answer(pair.only("topology"), 200, topology(dp=2, follow=False))
    for timed_out in (True, True, False, True, True, False):
        while not [flight for flight in pair.flights if flight.kind == "heartbeat"]:
            for query in list(pair.flights):
                pair.answer(query, 200, b"{}")
            pair.advance(0.1)
        beat = pair.only("heartbeat")
        pair.advance(3.0)
        if timed_out:
            pair.fail(beat, "timeout", "no complete answer within 3 s")
        else:
            pair.answer(beat, 200, topology(dp=2, follow=False))
    assert pair.now > 15e9
    assert waiting in pair.held, "its own deadline is not over"
    assert pair.core.stats()["peers"]["ready"] == 1
    assert pair.core.counters()["events"]["peer_lost"] == 0


def test_peer_whose_every_beat_takes_nearly_all_its_time_is_slow_and_not_down():
    """A5-10: 2.5 s of the 3 s that a beat has, for ten minutes."""
    pair = make(peer_ttl_s=10_000.0)
    make_ready(pair, topology())
    beats = 0
    while pair.now < 600e9:
        pair.advance(0.5)
        for beat in [flight for flight in pair.flights if flight.kind == "heartbeat"]:
            pair.advance(2.5)
            pair.answer(beat, 200, topology())
            beats += 1
    assert beats > 100
    assert pair.core.counters()["events"]["peer_lost"] == 0
    assert isinstance(pair.add(Request("now"), A, 77), disagg.Route)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [((404, b""), "not_a_registry"), ((200, topology(page_size=32)), "incompatible"), (None, "unreachable")],
)
def test_no_mark_is_for_ever_and_one_good_answer_takes_it_off(answer, kind):
    """A5-20: whatever the strike was, after `cooldown_s` a probe decides; meanwhile the mark is visible."""
    pair = make({"max_attempts": 1, "min_wait_s": 0.0})
    struck = add(pair, "struck")
    flight = pair.only("topology")
    pair.fail(flight) if answer is None else pair.answer(flight, *answer)
    pair.poll()
    assert pair.ends[struck].kind == kind
    assert pair.core.stats()["peers"]["marked"] == 1
    assert "probe in 15.0 s" in pair.both("explain_peer", A)[0]
    pair.advance(15.1)
    pair.answer(pair.only("topology"), 200, topology())
    assert pair.core.stats()["peers"] == {"unknown": 0, "fetching": 0, "waiting": 0, "ready": 1, "marked": 0}
    assert isinstance(place(pair, A), disagg.Route)


def test_a_lost_peer_is_back_when_it_answers_also_if_it_was_said_to_have_restarted():
    """A5-04: who stopped routing at `peer_lost` waits for `peer_back`, whatever came between."""
    pair = make()
    make_ready(pair, topology())
    pair.both("peer_lost", A)
    pair.both("peer_restarted", A)
    assert isinstance(place(pair, A), disagg.Route)
    assert pair.core.counters()["events"] == {"peer_lost": 1, "peer_restarted": 1, "peer_back": 1}


def test_a_peer_lost_again_before_it_is_back_ends_what_waits_and_is_told_once():
    pair = make()
    make_ready(pair, topology())
    pair.both("peer_lost", A)
    pair.both("peer_restarted", A)
    waiting = add(pair, "waits")
    pair.both("peer_lost", A)
    pair.poll()
    assert pair.ends[waiting].kind == "peer_lost"
    assert pair.flights == []
    pair.both("peer_lost", A)
    pair.advance(15.1)
    answer_all(pair, topology())
    assert isinstance(place(pair, A), disagg.Route)
    assert pair.core.counters()["events"] == {"peer_lost": 1, "peer_restarted": 1, "peer_back": 1}


def test_mismatch_is_checked_again_when_the_peer_is_said_to_have_restarted():
    """A5-20: a mark belongs to the process that earned it; the next one is asked at once."""
    pair = make()
    add(pair, "bad")
    pair.answer(pair.only("topology"), 200, topology(page_size=32))
    pair.poll()
    pair.both("peer_restarted", A)
    assert pair.core.stats()["peers"]["marked"] == 0
    assert isinstance(place(pair, A), disagg.Route)
