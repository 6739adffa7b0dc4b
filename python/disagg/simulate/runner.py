"""The parent of a run: starts everybody, shows progress, ends the run, and has the ledger judge it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TextIO, TypeVar

from disagg.simulate.channel import Go
from disagg.simulate.crew import Crew
from disagg.simulate.facts import LoopResult, PrefillResult, PrefillSetup
from disagg.simulate.feeder import FeederSetup
from disagg.simulate.interrupts import Interrupts
from disagg.simulate.ledger import Ledger, Seen, Verdict
from disagg.simulate.loop import LoopSetup, turns_for
from disagg.simulate.mappings import right_mappings
from disagg.simulate.plan import Plan
from disagg.simulate.progress import Counts, Progress
from disagg.simulate.report import Report
from disagg.simulate.scheduler import SchedulerSetup
from disagg.simulate.shared import ArrivalLog, EndLog, Field, SharedMemory, StatusPage

__all__ = ["simulate"]

NS = 1_000_000_000
PREFILL_WORKERS = 2
# Python, the network's modules and all ranks of 128 peers, on two busy cores.
READY_TIMEOUT_S = 60.0
RESULT_TIMEOUT_S = 30.0
# From "everybody is ready" to the first arrival.
HEAD_START_S = 0.3

T = TypeVar("T")


@dataclass(slots=True)
class _Memory:
    arrivals: SharedMemory
    ends: SharedMemory
    status: SharedMemory

    @classmethod
    def for_requests(cls, count: int) -> _Memory:
        return cls(
            SharedMemory(ArrivalLog.bytes_for(count)),
            SharedMemory(EndLog.bytes_for(count)),
            SharedMemory(StatusPage.SIZE),
        )

    def handles(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        arrivals, ends, status = self.arrivals, self.ends, self.status
        return (
            (arrivals.descriptor, arrivals.size),
            (ends.descriptor, ends.size),
            (status.descriptor, status.size),
        )

    def descriptors(self) -> tuple[int, ...]:
        return (self.arrivals.descriptor, self.ends.descriptor, self.status.descriptor)

    def close(self) -> None:
        for memory in (self.arrivals, self.ends, self.status):
            memory.close()


def simulate(plan: Plan, progress_stream: TextIO | None = None) -> Report:
    """Run the whole plan and return what came of it.

    Raises ChildError when a process of the run died, KeyboardInterrupt when a signal came before the run had
    begun, or a second one. Call it from the main thread: it handles SIGINT and SIGTERM while it runs.
    """
    # One for the scheduler, one for the control.
    memory = (_Memory.for_requests(len(plan.requests)), _Memory.for_requests(len(plan.requests)))
    try:
        with Interrupts() as interrupts, Crew() as crew:
            run = _Run(plan, crew, interrupts, Progress(progress_stream), memory)
            return run.run()
    finally:
        for each in memory:
            each.close()


class _Run:
    def __init__(
        self,
        plan: Plan,
        crew: Crew,
        interrupts: Interrupts,
        progress: Progress,
        memory: tuple[_Memory, _Memory],
    ) -> None:
        self._plan = plan
        self._crew = crew
        self._interrupts = interrupts
        self._progress = progress
        self._memory = memory
        self._status, self._control_status = (StatusPage(each.status) for each in memory)
        self._addresses: dict[int, str] = {}

    def run(self) -> Report:
        try:
            self._start()
            start_ns = time.monotonic_ns() + int(HEAD_START_S * NS)
            self._crew.go(Go(start_ns, self._addresses))
            self._interrupts.armed = True
            self._watch(start_ns)
            return self._end(start_ns)
        finally:
            self._progress.clear()
            self._status.close()
            self._control_status.close()

    def _start(self) -> None:
        plan, crew = self._plan, self._crew
        options = plan.options
        scheduler, control = self._memory
        loop = LoopSetup(
            period_ns=int(options.cycle_ms * 1e6),
            turns=turns_for(int(options.work_us * 1000)),
            cycles=int((plan.length_s + plan.tail_s + 30) * 1000 / options.cycle_ms),
            requests=len(plan.requests),
        )
        for number in range(PREFILL_WORKERS):
            crew.start(f"prefill-{number}", "prefill", _prefill_setup(plan, number))
        for role, memory in (("scheduler", scheduler), ("control", control)):
            setup = SchedulerSetup(options, loop, *memory.handles(), with_resolver=role == "scheduler")
            crew.start(role, "scheduler", setup, memory.descriptors())
        logs = tuple((m.arrivals.descriptor, m.arrivals.size) for m in self._memory)
        feeder = FeederSetup(plan.requests, logs, (scheduler.status.descriptor, scheduler.status.size))
        inherited = (*(descriptor for descriptor, _ in logs), scheduler.status.descriptor)
        crew.start("feeder", "feeder", feeder, inherited)
        self._addresses = crew.ready(READY_TIMEOUT_S)

    def _watch(self, start_ns: int) -> None:
        """Show progress until the scheduler has its result; close a run that is interrupted or overdue."""
        overdue_ns = start_ns + int((self._plan.length_s + self._plan.tail_s) * NS)
        scheduler = self._crew.children["scheduler"]
        while not scheduler.done:
            self._crew.wait(0.05)
            self._progress.show(self._counts(start_ns))
            interrupted_ns = self._interrupts.at_ns
            if interrupted_ns is not None and not self._status[Field.STOP]:
                self._progress.note(f"{self._interrupts.name}: ending the run early; once more to stop at once")
                self._status[Field.STOP] = 1
            stopped = bool(self._status[Field.STOP] and self._status[Field.SENT_ALL])
            if stopped or time.monotonic_ns() > overdue_ns:
                self._status[Field.CLOSE] = 1

    def _end(self, start_ns: int) -> Report:
        self._control_status[Field.CLOSE] = 1
        loop = self._result("scheduler", LoopResult)
        control = self._result("control", LoopResult)
        sent = self._result("feeder", int)
        workers = [f"prefill-{number}" for number in range(PREFILL_WORKERS)]
        for role in workers:
            self._crew.finish(role)
        prefills = [self._result(role, PrefillResult) for role in workers]
        seconds = (time.monotonic_ns() - start_ns) / NS
        for role in ("scheduler", "control", "feeder"):
            self._crew.finish(role)
        verdict = self._judge(loop, control, sent, prefills)
        return Report(
            plan=self._plan,
            addresses=self._addresses,
            sent=sent,
            seconds=seconds,
            interrupted=self._interrupts.name or None,
            verdict=verdict,
            loop=loop,
            control=control,
        )

    def _judge(self, loop: LoopResult, control: LoopResult, sent: int, prefills: list[PrefillResult]) -> Verdict:
        seen = Seen(
            ends=EndLog(self._memory[0].ends).read(loop.count),
            details=loop.details,
            added_ns=list(loop.added_ns),
            sent=sent,
            addresses=self._addresses,
            facts={index: facts for result in prefills for index, facts in result.facts.items()},
            registered_ns={request: at for result in prefills for request, at in result.registered_ns.items()},
            worst_cycle_ns=max((*loop.cycle_ns, *control.cycle_ns), default=0),
            interrupted_ns=self._interrupts.at_ns,
        )
        verdict = Ledger(self._plan, seen, right_mappings(self._plan)).judge()
        for problem in (problem for result in prefills for problem in result.problems):
            verdict.complain(f"a prefill worker could not do its part: {problem}")
        if loop.disorders:
            verdict.complain(f"{loop.disorders} requests overtook an earlier one to the same peer in one step")
        return verdict

    def _result(self, role: str, kind: type[T]) -> T:
        result = self._crew.result(role, RESULT_TIMEOUT_S)
        if not isinstance(result, kind):
            raise TypeError(f"the {role} process sent {type(result).__name__}, not {kind.__name__}")
        return result

    def _counts(self, start_ns: int) -> Counts:
        status = self._status
        return Counts(
            seconds=max(0.0, (time.monotonic_ns() - start_ns) / NS),
            planned=len(self._plan.requests),
            arrived=status[Field.ADDED],
            routed=status[Field.ROUTED],
            failed=status[Field.FAILED],
            worst_cycle_ms=status[Field.WORST_CYCLE_NS] / 1e6,
        )


def _prefill_setup(plan: Plan, number: int) -> PrefillSetup:
    """Give each worker every second peer."""
    peers = plan.peers[number::PREFILL_WORKERS]
    mine = {peer.index for peer in peers}
    rooms = sorted(
        (planned.register_s, request, planned.peer, planned.room, planned.dp_rank)
        for request, planned in enumerate(plan.requests)
        if planned.register_s is not None and planned.peer in mine
    )
    last_rank_s = {index: plan.last_rank_s[index] for index in mine}
    return PrefillSetup(peers, tuple(rooms), plan.restart_s, last_rank_s)
