"""Asking a registry all that can be asked of it without changing anything there."""

from __future__ import annotations

import enum
import ipaddress
import itertools
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg._core import PrefillInfo, parse_dp_ranks, parse_endpoint
from disagg.errors import PeerUnreachable, ProtocolError
from disagg.probe.era import Era, era_of
from disagg.rank_tables.live import Asks, NotReady, Topology, ask_topology
from disagg.rank_tables.pair import DecodeEngine, Pair
from disagg.transport.asker import NoAnswer
from disagg.transport.attempt import Answer

__all__ = ["Endpoints", "Look", "RankAt", "State", "look_at"]

OK, NOT_FOUND = 200, 404


class State(enum.StrEnum):
    """What a registry is good for, and the exit status that says so."""

    READY = "ready"
    INCOMPATIBLE = "incompatible"
    INCOMPLETE = "incomplete"
    NOT_READY = "not_ready"
    PROTOCOL_ERROR = "protocol_error"
    UNAUTHORIZED = "unauthorized"
    NOT_A_REGISTRY = "not_a_registry"
    UNREACHABLE = "unreachable"

    @property
    def exit_status(self) -> int:
        """0 ready, 2 unreachable, 1 everything between."""
        return {State.READY: 0, State.UNREACHABLE: 2}.get(self, 1)


class RankAt(NamedTuple):
    """A rank, "dp0/cp0/tp1/pp0", and where it listens."""

    rank: str
    ip: str
    port: int


@dataclass(slots=True)
class Endpoints:
    """What is known of the ranks' endpoints: `asked` of `count` ranks."""

    count: int
    asked: int = 0
    found: list[RankAt] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    trouble: str | None = None  # what stopped it, or the first bad answer


@dataclass(slots=True)
class Look:
    """What one look at a registry showed; what it did not get to is None."""

    addr: str
    state: State = State.READY
    reason: str | None = None
    answers_ms: list[float] = field(default_factory=list)
    era: Era | None = None
    identities: list[tuple[str | None, str | None]] = field(default_factory=list)
    features: tuple[str, ...] = ()
    info: PrefillInfo | None = None
    endpoints: Endpoints | None = None
    dp_rank_query: str | None = None
    pair: Pair | None = None

    @property
    def instance(self) -> str | None:
        """What it last said to be its instance."""
        return next((instance for instance, _ in reversed(self.identities) if instance is not None), None)

    @property
    def epoch(self) -> str | None:
        """What it last said to be its snapshot."""
        return next((epoch for _, epoch in reversed(self.identities) if epoch is not None), None)

    def warnings(self) -> list[str]:
        """What is odd though it may work, a sentence each."""
        return [*self._of_lives(), *self._of_endpoints(), *self._of_rooms()]

    def _of_lives(self) -> list[str]:
        if len(set(self.identities)) > 1:
            return ["instance or epoch changed while it was asked: it restarts, or several answer at this address"]
        return []

    def _of_endpoints(self) -> list[str]:
        if self.endpoints is None:
            return []
        found, here = self.endpoints.found, _reaches_own_host_only(self.addr.rpartition(":")[0])
        warnings = [
            f"rank {at.rank} advertises {at.ip}, which leads nowhere from another host"
            for at in found
            if not here and _reaches_own_host_only(at.ip)
        ]
        by_place = sorted(found, key=lambda at: (at.ip, at.port))
        for (ip, port), group in itertools.groupby(by_place, key=lambda at: (at.ip, at.port)):
            ranks = [at.rank for at in group]
            if len(ranks) > 1:
                warnings.append(f"ranks {ranks[0]} and {ranks[1]} advertise the same endpoint, {ip} port {port}")
        if len(warnings) > MOST_WARNINGS:
            warnings[MOST_WARNINGS:] = [f"{len(warnings) - MOST_WARNINGS} more like these"]
        return warnings

    def _of_rooms(self) -> list[str]:
        if self.info is None or self.dp_rank_query is None or self.dp_rank_query == ANSWERED:
            return []
        if self.info.dp_size == 1:
            return []
        return [f"the dp-rank query {self.dp_rank_query}: rooms whose dp rank it alone knows cannot be placed"]


