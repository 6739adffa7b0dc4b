"""What a scheduler pays: `add` with everything cached, an idle `poll`, and requests that resolve in bulk.

In virtual time, without a network: only the calls that the scheduler makes are measured.
"""

from __future__ import annotations

import json

import pytest

import disagg
from disagg import _core
from disagg.reference.pending import ReferenceResolver

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
TOPOLOGY = json.dumps({"attn_tp_size": 1, "dp_size": 1, "page_size": 64}).encode()
ENDPOINT = b'{"rank_ip": "10.0.0.7", "rank_port": 41000}'


class Request:
    """What an engine would add."""

    __slots__ = ("room",)

    def __init__(self, room: int) -> None:
        self.room = room


def core() -> _core.Resolver:
    return _core.Resolver(DECODE, virtual_time=True)


def network_side(machine):
    """The reference is both sides in one."""
    return machine.driver() if isinstance(machine, _core.Resolver) else machine


def address(number: int) -> str:
    return f"10.1.{number // 250}.{number % 250}:8998"


def answer_everything(machine) -> None:
    driver = network_side(machine)
    while commands := driver.take_commands(10_000):
        for ticket, kind, *_ in commands:
            driver.on_response(ticket, 200, ENDPOINT if kind == "endpoint" else TOPOLOGY, None)


@pytest.mark.parametrize("make", [core, lambda: ReferenceResolver(DECODE)], ids=["core", "reference"])
@pytest.mark.benchmark(group="add, route cached")
def bench_add_with_route_cached(benchmark, make):
    machine = make()
    machine.add(Request(1), address(0), 1)
    answer_everything(machine)
    ((_, route),) = machine.poll().resolved
    request, addr, add = Request(2), address(0), machine.add

    def calls():
        for room in range(1000, 2000):
            add(request, addr, room)

    benchmark(calls)
    assert add(request, addr, 3) is route


@pytest.mark.parametrize("pending", [0, 100_000])
@pytest.mark.benchmark(group="idle poll")
def bench_idle_poll(benchmark, pending, scale):
    machine = core()
    requests = [Request(room) for room in range(int(pending * scale))]
    for request in requests:
        machine.add(request, address(request.room % 1000), request.room)
    network_side(machine).take_commands(10_000)
    poll = machine.poll

    def calls():
        for _ in range(1000):
            poll()

    benchmark(calls)
    assert machine.stats()["pending"]["need_info"] == len(requests)
    assert poll().seq == 0


@pytest.mark.parametrize(
    ("make", "share"), [(core, 1.0), (lambda: ReferenceResolver(DECODE), 0.01)], ids=["core", "reference"]
)
@pytest.mark.benchmark(group="resolve, 256 addresses (the reference does a hundredth of it)")
def bench_resolve_in_bulk(benchmark, make, share, scale):
    count = int(100_000 * scale * share)

    def pending():
        machine = make()
        for room in range(count):
            machine.add(Request(room), address(room % 256), room)
        answer_everything(machine)
        return (machine,), {}

    def polls(machine):
        resolved = 0
        while resolved < count:
            step = machine.poll(4096)
            resolved += len(step.resolved)
        return resolved

    assert benchmark.pedantic(polls, setup=pending, rounds=5) == count
