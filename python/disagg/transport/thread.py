"""The starter for schedulers that are plain threads: a thread with an event loop of its own."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from disagg.transport.starter import Starter, reason_of

if TYPE_CHECKING:
    import asyncio

    from disagg.transport.options import Machine, Report, TransportOptions
    from disagg.transport.polite import PoliteSelector

__all__ = ["Transport"]


class Transport(Starter):
    """Runs the driver on a daemon thread."""

    def __init__(self, machine: Machine, options: TransportOptions, report: Report | None = None) -> None:
        super().__init__(machine, options, report)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._selector: PoliteSelector | None = None
        self._thread = threading.Thread(target=self._run, name="disagg-transport", daemon=True)

    def start(self) -> None:
        """Start the thread; returns when it watches the machine's bell. Raises RuntimeError, see `Starter.start`."""
        # In the caller's thread: the first import of asyncio takes some time, much of it with the GIL held.
        import disagg.transport.driver  # noqa: F401, PLC0415  (`import disagg` must not import asyncio)

        if self._stop_wanted:
            raise RuntimeError("the transport was stopped")
        self._thread.start()
        self._ready.wait()
        if self._death_reason is not None:
            raise RuntimeError(f"the transport did not start: {self._death_reason}")

    def stop(self, timeout_s: float = 2.0) -> bool:
        """End the thread, see `Starter.stop`."""
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

    def longest_slice_s(self) -> float:
        """Return the most processor time that one turn of the loop took so far, in seconds."""
        return 0.0 if self._selector is None else self._selector.longest_slice_s

    def _run(self) -> None:
        try:
            self._run_loop()
            reason = None if self._stop_wanted else "the event loop ended"
        except BaseException as exc:  # noqa: BLE001  (whatever it is, nothing may hang on a dead thread)
            reason = reason_of(exc)
        try:
            self._on_end(reason)
        finally:
            if reason is not None:
                self._ready.set()

    def _run_loop(self) -> None:
        import asyncio  # noqa: PLC0415

        from disagg.transport.driver import Driver  # noqa: PLC0415
        from disagg.transport.polite import PoliteSelector  # noqa: PLC0415

        async def main() -> None:
            driver = self._driver = Driver(self._machine, self._options, self._report)
            self._loop = asyncio.get_running_loop()
            if self._stop_wanted:  # asked for before there was a loop to tell
                driver.stop()
            if driver.begin() is None:
                self._ready.set()
            await driver.run()

        def new_loop() -> asyncio.AbstractEventLoop:
            self._selector = PoliteSelector()
            return asyncio.SelectorEventLoop(self._selector)

        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(main())
