"""The plain values that come out of a Resolver: routes, failures, events and steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from disagg._core import PrefillInfo, RankMapping

__all__ = ["Endpoint", "Event", "Failure", "Route", "Step"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One prefill rank and where it listens for key-value transfers.

    `dp`, `cp`, `tp` and `pp` are the rank's coordinates in the prefill engine. `dummy` ranks are contacted,
    because they wait for every decode rank, but send nothing.
    """

    dp: int
    cp: int
    tp: int
    pp: int
    ip: str
    port: int
    dummy: bool


@dataclass(frozen=True, slots=True)
class Route:
    """All that a receiver needs for one (peer, dp rank): shared by all requests that it serves.

    `endpoints` are in contact order: CP ascending, then TP ascending, then PP descending. `epoch` counts the
    peer's lives as this side saw them; compare it for equality only. A `fake` route (warm-up) has dp rank 0,
    no mapping, no info and no endpoints.
    """

    addr: str
    dp_rank: int
    mapping: RankMapping | None
    endpoints: tuple[Endpoint, ...]
    info: PrefillInfo | None
    epoch: int
    fake: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was not placed.

    `kind` is one of `disagg.FAILURE_KINDS`, `http_status` what to answer the client with, `attempts` how many
    attempts at the peer's topology had failed, `contacted` the (dp, cp, tp, pp) of the prefill ranks whose
    endpoints had been read. Shared by all requests that one event concerns.
    """

    kind: str
    reason: str
    http_status: int
    addr: str
    attempts: int
    contacted: tuple[tuple[int, int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """A change of one peer: `kind` is `peer_lost`, `peer_restarted` or `peer_back`.

    `epoch` is the epoch that ended (for `peer_back`: that began); the instances are None where the peer does
    not state them. `rooms` are the routed rooms concerned, with `track_rooms=True`.
    """

    kind: str
    addr: str
    epoch: int
    old_instance: str | None = None
    new_instance: str | None = None
    rooms: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What one `poll()` took: decisions in order of arrival, and events of peers.

    `seq` counts the steps that held something, from 1; the shared empty step has 0. `more` says that `limit`
    left decisions for the next poll.
    """

    seq: int
    resolved: tuple[tuple[Any, Route], ...] = ()
    failed: tuple[tuple[Any, Failure], ...] = ()
    events: tuple[Event, ...] = ()
    more: bool = False
