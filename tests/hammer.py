"""Calls everything of one resolver from many threads at once, and keeps account of what became of each request."""

from __future__ import annotations

import faulthandler
import itertools
import json
import random
import select
import threading
import time
from collections import Counter, deque
from tempfile import TemporaryFile

import disagg
from disagg import _core
from machines import Request, endpoint, topology

ADDRESSES = [f"10.0.0.{n}:8998" for n in range(1, 5)]
TOPOLOGIES = [[topology(dp=2)], [topology(dp=2, follow=False)], [topology(dp=3, follow=False), topology(dp=2)]]
"""What the first, the second and the others say; the others sometimes change their mind."""
BAD_BODIES = [b"", b"{}", b"not json", b'{"attn_tp_size": 0}', b'{"rank_ip": 5}', b'{"1": -1, "x": 2}']
ERRORS = ["refused", "timeout", "reset", "cut", "never heard of"]
# All of it short, so that each exit of each state is taken many times in a second.
POLICY = disagg.RetryPolicy(max_attempts=3, interval_s=0.005, cooldown_s=0.02, min_wait_s=0.0)
OPTIONS = {
    "dp_rank_timeout_s": 0.3, "endpoint_timeout_s": 0.3, "request_timeout_s": 1.0, "heartbeat_interval_s": 0.01,
    "heartbeat_min_down_s": 0.02, "track_rooms": True,
}  # fmt: skip


class Ledger:
    """Which requests were added, and how they ended; any thread may write, the test reads at the end.

    One counter orders the calls of all threads: to take its next number, and to append to a list, is atomic.
    """

    def __init__(self, resolver):
        self.resolver = resolver
        self.count = itertools.count()
        self.added, self.routed, self.steps, self.discards, self.clearings = [], [], [], [], []

    def add(self, request, addr, room, dp_rank=None):
        self.added.append((request, next(self.count)))
        if self.resolver.add(request, addr, room, dp_rank) is not None:
            self.routed.append(request)

    def poll(self, limit=4096):
        before = next(self.count)
        step = self.resolver.poll(limit)
        if step.seq:
            self.steps.append((step, before))
        return step

    def discard(self, request):
        self.resolver.discard(request)
        self.discards.append((request, next(self.count)))

    def discard_all(self):
        self.resolver.discard_all()
        self.clearings.append(next(self.count))

    def check(self):
        """Each request ended once, or was discarded and is in no step that was begun later."""
        in_steps = [(request, before) for step, before in self.steps for request, _ in step.resolved + step.failed]
        ends = Counter(self.routed) + Counter(request for request, _ in in_steps)
        assert [request for request, count in ends.items() if count > 1] == [], "ended twice"
        assert sorted(step.seq for step, _ in self.steps) == list(range(1, len(self.steps) + 1))
        polled = dict(in_steps)
        assert [request for request, after in self.discards if polled.get(request, -1) > after] == [], "discarded"
        discarded = {request for request, _ in self.discards}
        last_clearing = max(self.clearings, default=-1)
        open_ends = {request for request, before in self.added if before > last_clearing} - discarded
        assert open_ends - ends.keys() == set(), "lost"
        assert ends.keys() <= {request for request, _ in self.added}


