"""`Resolver`: the core's machine together with the network that drives it."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import warnings
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Never, Self, TypedDict, Unpack

from disagg import _core
from disagg.errors import ConfigError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from prometheus_client import CollectorRegistry

    from disagg.report import Report
    from disagg.transport import Starter
    from disagg.transport.secret import Secret
    from disagg.values import Step

__all__ = ["Health", "Resolver", "ResolverOptions"]

CONNECT_TIMEOUT_S = 1.0
TOTAL_TIMEOUT_S = 2.0
HEARTBEAT_TIMEOUT_S = 3.0
MAX_IN_FLIGHT = 1024
STALLED_S = 5.0


class _CoreOptions(TypedDict, total=False):
    default_port: int | None
    dp_rank_timeout_s: float
    endpoint_timeout_s: float
    request_timeout_s: float
    heartbeat_interval_s: float
    heartbeat_failures: int
    heartbeat_min_down_s: float
    peer_ttl_s: float
    max_addresses: int
    max_endpoint_lookups_per_peer: int
    force_query: bool
    track_rooms: bool
    not_found_is_transient: bool
    seed: int
    allowed_hosts: Sequence[str] | None
    allowed_rank_hosts: Sequence[str] | None


class ResolverOptions(_CoreOptions, total=False):
    """Options of `Resolver`, all of them optional.

    default_port: port of addresses that state none (8998); None makes such addresses a `ValueError`.
    connect_timeout_s: name look-up and connection of one HTTP request (1).
    total_timeout_s: one HTTP request from its start to the last byte of the answer (2).
    dp_rank_timeout_s: how long a request may wait for its dp rank (30).
    endpoint_timeout_s: how long a request may wait for endpoints (10).
    request_timeout_s: how long a request may wait in all (120).
    heartbeat_interval_s, heartbeat_timeout_s: how often a ready peer is looked at (5), and how long one look
        may take (3).
    heartbeat_failures, heartbeat_min_down_s: looks in a row that must fail (2), and seconds that they must span
        (10), before the peer is lost.
    peer_ttl_s: an address without requests for that long is forgotten (900).
    max_addresses: distinct addresses known at a time (4096).
    max_in_flight: HTTP requests in flight in all (1024).
    max_endpoint_lookups_per_peer: endpoint look-ups in flight at one peer (8).
    force_query: ask for the dp rank even where `room % dp_size` would do (False).
    track_rooms: refuse the rooms of routed requests too until `release(room)` (False).
    not_found_is_transient: 404 to the topology query means "not ready" (False).
    seed: of the jitter; the same on all ranks of an engine makes them alike (0).
    allowed_hosts: which hosts may be dialled (None: every one). Entries are names, compared exactly but for case;
        wildcards like `*.prefill.svc`, for one or more labels in front; IP addresses; and blocks like `10.0.0.0/8` or
        `fd00::/8`. An IP address must be in a block or listed itself. A name must be listed, and where addresses or
        blocks are listed too, everything it resolves to must be among them; where only these are listed, they alone
        decide about a name, after its look-up. Other requests fail as `not_allowed`, and nothing is sent.
    allowed_rank_hosts: the same for the `rank_ip` of endpoints in answers, where no name is looked up, so it must be
        listed as a name; an answer with another one is a protocol error, tried again and never in a Route (None).
    token: sent to every peer as `Authorization: Bearer`; needs `allowed_hosts` (None).
    metrics: push Prometheus metrics once a second, from the first request on; needs `pip install 'disagg[metrics]'`
        (False).
    metrics_registry: the `CollectorRegistry` to push them to; None is prometheus-client's default one (None).
    event_loop: an asyncio event loop that runs in the calling thread, and is to do the network's work itself; None is a
        thread of the Resolver's own (None).
    """

    connect_timeout_s: float
    total_timeout_s: float
    heartbeat_timeout_s: float
    max_in_flight: int
    token: str | None
    metrics: bool
    metrics_registry: CollectorRegistry | None
    event_loop: asyncio.AbstractEventLoop | None


class Health:
    """Whether the network side works: true or false, with the reason.

    That concerns this process and no peer: `peers_down` of them fail their requests at once, refused or down, which
    makes nothing false.
    """

    __slots__ = ("peers_down", "reason")

    def __init__(self, reason: str | None, peers_down: int = 0) -> None:
        self.reason = reason
        self.peers_down = peers_down

    def __bool__(self) -> bool:
        return self.reason is None

    def __repr__(self) -> str:
        said = "ok" if self.reason is None else repr(self.reason)
        return f"Health({said}, peers_down={self.peers_down})"


class Resolver(_core.Resolver):
    """Places requests with prefill engines without ever waiting.

    `add` looks up, `poll` takes what was decided in the background; both, and `discard`, may be called from any
    thread and never wait for the network. Close it, or use it as a context manager, in a coroutine with `async with`.

    Raises ValueError for options out of range, TypeError for a token or a registry that is none, ConfigError for a list
    of hosts with a faulty entry, a token that cannot be sent or has no `allowed_hosts`, and metrics without
    prometheus-client; RuntimeError when the network does not start, as on an `event_loop` that does not run in the
    calling thread.
    """

    def __new__(
        cls,
        decode: _core.DecodeRank,
        retry: _core.RetryPolicy | None = None,
        **options: Unpack[ResolverOptions],
    ) -> Self:
        """Make the core of it; the network starts in `__init__`."""
        core: dict[str, Any] = {k: v for k, v in options.items() if k in _CoreOptions.__annotations__}
        unknown = options.keys() - ResolverOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"Resolver() has no option {', '.join(sorted(unknown))}")
        return super().__new__(cls, decode, retry, **core)

    def __init__(
        self,
        decode: _core.DecodeRank,
        retry: _core.RetryPolicy | None = None,
        **options: Unpack[ResolverOptions],
    ) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._driver = self.driver()
        self._transport = _start_transport(self._driver, options, _report(self._driver, options))
        self._finalizer = weakref.finalize(self, _abandon, self._driver, self._transport)
        self._finalizer.atexit = False  # `_at_exit` closes
        _alive.add(self)

    def close(self, timeout_s: float = 2.0) -> Step:
        """Fail what is pending as `closed`, stop the network and return the last Step.

        Idempotent; every later `add` ends as `closed`. Waits at most `timeout_s` seconds for the network to end, but
        not on the thread of its `event_loop`, which ends it in its next turns: there, use `aclose`.
        """
        if self._begin_to_close():
            self._transport.stop(timeout_s)
        return self._last_step()

    async def aclose(self, timeout_s: float = 2.0) -> Step:
        """Do what `close` does, and wait for the network to end without holding up the running loop.

        When this is cancelled while it waits, the ends of the last Step come out of the next call.
        """
        self._begin_to_close()
        if self._pid == os.getpid():
            await self._transport.astop(timeout_s)
        return self._last_step()

    def health(self) -> Health:
        """Return whether the network side works, with the reason where it does not.

        It is false when the network died or its `event_loop` stands still, when the resolver is closed or was made
        before a fork, and, until it goes on, when the network has something to do but made no progress for 5 s: a log
        handler blocks it, or other threads left it no time. Its cost grows with the number of addresses: for each
        second, not for each cycle.
        """
        if self._pid != os.getpid():
            return Health("the resolver was made before a fork")
        if self._closed:
            return Health("the resolver was closed")
        return Health(self._trouble(), self.stats()["peers"]["marked"])

    def _trouble(self) -> str | None:
        trouble = self._transport.trouble()
        if trouble is not None:
            return trouble
        stalled_s = self._transport.since_progress_s()
        if stalled_s > STALLED_S and self._driver.has_work():
            return f"the network has made no progress for {stalled_s:.1f} s"
        return None

    def __reduce__(self) -> Never:
        raise TypeError("cannot pickle a Resolver: it owns requests, sockets and a thread; make one in each process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid == os.getpid():
            self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid == os.getpid():
            await self.aclose()

    def _begin_to_close(self) -> bool:
        if self._pid != os.getpid() or self._closed:
            return False
        self._closed = True
        self._finalizer.detach()
        self._driver.fail_all("the resolver was closed", closed=True)
        return True

    def _last_step(self) -> Step:
        step = self.poll(_ALL)
        while step.more:  # that was what a poll had taken when a signal handler broke it off
            step = _joined(step, self.poll(_ALL))
        return step


def _joined(step: Step, later: Step) -> Step:
    return replace(
        later,
        seq=max(step.seq, later.seq),
        resolved=step.resolved + later.resolved,
        failed=step.failed + later.failed,
        events=step.events + later.events,
    )


def _report(driver: _core.Driver, options: ResolverOptions) -> Report:
    from disagg.report import Report  # noqa: PLC0415  (keeps `import disagg` light)

    wanted, registry = options.get("metrics", False), options.get("metrics_registry")
    if not isinstance(wanted, bool):
        raise ValueError(f"metrics {wanted!r} must be True or False")
    _check_registry(registry)
    if not wanted:
        if registry is not None:
            raise ConfigError("metrics_registry", "is used only with metrics=True")
        return Report(driver, None)
    # Looked for, not imported: that must wait for the first request.
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError("metrics", "needs prometheus-client: pip install 'disagg[metrics]'")
    from disagg.metrics import MetricsPush  # noqa: PLC0415  (as above)

    return Report(driver, MetricsPush(driver, registry))


def _check_registry(registry: object) -> None:
    # Not imported for this: whoever made a registry has done that.
    client = sys.modules.get("prometheus_client")
    if registry is not None and (client is None or not isinstance(registry, client.CollectorRegistry)):
        raise TypeError(f"metrics_registry must be a CollectorRegistry or None, not {type(registry).__name__}")


def _token(options: ResolverOptions) -> Secret | None:
    from disagg.transport.secret import Secret  # noqa: PLC0415  (as below)

    token = options.get("token")
    if token is None:
        return None
    # Its text is in no message: errors are logged.
    if not isinstance(token, str):
        raise TypeError(f"token must be a str or None, not {type(token).__name__}")
    if not token or not all("!" <= char <= "~" for char in token):
        raise ConfigError("token", "must be one or more visible ASCII characters")
    if options.get("allowed_hosts") is None:
        raise ConfigError("token", "needs allowed_hosts: a token never goes to an address that a request chose")
    return Secret(token)


def _allows_resolved(options: ResolverOptions) -> Callable[[str], bool] | None:
    hosts = options.get("allowed_hosts")
    return None if hosts is None else _core.HostList(hosts).allows_resolved


def _start_transport(driver: _core.Driver, options: ResolverOptions, report: Report) -> Starter:
    from disagg.transport import LoopTransport, Transport, TransportOptions  # noqa: PLC0415  (keeps `import disagg` light)

    limits = TransportOptions(
        connect_timeout_s=_seconds("connect_timeout_s", options.get("connect_timeout_s", CONNECT_TIMEOUT_S)),
        total_timeout_s=_seconds("total_timeout_s", options.get("total_timeout_s", TOTAL_TIMEOUT_S)),
        heartbeat_timeout_s=_seconds("heartbeat_timeout_s", options.get("heartbeat_timeout_s", HEARTBEAT_TIMEOUT_S)),
        max_in_flight=_at_least_one("max_in_flight", options.get("max_in_flight", MAX_IN_FLIGHT)),
        token=_token(options),
        allows_resolved=_allows_resolved(options),
    )
    loop = _event_loop(options)
    transport = Transport(driver, limits, report) if loop is None else LoopTransport(driver, limits, loop, report)
    transport.start()
    return transport


def _event_loop(options: ResolverOptions) -> asyncio.AbstractEventLoop | None:
    loop = options.get("event_loop")
    if loop is not None:
        import asyncio  # noqa: PLC0415  (keeps `import disagg` light)

        if not isinstance(loop, asyncio.AbstractEventLoop):
            raise TypeError(f"event_loop must be an asyncio event loop or None, not {type(loop).__name__}")
    return loop


def _abandon(driver: _core.Driver, transport: Starter) -> None:
    """Stop the network of a resolver that was dropped without `close`, without waiting."""
    driver.fail_all("the resolver was dropped", closed=True)
    transport.stop(0.0)
    warnings.warn("unclosed disagg.Resolver; use `with`, or call close()", ResourceWarning, stacklevel=2)


def _seconds(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.001 <= value <= 1e6:
        raise ValueError(f"{name} {value!r} must be a number of seconds from 0.001 to 1000000")
    return float(value)


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} {value!r} must be a whole number of at least 1")
    return value


_ALL = 2**31
_alive: weakref.WeakSet[Resolver] = weakref.WeakSet()


def _in_forked_child() -> None:
    for resolver in list(_alive):
        resolver.mark_forked()
        resolver._finalizer.detach()  # nothing is the child's to end
    _alive.clear()


def _at_exit() -> None:
    for resolver in list(_alive):
        resolver.close()


os.register_at_fork(after_in_child=_in_forked_child)
atexit.register(_at_exit)
