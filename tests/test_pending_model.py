"""Whatever happens in whatever order: the core does what the reference does, and each request ends once."""

from __future__ import annotations

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import disagg
from machines import Pair, Request, endpoint, ranks_of, table, topology

LISTS = [None, None, ["10.0.0.1", "*.svc", "PREFILL-3"], ["10.0.0.0/31"], ["prefill-3", "::ffff:10.0.0.2"], ["::/0"]]
ADDRESSES = ["10.0.0.1:8998", "10.0.0.2:8998", "prefill-3:9000"]
SPELLINGS = [
    *ADDRESSES,
    "10.0.0.1",
    "PREFILL-3:9000",
    "prefill-3.:9000",
    "[::ffff:10.0.0.2]",
    "2.2.2.2:8998",
    "http://p",
    "p:0",
]
STEPS = [0.0, 0.001, 0.01, 0.02, 0.02, 0.1, 0.3, 0.5, 1.0, 2.0]
LEAPS = [5.0, 11.0, 16.0, 31.0, 121.0, 601.0, 901.0]
TOPOLOGIES = [
    topology(),
    topology(tp=2),
    topology(dp=2),
    topology(dp=3, follow=False),
    topology(tp=2, pp=2, dp=2, follow=False),
    topology(tp=12),
    topology(dp=2, dynamic_dp_size=True),
    topology(page_size=32),
    topology(page_size=64, pp=3),
    topology(kv_layout="hnd"),
]
BAD_BODIES = [b"", b"{}", b"[]", b"not json", b"null", topology(tp=0), topology(tp="8.0"), topology(dp=None)]
STATUSES = [200, 204, 302, 400, 401, 404, 405, 408, 413, 418, 429, 500, 502, 503]
ERRORS = ["refused", "timeout", "reset", "cut", "oversized", "dns", "encoding", "other", "forbidden", "never heard of"]
INSTANCES = st.sampled_from([None, None, None, None, "a", "a", "b", "x" * 257])
EPOCHS = st.sampled_from([None, None, None, None, None, "1", "1", "2"])
FEATURES = [None, None, "table", "wait-query", "batch-register, wait-query, table", "tables,wait-querying", "x" * 257]


