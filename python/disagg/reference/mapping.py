"""The rank mapping and the compatibility check in plain Python (DESIGN.md section 5).

Rank sets are written out as tuples and the contacts as a list; nothing here is meant to be fast. The functions take
anything with the attributes of `DecodeRank` and `PrefillInfo`, the ones of `disagg` too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.errors import IncompatiblePeer, Reason, ReasonKind, ReasonValue, Severity
from disagg.printable import printable

__all__ = [
    "Contact",
    "DecodeRank",
    "PrefillInfo",
    "RankMapping",
    "compatibility",
    "kv_heads",
    "map_ranks",
    "same_json",
]

MAX_CONTACTS = 4096
DTYPE_SPELLINGS = {
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}


@dataclass(frozen=True)
class DecodeRank:
    """One rank of a decode engine; None is "not stated"."""

    attn_tp_size: int
    engine_rank: int
    attn_cp_size: int = 1
    attn_cp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    kv: str = "mha"
    all_cp_ranks: bool | None = None
    num_kv_heads: int | None = None
    page_size: int | None = 64
    kv_cache_dtype: str | None = "auto"
    kv_layout: str | None = None
    decode_allocation_policy: str | None = None
    dcp_size: int = 1
    spec_layout: Mapping[str, object] | None = None
    requires_equal_tp: bool = False
    strict_dtype: bool = False


@dataclass(frozen=True)
class PrefillInfo:
    """One prefill engine as its registry describes it; None is "unknown"."""

    attn_tp_size: int
    attn_cp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    page_size: int | None = 64
    kv_cache_dtype: str | None = "auto"
    follow_bootstrap_room: bool = True
    enable_dsa_cache_layer_split: bool = False
    enable_kv_cache_sharding: bool = False
    prefill_http_port: int | None = None
    kv_layout: str | None = None
    decode_allocation_policy: str | None = "early"
    dynamic_dp_size: bool = False
    spec_layout: Mapping[str, object] | None = None
    extras: Mapping[str, object] = field(default_factory=dict)


class Contact(NamedTuple):
    """One prefill rank to contact; a dummy is told where the decode rank is, but sends nothing."""

    cp: int
    tp: int
    pp: int
    dummy: bool


@dataclass(frozen=True)
class RankMapping:
    """The prefill ranks that one decode rank reads, and how many answers each side awaits."""

    target_tp_rank: int | None
    target_tp_ranks: tuple[int, ...]
    target_cp_ranks: tuple[int, ...]
    target_pp_ranks: tuple[int, ...]
    required_dst_info_num: int
    required_prefill_response_num: int

    def contacts(self) -> list[Contact]:
        """The ranks in contact order: CP ascending, then TP ascending, then PP descending."""
        ranks = [
            (cp, tp, pp)
            for cp in sorted(self.target_cp_ranks)
            for tp in sorted(self.target_tp_ranks)
            for pp in sorted(self.target_pp_ranks, reverse=True)
        ]
        all_answer = self.required_prefill_response_num == len(ranks)
        return [Contact(cp, tp, pp, not all_answer and tp != self.target_tp_rank) for cp, tp, pp in ranks]


def map_ranks(decode: DecodeRank, prefill: PrefillInfo) -> RankMapping:
    """Map a decode rank onto a prefill engine.

    Raises `IncompatiblePeer` with all differences, if one of them is fatal.
    """
    reasons = compatibility(decode, prefill)
    if any(reason.severity is Severity.FATAL for reason in reasons):
        raise IncompatiblePeer(reasons=reasons)
    real, tp_ranks, destinations, answers = _tp(decode, prefill)
    cp_ranks, pp_ranks = _cp(decode, prefill), _pp(decode, prefill)
    return RankMapping(real, tp_ranks, cp_ranks, pp_ranks, destinations, answers * len(cp_ranks) * len(pp_ranks))


def _tp(decode: DecodeRank, prefill: PrefillInfo) -> tuple[int | None, tuple[int, ...], int, int]:
    """The real rank, the ranks to contact, the destinations of each, and the answers to await."""
    d, p = decode.attn_tp_size, prefill.attn_tp_size
    r = decode.engine_rank % d
    if _is_sharded_over_tp(decode, prefill):
        return None, tuple(range(p)), d, p
    if p == d:
        return r, (r,), 1, 1
    if d > p:
        return r // (d // p), (r // (d // p),), d // p, 1
    block = tuple(range(r * p // d, (r + 1) * p // d))
    return block[0], block, 1, 1 if decode.kv == "mla" else p // d


def _is_sharded_over_tp(decode: DecodeRank, prefill: PrefillInfo) -> bool:
    return decode.kv == "mla" and prefill.enable_kv_cache_sharding and prefill.attn_cp_size == 1


def _cp(decode: DecodeRank, prefill: PrefillInfo) -> tuple[int, ...]:
    wants_all = decode.kv == "hybrid_mla" if decode.all_cp_ranks is None else decode.all_cp_ranks
    if wants_all or prefill.enable_dsa_cache_layer_split or prefill.enable_kv_cache_sharding:
        return tuple(range(prefill.attn_cp_size))
    return (0,)


def _pp(decode: DecodeRank, prefill: PrefillInfo) -> tuple[int, ...]:
    if decode.pp_size == prefill.pp_size:
        return (decode.pp_rank,)
    return tuple(range(prefill.pp_size))


def kv_heads(num_kv_heads: int, tp_size: int, rank: int) -> tuple[int, ...] | None:
    """The heads that a TP rank holds; None if no even partition exists. Replicas are on consecutive ranks."""
    if num_kv_heads % tp_size == 0:
        count = num_kv_heads // tp_size
        return tuple(range(rank * count, (rank + 1) * count))
    if tp_size % num_kv_heads == 0:
        return (rank * num_kv_heads // tp_size,)
    return None


def compatibility(decode: DecodeRank, prefill: PrefillInfo) -> list[Reason]:
    """All differences of a pair, fatal ones and warnings, in the order of `ReasonKind`."""
    return [
        *_cache_reasons(decode, prefill),
        *_policy_reasons(decode, prefill),
        *_tp_reasons(decode, prefill),
        *_size_reasons(decode, prefill),
        *_dcp_reasons(decode, prefill),
        *_contact_reasons(decode, prefill),
    ]


def _fatal(kind: ReasonKind, local: ReasonValue, remote: ReasonValue, text: str) -> Reason:
    return Reason(kind, Severity.FATAL, local, remote, text)


def _must_be_equal(
    kind: ReasonKind, local: ReasonValue, remote: ReasonValue, severity: Severity = Severity.FATAL
) -> Reason:
    text = f"{kind} {_show(local)} here, {_show(remote)} at the prefill: must be equal"
    return Reason(kind, severity, local, remote, text)


def _show(value: ReasonValue) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return printable(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False))
    return printable(str(value))


def _cache_reasons(decode: DecodeRank, prefill: PrefillInfo) -> Iterator[Reason]:
    ours: ReasonValue
    theirs: ReasonValue
    ours, theirs = decode.page_size, prefill.page_size
    if ours is not None and theirs is not None and ours != theirs:
        yield _must_be_equal(ReasonKind.PAGE_SIZE, ours, theirs)
    here, there = decode.kv_cache_dtype, prefill.kv_cache_dtype
    if here is not None and there is not None and _dtype(here) != _dtype(there):
        may_be_equal = "auto" in (_dtype(here), _dtype(there)) and not decode.strict_dtype
        severity = Severity.WARNING if may_be_equal else Severity.FATAL
        yield _must_be_equal(ReasonKind.KV_CACHE_DTYPE, here, there, severity)
    ours, theirs = decode.kv_layout, prefill.kv_layout
    if ours is not None and theirs is not None and ours != theirs:
        yield _must_be_equal(ReasonKind.KV_LAYOUT, ours, theirs)


def _dtype(name: str) -> str:
    plain = name.removeprefix("torch.")
    return DTYPE_SPELLINGS.get(plain, plain)


def _policy_reasons(decode: DecodeRank, prefill: PrefillInfo) -> Iterator[Reason]:
    ours, theirs = decode.decode_allocation_policy, prefill.decode_allocation_policy
    if ours is not None and theirs is not None and ours != theirs:
        yield _must_be_equal(ReasonKind.DECODE_ALLOCATION_POLICY, ours, theirs)
    if not same_json(decode.spec_layout, prefill.spec_layout):
        yield _must_be_equal(ReasonKind.SPEC_LAYOUT, decode.spec_layout, prefill.spec_layout)
    sizes = (prefill.attn_tp_size, prefill.attn_cp_size, prefill.pp_size)
    if "prefill_complete" in (ours, theirs) and sizes != (1, 1, 1):
        text = "prefill tp {} cp {} pp {}: policy prefill_complete needs tp, cp and pp 1".format(*sizes)
        yield _fatal(ReasonKind.PREFILL_COMPLETE, ours, sizes, text)


def same_json(one: object, other: object) -> bool:
    """Equality of JSON values: unlike Python's it tells true from 1, and 1 from 1.0."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_json, one, other))
    return type(one) is type(other) and one == other


