"""The ranks of a decode engine agree: J8, and CASES.md A3-07 and A3-08.

Each rank has a Resolver of its own. Every cycle the engine takes the MIN over the ranks of each request's state, as its
all-reduce does it: 0 aborts it everywhere, 2 admits it everywhere, 1 leaves it in the queue.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import disagg
from machines import SECOND, A, B, Core, Request, add, answer_endpoints, answer_topology, endpoint, make, topology

DECODE = disagg.DecodeRank(attn_tp_size=2, engine_rank=0, page_size=64)
RETRY = disagg.RetryPolicy(max_attempts=3, interval_s=0.5, min_wait_s=0.0, cooldown_s=2.0)
FAILED, PENDING, ROUTED = 0, 1, 2
CYCLE = SECOND // 100
SKEW = 5 * CYCLE  # 50 ms
ADDRESSES = [A, B]


class Rank:
    """One rank: its resolver, what is under way to it, and the ends that it gave."""

    def __init__(self, skew):
        self.core = Core(DECODE, RETRY, dp_rank_timeout_s=1.0, endpoint_timeout_s=2.0, request_timeout_s=6.0)
        self.skew = skew
        self.mail = []  # (when, ticket, kind, addr, body)
        self.given = {}
        self.polls_since = {}

    def cycle(self, now, peers):
        """One scheduling cycle at `now` of the engine's time; this rank's clock and its network are `skew` late."""
        self.core.set_time_ns(now + self.skew)
        for when, ticket, kind, addr, body in [mail for mail in self.mail if mail[0] <= now]:
            self.mail.remove((when, ticket, kind, addr, body))
            status, answer = peers[addr].answer(kind, when - self.skew, body)
            if status is None:
                self.core.on_error(ticket, "refused", "connection refused")
            else:
                self.core.on_response(ticket, status, answer, None)
        self.core.on_timer()
        step = self.core.poll()
        self.send(now)
        for ended, polls in self.polls_since.items():
            self.polls_since[ended] = polls + 1
        for request, end in step.resolved + step.failed:
            assert request not in self.given, "it ended twice"
            self.give(request, ROUTED if isinstance(end, disagg.Route) else FAILED)

    def send(self, now):
        for ticket, kind, addr, _, _, body, *_ in self.core.take_commands(2**20):
            if kind == "cancel":
                self.mail = [mail for mail in self.mail if mail[1] != ticket]
            else:
                self.mail.append((now + CYCLE + self.skew, ticket, kind, addr, body))

    def add(self, request, addr, room, now):
        if self.core.add(request, addr, room) is not None:
            self.give(request, ROUTED)
        self.send(now)

    def give(self, request, end):
        self.given[request], self.polls_since[request] = end, 0

    def state(self, request):
        """What the engine reduces: `state_of`, and what it said of an end that is forgotten."""
        try:
            state = self.core.state_of(request)
        except KeyError:
            assert self.polls_since[request] >= 2, "forgotten too early"
            return self.given[request]
        assert state == self.given.get(request, PENDING), "an end was changed"
        assert self.polls_since.get(request, 0) < 2, "remembered too long"
        return state


@dataclasses.dataclass
class Peer:
    """A prefill engine as a function of time, in seconds: all ranks of the decode engine see the same one."""

    ready_at: float
    dead_from: float
    ranks_known_at: float
    dp_size: int = 2
    grows_at: float = 1e9

    def answer(self, kind, when, body):
        seconds = when / SECOND
        if seconds >= self.dead_from:
            return None, b""
        if kind in ("topology", "heartbeat"):
            if seconds < self.ready_at:
                return 503, b""
            size = self.dp_size if seconds < self.grows_at else self.dp_size + 1
            return 200, topology(dp=size, follow=self.ranks_known_at == 0)
        if kind == "endpoint":
            return 200, endpoint()
        rooms = json.loads(body)["bootstrap_rooms"] if seconds >= self.ranks_known_at else []
        return 200, json.dumps({str(room): room % self.dp_size for room in rooms}).encode()


times = st.one_of(st.just(0.0), st.floats(0, 3), st.sampled_from([0.5, 1.0, 1.5, 1e9]))
peers = st.builds(Peer, ready_at=times, dead_from=st.one_of(st.just(1e9), times), ranks_known_at=times, grows_at=times)
arrivals = st.lists(st.tuples(st.integers(0, 300), st.sampled_from(ADDRESSES)), min_size=1, max_size=12)


def run_engine(ranks, peers, arrivals):
    """Run until the queue is empty; returns what the engine did with each request."""
    arrivals = sorted(arrivals)
    queue, results, numbers = [], {}, iter(range(10**6))
    for cycle in range(1000):
        now = 10 * SECOND + cycle * CYCLE
        seen = {addr: dataclasses.replace(peer) for addr, peer in peers.items()}
        while arrivals and arrivals[0][0] <= cycle:
            _, addr = arrivals.pop(0)
            room = next(numbers)
            request = Request(room)
            queue.append(request)
            for rank in ranks:
                rank.add(request, addr, room, now)
        for rank in ranks:
            rank.cycle(now, seen)
        # The all-reduce.
        agreed = [min(states) for states in zip(*[[rank.state(r) for r in queue] for rank in ranks], strict=True)]
        for request, state in zip(list(queue), agreed, strict=True):
            if state != PENDING:
                queue.remove(request)
                results[request.name] = state
                for rank in ranks:
                    rank.core.discard(request)
        if not queue and not arrivals:
            return results
    raise AssertionError(f"{queue} never left the queue")


@given(st.tuples(peers, peers), arrivals)
@settings(max_examples=settings().max_examples // 4 or 1)
def test_ranks_whose_clocks_and_facts_are_50_ms_apart_reach_one_result_for_each_request(peers, arrivals):
    """J8, A3-07: every request leaves the queue on all ranks at once, and no rank ever changes an end."""
    peers = {addr: shifted(peer) for addr, peer in zip(ADDRESSES, peers, strict=True)}
    ranks = [Rank(0), Rank(SKEW)]
    results = run_engine(ranks, peers, arrivals)
    assert len(results) == len(arrivals)
    for rank in ranks:
        stats = rank.core.stats()
        assert not any(stats["pending"].values())
        assert stats["rooms"] == 0
        rank.core.poll()
        rank.core.poll()
        assert rank.core.stats()["remembered_ends"] == 0


def shifted(peer):
    """Times of a script count from the engine's start."""
    later = {name: getattr(peer, name) + 10 for name in ("ready_at", "dead_from", "grows_at")}
    ranks_known_at = peer.ranks_known_at and peer.ranks_known_at + 10
    return dataclasses.replace(peer, ranks_known_at=ranks_known_at, **later)


