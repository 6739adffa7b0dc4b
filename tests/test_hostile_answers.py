"""Thousands of generated hostile answers: each request ends once with a typed failure, and nothing is left behind."""

from __future__ import annotations

import gc
import logging
import random
import sys
import threading
import time
import unicodedata
from collections import Counter

import psutil
import pytest

import disagg
from hostile import HostileHost
from hostile_answers import draw
from machines import Request
from polling import poll_until

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64, strict_dtype=True)
ONCE = disagg.RetryPolicy(max_attempts=1, min_wait_s=0.0)
# Whatever holds a connection open, or an end back, costs this long; those of a batch pass together.
SHORT_S = 0.4
BATCH = 125
LIMITS = {
    "total_timeout_s": SHORT_S,
    "connect_timeout_s": SHORT_S,
    "endpoint_timeout_s": SHORT_S,
    "dp_rank_timeout_s": SHORT_S,
    "peer_ttl_s": 1.0,  # so that peers of older batches are forgotten, and not probed
}
FIRST_ROOM = 10**9
# Connections that idle are kept for the 15 s of TransportOptions.max_connection_age_s; twice that, as machines stall.
POOL_S = 30
LONGEST_REASON = 4096


@pytest.fixture(autouse=True)
def _log_lines_are_lines():
    """What peers send reaches the log too, once per peer; it must be fit for a terminal there as well."""
    seen = Counter()

    def count(record):
        seen[is_line(record.getMessage())] += 1
        return False  # no handler gets it: pytest would keep them all, and with them the memory that is looked at

    logger = logging.getLogger("disagg")
    logger.addFilter(count)
    yield
    logger.removeFilter(count)
    assert seen[True] > 0
    assert seen[False] == 0


def test_generated_hostile_answers_give_typed_failures_and_leave_nothing():
    ends, _ = run_answers(500, seed=1)
    assert sum(ends.values()) == 500


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_thousand_hostile_answers_give_typed_failures_and_leave_nothing():
    ends, grown_mib = run_answers(10_000, seed=2)
    # 4 KiB kept of each would be 40 MiB; what came and went leaves gaps, some 15 MiB of them.
    assert grown_mib < 32
    assert ends["resolved"] < 200, "an answer that happens to be good is rare"


def run_answers(count, *, seed):
    """Return how often each end came, and by how many MiB the process grew."""
    rng = random.Random(seed)
    with HostileHost() as host, disagg.Resolver(DECODE, ONCE, **LIMITS) as resolver:
        numbers = iter(range(count + 2 * BATCH))
        empty = Resources()
        for _ in range(2):
            serve_batch(host, resolver, rng, numbers, BATCH)
        warm = settle_at(resolver, empty)
        ends = Counter()
        for first in range(0, count, BATCH):
            ends += serve_batch(host, resolver, rng, numbers, min(BATCH, count - first))
        # Three objects kept of each answer would be more, whoever keeps them.
        most = warm.blocks + 3 * count + 10_000
        after = settle_at(resolver, empty)
        until = time.monotonic() + POOL_S
        while after.blocks >= most and time.monotonic() < until:
            time.sleep(1.0)
            after = Resources()
        assert resolver.health()
        assert held_of_peers(resolver) == 0
        assert after.blocks < most
        assert (after.threads, after.descriptors) == (empty.threads, empty.descriptors)
    assert len(ends) >= 6, f"the answers are too much alike: {ends}"
    return ends, (after.rss - warm.rss) / 2**20


def serve_batch(host, resolver, rng, numbers, size):
    """One peer with an address of its own for each answer, all asked at once; returns the ends by kind."""
    asked = {}
    for _ in range(size):
        number = next(numbers)
        room = FIRST_ROOM + number
        answers = draw(rng, room)
        peer = host.peer(answers, host=f"127.{1 + number // 62_500}.{number // 250 % 250}.{1 + number % 250}")
        request = Request(number)
        asked[request] = peer, answers
        assert resolver.add(request, peer.addr, room) is None
    ended = poll_until(resolver, size)
    assert resolver.poll().failed == ()
    for request, end in ended.items():
        check_end(*asked[request], end)
    host.forget([peer for peer, _ in asked.values()])
    return Counter(getattr(end, "kind", "resolved") for end in ended.values())


def check_end(peer, answers, end):
    if isinstance(end, disagg.Route):
        assert answers.may_resolve, answers
        return
    assert isinstance(end, disagg.Failure)
    assert end.http_status == disagg.FAILURE_KINDS[end.kind]
    assert end.kind in answers.kinds, (answers, end)
    assert end.addr == peer.addr
    assert 0 < len(end.reason) <= LONGEST_REASON
    assert is_line(end.reason), ascii(end.reason)


def is_line(text):
    return not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in text)


class Resources:
    """What the process holds: bytes and blocks of memory, threads, descriptors."""

    def __init__(self):
        gc.collect()
        process = psutil.Process()
        self.rss, self.descriptors = process.memory_info().rss, process.num_fds()
        self.threads, self.blocks = threading.active_count(), sys.getallocatedblocks()

    def holds_more_than(self, other):
        return self.threads > other.threads or self.descriptors > other.descriptors


def settle_at(resolver, before):
    """Wait until closed connections are gone on both sides, and the peers forgotten."""
    until = time.monotonic() + 20
    while (now := Resources()).holds_more_than(before) or held_of_peers(resolver):
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    return now


def held_of_peers(resolver):
    stats = resolver.stats()
    return sum(stats["pending"].values()) + sum(stats["peers"].values()) + stats["in_flight"]