class PendingMachine(RuleBasedStateMachine):
    @initialize(
        attempts=st.integers(1, 4),
        multiplier=st.sampled_from([1.0, 2.0]),
        jitter=st.sampled_from([0.0, 0.3]),
        min_wait_s=st.sampled_from([0.0, 5.0]),
        per_cycle=st.booleans(),
        track_rooms=st.booleans(),
        force_query=st.booleans(),
        not_found_is_transient=st.booleans(),
        max_addresses=st.sampled_from([2, 4096]),
        kv=st.sampled_from(["mha", "mla"]),
        hosts=st.tuples(st.sampled_from(LISTS), st.sampled_from([None, None, ["127.0.0.0/8"]])),
        lookups=st.sampled_from([1, 2, 8]),
        current=st.tuples(*[st.sampled_from(TOPOLOGIES[:5]) for _ in ADDRESSES]),
        features=st.tuples(*[st.sampled_from(FEATURES) for _ in ADDRESSES]),
    )
    def make(
        self,
        attempts,
        multiplier,
        jitter,
        min_wait_s,
        per_cycle,
        max_addresses,
        kv,
        hosts,
        lookups,
        current,
        features,
        **switches,
    ):
        self.features = dict(zip(ADDRESSES, features, strict=True))
        self.said = {}
        self.current = dict(zip(ADDRESSES, current, strict=True))
        policy = {"max_attempts": attempts}
        if not per_cycle:
            policy |= {"multiplier": multiplier, "jitter": jitter, "min_wait_s": min_wait_s}
        options = switches | {"max_addresses": max_addresses, "max_endpoint_lookups_per_peer": lookups}
        options |= dict(zip(("allowed_hosts", "allowed_rank_hosts"), hosts, strict=True))
        decode = {"attn_tp_size": 1, "engine_rank": 0, "page_size": 64, "kv": kv}
        self.pair = Pair(policy, options, decode, per_cycle)
        self.counter = 0

    @rule(
        addr=st.one_of(st.sampled_from(ADDRESSES), st.sampled_from(SPELLINGS)),
        room=st.one_of(st.integers(0, 6), st.integers(0, 2**63), st.sampled_from([-1, True, 1.0, "7", None])),
        dp_rank=st.one_of(st.none(), st.none(), st.integers(-1, 4), st.sampled_from([True, "0"])),
    )
    def add(self, addr, room, dp_rank):
        self.counter += 1
        self.pair.add(Request(self.counter), addr, room, dp_rank)

    @rule(count=st.integers(2, 20), addr=st.sampled_from(ADDRESSES))
    def add_many(self, count, addr):
        for _ in range(count):
            self.counter += 1
            self.pair.add(Request(self.counter), addr, 1000 + self.counter)

    @precondition(lambda self: self.pair.held)
    @rule(data=st.data())
    def add_one_that_is_held(self, data):
        request = data.draw(st.sampled_from(self.pair.held))
        assert self.pair.add(request, ADDRESSES[0], 5) is ValueError

    @precondition(lambda self: self.pair.held)
    @rule(data=st.data())
    def discard(self, data):
        self.pair.discard(data.draw(st.sampled_from(self.pair.held)))

    @rule(limit=st.sampled_from([1, 3, 4096]))
    def poll(self, limit):
        del limit  # the order of decision between peers is each machine's own, so only whole steps compare
        self.pair.poll()

    @rule(seconds=st.sampled_from(STEPS), poll=st.booleans())
    def advance(self, seconds, poll):
        self.pair.advance(seconds, poll)

    @rule(seconds=st.sampled_from(STEPS))
    def advance_polling(self, seconds):
        self.pair.advance(seconds)

    @rule(seconds=st.sampled_from(LEAPS))
    def leap_polling(self, seconds):
        # Deadlines only pass while polls come.
        whole, rest = divmod(min(seconds, 31.0), 1.0)
        for step in [1.0] * int(whole) + [rest]:
            self.pair.advance(step)

    @rule(seconds=st.sampled_from(LEAPS))
    def leap(self, seconds):
        self.pair.advance(seconds)

    @precondition(lambda self: self.pair.flights)
    @rule(data=st.data(), instance=INSTANCES, epoch=EPOCHS)
    def answer_well(self, data, instance, epoch):
        flight = data.draw(st.sampled_from(self.pair.flights))
        self.answer(flight, 200, self.good_body(data, flight), instance, epoch)

    @rule(data=st.data(), rounds=st.integers(1, 4), only=st.sampled_from(["all", "topology", "dp_ranks"]))
    def answer_everything_well(self, data, rounds, only):
        """The network works for a while."""
        for _ in range(rounds):
            for flight in list(self.pair.flights):
                if flight in self.pair.flights and only in ("all", flight.kind):
                    reads = flight.asks_for_topology
                    body = self.current.get(flight.addr, TOPOLOGIES[0]) if reads else self.good_body(data, flight)
                    self.answer(flight, 200, body)
            self.pair.advance(0.02)

    @precondition(lambda self: any(flight.kind == "endpoint" for flight in self.pair.flights))
    @rule()
    def ranks_are_not_found(self):
        for flight in list(self.pair.flights):
            if flight in self.pair.flights:
                body = self.current.get(flight.addr, TOPOLOGIES[0])
                self.pair.answer(flight, 404 if flight.kind == "endpoint" else 200, body)

    @rule(addr=st.sampled_from(ADDRESSES), body=st.sampled_from(TOPOLOGIES))
    def peer_changes(self, addr, body):
        self.current[addr] = body

    def answer(self, flight, status, body, instance=None, epoch=None):
        if flight.asks_for_topology and status == 200 and body in TOPOLOGIES:
            self.said[flight.addr] = body
        self.pair.answer(flight, status, body, instance, epoch, self.features.get(flight.addr))

    def good_body(self, data, flight):
        if flight.asks_for_topology:
            return data.draw(st.sampled_from(TOPOLOGIES))
        if flight.path.startswith("/routes"):
            return self.table(data, flight)
        if flight.kind == "heartbeat" and data.draw(st.integers(0, 3)):
            return endpoint(*self.pair.known_endpoint(flight))
        if flight.kind in ("endpoint", "heartbeat"):
            ip = data.draw(st.sampled_from(["127.0.0.1", "127.0.0.1", "127.0.0.1", "::1", "rank-0"]))
            return endpoint(data.draw(st.integers(1, 65535)), ip)
        known = data.draw(st.lists(st.sampled_from(flight.rooms), unique=True)) if flight.rooms else []
        rank = st.one_of(st.integers(0, 2), st.integers(0, 2), st.sampled_from([-1, "1", "x", 3.0, True]))
        answer = {str(room): data.draw(rank) for room in known}
        answer |= data.draw(st.sampled_from([{}, {"77777": 0}, {"nonsense": 1}]))
        return json.dumps(answer).encode()

    def table(self, data, flight):
        """All endpoints of a dp rank and the topology said last; now and then one is left out, or it has changed."""
        said = self.said[flight.addr] if data.draw(st.integers(0, 5)) else data.draw(st.sampled_from(TOPOLOGIES))
        ranks = ranks_of(said, int(flight.path.partition("=")[2]), port=data.draw(st.integers(1, 60_000)))
        left_out = data.draw(st.integers(-20, len(ranks)))
        if 0 <= left_out < len(ranks):
            del ranks[left_out]
        return table(said, ranks, data.draw(INSTANCES), data.draw(EPOCHS))

    @precondition(lambda self: self.pair.flights)
    @rule(data=st.data(), status=st.sampled_from(STATUSES), body=st.sampled_from(BAD_BODIES), instance=INSTANCES)
    def answer_badly(self, data, status, body, instance):
        self.answer(data.draw(st.sampled_from(self.pair.flights)), status, body, instance)

    @precondition(lambda self: self.pair.flights)
    @rule(data=st.data(), what=st.sampled_from(ERRORS), message=st.sampled_from(["", "it broke"]))
    def fail(self, data, what, message):
        self.pair.fail(data.draw(st.sampled_from(self.pair.flights)), what, message)

    @precondition(lambda self: self.pair.taken)
    @rule(data=st.data(), body=st.sampled_from(TOPOLOGIES))
    def answer_again(self, data, body):
        self.pair.answer_again(data.draw(st.sampled_from(self.pair.taken)), body)

    @rule(room=st.integers(0, 6), status=st.sampled_from([400, 503]))
    def fail_room(self, room, status):
        core, reference = self.pair.both("fail_room", room, "input too long", status)
        assert core is reference

    @rule(
        addr=st.sampled_from(SPELLINGS),
        name=st.sampled_from(["peer_lost", "peer_restarted"]),
        epoch=st.sampled_from([None, None, 0, 1, 2]),
    )
    def told(self, addr, name, epoch):
        core, reference = self.pair.both(name, addr, epoch)
        assert core is reference

    @rule(name=st.sampled_from(["pause", "resume"]))
    def pause_or_resume(self, name):
        self.pair.both(name)

    @rule(room=st.integers(0, 6))
    def release(self, room):
        self.pair.both("release", room)

    @invariant()
    def counts_agree(self):
        if hasattr(self, "pair"):
            self.pair.compare_counts()
            self.pair.compare_states()

    def teardown(self):
        if not hasattr(self, "pair"):
            return
        pair = self.pair
        pair.both("resume")
        for _ in range(400):
            pair.advance(0.5)
            for flight in list(pair.flights):
                if flight in pair.flights:
                    pair.fail(flight, "timeout", "no answer")
            if not pair.held:
                break
        assert not pair.held, "some requests never end"
        assert len(pair.ends) <= self.counter
        pair.core.fail_all("the end", closed=True)
        assert not pair.core.poll().failed
        stats = pair.core.stats()
        assert not any(stats["pending"].values())
        assert not any(stats["peers"].values())
        assert stats["in_flight"] == 0


PendingMachine.TestCase.settings = settings(stateful_step_count=40, report_multiple_bugs=False)
# A failure is worth the time to make it small.
TestPending = pytest.mark.timeout(900)(PendingMachine.TestCase)


def test_failure_kinds_of_core_and_reference_are_the_same():
    told = {"told": 500}
    from disagg.reference.rules import STATUS

    assert STATUS | told == disagg.FAILURE_KINDS
