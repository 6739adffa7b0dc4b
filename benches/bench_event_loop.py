"""How long a turn of an asyncio engine's loop takes when 256 answers arrive together, with the gate and without."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time

import pytest

from disagg.transport import LoopTransport, driver
from fake_machine import FakeMachine, options
from hostile import HostileHost, answers_when
from loops import LOOPS, LoopThread

ANSWERS = 256


class Ungated(driver.Driver):
    """As it would be if only starts and time-outs were spread."""

    def __init__(self, machine, limits, report, *, gated):
        super().__init__(machine, limits, report, gated=False)


@pytest.mark.parametrize("gated", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.benchmark(group="256 answers at once on a caller's loop")
def bench_burst_of_answers(benchmark, monkeypatch, loop, gated, scale):
    if not gated:
        monkeypatch.setattr(driver, "Driver", Ungated)
    worst_ms = []
    benchmark.pedantic(lambda: worst_ms.append(worst_turn_ms(loop)), rounds=max(1, int(5 * scale)))
    benchmark.extra_info["worst turn, ms of processor time, median of the rounds"] = round(
        statistics.median(worst_ms), 2
    )
    print(f"{loop}, {'gate' if gated else 'no gate'}: worst turns {', '.join(f'{ms:.2f}' for ms in worst_ms)} ms")


def worst_turn_ms(kind):
    answer = asyncio.Event()

    machine = FakeMachine()
    with HostileHost() as host, LoopThread(kind) as engine:
        peers = [host.peer(answers_when(answer)) for _ in range(ANSWERS)]
        transport = LoopTransport(machine, options(total_timeout_s=60.0), engine.loop)
        engine.call(transport.start)
        tickets = [machine.ask(peer.addr) for peer in peers]
        while sum(peer.requests for peer in peers) < ANSWERS:
            time.sleep(0.01)
        worst_s = engine.run(turns_until(machine, lambda: host.set(answer)))
        assert {machine.wait(ticket).status for ticket in tickets} == {200}
        assert transport.stop(30)
    machine.close()
    return worst_s * 1000


async def turns_until(machine, let_answer):
    """Return the processor time of the longest turn until all answers are in."""
    gc.collect()
    gc.disable()  # a collection is not the network's turn
    let_answer()
    time.sleep(0.5)  # the loop is held up until all have arrived
    worst_s, before_s = 0.0, time.thread_time()
    while len(machine.facts) < ANSWERS:
        await asyncio.sleep(0)
        now_s = time.thread_time()
        worst_s, before_s = max(worst_s, now_s - before_s), now_s
    gc.enable()
    return worst_s