def _tp_reasons(decode: DecodeRank, prefill: PrefillInfo) -> Iterator[Reason]:
    d, p = decode.attn_tp_size, prefill.attn_tp_size
    pair = f"decode tp {d}, prefill tp {p}"
    if decode.requires_equal_tp and d != p:
        yield _fatal(ReasonKind.EQUAL_TP, d, p, f"{pair}: this cache needs equal tp")
    if _is_sharded_over_tp(decode, prefill):
        if d != p:
            yield _fatal(ReasonKind.SHARDING_TP, d, p, f"{pair}: sharded mla needs equal tp")
    elif max(d, p) % min(d, p) != 0:
        small, large = sorted([(d, "decode"), (p, "prefill")])
        text = f"{small[1]} tp {small[0]} does not divide {large[1]} tp {large[0]}"
        yield _fatal(ReasonKind.TP_DIVISIBILITY, d, p, text)
    elif d != p and decode.kv == "mha":
        text = f"{pair}: slow when unequal and kv is mha"
        yield Reason(ReasonKind.UNEQUAL_TP, Severity.WARNING, d, p, text)
    heads = decode.num_kv_heads
    if decode.kv != "mla" and heads is not None and None in (kv_heads(heads, d, 0), kv_heads(heads, p, 0)):
        text = f"num_kv_heads {heads} over tp {d} here, {heads} over tp {p} at the prefill: one must divide the other"
        yield _fatal(ReasonKind.NUM_KV_HEADS, (heads, d), (heads, p), text)


