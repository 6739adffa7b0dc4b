"""The Rust core: rank mapping, the machine of pending requests, the registry. One module, so one (long) stub."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self, final

from typing_extensions import disjoint_base

from disagg.errors import Reason
from disagg.values import Route, Step

__all__ = [
    "FAILURE_KINDS",
    "MAX_RANKS",
    "MAX_SIZE",
    "MAX_TOPOLOGY_BYTES",
    "TOPOLOGY_QUERIES",
    "BootstrapServer",
    "Contact",
    "DecodeRank",
    "Driver",
    "HostList",
    "PrefillInfo",
    "RankMapping",
    "Resolver",
    "RetryPolicy",
    "ServedRanks",
    "__version__",
    "canonical_address",
    "compatibility",
    "kv_head_range",
    "map_ranks",
    "parse_dp_ranks",
    "parse_endpoint",
    "parse_not_ready",
    "serve_ranks",
]

__version__: Final[str]
FAILURE_KINDS: Final[dict[str, int]]
"""Every `Failure.kind` with the HTTP status that it suggests."""
MAX_RANKS: Final[int]
"""Most ranks of one engine: dp x cp x tp x pp."""
MAX_SIZE: Final[int]
"""The greatest parallel size of one kind."""
MAX_TOPOLOGY_BYTES: Final[int]
"""Most bytes of a topology or endpoint answer."""
TOPOLOGY_QUERIES: Final[tuple[str, str]]
"""Paths of the topology query: from E3 on, and of E2."""

@final
class DecodeRank:
    """One rank of a decode engine: its place in the engine, and how it keeps keys and values.

    Sizes are from 1 to 65535 and ranks below their size; only `engine_rank` may exceed `attn_tp_size`, since the
    attention TP rank is `engine_rank % attn_tp_size`. `all_cp_ranks=None` is automatic: on for `hybrid_mla`.
    `num_kv_heads` is the model's true count, not that of a rank. What is None is not compared with the peer's.

    Raises TypeError or ValueError naming the field.
    """

    def __new__(
        cls,
        *,
        attn_tp_size: int,
        engine_rank: int,
        attn_cp_size: int = 1,
        attn_cp_rank: int = 0,
        pp_size: int = 1,
        pp_rank: int = 0,
        kv: Literal["mha", "mla", "hybrid_mla"] = "mha",
        all_cp_ranks: bool | None = None,
        num_kv_heads: int | None = None,
        page_size: int | None = 64,
        kv_cache_dtype: str | None = "auto",
        kv_layout: str | None = None,
        decode_allocation_policy: str | None = None,
        dcp_size: int = 1,
        spec_layout: dict[str, Any] | None = None,
        requires_equal_tp: bool = False,
        strict_dtype: bool = False,
    ) -> Self: ...
    @property
    def attn_tp_size(self) -> int: ...
    @property
    def engine_rank(self) -> int: ...
    @property
    def attn_tp_rank(self) -> int: ...
    @property
    def attn_cp_size(self) -> int: ...
    @property
    def attn_cp_rank(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def pp_rank(self) -> int: ...
    @property
    def kv(self) -> str: ...
    @property
    def all_cp_ranks(self) -> bool | None: ...
    @property
    def num_kv_heads(self) -> int | None: ...
    @property
    def page_size(self) -> int | None: ...
    @property
    def kv_cache_dtype(self) -> str | None: ...
    @property
    def kv_layout(self) -> str | None: ...
    @property
    def decode_allocation_policy(self) -> str | None: ...
    @property
    def dcp_size(self) -> int: ...
    @property
    def spec_layout(self) -> dict[str, Any] | None: ...
    @property
    def requires_equal_tp(self) -> bool: ...
    @property
    def strict_dtype(self) -> bool: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class PrefillInfo:
    """What a prefill engine says of itself: its topology and how it keeps keys and values.

    Sizes are from 1 to 65535, dp x cp x tp x pp at most 65536. `extras` holds what the peer sent and this
    library does not know. Raises TypeError or ValueError naming the field.
    """

    def __new__(
        cls,
        *,
        attn_tp_size: int,
        attn_cp_size: int = 1,
        dp_size: int = 1,
        pp_size: int = 1,
        page_size: int | None = 64,
        kv_cache_dtype: str | None = "auto",
        follow_bootstrap_room: bool = True,
        enable_dsa_cache_layer_split: bool = False,
        enable_kv_cache_sharding: bool = False,
        prefill_http_port: int | None = None,
        kv_layout: str | None = None,
        decode_allocation_policy: str | None = "early",
        dynamic_dp_size: bool = False,
        spec_layout: dict[str, Any] | None = None,
        extras: dict[str, Any] | None = None,
    ) -> Self: ...
    @staticmethod
    def from_json(body: bytes | str, /) -> PrefillInfo:
        """Read a topology answer (E2 on). Raises ProtocolError with field and value, also for null sizes: not ready."""
    @property
    def attn_tp_size(self) -> int: ...
    @property
    def attn_cp_size(self) -> int: ...
    @property
    def dp_size(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def page_size(self) -> int | None: ...
    @property
    def kv_cache_dtype(self) -> str | None: ...
    @property
    def follow_bootstrap_room(self) -> bool: ...
    @property
    def enable_dsa_cache_layer_split(self) -> bool: ...
    @property
    def enable_kv_cache_sharding(self) -> bool: ...
    @property
    def prefill_http_port(self) -> int | None: ...
    @property
    def kv_layout(self) -> str | None: ...
    @property
    def decode_allocation_policy(self) -> str | None: ...
    @property
    def dynamic_dp_size(self) -> bool: ...
    @property
    def spec_layout(self) -> dict[str, Any] | None: ...
    @property
    def extras(self) -> dict[str, Any]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

@final
class Contact:
    """One prefill rank to contact within a dp group; a `dummy` is contacted and not read."""

    def __new__(cls, cp: int, tp: int, pp: int, dummy: bool) -> Self: ...
    @property
    def cp(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def dummy(self) -> bool: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs__(self) -> tuple[int, int, int, bool]: ...

@final
class RankMapping:
    """Which prefill ranks one decode rank reads, and how many answers each side awaits.

    `target_tp_rank` is None when every TP rank is read and none stands out (sharding).
    """

    def __new__(
        cls,
        *,
        target_tp_rank: int | None,
        target_tp_ranks: list[int] | tuple[int, ...],
        target_cp_ranks: list[int] | tuple[int, ...],
        target_pp_ranks: list[int] | tuple[int, ...],
        required_dst_info_num: int,
        required_prefill_response_num: int,
    ) -> Self: ...
    @property
    def target_tp_rank(self) -> int | None: ...
    @property
    def target_tp_ranks(self) -> tuple[int, ...]: ...
    @property
    def target_cp_ranks(self) -> tuple[int, ...]: ...
    @property
    def target_pp_ranks(self) -> tuple[int, ...]: ...
    @property
    def required_dst_info_num(self) -> int: ...
    @property
    def required_prefill_response_num(self) -> int: ...
    @property
    def dummy_tp_ranks(self) -> tuple[int, ...]:
        """The TP ranks that are contacted and not read."""
    @property
    def contact_count(self) -> int: ...
    def contacts(self) -> tuple[Contact, ...]:
        """Return the ranks in contact order: CP ascending, then TP ascending, then PP descending."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

