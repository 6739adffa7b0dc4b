"""Lets answers in one after another, on a loop whose selector is not ours.

`PoliteSelector` bounds what a turn of our own loop takes in. Any other loop reads whatever is readable in one
turn: 256 answers that arrive together are 256 reads, and 256 tasks woken by them in the next turn, some 10 ms each in
which nothing else of the loop runs. So a connection whose answer is awaited does not read at first. An epoll of our
own, which the loop watches as the one descriptor that it is, says which ones have something to read, and each turn of
the loop lets one of them. Only public means of transports and loops are used, so that it works on uvloop, too.
"""

from __future__ import annotations

import select
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from disagg.transport.attempt import Attempt
    from disagg.transport.connection import Connection

__all__ = ["Gate"]


class Gate:
    """Holds back the connections of attempts until it is their turn to read; for the loop's thread.

    `guarded` calls a step so that an exception in it ends the driver. Where there is no epoll, nothing is held back.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, guarded: Callable[[Callable[[], None]], None]) -> None:
        self._loop = loop
        self._guarded = guarded
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._held: dict[Connection, _Hold] = {}
        self._watched: dict[int, Connection] = {}  # by descriptor
        self._waiting: dict[Connection, None] = {}  # in order of arrival
        self._next: asyncio.Handle | None = None
        if self._epoll is not None:
            loop.add_reader(self._epoll.fileno(), guarded, self._on_readable)

    def hold(self, attempt: Attempt, protocol: Connection) -> None:
        """Keep the connection, on which this attempt's request is about to go out, from reading."""
        transport = protocol.transport
        if self._epoll is None or transport is None or transport.is_closing():
            return
        transport.pause_reading()
        fileno = transport.get_extra_info("socket").fileno()
        self._held[protocol] = _Hold(attempt, transport, fileno)
        self._watched[fileno] = protocol  # in place of a connection that was closed, and whose attempt will hear of it
        try:
            self._epoll.register(fileno, TOLD_ONCE)
        except FileExistsError:  # the same connection, which the attempt before has not let go yet
            self._epoll.modify(fileno, TOLD_ONCE)

    def let_go(self, attempt: Attempt, protocol: Connection) -> None:
        """Take in that the attempt no longer uses the connection; a later one may use it already."""
        hold = self._held.get(protocol)
        if hold is None or hold.attempt is not attempt:
            return
        del self._held[protocol]
        self._waiting.pop(protocol, None)
        if self._watched.get(hold.fileno) is protocol:
            del self._watched[hold.fileno]
            with suppress(OSError):  # it is closed, and then the system has done this
                self._unwatch(hold.fileno)
        hold.resume()

    def holds_back(self, attempt: Attempt) -> bool:
        """Whether something of this attempt's answer has come and waits for its turn."""
        protocol = attempt.held
        if protocol is None or protocol not in self._waiting:
            return False
        return self._held[protocol].attempt is attempt

    def close(self) -> None:
        """Let all connections go."""
        if self._next is not None:
            self._next.cancel()
        if self._epoll is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
        self._held.clear()
        self._watched.clear()
        self._waiting.clear()

    def _on_readable(self) -> None:
        if self._epoll is None:
            return
        for fileno, _ in self._epoll.poll(0, BATCH):  # the others in the next turn
            protocol = self._watched.get(fileno)
            if protocol is not None:
                self._waiting[protocol] = None
        if self._next is None:
            self._admit_one()

    def _admit_one(self) -> None:
        self._next = None
        if not self._waiting:
            return
        protocol = next(iter(self._waiting))
        del self._waiting[protocol]
        self._held[protocol].resume()
        if self._waiting:
            self._next = self._loop.call_soon(self._guarded, self._admit_one)

    def _unwatch(self, fileno: int) -> None:
        if self._epoll is not None:
            self._epoll.unregister(fileno)


class _Hold:
    """One connection that is held back, and for whom."""

    __slots__ = ("attempt", "fileno", "transport")

    def __init__(self, attempt: Attempt, transport: asyncio.Transport, fileno: int) -> None:
        self.attempt = attempt
        self.transport = transport
        self.fileno = fileno

    def resume(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()


TOLD_ONCE = select.EPOLLIN | select.EPOLLONESHOT if hasattr(select, "epoll") else 0
BATCH = 32
