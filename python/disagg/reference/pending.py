"""Pending requests and retry bookkeeping in plain Python: the specification of `_core.Resolver`.

Every rule is written for reading, not for speed: timers are found by looking at everything. The rules of one
peer are in `peers.py`, the state in `model.py`. Time is set with `set_time_ns`; nothing here reads a clock.
"""

from __future__ import annotations

from typing import Any

from disagg.reference.addresses import FAKE_HOST, canonical_address, host_of
from disagg.reference.answers import FORBIDDEN, classify, classify_error
from disagg.reference.explain import Explanations
from disagg.reference.hosts import HostList
from disagg.reference.mapping import RankMapping
from disagg.reference.model import (
    SECOND,
    Headers,
    Identity,
    InFlight,
    Options,
    Peer,
    Policy,
    Request,
    SchedulerClock,
    within_limits,
)
from disagg.reference.rules import STATUS
from disagg.values import Event, Failure, Route, Step

__all__ = ["ReferenceResolver"]

MAX_ROOM = 2**63 - 1
TOMBSTONES = 65_536
TOMBSTONE_TTL = 600 * SECOND
MAX_REASON = 1024


class ReferenceResolver(Explanations):
    """The same machine as `_core.Resolver` with the same driving functions, for comparing the two.

    `decode` has the attributes of `disagg.DecodeRank`. Raises what the core raises.
    """

    def __init__(
        self, decode: Any, policy: Policy | None = None, options: Options | None = None, seed: int = 0
    ) -> None:
        self.decode = decode
        self.policy = policy or Policy()
        self.options = options or Options()
        hosts, rank_hosts = self.options.allowed_hosts, self.options.allowed_rank_hosts
        self.hosts = None if hosts is None else HostList(hosts)
        self.rank_hosts = None if rank_hosts is None else HostList(rank_hosts, "allowed_rank_hosts")
        self.seed = seed
        self.now = 0
        self.clock = SchedulerClock(0)
        self.peers: dict[str, Peer] = {}
        self.requests: list[Request] = []  # in order of arrival
        self.decided: list[Request] = []  # in order of decision
        self.events: list[Event] = []
        self.commands: list[tuple[int, str, str, str, str, bytes | None, int, int]] = []
        self.flights: dict[int, tuple[Peer, InFlight]] = {}
        self.tombstones: dict[int, tuple[str, int, int]] = {}
        self.routed_rooms: dict[int, str] = {}
        self.last_seq = 0
        self.last_ticket = 0
        self.last_step = 0
        self.attempts = 0
        self.attempts_failed = 0
        self.dead: tuple[str, str] | None = None
        self.given: list[list[tuple[object, int]]] = [[], []]

    def set_time_ns(self, now: int) -> None:
        """Set the time; it never goes back."""
        self.now = max(self.now, now)

    # The scheduler's side.

    def add(self, obj: Any, addr: str, room: int, *, dp_rank: int | None = None) -> Route | None:
        """Place a request: its Route if everything is cached, else None and the end comes out of `poll`."""
        addr = canonical_address(addr, self.options.default_port)
        self._check_int(room, "room", MAX_ROOM)
        if dp_rank is not None:
            self._check_int(dp_rank, "dp_rank", MAX_ROOM)
        if any(request.obj is obj for request in self.requests):
            raise ValueError("request is pending already")
        if host_of(addr) == FAKE_HOST:
            self.given[0].append((obj, 2))
            return Route(addr, 0, None, (), None, 0, fake=True)
        self.last_seq += 1
        request = Request(obj, addr, room, dp_rank, self.last_seq, self.clock.read(self.now))
        end = self._known_end(request)
        self.requests.append(request)
        if end is not None:
            self._end(request, end)
            return None
        request.owns_room = True
        peer = self.peers[addr]
        peer.last_add = self.now
        if peer.state == "ready":
            self._place(peer, request)
            if isinstance(request.end, Route):
                self.requests.remove(request)
                self.decided.remove(request)
                self._track(request, request.end)
                self.given[0].append((obj, 2))
                return request.end
            self._pump(peer)
        elif peer.state == "unknown":
            self._fetch(peer, "attempt")
        return None

    def _known_end(self, request: Request) -> Failure | None:
        if self.dead is not None:
            return self._failure(self.dead[0], request.addr, self.dead[1])
        told = self.tombstones.get(request.room)
        if told is not None and told[2] > self.now:
            del self.tombstones[request.room]
            return Failure("told", told[0], told[1], request.addr, 0)
        other = next((r.addr for r in self.requests if r.owns_room and r.room == request.room), None)
        other = other or self.routed_rooms.get(request.room)
        if other is not None:
            return self._failure(
                "duplicate_room", request.addr, f"room {request.room} is held by a request to {other} already"
            )
        peer = self.peers.get(request.addr)
        if peer is None:
            host = host_of(request.addr)
            if self.hosts is not None and self.hosts.verdict(host) == "refused":
                return self._failure("not_allowed", request.addr, f"host {host} is not in allowed_hosts")
            if len(self.peers) >= self.options.max_addresses and not self._evict():
                return self._failure(
                    "too_many_addresses",
                    request.addr,
                    f"{self.options.max_addresses} addresses are in use already",
                )
            self.peers[request.addr] = Peer(request.addr, self.now)
            return None
        peer.last_add = self.now
        return peer.mark if peer.state == "marked" or peer.spent_at is not None else None

    def _evict(self) -> bool:
        idle = [p for p in self.peers.values() if p.state != "ready" and not self._pending(p)]
        if not idle:
            return False
        self._forget(min(idle, key=lambda peer: (peer.last_add, peer.addr)))
        return True

    def poll(self, limit: int = 4096) -> Step:
        """Take what was decided; call once per scheduling cycle."""
        self.clock.on_poll(self.now)
        for peer in list(self.peers.values()):
            if peer.deferred:
                peer.deferred = False
                self._settle(peer)
                if peer.state == "waiting" and not self._pending(peer):
                    self._mark_down(peer)
            if peer.waits_for_poll and peer.state == "waiting":
                self._leave_waiting(peer)
        self.given = [[], self.given[0]]
        taken, self.decided = self.decided[:limit], self.decided[limit:]
        events, self.events = self.events, []
        if not taken and not events:
            return Step(0)
        self.last_step += 1
        taken.sort(key=lambda request: request.seq)
        for request in taken:
            self.requests.remove(request)
            self.given[0].append((request.obj, 2 if isinstance(request.end, Route) else 0))
            if isinstance(request.end, Route):
                self._track(request, request.end)
        return Step(
            self.last_step,
            tuple((r.obj, r.end) for r in taken if isinstance(r.end, Route)),
            tuple((r.obj, r.end) for r in taken if isinstance(r.end, Failure)),
            tuple(events),
            bool(self.decided),
        )

    def _track(self, request: Request, route: Route) -> None:
        if self.options.track_rooms:
            self.routed_rooms[request.room] = route.addr

    def discard(self, obj: Any) -> None:
        """Forget a request in whatever state it is; unknown ones are no error."""
        for request in self.requests:
            if request.obj is obj:
                self.requests.remove(request)
                if request.end is not None:
                    self.decided.remove(request)
                return

    def discard_all(self) -> None:
        """Forget every request."""
        self.requests, self.decided = [], []

    def release(self, room: int) -> None:
        """With track_rooms: the routed request of `room` is over."""
        self.routed_rooms.pop(room, None)

    def fail_room(self, room: int, reason: str, http_status: int) -> bool:
        """Fail the request of `room`, or the one that will come; True when one was pending."""
        for request in self.requests:
            if request.owns_room and request.room == room:
                if request.end is not None:
                    return False
                self._end(request, Failure("told", reason[:MAX_REASON], http_status, request.addr, 0))
                return True
        if room in self.routed_rooms:
            return False
        self.tombstones = {k: v for k, v in self.tombstones.items() if v[2] > self.now}
        if room not in self.tombstones:
            if len(self.tombstones) >= TOMBSTONES:
                del self.tombstones[next(iter(self.tombstones))]
            self.tombstones[room] = (reason[:MAX_REASON], http_status, self.now + TOMBSTONE_TTL)
        return False

    def peer_lost(self, addr: str, epoch: int | None = None) -> bool:
        """The engine saw that the peer is gone; False when the address is unknown, or the epoch is over."""
        peer = self._life(addr, epoch)
        if peer is not None:
            self._lose(peer, "lost: the engine said so")
        return peer is not None

    def peer_restarted(self, addr: str, epoch: int | None = None) -> bool:
        """The engine saw that the peer is another one now; False as `peer_lost`."""
        peer = self._life(addr, epoch)
        if peer is not None:
            self._start_over(peer, Identity())
            self._ask_again(peer)
        return peer is not None

    def _life(self, addr: str, epoch: int | None) -> Peer | None:
        """The peer, unless what is said concerns an epoch that is over."""
        peer = self.peers.get(canonical_address(addr, self.options.default_port))
        if peer is None or epoch is None or (peer.state == "ready" and peer.epoch == epoch):
            return peer
        return None

    def pause(self) -> None:
        """Deadlines stand still until `resume`."""
        self.clock.pause(self.now)

    def resume(self) -> None:
        """Deadlines go on."""
        self.clock.resume(self.now)

    def fail_all(self, kind: str, reason: str) -> None:
        """End every pending request, and every later one at once: `closed`, or `internal` when the network died."""
        if self.dead is None:
            self.dead = (kind, reason)
        for request in self.requests:
            if request.end is None:
                self._end(request, self._failure(kind, request.addr, reason))
        for peer in list(self.peers.values()):
            self._forget(peer)

    # The network's side.

    def take_commands(self, limit: int) -> list[tuple[int, str, str, str, str, bytes | None, int, int]]:
        """Take at most `limit` commands, in order."""
        taken, self.commands = self.commands[:limit], self.commands[limit:]
        return taken

    def on_response(
        self,
        ticket: int,
        status: int,
        body: bytes,
        headers: tuple[str | None, str | None, str | None] | None = None,
    ) -> None:
        """An HTTP request was answered; a ticket that is not awaited any more is ignored."""
        peer, flight = self.flights.pop(ticket, (None, None))
        if peer is None or flight is None:
            return
        self._land(peer, flight)
        said = Headers(*map(within_limits, headers or ()))
        if flight.purpose in ("attempt", "probe", "read"):
            answer = classify(status, body, peer.dialect, self.options.not_found_is_transient)
            self._on_topology(peer, flight, answer, said)
        elif peer.identity.differs_from(self._identity(said)):
            self._restart(peer, self._identity(said))
        elif flight.purpose == "query":
            self._on_dp_ranks(peer, flight, status, body)
        elif flight.purpose == "table":
            self._on_table(peer, flight, status, body, said)
        elif flight.purpose == "check":
            self._on_check(peer, flight, status, body, said)
        else:
            self._on_endpoint(peer, flight, status, body)
        self._pump(peer)

    def on_error(self, ticket: int, what: str, message: str) -> None:
        """An HTTP request got no whole answer."""
        peer, flight = self.flights.pop(ticket, (None, None))
        if peer is None or flight is None:
            return
        self._land(peer, flight)
        answer = classify_error(what, message)
        if what == FORBIDDEN and flight.purpose not in ("attempt", "probe"):
            self._forbid(peer, answer.text)
        elif flight.purpose in ("attempt", "probe", "read"):
            self._on_topology(peer, flight, answer, Headers())
        elif flight.purpose == "query":
            self._query_failed(peer, flight, answer.text)
        elif flight.purpose == "table" and what in ("oversized", "cut", "encoding"):
            self._give_up_table(peer, answer.text)
        elif flight.purpose != "check":
            self._lookup_failed(peer, flight, answer.text)
        self._pump(peer)

    def on_timer(self) -> None:
        """Fire what is due; harmless when nothing is."""
        lived = self.clock.read(self.now)
        for request in list(self.requests):
            if request.end is None:
                self._check_deadlines(request, lived)
        for peer in list(self.peers.values()):
            if peer.state == "waiting" and not peer.waits_for_poll and self.now >= peer.until:
                self._leave_waiting(peer)
            elif peer.state == "marked" and peer.fetch is None and self.now >= peer.until:
                self._fetch(peer, "probe")
            for group in list(peer.groups.values()):
                if group.state == "waiting" and self.now >= group.until:
                    self._retry_lookups(peer, group)
            if not self._pending(peer) and self.now >= peer.last_add + self._ns(self.options.peer_ttl_s):
                self._forget(peer)
            else:
                self._pump(peer)

    @staticmethod
    def _check_int(value: object, name: str, highest: int) -> None:
        if type(value) is not int or not 0 <= value <= highest:
            raise ValueError(f"{name} {value!r} is not an int from 0 to {highest}")

    def counts(self) -> dict[str, int]:
        """How much is held, for tests: all zero when all is done, but for peers."""
        return {"requests": len(self.requests), "decided": len(self.decided), "rooms": len(self.routed_rooms)}

    def failure_statuses(self) -> dict[str, int]:
        """The HTTP status of each failure kind."""
        return dict(STATUS)

    def mapping_of(self, addr: str) -> RankMapping | None:
        """The mapping to a ready peer, for tests."""
        peer = self.peers.get(addr)
        return None if peer is None else peer.mapping
