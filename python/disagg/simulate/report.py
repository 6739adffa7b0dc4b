"""The report of a run as JSON.

One object; times are floats in ms, `seconds` in s. `<peer>` is like `05-silent`, `<kind>` a failure kind.

    schema                 1
    disagg                 version of the package
    ok                     true when every request ended exactly once and as the ledger says
    interrupted            name of the signal that ended the run early, or null
    options                every option by name, as it was used
    requests               {planned, arrived}
    seconds                from the first arrival's time zero to the last result
    peers.<peer>           {addr, behaviour, dp_rank, sizes: [one a life], requests}
    outcomes.<peer>        {routed: n, failed: {<kind>: n}}
    expected.<peer>        {routed: [low, high], failed: {<kind>: [low, high]}}: at least, at most
    reasons.<peer>         {<kind>: the first reason of that kind}
    failures               {<kind>: n} over all peers
    unexpected             how many ends, or missing ends, the ledger does not allow
    ended_twice, never_ended, unknown   the part of `unexpected` that is about ending exactly once
    complaints             what was unexpected, at most 20 texts
    cycle_ms               {count, p50, p99, p99_9, max}: from when a cycle should have begun to its end
    control_cycle_ms       the same, of the loop without a Resolver at the same time on the same arrivals
    added_cycle_ms         {p50, p99, p99_9}: the difference of the two
    call_ms                {count, p50, p99, p99_9, max} of single calls of add() and poll()
    time_to_route_ms       the same, from add() to the route, of routed requests
    healthy_time_to_route_ms   the same, of those to healthy peers: no other peer's trouble may show here
    overruns               {cycles, control_cycles} that ended after the next one should have begun
    http                   {topology, dp_ranks, endpoint, heartbeat}: HTTP requests of the Resolver, by kind
    events                 {<event kind>: n}: changes of peers that poll() told of
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import disagg
from disagg.simulate.facts import LoopResult
from disagg.simulate.ledger import PeerBook, Verdict
from disagg.simulate.plan import Plan
from disagg.simulate.scenario import Behaviour
from disagg.simulate.stats import summary_ms

__all__ = ["Report", "write_json"]

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Report:
    """All that came of a run; `sent` requests had arrived when it ended."""

    plan: Plan
    addresses: dict[int, str]
    sent: int
    seconds: float
    interrupted: str | None
    verdict: Verdict
    loop: LoopResult
    control: LoopResult

    @property
    def ok(self) -> bool:
        """Whether every request ended exactly once, as it had to."""
        return self.verdict.unexpected == 0

    @property
    def exit_status(self) -> int:
        """0, 1 when anything was unexpected, 128 + the signal when the run was ended early."""
        if not self.ok:
            return 1
        return {None: 0, "SIGINT": 130, "SIGTERM": 143}[self.interrupted]

    def failures(self) -> Counter[str]:
        """Count the failures of all peers by kind."""
        total: Counter[str] = Counter()
        for book in self.verdict.peers.values():
            total.update({kind: count for kind, count in book.ends.items() if kind != "routed"})
        return total

    def route_ns(self, *, healthy: bool = False) -> list[int]:
        """Return how long each routed request took, in ns; with `healthy` of healthy peers only."""
        books = self.verdict.peers
        chosen = [peer.index for peer in self.plan.peers if not healthy or peer.behaviour is Behaviour.HEALTHY]
        return [took for index in chosen for took in books[index].route_ns]

    def to_dict(self) -> dict[str, object]:
        """Return the JSON object that this module's docstring describes."""
        verdict, cycle, control = (
            self.verdict,
            summary_ms(self.loop.cycle_ns),
            summary_ms(self.control.cycle_ns),
        )
        names = {peer.index: peer.name for peer in self.plan.peers}
        books = {names[index]: book for index, book in verdict.peers.items()}
        return {
            "schema": SCHEMA,
            "disagg": disagg.__version__,
            "ok": self.ok,
            "interrupted": self.interrupted,
            "options": self.plan.options.described(),
            "requests": {"planned": len(self.plan.requests), "arrived": self.sent},
            "seconds": round(self.seconds, 3),
            "peers": {peer.name: self._peer(peer.index) for peer in self.plan.peers},
            "outcomes": {name: _counted(dict(book.ends)) for name, book in books.items()},
            "expected": {name: _expected(book) for name, book in books.items()},
            "reasons": {name: book.reasons for name, book in books.items()},
            "failures": dict(self.failures()),
            "unexpected": verdict.unexpected,
            "ended_twice": verdict.twice,
            "never_ended": verdict.missing,
            "unknown": verdict.unknown,
            "complaints": verdict.complaints,
            "cycle_ms": cycle,
            "control_cycle_ms": control,
            "added_cycle_ms": {name: round(cycle[name] - control[name], 3) for name in ("p50", "p99", "p99_9")},
            "call_ms": summary_ms(self.loop.calls_ns),
            "time_to_route_ms": summary_ms(self.route_ns()),
            "healthy_time_to_route_ms": summary_ms(self.route_ns(healthy=True)),
            "overruns": {"cycles": self.loop.overruns, "control_cycles": self.control.overruns},
            "http": self.loop.http,
            "events": self.loop.events,
        }

    def _peer(self, index: int) -> dict[str, object]:
        peer = self.plan.peers[index]
        return {
            "addr": self.addresses[index],
            "behaviour": peer.behaviour.value,
            "dp_rank": peer.choice.value,
            "sizes": [layout.describe() for layout in peer.layouts],
            "requests": self.verdict.peers[index].requests,
        }


def _counted(ends: dict[str, int]) -> dict[str, object]:
    return {"routed": ends.pop("routed", 0), "failed": ends}


def _expected(book: PeerBook) -> dict[str, object]:
    ranges = {kind: [book.low[kind], book.high[kind]] for kind in book.high}
    return {"routed": ranges.pop("routed", [0, 0]), "failed": ranges}


def write_json(report: Report, path: Path) -> None:
    """Write the report: a reader sees the old file or the whole new one. Raises OSError."""
    text = json.dumps(report.to_dict(), indent=2) + "\n"
    if path.exists() and not path.is_file():  # a pipe or a device has no old file to keep
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
