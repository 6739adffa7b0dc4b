"""A thread with an event loop of its own that runs the driver."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from disagg.transport.driver import Driver
    from disagg.transport.options import Machine, Report, TransportOptions
    from disagg.transport.polite import PoliteSelector

__all__ = ["Transport"]


class Transport:
    """Drives one machine from a daemon thread, from `start` to `stop`; a stopped one is not started again.

    If the thread ends for any reason but `stop`, the machine is told with `fail_all`, `is_alive` is False and
    `death_reason` says why. In a forked child there is no such thread: `is_alive` is False there, and `stop`
    touches nothing that is shared with the parent.
    """

    def __init__(self, machine: Machine, options: TransportOptions, report: Report | None = None) -> None:
        self._machine = machine
        self._report = report
        self._options = options
        self._pid = os.getpid()
        self._ready = threading.Event()
        self._stop_wanted = False
        self._death_reason: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: Driver | None = None
        self._selector: PoliteSelector | None = None
        self._thread = threading.Thread(target=self._run, name="disagg-transport", daemon=True)

    def start(self) -> None:
        """Start the thread; returns when it watches the machine's bell.

        Raises RuntimeError if it was started or stopped before, or cannot run (no descriptors left, for one).
        """
        # In the caller's thread: the first import of aiohttp takes some 0.3 s, much of it with the GIL held.
        import disagg.transport.driver  # noqa: F401, PLC0415  (`import disagg` must not import asyncio)

        if self._stop_wanted:
            raise RuntimeError("the transport was stopped")
        self._thread.start()
        self._ready.wait()
        if self._death_reason is not None:
            raise RuntimeError(f"the transport did not start: {self._death_reason}")

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End the thread, abandoning all requests; waits up to `timeout_s` and returns whether it has ended.

        Idempotent; any thread may call it, at exit and in a finalizer too. Called on the transport's own
        thread (by a finalizer that happens to run there) it does not wait.
        """
        if os.getpid() != self._pid:
            return True
        self._stop_wanted = True
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the thread is about to end, or has
                loop.call_soon_threadsafe(self._stop_driver)
        if self._thread.ident is None or self._thread is threading.current_thread():
            return self._thread.ident is None
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def is_alive(self) -> bool:
        """Whether requests are being worked on, in this process."""
        return os.getpid() == self._pid and self._thread.is_alive() and self._death_reason is None

    def death_reason(self) -> str | None:
        """Return why the thread ended by itself, or None."""
        return self._death_reason

    def longest_slice_s(self) -> float:
        """Return the most processor time that one turn of the loop took so far, in seconds."""
        return 0.0 if self._selector is None else self._selector.longest_slice_s

    def _run(self) -> None:
        try:
            self._run_until_end()
        finally:
            if self._report is not None:
                self._report.end()

    def _run_until_end(self) -> None:
        try:
            self._run_loop()
            reason = None if self._stop_wanted else "the event loop ended"
        except BaseException as exc:  # noqa: BLE001  (whatever it is, nothing may hang on a dead thread)
            reason = f"{type(exc).__name__}: {exc}"
        if reason is not None:
            self._death_reason = reason
            try:
                self._machine.fail_all(reason)
            finally:
                self._ready.set()

    def _run_loop(self) -> None:
        import asyncio  # noqa: PLC0415

        from disagg.transport.driver import Driver  # noqa: PLC0415
        from disagg.transport.polite import PoliteSelector  # noqa: PLC0415

        async def main() -> None:
            self._driver = Driver(self._machine, self._options, self._report)
            self._loop = asyncio.get_running_loop()
            if self._stop_wanted:  # asked for before there was a loop to tell
                self._driver.stop()
            await self._driver.run(self._ready.set)

        def new_loop() -> asyncio.AbstractEventLoop:
            self._selector = PoliteSelector()
            return asyncio.SelectorEventLoop(self._selector)

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(main())

    def _stop_driver(self) -> None:
        if self._driver is not None:
            self._driver.stop()