def look_at(asker: Asks, addr: str, *, decode: DecodeEngine | None = None, most_ranks: int) -> Look:
    """Ask the registry at `addr`, a canonical address, for topology, endpoints and dp ranks; raises nothing.

    At most `most_ranks` ranks are asked for, in ascending order; `decode` is compared with the topology.
    """
    look = Look(addr)
    timed = _Timed(asker, look)
    try:
        topology = ask_topology(timed, addr)
    except PeerUnreachable as error:
        look.state, look.reason = State.UNREACHABLE, error.reason
        return look
    except NotReady as error:
        look.state, look.reason = _state_of(error), error.reason
        return look
    except ProtocolError as error:
        look.state, look.reason = State.PROTOCOL_ERROR, f"answered with a bad topology: {error}"
        return look
    look.info, look.era = topology.info, era_of(topology.answer.body, is_old=topology.is_old)
    _look_at_endpoints(timed, look, topology, most_ranks)
    if not topology.is_old:
        look.dp_rank_query = _ask_for_no_rooms(timed, addr)
    if decode is not None:
        look.pair = Pair(decode.with_fields(spec_layout=look.info.spec_layout), look.info)
        if look.state is State.READY and not look.pair.fits:
            look.state, look.reason = State.INCOMPATIBLE, "does not fit the decode engine"
    return look


class _Timed:
    """Asks through another asker, and notes in a look how long it took and who answered."""

    def __init__(self, asker: Asks, look: Look) -> None:
        self._asker = asker
        self._look = look

    def ask(self, addr: str, path: str, body: bytes | None = None) -> Answer:
        """Return the answer of `addr`; raises NoAnswer."""
        before = time.perf_counter()
        answer = self._asker.ask(addr, path, body)
        self._look.answers_ms.append(1000 * (time.perf_counter() - before))
        instance, epoch, features = answer.headers
        self._look.identities.append((instance, epoch))
        if features is not None:
            self._look.features = tuple(word.strip() for word in features.split(",") if word.strip())
        return answer


def _state_of(error: NotReady) -> State:
    if error.is_registry:
        return State.NOT_READY
    return State.UNAUTHORIZED if error.status == UNAUTHORIZED else State.NOT_A_REGISTRY


def _look_at_endpoints(asker: _Timed, look: Look, topology: Topology, most_ranks: int) -> None:
    info = topology.info
    sizes = info.dp_size, info.attn_cp_size, info.attn_tp_size, info.pp_size
    count = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    endpoints = look.endpoints = Endpoints(count)
    ranks = itertools.product(*(range(size) for size in sizes))
    for dp, cp, tp, pp in itertools.islice(ranks, most_ranks):
        rank = f"dp{dp}/cp{cp}/tp{tp}/pp{pp}"
        try:
            answer = asker.ask(look.addr, _path(topology, dp, cp, tp, pp))
        except NoAnswer as trouble:
            endpoints.trouble = f"no answer for rank {rank}: {trouble.message}"
            break
        endpoints.asked += 1
        if answer.status == NOT_FOUND:
            endpoints.missing.append(rank)
        elif answer.status != OK:
            endpoints.trouble = endpoints.trouble or f"it answered {answer.status} for rank {rank}"
        else:
            try:
                endpoints.found.append(RankAt(rank, *parse_endpoint(answer.body)))
            except ProtocolError as error:
                endpoints.trouble = endpoints.trouble or f"a bad endpoint of rank {rank}: {error}"
    if endpoints.missing or endpoints.trouble:
        look.state, look.reason = State.INCOMPLETE, _incomplete(endpoints)


def _incomplete(endpoints: Endpoints) -> str:
    parts = []
    if endpoints.missing:
        named = ", ".join(endpoints.missing[:MOST_NAMED])
        more = len(endpoints.missing) - MOST_NAMED
        parts.append(f"says it is ready, but has no {named}" + (f" and {more} more" if more > 0 else ""))
    if endpoints.trouble:
        parts.append(endpoints.trouble)
    return "; ".join(parts)


def _path(topology: Topology, dp: int, cp: int, tp: int, pp: int) -> str:
    if topology.is_old:
        return f"/route?engine_rank={tp}&target_dp_group={dp}&target_pp_rank={pp}"
    return f"/route?prefill_dp_rank={dp}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}"


def _ask_for_no_rooms(asker: _Timed, addr: str) -> str:
    try:
        answer = asker.ask(addr, "/query_dp_ranks", b'{"bootstrap_rooms":[]}')
        if answer.status != OK:
            return f"was answered {answer.status}"
        parse_dp_ranks(answer.body)
    except NoAnswer as trouble:
        return f"was not answered ({trouble.message})"
    except ProtocolError as error:
        return f"was answered badly ({error})"
    return ANSWERED


def _reaches_own_host_only(host: str) -> bool:
    try:
        ip = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host == "localhost"
    return ip.is_loopback or ip.is_unspecified


ANSWERED = "was answered"
UNAUTHORIZED = 401
MOST_NAMED = 16
MOST_WARNINGS = 8
