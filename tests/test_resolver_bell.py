"""The bell of `_core.Driver`: whatever gives the network something to do wakes it, or a sleeping network sleeps on."""

from __future__ import annotations

import json
import random
import select

import pytest

import disagg
from machines import MS, SECOND, A, Core, Request, endpoint, topology

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
POLICY = disagg.RetryPolicy(max_attempts=3, interval_s=1.0, min_wait_s=0.0, cooldown_s=2.0)
SLACK_NS = 1000
"""The next timer is given in seconds as a float."""


class Network:
    """As the real one: asleep until the bell rings or the timer is due that it saw last."""

    def __init__(self, core):
        self.core, self.now, self.under_way, self.timer = core, 0, [], None

    def rings(self):
        return bool(select.select([self.core.bell_fileno()], [], [], 0)[0])

    def next_timer_ns(self):
        left_s = self.core.next_timer()
        return None if left_s is None else self.now + round(left_s * SECOND)

    def wake(self):
        self.under_way += [command for command in self.core.take_commands(2**20) if command[1] != "cancel"]
        assert not self.rings()
        self.timer = self.next_timer_ns()

    def assert_sleeps_soundly(self, after):
        if self.rings():
            return
        assert self.core.take_commands(1) == [], after
        due = self.next_timer_ns()
        assert due is None or (self.timer is not None and due > self.timer - SLACK_NS), after

    def answer(self, chance):
        ticket, kind, *_, body, _, _ = self.under_way.pop(chance.randrange(len(self.under_way)))
        if kind in ("topology", "heartbeat"):
            return (ticket, 200, topology(dp=2, follow=False))
        if kind == "endpoint":
            return (ticket, 200, endpoint())
        known = [room for room in json.loads(body)["bootstrap_rooms"] if chance.random() < 0.7]
        return (ticket, 200, json.dumps(dict.fromkeys(map(str, known), 1)).encode())


@pytest.mark.parametrize("seed", range(10))
def test_network_is_woken_by_every_call_that_leaves_it_something_to_do(seed):
    chance = random.Random(seed)
    core = Core(DECODE, POLICY, track_rooms=True, dp_rank_timeout_s=3.0, endpoint_timeout_s=3.0)
    network, held = Network(core), []

    def add():
        held.append(Request(len(held)))
        addr = f"10.0.0.{chance.randrange(3)}:8998"
        if core.add(held[-1], addr, chance.randrange(30), chance.choice([None, None, 0, 5])) is not None:
            held.pop()

    def discard_all():
        core.discard_all()
        held.clear()

    def fail():
        core.on_error(network.under_way.pop(chance.randrange(len(network.under_way)))[0], "refused", "refused")

    def pass_time():
        network.now += chance.choice([0, 10 * MS, SECOND])
        core.set_time_ns(network.now)
        core.on_timer()
        network.timer = network.next_timer_ns()  # the network looks after each fact

    calls = [
        (4, add),
        (2, lambda: held and core.discard(held.pop(chance.randrange(len(held))))),
        (1, discard_all),
        (1, lambda: core.fail_room(chance.randrange(30), "told", 400)),
        (1, lambda: core.release(chance.randrange(30))),
        (1, lambda: core.peer_lost(A)),
        (1, lambda: core.peer_restarted(A)),
        (1, core.pause),
        (1, core.resume),
        (4, lambda: core.poll(chance.choice([1, 100]))),
        (4, lambda: network.under_way and core.on_response(*network.answer(chance))),
        (1, lambda: network.under_way and fail()),
        (4, pass_time),
    ]
    weights = [weight for weight, _ in calls]
    for number in range(1000):
        (call,) = chance.choices([call for _, call in calls], weights)
        call()
        network.assert_sleeps_soundly(f"call {number}: {call}")
        if network.rings():
            network.wake()


def test_discarding_all_requests_wakes_the_network_for_the_timer_that_forgets_their_peer():
    core = Core(DECODE, POLICY)
    network = Network(core)
    core.add(Request("a"), A, 1)
    core.pause()  # no deadline is due while paused
    network.wake()
    assert network.timer is None
    core.discard_all()
    assert network.rings()
    assert core.next_timer() is not None