def _size_reasons(decode: DecodeRank, prefill: PrefillInfo) -> Iterator[Reason]:
    if decode.attn_cp_size != 1:
        text = f"decode cp {decode.attn_cp_size}: must be 1"
        yield _fatal(ReasonKind.DECODE_CP, decode.attn_cp_size, prefill.attn_cp_size, text)
    ours, theirs = decode.pp_size, prefill.pp_size
    if ours not in (1, theirs):
        text = f"decode pp {ours}, prefill pp {theirs}: must be equal, or 1 at the decode"
        yield _fatal(ReasonKind.PP_SIZE, ours, theirs, text)


def _dcp_reasons(decode: DecodeRank, prefill: PrefillInfo) -> Iterator[Reason]:
    dcp, cp = decode.dcp_size, prefill.attn_cp_size
    if dcp == 1:
        return
    if decode.kv not in ("mla", "hybrid_mla"):
        text = f"dcp_size {dcp}: needs kv mla or hybrid_mla, not mha"
        yield _fatal(ReasonKind.DCP_KV, dcp, None, text)
    if cp != 1:
        text = f"dcp_size {dcp}, prefill cp {cp}: dcp needs prefill cp 1"
        yield _fatal(ReasonKind.DCP_PREFILL_CP, dcp, cp, text)
    if prefill.enable_kv_cache_sharding:
        text = f"dcp_size {dcp}, prefill sharding on: dcp needs it off"
        yield _fatal(ReasonKind.DCP_SHARDING, dcp, True, text)


def _contact_reasons(decode: DecodeRank, prefill: PrefillInfo) -> Iterator[Reason]:
    p, d = prefill.attn_tp_size, decode.attn_tp_size
    block = p if _is_sharded_over_tp(decode, prefill) else max(1, p // d)
    count = block * len(_cp(decode, prefill)) * len(_pp(decode, prefill))
    if count > MAX_CONTACTS:
        text = f"{count} contacts of one decode rank: must be at most {MAX_CONTACTS}"
        yield _fatal(ReasonKind.CONTACTS, None, count, text)
