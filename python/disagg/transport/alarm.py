"""One call at a time, at the earliest of the times that were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["Alarm"]


class Alarm:
    """Calls `ring` on the loop when it is due, once per `set`; times are the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._when = 0.0  # kept here, as uvloop's handle of a call that is due already does not tell
        self._handle: asyncio.TimerHandle | None = None

    def set(self, when: float) -> None:
        """Ring at `when`, unless it rings earlier anyway."""
        if self._handle is not None:
            if self._when <= when:
                return
            self._handle.cancel()
        self._when = when
        self._handle = self._loop.call_at(when, self._on_due)

    def cancel(self) -> None:
        """Do not ring."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _on_due(self) -> None:
        self._handle = None
        self._ring()
