"""The connections there are: which may be used again, for how long, and how many."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from disagg.transport.connection import Connection
from disagg.transport.dial import dial

if TYPE_CHECKING:
    from disagg.transport.names import Names

__all__ = ["Connections"]


class Connections:
    """Makes connections and keeps those that idle; for the loop's thread.

    A connection is used again for `max_age_s` after it was made, however often it was used meanwhile. The driver closes
    those that are too old, or over `max_idle`, one per turn (`close_one_idle`), as hundreds at once are a slice of
    several milliseconds.
    """

    def __init__(self, names: Names, *, max_age_s: float, max_idle: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._names = names
        self._max_age_s = max_age_s
        self._max_idle = max_idle
        self._open: set[Connection] = set()
        self._idle: OrderedDict[Connection, None] = OrderedDict()  # the one that idles longest first
        self._idle_at: dict[str, list[Connection]] = {}  # the one that was used last, last
        self._renewed: OrderedDict[str, float] = OrderedDict()  # the oldest mark first

    def __len__(self) -> int:
        return len(self._open)

    def idle_count(self) -> int:
        """How many of them nobody uses."""
        return len(self._idle)

    def take(self, addr: str) -> Connection | None:
        """A connection to `addr` that may be used again, or None."""
        oldest = max(self._loop.time() - self._max_age_s, self._renewed.get(addr, 0.0))
        while addr in self._idle_at:
            connection = self._idle_at[addr][-1]
            self._forget_idle(connection)
            if connection.is_usable() and connection.born > oldest:
                return connection
            connection.abort()
        return None

    async def make(self, addr: str) -> Connection:
        """A new connection. Raises OSError."""
        host, _, port = addr.rpartition(":")
        sock = await dial(self._names, host.removeprefix("[").removesuffix("]"), int(port))
        connection = Connection(addr, self._loop, self._on_lost)
        try:
            await self._loop.create_connection(lambda: connection, sock=sock)
        except BaseException:
            sock.close()
            raise
        if connection.transport is not None:
            self._open.add(connection)
        return connection

    def give_back(self, connection: Connection, *, keep: bool) -> None:
        """Take in that a request is over; its connection is closed unless it may be used again."""
        if not (keep and connection.is_usable()):
            connection.abort()
            return
        self._idle[connection] = None
        self._idle_at.setdefault(connection.addr, []).append(connection)

    def renew(self, addr: str) -> None:
        """Use none of the connections to `addr` again that there are."""
        now = self._loop.time()
        self._renewed[addr] = now
        self._renewed.move_to_end(addr)
        # Connections of before an older mark are too old by now. So it costs the same however many there are.
        while now - next(iter(self._renewed.values())) > self._max_age_s:
            self._renewed.popitem(last=False)

    def next_expiry(self) -> float | None:
        """Return when (in the loop's time) `close_one_idle` has something to do, or None."""
        if not self._idle:
            return None
        if len(self._idle) > self._max_idle:
            return 0.0
        # The one that idles longest may be younger than another; that one is closed max_age_s after its
        # last use at the latest, and `take` refuses it from its own age on.
        return next(iter(self._idle)).born + self._max_age_s

    def close_one_idle(self) -> None:
        """Close the connection that idles longest."""
        connection = next(iter(self._idle))
        self._forget_idle(connection)
        connection.abort()

    def close(self) -> None:
        """Close all of them."""
        if self._loop.is_closed():  # a transport of a closed loop can do nothing any more
            return
        for connection in list(self._open):
            connection.abort()

    def _on_lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._forget_idle(connection)

    def _forget_idle(self, connection: Connection) -> None:
        del self._idle[connection]
        idle = self._idle_at[connection.addr]
        idle.remove(connection)
        if not idle:
            del self._idle_at[connection.addr]
