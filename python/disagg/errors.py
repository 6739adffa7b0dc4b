"""What can go wrong, as types that say who is at fault: the caller, the operator, or the other server.

A mistake of the caller is a plain `TypeError` or `ValueError`. Every class here takes its facts as arguments, keeps
them as attributes, builds its text from them, and pickles.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from disagg.printable import printable

__all__ = [
    "ConfigError",
    "DisaggError",
    "DpRankTimeout",
    "IncompatiblePeer",
    "NotAllowed",
    "PeerUnreachable",
    "ProtocolError",
    "Reason",
    "ReasonKind",
    "ReasonValue",
    "Severity",
]

ReasonValue: TypeAlias = bool | int | str | tuple[int, ...] | Mapping[str, object] | None
"""One side's value: None is "not stated", a tuple holds the sizes that the text names."""


class Severity(enum.StrEnum):
    """Whether a difference refuses the peer."""

    FATAL = "fatal"
    WARNING = "warning"


class ReasonKind(enum.StrEnum):
    """What differs between two peers, or which rule the pair breaks, in the order in which it is reported."""

    PAGE_SIZE = "page_size"
    KV_CACHE_DTYPE = "kv_cache_dtype"
    KV_LAYOUT = "kv_layout"
    DECODE_ALLOCATION_POLICY = "decode_allocation_policy"
    SPEC_LAYOUT = "spec_layout"
    PREFILL_COMPLETE = "prefill_complete"
    EQUAL_TP = "equal_tp"
    SHARDING_TP = "sharding_tp"
    TP_DIVISIBILITY = "tp_divisibility"
    UNEQUAL_TP = "unequal_tp"
    NUM_KV_HEADS = "num_kv_heads"
    DECODE_CP = "decode_cp"
    PP_SIZE = "pp_size"
    DCP_KV = "dcp_kv"
    DCP_PREFILL_CP = "dcp_prefill_cp"
    DCP_SHARDING = "dcp_sharding"
    CONTACTS = "contacts"


@dataclass(frozen=True, slots=True)
class Reason:
    """One difference between a decode rank (`local`) and a prefill engine (`remote`), with both values."""

    kind: ReasonKind
    severity: Severity
    local: ReasonValue
    remote: ReasonValue
    text: str


class DisaggError(Exception):
    """The root of all errors of this package that are not the caller's."""


class ConfigError(DisaggError):
    """The operator's settings contradict each other; `option` names the setting. Secrets are not kept."""

    def __init__(self, option: str, rule: str) -> None:
        super().__init__(option, rule)
        self.option = option
        self.rule = rule

    def __str__(self) -> str:
        return f"{self.option}: {self.rule}"


class IncompatiblePeer(DisaggError):
    """A prefill engine that this decode rank cannot read from.

    `reasons` are all differences at once, warnings too; at least one is fatal.
    """

    def __init__(self, reasons: Iterable[Reason]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(self.reasons)

    def __str__(self) -> str:
        return "; ".join(reason.text for reason in self.reasons)


class ProtocolError(DisaggError):
    """An answer of the other server breaks the protocol.

    `field` is the key on the wire (`body` for the answer as a whole, `era` for a protocol era that is not spoken),
    `value` the JSON text that stood there, cut to 80 characters and empty when the field is missing, `rule` what it
    breaks.
    """

    def __init__(self, field: str, value: str, rule: str = "must follow the protocol") -> None:
        super().__init__(field, value, rule)
        self.field = field
        self.value = value
        self.rule = rule

    def __str__(self) -> str:
        what = f"{self.field} {self.value}" if self.value else self.field
        return f"{printable(what)}: {self.rule}"


class PeerUnreachable(DisaggError):
    """No usable answer from `addr` (canonical `host:port`) after `attempts` attempts; `reason` ends the last one."""

    def __init__(self, addr: str, attempts: int, reason: str) -> None:
        super().__init__(addr, attempts, reason)
        self.addr = addr
        self.attempts = attempts
        self.reason = reason

    def __str__(self) -> str:
        attempts = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        return f"{self.addr} not reached in {attempts}: {self.reason}"


class DpRankTimeout(DisaggError):
    """The dp rank of `room` was not known to `addr` within `timeout_s` seconds."""

    def __init__(self, addr: str, room: int, timeout_s: float) -> None:
        super().__init__(addr, room, timeout_s)
        self.addr = addr
        self.room = room
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"{self.addr} has no dp rank for room {self.room} after {self.timeout_s:g} s"


class NotAllowed(DisaggError):
    """`addr` is not in `allowed_hosts`; no packet was sent."""

    def __init__(self, addr: str) -> None:
        super().__init__(addr)
        self.addr = addr

    def __str__(self) -> str:
        return f"{self.addr} is not in allowed_hosts"
