"""The core's counters (CASES.md X-01, X-02) in virtual time: each moves, by how much, and nothing else with it."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

import disagg
from machines import A, B, Request, add, answer_all, answer_endpoints, answer_topology, make, make_ready, topology


def flat(tree, path=()):
    if not isinstance(tree, dict):
        return {".".join(path): tree}
    return {key: value for name, part in tree.items() for key, value in flat(part, (*path, name)).items()}


def counters(pair):
    everything = flat(pair.core.counters())
    everything.pop("wait_bounds_s")
    return everything


@contextmanager
def moves(pair, **expected):
    """Expect exactly these counters to move, by that much; `__` stands for a point. Waits are not looked at."""
    before = counters(pair)
    yield
    after = counters(pair)
    moved = {name: after[name] - before[name] for name in after if not name.startswith("waits.")}
    assert {n: by for n, by in moved.items() if by} == {n.replace("__", "."): by for n, by in expected.items()}
    MOVED.update(name for name, by in moved.items() if by)


MOVED = set()


def waited(pair, stage):
    """The sum, and how many waited at most how long, by bound."""
    everything = pair.core.counters()
    waits, bounds = everything["waits"][stage], [*everything["wait_bounds_s"], float("inf")]
    return waits["sum_s"], {bound: n for bound, n in zip(bounds, waits["buckets"], strict=True) if n}


def test_everything_is_zero_at_first():
    pair = make()
    assert set(counters(pair)) >= {"added", "ended.resolved", "failed.unreachable", "events.peer_back"}
    for value in counters(pair).values():
        assert not any(value) if isinstance(value, list) else value == 0


def test_a_request_that_waits_for_everything_moves_each_counter_on_its_way():
    pair = make()
    with moves(pair, added=1, http__topology=1):
        add(pair, "a", room=7)
    with moves(pair, attempts__good__none=1, http__dp_ranks=1, rooms_asked=1):
        answer_topology(pair, topology(dp=2, follow=False))
    with moves(pair, rooms_resolved=1, http__endpoint=1):
        pair.answer(pair.only("dp_ranks"), 200, b'{"7": 1}')
    with moves(pair, http__topology=1):
        answer_endpoints(pair)
    with moves(pair, ended__resolved=1):
        answer_topology(pair, topology(dp=2, follow=False))
    with moves(pair):
        pair.poll()


def test_what_is_cached_is_routed_at_once():
    pair = make()
    make_ready(pair, topology())
    with moves(pair, added=2, ended__routed_at_once=2):
        add(pair, "b")
        add(pair, "c")
    assert waited(pair, "total") == (0.0, {}), "nothing took time"


def test_warm_up_requests_are_counted_apart():
    pair = make()
    with moves(pair, added=1, ended__fake=1):
        add(pair, "warm-up", "2.2.2.2:8998")


def test_a_room_that_is_asked_for_again_counts_again_until_it_is_resolved():
    pair = make()
    add(pair, "a", room=7)
    add(pair, "b", room=8)
    with moves(pair, attempts__good__none=1, http__dp_ranks=1, rooms_asked=2):
        answer_topology(pair, topology(dp=2, follow=False))
    with moves(pair, rooms_resolved=1, http__endpoint=1):
        pair.answer(pair.only("dp_ranks"), 200, b'{"7": 1}')
    for _ in range(2):
        with moves(pair, http__dp_ranks=1, rooms_asked=1):
            pair.advance(0.04)
        with moves(pair):
            pair.answer(pair.only("dp_ranks"), 200, b"{}")


def test_heartbeats_are_counted_and_a_lost_peer_is_an_event():
    pair = make()
    make_ready(pair, topology())
    with moves(pair, http__heartbeat=1):
        pair.advance(5.0)
    with moves(pair, events__peer_lost=1, http__topology=1, attempts__good__none=1, events__peer_back=1):
        pair.both("peer_lost", A)
        pair.advance(15.1)
        answer_topology(pair, topology())
    with moves(pair, events__peer_restarted=1):
        pair.both("peer_restarted", A)


@pytest.mark.parametrize(
    ("answer", "outcome", "kind"),
    [
        ((503, b""), "transient", "not_ready"),
        ((500, b""), "transient", "unreachable"),
        ((200, b"<html>"), "transient", "protocol_error"),
        ((404, b""), "permanent", "not_a_registry"),
        ((200, topology(page_size=32)), "permanent", "incompatible"),
    ],
)
def test_attempts_are_counted_by_outcome_and_kind(answer, outcome, kind):
    pair = make({"max_attempts": 1, "min_wait_s": 0.0})
    add(pair, "a")
    add(pair, "b")
    with moves(pair, **{f"attempts__{outcome}__{kind}": 1, f"failed__{kind}": 2, "ended__failed": 2}):
        pair.answer(pair.only("topology"), *answer)


def test_a_name_that_leads_where_it_may_not_is_a_permanent_end_of_an_attempt():
    pair = make()
    add(pair, "a", "prefill-1")
    moved = {"attempts__permanent__not_allowed": 1, "failed__not_allowed": 1, "ended__failed": 1}
    with moves(pair, **moved):
        pair.fail(pair.only("topology"), "forbidden", "host prefill-1 resolves to 10.0.0.9")


def test_the_older_form_of_a_query_is_the_same_attempt():
    pair = make()
    add(pair, "a")
    with moves(pair, http__topology=1):
        pair.answer(pair.only("topology"), 400)
    with moves(pair, attempts__good__none=1, http__endpoint=1):
        answer_topology(pair, topology())


def test_each_kind_of_failure_moves_its_own_counter():
    pair = make(max_addresses=1, dp_rank_timeout_s=1.0, endpoint_timeout_s=1.0, request_timeout_s=20.0)
    add(pair, "holds the room", room=1)
    with moves(pair, added=1, ended__failed=1, failed__duplicate_room=1):
        add(pair, "newcomer", room=1)
    with moves(pair, added=1, ended__failed=1, failed__too_many_addresses=1):
        add(pair, "elsewhere", B)
    with moves(pair, ended__failed=1, failed__told=1):
        pair.both("fail_room", 1, "no", 400)
    add(pair, "preset", room=2, dp_rank=9)
    add(pair, "asks", room=3)
    answered = {"attempts__good__none": 1, "http__dp_ranks": 1, "rooms_asked": 1}
    with moves(pair, ended__failed=1, failed__dp_rank_out_of_range=1, **answered):
        answer_topology(pair, topology(dp=2, follow=False))
    with moves(pair, ended__failed=1, failed__dp_rank_timeout=1):
        pair.advance(1.0)
    pair.fail(pair.only("dp_ranks"))
    with moves(pair, added=1, http__endpoint=1):
        add(pair, "looks up", room=4, dp_rank=0)
    with moves(pair, ended__failed=1, failed__endpoint_timeout=1):
        pair.advance(1.0)


def test_peer_that_is_lost_fails_what_waits_for_it_and_then_newcomers_at_once():
    pair = make()
    add(pair, "a")
    add(pair, "b")
    with moves(pair, events__peer_lost=1, ended__failed=2, failed__peer_lost=2):
        pair.both("peer_lost", A)
    with moves(pair, added=1, ended__failed=1, failed__cooldown=1):
        add(pair, "c")


def test_rank_without_an_endpoint_is_a_failure_of_its_own():
    pair = make()
    add(pair, "a")
    answer_topology(pair, topology())
    pair.answer(pair.only("endpoint"), 404)
    answer_topology(pair, topology())
    with moves(pair, ended__failed=1, failed__rank_missing=1):
        pair.answer(pair.only("endpoint"), 404)


def test_request_that_is_not_placed_in_time_is_a_failure_of_its_own():
    pair = make(request_timeout_s=1.0)
    add(pair, "a")
    with moves(pair, ended__failed=1, failed__request_timeout=1):
        pair.advance(1.0)


def test_death_of_the_network_fails_what_is_pending_as_internal():
    pair = make()
    add(pair, "a")
    with moves(pair, ended__failed=1, failed__internal=1):
        pair.core.fail_all("a bug")


def test_changes_that_nobody_takes_are_dropped_and_counted():
    pair = make()
    for number in range(512, 1024):
        pair.core.add(Request(number), f"10.0.{number // 256}.{number % 256}", number + 10**6)
        pair.core.peer_lost(f"10.0.{number // 256}.{number % 256}")
    before = pair.core.counters()["changes_dropped"]
    pair.core.add(Request("one more"), A, 1)
    pair.core.peer_lost(A)
    assert (before, pair.core.counters()["changes_dropped"]) == (0, 1)
    MOVED.add("changes_dropped")


def test_closing_fails_what_is_pending_once():
    pair = make()
    add(pair, "a")
    with moves(pair, ended__failed=1, failed__closed=1):
        pair.core.fail_all("closed", closed=True)


def test_discarded_ones_are_counted_unless_they_had_an_end_already():
    pair = make({"max_attempts": 1, "min_wait_s": 0.0})
    first, second = add(pair, "a"), add(pair, "b")
    with moves(pair, ended__discarded=1):
        pair.discard(first)
    with moves(pair):
        pair.discard(first)
    with moves(pair, attempts__transient__unreachable=1, ended__failed=1, failed__unreachable=1):
        pair.fail(pair.only("topology"))
    with moves(pair):
        pair.discard(second)
    add(pair, "c", B)
    add(pair, "d", B)
    with moves(pair, ended__discarded=2):
        pair.core.discard_all()


def test_an_address_that_gives_way_is_an_eviction():
    pair = make(max_addresses=1)
    pair.discard(add(pair, "a", A))
    with moves(pair, evictions=1, added=1, http__topology=1):
        add(pair, "b", B)


def test_waits_are_told_apart_by_stage():
    """X-02: the topology takes 0.3 s, the dp rank 0.7 s, the endpoints 2 s."""
    pair = make()
    add(pair, "a", room=7)
    pair.advance(0.3)
    answer_topology(pair, topology(dp=2, follow=False))
    pair.advance(0.7)
    pair.answer(pair.only("dp_ranks"), 200, b'{"7": 1}')
    for _ in range(4):  # a poll each half second, or the scheduler's clock stops
        pair.advance(0.5)
    answer_endpoints(pair)
    answer_topology(pair, topology(dp=2, follow=False))
    assert waited(pair, "info") == (pytest.approx(0.3), {0.5: 1})
    assert waited(pair, "dp_rank") == (pytest.approx(0.7), {1.0: 1})
    assert waited(pair, "endpoints") == (pytest.approx(2.0), {2.5: 1})
    assert waited(pair, "total") == (pytest.approx(3.0), {5.0: 1})


def test_a_request_that_is_sent_back_to_the_start_has_two_stays_there_and_one_total():
    pair = make()
    add(pair, "a", room=7)
    pair.advance(0.2)
    answer_topology(pair, topology(dp=2, follow=False))
    pair.advance(0.4)
    pair.both("peer_restarted", A)
    pair.advance(0.8)
    pair.discard(pair.held[0])
    assert waited(pair, "info") == (pytest.approx(1.0), {0.25: 1, 1.0: 1})
    assert waited(pair, "dp_rank") == (pytest.approx(0.4), {0.5: 1})
    assert waited(pair, "total") == (pytest.approx(1.4), {2.5: 1})


def test_time_in_which_the_scheduler_stands_still_is_no_wait():
    pair = make()
    add(pair, "a")
    pair.advance(0.5)
    pair.advance(600.0, poll=False)
    pair.fail(pair.only("topology"))
    pair.discard(pair.held[0])
    assert waited(pair, "total") == (pytest.approx(1.5), {2.5: 1}), "one second after the last poll it stops"


def test_counters_are_plain_and_of_this_resolver_only():
    one, other = make(), make()
    make_ready(one, topology())
    assert counters(other) == counters(make())
    assert type(one.core.counters()) is dict
    with disagg.Resolver(disagg.DecodeRank(attn_tp_size=1, engine_rank=0)) as resolver:
        assert resolver.driver().counters()["added"] == 0
        resolver.add(Request("a"), "2.2.2.2", 1)
        assert resolver.driver().counters()["added"] == 1


def test_ends_and_what_is_undecided_add_up():
    pair = make()
    add(pair, "a")
    add(pair, "b", B)
    answer_all(pair, topology())
    add(pair, "c")
    add(pair, "d", "10.0.0.3")
    pair.compare_counts()
    assert pair.core.counters()["added"] == 4


def test_every_counter_is_moved_by_one_of_these_tests():
    """X-01: none is left that would stand still for ever."""
    MOVED.clear()
    for name, test in list(globals().items()):
        if name.startswith("test_") and name != "test_every_counter_is_moved_by_one_of_these_tests":
            (values,) = [mark.args[1] for mark in getattr(test, "pytestmark", [])] or [[()]]
            for arguments in values:
                test(*arguments)
    every = {name for name in counters(make()) if not name.startswith("waits.")}
    assert every - MOVED == set()
