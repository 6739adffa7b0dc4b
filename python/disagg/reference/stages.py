"""The rules of a ready peer in plain Python: dp-rank queries, endpoints, and what is due to be asked."""

from __future__ import annotations

import json
from typing import Any

from disagg.errors import ProtocolError
from disagg.reference.model import MS, SECOND, TABLE, Group, InFlight, Peer, Request
from disagg.reference.rules import Rules, ranks_of_dp
from disagg.reference.wire import RankEndpoint, parse_dp_ranks, parse_endpoint

__all__ = ["SENTINEL", "StageRules"]

QUERY_ROOMS = 4096
QUERY_GAP = 20 * MS
WAIT_MS = 5000  # how long a peer that can is asked to wait until it knows a room
MOST_WAITING_QUERIES = 256
MANY_ROOMS = 256  # of a waiting query: more are not asked for again at once
MANY_ROOMS_GAP = 100 * MS
TABLE_RANKS = 512  # more ranks are looked up one by one
SENTINEL = {
    3: "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1",
    2: "/route?engine_rank=-1&target_dp_group=-1&target_pp_rank=-1",
}


class StageRules(Rules):
    """How a request of a ready peer gets its dp rank and its endpoints."""

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
            group = peer.groups[dp_rank] = Group(dp_rank, wanted=self._everything_wanted(peer))
        if group.route is not None:
            self._end(request, group.route)

    def _on_dp_ranks(self, peer: Peer, flight: InFlight, status: int, body: bytes) -> None:
        if status != 200:
            if flight.wait_ms and 400 <= status < 500 and status != 429:
                peer.features -= {"wait-query"}  # what advertises the waiting and refuses it is asked plainly
            self._query_failed(peer, flight, f"answered {status} to the dp-rank query")
            return
        asked = [r for r in flight.rooms if r.end is None and r in self.requests]
        try:
            ranks = parse_dp_ranks(body, [r.room for r in asked])
        except ProtocolError as error:
            self._query_failed(peer, flight, f"protocol error: {error}")
            return
        if flight.wait_ms:
            peer.waits_failed = 0
        peer.asks_plainly = False
        waited = self.now - flight.started >= WAIT_MS * MS
        at_once = flight.wait_ms > 0 and (waited or any(request.room in ranks for request in asked))
        for request in asked:
            rank = ranks.get(request.room)
            if rank is None and at_once:  # it waits as it was asked to, so it may be asked again at once
                request.next_ask = self.now if len(asked) <= MANY_ROOMS else flight.started + MANY_ROOMS_GAP
            elif rank is None:
                wait = min(SECOND, QUERY_GAP << min(request.asked - 1, 6))
                request.next_ask = flight.started + wait
            elif rank >= peer.info.dp_size:
                text = f"it says dp rank {rank} for room {request.room}, but its dp size is {peer.info.dp_size}"
                self._end(request, self._failure("dp_rank_out_of_range", peer.addr, text))
            else:
                self._need_endpoints(peer, request, rank)

    def _query_failed(self, peer: Peer, flight: InFlight, text: str) -> None:
        not_before = flight.started + max(QUERY_GAP, self._ns(self.policy.interval_s))
        peer.query_error = text
        peer.query_not_before = max(peer.query_not_before, not_before)
        for request in flight.rooms:
            request.next_ask = not_before
        if flight.wait_ms:  # perhaps something on the way cuts what takes long
            peer.waits_failed += 1
            peer.asks_plainly = True
            if peer.waits_failed == 2:
                peer.features -= {"wait-query"}

    # Endpoints.

    def _everything_wanted(self, peer: Peer) -> list[int]:
        """What a new group has to look up."""
        if "table" in peer.features and ranks_of_dp(peer.info) <= TABLE_RANKS:
            return [TABLE]
        return self._all_contacts_wanted(peer)

    @staticmethod
    def _all_contacts_wanted(peer: Peer) -> list[int]:
        """The contacts one by one."""
        return list(range(len(list(peer.mapping.contacts()))))

    def _checked(self, found: RankEndpoint) -> RankEndpoint:
        """The endpoint, unless it lies where no route may lead."""
        if self.rank_hosts is not None and self.rank_hosts.verdict(found.ip) != "allowed":
            raise ProtocolError("rank_ip", found.ip, "is not in allowed_rank_hosts")
        return found

    def _on_endpoint(self, peer: Peer, flight: InFlight, status: int, body: bytes) -> None:
        group = peer.groups[flight.dp_rank]
        if status == 404:
            self._rank_not_found(peer, group, flight)
        elif status != 200:
            self._lookup_failed(peer, flight, f"answered {status} to the endpoint query")
        else:
            try:
                group.found[flight.contact] = self._checked(parse_endpoint(body))
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
        fresh = peer.groups[group.dp_rank] = Group(group.dp_rank, wanted=self._everything_wanted(peer))
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
        if peer.query is not None or self.now < peer.query_not_before:
            return
        awaited = [] if peer.waiting_query is None else peer.waiting_query.rooms
        open_ones = [r for r in self._pending(peer) if r.stage == "need_dp_rank" and r not in awaited]
        due = [r for r in open_ones if r.next_ask <= self.now]
        waiting = sum(flight.wait_ms > 0 for _, flight in self.flights.values())
        if not due:
            return
        may_wait = "wait-query" in peer.features and not peer.asks_plainly and waiting < MOST_WAITING_QUERIES
        if may_wait and peer.waiting_query is None:
            peer.waiting_query = self._query(peer, open_ones, WAIT_MS)
        else:
            peer.query = self._query(peer, due, 0)

    def _query(self, peer: Peer, due: list[Request], wait_ms: int) -> InFlight:
        due.sort(key=lambda request: (request.next_ask, request.seq))
        rooms = sorted(due[:QUERY_ROOMS], key=lambda request: request.seq)
        for request in rooms:
            request.asked += 1
        content: dict[str, Any] = {"bootstrap_rooms": [request.room for request in rooms]}
        if wait_ms:
            content["wait_ms"] = wait_ms
        body = json.dumps(content, separators=(",", ":")).encode()
        flight = InFlight(0, "dp_ranks", self.now, "query", rooms=rooms, wait_ms=wait_ms)
        peer.query_not_before = self.now + QUERY_GAP
        return self._send(peer, "dp_ranks", "/query_dp_ranks", flight, body)

    def _pump_lookups(self, peer: Peer) -> None:
        for group in peer.groups.values():
            while group.state == "looking" and group.wanted:
                if len(peer.lookups) >= self.options.max_endpoint_lookups_per_peer:
                    return
                number = group.wanted.pop(0)
                if number == TABLE:
                    purpose, path = "table", f"/routes?dp_rank={group.dp_rank}"
                else:
                    contact = list(peer.mapping.contacts())[number]
                    purpose, path = "lookup", self._endpoint_path(peer, group, contact)
                flight = InFlight(0, "endpoint", self.now, purpose, dp_rank=group.dp_rank, contact=number)
                self._send(peer, "endpoint", path, flight)
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
