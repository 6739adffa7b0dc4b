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


def interrupt_once(monkeypatch, values):
    made = values.__init__

    def interrupted(*_args):
        monkeypatch.setattr(values, "__init__", made)
        raise Interrupted

    monkeypatch.setattr(values, "__init__", interrupted)


def answer_all(core):
    """Answer whatever is asked until nothing is."""
    while commands := core.take_commands(100):
        for ticket, kind, *_ in commands:
            core.on_response(ticket, 200, endpoint() if kind == "endpoint" else topology(), None)
