"""The plan of a run: for each request when it comes, to whom, and what its prefill does about its dp rank."""

from __future__ import annotations

import random
from dataclasses import dataclass

from disagg.simulate.arrivals import arrival_times
from disagg.simulate.options import Options
from disagg.simulate.scenario import Behaviour, DpChoice, PeerSpec, build_peers

__all__ = ["Plan", "PlannedRequest", "make_plan", "slack_s"]

# The peer that restarts is away this long: a process that is replaced by a supervisor.
RESTART_AWAY_S = 0.3
# A rank of a healthy peer is registered this long before to after the request's arrival at the decode.
PROMPT_S = (-0.030, 0.050)
# A slow peer's last rank comes this much, and the slack, after the last request that waited for it failed.
SLOW_MARGIN_S = 0.5


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request. `due_s` and `register_s` count from the start; `register_s` is None for never.

    `dp_rank` is the one that the prefill engine chose, known to the decode only as the peer's DpChoice says.
    """

    due_s: float
    peer: int
    room: int
    dp_rank: int
    preset: int | None
    register_s: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """All that will happen; the index of a request is its id."""

    options: Options
    peers: tuple[PeerSpec, ...]
    requests: tuple[PlannedRequest, ...]
    restart_s: float
    last_rank_s: tuple[float, ...]  # by peer, when the last rank registers; 0 is before the start

    @property
    def length_s(self) -> float:
        """When the last request arrives."""
        return self.requests[-1].due_s

    @property
    def tail_s(self) -> float:
        """How long after the last arrival every request must have ended, with room to spare.

        The longest lives: a budget of attempts that each time out, then the age below which a request is not
        given up yet; and a dp rank that never comes. 10 s on top are for a machine that is busy elsewhere.
        """
        options = self.options
        attempt_s = max(options.interval_s, options.total_timeout_s)
        budget_s = (options.attempts + 1) * attempt_s + options.min_wait_s
        return budget_s + options.dp_rank_timeout_s + 10.0


def make_plan(options: Options) -> Plan:
    """Draw the whole run from the options; the same options give the same plan.

    Raises UsageError for options that cannot be run, TraceError for the trace.
    """
    options.check()
    peers = build_peers(options)
    times = arrival_times(options)
    rng = random.Random(f"requests of {options.seed}")
    rooms: set[int] = set()
    requests = [_draw(rng, options, peers, rooms, time) for time in times]
    firsts: dict[int, float] = {}
    for request in requests:
        firsts.setdefault(request.peer, request.due_s)
    last_rank_s = tuple(_last_rank_s(options, peer, firsts.get(peer.index, 0.0)) for peer in peers)
    return Plan(options, tuple(peers), tuple(requests), times[-1] / 2, last_rank_s)


def _draw(rng: random.Random, options: Options, peers: list[PeerSpec], rooms: set[int], due_s: float) -> PlannedRequest:
    room = rng.getrandbits(63)
    while room in rooms:
        room = rng.getrandbits(63)
    rooms.add(room)
    peer = rng.choice(peers)
    size = peer.layouts[0].dp
    dp_rank = room % size if peer.choice is DpChoice.FOLLOW else rng.randrange(size)
    preset = dp_rank if peer.choice is DpChoice.PRESET else None
    return PlannedRequest(due_s, peer.index, room, dp_rank, preset, _register_s(rng, options, peer, room, due_s))


def _register_s(rng: random.Random, options: Options, peer: PeerSpec, room: int, due_s: float) -> float | None:
    if peer.choice is DpChoice.LATE:
        # Well inside the timeout: an unknown room is asked for again after a wait that doubles, so at worst
        # after twice the time that it took to register.
        return due_s + rng.uniform(0.1, 0.4) * options.dp_rank_timeout_s
    if peer.choice is DpChoice.PROMPT or (peer.choice is DpChoice.HALF and room % 2 == 0):
        return max(0.0, due_s + rng.uniform(*PROMPT_S))
    return None


def _last_rank_s(options: Options, peer: PeerSpec, first_s: float) -> float:
    """Say when a slow peer is whole: after the budget is spent and no younger request waits any more."""
    if peer.behaviour is not Behaviour.SLOW_START:
        return 0.0
    spent_s = first_s + (options.attempts - 1) * options.interval_s
    return spent_s + options.min_wait_s + options.interval_s + slack_s(options) + SLOW_MARGIN_S


def slack_s(options: Options) -> float:
    """How much later than its rule says the end of a budget may come on a machine that keeps up.

    Each attempt is started a little after it is due, and answered a little later: some ms on two busy cores.
    """
    return 0.3 + 0.02 * options.attempts
