"""Log lines about peers: one for each change of state, with fields, on the logger `disagg`.

Nothing here touches logging's configuration. The core notes the changes, the network thread writes them; the
scheduler's thread never does.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from disagg.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from disagg import _core

__all__ = ["PeerLog", "emit"]


class PeerLog:
    """Writes what changes at the peers of one resolver; for one thread.

    An address gets `BURST` lines at once and one each `REFILL_S` seconds. What is over that is left out, but for the
    last one, which is written when it is the address's turn again, with the count of those before it as `suppressed`:
    so the last line about an address says how it is.
    """

    def __init__(self, driver: _core.Driver) -> None:
        self._driver = driver
        self._full_at: dict[str, float] = {}  # when an address has its whole burst again
        self._held_back: dict[str, _Change] = {}
        self._dropped = 0

    def write(self, now: float) -> bool:
        """Write at most 2 * `LINES` lines; returns whether there is more to write already.

        `now` is in seconds and never goes back. Never raises: a line that a handler chokes on is lost.
        """
        due = [addr for addr in self._held_back if self._has_turn(addr, now)]
        for addr in due[:LINES]:
            self._write_one(self._held_back.pop(addr), now)
        changes = self._driver.take_changes(LINES)
        for change in changes:
            self._write_one(change | {"suppressed": 0}, now)
        if changes:
            self._tell_dropped()
        if len(self._full_at) > MOST_IDLE:
            self._full_at = {addr: full_at for addr, full_at in self._full_at.items() if full_at > now}
        return len(changes) == LINES or len(due) > LINES

    def write_rest(self, now: float) -> None:
        """Write what is left, also what is held back."""
        while self.write(now):
            pass
        while self._held_back:
            _, change = self._held_back.popitem()
            _log(change)

    def _write_one(self, change: _Change, now: float) -> None:
        addr = change["addr"]
        earlier = self._held_back.pop(addr, None)
        if earlier is not None:
            change["suppressed"] += earlier["suppressed"] + 1
        if self._has_turn(addr, now):
            self._full_at[addr] = max(self._full_at.get(addr, now), now) + REFILL_S
            _log(change)
        else:
            self._held_back[addr] = change

    def _has_turn(self, addr: str, now: float) -> bool:
        return self._full_at.get(addr, now) - now <= (BURST - 1) * REFILL_S

    def _tell_dropped(self) -> None:
        dropped = self._driver.counters()["changes_dropped"]
        if dropped > self._dropped:
            lost = dropped - self._dropped
            emit(logging.WARNING, f"{lost} changes of peers were too many to log", {"event": "dropped", "count": lost})
            self._dropped = dropped


_Change: TypeAlias = dict[str, Any]
"""As `_core.Driver.take_changes` gives it, with `suppressed`."""


def _log(change: _Change) -> None:
    level = LEVELS[change["event"]]
    fields = change | {"reason": printable(change["text"]), "age_s": round(change["age_s"], 3)}
    del fields["text"]
    emit(level, f"{change['addr']}: {TEXTS[change['event']](fields)}", fields)


def emit(level: int, text: str, fields: dict[str, Any]) -> None:
    """Write one line with `fields` as attributes of its record; never raises."""
    with suppress(BaseException):  # a handler's or a filter's, which must not end the network's thread
        LOGGER.log(level, "%s", text, extra=fields)


def _sizes(fields: _Change) -> str:
    return ", ".join(f"{name} {size}" for name, size in fields["sizes"].items())


TEXTS: dict[str, Callable[[_Change], str]] = {
    "fetch_failed": lambda f: f"attempt {f['attempt']} of {f['budget']} failed, {f['waiting']} waiting: {f['reason']}",
    "budget_spent": lambda f: f"gave up after {f['attempt']} attempts, {f['waiting']} waiting: {f['reason']}",
    "refused": lambda f: f"refused ({f['kind']}), {f['waiting']} waiting: {f['reason']}",
    "lost": lambda f: f"{f['reason']}, {f['waiting']} waiting",
    "restarted": lambda f: f"restarted, {f['waiting']} waiting start over (epoch {f['epoch']} ended)",
    "back": lambda f: f"back: {_sizes(f)} (epoch {f['epoch']}), {f['waiting']} waiting",
    "ready": lambda f: f"ready: {_sizes(f)} (epoch {f['epoch']}), {f['waiting']} waiting",
    "unequal_tp": lambda f: f"{f['reason']}",
}
LEVELS = {
    "fetch_failed": logging.WARNING,
    "budget_spent": logging.ERROR,
    "refused": logging.ERROR,
    "lost": logging.ERROR,
    "restarted": logging.WARNING,
    "back": logging.INFO,
    "ready": logging.INFO,
    "unequal_tp": logging.WARNING,
}
LOGGER = logging.getLogger("disagg")
LOGGER.addHandler(logging.NullHandler())  # else Python itself prints warnings of a logger that nobody configured

BURST = 10
REFILL_S = 30.0
LINES = 10  # some 0.3 ms with a handler that writes to a file
MOST_IDLE = 1024
