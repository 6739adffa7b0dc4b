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

__all__ = ["ForbiddenAddress", "Names", "Place", "literal"]


_SockAddr: TypeAlias = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


class ForbiddenAddress(OSError):
    """A name resolved to an IP address that may not be dialled; the text names both."""


class Place(NamedTuple):
    """Where to connect to: a family, and its form of an address and a port."""

    family: socket.AddressFamily
    sockaddr: _SockAddr


def literal(host: str, port: int) -> Place | None:
    """The place that an IP address is, or None for a name.

    Four numbers with dots between, and nothing that the system would also take for them ("127.1", "0x7f.1"): what is
    checked must be what is dialled.
    """
    if ":" not in host:
        try:
            socket.inet_pton(socket.AF_INET, host)
        except OSError:
            return None
        return Place(socket.AF_INET, (host, port))
    ip, _, zone = host.partition("%")
    scope = 0 if not zone else int(zone) if zone.isdigit() else socket.if_nametoindex(zone)
    return Place(socket.AF_INET6, (ip, port, 0, scope))


class Names:
    """Host names looked up by daemon threads; one per event loop, for all of its connections.

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
        self._known: OrderedDict[str, tuple[float, list[Place]]] = OrderedDict()
        self._asking: dict[str, _Job] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0

    async def resolve(self, host: str, port: int) -> list[Place]:
        """Return the addresses of `host`, in the order that the system prefers.

        Raises OSError if there are none, or none could be found in time; ForbiddenAddress if one of them may not be
        dialled, as then whoever answers for the name is not to be trusted with the others.
        """
        found = await self._found(host)
        if self._allows is not None:
            for ip in (_numeric_host(sockaddr) for _, sockaddr in found):
                if not self._allows(ip):
                    raise ForbiddenAddress(f"host {host} resolves to {ip}, which is not in allowed_hosts")
        return [Place(family, (sockaddr[0], port, *sockaddr[2:])) for family, sockaddr in found]

    async def close(self) -> None:
        """Let the threads end; those inside a look-up end after it, if the process lives that long."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)

    async def _found(self, host: str) -> list[Place]:
        until, known = self._known.get(host, (0.0, []))
        if time.monotonic() < until:
            return known
        job = self._asking.get(host)
        if job is None:
            job = self._asking[host] = _Job(host)
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
        host = job.host
        del self._asking[host]
        self._known.pop(host, None)
        if not isinstance(outcome, OSError):
            self._known[host] = (time.monotonic() + TTL_S, outcome)
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
                outcome = socket.gaierror(socket.EAI_NONAME, f"not a host name: {job.host!r}")
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


_Outcome: TypeAlias = list[Place] | OSError


class _Job:
    """One look-up, whoever waits for it; made on the loop's thread, and given back to it."""

    __slots__ = ("answer", "host", "loop", "wanted_until")

    def __init__(self, host: str) -> None:
        self.host = host
        self.loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[_Outcome] = self.loop.create_future()
        self.wanted_until = math.inf


def _look_up(job: _Job, *, now: float) -> list[Place]:
    if now > job.wanted_until:
        raise socket.gaierror(socket.EAI_AGAIN, "all look-up threads were busy for too long")
    if job.host.rpartition(".")[2].isdigit():  # no name, and an address in a form that is not one of ours
        raise socket.gaierror(socket.EAI_NONAME, f"not a host name: {job.host!r}")
    found = socket.getaddrinfo(job.host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    return [Place(family, sockaddr) for family, _, _, _, sockaddr in found]


def _numeric_host(sockaddr: _SockAddr) -> str:
    """Return the address, with its zone where it has one (link-local IPv6)."""
    if len(sockaddr) == 4 and sockaddr[3]:
        flags = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
        return socket.getnameinfo(sockaddr, flags)[0]
    return str(sockaddr[0])


IDLE_S = 10.0
TTL_S = 10.0
MAX_KNOWN = 1024
