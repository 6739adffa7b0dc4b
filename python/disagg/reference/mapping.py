"""Rank mapping and compatibility in plain Python (DESIGN.md section 5).

Works on anything with the attributes of `disagg.DecodeRank` and `disagg.PrefillInfo`; `PrefillInfo` here is the
reference's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from disagg.errors import IncompatiblePeer, Reason, ReasonKind, ReasonValue, Severity

__all__ = ["Contact", "PrefillInfo", "RankMapping", "compatibility", "map_ranks"]

MAX_CONTACTS = 4096
DTYPE_ALIASES = {
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}


@dataclass(frozen=True)
class PrefillInfo:
    """What a prefill engine says of itself."""

    attn_tp_size: int
    attn_cp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    follow_bootstrap_room: bool = True
    enable_dsa_cache_layer_split: bool = False
    enable_kv_cache_sharding: bool = False
    prefill_http_port: int | None = None
    kv_layout: str | None = None
    decode_allocation_policy: str | None = "early"
    dynamic_dp_size: bool = False
    spec_layout: dict[str, Any] | None = None
    extras: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contact:
    """One prefill rank to contact."""

    cp: int
    tp: int
    pp: int
    dummy: bool


@dataclass(frozen=True)
class RankMapping:
    """Which prefill ranks a decode rank reads; field names as `disagg.RankMapping`."""

    target_tp_rank: int | None
    target_tp_ranks: tuple[int, ...]
    target_cp_ranks: tuple[int, ...]
    target_pp_ranks: tuple[int, ...]
    required_dst_info_num: int
    required_prefill_response_num: int
    only_real_tp_rank: bool

    def contacts(self) -> Iterator[Contact]:
        """Yield the ranks in contact order: CP ascending, TP ascending, PP descending."""
        for cp in self.target_cp_ranks:
            for tp in self.target_tp_ranks:
                for pp in reversed(self.target_pp_ranks):
                    yield Contact(cp, tp, pp, self.only_real_tp_rank and tp != self.target_tp_rank)


def map_ranks(decode: Any, prefill: Any) -> RankMapping:
    """Return the mapping, or raise IncompatiblePeer with all differences when one of them is fatal."""
    reasons = compatibility(decode, prefill)
    if any(reason.severity == Severity.FATAL for reason in reasons):
        raise IncompatiblePeer(reasons)
    tp_rank, tp_ranks, destinations, answers = _map_tp(decode, prefill)
    cp_ranks = range(prefill.attn_cp_size) if _reads_all_cp(decode, prefill) else range(1)
    pp_ranks = (decode.pp_rank,) if decode.pp_size == prefill.pp_size else tuple(range(prefill.pp_size))
    dummies = decode.kv == "mla" and prefill.attn_tp_size > decode.attn_tp_size
    answers = answers * len(cp_ranks) * len(pp_ranks)
    return RankMapping(tp_rank, tp_ranks, tuple(cp_ranks), pp_ranks, destinations, answers, dummies)


def _map_tp(decode: Any, prefill: Any) -> tuple[int | None, tuple[int, ...], int, int]:
    """Return the real TP rank, all TP ranks, destinations, and answers before CP and PP."""
    ours, theirs = decode.attn_tp_size, prefill.attn_tp_size
    rank = decode.engine_rank % ours
    if _is_sharded_over_tp(decode, prefill):
        return None, tuple(range(theirs)), ours, theirs
    if ours >= theirs:
        several = ours // theirs
        return rank // several, (rank // several,), several, 1
    several = theirs // ours
    block = tuple(range(rank * several, (rank + 1) * several))
    return block[0], block, 1, 1 if decode.kv == "mla" else several


def _is_sharded_over_tp(decode: Any, prefill: Any) -> bool:
    return bool(prefill.enable_kv_cache_sharding and decode.kv == "mla" and prefill.attn_cp_size == 1)


def _reads_all_cp(decode: Any, prefill: Any) -> bool:
    automatic = decode.kv == "hybrid_mla"
    asked = automatic if decode.all_cp_ranks is None else decode.all_cp_ranks
    return bool(asked or prefill.enable_dsa_cache_layer_split or prefill.enable_kv_cache_sharding)


def compatibility(decode: Any, prefill: Any) -> list[Reason]:
    """Return all differences of the pair, fatal ones and warnings."""
    reasons: list[Reason] = []

    def report(kind: str, local: ReasonValue, remote: ReasonValue, severity: Severity = Severity.FATAL) -> None:
        reasons.append(Reason(ReasonKind(kind), severity, local, remote, f"{kind}: {local!r} and {remote!r}"))

    _compare_cache(decode, prefill, report)
    _compare_tp(decode, prefill, report)
    if decode.attn_cp_size != 1:
        report("decode_cp", decode.attn_cp_size, prefill.attn_cp_size)
    if decode.pp_size not in (1, prefill.pp_size):
        report("pp_size", decode.pp_size, prefill.pp_size)
    if decode.dcp_size > 1:
        if decode.kv == "mha":
            report("dcp_kv", decode.dcp_size, None)
        if prefill.attn_cp_size != 1:
            report("dcp_prefill_cp", decode.dcp_size, prefill.attn_cp_size)
        if prefill.enable_kv_cache_sharding:
            report("dcp_sharding", decode.dcp_size, True)
    contacts = _count_contacts(decode, prefill)
    if contacts > MAX_CONTACTS:
        report("contacts", None, contacts)
    return reasons


def _compare_cache(decode: Any, prefill: Any, report: Any) -> None:
    if None not in (decode.page_size, prefill.page_size) and decode.page_size != prefill.page_size:
        report("page_size", decode.page_size, prefill.page_size)
    ours, theirs = decode.kv_cache_dtype, prefill.kv_cache_dtype
    if None not in (ours, theirs) and _dtype(ours) != _dtype(theirs):
        unresolved = "auto" in (_dtype(ours), _dtype(theirs))
        warn = unresolved and not decode.strict_dtype
        report("kv_cache_dtype", ours, theirs, Severity.WARNING if warn else Severity.FATAL)
    for name in ("kv_layout", "decode_allocation_policy"):
        ours, theirs = getattr(decode, name), getattr(prefill, name)
        if None not in (ours, theirs) and ours != theirs:
            report(name, ours, theirs)
    if decode.spec_layout != prefill.spec_layout:
        report("spec_layout", decode.spec_layout, prefill.spec_layout)
    if "prefill_complete" in (decode.decode_allocation_policy, prefill.decode_allocation_policy):
        sizes = (prefill.attn_tp_size, prefill.attn_cp_size, prefill.pp_size)
        if sizes != (1, 1, 1):
            report("prefill_complete", decode.decode_allocation_policy, sizes)


def _dtype(name: str) -> str:
    name = name.removeprefix("torch.")
    return DTYPE_ALIASES.get(name, name)


def _compare_tp(decode: Any, prefill: Any, report: Any) -> None:
    ours, theirs = decode.attn_tp_size, prefill.attn_tp_size
    if ours != theirs:
        if decode.requires_equal_tp:
            report("equal_tp", ours, theirs)
        if _is_sharded_over_tp(decode, prefill):
            report("sharding_tp", ours, theirs)
        elif ours % theirs and theirs % ours:
            report("tp_divisibility", ours, theirs)
        elif decode.kv == "mha":
            report("unequal_tp", ours, theirs, Severity.WARNING)
    heads = decode.num_kv_heads
    if heads is not None and decode.kv != "mla" and any(heads % tp and tp % heads for tp in (ours, theirs)):
        report("num_kv_heads", (heads, ours), (heads, theirs))


def _count_contacts(decode: Any, prefill: Any) -> int:
    sharded = _is_sharded_over_tp(decode, prefill)
    tp = prefill.attn_tp_size if sharded else max(1, prefill.attn_tp_size // decode.attn_tp_size)
    cp = prefill.attn_cp_size if _reads_all_cp(decode, prefill) else 1
    pp = 1 if decode.pp_size == prefill.pp_size else prefill.pp_size
    return int(tp * cp * pp)
