"""The starter for asyncio engines: the loop that runs already, and no thread."""

from __future__ import annotations

import contextvars
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from disagg.transport.starter import Starter, reason_of

if TYPE_CHECKING:
    import asyncio

    from disagg.transport.options import Machine, Report, TransportOptions

__all__ = ["LoopTransport"]


class LoopTransport(Starter):
    """Runs the driver as a task of `loop`, which may be any loop with `add_reader`.

    Requests stand still while the loop does not run. When it is closed, or the task is cancelled by somebody
    else, the driver has died.
    """

    def __init__(
        self,
        machine: Machine,
        options: TransportOptions,
        loop: asyncio.AbstractEventLoop,
        report: Report | None = None,
    ) -> None:
        super().__init__(machine, options, report)
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the task, on the loop's own thread. Raises RuntimeError elsewhere, and see `Starter.start`."""
        if self._stop_wanted or self._task is not None:
            raise RuntimeError("the transport was stopped" if self._stop_wanted else "the transport was started")
        if not self._is_running_here():
            raise RuntimeError("event_loop must be the loop that runs in this thread, where its Resolver must be made")
        # Not in the maker's context: what its variables hold would live as long as the task.
        trouble = contextvars.Context().run(self._start_task)
        if trouble is not None:
            raise RuntimeError(f"the transport did not start: {reason_of(trouble)}")

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End the task, see `Starter.stop`; waits for a running loop of another thread only."""
        if os.getpid() != self._pid or self._task is None:
            self._stop_wanted = True
            return True
        self._stop_wanted = True
        with suppress(RuntimeError):  # the loop is closed, and with it the driver has ended
            # On the loop's own thread, too: a finalizer may be here in the midst of the driver's work.
            self._loop.call_soon_threadsafe(self._stop_driver)
        if not self._is_running_here() and self._loop.is_running():
            self._ended.wait(timeout_s)
        return self._ended.is_set()

    async def astop(self, timeout_s: float = 2.0) -> bool:
        """End the task and wait for it, on whatever loop."""
        import asyncio  # noqa: PLC0415  (`import disagg` must not import asyncio)

        if self._task is None or not self._is_running_here():
            return await super().astop(timeout_s)
        self.stop()
        await asyncio.wait([self._task], timeout=timeout_s)
        return self._ended.is_set()

    def is_alive(self) -> bool:
        """Whether requests are being worked on, in this process; not while the loop does not run."""
        return self._is_started() and self._loop.is_running()

    def trouble(self) -> str | None:
        """Return why requests are not being worked on, or None if they are."""
        if self._is_started() and not self._loop.is_running():
            return "the event loop is not running"
        return super().trouble()

    def _is_started(self) -> bool:
        return os.getpid() == self._pid and self._task is not None and not self._ended.is_set()

    def _is_running_here(self) -> bool:
        import asyncio  # noqa: PLC0415

        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _start_task(self) -> BaseException | None:
        from disagg.transport.driver import Driver  # noqa: PLC0415

        self._driver = Driver(self._machine, self._options, self._report, gated=True)
        trouble = self._driver.begin(self._on_reader_gone)
        self._task = self._loop.create_task(self._driver.run(), name="disagg-transport")
        self._task.add_done_callback(self._on_task_done)
        return trouble

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        # Somebody who cancels all tasks may meet one that is ending because of a bug.
        cause = None if self._driver is None else self._driver.failure()
        if cause is None and not task.cancelled():
            cause = task.exception()
        self._on_driver_gone(CANCELLED if cause is None else reason_of(cause))

    def _on_reader_gone(self) -> None:
        """Take in that the loop let go of the bell's reader: nothing else says that it was closed."""
        if self._loop.is_closed():
            self._on_driver_gone("the event loop was closed")

    def _on_driver_gone(self, reason: str) -> None:
        if os.getpid() != self._pid or self._ended.is_set() or self._driver is None:
            return
        try:
            self._on_end(None if self._stop_wanted else reason)
        finally:
            self._ended.set()
            self._driver.end_now()  # a task that was cancelled before its first turn has ended nothing


CANCELLED = "the network's task was cancelled, as asyncio.run does with all tasks when it ends"
