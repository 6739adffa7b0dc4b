"""Which dp rank of the prefill engine holds a room."""

from __future__ import annotations

from dataclasses import dataclass

from disagg._core import PrefillInfo
from disagg.usage import UsageError

__all__ = ["MAX_ROOM", "RoomRank", "check_room", "rank_by_rule"]

MAX_ROOM = 2**63 - 1


@dataclass(frozen=True, slots=True)
class RoomRank:
    """A room with its dp rank, or None if that is not known, and how it is known."""

    room: int
    dp_rank: int | None
    source: str

    def sentence(self) -> str:
        """Say it in words."""
        if self.dp_rank is None:
            return f"room {self.room}: dp rank not known ({self.source})"
        return f"room {self.room} is at dp rank {self.dp_rank} ({self.source})"


def check_room(room: int) -> None:
    """Raise UsageError unless it is a room."""
    if not 0 <= room <= MAX_ROOM:
        raise UsageError(f"--room {room}: must be from 0 to {MAX_ROOM}")


def rank_by_rule(room: int, prefill: PrefillInfo, *, always: bool = False) -> RoomRank | None:
    """The dp rank without a question to the registry; None if only the registry knows it.

    `always` is for engines of the first protocol era, which have nothing but the rule.
    """
    if prefill.dp_size == 1:
        return RoomRank(room, 0, "the only one")
    if always or (prefill.follow_bootstrap_room and not prefill.dynamic_dp_size):
        return RoomRank(room, room % prefill.dp_size, f"room modulo dp size {prefill.dp_size}")
    return None
