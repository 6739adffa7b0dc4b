"""The core and the reference side by side in virtual time: same calls in, same commands and ends out."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field

import pytest

import disagg
from disagg import _core
from disagg.reference.model import Options, Policy
from disagg.reference.pending import ReferenceResolver

MS = 1_000_000
SECOND = 1_000_000_000
ROOMS = itertools.count(1000)
A, B = "10.0.0.1:8998", "10.0.0.2:8998"


class Request:
    """A request as an engine would hold it."""

    __slots__ = ("name",)

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"Request({self.name})"


def topology(tp=1, cp=1, dp=1, pp=1, page_size=64, follow=True, **more):
    sizes = {"attn_tp_size": tp, "attn_cp_size": cp, "dp_size": dp, "pp_size": pp, "page_size": page_size}
    return json.dumps(sizes | {"kv_cache_dtype": "auto", "follow_bootstrap_room": follow} | more).encode()


def endpoint(port=5000, ip="127.0.0.1"):
    return json.dumps({"rank_ip": ip, "rank_port": port}).encode()


def ranks_of(said, dp_rank=0, port=5000):
    """All ranks of one dp rank of a topology, as `GET /routes` lists them; each with a port of its own."""
    info = json.loads(said)
    sizes = [range(info[f"{axis}_size"]) for axis in ("attn_cp", "attn_tp", "pp")]
    return [
        {"dp": dp_rank, "cp": cp, "tp": tp, "pp": pp, "rank_ip": "127.0.0.1", "rank_port": port + number}
        for number, (cp, tp, pp) in enumerate(itertools.product(*sizes))
    ]


def table(said, ranks, instance=None, epoch=None):
    """The answer to `GET /routes`."""
    named = {"instance_id": instance, "epoch": epoch, "topology": json.loads(said), "ranks": ranks}
    return json.dumps(named).encode()


class Core:
    """Both sides of the core in virtual time as one object, as the reference is."""

    def __init__(self, decode, retry=None, **options):
        self.resolver = _core.Resolver(decode, retry, virtual_time=True, **options)
        self.driver = self.resolver.driver()

    def __getattr__(self, name):
        return getattr(self.resolver if hasattr(self.resolver, name) else self.driver, name)


@dataclass
class Flight:
    """One HTTP request that both machines have in flight."""

    kind: str
    addr: str
    path: str
    body: bytes | None
    core: int
    reference: int

    @property
    def rooms(self):
        return json.loads(self.body)["bootstrap_rooms"]

    @property
    def asks_for_topology(self):
        return "=-1" in self.path


@dataclass
class Pair:
    """Drives both machines alike and compares what comes out; use it as the machine under test."""

    policy: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    decode: dict = field(default_factory=lambda: {"attn_tp_size": 1, "engine_rank": 0, "page_size": 64})
    per_cycle: bool = False
    seed: int = 7

    def __post_init__(self):
        decode = disagg.DecodeRank(**self.decode)
        if self.per_cycle:
            retry = disagg.RetryPolicy.per_cycle(self.policy["max_attempts"])
        else:
            retry = disagg.RetryPolicy(**self.policy)
        self.core = Core(decode, retry, seed=self.seed, **self.options)
        self.reference = ReferenceResolver(
            decode, Policy(per_cycle=self.per_cycle, **self.policy), Options(**self.options), seed=self.seed
        )
        self.now = 0
        self.flights: list[Flight] = []
        self.taken = []
        self.commands_seen = []
        self.ends: dict[Request, object] = {}
        self.held: list[Request] = []
        self.discarded: list[Request] = []

    def both(self, name, *args, **kwargs):
        """Call the same function of both, compare results and errors, then the commands that came of it."""
        results = []
        for machine in (self.core, self.reference):
            try:
                results.append(getattr(machine, name)(*args, **kwargs))
            except (KeyError, TypeError, ValueError) as error:
                results.append(type(error))
        self.compare_commands()
        return results

    def add(self, request, addr, room, dp_rank=None):
        core, reference = self.both("add", request, addr, room, dp_rank=dp_rank)
        if core is ValueError or reference is ValueError:
            assert core is reference
            return core
        assert same_end(core, reference), (core, reference)
        if core is None:
            self.held.append(request)
        else:
            self.ends[request] = core
        return core

    def poll(self, limit=2**31):
        core, reference = self.both("poll", limit)
        assert [r for r, _ in core.resolved] == [r for r, _ in reference.resolved]
        assert [r for r, _ in core.failed] == [r for r, _ in reference.failed]
        assert (core.seq, core.more) == (reference.seq, reference.more)
        assert core.events == reference.events
        for (request, mine), (_, other) in zip(
            core.resolved + core.failed, reference.resolved + reference.failed, strict=True
        ):
            assert same_end(mine, other), (mine, other)
            assert request in self.held
            self.held.remove(request)
            self.ends[request] = mine
        return core

    def discard(self, request):
        self.both("discard", request)
        self.discarded.append(request)
        if request in self.held:
            self.held.remove(request)

    def advance(self, seconds, poll=True):
        self.now += round(seconds * SECOND)
        self.core.set_time_ns(self.now)
        self.reference.set_time_ns(self.now)
        if poll:
            self.poll()
        self.both("on_timer")
        return self.poll() if poll else None

    def answer(self, flight, status=200, body=b"", instance=None, epoch=None, features=None):
        self.flights.remove(flight)
        self.taken.append(flight)
        headers = (instance, epoch, features)
        self.core.on_response(flight.core, status, body, headers)
        self.reference.on_response(flight.reference, status, body, headers)
        self.compare_commands()

    def fail(self, flight, what="refused", message="connection refused"):
        self.flights.remove(flight)
        self.taken.append(flight)
        self.core.on_error(flight.core, what, message)
        self.reference.on_error(flight.reference, what, message)
        self.compare_commands()

    def answer_again(self, flight, body):
        """A duplicate or late fact: both must ignore it."""
        self.core.on_response(flight.core, 200, body, None)
        self.reference.on_response(flight.reference, 200, body, None)
        self.compare_commands()

    def known_endpoint(self, flight):
        """Port and IP that a look-up which checks a cached endpoint expects."""
        peer, checked = self.reference.flights[flight.reference]
        ip, port = peer.groups[checked.dp_rank].found[checked.contact]
        return port, ip

    def only(self, kind):
        """Return the one flight of that kind."""
        found = [flight for flight in self.flights if flight.kind == kind]
        assert len(found) == 1, self.flights
        return found[0]

    def compare_commands(self):
        core = [tuple(command) for command in self.core.take_commands(2**20)]
        self.commands_seen += core
        reference = list(self.reference.take_commands(2**20))
        keys = [
            sorted((command[1:] for command in commands if command[1] != "cancel"), key=repr)
            for commands in (core, reference)
        ]
        assert keys[0] == keys[1], keys
        for ticket, kind, addr, _, path, body, *_ in core:
            if kind != "cancel":
                other = next(c for c in reference if c[1:3] == (kind, addr) and c[4:6] == (path, body))
                reference.remove(other)
                self.flights.append(Flight(kind, addr, path, body, ticket, other[0]))
        cancelled = {command[0] for command in core if command[1] == "cancel"}
        assert {f.reference for f in self.flights if f.core in cancelled} == {c[0] for c in reference}
        assert cancelled <= {flight.core for flight in self.flights}
        self.flights = [flight for flight in self.flights if flight.core not in cancelled]

    def compare_counts(self):
        stats = self.core.stats()
        open_requests = [r for r in self.reference.requests if r.end is None]
        for stage in ("need_info", "need_dp_rank", "need_endpoints"):
            assert stats["pending"][stage] == sum(r.stage == stage for r in open_requests), stage
        assert stats["pending"]["decided"] == len(self.reference.decided)
        assert stats["in_flight"] == len(self.reference.flights) == len(self.flights)
        assert stats["oldest_s"] == pytest.approx(self.reference.oldest())
        assert stats["queries"] == stats["http"]["dp_ranks"]
        assert stats["remembered_ends"] == sum(map(len, self.reference.given))
        counted = (self.reference.attempts, self.reference.attempts_failed)
        assert (stats["attempts"], stats["attempts_failed"]) == counted
        states = [peer.state for peer in self.reference.peers.values()]
        assert stats["peers"] == {s: states.count(s) for s in stats["peers"]}, (stats["peers"], states)
        self.compare_counters(len(open_requests))

    def compare_counters(self, undecided):
        counters = self.core.counters()
        assert counters["added"] == sum(counters["ended"].values()) + undecided
        assert counters["ended"]["failed"] == sum(counters["failed"].values())
        came_back = sum(sum(kinds.values()) for kinds in counters["attempts"].values())
        assert came_back <= self.reference.attempts
        assert came_back - counters["attempts"]["good"]["none"] == self.reference.attempts_failed

    def compare_states(self):
        """Both say the same of every request that ever was, and of every address."""
        for request in [*self.held, *self.ends, *self.discarded]:
            core, reference = self.both("state_of", request)
            assert core == reference, request
            assert core in (([1] if request in self.held else []) or [0, 2, KeyError]), request
        for request in [*self.held[-5:], *list(self.ends)[-5:]]:
            core, reference = self.both("explain", request)
            assert same_text(core, reference), (core, reference)
        for addr in self.reference.peers:
            core, reference = self.both("explain_peer", addr)
            assert same_text(core, reference), (core, reference)


def same_text(mine, other):
    # Core and reference word what they say of bodies and of pairs in their own way.
    own_words = ("protocol error", "incompatible", "differ", "page_size", "not divide")
    return mine == other or any(words in mine for words in own_words)


def same_end(mine, other):
    if type(mine) is not type(other):
        return False
    if isinstance(mine, disagg.Failure):
        # Core and reference word what they say of bodies and of pairs in their own way.
        plain = mine.kind != "incompatible" and "protocol error" not in mine.reason
        return (
            (mine.kind, mine.http_status, mine.addr, mine.attempts, mine.contacted)
            == (other.kind, other.http_status, other.addr, other.attempts, other.contacted)
        ) and (not plain or mine.reason == other.reason)
    if isinstance(mine, disagg.Route):
        return (mine.addr, mine.dp_rank, mine.endpoints, mine.epoch, mine.fake) == (
            other.addr, other.dp_rank, other.endpoints, other.epoch, other.fake,
        ) and same_mapping(mine.mapping, other.mapping)  # fmt: skip
    return mine == other


def same_mapping(mine, other):
    if mine is None or other is None:
        return mine is other
    fields = (
        "target_tp_rank", "target_tp_ranks", "target_cp_ranks", "target_pp_ranks",
        "required_dst_info_num", "required_prefill_response_num",
    )  # fmt: skip
    return all(getattr(mine, name) == getattr(other, name) for name in fields)


def make(policy=None, decode=None, per_cycle=False, **options):
    decode = {"attn_tp_size": 1, "engine_rank": 0, "page_size": 64} | (decode or {})
    return Pair(policy or {}, options, decode, per_cycle)


def add(pair, name, addr=A, room=None, dp_rank=None):
    request = Request(name)
    pair.add(request, addr, next(ROOMS) if room is None else room, dp_rank)
    return request


def answer_topology(pair, body, instance=None):
    pair.answer(pair.only("topology"), 200, body, instance)


def answer_endpoints(pair, port=5000):
    while lookups := [flight for flight in pair.flights if flight.kind == "endpoint"]:
        pair.answer(lookups[0], 200, endpoint(port))


def answer_all(pair, body):
    """Answer well until nothing is asked any more: topology queries with `body`, look-ups with an endpoint."""
    while pair.flights:
        flight = pair.flights[0]
        pair.answer(flight, 200, endpoint() if flight.kind == "endpoint" else body)


def make_ready(pair, body, addr=A, room=1, instance=None, port=5000):
    """Bring one request of `addr` through; returns its route."""
    request = add(pair, f"first at {addr}", addr, room)
    answer_topology(pair, body, instance)
    answer_endpoints(pair, port)
    answer_topology(pair, body, instance)
    pair.poll()
    return pair.ends[request]


def run(pair, seconds, step=0.05, on_flight=None):
    """Poll for some time, answering each flight with `on_flight`."""
    for _ in range(round(seconds / step)):
        pair.advance(step)
        for flight in list(pair.flights):
            if on_flight and flight in pair.flights:
                on_flight(flight)
