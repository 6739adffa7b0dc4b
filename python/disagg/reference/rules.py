"""What all rules share in plain Python: the state, ends of requests, and commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from disagg.printable import printable
from disagg.reference.model import SECOND, Group, InFlight, Peer, Policy, Request
from disagg.values import Event, Failure, Route

if TYPE_CHECKING:
    from disagg.reference.hosts import HostList
    from disagg.reference.model import Options, SchedulerClock

__all__ = ["STATUS", "Rules"]

STATUS = {
    "unreachable": 503, "not_ready": 503, "peer_lost": 503, "cooldown": 503, "closed": 503,
    "protocol_error": 502, "not_a_registry": 502, "dp_rank_out_of_range": 502, "rank_missing": 502,
    "incompatible": 409, "duplicate_room": 409, "not_allowed": 403, "too_many_addresses": 429,
    "dp_rank_timeout": 504, "endpoint_timeout": 504, "request_timeout": 504, "internal": 500,
}  # fmt: skip
TOPOLOGY_CAP = 64 * 1024


class Rules:
    """The state of the machine, and the few things that every rule does to it."""

    decode: Any
    policy: Policy
    options: Options
    rank_hosts: HostList | None
    seed: int
    now: int
    clock: SchedulerClock
    peers: dict[str, Peer]
    requests: list[Request]
    decided: list[Request]
    events: list[Event]
    commands: list[tuple[int, str, str, str, str, bytes | None, int, int]]
    flights: dict[int, tuple[Peer, InFlight]]
    last_ticket: int
    routed_rooms: dict[int, str]
    attempts: int
    attempts_failed: int

    # Requests.

    def _pending(self, peer: Peer) -> list[Request]:
        return [r for r in self.requests if r.addr == peer.addr and r.end is None]

    def _waiters(self, peer: Peer, group: Group) -> list[Request]:
        return [r for r in self._pending(peer) if r.stage == "need_endpoints" and r.dp_rank == group.dp_rank]

    def _tell(self, kind: str, peer: Peer, instance: str | None = None) -> None:
        rooms = tuple(sorted(room for room, addr in self.routed_rooms.items() if addr == peer.addr))
        self.events.append(Event(kind, peer.addr, peer.epoch, peer.identity.instance, instance, rooms))

    def _end(self, request: Request, end: Route | Failure) -> None:
        request.end = end
        self.decided.append(request)

    @staticmethod
    def _failure(kind: str, addr: str, text: str, attempts: int = 0, status: int | None = None) -> Failure:
        return Failure(kind, printable(f"{addr}: {text}"), STATUS[kind] if status is None else status, addr, attempts)

    def _fail_pending(self, peer: Peer, failure: Failure) -> None:
        for request in self._pending(peer):
            self._end(request, self._with_contacted(peer, request, failure))

    def _with_contacted(self, peer: Peer, request: Request, failure: Failure) -> Failure:
        group = peer.groups.get(request.dp_rank) if request.dp_rank is not None else None
        if request.stage != "need_endpoints" or group is None:
            return failure
        contacts = peer.mapping.contacts()
        contacted = tuple((group.dp_rank, c.cp, c.tp, c.pp) for i, c in enumerate(contacts) if i in group.found)
        return Failure(failure.kind, failure.reason, failure.http_status, failure.addr, failure.attempts, contacted)

    def _check_deadlines(self, request: Request, lived: int) -> None:
        options, peer = self.options, self.peers[request.addr]
        if lived >= request.added + self._ns(options.request_timeout_s):
            text = f"not placed within {options.request_timeout_s:g} s; last stage: {request.stage}"
            if peer.restarts:
                times = "once" if peer.restarts == 1 else f"{peer.restarts} times"
                text += f"; the peer restarted {times} since it last gave a route"
            failure = self._failure("request_timeout", request.addr, text, peer.attempt)
        elif request.stage == "need_dp_rank" and lived >= request.stage_since + self._ns(options.dp_rank_timeout_s):
            text = (
                f"no dp rank for room {request.room} within {options.dp_rank_timeout_s:g} s, "
                f"asked {request.asked} times{self._last(peer.query_error)}"
            )
            failure = self._failure("dp_rank_timeout", request.addr, text)
        elif request.stage == "need_endpoints" and lived >= request.stage_since + self._ns(options.endpoint_timeout_s):
            assert request.dp_rank is not None
            error = peer.groups[request.dp_rank].last_error
            text = (
                f"endpoints of dp rank {request.dp_rank} not read within "
                f"{options.endpoint_timeout_s:g} s{self._last(error)}"
            )
            failure = self._failure("endpoint_timeout", request.addr, text)
        else:
            return
        self._end(request, self._with_contacted(peer, request, failure))

    @staticmethod
    def _last(error: str) -> str:
        return f"; last error: {error}" if error else ""

    @staticmethod
    def _ns(seconds: float) -> int:
        return int(seconds * SECOND)

    # Commands.

    def _send(self, peer: Peer, kind: str, path: str, flight: InFlight, body: bytes | None = None) -> InFlight:
        self.last_ticket += 1
        flight.ticket = self.last_ticket
        self.flights[flight.ticket] = (peer, flight)
        method = "GET" if body is None else "POST"
        if flight.purpose == "query":
            cap = 1024 + 64 * len(flight.rooms)
        elif flight.purpose == "table":
            cap = 1024 + 128 * ranks_of_dp(peer.info)
        else:
            cap = TOPOLOGY_CAP
        self.commands.append((flight.ticket, kind, peer.addr, method, path, body, cap, flight.wait_ms))
        return flight

    def _cancel(self, flight: InFlight | None) -> None:
        if flight is not None and self.flights.pop(flight.ticket, None) is not None:
            for command in self.commands:
                if command[0] == flight.ticket:
                    self.commands.remove(command)
                    return
            self.commands.append((flight.ticket, "cancel", "", "", "", None, 0, 0))


def ranks_of_dp(info: Any) -> int:
    """How many ranks one dp rank has."""
    ranks: int = info.attn_cp_size * info.attn_tp_size * info.pp_size
    return ranks
