"""The rules of one peer in plain Python: attempts, marks, dp-rank queries, endpoints, reads, restarts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from disagg.errors import IncompatiblePeer, ProtocolError
from disagg.reference.answers import NEXT_FORM, Good, Permanent, Transient
from disagg.reference.jitter import unit_interval
from disagg.reference.mapping import map_ranks
from disagg.reference.model import MS, SECOND, Group, InFlight, Peer, Policy, Request
from disagg.reference.wire import parse_dp_ranks, parse_endpoint
from disagg.values import Endpoint, Event, Failure, Route

if TYPE_CHECKING:
    from disagg.reference.model import Options, SchedulerClock

__all__ = ["STATUS", "PeerRules"]

STATUS = {
    "unreachable": 503, "not_ready": 503, "peer_lost": 503, "cooldown": 503, "closed": 503,
    "protocol_error": 502, "not_a_registry": 502, "dp_rank_out_of_range": 502, "rank_missing": 502,
    "incompatible": 409, "duplicate_room": 409, "not_allowed": 403, "too_many_addresses": 429,
    "dp_rank_timeout": 504, "endpoint_timeout": 504, "request_timeout": 504, "internal": 500,
}  # fmt: skip
QUERY_ROOMS = 4096
QUERY_GAP = 20 * MS
TOPOLOGY_CAP = 64 * 1024
SENTINEL = {
    3: "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1",
    2: "/route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1",
}


class PeerRules:
    """One transition for each thing that can happen to a peer; `ReferenceResolver` holds the state."""

    decode: Any
    policy: Policy
    options: Options
    seed: int
    now: int
    clock: SchedulerClock
    peers: dict[str, Peer]
    requests: list[Request]
    decided: list[Request]
    events: list[Event]
    commands: list[tuple[int, str, str, str, str, bytes | None, int]]
    flights: dict[int, tuple[Peer, InFlight]]
    last_ticket: int

    # Requests.

    def _pending(self, peer: Peer) -> list[Request]:
        return [r for r in self.requests if r.addr == peer.addr and r.end is None]

    def _waiters(self, peer: Peer, group: Group) -> list[Request]:
        return [r for r in self._pending(peer) if r.stage == "need_endpoints" and r.dp_rank == group.dp_rank]

    def _end(self, request: Request, end: Route | Failure) -> None:
        request.end = end
        self.decided.append(request)

    @staticmethod
    def _failure(kind: str, addr: str, text: str, attempts: int = 0, status: int | None = None) -> Failure:
        return Failure(kind, f"{addr}: {text}", STATUS[kind] if status is None else status, addr, attempts)

    def _fail_pending(self, peer: Peer, failure: Failure) -> None:
        for request in self._pending(peer):
            self._end(request, self._with_contacted(peer, request, failure))

    def _with_contacted(self, peer: Peer, request: Request, failure: Failure) -> Failure:
        group = peer.groups.get(request.dp_rank) if request.dp_rank is not None else None
        if request.stage != "need_endpoints" or group is None:
            return failure
        contacts = peer.mapping.contacts()
        contacted = tuple(
            (group.dp_rank, c.cp, c.tp, c.pp) for i, c in enumerate(contacts) if i in group.found
        )
        return Failure(
            failure.kind, failure.reason, failure.http_status, failure.addr, failure.attempts, contacted
        )

    def _check_deadlines(self, request: Request, lived: int) -> None:
        options, peer = self.options, self.peers[request.addr]
        if lived >= request.added + self._ns(options.request_timeout_s):
            text = f"not placed within {options.request_timeout_s:g} s; last stage: {request.stage}"
            failure = self._failure("request_timeout", request.addr, text, peer.attempt)
        elif request.stage == "need_dp_rank" and lived >= request.stage_since + self._ns(options.dp_rank_timeout_s):
            text = (
                f"no dp rank for room {request.room} within {options.dp_rank_timeout_s:g} s, "
                f"asked {request.asked} times{self._last(peer.query_error)}"
            )
            failure = self._failure("dp_rank_timeout", request.addr, text)
        elif request.stage == "need_endpoints" and lived >= request.stage_since + self._ns(
            options.endpoint_timeout_s
        ):
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
        cap = TOPOLOGY_CAP if body is None else 1024 + 64 * len(flight.rooms)
        self.commands.append((flight.ticket, kind, peer.addr, method, path, body, cap))
        return flight

    def _cancel(self, flight: InFlight | None) -> None:
        if flight is not None and self.flights.pop(flight.ticket, None) is not None:
            for command in self.commands:
                if command[0] == flight.ticket:
                    self.commands.remove(command)
                    return
            self.commands.append((flight.ticket, "cancel", "", "", "", None, 0))

    def _land(self, peer: Peer, flight: InFlight) -> None:
        if flight.purpose in ("attempt", "probe"):
            peer.fetch = None
        elif flight.purpose == "read":
            peer.read = None
        elif flight.purpose == "query":
            peer.query = None
        else:
            del peer.lookups[flight.ticket]
            peer.groups[flight.dp_rank].flying -= 1

    def _fetch(self, peer: Peer, purpose: str, started: int | None = None) -> None:
        if purpose == "attempt":
            peer.state = "fetching"
        flight = InFlight(0, "topology", self.now if started is None else started, purpose)
        peer.fetch = self._send(peer, "topology", SENTINEL[peer.dialect], flight)

    # The topology: attempts, probes and reads.

    def _on_topology(self, peer: Peer, flight: InFlight, answer: Any, instance: str | None) -> None:
        if flight.purpose == "read":
            if isinstance(answer, Good):
                self._read_succeeded(peer, flight, answer.info, instance)
            else:
                self._read_failed(peer, flight, self._text(answer))
        elif isinstance(answer, Good):
            self._become_ready(peer, answer.info, instance)
        elif answer == NEXT_FORM:
            peer.dialect = 2
            self._fetch(peer, flight.purpose, started=flight.started)
        elif isinstance(answer, Permanent):
            peer.attempt += 1
            self._refuse(peer, self._failure(answer.kind, peer.addr, answer.text, peer.attempt))
        elif isinstance(answer, Transient):
            peer.dialect = 3
            self._attempt_failed(peer, flight, answer)

    @staticmethod
    def _text(answer: Any) -> str:
        return "answered 400 to the topology query" if answer == NEXT_FORM else answer.text

    def _attempt_failed(self, peer: Peer, flight: InFlight, answer: Transient) -> None:
        peer.attempt += 1
        peer.attempt_error = (answer.kind, answer.text)
        if flight.purpose == "probe":
            peer.mark = self._cooldown(peer)
            peer.until = flight.started + self._ns(self.policy.interval_s)
            return
        peer.state = "waiting"
        peer.waits_for_poll = self.policy.per_cycle
        peer.until = flight.started + self.policy.gap(
            peer.attempt, unit_interval(self.seed, peer.addr, peer.attempt)
        )
        if peer.spent_at is None and peer.attempt >= self.policy.max_attempts:
            peer.spent_at = self.now
        if peer.spent_at is not None:
            peer.mark = self._cooldown(peer)
            self._settle(peer)
            if not self._pending(peer):
                self._mark_down(peer)

    def _cooldown(self, peer: Peer) -> Failure:
        text = f"not tried again until it answers a probe; {self._gave_up(peer)}"
        return self._failure("cooldown", peer.addr, text, peer.attempt)

    @staticmethod
    def _gave_up(peer: Peer) -> str:
        times = "1 attempt" if peer.attempt == 1 else f"{peer.attempt} attempts"
        return f"gave up after {times}: {peer.attempt_error[1]}"

    def _settle(self, peer: Peer) -> None:
        """The budget is spent: fail those that waited long enough, unless the scheduler stands still."""
        if peer.spent_at is None or peer.state != "waiting":
            return
        if self.clock.stands_still(self.now):
            peer.deferred = True
            return
        failure = self._failure(peer.attempt_error[0], peer.addr, self._gave_up(peer), peer.attempt)
        for request in self._pending(peer):
            if self.clock.read(self.now) - request.added >= self._ns(self.policy.min_wait_s):
                self._end(request, failure)

    def _leave_waiting(self, peer: Peer) -> None:
        peer.waits_for_poll = False
        if self._pending(peer):
            self._fetch(peer, "attempt")
        elif peer.spent_at is not None:
            self._mark_down(peer)
        else:
            peer.state, peer.attempt = "unknown", 0

    def _mark_down(self, peer: Peer) -> None:
        assert peer.spent_at is not None
        peer.state, peer.waits_for_poll, peer.deferred = "marked", False, False
        peer.until = max(peer.until, peer.spent_at + self._ns(self.policy.cooldown_s))

    def _refuse(self, peer: Peer, failure: Failure) -> None:
        self._fail_pending(peer, failure)
        self._reset(peer)
        peer.state, peer.mark = "marked", failure
        peer.until = self.now + self._ns(self.policy.cooldown_s)

    def _become_ready(self, peer: Peer, info: Any, instance: str | None) -> None:
        try:
            mapping = map_ranks(self.decode, info)
        except IncompatiblePeer as error:
            peer.attempt += 1
            self._refuse(peer, self._failure("incompatible", peer.addr, str(error), peer.attempt))
            return
        peer.epoch += 1
        if peer.lost:
            self.events.append(Event("peer_back", peer.addr, peer.epoch, peer.instance, instance))
        peer.state, peer.info, peer.mapping, peer.instance, peer.lost = "ready", info, mapping, instance, False
        peer.mark, peer.attempt, peer.spent_at, peer.deferred = None, 0, None, False
        peer.waits_for_poll = False
        phase = 0.5 + 0.5 * unit_interval(self.seed, peer.addr, 0)
        peer.next_heartbeat = self.now + int(self.options.heartbeat_interval_s * phase * SECOND)
        for request in self._pending(peer):
            self._place(peer, request)

    def _reset(self, peer: Peer) -> None:
        """Drop all that belongs to the epoch, and whatever is in flight."""
        for flight in (peer.fetch, peer.read, peer.query, *peer.lookups.values()):
            self._cancel(flight)
        peer.fetch = peer.read = peer.query = None
        peer.lookups, peer.groups, peer.info, peer.mapping = {}, {}, None, None
        peer.dialect, peer.beats_missed, peer.waits_for_poll, peer.deferred = 3, 0, False, False
        peer.query_error, peer.query_not_before, peer.read_not_before = "", 0, 0
        peer.spent_at = None
        for request in self._pending(peer):
            request.stage, request.dp_rank, request.asked = "need_info", None, 0

    def _start_over(self, peer: Peer, instance: str | None) -> None:
        """The peer is another one now; what it is has to be asked."""
        self.events.append(Event("peer_restarted", peer.addr, peer.epoch, peer.instance, instance))
        self._reset(peer)
        peer.state, peer.mark, peer.attempt, peer.lost, peer.instance = "unknown", None, 0, False, instance
        if self._pending(peer):
            self._fetch(peer, "attempt")

    def _lose(self, peer: Peer, text: str) -> None:
        if peer.lost:
            return
        self.events.append(Event("peer_lost", peer.addr, peer.epoch, peer.instance))
        self._fail_pending(peer, self._failure("peer_lost", peer.addr, text, peer.attempt))
        self._reset(peer)
        peer.lost, peer.state, peer.attempt_error = True, "marked", ("peer_lost", text)
        peer.mark = self._failure(
            "cooldown", peer.addr, f"not tried again until it answers a probe; {text}", peer.attempt
        )
        peer.until = self.now + self._ns(self.policy.cooldown_s)

    def _forget(self, peer: Peer) -> None:
        self._reset(peer)
        del self.peers[peer.addr]

    # Reads of a ready peer's topology: heartbeats and confirmations.

    def _read_succeeded(self, peer: Peer, flight: InFlight, info: Any, instance: str | None) -> None:
        other = instance is not None and peer.instance is not None and instance != peer.instance
        if other or info != peer.info:
            self.events.append(Event("peer_restarted", peer.addr, peer.epoch, peer.instance, instance))
            dialect = peer.dialect
            self._reset(peer)
            peer.dialect = dialect
            self._become_ready(peer, info, instance)
            return
        peer.instance = peer.instance or instance
        peer.beats_missed, peer.read_not_before = 0, 0
        peer.next_heartbeat = flight.started + self._ns(self.options.heartbeat_interval_s)
        for group in list(peer.groups.values()):
            if group.state == "reading" and group.read_from <= flight.ticket:
                if group.wanted:
                    group.state = "looking"
                else:
                    self._finish(peer, group)

    def _read_failed(self, peer: Peer, flight: InFlight, text: str) -> None:
        peer.beats_missed += 1
        if peer.beats_missed == 1:
            peer.missed_since = flight.started
        down = self.now - peer.missed_since
        if peer.beats_missed >= self.options.heartbeat_failures and down >= self._ns(
            self.options.heartbeat_min_down_s
        ):
            self._lose(peer, f"lost: {peer.beats_missed} reads failed over {down / SECOND:.1f} s: {text}")
            return
        peer.read_not_before = flight.started + self._ns(self.policy.interval_s)
        peer.next_heartbeat = flight.started + self._ns(self.options.heartbeat_interval_s)
        for group in list(peer.groups.values()):
            if group.state == "reading":
                group.last_error = text
                if not self._waiters(peer, group):
                    del peer.groups[group.dp_rank]

    def _finish(self, peer: Peer, group: Group) -> None:
        contacts = list(peer.mapping.contacts())
        endpoints = tuple(
            Endpoint(group.dp_rank, c.cp, c.tp, c.pp, *group.found[i], c.dummy) for i, c in enumerate(contacts)
        )
        group.state = "ready"
        group.route = Route(peer.addr, group.dp_rank, peer.mapping, endpoints, peer.info, peer.epoch)
        for request in self._waiters(peer, group):
            self._end(request, group.route)

    # The dp rank.

    def _place(self, peer: Peer, request: Request) -> None:
        """Take a request of a ready peer as far as it goes without asking."""
        size, preset = peer.info.dp_size, request.preset
        if preset is not None and preset >= size:
            text = f"dp rank {preset} was preset, but its dp size is {size}"
            self._end(request, self._failure("dp_rank_out_of_range", peer.addr, text, status=400))
        elif preset is not None:
            self._need_endpoints(peer, request, preset)
        elif size == 1:
            self._need_endpoints(peer, request, 0)
        elif peer.dialect == 2 or (
            peer.info.follow_bootstrap_room and not self.options.force_query and not peer.info.dynamic_dp_size
        ):
            self._need_endpoints(peer, request, request.room % size)
        else:
            request.stage, request.stage_since = "need_dp_rank", self.clock.read(self.now)
            request.asked, request.next_ask = 0, self.now

    def _need_endpoints(self, peer: Peer, request: Request, dp_rank: int) -> None:
        request.stage, request.stage_since = "need_endpoints", self.clock.read(self.now)
        request.dp_rank = dp_rank
        group = peer.groups.get(dp_rank)
        if group is None:
            group = peer.groups[dp_rank] = Group(dp_rank)
            group.wanted = list(range(len(list(peer.mapping.contacts()))))
        if group.route is not None:
            self._end(request, group.route)

    def _on_dp_ranks(self, peer: Peer, flight: InFlight, status: int, body: bytes) -> None:
        if status != 200:
            self._query_failed(peer, flight, f"answered {status} to the dp-rank query")
            return
        asked = [r for r in flight.rooms if r.end is None and r in self.requests]
        try:
            ranks = parse_dp_ranks(body, [r.room for r in asked])
        except ProtocolError as error:
            self._query_failed(peer, flight, f"protocol error: {error}")
            return
        for request in asked:
            rank = ranks.get(request.room)
            if rank is None:
                wait = min(SECOND, QUERY_GAP << min(request.asked - 1, 6))
                request.next_ask = flight.started + wait
            elif rank >= peer.info.dp_size:
                text = f"it says dp rank {rank} for room {request.room}, but its dp size is {peer.info.dp_size}"
                self._end(request, self._failure("dp_rank_out_of_range", peer.addr, text))
            else:
                self._need_endpoints(peer, request, rank)

    def _query_failed(self, peer: Peer, flight: InFlight, text: str) -> None:
        peer.query_error = text
        peer.query_not_before = flight.started + max(QUERY_GAP, self._ns(self.policy.interval_s))
        for request in flight.rooms:
            request.next_ask = peer.query_not_before

    # Endpoints.

    def _on_endpoint(self, peer: Peer, flight: InFlight, status: int, body: bytes) -> None:
        group = peer.groups[flight.dp_rank]
        if status == 404:
            self._rank_not_found(peer, group, flight)
        elif status != 200:
            self._lookup_failed(peer, flight, f"answered {status} to the endpoint query")
        else:
            try:
                group.found[flight.contact] = parse_endpoint(body)
            except ProtocolError as error:
                self._lookup_failed(peer, flight, f"protocol error: {error}")
                return
            if group.state == "looking" and not group.wanted and not group.flying:
                group.state, group.read_from = "reading", self.last_ticket + 1

    def _lookup_failed(self, peer: Peer, flight: InFlight, text: str) -> None:
        group = peer.groups[flight.dp_rank]
        group.wanted.append(flight.contact)
        group.last_error = text
        until = flight.started + self._ns(self.policy.interval_s)
        group.until = max(group.until, until) if group.state == "waiting" else until
        group.state = "waiting"

    def _retry_lookups(self, peer: Peer, group: Group) -> None:
        group.state = "looking"
        if not self._waiters(peer, group):
            self._drop_group(peer, group)

    def _drop_group(self, peer: Peer, group: Group) -> None:
        for flight in [f for f in peer.lookups.values() if f.dp_rank == group.dp_rank]:
            self._cancel(flight)
            del peer.lookups[flight.ticket]
        del peer.groups[group.dp_rank]

    def _rank_not_found(self, peer: Peer, group: Group, flight: InFlight) -> None:
        contacts = list(peer.mapping.contacts())
        contact, waiters = contacts[flight.contact], self._waiters(peer, group)
        rank = f"dp{group.dp_rank}/cp{contact.cp}/tp{contact.tp}/pp{contact.pp}"
        if group.not_found:
            failure = self._failure("rank_missing", peer.addr, f"rank {rank} is not registered (404 twice)")
            for request in waiters:
                self._end(request, self._with_contacted(peer, request, failure))
        self._drop_group(peer, group)
        fresh = peer.groups[group.dp_rank] = Group(group.dp_rank, wanted=list(range(len(contacts))))
        fresh.last_error = f"rank {rank} is not registered (404)"
        if group.not_found:
            fresh.state, fresh.until = "waiting", flight.started + self._ns(self.policy.interval_s)
        else:
            fresh.not_found, fresh.state, fresh.read_from = True, "reading", self.last_ticket + 1

    # What is due is asked.

    def _pump(self, peer: Peer) -> None:
        if peer.state != "ready":
            return
        self._pump_query(peer)
        self._pump_lookups(peer)
        if peer.read is None:
            reading = any(group.state == "reading" for group in peer.groups.values())
            if reading and self.now >= peer.read_not_before:
                self._read(peer, "topology")
            elif self.now >= peer.next_heartbeat:
                self._read(peer, "heartbeat")

    def _read(self, peer: Peer, kind: str) -> None:
        flight = InFlight(0, kind, self.now, "read")
        peer.read = self._send(peer, kind, SENTINEL[peer.dialect], flight)

    def _pump_query(self, peer: Peer) -> None:
        due = [r for r in self._pending(peer) if r.stage == "need_dp_rank" and r.next_ask <= self.now]
        if peer.query is not None or not due or self.now < peer.query_not_before:
            return
        due.sort(key=lambda request: (request.next_ask, request.seq))
        rooms = sorted(due[:QUERY_ROOMS], key=lambda request: request.seq)
        flight = InFlight(0, "dp_ranks", self.now, "query", rooms=rooms)
        for request in flight.rooms:
            request.asked += 1
        body = json.dumps({"bootstrap_rooms": [r.room for r in flight.rooms]}, separators=(",", ":"))
        peer.query = self._send(peer, "dp_ranks", "/query_dp_ranks", flight, body.encode())
        peer.query_not_before = self.now + QUERY_GAP

    def _pump_lookups(self, peer: Peer) -> None:
        for group in peer.groups.values():
            while group.state == "looking" and group.wanted:
                if len(peer.lookups) >= self.options.max_endpoint_lookups_per_peer:
                    return
                number = group.wanted.pop(0)
                contact = list(peer.mapping.contacts())[number]
                flight = InFlight(0, "endpoint", self.now, "lookup", dp_rank=group.dp_rank, contact=number)
                self._send(peer, "endpoint", self._endpoint_path(peer, group, contact), flight)
                peer.lookups[flight.ticket] = flight
                group.flying += 1

    @staticmethod
    def _endpoint_path(peer: Peer, group: Group, contact: Any) -> str:
        if peer.dialect == 2:
            return f"/route?engine_rank={contact.tp}&target_dp_group={group.dp_rank}&target_pp_rank={contact.pp}"
        return (
            f"/route?prefill_dp_rank={group.dp_rank}&prefill_cp_rank={contact.cp}"
            f"&target_tp_rank={contact.tp}&target_pp_rank={contact.pp}"
        )
