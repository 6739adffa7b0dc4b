"""What a scheduler pays: `add` with everything cached, an idle cycle, and requests that resolve in bulk.

Without a network, on the real clock: only the calls that the scheduler makes are measured. Beside the core stand SGLang
0.5.23's own decode queue on the same work, and the reference.

Where the comparison could go either way it goes against us. SGLang's receivers do nothing when they are initialised,
whereas our routes carry mapping and endpoints; its requests have no more than the fields that it reads; its idle cycle
makes no HTTP request, because every address was just tried. Addresses come in no order, so that what ends together is
scattered in memory.
"""

from __future__ import annotations

import json
import random
import time
from itertools import repeat
from types import SimpleNamespace

import pytest

import disagg
from disagg import _core
from disagg.reference.pending import ReferenceResolver

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
TOPOLOGY = json.dumps({"attn_tp_size": 1, "dp_size": 1, "page_size": 64}).encode()
ENDPOINT = b'{"rank_ip": "10.0.0.7", "rank_port": 41000}'
PORT = 8998
CALLS = 1000
LIMIT = 4096


class Request:
    """What an engine would add: ours, and with what SGLang reads of it."""

    __slots__ = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank")

    def __init__(self, room: int, host: str) -> None:
        self.bootstrap_room, self.bootstrap_host, self.bootstrap_port = room, host, PORT
        self.disagg_prefill_dp_rank = None


def host(number: int) -> str:
    return f"10.1.{number // 250}.{number % 250}"


def make_requests(count: int, addresses: int) -> list[Request]:
    """Requests whose addresses are in no order."""
    chosen = random.Random(1).choices(range(addresses), k=count)
    return [Request(room, host(number)) for room, number in enumerate(chosen)]


# --- our side


def network_side(machine):
    """The reference is both sides in one."""
    return machine.driver() if isinstance(machine, _core.Resolver) else machine


def answer_everything(machine) -> None:
    driver = network_side(machine)
    while commands := driver.take_commands(10_000):
        for ticket, kind, *_ in commands:
            driver.on_response(ticket, 200, ENDPOINT if kind == "endpoint" else TOPOLOGY, None)


def with_pending(machine, requests):
    for request in requests:
        machine.add(request, f"{request.bootstrap_host}:{PORT}", request.bootstrap_room)
    return machine


def with_all_decided(machine, requests):
    answer_everything(with_pending(machine, requests))
    return machine


def core() -> _core.Resolver:
    return _core.Resolver(DECODE)


def reference() -> ReferenceResolver:
    return ReferenceResolver(DECODE)


# --- SGLang's side


@pytest.fixture
def sglang_manager(rig):
    manager = rig.manager("decode", mla=False)
    yield manager
    manager._zmq_ctx.destroy(linger=0)


def sglang_queue(rig, manager, addresses: int, dp_size: int = 1):
    """A real decode queue that has the topology of every address."""
    for number in range(addresses):
        info = rig.sg.conn.PrefillServerInfo(
            attn_tp_size=1,
            attn_cp_size=1,
            pp_size=1,
            dp_size=dp_size,
            page_size=64,
            kv_cache_dtype="auto",
            follow_bootstrap_room=True,
        )
        manager._resolve_rank_mapping(info)
        manager.prefill_info_table[f"{host(number)}:{PORT}"] = info
    return rig.queue(manager)


def sglang_entries(rig, requests):
    """What SGLang's `add` puts into its pending list."""
    receiver = SimpleNamespace(init=lambda dp_rank: None)
    return [rig.sg.decode.DecodeRequest(req=request, kv_receiver=receiver) for request in requests]


# --- add


ADD = "add with the route cached, 1000 calls"


def measure_add(benchmark, add, addr):
    request, room = Request(2, host(0)), 2000

    def calls():
        for _ in repeat(None, CALLS):
            add(request, addr, room)

    benchmark(calls)
    return add(request, addr, room)


@pytest.mark.benchmark(group=ADD)
def bench_add_empty_method(benchmark):
    assert measure_add(benchmark, _core._EmptyAdd().add, f"{host(0)}:{PORT}") is None


@pytest.mark.parametrize("make", [core, reference])
@pytest.mark.benchmark(group=ADD)
def bench_add(benchmark, make):
    machine = with_all_decided(make(), [Request(1, host(0))])
    ((_, route),) = machine.poll().resolved
    assert measure_add(benchmark, machine.add, route.addr) is route


