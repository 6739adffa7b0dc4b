"""Host name look-ups that can hang without holding anything up, the interpreter's exit included.

`getaddrinfo` blocks for as long as the system's resolver likes (10 s and more when a name server is silent)
and cannot be interrupted. asyncio's default executor has non-daemon threads, which the interpreter joins at
exit; these are daemons, bounded, and end when idle.
"""

from __future__ import annotations

import asyncio
import math
import queue
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from aiohttp.abc import AbstractResolver, ResolveResult

__all__ = ["ForbiddenAddress", "Names"]


class ForbiddenAddress(OSError):
    """A name resolved to an IP address that may not be dialled; the text names both."""


class Names(AbstractResolver):
    """aiohttp's resolver interface over daemon threads; one per event loop, for all of its connections.

    A name is looked up once at a time, whoever asks and for whatever port, and the result is used for `TTL_S`
    seconds. So a look-up that hangs holds one thread, and `max_threads` of them have to hang before another
    name waits; one that nobody asked for within the last `max_wait_s` when a thread is free is given up. What is
    returned are numbers: those that `allows` was asked about are those that are dialled.
    """

    def __init__(
        self, *, max_wait_s: float, max_threads: int = 128, allows: Callable[[str], bool] | None = None
    ) -> None:
        self._max_wait_s = max_wait_s
        self._max_threads = max_threads
        self._allows = allows
        self._known: OrderedDict[_Question, tuple[float, list[_Found]]] = OrderedDict()
        self._asking: dict[_Question, _Job] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of `host`, in the order that the system prefers.

        Raises OSError if there are none, or none could be found in time; ForbiddenAddress if one of them may not be
        dialled, as then whoever answers for the name is not to be trusted with the others.
        """
        found = await self._found(_Question(host, family))
        if self._allows is not None:
            for _, ip, _ in found:
                if not self._allows(ip):
                    raise ForbiddenAddress(f"host {host} resolves to {ip}, which is not in allowed_hosts")
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(hostname=host, host=ip, port=port, family=family, proto=proto, flags=numeric)
            for family, ip, proto in found
        ]

    async def close(self) -> None:
        """Let the threads end; those inside a look-up end after it, if the process lives that long."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)

    async def _found(self, question: _Question) -> list[_Found]:
        until, known = self._known.get(question, (0.0, []))
        if time.monotonic() < until:
            return known
        job = self._asking.get(question)
        if job is None:
            job = self._asking[question] = _Job(question)
            self._jobs.put(job)
            self._have_a_thread()
        job.wanted_until = time.monotonic() + self._max_wait_s
        # Shielded: who gives up waiting does not take the answer from the others.
        outcome = await asyncio.shield(job.answer)
        if isinstance(outcome, OSError):
            # A copy for each who waits: one exception raised in many places holds all their frames.
            raise type(outcome)(*outcome.args)
        return outcome

    def _on_outcome(self, job: _Job, outcome: _Outcome) -> None:
        question = job.question
        del self._asking[question]
        self._known.pop(question, None)
        if not isinstance(outcome, OSError):
            self._known[question] = (time.monotonic() + TTL_S, outcome)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        # Not as an exception, which asyncio would log when nobody waits any more.
        job.answer.set_result(outcome)

    def _have_a_thread(self) -> None:
        with self._lock:
            if self._idle >= self._jobs.qsize() or self._threads >= self._max_threads:
                return
            self._threads += 1
        threading.Thread(target=self._work, name="disagg-names", daemon=True).start()

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                outcome: _Outcome = _look_up(job, now=time.monotonic())
            except OSError as exc:
                outcome = exc.with_traceback(None)
            except UnicodeError:
                # the idna codec's way of saying that a label is empty or too long
                outcome = socket.gaierror(socket.EAI_NONAME, f"not a host name: {job.question.host!r}")
            try:
                job.loop.call_soon_threadsafe(self._on_outcome, job, outcome)
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


class _Question(NamedTuple):
    host: str
    family: socket.AddressFamily


class _Found(NamedTuple):
    family: socket.AddressFamily
    ip: str
    proto: int


_Outcome: TypeAlias = list[_Found] | OSError
_SockAddr: TypeAlias = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


class _Job:
    """One look-up, whoever waits for it; made on the loop's thread, and given back to it."""

    __slots__ = ("answer", "loop", "question", "wanted_until")

    def __init__(self, question: _Question) -> None:
        self.question = question
        self.loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[_Outcome] = self.loop.create_future()
        self.wanted_until = math.inf


def _look_up(job: _Job, *, now: float) -> list[_Found]:
    if now > job.wanted_until:
        raise socket.gaierror(socket.EAI_AGAIN, "all look-up threads were busy for too long")
    found = socket.getaddrinfo(
        job.question.host, None, family=job.question.family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
    )
    return [_Found(family, _numeric_host(sockaddr), proto) for family, _, proto, _, sockaddr in found]


def _numeric_host(sockaddr: _SockAddr) -> str:
    """Return the address, with its zone where it has one (link-local IPv6)."""
    if len(sockaddr) == 4 and sockaddr[3]:
        flags = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
        return socket.getnameinfo(sockaddr, flags)[0]
    return str(sockaddr[0])


IDLE_S = 10.0
TTL_S = 10.0
MAX_KNOWN = 1024
