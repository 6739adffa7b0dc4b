"""The mapping of a pair as one JSON object, every rank listed; sets of consecutive ranks are [first, last]."""

from __future__ import annotations

from collections.abc import Sequence

import disagg
from disagg._core import PrefillInfo
from disagg.errors import Reason
from disagg.rank_tables.pair import DecodePlace, Pair, PrefillPlace
from disagg.rank_tables.room import RoomRank

__all__ = ["describe", "describe_prefill", "describe_reason"]

SCHEMA = 1
DECODE_FIELDS = (
    "attn_tp_size",
    "attn_cp_size",
    "pp_size",
    "kv",
    "all_cp_ranks",
    "num_kv_heads",
    "page_size",
    "kv_cache_dtype",
    "kv_layout",
    "decode_allocation_policy",
    "dcp_size",
    "requires_equal_tp",
    "strict_dtype",
)
PREFILL_FIELDS = (
    "attn_tp_size",
    "attn_cp_size",
    "dp_size",
    "pp_size",
    "page_size",
    "kv_cache_dtype",
    "kv_layout",
    "decode_allocation_policy",
    "follow_bootstrap_room",
    "dynamic_dp_size",
    "enable_dsa_cache_layer_split",
    "enable_kv_cache_sharding",
    "extras",
)


def describe(pair: Pair, *, address: str | None, room: RoomRank | None, rank: int | None) -> dict[str, object]:
    """Return the object; without ranks if the pair does not fit, and only those that `rank` concerns if it is given."""
    decode = {name: getattr(pair.decode.first, name) for name in DECODE_FIELDS}
    prefill = describe_prefill(pair.prefill)
    described: dict[str, object] = {
        "schema": SCHEMA,
        "disagg": disagg.__version__,
        "decode": decode | {"dp_size": pair.decode.dp_size},
        "prefill": prefill | {"address": address},
        "fits": pair.fits,
        "reasons": [describe_reason(reason) for reason in pair.reasons],
    }
    if room is not None:
        described["room"] = {"room": room.room, "dp_rank": room.dp_rank, "source": room.source}
    if pair.fits:
        described |= _ranks(pair, rank)
    return described


def _ranks(pair: Pair, rank: int | None) -> dict[str, object]:
    if rank is None:
        return {
            "decode_ranks": [_decode_rank(pair, place) for place in pair.decode_places()],
            "prefill_ranks": [_prefill_rank(place) for place in pair.prefill_places()],
        }
    reads = [pair.decode_place(rank % pair.decode.tp_size, pp) for pp in range(pair.decode.pp_size)]
    served = [
        _prefill_rank(pair.prefill_place(contact.tp, contact.cp, contact.pp))
        for place in reads
        for contact in place.mapping.contacts()
    ]
    return {"decode_ranks": [_decode_rank(pair, place) for place in reads], "prefill_ranks": served}


def _decode_rank(pair: Pair, place: DecodePlace) -> dict[str, object]:
    mapping = place.mapping
    return {
        "tp_rank": place.tp,
        "pp_rank": place.pp,
        "engine_ranks": [group * pair.decode.tp_size + place.tp for group in range(pair.decode.dp_size)],
        "target_tp_rank": mapping.target_tp_rank,
        "target_tp_ranks": _range(mapping.target_tp_ranks),
        "dummy_tp_ranks": _range(mapping.dummy_tp_ranks),
        "target_cp_ranks": _range(mapping.target_cp_ranks),
        "target_pp_ranks": _range(mapping.target_pp_ranks),
        "required_prefill_response_num": mapping.required_prefill_response_num,
        "required_dst_info_num": mapping.required_dst_info_num,
    }


def _prefill_rank(place: PrefillPlace) -> dict[str, object]:
    return {
        "tp_rank": place.tp,
        "cp_rank": place.cp,
        "pp_rank": place.pp,
        "role": place.served.role,
        "decode_tp_ranks": _range(place.served.decode_tp_ranks),
        "decode_pp_rank": place.served.decode_pp_rank,
        "required_dst_info_num": place.served.required_dst_info_num,
    }


def describe_prefill(prefill: PrefillInfo) -> dict[str, object]:
    """The fields of a prefill engine, with `extras` as they came."""
    return {name: getattr(prefill, name) for name in PREFILL_FIELDS}


def describe_reason(reason: Reason) -> dict[str, object]:
    """One reason why a pair does not fit, or a warning."""
    return {
        "kind": str(reason.kind),
        "severity": str(reason.severity),
        "decode": reason.local,
        "prefill": reason.remote,
        "text": reason.text,
    }


def _range(ranks: Sequence[int]) -> list[int]:
    return [ranks[0], ranks[-1]] if ranks else []
