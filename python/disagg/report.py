"""What a resolver's network thread tells people now and then: log lines about peers, and metrics."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from disagg.peer_log import PeerLog, emit
from disagg.printable import printable

if TYPE_CHECKING:
    from disagg import _core
    from disagg.metrics import MetricsPush

__all__ = ["Report"]


class Report:
    """Called by the network thread now and then and at its end; never raises, whatever handlers and registries do."""

    def __init__(self, driver: _core.Driver, metrics: MetricsPush | None) -> None:
        self._log = PeerLog(driver)
        self._metrics = metrics
        self._next_push = time.monotonic() + PUSH_S

    def tick(self) -> float:
        """Tell what is new; returns in how many seconds to call again."""
        now = time.monotonic()
        if now >= self._next_push:
            self._next_push = now + PUSH_S
            self._push(is_last=False)
        has_more = self._log.write(now)
        return BACKLOG_S if has_more else max(self._next_push - now, BACKLOG_S)

    def end(self) -> None:
        """Tell what is left, and take the resolver off the gauges."""
        self._push(is_last=True)
        self._log.write_rest(time.monotonic())

    def _push(self, *, is_last: bool) -> None:
        if self._metrics is None:
            return
        try:
            if is_last:
                self._metrics.close()
            else:
                self._metrics.push()
        except BaseException as error:  # noqa: BLE001  (a registry's: a name that is taken, a full disk, anything)
            self._metrics = None
            emit(logging.ERROR, f"no more metrics: {_text(error)}", {"event": "metrics_failed"})


def _text(error: BaseException) -> str:
    try:
        return printable(f"{error!r:.200}")
    except BaseException:  # noqa: BLE001  (of its own `__repr__`)
        return type(error).__name__


PUSH_S = 1.0
BACKLOG_S = 0.1  # times the lines of one call: 100 lines a second
