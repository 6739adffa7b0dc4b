"""What prefill workers are told, and what children tell the parent at the end, in plain values."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from disagg.simulate.scenario import PeerSpec

__all__ = ["FailureSeen", "LoopResult", "PeerFacts", "PrefillResult", "PrefillSetup", "RouteSeen"]


@dataclass(frozen=True, slots=True)
class PrefillSetup:
    """What a worker runs. Times count from the start of the run.

    `rooms` are (register_s, request, peer, room, dp rank) in order of time, `last_rank_s` by peer.
    """

    peers: tuple[PeerSpec, ...]
    rooms: tuple[tuple[float, int, int, int, int], ...]
    restart_s: float
    last_rank_s: dict[int, float]


@dataclass(slots=True)
class PeerFacts:
    """When a peer changed, in monotonic ns; 0 is "not (yet)".

    `whole_ns` are the times of just before and just after the PUT of the last rank: of its first life, and of
    its second. `away_ns` is when it began to go away for its restart.
    """

    whole_ns: list[tuple[int, int]] = field(default_factory=list)
    away_ns: int = 0


@dataclass(slots=True)
class PrefillResult:
    """What a worker saw: facts by peer, when each room was registered (before, after), what went wrong."""

    facts: dict[int, PeerFacts] = field(default_factory=dict)
    registered_ns: dict[int, tuple[int, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RouteSeen:
    """A Route in plain values; an endpoint is (dp, cp, tp, pp, ip, port, dummy)."""

    addr: str
    dp_rank: int
    target_tp_rank: int | None
    target_tp_ranks: tuple[int, ...]
    target_cp_ranks: tuple[int, ...]
    target_pp_ranks: tuple[int, ...]
    required_dst_info_num: int
    required_prefill_response_num: int
    endpoints: tuple[tuple[int, int, int, int, str, int, bool], ...]


@dataclass(frozen=True, slots=True)
class FailureSeen:
    """A Failure in plain values."""

    kind: str
    reason: str
    http_status: int
    addr: str
    attempts: int


@dataclass(slots=True)
class LoopResult:
    """What a loop saw; the ends themselves are in the shared log, `count` of them."""

    count: int
    details: list[object]
    cycle_ns: array[int]
    calls_ns: array[int]
    added_ns: array[int]
    overruns: int
    disorders: int
    events: dict[str, int] = field(default_factory=dict)
    http: dict[str, int] = field(default_factory=dict)
