"""A look at a registry as one JSON object."""

from __future__ import annotations

import statistics
from datetime import UTC, datetime

import disagg
from disagg.probe.look import MOST_NAMED, Endpoints, Look
from disagg.rank_tables.document import describe_prefill, describe_reason

__all__ = ["describe"]

SCHEMA = 1


def describe(look: Look) -> dict[str, object]:
    """Return the object; what the look did not get to is null. The keys are in the README."""
    return {
        "schema": SCHEMA,
        "disagg": disagg.__version__,
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "address": look.addr,
        "state": str(look.state),
        "reason": look.reason,
        "answers_ms": _answers(look.answers_ms),
        "era": None if look.era is None else look.era.name,
        "features": list(look.features),
        "instance": look.instance,
        "epoch": look.epoch,
        "topology": None if look.info is None else describe_prefill(look.info),
        "endpoints": None if look.endpoints is None else _endpoints(look.endpoints),
        "dp_rank_query": look.dp_rank_query,
        "fits": None if look.pair is None else look.pair.fits,
        "reasons": [] if look.pair is None else [describe_reason(reason) for reason in look.pair.reasons],
        "warnings": look.warnings(),
    }


def _answers(answers_ms: list[float]) -> dict[str, float] | None:
    if not answers_ms:
        return None
    return {
        "count": len(answers_ms),
        "median": round(statistics.median(answers_ms), 3),
        "worst": round(max(answers_ms), 3),
    }


def _endpoints(endpoints: Endpoints) -> dict[str, object]:
    return {
        "count": endpoints.count,
        "asked": endpoints.asked,
        "known": len(endpoints.found),
        "missing": endpoints.missing[:MOST_NAMED],
        "missing_count": len(endpoints.missing),
        "hosts": list(dict.fromkeys(at.ip for at in endpoints.found)),
    }
