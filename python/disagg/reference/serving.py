"""The inverse mapping in plain Python: map all decode ranks, and take those that contact the prefill rank."""

from __future__ import annotations

from dataclasses import dataclass, fields

from disagg.reference.mapping import DecodeRank, PrefillInfo, map_ranks

__all__ = ["ServedRanks", "serve_ranks"]


@dataclass(frozen=True)
class ServedRanks:
    """What one prefill rank has to do for each request of a decode engine."""

    role: str
    """`real`, `dummy` or `idle`."""
    decode_tp_ranks: tuple[int, ...]
    decode_pp_rank: int | None
    required_dst_info_num: int


def serve_ranks(
    decode: DecodeRank, prefill: PrefillInfo, *, tp_rank: int, cp_rank: int = 0, pp_rank: int = 0
) -> ServedRanks:
    """Which ranks of the decode engine a prefill rank serves; any rank of that engine stands for it.

    Raises ValueError for a rank that the prefill engine does not have, IncompatiblePeer if the two do not fit.
    """
    for name, rank, size in (
        ("tp_rank", tp_rank, prefill.attn_tp_size),
        ("cp_rank", cp_rank, prefill.attn_cp_size),
        ("pp_rank", pp_rank, prefill.pp_size),
    ):
        if not 0 <= rank < size:
            raise ValueError(f"{name} {rank}: must be from 0 to {size - 1}")
    place = (cp_rank, tp_rank, pp_rank)
    readers, dummies, stages = [], set(), set()
    for reader in _decode_group(decode):
        for contact in map_ranks(reader, prefill).contacts():
            if contact[:3] == place:
                readers.append(reader.engine_rank)
                dummies.add(contact.dummy)
                stages.add(reader.pp_rank)
    if not readers:
        return ServedRanks("idle", (), None, 0)
    (dummy,), (stage,) = dummies, stages
    return ServedRanks("dummy" if dummy else "real", tuple(readers), stage, len(readers))


def _decode_group(decode: DecodeRank) -> list[DecodeRank]:
    """Every rank of one dp group of the engine that `decode` is of."""
    stated = {field.name: getattr(decode, field.name) for field in fields(DecodeRank)}
    return [
        DecodeRank(**stated | {"engine_rank": tp, "pp_rank": pp})
        for pp in range(decode.pp_size)
        for tp in range(decode.attn_tp_size)
    ]
