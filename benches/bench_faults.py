"""What a scheduler feels of 256 silent peers, over real HTTP: the first two rows of DESIGN.md section 7.

The peers are in a process of their own (fault_peers.py). With `--benchmark-enable -s` each bench prints its figures;
as tests they run for a few seconds each and prove that every request ended once.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

import disagg

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
RETRY = disagg.RetryPolicy(max_attempts=3, interval_s=0.5, min_wait_s=0.0)
LIMITS = {"total_timeout_s": 1.0}
SILENT, SLOW, HEALTHY = 256, 16, 8
PER_CYCLE = 2  # of a cycle of 1 ms: 2,000 requests a second
CYCLE_S = 0.001
BURST = 2_000
SPACING_S = 0.05  # so that the samples see each part of the silent peers' second
MS = 1e6  # in nanoseconds


@contextmanager
def peers(silent=0, slow=0, healthy=0):
    """Addresses of peers by what they do."""
    command = [sys.executable, str(Path(__file__).with_name("fault_peers.py")), str(silent), str(slow), str(healthy)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        ports = json.loads(process.stdout.readline())
        yield {kind: [f"127.0.0.1:{port}" for port in its] for kind, its in ports.items()}
        process.stdin.close()


class Nothing:
    """Stands where a Resolver would: what the machine and the loop itself cost."""

    def add(self, request, addr, room):
        """Do nothing."""

    def poll(self):
        """Do nothing."""


@dataclass
class Load:
    """2,000 requests a second over all peers, and a burst at one silent address before its last attempt."""

    addresses: list[str]
    victim: str
    burst_from_s: float
    rooms: int = 0
    ended: int = 0
    chance: Random = field(default_factory=lambda: Random(7))

    def cycle(self, into, at_s, took) -> None:
        """Add what comes in one cycle, and poll; `took` gets the nanoseconds of each call."""
        wanted = self.chance.choices(self.addresses, k=PER_CYCLE)
        # Its first attempt begins with the burst's first request; each takes the total timeout of 1 s.
        if self.burst_from_s <= at_s < self.burst_from_s + CYCLE_S or 1.0 <= at_s - self.burst_from_s < 2.0:
            wanted += [self.victim] * round(BURST * CYCLE_S)
        clock = time.perf_counter_ns
        for addr in wanted:
            self.rooms += 1
            began = clock()
            route = into.add(object(), addr, self.rooms)
            took.append(clock() - began)
            self.ended += route is not None
        began = clock()
        step = into.poll()
        took.append(clock() - began)
        if step is not None:
            self.ended += len(step.resolved) + len(step.failed)


def run(into, load: Load, seconds: float) -> list[int]:
    """Cycles of 1 ms for some time; the nanoseconds of each call."""
    took: list[int] = []
    began = now = time.monotonic()
    due = began
    while now - began < seconds:
        load.cycle(into, now - began, took)
        due = max(due + CYCLE_S, now)
        time.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic()
    return took


def share(sorted_ns, part):
    """The value below which that part of all values is, in milliseconds."""
    return sorted_ns[min(len(sorted_ns) - 1, int(part * len(sorted_ns)))] / MS


def line(name, values_ns) -> str:
    ordered = sorted(values_ns)
    parts = [f"{label} {share(ordered, part):7.3f}" for label, part in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))]
    return f"  {name:34} {' ms  '.join(parts)} ms  worst {ordered[-1] / MS:7.3f} ms  ({len(ordered):,} values)"


def drain(resolver, load, within_s=10.0):
    """Poll until all requests have ended."""
    end = time.monotonic() + within_s
    while sum(resolver.stats()["pending"].values()) and time.monotonic() < end:
        step = resolver.poll()
        load.ended += len(step.resolved) + len(step.failed)
        time.sleep(0.01)
    assert sum(resolver.stats()["pending"].values()) == 0
    step = resolver.poll()
    load.ended += len(step.resolved) + len(step.failed)


def bench_time_inside_add_and_poll(scale, settled):
    """Row 1: p99.9 < 1 ms, and the worst at most 5 ms or twice that of the loop alone."""
    seconds = max(20.0 * scale, 5.0)
    with peers(SILENT + 1, SLOW, HEALTHY) as addresses:
        victim = addresses["silent"].pop()
        everyone = [addr for its in addresses.values() for addr in its]
        settled()
        alone = run(Nothing(), Load(everyone, victim, seconds / 4), seconds)
        load = Load(everyone, victim, seconds / 4)
        with disagg.Resolver(DECODE, RETRY, **LIMITS) as resolver:
            took = run(resolver, load, seconds)
            drain(resolver, load)
    print(f"\ntime inside add and poll, {seconds:g} s at 2,000 req/s, {SILENT} silent, {SLOW} slow, {HEALTHY} healthy")
    print(line("with a Resolver", took))
    print(line("the loop alone", alone))
    assert load.ended == load.rooms


@pytest.mark.parametrize("collects", [True, False])
def bench_slices_of_the_network_thread(scale, settled, collects):
    """The longest turn of its loop under the same load, with and without collections of garbage that meet it there."""
    seconds = max(20.0 * scale, 4.0)
    with peers(SILENT, SLOW, HEALTHY) as addresses:
        load = Load([addr for its in addresses.values() for addr in its], "", burst_from_s=1e9)
        settled()
        with disagg.Resolver(DECODE, RETRY, **LIMITS) as resolver:
            if not collects:
                gc.disable()
            try:
                run(resolver, load, 1.0)  # the first request of a process takes longer
                first_s = resolver._transport.longest_slice_s()
                resolver._transport._selector.longest_slice_s = 0.0
                run(resolver, load, seconds)
                longest_s = resolver._transport.longest_slice_s()
            finally:
                gc.enable()
            drain(resolver, load)
    print(
        f"\nlongest slice of the network thread, the garbage collector {'on' if collects else 'off'}, processor time:"
    )
    print(f"  {first_s * 1e3:.2f} ms in the first second, {longest_s * 1e3:.2f} ms in the {seconds:g} s after it")
    assert load.ended == load.rooms


def bench_a_loop_beside_it(scale, settled):
    """Row 2: a loop of 1 kHz with 200 us of work, in windows with and without a Resolver by turns."""
    window_s, pairs = (5.0, 4) if scale == 1.0 else (1.5, 1)
    settled()
    per_200us = calibrate()
    late: dict[bool, list[int]] = {True: [], False: []}
    cycles = {True: 0, False: 0}
    with peers(SILENT, SLOW, HEALTHY) as addresses:
        everyone = [addr for its in addresses.values() for addr in its]
        for _ in range(pairs):
            for with_resolver in (False, True):
                load = Load(everyone, everyone[0], burst_from_s=1e9)
                resolver = disagg.Resolver(DECODE, RETRY, **LIMITS) if with_resolver else Nothing()
                took = work_beside(resolver, load, window_s, per_200us)
                late[with_resolver] += took
                cycles[with_resolver] += len(took)
                if with_resolver:
                    resolver.close()
    print(f"\na loop of 1 kHz with 200 us of work, windows of {window_s:g} s by turns: from due to done")
    print(line("with a Resolver", late[True]))
    print(line("without", late[False]))
    print(f"  cycles {cycles[True]:,} with, {cycles[False]:,} without: loss {1 - cycles[True] / cycles[False]:.2%}")
    assert min(cycles.values()) > 0


def calibrate() -> int:
    """How many turns of `work` take 200 us, at the fastest of many."""
    fastest = min(timed_work(10_000) for _ in range(20))
    return max(1, round(10_000 * 200_000 / fastest))


def timed_work(turns) -> int:
    began = time.perf_counter_ns()
    work(turns)
    return time.perf_counter_ns() - began


def work(turns) -> int:
    total = 0
    for turn in range(turns):
        total += turn & 3
    return total


def work_beside(into, load, seconds, turns) -> list[int]:
    """Nanoseconds from when each cycle was due until its work was done; cycles that are missed are not made up for."""
    done, calls = [], []
    began = time.perf_counter_ns()
    due = began
    while due - began < seconds * 1e9:
        work(turns)
        load.cycle(into, (due - began) / 1e9, calls)
        now = time.perf_counter_ns()
        done.append(now - due)
        due = max(due + 1_000_000, now)
        time.sleep(max(0.0, (due - time.perf_counter_ns()) / 1e9))
    return done


def bench_a_healthy_peer_beside_silent_ones(scale, settled):
    """From add to route at an address that was never asked before: at most twice as long beside 256 silent peers."""
    samples, blocks = (50, 4) if scale == 1.0 else (10, 1)
    took: dict[int, list[int]] = {0: [], SILENT: []}
    settled()
    with peers(SILENT, healthy=2 * samples * blocks) as addresses:
        fresh = iter(addresses["healthy"])
        for _ in range(blocks):
            for count in (0, SILENT):
                with disagg.Resolver(DECODE, RETRY, **LIMITS) as resolver:
                    load = Load(addresses["silent"][:count], "", burst_from_s=1e9)
                    begin_silence(resolver, load)
                    for _ in range(samples):
                        idle(resolver, load, SPACING_S)
                        took[count].append(time_to_route(resolver, next(fresh), load))
    print("\nfrom add to route at a healthy peer that is new")
    print(line("no faulty peer", took[0]))
    print(line(f"beside {SILENT} silent peers", took[SILENT]))


def begin_silence(resolver, load) -> None:
    """Have all silent peers asked once, and time out."""
    for addr in load.addresses:
        load.rooms += 1
        resolver.add(object(), addr, load.rooms)
    if load.addresses:
        idle(resolver, load, 1.5)


def idle(resolver, load, seconds) -> None:
    """Cycles in which a silent peer gets a request."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ask_a_silent_one(resolver, load)
        resolver.poll()
        time.sleep(CYCLE_S)


