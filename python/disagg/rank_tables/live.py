"""A prefill engine as its live registry describes it."""

from __future__ import annotations

import json
from typing import NamedTuple, Protocol

from disagg._core import TOPOLOGY_QUERIES, PrefillInfo, canonical_address, parse_dp_ranks, parse_not_ready
from disagg.errors import DisaggError, PeerUnreachable, ProtocolError
from disagg.rank_tables.room import RoomRank, rank_by_rule
from disagg.transport.asker import NoAnswer
from disagg.transport.attempt import Answer
from disagg.usage import UsageError

__all__ = ["Asks", "NotReady", "Topology", "address_of", "ask_room", "ask_topology"]


class Asks(Protocol):
    """What asks one question after another, as an Asker does."""

    def ask(self, addr: str, path: str, body: bytes | None = None) -> Answer:
        """Return the answer of `addr`; raises NoAnswer."""


class Topology(NamedTuple):
    """A prefill engine, and whether its registry understands only the first form of the queries (E2)."""

    info: PrefillInfo
    is_old: bool
    answer: Answer


class NotReady(DisaggError):
    """A server answered at `addr`, but not with a topology.

    `reason` says with what, `status` is the HTTP status; it is a registry if it said that it waits for ranks.
    """

    def __init__(self, addr: str, reason: str, status: int, *, is_registry: bool) -> None:
        super().__init__(addr, reason, status, is_registry)
        self.addr = addr
        self.reason = reason
        self.status = status
        self.is_registry = is_registry

    def __str__(self) -> str:
        return f"{self.addr} {self.reason}"


def address_of(text: str, option: str = "--prefill") -> str:
    """The canonical address in `http://host:port/`, `host:port` or `host`.

    Raises UsageError.
    """
    bare = text[len(SCHEME) :].removesuffix("/") if text.lower().startswith(SCHEME) else text
    try:
        return canonical_address(bare)
    except ValueError as error:
        raise UsageError(f"{option} {text}: {error}") from None


def ask_topology(asker: Asks, addr: str) -> Topology:
    """Ask for the topology, in the older form too where the newer one is not understood.

    Raises PeerUnreachable without an answer, NotReady for one that is no topology, ProtocolError for a bad one.
    """
    answer = _ask(asker, addr, NEWER_QUERY)
    is_old = answer.status == BAD_REQUEST
    if is_old:
        answer = _ask(asker, addr, OLDER_QUERY)
    status, body = answer.status, answer.body
    if status == UNAVAILABLE:
        waits = parse_not_ready(body) or "not all prefill ranks have registered"
        raise NotReady(addr, f"is not ready: it answered 503, {waits}", status, is_registry=True)
    if status == UNAUTHORIZED:
        raise NotReady(addr, "answered 401: it wants a token, or another one", status, is_registry=False)
    if status != OK:
        reason = f"answered {status} to the topology query: no bootstrap registry there?"
        raise NotReady(addr, reason, status, is_registry=False)
    try:
        return Topology(PrefillInfo.from_json(body), is_old, answer)
    except ProtocolError as error:
        if (error.field, error.value) == ("attn_tp_size", "null"):
            raise NotReady(addr, "is not ready: it answered null sizes", status, is_registry=True) from None
        raise


def ask_room(asker: Asks, addr: str, room: int, topology: Topology) -> RoomRank:
    """The dp rank of a room, by the engine's rule or by a question; that it is not known, and why, is an answer too."""
    known = rank_by_rule(room, topology.info, always=topology.is_old)
    if known is not None:
        return known
    try:
        status, body, _ = _ask(asker, addr, "/query_dp_ranks", json.dumps({"bootstrap_rooms": [room]}).encode())
        rank = parse_dp_ranks(body).get(room) if status == OK else None
    except PeerUnreachable as error:
        return RoomRank(room, None, f"no answer to the dp-rank query: {error.reason}")
    except ProtocolError as error:
        return RoomRank(room, None, f"a bad answer to the dp-rank query: {error}")
    if status != OK:
        return RoomRank(room, None, f"the registry answered {status} to the dp-rank query")
    if rank is None:
        return RoomRank(room, None, "the registry does not know it yet")
    size = topology.info.dp_size
    why = "the registry's answer" if rank < size else f"the registry says {rank}, which is not below dp size {size}"
    return RoomRank(room, rank if rank < size else None, why)


def _ask(asker: Asks, addr: str, path: str, body: bytes | None = None) -> Answer:
    try:
        return asker.ask(addr, path, body)
    except NoAnswer as trouble:
        raise PeerUnreachable(addr, 1, trouble.message) from None


SCHEME = "http://"
NEWER_QUERY, OLDER_QUERY = TOPOLOGY_QUERIES
OK, BAD_REQUEST, UNAUTHORIZED, UNAVAILABLE = 200, 400, 401, 503