@pytest.mark.parametrize("dp_size", [1, 8])
@pytest.mark.benchmark(group=ADD)
def bench_add_sglang_look_up(benchmark, dp_size, rig, sglang_manager):
    """Only the look-up of its `add`, which also makes a receiver; dp size 8 is the room modulo."""
    queue, request = sglang_queue(rig, sglang_manager, 1, dp_size), Request(2005, host(0))
    look_up = queue._resolve_prefill_dp_rank

    def calls():
        for _ in repeat(None, CALLS):
            look_up(request)

    benchmark(calls)
    assert look_up(request) == 2005 % dp_size


# --- a cycle in which nothing changes

IDLE = "cycle without news, pending over 1,000 addresses"


@pytest.mark.parametrize("pending", [0, 100_000])
@pytest.mark.benchmark(group=IDLE)
def bench_idle_poll(benchmark, pending, scale):
    requests = make_requests(int(pending * scale), 1000)
    machine = with_pending(core(), requests)
    network_side(machine).take_commands(10_000)
    step = benchmark.pedantic(machine.poll, iterations=CALLS, rounds=max(1, int(200 * scale)))
    assert step.seq == 0
    assert machine.stats()["pending"]["need_info"] == len(requests)


@pytest.mark.benchmark(group=IDLE)
def bench_idle_sglang(benchmark, rig, sglang_manager, scale, settled):
    queue = sglang_queue(rig, sglang_manager, 0)
    queue.pending_reqs = sglang_entries(rig, make_requests(int(100_000 * scale), 1000))
    queue._ensure_last_attempt_time = dict.fromkeys((f"{host(n)}:{PORT}" for n in range(1000)), time.monotonic())
    queue._ensure_retry_interval = 3600.0
    settled()
    benchmark.pedantic(queue._resolve_pending_reqs, rounds=max(1, int(10 * scale)))
    assert len(queue.pending_reqs) == int(100_000 * scale)


# --- requests that resolve in bulk


def resolve_in_core(make, requests, settle):
    """Return the set-up of one round, and what is measured."""

    def pending():
        machine = with_all_decided(make(), requests)
        settle()
        return (machine,), {}

    def polls(machine):
        resolved = 0
        while resolved < len(requests):
            resolved += len(machine.poll(LIMIT).resolved)
        return resolved

    return pending, polls


def resolve_in_sglang(rig, queue, requests, settle):
    entries = sglang_entries(rig, requests)

    def pending():
        queue.pending_reqs = list(entries)
        settle()
        return (), {}

    def cycle():
        queue._resolve_pending_reqs()
        return len(entries) - len(queue.pending_reqs)

    return pending, cycle


SIDES = [
    (side, pending)
    for pending in (1_000, 10_000, 100_000)
    for side in ("core", "sglang", "reference")
    if side != "reference" or pending == 1_000
]


@pytest.mark.parametrize("addresses", [1, 16, 256])
@pytest.mark.parametrize(("side", "pending"), SIDES)
def bench_resolve(benchmark, side, pending, addresses, request, scale, settled):
    benchmark.group = f"resolve {pending:,} requests on {addresses} addresses"
    requests = make_requests(int(pending * scale), addresses)
    if side == "sglang":
        rig, manager = request.getfixturevalue("rig"), request.getfixturevalue("sglang_manager")
        setup, measured = resolve_in_sglang(rig, sglang_queue(rig, manager, addresses), requests, settled)
    else:
        setup, measured = resolve_in_core(core if side == "core" else reference, requests, settled)
    rounds = max(1, int(scale * (5 if pending == 100_000 else 25)))
    assert benchmark.pedantic(measured, setup=setup, rounds=rounds) == len(requests)


@pytest.mark.parametrize("addresses", [1, 256])
@pytest.mark.benchmark(group=f"one poll of {LIMIT:,} out of 100,000")
def bench_one_poll(benchmark, addresses, scale, settled):
    """Each round is a poll, so that the worst one shows; the steps are let go between them."""
    requests = make_requests(int(100_000 * scale), addresses)
    machine, sizes, step = None, [], None

    def setup():
        nonlocal machine, step
        step = None
        if machine is None or machine.stats()["pending"]["decided"] < LIMIT:
            machine = with_all_decided(core(), requests)
            settled()

    def one_poll():
        nonlocal step
        step = machine.poll(LIMIT)
        sizes.append(len(step.resolved))

    benchmark.pedantic(one_poll, setup=setup, rounds=max(2, int(120 * scale)))
    assert set(sizes) == {LIMIT}
