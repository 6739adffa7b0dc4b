"""The coroutines that drive the machine: they take its commands, keep its timer, hand it its facts.

Nothing here knows about threads: `Driver.run` runs on whatever loop it is started on. All work goes through
turns: one turn ends at most one overdue or abandoned request and starts at most one, and turns keep a
distance. So 256 requests that are wanted at once start, and time out, one after another instead of together. On a
loop that is not our own a gate does the same for answers.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import time
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from disagg.transport.alarm import Alarm
from disagg.transport.attempt import Attempt, Ended
from disagg.transport.exchange import Exchange, ExchangeError
from disagg.transport.gate import Gate
from disagg.transport.options import Command
from disagg.transport.queues import FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from disagg.transport.options import Machine, Report, TransportOptions

__all__ = ["Driver"]


class Driver:
    """Drives one machine on the running loop, from `begin` until `run` returns; all of it on that loop's thread.

    A request waits (queue), is under way (an attempt with a task) and ends with one fact, or without one if
    the machine cancelled it. An exception of one request's task ends that request; any other exception here
    is a bug that ends `run`, so that somebody notices. `gated` is for loops without a PoliteSelector.

    `progressed_at` is when (`time.monotonic`) the loop last got to work of ours; any thread may read it. With a
    report that is every second at least, so an older one tells of a loop that is held up.
    """

    def __init__(
        self, machine: Machine, options: TransportOptions, report: Report | None = None, *, gated: bool = False
    ) -> None:
        self._pid = os.getpid()
        self._machine = machine
        self._options = options
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._exchange = Exchange(options)
        self._gate = Gate(self._loop, self._guarded) if gated else None
        self._bell: int | None = None
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._queue = FairQueue(per_peer=options.max_in_flight_per_peer)
        self._attempts: dict[int, Attempt] = {}
        self._abandoned: deque[Attempt] = deque()
        self._deadlines: list[tuple[float, int, Attempt]] = []  # a heap; `Attempt.due` may be later
        self._order = itertools.count()
        self._turn = Alarm(self._loop)
        self._last_turn = -options.turn_gap_s
        self._core_timer = Alarm(self._loop)
        self._report_timer = Alarm(self._loop)
        self.progressed_at = time.monotonic()

    def begin(self, on_reader_gone: Callable[[], None] | None = None) -> BaseException | None:
        """Watch the bell, and take the commands that are older; returns what went wrong, which `run` raises.

        `on_reader_gone` is called once the loop watches the bell no more: at the end, or when it was closed.
        """
        self._guarded(partial(self._begin, on_reader_gone))
        return self.failure()

    def failure(self) -> BaseException | None:
        """Return the exception of a bug that ends `run`, or has ended it."""
        return self._finished.exception() if self._finished.done() and not self._finished.cancelled() else None

    async def run(self) -> None:
        """Drive until `stop`; for one call. Raises whatever exception a bug in the machine or here raised."""
        try:
            await self._finished
        except GeneratorExit:  # thrown away with its loop, on which nothing can be awaited any more
            self.end_now()
            raise
        except BaseException:
            await self._end_all()
            raise
        await self._end_all()

    def stop(self) -> None:
        """Let `run` return, with all requests abandoned."""
        if not self._finished.done():
            self._finished.set_result(None)

    def end_now(self) -> None:
        """End without waiting: where the loop was closed, or `run` was cancelled before its first turn.

        Changes nothing after `run` has ended, nor in a forked child, which shares the loop's selector with its parent.
        """
        if os.getpid() == self._pid:
            self._let_go_of_loop()
            _run_through(self._exchange.close())

    # -- commands and the machine's timer

    def _begin(self, on_reader_gone: Callable[[], None] | None) -> None:
        bell = self._machine.bell_fileno()
        reader = partial(self._guarded, self._on_bell)  # referred to by the loop alone
        if on_reader_gone is not None:
            weakref.finalize(reader, on_reader_gone).atexit = False
        self._loop.add_reader(bell, reader)
        self._bell = bell
        self._on_bell()
        self._on_report()

    def _on_bell(self) -> None:
        commands = self._machine.take_commands(BATCH)
        for fields in commands:
            command = Command._make(fields)
            if command.kind == "cancel":
                self._abandon(command.ticket)
            else:
                self._queue.put(command)
        if len(commands) == BATCH:
            self._loop.call_soon(self._guarded, self._on_bell)
        self._arm_core_timer()
        self._arm_turn()

    def _abandon(self, ticket: int) -> None:
        if not self._queue.withdraw(ticket) and ticket in self._attempts:
            self._abandoned.append(self._attempts[ticket])

    def _on_core_timer(self) -> None:
        self._machine.on_timer()
        self._arm_core_timer()

    def _arm_core_timer(self) -> None:
        delay_s = self._machine.next_timer()
        if delay_s is not None:
            # One that is set already may be earlier, which is harmless: it is set again then.
            when = self._loop.time() + max(delay_s, SHORTEST_TIMER_S)
            self._core_timer.set(when, partial(self._guarded, self._on_core_timer))

    def _on_report(self) -> None:
        if self._report is not None:
            when = self._loop.time() + self._report.tick()
            self._report_timer.set(when, partial(self._guarded, self._on_report))

    # -- turns

    def _on_turn(self) -> None:
        now = self._last_turn = self._loop.time()
        ended = self._end_one_abandoned() or self._end_one_overdue(now)
        if not self._start_one(now) and not ended:
            self._close_one_idle(now)
        self._arm_turn()

    def _arm_turn(self) -> None:
        when = self._next_work()
        if when is not None:
            when = max(when, self._last_turn + self._options.turn_gap_s)
            self._turn.set(when, partial(self._guarded, self._on_turn))

    def _next_work(self) -> float | None:
        """Return when there is something to do in a turn, in the loop's time; 0.0 is now."""
        if self._abandoned or (self._queue.has_startable() and self._has_room()):
            return 0.0
        while self._deadlines and not self._is_under_way(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        times = [self._deadlines[0][0]] if self._deadlines else []
        expiry = self._exchange.pool.next_expiry()
        if expiry is not None:
            times.append(expiry)
        return min(times, default=None)

    def _is_under_way(self, attempt: Attempt) -> bool:
        return attempt.ended is Ended.NOT and self._attempts.get(attempt.command.ticket) is attempt

    def _has_room(self) -> bool:
        return len(self._attempts) < self._options.max_in_flight

    def _end_one_abandoned(self) -> bool:
        if not self._abandoned:
            return False
        self._abandoned.popleft().end(Ended.ABANDONED)
        return True

    def _end_one_overdue(self, now: float) -> bool:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, attempt = heapq.heappop(self._deadlines)
            if not self._is_under_way(attempt):
                continue
            was_held_up = attempt.due <= now - LATE_S or attempt.is_held_back()
            if was_held_up and not attempt.had_grace:
                # this loop was, not the peer: its answer may be waiting in the socket
                attempt.had_grace = True
                attempt.due = now + GRACE_S
            if attempt.due > now:
                heapq.heappush(self._deadlines, (attempt.due, next(self._order), attempt))
                continue
            attempt.end(Ended.TIMED_OUT)
            return True
        return False

    def _start_one(self, now: float) -> bool:
        command = self._queue.next() if self._has_room() else None
        if command is None:
            return False
        options = self._options
        total_s = options.heartbeat_timeout_s if command.kind == "heartbeat" else options.total_timeout_s
        total_s += command.wait_ms / 1000
        attempt = Attempt(command, now=now, connect_s=options.connect_timeout_s, total_s=total_s, gate=self._gate)
        self._attempts[command.ticket] = attempt
        heapq.heappush(self._deadlines, (attempt.due, next(self._order), attempt))
        attempt.task = self._loop.create_task(self._serve(attempt))
        return True

    def _close_one_idle(self, now: float) -> None:
        expiry = self._exchange.pool.next_expiry()
        if expiry is not None and expiry <= now:
            self._exchange.pool.close_one_idle()

    # -- one request

    async def _serve(self, attempt: Attempt) -> None:
        try:
            fact = await self._fact_of(attempt)
        except GeneratorExit:
            raise
        except BaseException as exc:  # noqa: BLE001  (a Rust panic, say; asyncio would keep it for itself)
            self._on_bug(exc)
            return
        attempt.task = None  # else task, its context and attempt keep each other until the next collection
        attempt.leave_gate()
        self._attempts.pop(attempt.command.ticket, None)
        self._queue.on_end(attempt.command.addr, answered=attempt.answered)
        if not self._finished.done():
            self._guarded(partial(self._tell, attempt.command.ticket, fact))

    async def _fact_of(self, attempt: Attempt) -> Callable[[], None] | None:
        """Make the request and return the call that tells the machine how it ended, if it wants to know."""
        machine, ticket = self._machine, attempt.command.ticket
        try:
            answer = await self._exchange.run(attempt)
        except ExchangeError as trouble:
            return partial(machine.on_error, ticket, trouble.what, trouble.message)
        except asyncio.CancelledError:
            if attempt.ended is Ended.ABANDONED or self._finished.done():
                attempt.answered = None
                return None
            if attempt.ended is Ended.NOT:
                return partial(machine.on_error, ticket, "other", "its task was cancelled")
            if attempt.refusal is None:
                return partial(machine.on_error, ticket, "timeout", attempt.timeout_text())
            answer = attempt.refusal
        except Exception as exc:  # noqa: BLE001  (a bug met by one request must not end the others)
            return partial(machine.on_error, ticket, "other", _bug_text(exc))
        attempt.answered = True
        return partial(machine.on_response, ticket, *answer)

    def _tell(self, ticket: int, fact: Callable[[], None] | None) -> None:
        if fact is not None:
            try:
                fact()
            except Exception as exc:  # noqa: BLE001  (as above: this answer is at fault, not the others)
                self._machine.on_error(ticket, "other", _bug_text(exc))
        self._arm_core_timer()
        self._arm_turn()

    def _guarded(self, step: Callable[[], None]) -> None:
        """Call `step`; an exception in it is a bug, and ends `run`."""
        self.progressed_at = time.monotonic()
        try:
            step()
        except BaseException as exc:  # noqa: BLE001  (asyncio would log even a Rust panic, and go on, deaf)
            self._on_bug(exc)

    def _on_bug(self, exc: BaseException) -> None:
        is_for_all = isinstance(exc, KeyboardInterrupt | SystemExit)  # who runs the loop has to see it as well
        if not self._finished.done():
            self._finished.set_exception(RuntimeError(f"broken off by {exc!r:.200}") if is_for_all else exc)
        if is_for_all:  # raised by a turn of the loop, as asyncio would keep an exception of a task as well
            self._loop.call_soon(_raise, exc)

    async def _end_all(self) -> None:
        self._let_go_of_loop()
        tasks = [attempt.task for attempt in self._attempts.values() if attempt.task is not None]
        left = deque(tasks)
        try:
            while left:
                left.popleft().cancel()
                await asyncio.sleep(0)  # one at a time, as the scheduler may still run beside this
            if tasks:
                await asyncio.wait(tasks, timeout=END_S)
        finally:
            for task in left:  # this was cancelled meanwhile
                task.cancel()
            await self._exchange.close()

    def _let_go_of_loop(self) -> None:
        for alarm in (self._turn, self._core_timer, self._report_timer):
            alarm.cancel()
        if self._gate is not None:
            self._gate.close()
            self._gate = None  # they know each other
        if self._bell is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._bell)
        self._bell = None


def _raise(exc: BaseException) -> None:
    raise exc


def _run_through(work: Coroutine[object, None, None]) -> None:
    """Run a coroutine that waits for nothing, though it may give others a turn."""
    with suppress(StopIteration):
        while work.send(None) is None:
            pass
    with suppress(RuntimeError):  # it waits for something after all, in its `finally` too
        work.close()


def _bug_text(exc: Exception) -> str:
    return f"{exc!r:.200}"


BATCH = 64
SHORTEST_TIMER_S = 0.001
LATE_S = 0.1
GRACE_S = 0.25
END_S = 1.0
