"""The report of a run as text for people: at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from disagg.simulate.ledger import PeerBook
from disagg.simulate.options import Options
from disagg.simulate.report import Report
from disagg.simulate.scenario import DECODE_RANK, DECODE_TP, Behaviour, PeerSpec
from disagg.simulate.stats import summary_ms
from disagg.text_table import Row, set_table

__all__ = ["WIDTH", "preamble", "render"]

WIDTH = 100
HTTP_KINDS = ("topology", "dp_ranks", "endpoint", "heartbeat")


def preamble(options: Options) -> list[str]:
    """Say before a run what rules it goes by."""
    return [
        f"retry: {options.attempts} attempts {options.interval_s:g} s apart, total timeout "
        f"{options.total_timeout_s:g} s (connect {options.connect_timeout_s:g} s), min wait "
        f"{options.min_wait_s:g} s, cooldown {options.cooldown_s:g} s",
        f"dp-rank timeout {options.dp_rank_timeout_s:g} s, heartbeat each {options.heartbeat_interval_s:g} s",
        f"decode rank {DECODE_RANK} of tp {DECODE_TP}, kv {options.kv}; "
        f"a cycle each {options.cycle_ms:g} ms with {options.work_us:g} us of work",
    ]


def render(report: Report) -> str:
    """Return the whole report."""
    parts = [
        _headline(report),
        "",
        *set_table(("peer", "requests", "end", "count", "expected"), list(_peer_rows(report)), right=(1, 3)),
        "",
        *_failures(report),
        *_times(report),
        "",
        *_counters(report),
        *_complaints(report),
        "",
        _conclusion(report),
    ]
    return "\n".join(parts)


def _headline(report: Report) -> str:
    options = report.plan.options
    source = f"seed {options.seed}" if options.trace is None else f"trace {options.trace.name} x {options.speedup:g}"
    healthy = sum(peer.behaviour is Behaviour.HEALTHY for peer in report.plan.peers)
    return (
        f"{options.scenario.value}: {len(report.plan.peers)} peers, {healthy} healthy; "
        f"{report.sent} requests in {report.seconds:.1f} s ({source})"
    )


def _peer_rows(report: Report) -> Iterator[Row]:
    for peer in report.plan.peers:
        book = report.verdict.peers[peer.index]
        label, requests = f"{peer.name}  {_sizes(peer)}", str(book.requests)
        kinds = sorted(book.ends | book.high, key=lambda kind: (kind != "routed", kind))
        for kind in kinds or ["-"]:
            yield label, requests, kind, str(book.ends[kind]), _range(book, kind)
            label = requests = ""


def _sizes(peer: PeerSpec) -> str:
    return " -> ".join(layout.describe() for layout in peer.layouts) if peer.has_registry else ""


def _range(book: PeerBook, kind: str) -> str:
    low, high = book.low[kind], book.high[kind]
    return str(low) if low == high else f"{low}..{high}"


def _failures(report: Report) -> Iterator[str]:
    failures = report.failures()
    if not failures:
        return
    yield "failures by reason, with the first of each peer and kind"
    for kind, count in failures.most_common():
        yield f"  {kind}: {count}"
        for book in report.verdict.peers.values():
            if kind in book.reasons:
                yield from textwrap.wrap(book.reasons[kind], WIDTH, initial_indent="    ", subsequent_indent="      ")
    yield ""


def _times(report: Report) -> list[str]:
    loop, control = report.loop, report.control
    summaries = {
        "cycle, with Resolver": summary_ms(loop.cycle_ns),
        "cycle, control loop": summary_ms(control.cycle_ns),
        "add() and poll() calls": summary_ms(loop.calls_ns),
        "time to route": summary_ms(report.route_ns()),
        "time to route, healthy peers": summary_ms(report.route_ns(healthy=True)),
    }
    rows = [
        (
            name,
            *(f"{summary[column]:.3f}" for column in ("p50", "p99", "p99_9", "max")),
            str(summary["count"]),
        )
        for name, summary in summaries.items()
    ]
    lines = set_table(("times in ms", "p50", "p99", "p99.9", "max", "count"), rows, right=(1, 2, 3, 4, 5))
    with_resolver, without = summaries["cycle, with Resolver"], summaries["cycle, control loop"]
    added = with_resolver["p99_9"] - without["p99_9"]
    return [*lines, f"the Resolver adds {added:.3f} ms to the cycle's p99.9"]


def _counters(report: Report) -> Iterator[str]:
    http = report.loop.http
    kinds = [*HTTP_KINDS, *(kind for kind in http if kind not in HTTP_KINDS)]
    yield "HTTP requests: " + ", ".join(f"{kind} {http.get(kind, 0)}" for kind in kinds)
    if report.loop.events:
        yield "events: " + ", ".join(f"{kind} {count}" for kind, count in report.loop.events.items())


def _complaints(report: Report) -> Iterator[str]:
    verdict = report.verdict
    if verdict.complaints:
        yield ""
        yield f"unexpected, {len(verdict.complaints)} of {verdict.unexpected}:"
        for text in verdict.complaints:
            yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _conclusion(report: Report) -> str:
    verdict = report.verdict
    early = f"ended early by {report.interrupted}: " if report.interrupted else ""
    if report.ok:
        return f"{early}all {report.sent} requests ended exactly once, each as the ledger says; unexpected 0"
    return (
        f"{early}unexpected {verdict.unexpected} (of these ended twice {verdict.twice}, "
        f"never ended {verdict.missing}, unknown {verdict.unknown})"
    )
