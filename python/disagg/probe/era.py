"""Which era of the bootstrap protocol a topology answer is of (WIRE.md section 1)."""

from __future__ import annotations

import json
from typing import NamedTuple

__all__ = ["Era", "era_of"]


class Era(NamedTuple):
    """`name` is "E2" to "E7", `words` says which software spoke it."""

    name: str
    words: str


# A key that no older era has, the newest era first.
SIGNS = (
    (("decode_allocation_policy", "enable_kv_cache_sharding", "kv_layout"), Era("E7", "late 2026, SGLang 0.5.23")),
    (
        ("dsv41_spec_layout", "dynamic_dp_size", "disagg_transfer_protocol_version"),
        Era("E6", "August and September 2026"),
    ),
    (("enable_dsa_cache_layer_split", "prefill_http_port"), Era("E5", "mid 2026")),
    (("target_tp_rank", "target_tp_ranks", "required_dst_info_num"), Era("E4", "March 2026 and later")),
)
OLDEST = Era("E2", "July to December 2025: no dp-rank routes")
FIRST_OF_THE_NEWER_FORM = Era("E3", "February and March 2026")


def era_of(body: bytes, *, is_old: bool) -> Era:
    """The oldest era that can have given this topology, a JSON object; `is_old` if it answers the older query only."""
    if is_old:
        return OLDEST
    keys = json.loads(body).keys()
    return next((era for signs, era in SIGNS if any(sign in keys for sign in signs)), FIRST_OF_THE_NEWER_FORM)