@given(st.tuples(peers, peers), arrivals)
@settings(max_examples=settings().max_examples // 4 or 1)
def test_ranks_with_the_same_facts_do_the_same(peers, arrivals):
    """J8: a decision depends on facts and their order, on nothing else; so one rank alone is the whole engine."""
    peers = {addr: shifted(peer) for addr, peer in zip(ADDRESSES, peers, strict=True)}
    ranks = [Rank(0), Rank(0)]
    assert run_engine(ranks, peers, list(arrivals)) == run_engine([Rank(0)], peers, list(arrivals))
    assert [(request.name, end) for request, end in ranks[0].given.items()] == [
        (request.name, end) for request, end in ranks[1].given.items()
    ]


def test_a_rank_that_fails_a_request_fails_it_for_all():
    """One rank's last attempt fails, another's, a moment later, is answered."""
    ranks = [Rank(0), Rank(SKEW)]
    request = Request("a")
    for rank in ranks:
        rank.core.set_time_ns(SECOND)
        rank.add(request, A, 1, SECOND)
    first, second = (rank.mail.pop()[1] for rank in ranks)
    ranks[0].core.on_response(first, 404, b"", None)
    ranks[1].core.on_response(second, 200, topology(), None)
    for lookup in ranks[1].core.take_commands(9):
        ranks[1].core.on_response(lookup[0], 200, endpoint(), None)
    for confirm in ranks[1].core.take_commands(9):
        ranks[1].core.on_response(confirm[0], 200, topology(), None)
    assert [rank.core.state_of(request) for rank in ranks] == [PENDING, PENDING], "decided, but not given"
    for rank in ranks:
        rank.core.poll()
    states = [rank.core.state_of(request) for rank in ranks]
    assert (states, min(states)) == ([FAILED, ROUTED], FAILED)
    for rank in ranks:
        rank.core.discard(request)
    assert [rank.core.state_of(request) for rank in ranks] == states, "a discard changes no end"


class TestStateOf:
    def test_an_end_is_remembered_for_two_steps(self):
        pair = make({"max_attempts": 1, "min_wait_s": 0.0})
        request = add(pair, "a")
        assert pair.core.state_of(request) == PENDING
        pair.fail(pair.only("topology"))
        assert pair.core.state_of(request) == PENDING, "decided, but not given"
        pair.poll()
        assert pair.core.state_of(request) == FAILED
        pair.poll()
        assert pair.core.state_of(request) == FAILED
        pair.poll()
        with pytest.raises(KeyError, match="did not end within the last two polls"):
            pair.core.state_of(request)

    def test_a_route_that_add_gave_is_remembered_as_long(self):
        pair = make()
        make_cached(pair)
        requests = [Request("cached"), Request("fake")]
        assert pair.add(requests[0], A, 50) is not None
        assert pair.add(requests[1], "2.2.2.2", 0) is not None
        for _ in range(2):
            assert [pair.core.state_of(request) for request in requests] == [ROUTED, ROUTED]
            pair.poll()
        for request in requests:
            with pytest.raises(KeyError):
                pair.core.state_of(request)

    def test_a_request_that_was_added_again_is_judged_by_its_latest_life(self):
        pair = make({"max_attempts": 1, "min_wait_s": 0.0})
        request = add(pair, "a", B)
        pair.fail(pair.only("topology"))
        pair.poll()
        make_cached(pair)
        assert pair.core.state_of(request) == FAILED
        pair.add(request, A, 60)
        assert pair.core.state_of(request) == ROUTED
        pair.add(request, "10.0.0.3", 61)
        assert pair.core.state_of(request) == PENDING
        pair.discard(request)
        assert pair.core.state_of(request) == ROUTED, "the life before; what was discarded while pending never ended"

    def test_a_discarded_or_unknown_request_is_a_key_error(self):
        pair = make()
        request = add(pair, "a")
        pair.discard(request)
        for unknown in (request, Request("never added"), None, 7):
            with pytest.raises(KeyError):
                pair.core.state_of(unknown)

    def test_it_is_the_object_that_counts_and_not_what_it_equals(self):
        pair = make()
        pair.core.add("".join(["a", "b"]), A, 1)
        with pytest.raises(KeyError):
            pair.core.state_of("".join(["a", "b"]))

    def test_routes_between_two_polls_do_not_pile_up(self):
        core = Core(DECODE, RETRY)
        requests = [Request(number) for number in range(200_000)]
        for request in requests:
            core.add(request, "2.2.2.2", 0)
        assert core.stats()["remembered_ends"] <= 2 * 65_536
        assert core.state_of(requests[-65_536]) == ROUTED
        with pytest.raises(KeyError):
            core.state_of(requests[0])


def make_cached(pair):
    request = add(pair, "first", A)
    answer_topology(pair, topology())
    answer_endpoints(pair)
    answer_topology(pair, topology())
    pair.poll()
    return pair.ends[request]


def test_steps_are_numbered_in_a_row_and_cannot_be_changed():
    """A3-08: ordered, immutable decisions, each request in exactly one of them."""
    pair = make({"max_attempts": 1, "min_wait_s": 0.0, "cooldown_s": 0.01})
    seen, steps = [], []
    for number in range(20):
        add(pair, number, A if number % 3 else B)
        for flight in list(pair.flights):
            pair.fail(flight)
        step = pair.poll()
        pair.advance(0.2, poll=False)
        steps += [step] if step.seq else []
        seen += [request for request, _ in step.failed]
    assert [step.seq for step in steps] == list(range(1, len(steps) + 1))
    assert len(seen) == len(set(seen)) == 20
    for field in dataclasses.fields(steps[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(steps[0], field.name, None)
    assert isinstance(steps[0].failed, tuple)
    assert isinstance(steps[0].failed[0], tuple)
