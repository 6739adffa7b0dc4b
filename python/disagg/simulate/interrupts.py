"""Ctrl-C and SIGTERM: the first one ends a run early but in order, the second one at once."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupts"]


class Interrupts:
    """While the context lasts, `at_ns` tells when the first signal came (monotonic ns), or None.

    A signal raises KeyboardInterrupt when it is the second, or when nothing has been `armed` yet: before the
    run has begun there is nothing to report.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.at_ns: int | None = None
        self.name = ""
        self.armed = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.at_ns is not None or not self.armed:
            raise KeyboardInterrupt
        self.at_ns = time.monotonic_ns()
        self.name = signal.Signals(number).name
