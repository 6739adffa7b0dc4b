"""One resolver whose calls a signal handler breaks off, as Ctrl-C does: nothing that was decided is lost."""

from __future__ import annotations

import pytest

import disagg
from machines import A, B, Core, Request, endpoint, topology

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
QUICK = disagg.RetryPolicy(max_attempts=2, interval_s=0.1, min_wait_s=0.0)


class Interrupted(BaseException):
    """What a signal handler raises, as KeyboardInterrupt is."""


@pytest.mark.parametrize("name", ["Failure", "Event", "Step"])
def test_ends_that_a_poll_had_taken_when_a_handler_raised_come_out_of_the_next(name, monkeypatch):
    """Making what a poll gives runs Python code, in which Ctrl-C may arrive: no end may be lost."""
    core = Core(DECODE, QUICK)
    failing, routed, dropped = (Request(name) for name in ("failing", "routed", "dropped"))
    core.add(routed, B, 3)
    answer_all(core)
    core.add(failing, A, 1)
    core.add(dropped, A, 2)
    core.peer_lost(A)
    interrupt_once(monkeypatch, getattr(disagg.values, name))
    with pytest.raises(Interrupted):
        core.poll()
    core.discard(dropped)
    later = Request("later")
    core.add(later, A, 4)
    step = core.poll()
    assert [request for request, _ in step.resolved] == [routed]
    assert [request for request, _ in step.failed] == [failing]
    assert ([event.kind for event in step.events], step.seq, step.more) == (["peer_lost"], 1, True)
    step = core.poll()
    assert ([request for request, _ in step.failed], step.seq, step.more) == ([later], 2, False)


@pytest.mark.parametrize("name", ["Route", "Endpoint"])
def test_fact_in_whose_taking_in_a_handler_raised_is_taken_in(name, monkeypatch):
    core = Core(DECODE, QUICK)
    request = Request("a")
    core.add(request, A, 1)
    interrupt_once(monkeypatch, getattr(disagg.values, name))
    with pytest.raises(Interrupted):
        answer_all(core)
    ((routed, route),) = core.poll().resolved
    assert (routed, route.endpoints[0].port) == (request, 5000)
    assert core.add(Request("b"), A, 2) is route


def test_route_is_made_before_the_poll_that_gives_it(monkeypatch):
    core = Core(DECODE, QUICK)
    core.add(Request("a"), A, 1)
    answer_all(core)
    interrupt_once(monkeypatch, disagg.values.Endpoint)  # nobody makes one any more
    ((_, route),) = core.poll().resolved
    assert route.endpoints[0].port == 5000


def test_route_that_two_make_at_once_is_one(monkeypatch):
    core = Core(DECODE, QUICK)
    core.add(Request("a"), A, 1)
    made, routes = disagg.values.Route.__init__, []

    def make_another(self, *args):
        monkeypatch.setattr(disagg.values.Route, "__init__", made)
        routes.append(core.add(Request("b"), A, 2))
        made(self, *args)

    monkeypatch.setattr(disagg.values.Route, "__init__", make_another)
    answer_all(core)
    routes += [core.poll().resolved[0][1], core.add(Request("c"), A, 3)]
    assert routes[0] is routes[1] is routes[2]


@pytest.mark.parametrize("all_at_once", [False, True])
def test_requests_of_a_poll_that_was_broken_off_may_be_discarded(all_at_once, monkeypatch):
    core = Core(DECODE, QUICK)
    requests = [Request(number) for number in range(3)]
    for room, request in enumerate(requests):
        core.add(request, A, room)
    core.peer_lost(A)
    interrupt_once(monkeypatch, disagg.values.Step)
    with pytest.raises(Interrupted):
        core.poll()
    assert [core.state_of(request) for request in requests] == [1, 1, 1], "no end was given"
    if all_at_once:
        core.discard_all()
        with pytest.raises(KeyError):
            core.state_of(requests[0])
    else:
        for request in requests:
            core.discard(request)
    assert core.poll().failed == ()
    assert core.stats()["pending"]["decided"] == 0