def map_ranks(decode: DecodeRank, prefill: PrefillInfo, /) -> RankMapping:
    """Map a decode rank onto a prefill engine. Raises IncompatiblePeer with all reasons when the two do not fit."""

@final
class ServedRanks:
    """What one prefill rank has to do for each request of a decode engine.

    `role` is "real" (decode ranks read from it), "dummy" (they contact it and read the same data elsewhere) or "idle"
    (nobody contacts it: no decode ranks, stage None). It waits for `required_dst_info_num` decode ranks, those of
    `decode_tp_ranks` in stage `decode_pp_rank`.
    """

    def __new__(
        cls,
        *,
        role: Literal["real", "dummy", "idle"],
        decode_tp_ranks: list[int] | tuple[int, ...],
        decode_pp_rank: int | None,
    ) -> Self: ...
    @property
    def role(self) -> Literal["real", "dummy", "idle"]: ...
    @property
    def decode_tp_ranks(self) -> tuple[int, ...]: ...
    @property
    def decode_pp_rank(self) -> int | None: ...
    @property
    def required_dst_info_num(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

def serve_ranks(
    decode: DecodeRank, prefill: PrefillInfo, /, *, tp_rank: int, cp_rank: int = 0, pp_rank: int = 0
) -> ServedRanks:
    """Say which ranks of the decode engine a prefill rank serves: the inverse of `map_ranks`.

    Any rank of the decode engine stands for it. The ranks are within a dp group; it is the same for each.

    Raises ValueError for a rank that the prefill engine does not have, IncompatiblePeer with all reasons when the two
    do not fit.
    """

def compatibility(decode: DecodeRank, prefill: PrefillInfo, /) -> list[Reason]:
    """Return every difference of the pair, fatal ones and warnings; empty when there is none."""

def kv_head_range(num_kv_heads: int, attn_tp_size: int, attn_tp_rank: int, /) -> tuple[int, int] | None:
    """Return the KV heads of one rank as (first, end), or None when neither size divides the other.

    With more ranks than heads, neighbouring ranks hold the same head.
    """

def canonical_address(text: str, /, default_port: int | None = 8998) -> str:
    """Return the one spelling of a bootstrap address, `host:port` or `[v6]:port`; resolves no name.

    Raises ValueError saying what is wrong with it.
    """

def parse_not_ready(body: bytes, /) -> str | None:
    """Say what a registry that answered 503 waits for, as a clause: "waiting for tp3/pp1 and 2 more".

    None when the body does not say so, as upstream's.
    """

def parse_endpoint(body: bytes, /) -> tuple[str, int]:
    """Read where a rank listens, (ip, port), in a registry's answer. Raises ProtocolError."""

def parse_dp_ranks(body: bytes, /) -> dict[int, int]:
    """Read an answer to `query_dp_ranks`: dp rank by room. Raises ProtocolError for the first bad room or rank."""

@final
class RetryPolicy:
    """How an address is tried; times in seconds.

    `max_attempts` attempts, each `interval_s` after the start of the last (times `multiplier` each time, up to
    `max_interval_s`, shortened at random by up to the fraction `jitter`). Requests that waited `min_wait_s` fail
    when the budget is spent; then nothing is tried for `cooldown_s`, after which one probe goes out each
    `interval_s`. Raises ValueError naming the field that is out of range.
    """

    def __new__(
        cls,
        max_attempts: int = 15,
        interval_s: float = 1.0,
        multiplier: float = 1.0,
        max_interval_s: float = 30.0,
        jitter: float = 0.0,
        cooldown_s: float = 15.0,
        min_wait_s: float = 5.0,
    ) -> Self: ...
    @staticmethod
    def spaced() -> RetryPolicy:
        """Return the defaults: attempts spaced by wall clock."""
    @staticmethod
    def per_cycle(max_attempts: int = 30) -> RetryPolicy:
        """Return the first upstream form: the first `poll()` after a failure releases the next attempt."""
    @property
    def max_attempts(self) -> int: ...
    @property
    def interval_s(self) -> float: ...
    @property
    def multiplier(self) -> float: ...
    @property
    def max_interval_s(self) -> float: ...
    @property
    def jitter(self) -> float: ...
    @property
    def cooldown_s(self) -> float: ...
    @property
    def min_wait_s(self) -> float: ...
    @property
    def paced_by_poll(self) -> bool: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class HostList:
    """Which hosts may be dialled: entries are `name`, `*.name`, an IP address, or `address/prefix`.

    Names are compared exactly but for case and a final dot; `*.name` is a name with one or more labels in front of
    it; IPv4-mapped IPv6 is IPv4. Raises ConfigError about `option`, with the entry and its fault.
    """

    def __new__(cls, entries: Sequence[str], /, option: str = "allowed_hosts") -> Self: ...
    def verdict(self, host: str, /) -> Literal["allowed", "refused", "after_look_up"]:
        """Say what to do with a host before any look-up.

        An IP address must be in a network (or be listed itself), a name must be listed. Where no name is listed at all,
        what a name resolves to decides.
        """
    def allows_resolved(self, ip: str, /) -> bool:
        """Whether what a name resolved to may be dialled: it is in a network, or none is listed."""

@disjoint_base
class Resolver:
    """The machine without a network; use `disagg.Resolver`.

    With `virtual_time=True` time moves only by `set_time_ns`, for tests and simulations in virtual time.
    """

    def __new__(
        cls,
        decode: DecodeRank,
        retry: RetryPolicy | None = None,
        *,
        default_port: int | None = 8998,
        dp_rank_timeout_s: float = 30.0,
        endpoint_timeout_s: float = 10.0,
        request_timeout_s: float = 120.0,
        heartbeat_interval_s: float = 5.0,
        heartbeat_failures: int = 2,
        heartbeat_min_down_s: float = 10.0,
        peer_ttl_s: float = 900.0,
        max_addresses: int = 4096,
        max_endpoint_lookups_per_peer: int = 8,
        force_query: bool = False,
        track_rooms: bool = False,
        not_found_is_transient: bool = False,
        seed: int = 0,
        allowed_hosts: Sequence[str] | None = None,
        allowed_rank_hosts: Sequence[str] | None = None,
        virtual_time: bool = False,
    ) -> Self: ...
    def add(self, request: object, addr: str, room: int, dp_rank: int | None = None) -> Route | None:
        """Place a request at the prefill engine behind `addr`; never waits, never releases the GIL.

        Returns its Route when everything is cached; else None, the request is held by identity, and its end comes
        out of `poll`. `room` is from 0 to 2**63-1; `dp_rank` is the prefill's dp rank if the router chose one.

        Raises ValueError for a malformed address, room or dp rank and for a request that is pending already;
        nothing changes then.
        """
    def poll(self, limit: int = 4096) -> Step:
        """Take what was decided since the last poll, at most `limit` ends; call once per scheduling cycle."""
    def discard(self, request: object) -> None:
        """Forget a request, whatever its state: it is in no later Step."""
    def discard_all(self) -> None:
        """Forget every request."""
    def release(self, room: int) -> None:
        """With `track_rooms`: the routed request of `room` is over."""
    def fail_room(self, room: int, reason: str, http_status: int) -> bool:
        """Fail the request of `room` as `told`, or the one that will come within 600 s; the first reason wins.

        Returns whether one was pending. `http_status` is from 400 to 599.
        """
    def peer_lost(self, addr: str, epoch: int | None = None) -> bool:
        """Say that the peer is gone: its pending requests fail.

        With the `epoch` of a route it holds of that life of the peer only: a transfer that failed says nothing about an
        engine that has taken its place since. Returns False when nothing was done: the address is not known, or the
        epoch is over.
        """
    def peer_restarted(self, addr: str, epoch: int | None = None) -> bool:
        """Say that the peer was replaced, or that its endpoints are stale: what is cached of it goes.

        `epoch` and what is returned as for `peer_lost`.
        """
    def pause(self) -> None:
        """Stop the deadlines of requests until `resume`, as a poll that stays away for over 1 s does too."""
    def resume(self) -> None:
        """Let the deadlines go on."""
    def state_of(self, request: object) -> int:
        """Return 0 if the request failed, 1 while it is pending, 2 if it was routed, so that ranks can take the MIN.

        An end counts from the `poll` or `add` that gave it, never changes, and is remembered until the second `poll`
        after it (at least the last 65,536 of the routes that `add` gave between two polls). A request that was added
        again is judged by its latest life.

        Raises KeyError when the request was never added, was discarded while pending, or ended before that.
        """
    def explain(self, request: object) -> str:
        """Say in a sentence what the request waits for, where, since when and until when.

        "waiting for the dp rank of room 77 at 10.0.0.7:8998, asked 4 times, 2.1 s of 30 s". Ages are on the
        scheduler's clock, as the deadlines are. For people; the wording may change.

        Raises KeyError as `state_of` does.
        """
    def explain_peer(self, addr: str) -> str:
        """Say in a sentence what is known of a prefill engine and what happens next.

        "10.0.0.7:8998: not ready: waiting for tp3/pp1 and 2 more; attempt 4 of 15 in 0.6 s; 3 requests wait".

        Raises KeyError for an address that is not known (any more), ValueError for a malformed one.
        """
    def stats(self) -> dict[str, Any]:
        """Return what is held, which is zero again when all is done, and what was done.

        `pending` requests by stage, `oldest_s` (seconds that the first request of each stage has been in it; of
        `need_info`, since it was added), `peers` by state, `rooms`, `tombstones` (rooms told failed before their
        request came), `in_flight` HTTP requests, `remembered_ends` (of `state_of`). Then the counters: `http` requests
        by kind, `attempts` at topologies and how many of them failed (`attempts_failed`), dp-rank `queries`,
        `evictions` of addresses.
        """
    def driver(self) -> Driver:
        """Return what the network side drives; it does not keep the resolver alive."""
    def set_time_ns(self, now: int) -> None:
        """Set the virtual time in nanoseconds; it never goes back. Raises RuntimeError on the real clock."""
    def mark_forked(self) -> None:
        """Make every later `add` and `poll` raise RuntimeError: this process is a forked child."""

@final
class Driver:
    """The network's side of a resolver: commands out, facts in. Every function may be called from any thread."""

    def bell_fileno(self) -> int:
        """Return the descriptor that is readable when the network loop has something to do."""
    def take_commands(self, limit: int) -> list[tuple[int, str, str, str, str, bytes | None, int, int]]:
        """Return at most `limit` commands: (ticket, kind, addr, method, path, body, max_body, wait_ms).

        `wait_ms` is how long the peer was asked to wait before it answers, on top of the total timeout.
        """
    def on_response(
        self,
        ticket: int,
        status: int,
        body: bytes,
        headers: tuple[str | None, str | None, str | None] | None = None,
    ) -> None:
        """Take in an HTTP answer: its whole body, and the headers that concern the peer: instance, epoch, features."""
    def on_error(self, ticket: int, what: str, message: str) -> None:
        """Take in that an HTTP request got no whole answer."""
    def on_timer(self) -> None:
        """Fire what is due; harmless when nothing is."""
    def next_timer(self) -> float | None:
        """Return the seconds until `on_timer` is to be called, or None for never."""
    def has_work(self) -> bool:
        """Return whether a command waits, an answer is awaited or a timer is due; changes nothing."""
    def fail_all(self, reason: str, *, closed: bool = False) -> None:
        """End every pending request, and every later one at once, as `internal` or `closed`."""
    def stats(self) -> dict[str, Any]:
        """Return what `Resolver.stats` returns."""
    def counters(self) -> dict[str, Any]:
        """Return what was done, in numbers that only grow.

        `added` requests; `ended` ones by how (`routed_at_once`, `fake`, `resolved`, `failed`, `discarded` before they
        had an end) and `failed` by kind, both counted when it is decided, not when a poll tells, so that the ends and
        what is undecided add up to `added`; `attempts` at topologies by outcome (`good`, `transient`, `permanent`) and
        kind; `http` requests by kind; `rooms_asked` for a dp rank (again counts again) and `rooms_resolved` by an
        answer; `events` by kind; `evictions`; `changes_dropped` because nobody took them.

        `waits` has, for the stays of requests in the stages `info`, `dp_rank` and `endpoints` and for `total`, the sum
        in seconds (`sum_s`) and how many were at most as long as each of `wait_bounds_s`, or longer than all
        (`buckets`), on the scheduler's clock. What took no time is not counted.
        """
    def take_changes(self, limit: int) -> list[dict[str, Any]]:
        """Take at most `limit` changes of peers, the oldest first; the last 512 are kept until they are taken.

        Each has `event` (fetch_failed, budget_spent, refused, lost, restarted, back, ready, unequal_tp), `addr`,
        `attempt` of `budget`, `kind` of failure, how many requests were `waiting`, `epoch`, `sizes` (dp, cp, tp, pp),
        `text` (may hold what a peer sent), and `age_s`. What does not apply is None.
        """

@final
class BootstrapServer:
    """A bootstrap registry over HTTP on threads of its own, which answers while Python holds the GIL.

    Listens when the constructor returns; port 0 takes a free one. `room_ttl_s` is how long a room's dp rank is
    kept, `room_cap` how many rooms are. `old_decodes=True` leaves out answer keys that decodes before 0.5.20 reject.

    Raises OSError when it cannot bind, ValueError for an option out of range.
    """

    def __new__(
        cls,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        old_decodes: bool = False,
        room_ttl_s: float = 600.0,
        room_cap: int = 1_000_000,
    ) -> Self: ...
    @property
    def address(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def port(self) -> int: ...
    def close(self, timeout_s: float = 2.0) -> None:
        """Stop listening and end the threads; idempotent."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self, _class: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None, /
    ) -> None: ...
