"""Prometheus metrics of resolvers, pushed from the core's counters by the network thread.

The metric objects are real ones of prometheus-client, updated with what was added since the last push; so they work in
its multiprocess mode, and resolvers that share a registry add up. prometheus-client decides at its import whether that
mode is on (PROMETHEUS_MULTIPROC_DIR), and engines set that late: it is imported here at the first push after a request.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from disagg import _core

__all__ = ["MetricsPush"]


class MetricsPush:
    """Brings one resolver's counters and gauges into a registry (None is prometheus-client's default one).

    `push` and `close` are for one thread. Both raise what prometheus-client raises, ValueError for a name that is
    taken by others in that registry.
    """

    def __init__(self, driver: _core.Driver, registry: CollectorRegistry | None) -> None:
        self._driver = driver
        self._registry = registry
        self._metrics: _Metrics | None = None
        self._pushed: dict[_Series, float] = {}

    def push(self) -> None:
        """Add what changed since the last push; does nothing before the first request."""
        counters, stats = self._driver.counters(), self._driver.stats()
        if self._metrics is None:
            if not counters["added"]:
                return
            self._metrics = _metrics_in(self._registry, counters, stats)
        self._add(_counted(counters))
        self._add(_held(stats))
        self._metrics.set_ages(self, stats["oldest_s"])

    def close(self) -> None:
        """Push for the last time, and take this resolver's share off the gauges."""
        self.push()
        if self._metrics is not None:
            self._add((series, 0) for series, _ in _held(self._driver.stats()))
            self._metrics.set_ages(self, None)

    def _add(self, values: Iterable[tuple[_Series, float]]) -> None:
        if self._metrics is None:
            return
        pushed, add = self._pushed, self._metrics.add
        for series, value in values:
            if delta := value - pushed.get(series, 0):
                add[series](delta)
                pushed[series] = value


_Series = tuple[str, ...]
"""A metric's short name and its labels; of a histogram also which part."""


def _counted(counters: Mapping[str, Any]) -> Iterator[tuple[_Series, float]]:
    for name in ("added", "rooms_asked", "rooms_resolved", "evictions", "changes_dropped"):
        yield (name,), counters[name]
    for name in ("ended", "failed", "http", "events"):
        for label, count in counters[name].items():
            yield (name, label), count
    for outcome, kinds in counters["attempts"].items():
        for kind, count in kinds.items():
            yield ("attempts", outcome, kind), count
    for stage, wait in counters["waits"].items():
        yield ("wait_sum", stage), wait["sum_s"]
        for place, count in enumerate(wait["buckets"]):
            yield ("wait_bucket", stage, str(place)), count


def _held(stats: Mapping[str, Any]) -> Iterator[tuple[_Series, float]]:
    yield ("in_flight",), stats["in_flight"]
    yield ("rooms",), stats["rooms"]
    for stage, count in stats["pending"].items():
        yield ("pending", stage), count
    for state, count in stats["peers"].items():
        yield ("peers", state), count


