"""What starts a driver, and hears of its end: the part that the two starters share."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disagg.transport.driver import Driver
    from disagg.transport.options import Machine, Report, TransportOptions

__all__ = ["Starter"]


class Starter(ABC):
    """Has one machine driven from `start` to `stop`; a stopped one is not started again.

    If the driver ends for any reason but `stop`, the machine is told with `fail_all`, `is_alive` is False and
    `death_reason` says why. A forked child has no driver: `is_alive` is False there, and `stop` touches nothing
    that is shared with the parent.
    """

    def __init__(self, machine: Machine, options: TransportOptions, report: Report | None = None) -> None:
        self._machine = machine
        self._options = options
        self._report = report
        self._pid = os.getpid()
        self._stop_wanted = False
        self._death_reason: str | None = None
        self._driver: Driver | None = None

    @abstractmethod
    def start(self) -> None:
        """Have the driver run, and return when it watches the machine's bell.

        Raises RuntimeError if it was started or stopped before, or cannot run (no descriptors left, for one).
        """

    @abstractmethod
    def stop(self, timeout_s: float = 2.0) -> bool:
        """End the driver, abandoning all requests; waits up to `timeout_s` and returns whether it has ended.

        Idempotent; any thread may call it, at exit and in a finalizer too. Called on the driver's own thread it
        does not wait.
        """

    async def astop(self, timeout_s: float = 2.0) -> bool:
        """Do what `stop` does, without holding up the running loop."""
        import asyncio  # noqa: PLC0415  (`import disagg` must not import asyncio)

        return await asyncio.to_thread(self.stop, timeout_s)

    @abstractmethod
    def is_alive(self) -> bool:
        """Whether requests are being worked on, in this process."""

    def death_reason(self) -> str | None:
        """Return why the driver ended by itself, or None."""
        return self._death_reason

    def since_progress_s(self) -> float:
        """Return how long ago the loop last got to work of ours, in seconds."""
        return 0.0 if self._driver is None else time.monotonic() - self._driver.progressed_at

    def trouble(self) -> str | None:
        """Return why requests are not being worked on, or None if they are."""
        if self.is_alive():
            return None
        return self._death_reason or ("stopped" if self._stop_wanted else "not started")

    def _on_end(self, reason: str | None) -> None:
        """Take in that the driver has ended: because `stop` wanted it (None), or by itself and why."""
        try:
            if reason is not None:
                self._death_reason = reason
                self._machine.fail_all(reason)
        finally:
            if self._report is not None:
                self._report.end()

    def _stop_driver(self) -> None:
        if self._driver is not None:
            self._driver.stop()


def reason_of(exc: BaseException) -> str:
    """Say what ended a driver."""
    return f"{type(exc).__name__}: {exc}"
