"""Quantiles of measured times."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["quantile", "summary_ms"]

NS_PER_MS = 1_000_000


def quantile(ordered: Sequence[int], share: float) -> int:
    """Return the smallest value that at least `share` of the ascending values do not exceed; 0 of none."""
    if not ordered:
        return 0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary_ms(values_ns: Sequence[int]) -> dict[str, float]:
    """Sum up times in ns as ms: count, p50, p99, p99_9 and max, to the microsecond."""
    ordered = sorted(values_ns)
    shares = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999, "max": 1.0}
    quantiles = {name: round(quantile(ordered, share) / NS_PER_MS, 3) for name, share in shares.items()}
    return {"count": len(ordered), **quantiles}
