"""The rules of one peer's lives in plain Python: attempts, marks, reads, restarts."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from disagg.errors import IncompatiblePeer, ProtocolError
from disagg.reference.answers import NEXT_FORM, Good, Permanent, Transient
from disagg.reference.jitter import unit_interval
from disagg.reference.mapping import map_ranks
from disagg.reference.model import SECOND, Group, Headers, Identity, InFlight, Peer, within_limits
from disagg.reference.stages import SENTINEL, StageRules
from disagg.reference.wire import parse_endpoint, parse_table
from disagg.values import Endpoint, Event, Failure, Route

__all__ = ["PeerRules"]


class PeerRules(StageRules):
    """One transition for each thing that can happen to a peer; `ReferenceResolver` holds the state."""

    def _land(self, peer: Peer, flight: InFlight) -> None:
        if flight.purpose in ("attempt", "probe"):
            peer.fetch = None
        elif flight.purpose == "read":
            peer.read = None
        elif flight.purpose == "check":
            peer.check = None
        elif flight.purpose == "query" and flight.wait_ms:
            peer.waiting_query = None
        elif flight.purpose == "query":
            peer.query = None
        else:
            del peer.lookups[flight.ticket]
            peer.groups[flight.dp_rank].flying -= 1

    def _fetch(self, peer: Peer, purpose: str, started: int | None = None) -> None:
        if purpose == "attempt":
            peer.state = "fetching"
        if started is None:
            self.attempts += 1
        flight = InFlight(0, "topology", self.now if started is None else started, purpose)
        peer.fetch = self._send(peer, "topology", SENTINEL[peer.dialect], flight)

    # The topology: attempts, probes and reads.

    def _on_topology(self, peer: Peer, flight: InFlight, answer: Any, headers: Headers) -> None:
        if flight.purpose == "read":
            if isinstance(answer, Good):
                self._read_succeeded(peer, flight, answer.info, headers)
            else:
                self._read_failed(peer, flight, self._text(answer))
        elif isinstance(answer, Good):
            self._become_ready(peer, answer.info, headers)
        elif answer == NEXT_FORM:
            peer.dialect = 2
            self._fetch(peer, flight.purpose, started=flight.started)
        elif isinstance(answer, Permanent):
            peer.attempt += 1
            self._refuse(peer, self._failure(answer.kind, peer.addr, answer.text, peer.attempt))
        elif isinstance(answer, Transient):
            peer.dialect = 3
            self._attempt_failed(peer, flight, answer)
        if flight.purpose != "read" and answer != NEXT_FORM and peer.state != "ready":
            self.attempts_failed += 1

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
        peer.until = flight.started + self.policy.gap(peer.attempt, unit_interval(self.seed, peer.addr, peer.attempt))
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

    def _forbid(self, peer: Peer, text: str) -> None:
        """The name of a peer that was ready leads where it may not."""
        self._tell("peer_lost", peer, None)
        peer.lost = True
        peer.attempt += 1
        self._refuse(peer, self._failure("not_allowed", peer.addr, text, peer.attempt))

    def _become_ready(self, peer: Peer, info: Any, headers: Headers) -> None:
        try:
            mapping = map_ranks(self.decode, info)
        except IncompatiblePeer as error:
            peer.attempt += 1
            self._refuse(peer, self._failure("incompatible", peer.addr, str(error)[:MAX_INCOMPATIBLE], peer.attempt))
            return
        peer.epoch += 1
        identity = self._identity(headers, info)
        if peer.lost:
            self.events.append(Event("peer_back", peer.addr, peer.epoch, peer.identity.instance, identity.instance))
        peer.state, peer.info, peer.mapping, peer.identity, peer.lost = "ready", info, mapping, identity, False
        peer.features = frozenset(word.strip() for word in (headers.features or "").split(","))
        peer.mark, peer.attempt, peer.spent_at, peer.deferred = None, 0, None, False
        peer.waits_for_poll = False
        phase = 0.5 + 0.5 * unit_interval(self.seed, peer.addr, 0)
        peer.next_heartbeat = self.now + int(self.options.heartbeat_interval_s * phase * SECOND)
        for request in self._pending(peer):
            self._place(peer, request)

    def _reset(self, peer: Peer) -> None:
        """Drop all that belongs to the epoch, and whatever is in flight."""
        for flight in (
            peer.fetch, peer.read, peer.check, peer.query, peer.waiting_query, *peer.lookups.values(),
        ):  # fmt: skip
            self._cancel(flight)
        peer.fetch = peer.read = peer.check = peer.query = peer.waiting_query = None
        peer.checks = 0
        peer.lookups, peer.groups, peer.info, peer.mapping = {}, {}, None, None
        peer.dialect, peer.beats_missed, peer.waits_for_poll, peer.deferred = 3, 0, False, False
        peer.query_error, peer.query_not_before, peer.read_not_before = "", 0, 0
        peer.waits_failed, peer.asks_plainly = 0, False
        peer.spent_at = None
        for request in self._pending(peer):
            request.stage, request.dp_rank, request.asked = "need_info", None, 0

    @staticmethod
    def _identity(headers: Headers, info: Any = None) -> Identity:
        """What an answer says; a peer may name its instance in the topology, where no header does."""
        field = None if info is None else info.extras.get("instance_id")
        if headers.instance is None and isinstance(field, str):
            return Identity(within_limits(field), headers.epoch)
        return Identity(headers.instance, headers.epoch)

    def _start_over(self, peer: Peer, identity: Identity) -> None:
        """The peer is another one now; what it is has to be asked."""
        self._tell("peer_restarted", peer, identity.instance)
        self._reset(peer)
        peer.restarts += 1
        peer.state, peer.mark, peer.attempt, peer.identity = "unknown", None, 0, identity

    def _ask_again(self, peer: Peer) -> None:
        if self._pending(peer):
            self._fetch(peer, "attempt")

    def _restart(self, peer: Peer, identity: Identity) -> None:
        """A peer said that it is another one: start over, at once the first time."""
        self._start_over(peer, identity)
        if not self._rests_after_restart(peer):
            self._ask_again(peer)

    def _rests_after_restart(self, peer: Peer) -> bool:
        """Whether the peer has to wait because it restarted less than `interval_s` ago."""
        until = peer.restart_not_before
        peer.restart_not_before = max(until, self.now) + self._ns(self.policy.interval_s)
        if until <= self.now:
            return False
        peer.state, peer.until = "waiting", until
        return True

    def _lose(self, peer: Peer, text: str) -> None:
        if peer.lost and peer.state == "marked":
            return
        if not peer.lost:
            self._tell("peer_lost", peer, None)
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

    def _replace(self, peer: Peer, info: Any, headers: Headers) -> None:
        """The peer is another one now, and this is what it is."""
        self._tell("peer_restarted", peer, self._identity(headers, info).instance)
        dialect = peer.dialect
        self._reset(peer)
        peer.restarts += 1
        if not self._rests_after_restart(peer):
            peer.dialect = dialect
            self._become_ready(peer, info, headers)

    @staticmethod
    def _is_same(info: Any, before: Any) -> bool:
        """Whether nothing changed that is understood: a key that is not may count seconds."""
        return all(getattr(info, name) == getattr(before, name) for name in UNDERSTOOD)

    def _read_succeeded(self, peer: Peer, flight: InFlight, info: Any, headers: Headers) -> None:
        identity = self._identity(headers, info)
        if not self._is_same(info, peer.info) or peer.identity.differs_from(identity):
            self._replace(peer, info, headers)
            return
        peer.identity = peer.identity.learn(identity)
        peer.beats_missed, peer.read_not_before = 0, 0
        peer.next_heartbeat = flight.started + self._ns(self.options.heartbeat_interval_s)
        for group in list(peer.groups.values()):
            if group.state == "reading" and group.read_from <= flight.ticket:
                if group.wanted:
                    group.state = "looking"
                else:
                    self._finish(peer, group)
        if flight.kind == "heartbeat" and peer.identity == Identity():
            self._check_an_endpoint(peer)

    def _check_an_endpoint(self, peer: Peer) -> None:
        """Look up one cached endpoint again: all that shows a restart where neither instance nor epoch does."""
        ready = sorted(group.dp_rank for group in peer.groups.values() if group.state == "ready")
        if not ready or peer.check is not None:
            return
        contacts = list(peer.mapping.contacts())
        dp_rank, number = ready[peer.checks % len(ready)], peer.checks // len(ready) % len(contacts)
        peer.checks += 1
        flight = InFlight(0, "heartbeat", self.now, "check", dp_rank=dp_rank, contact=number)
        path = self._endpoint_path(peer, peer.groups[dp_rank], contacts[number])
        peer.check = self._send(peer, "heartbeat", path, flight)

    def _on_check(self, peer: Peer, flight: InFlight, status: int, body: bytes, headers: Headers) -> None:
        """Only a clear answer counts: the reads tell whether the peer is there."""
        moved = status == 404
        if status == 200:
            with suppress(ProtocolError):
                moved = parse_endpoint(body) != peer.groups[flight.dp_rank].found[flight.contact]
        if moved:
            self._restart(peer, self._identity(headers))

    # All endpoints in one answer, where the peer has it.

    def _on_table(self, peer: Peer, flight: InFlight, status: int, body: bytes, headers: Headers) -> None:
        group = peer.groups[flight.dp_rank]
        answered = f"answered {status} to the query of all endpoints"
        if status == 429 or status >= 500:
            self._lookup_failed(peer, flight, answered)
            return
        if status != 200:
            self._give_up_table(peer, answered)
            return
        try:
            table = parse_table(body)
        except ProtocolError as error:
            self._give_up_table(peer, f"protocol error: {error}")
            return
        fields = Identity(within_limits(table.instance), within_limits(table.epoch))
        stated = Identity(headers.instance, headers.epoch).learn(fields)
        headers = Headers(stated.instance, stated.epoch, headers.features)
        if not self._is_same(table.info, peer.info):
            self._replace(peer, table.info, headers)
            return
        if peer.identity.differs_from(stated):
            self._restart(peer, stated)
            return
        peer.identity = peer.identity.learn(stated)
        found: dict[int, tuple[str, int]] = {}
        for number, contact in enumerate(peer.mapping.contacts()):
            rank = table.ranks.get((group.dp_rank, contact.cp, contact.tp, contact.pp))
            if rank is None:
                name = f"dp{group.dp_rank}/cp{contact.cp}/tp{contact.tp}/pp{contact.pp}"
                self._give_up_table(peer, f"rank {name} is not among all endpoints")
                return
            try:
                found[number] = self._checked(rank)
            except ProtocolError as error:
                self._give_up_table(peer, f"protocol error: {error}")
                return
        group.found = found
        self._finish(peer, group)

    def _give_up_table(self, peer: Peer, text: str) -> None:
        """Look the ranks of this peer up one by one, from now on and in this life."""
        peer.features -= {"table"}
        for flight in peer.lookups.values():
            self._cancel(flight)
        peer.lookups = {}
        for group in peer.groups.values():
            if group.state != "ready":
                group.flying, group.last_error = 0, text
                group.wanted = self._all_contacts_wanted(peer)

    def _read_failed(self, peer: Peer, flight: InFlight, text: str) -> None:
        peer.beats_missed += 1
        if peer.beats_missed == 1:
            peer.missed_since = flight.started
        down = self.now - peer.missed_since
        if peer.beats_missed >= self.options.heartbeat_failures and down >= self._ns(self.options.heartbeat_min_down_s):
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
        group.state, peer.restarts = "ready", 0
        group.route = Route(peer.addr, group.dp_rank, peer.mapping, endpoints, peer.info, peer.epoch)
        for request in self._waiters(peer, group):
            self._end(request, group.route)


MAX_INCOMPATIBLE = 2048  # characters
UNDERSTOOD = (
    "attn_tp_size", "attn_cp_size", "dp_size", "pp_size", "page_size", "kv_cache_dtype", "follow_bootstrap_room",
    "enable_dsa_cache_layer_split", "enable_kv_cache_sharding", "prefill_http_port", "kv_layout",
    "decode_allocation_policy", "dynamic_dp_size", "spec_layout",
)  # fmt: skip
