"""The coroutines that drive the machine: they take its commands, keep its timer, hand it its facts.

Nothing here knows about threads: `Driver.run` runs on whatever loop it is started on. All work goes through
turns: one turn ends at most one overdue or abandoned request and starts at most one, and turns keep a
distance. So 256 requests that are wanted at once start, and time out, one after another instead of together.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from disagg.transport.attempt import Attempt, Ended
from disagg.transport.exchange import Exchange, ExchangeError
from disagg.transport.options import Command
from disagg.transport.queues import FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from disagg.transport.options import Machine, Report, TransportOptions

__all__ = ["Driver"]


class Driver:
    """Drives one machine on the running loop; every method is for that loop's thread.

    A request waits (queue), is under way (an attempt with a task) and ends with one fact, or without one if
    the machine cancelled it. An exception of one request's task ends that request; any other exception here
    is a bug that ends `run`, so that somebody notices.
    """

    def __init__(self, machine: Machine, options: TransportOptions, report: Report | None = None) -> None:
        self._machine = machine
        self._options = options
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._exchange = Exchange(options)
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._queue = FairQueue(per_peer=options.max_in_flight_per_peer)
        self._attempts: dict[int, Attempt] = {}
        self._abandoned: deque[Attempt] = deque()
        self._deadlines: list[tuple[float, int, Attempt]] = []  # a heap; `Attempt.due` may be later
        self._order = itertools.count()
        self._next_turn: asyncio.TimerHandle | None = None
        self._last_turn = -options.turn_gap_s
        self._core_timer: asyncio.TimerHandle | None = None
        self._report_timer: asyncio.TimerHandle | None = None

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Drive until `stop`; calls `on_ready` once the bell is watched.

        Raises whatever exception a bug in the machine or here raised.
        """
        bell = self._machine.bell_fileno()
        try:
            self._loop.add_reader(bell, self._guarded, self._on_bell)
            on_ready()
            self._guarded(self._on_bell)  # commands may be older than the reader
            self._guarded(self._on_report)
            await self._finished
        finally:
            self._loop.remove_reader(bell)
            await self._end_all()

    def stop(self) -> None:
        """Let `run` return, with all requests abandoned."""
        if not self._finished.done():
            self._finished.set_result(None)

    # -- commands and the machine's timer

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
        self._core_timer = None
        self._machine.on_timer()
        self._arm_core_timer()

    def _arm_core_timer(self) -> None:
        delay_s = self._machine.next_timer()
        if delay_s is None:
            return
        when = self._loop.time() + max(delay_s, SHORTEST_TIMER_S)
        if self._core_timer is not None:
            if self._core_timer.when() <= when:
                return  # fires early, which is harmless, and is armed again then
            self._core_timer.cancel()
        self._core_timer = self._loop.call_at(when, self._guarded, self._on_core_timer)

    def _on_report(self) -> None:
        if self._report is not None:
            delay_s = self._report.tick()
            self._report_timer = self._loop.call_later(delay_s, self._guarded, self._on_report)

    # -- turns

    def _on_turn(self) -> None:
        self._next_turn = None
        now = self._last_turn = self._loop.time()
        ended = self._end_one_abandoned() or self._end_one_overdue(now)
        if not self._start_one(now) and not ended:
            self._close_one_idle(now)
        self._arm_turn()

    def _arm_turn(self) -> None:
        when = self._next_work()
        if when is None:
            return
        when = max(when, self._last_turn + self._options.turn_gap_s)
        if self._next_turn is not None:
            if self._next_turn.when() <= when:
                return
            self._next_turn.cancel()
        self._next_turn = self._loop.call_at(when, self._guarded, self._on_turn)

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
            if attempt.due <= now - LATE_S and not attempt.had_grace:
                # this loop was held up, not the peer: its answer may be waiting in the socket
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
        attempt = Attempt(command, now=now, connect_s=options.connect_timeout_s, total_s=total_s)
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
        fact = await self._fact_of(attempt)
        attempt.task = None  # else task, its context and attempt keep each other until the next collection
        self._exchange.on_end(attempt)
        self._attempts.pop(attempt.command.ticket, None)
        self._queue.on_end(attempt.command.addr)
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
            if attempt.ended is not Ended.TIMED_OUT:
                return None
            if attempt.refusal is None:
                return partial(machine.on_error, ticket, "timeout", attempt.timeout_text())
            answer = attempt.refusal
        except Exception as exc:  # noqa: BLE001  (a bug met by one request must not end the others)
            return partial(machine.on_error, ticket, "other", _bug_text(exc))
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
        try:
            step()
        except BaseException as exc:  # noqa: BLE001  (asyncio would log even a Rust panic, and go on, deaf)
            if not self._finished.done():
                self._finished.set_exception(exc)

    async def _end_all(self) -> None:
        for timer in (self._next_turn, self._core_timer, self._report_timer):
            if timer is not None:
                timer.cancel()
        tasks = [attempt.task for attempt in self._attempts.values() if attempt.task is not None]
        for task in tasks:
            task.cancel()
            await asyncio.sleep(0)  # one at a time, as the scheduler may still run beside this
        if tasks:
            await asyncio.wait(tasks, timeout=END_S)
        await self._exchange.close()


def _bug_text(exc: Exception) -> str:
    return f"{exc!r:.200}"


BATCH = 64
SHORTEST_TIMER_S = 0.001
LATE_S = 0.1
GRACE_S = 0.25
END_S = 1.0