def ask_a_silent_one(resolver, load) -> None:
    if load.addresses:
        load.rooms += 1
        resolver.add(object(), load.chance.choice(load.addresses), load.rooms)


def time_to_route(resolver, addr, load) -> int:
    """Nanoseconds until a scheduler that polls each millisecond has the route; silent peers get requests meanwhile."""
    load.rooms += 1
    request, began = object(), time.perf_counter_ns()
    resolver.add(request, addr, load.rooms)
    while True:
        ask_a_silent_one(resolver, load)
        if any(its is request for its, _ in resolver.poll().resolved):
            return time.perf_counter_ns() - began
        assert time.perf_counter_ns() - began < 10e9
        time.sleep(CYCLE_S)


def bench_sglang_beside_two_silent_peers(scale, rig):
    """One cycle of SGLang 0.5.23's own queue, beside the above: it asks one silent peer after another, for 5 s each."""
    count = 2 if scale == 1.0 else 1
    manager = rig.manager("decode", mla=False)
    try:
        with peers(count) as addresses:
            queue = rig.queue(manager)
            for room, addr in enumerate(addresses["silent"]):
                host, _, port = addr.rpartition(":")
                rig.enqueue(queue, rig.request(room=room, host=host, port=int(port)))
            began = time.perf_counter()
            queue.pop_preallocated()
            stall_s = time.perf_counter() - began
    finally:
        manager._zmq_ctx.destroy(linger=0)
    print(f"\none cycle of SGLang 0.5.23's queue with {count} silent peers: {stall_s:.1f} s")
    assert stall_s > 1.0
