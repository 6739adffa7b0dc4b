"""A selector that keeps an event loop's work in short slices, with real pauses between them.

The loop shares the interpreter lock with the engine's scheduler. Releasing the lock for an instant does not
hand it over (the releaser takes it back before the waiter has woken), so a burst of work, say 256 answers or
refusals that arrive together, is one long hold to the thread beside it, broken only by the 5 ms switch
interval. Two bounds prevent that: few events per turn of the loop, and a sleep once a slice of processor time
is used up. Both apply to whatever makes the work: starts, answers, refusals, time-outs.
"""

from __future__ import annotations

import selectors
import time
from collections import deque

__all__ = ["PoliteSelector"]


class PoliteSelector(selectors.DefaultSelector):
    """The platform's best selector, with bounded turns; for `asyncio.SelectorEventLoop(PoliteSelector())`.

    `longest_slice_s` is the most processor time that one turn of the loop took so far, in seconds; only the
    loop's thread may use it as a selector, any thread may read the number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.longest_slice_s = 0.0
        self._backlog: deque[tuple[selectors.SelectorKey, int]] = deque()
        self._turn_began = time.thread_time()
        self._slice_began = self._turn_began

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events like any selector, but give out at most EVENTS_PER_TURN of them at a time."""
        self._pause_after_slice()
        if not self._backlog:
            self._backlog.extend(super().select(self._slept_through(timeout)))
        batch = self._take_batch()
        self._turn_began = time.thread_time()
        return batch

    def _pause_after_slice(self) -> None:
        now = time.thread_time()
        self.longest_slice_s = max(self.longest_slice_s, now - self._turn_began)
        if now - self._slice_began >= SLICE_S:
            time.sleep(PAUSE_S)
            self._slice_began = time.thread_time()

    def _slept_through(self, timeout: float | None) -> float | None:
        """Sleep through a wait that epoll, whose unit is the millisecond, would round up; return the rest."""
        if timeout is None or not 0.0 < timeout < EPOLL_UNIT_S:
            return timeout
        time.sleep(timeout)
        return 0.0

    def _take_batch(self) -> list[tuple[selectors.SelectorKey, int]]:
        registered = self.get_map()
        batch: list[tuple[selectors.SelectorKey, int]] = []
        while self._backlog and len(batch) < EVENTS_PER_TURN:
            key, mask = self._backlog.popleft()
            # a key that was changed or closed since is stale; what it is ready for is reported again
            if registered.get(key.fd) is key:
                batch.append((key, mask))
        return batch


# One request's start is about one slice; a sleep of 0.2 ms is enough for a waiting thread to take the lock.
# With two events a turn the longest turn is about 1 ms while 256 peers are silent (benches/README.md).
SLICE_S = 0.00025
PAUSE_S = 0.0002
EPOLL_UNIT_S = 0.001
EVENTS_PER_TURN = 2
