"""A look at a registry in words, at most 80 columns where the peer's own words allow it."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator

from disagg.printable import printable
from disagg.probe.look import Endpoints, Look, State
from disagg.rank_tables.text import WIDTH, verdict

__all__ = ["headline", "render"]

INDENT = 17


def headline(look: Look) -> str:
    """Say in one line what the registry is good for."""
    if look.state is State.READY:
        return f"{look.addr} is ready"
    if look.state is State.UNREACHABLE:
        return f"{look.addr} is unreachable: {printable(look.reason or '')}"
    return f"{look.addr} {printable(look.reason or '')}"


def render(look: Look) -> str:
    """All that the look showed."""
    lines = textwrap.wrap(headline(look), WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    for name, text in _facts(look):
        lines += textwrap.wrap(
            printable(text),
            WIDTH,
            initial_indent=f"  {name:{INDENT - 2}}",
            subsequent_indent=" " * INDENT,
            break_on_hyphens=False,
        )
    if look.pair is not None:
        head, *reasons = verdict(look.pair)
        lines += [f"  {'decode engine':{INDENT - 2}}{head}", *(f"  {line}" for line in reasons)]
    for warning in look.warnings():
        lines += textwrap.wrap(printable(f"warning: {warning}"), WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _facts(look: Look) -> Iterator[tuple[str, str]]:
    if look.answers_ms:
        median, worst = statistics.median(look.answers_ms), max(look.answers_ms)
        count = len(look.answers_ms)
        questions = "question" if count == 1 else "questions"
        yield "answers in", f"{median:.1f} ms (median of {count} {questions}, slowest {worst:.1f} ms)"
    if look.features:
        yield "registry", f"disagg's, with {', '.join(look.features[:MOST_FEATURES])}"
    elif look.era is not None:
        yield "wire era", f"{look.era.name} ({look.era.words})"
    if look.instance is not None or look.epoch is not None:
        yield "instance", f"{look.instance or 'not stated'}, epoch {look.epoch or 'not stated'}"
    info = look.info
    if info is not None:
        dp, cp, tp, pp = info.dp_size, info.attn_cp_size, info.attn_tp_size, info.pp_size
        yield "topology", f"dp {dp} x cp {cp} x tp {tp} x pp {pp} = {dp * cp * tp * pp} ranks"
        yield "kv cache", f"page size {info.page_size or '?'}, dtype {info.kv_cache_dtype or '?'}"
        yield "dp rank", _rule(look)
    if look.endpoints is not None:
        yield "endpoints", _endpoints(look.endpoints)


def _rule(look: Look) -> str:
    info = look.info
    if info is None or info.dp_size == 1:
        return "there is one"
    if info.follow_bootstrap_room and not info.dynamic_dp_size:
        return f"room modulo {info.dp_size}"
    if look.dp_rank_query is None:
        return f"room modulo {info.dp_size} (it has no dp-rank query)"
    return f"by room, only the registry knows; the query {look.dp_rank_query}"


def _endpoints(endpoints: Endpoints) -> str:
    hosts = list(dict.fromkeys(at.ip for at in endpoints.found))
    text = f"{len(endpoints.found)} of {endpoints.count} known"
    if endpoints.asked < endpoints.count:
        text += f" ({endpoints.asked} asked for)"
    if hosts:
        more = len(hosts) - MOST_HOSTS
        text += f", on {', '.join(hosts[:MOST_HOSTS])}" + (f" and {more} more hosts" if more > 0 else "")
    return text


MOST_HOSTS = 4
MOST_FEATURES = 16
