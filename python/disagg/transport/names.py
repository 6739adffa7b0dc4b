"""Host name look-ups that can hang without holding anything up, the interpreter's exit included.

`getaddrinfo` blocks for as long as the system's resolver likes (10 s and more when a name server is silent)
and cannot be interrupted. asyncio's default executor has non-daemon threads, which the interpreter joins at
exit; these are daemons, few, and end when idle.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time
from typing import NamedTuple, TypeAlias

from aiohttp.abc import AbstractResolver, ResolveResult

__all__ = ["Names"]


class Names(AbstractResolver):
    """aiohttp's resolver interface over daemon threads; one per event loop.

    At most `max_threads` look-ups at a time; one that waited longer than `max_wait_s` for a thread is given
    up, as nobody waits for its result any more.
    """

    def __init__(self, *, max_wait_s: float, max_threads: int = 16) -> None:
        self._max_wait_s = max_wait_s
        self._max_threads = max_threads
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of `host`.

        Raises OSError if there are none, or none could be found in time.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[ResolveResult]] = loop.create_future()
        self._jobs.put(_Job(answer, loop, host, port, family, time.monotonic() + self._max_wait_s))
        self._have_a_thread()
        return await answer

    async def close(self) -> None:
        """Let the threads end; those inside a look-up end after it, if the process lives that long."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)

    def _have_a_thread(self) -> None:
        with self._lock:
            if self._idle >= self._jobs.qsize() or self._threads >= self._max_threads:
                return
            self._threads += 1
        threading.Thread(target=self._work, name="disagg-names", daemon=True).start()

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                found = _look_up(job, now=time.monotonic())
            except OSError as exc:
                outcome: list[ResolveResult] | OSError = exc
            except UnicodeError:
                # the idna codec's way of saying that a label is empty or too long
                outcome = socket.gaierror(socket.EAI_NONAME, f"not a host name: {job.host!r}")
            else:
                outcome = found
            try:
                job.loop.call_soon_threadsafe(_settle, job.answer, outcome)
            except RuntimeError:  # the loop was closed meanwhile
                break
        with self._lock:
            self._threads -= 1

    def _next_job(self) -> _Job | None:
        with self._lock:
            self._idle += 1
        try:
            return self._jobs.get(timeout=IDLE_S)
        except queue.Empty:
            return None
        finally:
            with self._lock:
                self._idle -= 1


_SockAddr: TypeAlias = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


class _Job(NamedTuple):
    answer: asyncio.Future[list[ResolveResult]]
    loop: asyncio.AbstractEventLoop
    host: str
    port: int
    family: socket.AddressFamily
    give_up_at: float


def _look_up(job: _Job, *, now: float) -> list[ResolveResult]:
    if now > job.give_up_at:
        raise socket.gaierror(socket.EAI_AGAIN, "all look-up threads were busy for too long")
    found = socket.getaddrinfo(
        job.host, job.port, family=job.family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
    )
    return [
        ResolveResult(
            hostname=job.host,
            host=_numeric_host(sockaddr),
            port=job.port,
            family=family,
            proto=proto,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for family, _, proto, _, sockaddr in found
    ]


def _numeric_host(sockaddr: _SockAddr) -> str:
    """Return the address, with its zone where it has one (link-local IPv6)."""
    if len(sockaddr) == 4 and sockaddr[3]:
        flags = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
        return socket.getnameinfo(sockaddr, flags)[0]
    return str(sockaddr[0])


def _settle(answer: asyncio.Future[list[ResolveResult]], outcome: list[ResolveResult] | OSError) -> None:
    if answer.done():  # cancelled
        return
    if isinstance(outcome, OSError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


IDLE_S = 10.0
