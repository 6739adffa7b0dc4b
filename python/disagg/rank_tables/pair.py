"""A decode engine and a prefill engine, and how their ranks map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from disagg._core import DecodeRank, PrefillInfo, RankMapping, ServedRanks, compatibility, map_ranks, serve_ranks
from disagg.errors import Reason, Severity

__all__ = ["DecodeEngine", "DecodePlace", "Pair", "PrefillPlace"]


@dataclass(frozen=True)
class DecodeEngine:
    """A whole decode engine: the fields that its ranks share, and how many dp groups it has.

    Each dp group has `tp_size` x `pp_size` ranks; a request lives in one of them. An engine rank is
    `group * tp_size + attention-TP rank`.
    """

    fields: Mapping[str, Any]
    dp_size: int = 1

    def rank(self, engine_rank: int, pp_rank: int) -> DecodeRank:
        """One rank of the engine."""
        return DecodeRank(**{**self.fields, "engine_rank": engine_rank, "pp_rank": pp_rank})

    def with_fields(self, **fields: object) -> DecodeEngine:
        """The same engine with other values in these fields."""
        return DecodeEngine({**self.fields, **fields}, self.dp_size)

    @cached_property
    def first(self) -> DecodeRank:
        """Rank 0, for what all ranks have in common."""
        return self.rank(0, 0)

    @property
    def tp_size(self) -> int:
        """Attention-TP ranks of one dp group."""
        return self.first.attn_tp_size

    @property
    def pp_size(self) -> int:
        """Stages."""
        return self.first.pp_size

    @property
    def rank_count(self) -> int:
        """Ranks of all dp groups."""
        return self.dp_size * self.first.attn_cp_size * self.tp_size * self.pp_size

    @property
    def engine_tp_size(self) -> int:
        """TP ranks of all dp groups."""
        return self.tp_size * self.dp_size


class DecodePlace(NamedTuple):
    """A decode rank within its dp group, and what it reads."""

    tp: int
    pp: int
    mapping: RankMapping


class PrefillPlace(NamedTuple):
    """A prefill rank within its dp group, and what it serves."""

    tp: int
    cp: int
    pp: int
    served: ServedRanks


@dataclass(frozen=True)
class Pair:
    """Both engines. Nothing but `reasons` is of use unless `fits`."""

    decode: DecodeEngine
    prefill: PrefillInfo

    @cached_property
    def reasons(self) -> list[Reason]:
        """All differences, fatal ones and warnings: the same for every rank of the decode engine."""
        return compatibility(self.decode.first, self.prefill)

    @property
    def fits(self) -> bool:
        """Whether no difference is fatal."""
        return all(reason.severity is not Severity.FATAL for reason in self.reasons)

    @property
    def has_equal_stages(self) -> bool:
        """Whether each decode stage reads its own prefill stage."""
        return self.decode.pp_size == self.prefill.pp_size

    @cached_property
    def _first_mapping(self) -> RankMapping:
        return self.decode_place(0, 0).mapping

    @property
    def is_sharded(self) -> bool:
        """Whether every decode TP rank reads every prefill TP rank."""
        return self._first_mapping.target_tp_rank is None

    @property
    def has_dummies(self) -> bool:
        """Whether decode ranks contact prefill ranks that they do not read."""
        return bool(self._first_mapping.dummy_tp_ranks)

    @property
    def cp_ranks_read(self) -> int:
        """How many CP ranks are read, from the first on; the others are idle."""
        return len(self._first_mapping.target_cp_ranks)

    def decode_place(self, tp: int, pp: int) -> DecodePlace:
        """What one decode rank reads."""
        return DecodePlace(tp, pp, map_ranks(self.decode.rank(tp, pp), self.prefill))

    def prefill_place(self, tp: int, cp: int, pp: int) -> PrefillPlace:
        """What one prefill rank serves."""
        served = serve_ranks(self.decode.first, self.prefill, tp_rank=tp, cp_rank=cp, pp_rank=pp)
        return PrefillPlace(tp, cp, pp, served)

    def decode_places(self) -> Iterator[DecodePlace]:
        """Every rank of one dp group: by stage, then TP rank."""
        for pp in range(self.decode.pp_size):
            for tp in range(self.decode.tp_size):
                yield self.decode_place(tp, pp)

    def prefill_places(self) -> Iterator[PrefillPlace]:
        """Every rank of one dp group: by CP rank, then TP rank, then stage."""
        for cp in range(self.prefill.attn_cp_size):
            for tp in range(self.prefill.attn_tp_size):
                for pp in range(self.prefill.pp_size):
                    yield self.prefill_place(tp, cp, pp)
