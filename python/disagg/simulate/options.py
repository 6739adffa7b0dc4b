"""What a run is told to do: the options, their defaults and their rules."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path

from disagg.usage import KvName, UsageError, check_kv, check_writable

__all__ = ["LIMITS", "Options", "Scenario"]


class Scenario(Enum):
    """How the prefill engines behave as a whole."""

    HEALTHY = "healthy"
    MIXED = "mixed"
    DARK = "dark"


@dataclass(frozen=True, slots=True)
class Options:
    """One run. Times are in seconds, or as the name says; None is the scenario's own or not given."""

    scenario: Scenario = Scenario.MIXED
    peers: int = 12
    healthy: int | None = None
    rate: float = 300.0
    duration: float | None = None
    seed: int = 1
    trace: Path | None = None
    speedup: float = 1.0
    attempts: int = 4
    interval_s: float = 0.5
    min_wait_s: float = 1.0
    cooldown_s: float = 3.0
    connect_timeout_s: float = 1.0
    total_timeout_s: float = 1.0
    dp_rank_timeout_s: float = 5.0
    heartbeat_interval_s: float = 1.0
    kv: KvName = "mha"
    cycle_ms: float = 1.0
    work_us: float = 200.0
    json: Path | None = None

    DEFAULT_DURATION_S = 20.0

    def check(self) -> None:
        """Refuse values that cannot be run, before anything starts.

        Raises UsageError naming the option, its value and the rule.
        """
        for name, (low, high, unit) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # not a number fails this too
                raise UsageError(f"{option(name)} {value:g}: must be from {low:g} to {high:g} {unit}".rstrip())
        if self.work_us >= self.cycle_ms * 1000:
            raise UsageError(f"--work-us {self.work_us:g}: must be less than the cycle of {self.cycle_ms:g} ms")
        check_kv(self.kv)
        if self.speedup != 1.0 and self.trace is None:
            raise UsageError(f"--speedup {self.speedup:g}: needs --trace; generated arrivals have --rate")
        if self.json is not None:
            check_writable("--json", self.json)

    def described(self) -> dict[str, object]:
        """Every option by name, as plain JSON values."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}


# name: (lowest, highest, unit). The highest are what one small machine can still serve, not rules of nature.
LIMITS: dict[str, tuple[float, float, str]] = {
    "peers": (1, 128, ""),
    "healthy": (0, 128, ""),
    "rate": (0.1, 20_000, "requests a second"),
    "duration": (0.5, 3600, "seconds"),
    "seed": (0, 2**63 - 1, ""),
    "speedup": (0.001, 1_000_000, "times"),
    "attempts": (1, 1000, ""),
    "interval_s": (0.01, 60, "seconds"),
    "min_wait_s": (0, 600, "seconds"),
    "cooldown_s": (0.1, 600, "seconds"),
    "connect_timeout_s": (0.01, 60, "seconds"),
    "total_timeout_s": (0.01, 60, "seconds"),
    "dp_rank_timeout_s": (0.2, 600, "seconds"),
    "heartbeat_interval_s": (0.1, 600, "seconds"),
    "cycle_ms": (0.1, 1000, "milliseconds"),
    "work_us": (0, 1_000_000, "microseconds"),
}


def option(name: str) -> str:
    """Spell a field as the command line does."""
    return "--" + name.replace("_", "-")


def plain(value: object) -> object:
    """Turn an option's value into what JSON has."""
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
