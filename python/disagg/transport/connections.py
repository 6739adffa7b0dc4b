"""aiohttp's connection pool with the bounds that it lacks: a connection's age, and how many idle in all."""

from __future__ import annotations

from collections import OrderedDict
from contextvars import ContextVar
from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from aiohttp import ClientRequest, ClientTimeout
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

    from disagg.transport.attempt import Attempt
    from disagg.transport.names import Names

__all__ = ["CURRENT", "BoundedConnector"]

# The attempt that the running task makes; aiohttp hands nothing of ours through to its connector.
CURRENT: ContextVar[Attempt] = ContextVar("disagg_attempt")


class BoundedConnector(aiohttp.TCPConnector):
    """A TCP connector whose connections are not reused past `max_age_s`, and of which `max_idle` may idle.

    aiohttp's own keep-alive bound restarts with each use and closes all that ran out in one go, which with
    hundreds of connections is a slice of several milliseconds. Here the driver closes one per turn
    (`close_one_idle`). The connector tells the attempt what it got: a connection, reused or not.
    """

    def __init__(self, names: Names, *, max_age_s: float, max_idle: int, reuse: bool) -> None:
        super().__init__(
            limit=0,
            limit_per_host=0,
            resolver=names,
            use_dns_cache=False,  # `names` keeps what it found, for every port and both pools
            force_close=not reuse,
            # aiohttp's own clean-up then only has to drop what is closed already
            keepalive_timeout=3 * max_age_s if reuse else None,
        )
        self._max_age_s = max_age_s
        self._max_idle = max_idle
        self._born: dict[ResponseHandler, float] = {}
        self._user: dict[ResponseHandler, Attempt] = {}
        self._idle: OrderedDict[ResponseHandler, None] = OrderedDict()
        self._renewed: OrderedDict[str, float] = OrderedDict()  # the oldest mark first

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout) -> Connection:
        """Take a connection that may still be reused out of the pool, or make one."""
        attempt = CURRENT.get()
        self.on_end(attempt)  # a second try: the first connection was closed under it
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol = connection.protocol
            if protocol is None:  # pragma: no cover  (aiohttp's types allow it, its code does not)
                raise aiohttp.ClientConnectionError("connection without a protocol")
            self._idle.pop(protocol, None)
            now = self._loop.time()
            reused = protocol in self._born
            born = self._born.setdefault(protocol, now)
            too_old = now - born > self._max_age_s or born <= self._renewed.get(attempt.command.addr, 0.0)
            if not reused or not (too_old or attempt.wants_fresh):
                self._user[protocol] = attempt
                attempt.on_connected(protocol, reused=reused)
                return connection
            del self._born[protocol]
            connection.close()

    def on_end(self, attempt: Attempt) -> None:
        """Take in that an attempt no longer uses its connection, if it has one."""
        protocol = attempt.held
        # aiohttp gives a connection back with the last byte, so the next attempt may have it already
        if protocol is None or self._user.get(protocol) is not attempt:
            return
        del self._user[protocol]
        if protocol.is_connected():
            self._idle[protocol] = None
        else:
            del self._born[protocol]

    def renew(self, addr: str) -> None:
        """Reuse none of the connections to `addr` that there are."""
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
        # last use at the latest, and `connect` refuses it from its own age on.
        return self._born[next(iter(self._idle))] + self._max_age_s

    def close_one_idle(self) -> None:
        """Close the connection that idles longest."""
        protocol, _ = self._idle.popitem(last=False)
        del self._born[protocol]
        protocol.close()
