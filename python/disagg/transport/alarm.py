"""One call at a time, at the earliest of the times that were asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["Alarm"]


class Alarm:
    """Makes one call on the loop when it is due, once per `set`; times are the loop's.

    It knows what to call while it is set only, so that it and who owns it are no cycle afterwards.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._when = 0.0  # kept here, as uvloop's handle of a call that is due already does not tell
        self._handle: asyncio.TimerHandle | None = None

    def set(self, when: float, call: Callable[[], None]) -> None:
        """Make the call at `when`, unless it is made earlier anyway."""
        if self._handle is not None:
            if self._when <= when:
                return
            self._handle.cancel()
        self._when = when
        self._handle = self._loop.call_at(when, self._on_due, call)

    def cancel(self) -> None:
        """Make no call."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _on_due(self, call: Callable[[], None]) -> None:
        self._handle = None
        call()
