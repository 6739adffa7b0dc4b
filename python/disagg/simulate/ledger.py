"""The parent's own book of the run: what each request's end must be, and which ends were something else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from disagg.simulate.expect import Allowed, PeerStory, allowed_ends
from disagg.simulate.facts import FailureSeen, PeerFacts, RouteSeen
from disagg.simulate.plan import Plan, PlannedRequest, slack_s
from disagg.simulate.scenario import PeerSpec, Rank
from disagg.simulate.shared import FAILED, ROUTED, End

__all__ = ["Ledger", "Mapping", "PeerBook", "Seen", "Verdict", "expected_route"]

NS = 1_000_000_000
# Timers count whole ticks and the two processes read their clocks one after the other.
EARLY_NS = 5_000_000
# The status that each kind suggests to answer the client with (DESIGN.md section 4), written down here again.
STATUSES = {
    "unreachable": 503,
    "not_ready": 503,
    "cooldown": 503,
    "closed": 503,
    "protocol_error": 502,
    "incompatible": 409,
    "dp_rank_timeout": 504,
}
# How many texts are kept of what was unexpected: in all, and of one kind of end at one peer.
MAX_COMPLAINTS = 20
MAX_ABOUT_THE_SAME = 3
# Failures whose reason counts the attempts.
BUDGET_KINDS = ("unreachable", "not_ready", "protocol_error")


class Mapping(Protocol):
    """What the ledger reads of a rank mapping; `disagg.reference` computes it."""

    @property
    def target_tp_rank(self) -> int | None:
        """The TP rank that is read, None when all are."""

    @property
    def target_tp_ranks(self) -> Sequence[int]:
        """The TP ranks to contact."""

    @property
    def target_cp_ranks(self) -> Sequence[int]:
        """The CP ranks to contact."""

    @property
    def target_pp_ranks(self) -> Sequence[int]:
        """The PP ranks to contact."""

    @property
    def required_dst_info_num(self) -> int:
        """How many decode ranks the prefill rank awaits."""

    @property
    def required_prefill_response_num(self) -> int:
        """How many answers the decode rank awaits."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the children saw, all that the ledger judges by."""

    ends: list[End]
    details: list[object]
    added_ns: list[int]  # by request; 0 was never added
    sent: int
    addresses: dict[int, str]
    facts: dict[int, PeerFacts]
    registered_ns: dict[int, tuple[int, int]]
    worst_cycle_ns: int
    interrupted_ns: int | None = None


@dataclass(slots=True)
class PeerBook:
    """One peer's line: ends by kind as they were, and as they had to be: at least `low`, at most `high`."""

    requests: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    low: Counter[str] = field(default_factory=Counter)
    high: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    route_ns: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Verdict:
    """The outcome; `unexpected` counts ends that no rule allows and requests that did not end once."""

    peers: dict[int, PeerBook]
    unexpected: int = 0
    twice: int = 0
    missing: int = 0
    unknown: int = 0
    complaints: list[str] = field(default_factory=list)

    kept: Counter[str] = field(default_factory=Counter)

    def complain(self, text: str, about: str = "") -> None:
        """Count one unexpected thing, and keep what it was if there are not many about the same yet."""
        self.unexpected += 1
        if len(self.complaints) < MAX_COMPLAINTS and self.kept[about] < MAX_ABOUT_THE_SAME:
            self.kept[about] += 1
            self.complaints.append(text)