class Hammer:
    """One core on the real clock, a network thread that feeds it, and threads that call the rest of it."""

    def __init__(self, seed, adds=5000, clearing=False):
        self.seed, self.adds, self.clearing = seed, adds, clearing
        self.resolver = _core.Resolver(disagg.DecodeRank(attn_tp_size=1, engine_rank=0), POLICY, **OPTIONS)
        self.driver = self.resolver.driver()
        self.ledger = Ledger(self.resolver)
        self.recent = deque([Request("never added")], maxlen=64)
        self.told_rooms = set()
        self.no_more_adds, self.no_more_ends = threading.Event(), threading.Event()
        self.errors = []

    def run(self):
        adders = [self.thread(self.add_many, f"adder {n}", 100_000 * (n + 1)) for n in range(2)]
        callers = [self.thread(self.discard_some, "discarder"), self.thread(self.tell, "teller")]
        servers = [self.thread(self.poll_often, f"poller {n}") for n in range(2)]
        servers.append(self.thread(self.answer_commands, "network"))
        for thread in adders + callers + servers:
            thread.start()
        try:
            join_all(adders)
            self.no_more_adds.set()
            join_all(callers)
            self.wait_until_nothing_is_pending()
            # What was told about rooms that did not come would be kept for 600 s.
            for room in sorted(self.told_rooms):
                self.ledger.add(Request(f"told {room}"), ADDRESSES[0], room)
            self.wait_until_nothing_is_pending()
        finally:
            self.no_more_adds.set()
            self.no_more_ends.set()
        join_all(servers)
        assert self.errors == []

    def thread(self, work, name, *arguments):
        def run():
            try:
                work(random.Random(f"{self.seed} {name}"), *arguments)
            except BaseException as error:  # noqa: BLE001  (whatever it is, the test reports it)
                self.errors.append(error)

        return threading.Thread(target=run, name=name, daemon=True)

    def wait_until_nothing_is_pending(self):
        until = time.monotonic() + 20
        while any(self.resolver.stats()["pending"].values()):
            assert not self.errors, self.errors
            assert time.monotonic() < until, self.resolver.stats()
            time.sleep(0.002)

    # What the threads do.

    def add_many(self, chance, first):
        for room in range(first, first + self.adds):
            request = Request(room)
            # Some rooms are taken or told about, and some ranks do not exist.
            some_room = room if chance.random() < 0.9 else chance.randrange(20)
            self.ledger.add(request, chance.choice(ADDRESSES), some_room, chance.choice([None, None, 0, 1, 9]))
            self.recent.append(request)
            if chance.random() < 0.1:
                time.sleep(0.001)

    def discard_some(self, chance):
        while not self.no_more_adds.is_set():
            self.ledger.discard(chance.choice(self.recent))
            time.sleep(chance.choice([0.0, 0.001]))

    def tell(self, chance):
        while not self.no_more_adds.is_set():
            room, addr = (
                chance.choice([chance.randrange(20), 100_000 + chance.randrange(self.adds)]),
                chance.choice(ADDRESSES),
            )
            what = chance.randrange(40)
            if what < 5:
                self.told_rooms.add(room)
                self.resolver.fail_room(room, "told by a thread", 400)
            elif what == 5:
                self.resolver.peer_lost(addr)
            elif what == 6:
                self.resolver.peer_restarted(addr)
            elif what == 7:
                self.resolver.pause()
                time.sleep(0.001)
                self.resolver.resume()
            elif what == 8 and self.clearing:
                self.ledger.discard_all()
            elif what < 20:
                self.resolver.release(room)
            else:
                assert self.resolver.stats()["pending"].keys() == {
                    "need_info",
                    "need_dp_rank",
                    "need_endpoints",
                    "decided",
                }
            time.sleep(chance.choice([0.0, 0.001]))

    def poll_often(self, chance):
        while not self.no_more_ends.is_set():
            self.ledger.poll(chance.choice([1, 3, 4096]))
            time.sleep(chance.choice([0.0, 0.0, 0.001]))

    def answer_commands(self, chance):
        under_way = []
        while not self.no_more_ends.is_set():
            due = self.driver.next_timer()
            wait_s = 0.0 if under_way else min(0.01 if due is None else due, 0.01)
            select.select([self.driver.bell_fileno()], [], [], wait_s)
            commands = self.driver.take_commands(chance.choice([1, 5, 256]))
            under_way += [command for command in commands if command[1] != "cancel"]
            self.driver.on_timer()
            while under_way and chance.random() < 0.9:
                self.answer(chance, under_way.pop(chance.randrange(len(under_way))))

    def answer(self, chance, command):
        ticket, kind, addr, _, _, body, *_ = command
        if chance.random() < 0.02:
            self.driver.on_error(ticket, chance.choice(ERRORS), "by chance")
        elif chance.random() < 0.05:
            self.driver.on_response(ticket, chance.choice([200, 400, 404, 500, 503]), chance.choice(BAD_BODIES))
        elif kind == "dp_ranks":
            ranks = {
                str(room): chance.randrange(2) for room in json.loads(body)["bootstrap_rooms"] if chance.random() < 0.8
            }
            self.driver.on_response(ticket, 200, json.dumps(ranks).encode())
        elif kind == "endpoint":
            self.driver.on_response(ticket, 200, endpoint())
        else:
            said = TOPOLOGIES[min(ADDRESSES.index(addr), 2)]
            changed = chance.random() < 0.05
            self.driver.on_response(
                ticket, 200, said[-1 if changed else 0], ("other life", None, None) if changed else None
            )
        if chance.random() < 0.1:  # late and unknown facts
            self.driver.on_response(chance.choice([ticket, ticket - 1, 2**40]), 200, topology())

    # The end.

    def check(self):
        """All is accounted for, and nothing is left."""
        self.ledger.check()
        self.driver.fail_all("the end", closed=True)
        for room in {*range(20), *(request.name for request, _ in self.ledger.added if isinstance(request.name, int))}:
            self.resolver.release(room)
        assert self.resolver.poll().failed == ()
        stats = self.resolver.stats()
        assert not any(stats["pending"].values()), stats
        assert not any(stats["peers"].values()), stats
        assert (stats["rooms"], stats["tombstones"], stats["in_flight"]) == (0, 0, 0), stats


def join_all(threads, within_s=30):
    """Join them; when they do not end in time, fail with the stacks of all threads."""
    until = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if stuck := [thread.name for thread in threads if thread.is_alive()]:
        with TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            raise AssertionError(f"{stuck} did not end; all threads:\n{file.read().decode()}")
