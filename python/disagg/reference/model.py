"""The state that the reference keeps: requests, peers, lookups of one dp rank, and the scheduler's clock.

All times are integer nanoseconds. `None` stands for never.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from disagg.values import Endpoint, Failure, Route

__all__ = [
    "MS",
    "SECOND",
    "TABLE",
    "Group",
    "Headers",
    "Identity",
    "InFlight",
    "Options",
    "Peer",
    "Policy",
    "Request",
    "SchedulerClock",
    "within_limits",
]

MS = 1_000_000
SECOND = 1_000_000_000
TABLE = -1


@dataclass(frozen=True)
class Policy:
    """The retry policy, as `disagg.RetryPolicy`, in seconds."""

    max_attempts: int = 15
    interval_s: float = 1.0
    multiplier: float = 1.0
    max_interval_s: float = 30.0
    jitter: float = 0.0
    cooldown_s: float = 15.0
    min_wait_s: float = 5.0
    per_cycle: bool = False

    def gap(self, attempt: int, unit: float) -> int:
        """Nanoseconds from the start of `attempt` (from 1) to the next; `unit` in [0, 1) scales the jitter."""
        delay = self.interval_s
        for _ in range(attempt - 1):
            if delay >= self.max_interval_s:
                break
            delay = delay * self.multiplier
        delay = min(delay, self.max_interval_s)
        return int(delay * (1.0 - self.jitter * unit) * SECOND)


@dataclass(frozen=True)
class Options:
    """Everything else that a Resolver takes and the machine looks at."""

    default_port: int | None = 8998
    dp_rank_timeout_s: float = 30.0
    endpoint_timeout_s: float = 10.0
    request_timeout_s: float = 120.0
    heartbeat_interval_s: float = 5.0
    heartbeat_failures: int = 2
    heartbeat_min_down_s: float = 10.0
    peer_ttl_s: float = 900.0
    max_addresses: int = 4096
    max_endpoint_lookups_per_peer: int = 8
    force_query: bool = False
    track_rooms: bool = False
    not_found_is_transient: bool = False
    allowed_hosts: Sequence[str] | None = None
    allowed_rank_hosts: Sequence[str] | None = None


class SchedulerClock:
    """Time as the scheduler lives it: stands still when no poll came for a second, and while paused."""

    GRACE = SECOND

    def __init__(self, now: int) -> None:
        self.last_poll = now
        self.shift = 0
        self.paused_at: int | None = None

    def read(self, now: int) -> int:
        """Return what the clock shows."""
        if self.paused_at is not None:
            return self.paused_at
        return min(now, self.last_poll + self.GRACE) - self.shift

    def stands_still(self, now: int) -> bool:
        """Whether it is stopped."""
        return self.paused_at is not None or now > self.last_poll + self.GRACE

    def on_poll(self, now: int) -> None:
        """Take note of a poll."""
        if self.paused_at is None:
            self.shift += max(0, now - (self.last_poll + self.GRACE))
        self.last_poll = now

    def pause(self, now: int) -> None:
        """Stop until `resume`."""
        if self.paused_at is None:
            self.paused_at = self.read(now)

    def resume(self, now: int) -> None:
        """Go on."""
        if self.paused_at is not None:
            self.shift = now - self.paused_at
            self.last_poll = now
            self.paused_at = None


class Headers(NamedTuple):
    """The headers of an answer that concern the peer."""

    instance: str | None = None
    epoch: str | None = None
    features: str | None = None


def within_limits(value: str | None) -> str | None:
    """A header or field of a peer, unless it is empty, or too long to be kept."""
    return value if value and len(value.encode()) <= 256 else None


class Identity(NamedTuple):
    """Which life of a peer, and which of its snapshots, as far as it says."""

    instance: str | None = None
    epoch: str | None = None

    def differs_from(self, other: Identity) -> bool:
        """Whether `other` is said of another life or snapshot; what is not said does not differ."""
        return any(a is not None and b is not None and a != b for a, b in zip(self, other, strict=True))

    def learn(self, other: Identity) -> Identity:
        """What is known with what `other` says beyond it."""
        return Identity(
            other.instance if self.instance is None else self.instance,
            other.epoch if self.epoch is None else self.epoch,
        )


@dataclass(eq=False)
class Request:
    """One pending request; ended when `end` is set, gone when a step delivered it."""

    obj: Any
    addr: str
    room: int
    preset: int | None
    seq: int
    added: int  # on the scheduler's clock
    stage: str = "need_info"
    stage_since: int = 0  # on the scheduler's clock
    dp_rank: int | None = None
    asked: int = 0
    next_ask: int = 0
    owns_room: bool = False  # False for those whose end was known when they came
    end: Route | Failure | None = None


@dataclass(eq=False)
class InFlight:
    """One HTTP request that was handed out and not answered."""

    ticket: int
    kind: str
    started: int
    purpose: str  # "attempt", "probe", "read", "check", "query", "lookup", "table"
    rooms: list[Request] = field(default_factory=list)
    wait_ms: int = 0
    dp_rank: int = 0
    contact: int = 0  # of a look-up or a check; TABLE for all of them in one answer


@dataclass(eq=False)
class Group:
    """The endpoints of one (peer, dp rank) in one epoch.

    `state`: "looking" (look-ups wanted or in flight), "waiting" (until `until`), "reading" (the topology is to
    be read by a read whose ticket is at least `read_from`), "ready".
    """

    dp_rank: int
    found: dict[int, tuple[str, int]] = field(default_factory=dict)
    wanted: list[int] = field(default_factory=list)  # as `InFlight.contact`
    flying: int = 0
    state: str = "looking"
    until: int = 0
    failed_at: int | None = None
    read_from: int = 0
    not_found: bool = False
    last_error: str = ""
    route: Route | None = None
    endpoints: tuple[Endpoint, ...] = ()


@dataclass(eq=False)
class Peer:
    """One bootstrap address.

    `state`: "unknown", "fetching", "waiting" (until `until`, or for a poll), "ready", "marked" (refused or down:
    newcomers fail with `mark`, a probe goes out at `until`).
    """

    addr: str
    last_add: int
    state: str = "unknown"
    dialect: int = 3
    attempt: int = 0
    spent_at: int | None = None
    until: int = 0
    waits_for_poll: bool = False
    deferred: bool = False
    mark: Failure | None = None
    attempt_error: tuple[str, str] = ("unreachable", "")
    fetch: InFlight | None = None
    info: Any = None
    mapping: Any = None
    identity: Identity = field(default_factory=Identity)
    features: frozenset[str] = frozenset()
    epoch: int = 0
    restart_not_before: int = 0
    restarts: int = 0  # since it last gave a route
    lost: bool = False
    query: InFlight | None = None
    waiting_query: InFlight | None = None
    query_not_before: int = 0
    query_error: str = ""
    waits_failed: int = 0  # waiting queries in a row
    asks_plainly: bool = False  # until a plain query is answered
    read: InFlight | None = None
    check: InFlight | None = None
    checks: int = 0
    read_not_before: int = 0
    next_heartbeat: int = 0
    beats_missed: int = 0
    missed_since: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    lookups: dict[int, InFlight] = field(default_factory=dict)