@pytest.mark.parametrize("name", ["Failure", "Event", "Step"])
@pytest.mark.parametrize("all_at_once", [False, True])
@pytest.mark.parametrize("breaks_off", [False, True])
def test_request_that_a_handler_discards_during_a_poll_is_in_no_step(name, all_at_once, breaks_off, monkeypatch):
    core, (dropped, *others) = a_poll_that_gives_failures()

    def discard():
        if all_at_once:
            core.discard_all()
        else:
            core.discard(dropped)
        if breaks_off:
            raise Interrupted

    call_once(monkeypatch, getattr(disagg.values, name), discard)
    if breaks_off:
        with pytest.raises(Interrupted):
            core.poll()
    step = core.poll()
    assert [request for request, _ in step.failed] == ([] if all_at_once else others)
    assert [event.kind for event in step.events] == ["peer_lost"], "an event is nobody's request"
    with pytest.raises(KeyError):
        core.state_of(dropped)
    assert core.poll().failed == ()


def test_request_is_pending_until_its_end_is_given(monkeypatch):
    """Other threads and handlers may ask while a poll makes its step, and no end that they saw may be taken back."""
    core, (request, *_) = a_poll_that_gives_failures()
    seen = []

    def look():
        seen.append((core.state_of(request), core.explain(request), core.stats()["pending"]["decided"]))
        with pytest.raises(ValueError, match="pending already"):
            core.add(request, B, 50)

    def look_and_raise():
        look()
        raise Interrupted

    look()
    call_once(monkeypatch, disagg.values.Step, look_and_raise)
    with pytest.raises(Interrupted):
        core.poll()
    look()
    assert seen == [(1, f"failed (peer_lost): {A}: lost: the engine said so; the next poll gives it", 3)] * 3
    core.poll()
    assert (core.state_of(request), core.stats()["pending"]["decided"]) == (0, 0)


def test_poll_within_a_poll_gives_other_ends(monkeypatch):
    core, requests = a_poll_that_gives_failures()
    later, steps = Request("later"), []

    def poll_too():
        core.add(later, A, 9)
        steps.append(core.poll())

    call_once(monkeypatch, disagg.values.Step, poll_too)
    steps.append(core.poll())
    assert [[request for request, _ in step.failed] for step in steps] == [[later], requests]


def test_polls_that_are_broken_off_again_and_again_remember_nothing_more(monkeypatch):
    core, requests = a_poll_that_gives_failures()
    for _ in range(100):
        interrupt_once(monkeypatch, disagg.values.Step)
        with pytest.raises(Interrupted):
            core.poll()
    assert [request for request, _ in core.poll().failed] == requests
    assert core.stats()["remembered_ends"] == 3


def test_close_gives_all_ends_after_a_poll_that_was_broken_off(monkeypatch):
    with disagg.Resolver(DECODE, QUICK) as resolver:
        early, late = Request("early"), Request("late")
        resolver.add(early, A, 1)
        resolver.peer_lost(A)
        interrupt_once(monkeypatch, disagg.values.Step)
        with pytest.raises(Interrupted):
            resolver.poll()
        resolver.add(late, B, 2)
        step = resolver.close()
    assert [(request, failure.kind) for request, failure in step.failed] == [(early, "peer_lost"), (late, "closed")]
    assert ([event.kind for event in step.events], step.more) == (["peer_lost"], False)


def a_poll_that_gives_failures():
    core = Core(DECODE, QUICK)
    requests = [Request(number) for number in range(3)]
    for room, request in enumerate(requests):
        core.add(request, A, room)
    core.peer_lost(A)
    return core, requests


def interrupt_once(monkeypatch, values):
    def interrupt():
        raise Interrupted

    call_once(monkeypatch, values, interrupt)


def call_once(monkeypatch, values, call):
    made = values.__init__

    def called(self, *args):
        monkeypatch.setattr(values, "__init__", made)
        call()
        made(self, *args)

    monkeypatch.setattr(values, "__init__", called)


def answer_all(core):
    """Answer whatever is asked until nothing is."""
    while commands := core.take_commands(100):
        for ticket, kind, *_ in commands:
            core.on_response(ticket, 200, endpoint() if kind == "endpoint" else topology(), None)
