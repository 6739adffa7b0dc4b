"""The right rank mappings of a run's peers, from the plain-Python specification."""

from __future__ import annotations

from disagg.reference.mapping import DecodeRank, PrefillInfo, map_ranks
from disagg.simulate.ledger import Mapping
from disagg.simulate.plan import Plan
from disagg.simulate.scenario import DECODE_PAGE_SIZE, DECODE_RANK, DECODE_TP, Behaviour

__all__ = ["right_mappings"]


def right_mappings(plan: Plan) -> dict[tuple[int, int], Mapping]:
    """Return the mapping by (peer, life) for every peer that can be routed to."""
    decode = DecodeRank(attn_tp_size=DECODE_TP, engine_rank=DECODE_RANK, kv=plan.options.kv, page_size=DECODE_PAGE_SIZE)
    mappings: dict[tuple[int, int], Mapping] = {}
    for peer in plan.peers:
        if not peer.has_registry or peer.behaviour is Behaviour.PAGE_SIZE:
            continue
        for life, layout in enumerate(peer.layouts):
            prefill = PrefillInfo(
                attn_tp_size=layout.tp,
                attn_cp_size=layout.cp,
                dp_size=layout.dp,
                pp_size=layout.pp,
                page_size=layout.page_size,
                follow_bootstrap_room=peer.follows_room,
            )
            mappings[peer.index, life] = map_ranks(decode, prefill)
    return mappings
