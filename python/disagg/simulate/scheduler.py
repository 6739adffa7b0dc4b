"""The scheduler process: the loop and one decode rank's Resolver; and the control: the loop alone.

The control gets the same arrivals at the same time, in a process of the same kind, and writes down an end
for each, so the difference between the two is the Resolver. Running at the same time, not before or after, is
what makes them comparable: noise of the machine meets both.
"""

from __future__ import annotations

import gc
from array import array
from dataclasses import dataclass

from disagg.simulate.channel import Channel, Done, Go, Ready
from disagg.simulate.facts import FailureSeen, LoopResult, RouteSeen
from disagg.simulate.loop import Loop, LoopSetup
from disagg.simulate.options import Options
from disagg.simulate.scenario import DECODE_PAGE_SIZE, DECODE_RANK, DECODE_TP
from disagg.simulate.shared import ArrivalLog, EndLog, SharedMemory, StatusPage
from disagg.values import Failure, Route, Step

__all__ = ["SchedulerSetup", "run"]


@dataclass(frozen=True, slots=True)
class SchedulerSetup:
    """What a loop process gets; memories are (descriptor, size). A control has `with_resolver` False."""

    options: Options
    loop: LoopSetup
    arrivals: tuple[int, int]
    ends: tuple[int, int]
    status: tuple[int, int]
    with_resolver: bool


class NoResolver:
    """Stands in the control for a Resolver: every request has its end at once, and polls find nothing."""

    _ROUTE = Route("", 0, None, (), None, 0)
    _NOTHING = Step(0)

    def add(self, request: object, addr: str, room: int, /, *, dp_rank: int | None = None) -> Route:
        """Return the same route for all."""
        return self._ROUTE

    def poll(self, limit: int = 4096) -> Step:
        """Return the empty step."""
        return self._NOTHING


def run(setup: object, channel: Channel) -> None:
    """Run the loop with or without a Resolver, then tell what it saw."""
    if not isinstance(setup, SchedulerSetup):
        raise TypeError(f"a loop process cannot be set up with {type(setup).__name__}")
    descriptor, size = setup.ends
    ends = EndLog(SharedMemory(size, descriptor))
    arrivals = ArrivalLog(SharedMemory(setup.arrivals[1], setup.arrivals[0]))
    status = StatusPage(SharedMemory(setup.status[1], setup.status[0]))
    result = LoopResult(0, [], array("q"), array("q"), array("q"), 0, 0)
    if setup.with_resolver:
        _run_with_resolver(setup, channel, (arrivals, ends, status), result)
    else:
        channel.send(Ready({}))
        go = _go(channel)
        loop = Loop(setup.loop, arrivals, ends, status, go.addresses)
        _settle()
        # Half a cycle apart, so that the two loops do not wake the machine's cores in the same moment.
        loop.run(NoResolver(), go.start_ns + setup.loop.period_ns // 2, until_closed=True)
        _fill(result, loop, ends)
    channel.send(Done(result))
    channel.receive()  # Finish, or the parent is gone


def _run_with_resolver(
    setup: SchedulerSetup, channel: Channel, memory: tuple[ArrivalLog, EndLog, StatusPage], result: LoopResult
) -> None:
    import disagg  # noqa: PLC0415  (the control does not need the network's modules)

    options = setup.options
    decode = disagg.DecodeRank(
        attn_tp_size=DECODE_TP, engine_rank=DECODE_RANK, kv=options.kv, page_size=DECODE_PAGE_SIZE
    )
    retry = disagg.RetryPolicy(
        max_attempts=options.attempts,
        interval_s=options.interval_s,
        min_wait_s=options.min_wait_s,
        cooldown_s=options.cooldown_s,
    )
    with disagg.Resolver(
        decode,
        retry=retry,
        connect_timeout_s=options.connect_timeout_s,
        total_timeout_s=options.total_timeout_s,
        dp_rank_timeout_s=options.dp_rank_timeout_s,
        heartbeat_interval_s=options.heartbeat_interval_s,
    ) as resolver:
        channel.send(Ready({}))
        go = _go(channel)
        loop = Loop(setup.loop, *memory, go.addresses)
        _settle()
        loop.run(resolver, go.start_ns, until_closed=False)
        result.http = dict(resolver.stats()["http"])
        loop.take(resolver.close(timeout_s=2))
    _fill(result, loop, memory[1])


def _go(channel: Channel) -> Go:
    go = channel.receive()
    if not isinstance(go, Go):
        raise EOFError("finished before it began")
    return go


def _settle() -> None:
    # What servers do once they are up: modules' objects shall not be walked by each full collection.
    gc.collect()
    gc.freeze()


def _fill(result: LoopResult, loop: Loop, ends: EndLog) -> None:
    loop.samples.trim()
    result.count = ends.count
    result.details = [_seen(detail) for detail in loop.details]
    result.cycle_ns, result.calls_ns = loop.samples.cycle, loop.samples.calls
    result.added_ns = loop.samples.added_ns
    result.overruns, result.disorders, result.events = loop.samples.overruns, loop.disorders, loop.events


def _seen(detail: object) -> object:
    if isinstance(detail, Route):
        mapping = detail.mapping
        if mapping is None:
            return f"a route without a mapping to {detail.addr!r}"
        return RouteSeen(
            detail.addr,
            detail.dp_rank,
            mapping.target_tp_rank,
            tuple(mapping.target_tp_ranks),
            tuple(mapping.target_cp_ranks),
            tuple(mapping.target_pp_ranks),
            mapping.required_dst_info_num,
            mapping.required_prefill_response_num,
            tuple((e.dp, e.cp, e.tp, e.pp, e.ip, e.port, e.dummy) for e in detail.endpoints),
        )
    if isinstance(detail, Failure):
        return FailureSeen(detail.kind, detail.reason, detail.http_status, detail.addr, detail.attempts)
    return str(detail)