class Ledger:
    """Judges what was seen. `mappings` are the right rank mappings by (peer, life)."""

    def __init__(self, plan: Plan, seen: Seen, mappings: dict[tuple[int, int], Mapping]) -> None:
        self._plan = plan
        self._seen = seen
        self._routes = {
            (peer.index, life, dp): expected_route(peer, seen.addresses[peer.index], life, dp, mapping)
            for peer in plan.peers
            for life, layout in enumerate(peer.layouts)
            if (mapping := mappings.get((peer.index, life))) is not None
            for dp in range(layout.dp)
        }
        self._stories = self._tell_stories()

    def _tell_stories(self) -> dict[int, PeerStory]:
        seen, options = self._seen, self._plan.options
        slack_ns = int(slack_s(options) * NS) + 2 * seen.worst_cycle_ns
        first: dict[int, int] = {}
        for request, added in zip(self._plan.requests, seen.added_ns, strict=True):
            if added:
                first.setdefault(request.peer, added)
        return {
            peer.index: PeerStory(
                peer,
                seen.addresses[peer.index],
                options,
                first.get(peer.index, 0),
                slack_ns,
                seen.facts.get(peer.index, PeerFacts()),
            )
            for peer in self._plan.peers
        }

    def judge(self) -> Verdict:
        """Compare every end with what it had to be."""
        seen = self._seen
        verdict = Verdict({peer.index: PeerBook() for peer in self._plan.peers})
        ended: set[int] = set()
        for end in seen.ends:
            if end.request is None or end.request >= seen.sent:
                verdict.unknown += 1
                verdict.complain(f"an end of a request that was never made: {end.request}", "unknown")
            elif end.request in ended:
                verdict.twice += 1
                verdict.complain(f"request {end.request} ended again: {self._kind(end)}", "twice")
            else:
                ended.add(end.request)
                self._judge_end(verdict, end.request, end)
        for request in range(seen.sent):
            self._expect(verdict, request)
            if request not in ended:
                verdict.missing += 1
                verdict.complain(f"request {request} to {self._name(request)} never ended", "missing")
        return verdict

    def allowed(self, request: int) -> list[Allowed]:
        """Return the ends that a request may have."""
        seen = self._seen
        planned, added = self._plan.requests[request], seen.added_ns[request]
        ends = allowed_ends(self._stories[planned.peer], planned, added, seen.registered_ns.get(request))
        if seen.interrupted_ns is not None:
            ends.append(Allowed("closed", seen.interrupted_ns))
        return ends

    def _expect(self, verdict: Verdict, request: int) -> None:
        book = verdict.peers[self._plan.requests[request].peer]
        book.requests += 1
        kinds = {allowed.kind for allowed in self.allowed(request)}
        book.high.update(kinds)
        if len(kinds) == 1:
            book.low.update(kinds)

    def _judge_end(self, verdict: Verdict, request: int, end: End) -> None:
        planned = self._plan.requests[request]
        book, detail, kind = verdict.peers[planned.peer], self._seen.details[end.detail], self._kind(end)
        book.ends[kind] += 1
        if kind == "routed":
            book.route_ns.append(end.ended_ns - end.added_ns)
        elif isinstance(detail, FailureSeen):
            book.reasons.setdefault(kind, detail.reason)
        faults = [self._fault(planned, allowed, kind, end) for allowed in self.allowed(request)]
        if all(faults):
            what = f"request {request} to {self._name(request)} ended {kind}"
            text = "; or ".join(fault for fault in faults if fault)
            verdict.complain(f"{what}: {text}", f"{kind} {planned.peer}")

    def _kind(self, end: End) -> str:
        detail = self._seen.details[end.detail]
        if end.kind == ROUTED:
            return "routed"
        return detail.kind if end.kind == FAILED and isinstance(detail, FailureSeen) else "raised"

    def _name(self, request: int) -> str:
        peer = self._plan.requests[request].peer
        return f"{self._plan.peers[peer].name} ({self._seen.addresses[peer]})"

    def _fault(self, planned: PlannedRequest, allowed: Allowed, kind: str, end: End) -> str | None:
        """Say why this end is not the allowed one, or None when it is."""
        if kind != allowed.kind:
            return f"had to be {allowed.kind}"
        if end.ended_ns < allowed.not_before_ns - EARLY_NS:
            return f"{kind} {(allowed.not_before_ns - end.ended_ns) / NS:.3f} s too early"
        if end.ended_ns > allowed.not_after_ns:
            return f"{kind} {(end.ended_ns - allowed.not_after_ns) / NS:.3f} s too late"
        detail = self._seen.details[end.detail]
        if isinstance(detail, FailureSeen):
            return self._fault_of_failure(detail, allowed, self._seen.addresses[planned.peer])
        expected = self._routes.get((planned.peer, allowed.life, planned.dp_rank))
        return None if detail == expected else f"the route had to be {expected}, was {detail}"

    def _fault_of_failure(self, failure: FailureSeen, allowed: Allowed, addr: str) -> str | None:
        if failure.addr != addr or not failure.reason.startswith(f"{addr}: "):
            return f"the failure had to name {addr}: {failure}"
        if failure.http_status != STATUSES[allowed.kind]:
            return f"the status had to be {STATUSES[allowed.kind]}: {failure}"
        if missing := [word for word in allowed.words if word not in failure.reason]:
            return f"the reason does not say {', '.join(map(repr, missing))}: {failure.reason}"
        if allowed.kind in BUDGET_KINDS:
            if failure.attempts < self._plan.options.attempts:
                return f"given up after {failure.attempts} attempts: {failure.reason}"
            if f"{failure.attempts} attempt" not in failure.reason:
                return f"the reason does not say {failure.attempts} attempts: {failure.reason}"
        return None


def expected_route(peer: PeerSpec, addr: str, life: int, dp_rank: int, mapping: Mapping) -> RouteSeen:
    """Work out the whole route: endpoints as registered, CP ascending, then TP ascending, then PP descending.

    A rank is a dummy when its answer is not awaited: where all TP ranks hold the same, all but the real one.
    """
    cps, tps, pps = mapping.target_cp_ranks, mapping.target_tp_ranks, mapping.target_pp_ranks
    awaited = mapping.required_prefill_response_num
    endpoints = []
    for cp in sorted(cps):
        for tp in sorted(tps):
            for pp in sorted(pps, reverse=True):
                rank = Rank(dp_rank, cp, tp, pp)
                dummy = awaited < len(cps) * len(tps) * len(pps) and tp != mapping.target_tp_rank
                endpoints.append((dp_rank, cp, tp, pp, *peer.rank_address(life, rank), dummy))
    return RouteSeen(
        addr,
        dp_rank,
        mapping.target_tp_rank,
        tuple(tps),
        tuple(cps),
        tuple(pps),
        mapping.required_dst_info_num,
        mapping.required_prefill_response_num,
        tuple(endpoints),
    )