class _Metrics:
    """The metric objects of one registry, shared by all resolvers that push into it.

    Every series is there from the start, with 0. If one cannot be made, none is left in the registry.
    """

    def __init__(self, registry: CollectorRegistry, counters: Mapping[str, Any], stats: Mapping[str, Any]) -> None:
        from prometheus_client import Counter, Gauge, Histogram  # noqa: PLC0415  (as the module says)

        self._ages: dict[MetricsPush, Mapping[str, float]] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._gauges: list[Any] = []
        self.add: dict[_Series, Callable[[float], object]] = {}
        made: dict[str, Counter | Gauge] = {}
        try:
            for key, (name, text, *labels) in COUNTERS.items():
                made[key] = Counter(name, text, labels, registry=registry)
            for key, (name, text, *labels) in GAUGES.items():
                made[key] = Gauge(name, text, labels, registry=registry, multiprocess_mode="livesum")
            self._age = made["oldest"] = Gauge(*OLDEST, registry=registry, multiprocess_mode="livemax")
            wait = Histogram(*WAIT, registry=registry, buckets=counters["wait_bounds_s"])
        except BaseException:
            for metric in made.values():
                registry.unregister(metric)
            raise
        for (key, *values), _ in (*_counted(counters), *_held(stats)):
            if key in made:
                self._add_series(made[key], key, values)
        for stage in counters["waits"]:
            self._add_histogram(wait, stage)

    def set_ages(self, of: MetricsPush, ages: Mapping[str, float] | None) -> None:
        """Show the greatest age of all resolvers; None takes one off."""
        with self._lock:
            stages = ages or self._ages.pop(of, {})
            if ages is not None:
                self._ages[of] = ages
            for stage in stages:
                self._age.labels(stage).set(max((ages[stage] for ages in self._ages.values()), default=0.0))

    def own(self) -> Self:
        """Return self, in a forked child without what the parent's resolvers, which are not here, had on the gauges."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.Lock()
            for stage in {stage for ages in self._ages.values() for stage in ages}:
                self._age.labels(stage).set(0)
            self._ages.clear()
            for gauge in self._gauges:
                gauge.set(0)
        return self

    def _add_series(self, metric: Counter | Gauge, key: str, values: list[str]) -> None:
        child = metric.labels(*values) if values else metric
        self.add[key, *values] = child.inc
        if key in GAUGES:
            self._gauges.append(child)

    def _add_histogram(self, histogram: Histogram, stage: str) -> None:
        # `observe` takes one value at a time, and the core may have counted thousands since the last push: these are
        # what `observe` moves. Private, but as old as the library; tests/test_metrics.py notices if they go.
        child = histogram.labels(stage)
        self.add["wait_sum", stage] = child._sum.inc
        for place, bucket in enumerate(child._buckets):
            self.add["wait_bucket", stage, str(place)] = bucket.inc


def _metrics_in(registry: CollectorRegistry | None, counters: Mapping[str, Any], stats: Mapping[str, Any]) -> _Metrics:
    from prometheus_client import REGISTRY  # noqa: PLC0415  (as the module says)

    into = REGISTRY if registry is None else registry
    with _lock:
        metrics = _by_registry.get(into)
        if metrics is None:
            metrics = _by_registry[into] = _Metrics(into, counters, stats)
        return metrics.own()


COUNTERS = {
    "added": ("disagg_requests_added", "Requests that were added."),
    "ended": ("disagg_requests_ended", "Requests whose end was decided, or that were discarded before.", "end"),
    "failed": ("disagg_requests_failed", "Requests that failed.", "kind"),
    "attempts": ("disagg_topology_attempts", "Attempts at a peer's topology that came back.", "outcome", "kind"),
    "http": ("disagg_http_requests", "HTTP requests handed to the network.", "purpose"),
    "rooms_asked": ("disagg_rooms_asked", "Rooms whose dp rank was asked for; again counts again."),
    "rooms_resolved": ("disagg_rooms_resolved", "Rooms whose dp rank an answer told."),
    "events": ("disagg_peer_events", "Changes of peers that poll tells of.", "event"),
    "evictions": ("disagg_evictions", "Addresses given up to make room for others."),
    "changes_dropped": ("disagg_changes_dropped", "Changes of peers that were too many to log."),
}
GAUGES = {
    "pending": ("disagg_requests_pending", "Requests that are held.", "stage"),
    "peers": ("disagg_peers", "Prefill engines (addresses) that are known.", "state"),
    "in_flight": ("disagg_http_in_flight", "HTTP requests in flight or on their way to the network."),
    "rooms": ("disagg_rooms_held", "Rooms that are held."),
}
OLDEST = ("disagg_requests_oldest_seconds", "How long the first request of a stage has been in it.", ("stage",))
WAIT = ("disagg_wait_seconds", "How long requests waited that had to, by what for; total is over all.", ("stage",))

_lock = threading.Lock()
_by_registry: weakref.WeakKeyDictionary[CollectorRegistry, _Metrics] = weakref.WeakKeyDictionary()


def _in_forked_child() -> None:
    # The thread that may have held the lock is not here.
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_forked_child)
