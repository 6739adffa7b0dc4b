"""What an answer to the topology query means (the table of DESIGN.md section 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from disagg.errors import ProtocolError
from disagg.reference.wire import parse_not_ready, parse_topology

__all__ = ["FORBIDDEN", "NEXT_FORM", "Good", "Permanent", "Transient", "classify", "classify_error"]


@dataclass(frozen=True)
class Good:
    """A complete topology."""

    info: Any


@dataclass(frozen=True)
class Transient:
    """Worth another attempt; `kind` is the failure's if it was the last one."""

    kind: str
    text: str


@dataclass(frozen=True)
class Permanent:
    """Another attempt now would get the same answer."""

    kind: str
    text: str


FORBIDDEN = "forbidden"  # the name resolved to an address that may not be dialled
NEXT_FORM = "next form"  # 400 to the newer query: ask in the older form, within the same attempt


def classify(
    status: int, body: bytes, dialect: int, not_found_is_transient: bool
) -> Good | Transient | Permanent | str:
    """Class of an HTTP answer; `dialect` is the era of the query that it answers (3 or 2)."""
    if status == 200:
        try:
            info = parse_topology(body)
        except ProtocolError as error:
            return Transient("protocol_error", f"protocol error: {error}")
        if info is None:
            return Transient("not_ready", "answered null sizes: not ready")
        return Good(info)
    text = f"answered {status} to the topology query"
    if status == 503:
        waits = parse_not_ready(body)
        return Transient("not_ready", f"not ready: {waits}" if waits else "answered 503: not ready")
    if status == 400 and dialect == 3:
        return NEXT_FORM
    if status == 404 and not_found_is_transient:
        return Transient("not_ready", text)
    if status == 429 or status >= 500:
        return Transient("unreachable", text)
    if status == 413 or status < 300:
        return Transient("protocol_error", text)
    return Permanent("not_a_registry", text)


def classify_error(what: str, message: str) -> Transient | Permanent:
    """Class of an attempt that got no whole answer; `what` as the transport names it."""
    if what == FORBIDDEN:
        return Permanent("not_allowed", message or what)
    kind = "protocol_error" if what in ("cut", "oversized", "encoding") else "unreachable"
    return Transient(kind, message or what)
