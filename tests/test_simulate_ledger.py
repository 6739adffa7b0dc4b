"""The simulator's ledger: the right ends pass, and every wrong one is unexpected."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from disagg.simulate.facts import FailureSeen, PeerFacts
from disagg.simulate.ledger import Ledger, Seen, expected_route
from disagg.simulate.options import Options, Scenario
from disagg.simulate.plan import make_plan
from disagg.simulate.scenario import Behaviour, DpChoice, Layout, PeerSpec
from disagg.simulate.shared import FAILED, RAISED, ROUTED, End

S = 1_000_000_000
ONE_LAYOUT = (Layout(),)


class World:
    """One peer, a few requests at given seconds, and what became of them."""

    ADDR = "127.0.0.1:9000"

    def __init__(self, behaviour, added_s, choice=DpChoice.ONLY, layouts=ONE_LAYOUT, **options):
        self.peer = PeerSpec(0, behaviour, choice, layouts)
        plan = make_plan(Options(scenario=Scenario.HEALTHY, peers=1, rate=50, duration=1, **options))
        request = replace(plan.requests[0], peer=0, dp_rank=0, preset=None)
        self.requests = [replace(request, room=100 + number) for number in range(len(added_s))]
        self.plan = replace(plan, peers=(self.peer,), requests=tuple(self.requests))
        self.added_ns = [int((10 + added) * S) for added in added_s]
        self.ends, self.details = [], []
        self.facts, self.registered_ns, self.interrupted_ns = PeerFacts(), {}, None
        self.mapping = SimpleNamespace(
            target_tp_rank=1, target_tp_ranks=(1,), target_cp_ranks=(0,), target_pp_ranks=(0,),
            required_dst_info_num=1, required_prefill_response_num=1,
        )  # fmt: skip

    def end(self, request, at_s, kind, detail):
        self.details.append(detail)
        added = self.added_ns[request] if request is not None and request < len(self.added_ns) else 0
        self.ends.append(End(request, kind, len(self.details) - 1, 1, added, int((10 + at_s) * S)))

    def route(self, request, at_s, life=0, **changes):
        route = expected_route(self.peer, self.ADDR, life, 0, self.mapping)
        self.end(request, at_s, ROUTED, replace(route, **changes))

    def fail(self, request, at_s, kind, text, status=503, attempts=4):
        failure = FailureSeen(kind, f"{self.ADDR}: {text}", status, self.ADDR, attempts)
        self.end(request, at_s, FAILED, failure)

    def verdict(self):
        seen = Seen(
            self.ends, self.details, self.added_ns, len(self.requests), {0: self.ADDR}, {0: self.facts},
            self.registered_ns, 0, self.interrupted_ns,
        )  # fmt: skip
        return Ledger(self.plan, seen, {(0, 0): self.mapping, (0, 1): self.mapping}).judge()

    def complaint(self):
        verdict = self.verdict()
        assert verdict.unexpected == len(verdict.complaints) == 1, verdict
        return verdict.complaints[0]


REFUSED = "gave up after 4 attempts: connection refused"


def test_the_right_ends_are_expected():
    world = World(Behaviour.HEALTHY, [0, 0.5])
    world.route(0, 0.01)
    world.route(1, 0.5)
    verdict = world.verdict()
    assert verdict.unexpected == 0
    book = verdict.peers[0]
    assert (book.requests, book.ends, book.low, book.high) == (2, {"routed": 2}, {"routed": 2}, {"routed": 2})
    assert book.route_ns == [S // 100, 0]


def test_a_second_end_a_missing_end_and_an_unknown_request_are_unexpected():
    world = World(Behaviour.HEALTHY, [0, 0, 0])
    world.route(0, 0.1)
    world.route(0, 0.2)
    world.route(1, 0.1)
    world.route(77, 0.1)
    world.route(None, 0.1)
    verdict = world.verdict()
    assert (verdict.unexpected, verdict.twice, verdict.missing, verdict.unknown) == (4, 1, 1, 2)


def test_a_failure_of_a_healthy_peer_is_unexpected():
    world = World(Behaviour.HEALTHY, [0])
    world.fail(0, 1.6, "unreachable", REFUSED)
    assert world.complaint() == ("request 0 to 00-healthy (127.0.0.1:9000) ended unreachable: had to be routed")


def test_an_exception_out_of_add_is_unexpected():
    world = World(Behaviour.HEALTHY, [0])
    world.end(0, 0, RAISED, "ValueError: no")
    assert "ended raised" in world.complaint()


@pytest.mark.parametrize(
    "wrong",
    [
        {"dp_rank": 1},
        {"target_tp_ranks": (0,)},
        {"required_prefill_response_num": 2},
        {"endpoints": ()},
        {"endpoints": ((0, 0, 1, 0, "10.0.0.1", 20_000, False),)},
        {"addr": "127.0.0.1:9001"},
    ],
)
def test_a_route_that_differs_anywhere_is_unexpected(wrong):
    world = World(Behaviour.HEALTHY, [0])
    world.route(0, 0.1, **wrong)
    assert "the route had to be" in world.complaint()


def test_a_refusing_peer_is_unreachable_until_its_budget_is_spent_and_then_in_cooldown():
    world = World(Behaviour.REFUSING, [0, 1.0, 2.5])
    world.fail(0, 1.51, "unreachable", REFUSED)
    world.fail(1, 2.01, "unreachable", "gave up after 5 attempts: connection refused", attempts=5)
    world.fail(2, 2.5, "cooldown", "not tried again")
    assert world.verdict().unexpected == 0


def test_giving_up_before_the_budget_is_spent_is_unexpected():
    world = World(Behaviour.REFUSING, [0])
    world.fail(0, 1.4, "unreachable", REFUSED)
    assert "unreachable 0.100 s too early" in world.complaint()


def test_giving_up_a_young_request_with_the_others_is_unexpected():
    world = World(Behaviour.REFUSING, [0, 1.0])
    world.fail(0, 1.51, "unreachable", REFUSED)
    world.fail(1, 1.51, "unreachable", REFUSED)
    assert "unreachable 0.490 s too early" in world.complaint()


def test_cooldown_before_the_budget_is_spent_is_unexpected():
    world = World(Behaviour.REFUSING, [0, 1.0])
    world.fail(0, 1.51, "unreachable", REFUSED)
    world.fail(1, 1.0, "cooldown", "not tried again")
    assert "had to be unreachable" in world.complaint()


@pytest.mark.parametrize(
    ("text", "attempts", "complaint"),
    [
        ("gave up after 4 attempts: timed out", 4, "the reason does not say 'refused'"),
        ("gave up after 3 attempts: refused", 3, "given up after 3 attempts"),
        ("gave up: connection refused", 4, "the reason does not say 4 attempts"),
    ],
)
def test_a_reason_without_the_attempts_and_the_last_error_is_unexpected(text, attempts, complaint):
    world = World(Behaviour.REFUSING, [0])
    world.fail(0, 1.51, "unreachable", text, attempts=attempts)
    assert complaint in world.complaint()


def test_a_wrong_status_is_unexpected():
    world = World(Behaviour.REFUSING, [0])
    world.fail(0, 1.51, "unreachable", REFUSED, status=500)
    assert "the status had to be 503" in world.complaint()


def test_a_silent_peer_is_given_up_after_as_many_timeouts_as_attempts():
    world = World(Behaviour.SILENT, [0, 0])
    world.fail(0, 4.01, "unreachable", "gave up after 4 attempts: no complete answer within 1 s")
    world.fail(1, 3.9, "unreachable", "gave up after 4 attempts: no complete answer within 1 s")
    assert "0.100 s too early" in world.complaint()


def slow_start(*added_s):
    world = World(Behaviour.SLOW_START, added_s)
    world.facts.whole_ns = [(int(13.9 * S), int(13.91 * S))]  # 3.9 s after the first request
    return world


def test_a_slow_peer_is_not_ready_then_in_cooldown_then_routed():
    world = slow_start(0, 3, 4.7, 4.7, 9)
    world.fail(0, 1.5, "not_ready", "gave up after 4 attempts: not ready: no rank has registered")
    world.fail(1, 3, "cooldown", "not tried again")
    world.fail(2, 4.7, "cooldown", "not tried again")  # the probe may not have come yet
    world.route(3, 4.71)
    world.route(4, 9)
    verdict = world.verdict()
    assert verdict.unexpected == 0, verdict
    assert (verdict.peers[0].low["routed"], verdict.peers[0].high["routed"]) == (1, 3)


@pytest.mark.parametrize(("added_s", "kind"), [(3.0, "routed"), (9.0, "cooldown")])
def test_a_slow_peer_is_not_routed_before_its_cooldown_and_not_refused_for_ever(added_s, kind):
    world = slow_start(0, added_s)
    world.fail(0, 1.5, "not_ready", "gave up after 4 attempts: not ready: no rank has registered")
    if kind == "routed":
        world.route(1, added_s)
    else:
        world.fail(1, added_s, "cooldown", "not tried again")
    assert f"ended {kind}: had to be" in world.complaint()


def restarting(*added_s):
    world = World(Behaviour.RESTARTING, added_s, layouts=(Layout(tp=4), Layout(tp=4)))
    world.facts.away_ns = 20 * S
    world.facts.whole_ns = [(S, S), (int(20.4 * S), int(20.41 * S))]
    return world


def test_a_restarting_peer_is_old_then_either_then_new():
    world = restarting(0, 10.5, 10.5, 15)
    world.route(0, 0.1, life=0)
    world.route(1, 10.5, life=0)
    world.route(2, 10.5, life=1)
    world.route(3, 15, life=1)
    assert world.verdict().unexpected == 0


@pytest.mark.parametrize(("added_s", "life"), [(0.5, 1), (15, 0), (9.9, 1)])
def test_the_wrong_life_of_a_restarting_peer_is_unexpected(added_s, life):
    world = restarting(0, added_s)
    world.route(0, 0.1, life=0)
    world.route(1, added_s, life=life)
    assert "had to be" in world.complaint()


def late_rank(added_s, registered_s):
    world = World(Behaviour.LATE_RANK, [added_s], choice=DpChoice.LATE, layouts=(Layout(dp=2),))
    if registered_s is not None:
        world.registered_ns[0] = (int((10 + registered_s) * S), int((10.01 + registered_s) * S))
    return world


def test_a_dp_rank_that_comes_late_is_waited_for():
    world = late_rank(0, 1.5)
    world.route(0, 2.3)
    assert world.verdict().unexpected == 0


def test_a_route_before_its_dp_rank_was_registered_is_unexpected():
    world = late_rank(0, 1.5)
    world.route(0, 1.4)
    assert "routed 0.100 s too early" in world.complaint()


def test_a_timeout_of_a_dp_rank_that_came_in_time_is_unexpected():
    world = late_rank(0, 1.5)
    world.fail(0, 5, "dp_rank_timeout", "no dp rank for room 100 within 5 s", status=504)
    assert "had to be routed" in world.complaint()


def test_a_dp_rank_that_never_comes_times_out_and_not_before_its_time():
    world = late_rank(0, None)
    world.fail(0, 5.01, "dp_rank_timeout", "no dp rank for room 100 within 5 s", status=504)
    assert world.verdict().unexpected == 0
    world = late_rank(0, None)
    world.fail(0, 4.8, "dp_rank_timeout", "no dp rank for room 100 within 5 s", status=504)
    assert "dp_rank_timeout 0.200 s too early" in world.complaint()


def test_a_page_size_that_differs_is_incompatible_with_both_values():
    world = World(Behaviour.PAGE_SIZE, [0, 1])
    world.fail(0, 0.1, "incompatible", "incompatible: page_size 64 here, 16 there", status=409)
    world.fail(1, 1, "incompatible", "incompatible", status=409)
    assert "the reason does not say 'page', '16', '64'" in world.complaint()


def test_closed_is_an_end_only_once_the_run_was_interrupted():
    for interrupted_s, unexpected in ((None, 1), (0.4, 0), (0.6, 1)):
        world = World(Behaviour.SILENT, [0])
        world.interrupted_ns = None if interrupted_s is None else int((10 + interrupted_s) * S)
        world.fail(0, 0.5, "closed", "closed")
        assert world.verdict().unexpected == unexpected


def test_dummies_are_the_ranks_of_a_block_whose_answers_are_not_awaited():
    peer = PeerSpec(0, Behaviour.HEALTHY, DpChoice.ONLY, (Layout(tp=8, pp=2),))
    mapping = SimpleNamespace(
        target_tp_rank=2, target_tp_ranks=(2, 3), target_cp_ranks=(0,), target_pp_ranks=(0, 1),
        required_dst_info_num=1, required_prefill_response_num=2,
    )  # fmt: skip
    endpoints = expected_route(peer, "a:1", 0, 0, mapping).endpoints
    assert [endpoint[1:4] for endpoint in endpoints] == [(0, 2, 1), (0, 2, 0), (0, 3, 1), (0, 3, 0)]
    assert [endpoint[-1] for endpoint in endpoints] == [False, False, True, True]
