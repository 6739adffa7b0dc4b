"""What holds whoever starts the driver: a thread of its own, an asyncio loop, uvloop."""

from __future__ import annotations

import asyncio
import time

import pytest

from disagg.transport.exchange import Exchange
from fake_machine import FakeMachine
from hostile import answers, answers_when, silent
from loops import STARTERS, Turns, started

MANY = 256


class PanicError(BaseException):
    """Like a Rust panic, which is no Exception either."""


class TurnWatch(FakeMachine):
    """Notes in which turn of the loop each fact came."""

    turns = None

    def __init__(self):
        super().__init__()
        self.turn_of_fact = []
        self.held_up_s = 0.0

    def on_timer(self):
        held_up_s, self.held_up_s = self.held_up_s, 0.0
        time.sleep(held_up_s)  # as if something else on the loop's thread took that long
        super().on_timer()

    def _record(self, fact):
        if self.turns is not None:
            self.turn_of_fact.append(self.turns.count)
        super()._record(fact)

    def most_facts_of_a_turn(self):
        return max(self.turn_of_fact.count(turn) for turn in set(self.turn_of_fact))


@pytest.mark.parametrize("starter", STARTERS)
def test_answers_errors_and_timeouts_are_told(starter, host):
    good, mute = host.peer(answers()), host.peer(silent())
    with started(starter, total_timeout_s=0.3) as (machine, transport):
        assert machine.fetch(good.addr).status == 200
        assert machine.fetch(good.addr).status == 200
        assert machine.fetch(mute.addr).what == "timeout"
        assert machine.fetch("127.0.0.1:1").what == "refused"
        assert transport.is_alive()
        assert transport.trouble() is None
    assert good.connections == 1, "kept alive"
    assert transport.trouble() == "stopped"


@pytest.mark.parametrize("starter", STARTERS)
def test_256_timeouts_due_at_once_are_worked_off_one_a_turn(starter, host):
    peers = [host.peer(silent()) for _ in range(16)]
    with started(starter, TurnWatch(), total_timeout_s=2.0) as (machine, transport):
        tickets = [machine.ask(peers[i % 16].addr) for i in range(MANY)]
        hold_up_when(machine, lambda: sum(peer.requests for peer in peers) == MANY, for_s=2.5)
        machine.turns = Turns(transport)
        facts = [machine.wait(ticket, 30) for ticket in tickets]
        machine.turns.stop()
    assert {fact.what for fact in facts} == {"timeout"}
    assert [fact.ticket for fact in machine.facts_in_order] == tickets, "the first due first"
    # One is ended in each turn that may do so; two are told in one where the first took a turn more to end.
    assert machine.most_facts_of_a_turn() <= 2
    assert machine.turn_of_fact == sorted(machine.turn_of_fact)


@pytest.mark.parametrize("starter", STARTERS)
def test_256_answers_that_arrive_at_once_are_let_in_one_after_another(starter, host):
    gate = asyncio.Event()

    peers = [host.peer(answers_when(gate)) for _ in range(MANY)]
    with started(starter, TurnWatch(), total_timeout_s=60.0) as (machine, transport):
        tickets = [machine.ask(peer.addr) for peer in peers]
        hold_up_when(machine, lambda: sum(peer.requests for peer in peers) == MANY, for_s=1.0)
        host.set(gate)
        machine.turns = Turns(transport)
        facts = [machine.wait(ticket, 30) for ticket in tickets]
        machine.turns.stop()
    assert {fact.status for fact in facts} == {200}
    assert machine.most_facts_of_a_turn() <= 2  # as many as PoliteSelector lets in at a time; the gate lets in one


def hold_up_when(machine, holds, *, for_s):
    """Wait for the condition, and then have the loop held up; returns while it is."""
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)
    machine.held_up_s = for_s
    machine.timer_at = time.monotonic()
    machine.ring()
    while machine.held_up_s:
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.parametrize("starter", STARTERS)
def test_answer_that_the_gate_holds_back_does_not_time_out(starter, host):
    peer = host.peer(answers(delay_s=0.1))
    with started(starter, TurnWatch(), total_timeout_s=0.6) as (machine, _):
        tickets = [machine.ask(peer.addr) for _ in range(16)]
        hold_up_when(machine, lambda: peer.requests == 16, for_s=1.5)
        assert {machine.wait(ticket).status for ticket in tickets} == {200}


@pytest.mark.parametrize("starter", STARTERS)
def test_panic_in_the_fetch_worker_ends_the_transport_with_its_reason(starter, host, monkeypatch):
    """A5-19: nothing hangs, and health tells."""
    peer = host.peer(silent())
    real = Exchange.run

    async def panics(self, attempt):
        if attempt.command.path == "/panic":
            raise PanicError("oh")
        return await real(self, attempt)

    monkeypatch.setattr(Exchange, "run", panics)
    with started(starter, total_timeout_s=60) as (machine, transport):
        for _ in range(8):
            machine.ask(peer.addr)
        machine.ask(peer.addr, "/panic")
        machine.wait_until(lambda: machine.failed_all)
        assert machine.failed_all == ["PanicError: oh"]
        assert not transport.is_alive()
        assert transport.trouble() == transport.death_reason() == "PanicError: oh"


@pytest.mark.parametrize("starter", STARTERS)
@pytest.mark.parametrize("where", ["take_commands", "on_timer", "next_timer", "on_response"])
@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), PanicError("oh")])
def test_bug_in_a_driving_function_ends_the_transport_with_its_reason(starter, where, error, host):
    peer = host.peer(answers())

    class Broken(FakeMachine):
        armed = False

        def fails(self):
            if self.armed:
                raise error

    def broken(name):
        def call(self, *arguments):
            self.fails()
            return getattr(FakeMachine, name)(self, *arguments)

        return call

    for name in {where, "on_error"} if where == "on_response" else {where}:  # a failed answer is tried as an error
        setattr(Broken, name, broken(name))
    with started(starter, Broken()) as (machine, transport):
        machine.fetch(peer.addr)
        machine.armed = True
        machine.timer_at = time.monotonic()
        machine.ask(peer.addr)
        machine.wait_until(lambda: machine.failed_all)
        assert machine.failed_all == [f"{type(error).__name__}: {error}"]
        assert not transport.is_alive()


@pytest.mark.parametrize("starter", STARTERS)
def test_request_whose_task_somebody_cancels_ends_with_an_error(starter, host):
    peer = host.peer(silent())
    with started(starter, total_timeout_s=60) as (machine, transport):
        ticket, other = machine.ask(peer.addr), machine.ask(peer.addr)
        until = time.monotonic() + 10
        while peer.requests < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
        transport._loop.call_soon_threadsafe(transport._driver._attempts[ticket].task.cancel)
        fact = machine.wait(ticket)
        assert (fact.what, fact.message) == ("other", "its task was cancelled")
        assert other not in machine.facts
        assert transport.is_alive()
