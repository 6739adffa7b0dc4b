"""Progress while a run lasts: one line that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from typing import TextIO

__all__ = ["Counts", "Progress"]

# How often a line is drawn: often enough to look alive on a terminal, seldom enough for a log.
TERMINAL_S = 0.2
PLAIN_S = 2.0
BAR = 16


@dataclass(frozen=True, slots=True)
class Counts:
    """What is shown. `seconds` since the start; `planned` arrivals in all."""

    seconds: float
    planned: int
    arrived: int
    routed: int
    failed: int
    worst_cycle_ms: float

    def line(self) -> str:
        """Put the counts in words."""
        pending = self.arrived - self.routed - self.failed
        return (
            f"{self.seconds:5.1f} s  arrived {self.arrived}/{self.planned}  routed {self.routed}  "
            f"failed {self.failed}  pending {pending}  worst cycle {self.worst_cycle_ms:.1f} ms"
        )

    def bar(self) -> str:
        """Draw how much of the arrivals came."""
        full = BAR * self.arrived // max(1, self.planned)
        return "[" + "#" * full + "." * (BAR - full) + "]"


class Progress:
    """Writes to `stream`; None shows nothing."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._terminal = stream is not None and stream.isatty()
        self._next = 0.0
        self._drawn = False

    def show(self, counts: Counts) -> None:
        """Draw, if it is time again."""
        now = time.monotonic()
        if self._stream is None or now < self._next:
            return
        self._next = now + (TERMINAL_S if self._terminal else PLAIN_S)
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            text = f"{counts.bar()} {counts.line()}"[:width]
            self._stream.write(f"\r\x1b[K{text}")
            self._drawn = True
        else:
            self._stream.write(counts.line() + "\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        """Write a line of its own."""
        if self._stream is not None:
            self.clear()
            self._stream.write(text + "\n")
            self._stream.flush()

    def clear(self) -> None:
        """Take the drawn line away, for what comes next."""
        if self._stream is not None and self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False
