"""One TCP connection to a peer, for one request after another."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from disagg.transport.reply import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from disagg.transport.attempt import Attempt
    from disagg.transport.reply import Outcome

__all__ = ["Connection"]


class Connection(asyncio.Protocol):
    """Sends a request and waits for its answer; for the loop's thread.

    `born` is when it was made, in the loop's time. `on_lost` is called when it has ended, with it.
    """

    __slots__ = ("_is_spoilt", "_loop", "_on_lost", "_reply", "addr", "born", "transport")

    def __init__(self, addr: str, loop: asyncio.AbstractEventLoop, on_lost: Callable[[Connection], None]) -> None:
        self.addr = addr
        self.born = loop.time()
        self.transport: asyncio.Transport | None = None
        self._loop = loop
        self._on_lost = on_lost
        self._reply: Reply | None = None
        self._is_spoilt = False

    def is_usable(self) -> bool:
        """Whether another request can be sent."""
        return not self._is_spoilt and self.transport is not None and not self.transport.is_closing()

    async def ask(self, request: bytes, attempt: Attempt) -> Outcome:
        """Send a request and return what became of it; cancelled, it leaves the connection unusable."""
        outcome: asyncio.Future[Outcome] = self._loop.create_future()
        reply = self._reply = Reply(attempt, outcome)
        self._is_spoilt = True  # until its answer is complete
        if self.transport is None or self.transport.is_closing():
            reply.on_end(None)
        else:
            self.transport.write(request)
        ended = await outcome
        self._is_spoilt = not reply.is_complete
        self._reply = None
        return ended

    def abort(self) -> None:
        """Close it at once, whatever is on its way."""
        self._reply = None
        if self.transport is not None:
            self.transport.abort()

    # -- the loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take in that it is connected."""
        self.transport = transport  # type: ignore[assignment]  # of a stream: it can write

    def data_received(self, data: bytes) -> None:
        """Take in what the peer sent."""
        reply = self._reply
        if reply is None or reply.outcome.done():
            # Nobody asked for it, so nobody can tell what the next answer would be to.
            self._is_spoilt = True
            if reply is not None:
                reply.is_complete = False
            self.abort()
            return
        reply.feed(data)
        if reply.outcome.done() and not reply.is_complete:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Take in that it has ended."""
        reply, self._reply, self.transport = self._reply, None, None
        if reply is not None:
            reply.on_end(exc)
        self._on_lost(self)
