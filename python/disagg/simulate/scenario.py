"""What each prefill engine of a run is: its sizes, and how it behaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import product

from disagg.simulate.options import Options, Scenario
from disagg.usage import UsageError

__all__ = [
    "DECODE_PAGE_SIZE",
    "DECODE_RANK",
    "DECODE_TP",
    "TROUBLES",
    "Behaviour",
    "DpChoice",
    "Layout",
    "PeerSpec",
    "Rank",
    "build_peers",
]

# The one decode rank: rank 1 of 4, so that a mapping that forgets the rank shows.
DECODE_TP = 4
DECODE_RANK = 1
DECODE_PAGE_SIZE = 64


class Behaviour(Enum):
    """What is wrong with a peer, if anything; the value is its name in reports."""

    HEALTHY = "healthy"
    SLOW_START = "slow_start"  # its last rank registers after the budget is spent
    SILENT = "silent"  # accepts connections, never answers
    REFUSING = "refusing"  # nothing listens on its port
    RESTARTING = "restarting"  # goes away half-way and comes back with another TP size
    RUBBISH = "rubbish"  # answers 200 with HTML, with half a body, with cut JSON
    PAGE_SIZE = "page_size"  # its pages are not the decode engine's
    LATE_RANK = "late_rank"  # registers each room's dp rank well after the request came
    NO_RANK = "no_rank"  # never registers the dp rank of every second room


class DpChoice(Enum):
    """How the dp rank of a request comes about."""

    ONLY = "only"  # dp size 1
    FOLLOW = "follow"  # room modulo dp size
    PRESET = "preset"  # the router chose it and says so
    PROMPT = "prompt"  # the prefill registers it just before or after the request reaches the decode
    LATE = "late"  # registered a tenth to four tenths of the dp-rank timeout later
    HALF = "half"  # like PROMPT for one room, never for the next


@dataclass(frozen=True, slots=True)
class Rank:
    """Coordinates of one prefill rank."""

    dp: int
    cp: int
    tp: int
    pp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a prefill engine; `plain_dp` is data parallelism without DP attention."""

    tp: int = DECODE_TP
    cp: int = 1
    pp: int = 1
    dp: int = 1
    page_size: int = DECODE_PAGE_SIZE
    plain_dp: bool = False

    def ranks(self) -> Iterator[Rank]:
        """Yield every rank of the engine."""
        sizes = (self.dp, self.cp, self.tp, self.pp)
        return (Rank(*each) for each in product(*(range(size) for size in sizes)))

    def describe(self) -> str:
        """Name the sizes that are not 1: `tp8 pp2`."""
        sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp": self.dp}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "tp")


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """One prefill engine; `layouts` holds one for each of its lives."""

    index: int
    behaviour: Behaviour
    choice: DpChoice
    layouts: tuple[Layout, ...]

    @property
    def name(self) -> str:
        """The peer's key in reports, in the order of the peers when sorted."""
        return f"{self.index:02d}-{self.behaviour.value}"

    @property
    def has_registry(self) -> bool:
        """Whether a real registry runs behind its address."""
        return self.behaviour not in (Behaviour.SILENT, Behaviour.REFUSING, Behaviour.RUBBISH)

    @property
    def follows_room(self) -> bool:
        """What the registry says about `follow_bootstrap_room`."""
        return self.choice in (DpChoice.ONLY, DpChoice.FOLLOW)

    def rank_address(self, life: int, rank: Rank) -> tuple[str, int]:
        """Where a rank says it listens: another answer for every rank of every peer in every life.

        Nothing listens there; the addresses only have to come through unchanged.
        """
        layout = self.layouts[life]
        offset = (rank.cp * layout.pp + rank.pp) * layout.tp + rank.tp
        return f"10.{life}.{self.index}.{rank.dp + 1}", 20_000 + offset


TROUBLES: dict[Scenario, tuple[Behaviour, ...]] = {
    Scenario.HEALTHY: (),
    Scenario.MIXED: (
        Behaviour.SLOW_START,
        Behaviour.SILENT,
        Behaviour.REFUSING,
        Behaviour.RESTARTING,
        Behaviour.RUBBISH,
        Behaviour.PAGE_SIZE,
        Behaviour.LATE_RANK,
        Behaviour.NO_RANK,
    ),
    Scenario.DARK: (Behaviour.SILENT, Behaviour.REFUSING, Behaviour.RUBBISH),
}

# Healthy peers take these in turn: equal, larger and smaller TP, each way to a dp rank, CP and PP.
_HEALTHY: tuple[tuple[DpChoice, Layout], ...] = (
    (DpChoice.ONLY, Layout()),
    (DpChoice.FOLLOW, Layout(tp=8, dp=2)),
    (DpChoice.PROMPT, Layout(tp=2, dp=4)),
    (DpChoice.PRESET, Layout(pp=2, dp=2)),
    (DpChoice.ONLY, Layout(cp=2)),
    (DpChoice.FOLLOW, Layout(tp=1, dp=3, plain_dp=True)),
    (DpChoice.PROMPT, Layout(tp=16, pp=2, dp=2)),
)

_TROUBLED: dict[Behaviour, tuple[DpChoice, tuple[Layout, ...]]] = {
    Behaviour.SLOW_START: (DpChoice.FOLLOW, (Layout(tp=8, dp=2),)),
    Behaviour.SILENT: (DpChoice.ONLY, (Layout(),)),
    Behaviour.REFUSING: (DpChoice.ONLY, (Layout(),)),
    Behaviour.RESTARTING: (DpChoice.ONLY, (Layout(tp=4), Layout(tp=8))),
    Behaviour.RUBBISH: (DpChoice.ONLY, (Layout(),)),
    Behaviour.PAGE_SIZE: (DpChoice.ONLY, (Layout(page_size=16),)),
    Behaviour.LATE_RANK: (DpChoice.LATE, (Layout(dp=2),)),
    Behaviour.NO_RANK: (DpChoice.HALF, (Layout(tp=2, dp=2),)),
}


def build_peers(options: Options) -> list[PeerSpec]:
    """Lay out the peers: the healthy ones first, then each kind of trouble in turn.

    Raises UsageError when scenario, peers and healthy cannot hold together.
    """
    healthy = _healthy_count(options)
    peers = []
    for index in range(options.peers):
        if index < healthy:
            choice, layout = _HEALTHY[index % len(_HEALTHY)]
            peers.append(PeerSpec(index, Behaviour.HEALTHY, choice, (layout,)))
        else:
            kinds = TROUBLES[options.scenario]
            behaviour = kinds[(index - healthy) % len(kinds)]
            choice, layouts = _TROUBLED[behaviour]
            peers.append(PeerSpec(index, behaviour, choice, layouts))
    return peers


def _healthy_count(options: Options) -> int:
    usual = {Scenario.HEALTHY: options.peers, Scenario.MIXED: 4, Scenario.DARK: 0}[options.scenario]
    healthy = usual if options.healthy is None else options.healthy
    if options.scenario is Scenario.HEALTHY and healthy != options.peers:
        raise UsageError(f"--healthy {healthy}: the healthy scenario has all {options.peers} peers healthy")
    needed = len(TROUBLES[Scenario.MIXED])
    if options.scenario is Scenario.MIXED and (healthy < 1 or options.peers - healthy < needed):
        raise UsageError(
            f"--peers {options.peers} --healthy {healthy}: the mixed scenario needs at least 1 healthy peer "
            f"and {needed} others, one of each kind"
        )
    if healthy > options.peers:
        raise UsageError(f"--healthy {healthy}: must be at most --peers {options.peers}")
    return healthy
