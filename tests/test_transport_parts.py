"""The transport's parts by themselves: the fair queue, name look-ups, the polite selector, imports, exit."""

from __future__ import annotations

import asyncio
import gc
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.transport import Transport, TransportOptions, names
from disagg.transport.connections import Connections
from disagg.transport.options import Command
from disagg.transport.polite import EVENTS_PER_TURN, PoliteSelector
from disagg.transport.queues import FairQueue
from fake_machine import FakeMachine
from hostile import HostileHost, answers, answers_when

OPTIONS = TransportOptions(0.3, 1.0, 1.0, 1024)


def command(ticket, addr):
    return Command(ticket, "topology", addr, "GET", "/", None, 0)


# -- the fair queue


def test_peers_take_turns_and_each_is_first_come_first_served():
    queue = FairQueue(per_peer=16)
    for ticket, addr in enumerate("aaabbc"):
        queue.put(command(ticket, addr))
    assert [queue.next().ticket for _ in range(6)] == [0, 3, 5, 1, 4, 2]
    assert queue.next() is None


def silent_queue(peers):
    """A queue in which these peers did not answer, and ask again."""
    queue = FairQueue(per_peer=16)
    for ticket, addr in enumerate(peers):
        queue.put(command(ticket, addr))
        queue.next()
        queue.on_end(addr, answered=False)
    for ticket, addr in enumerate(peers, start=100):
        queue.put(command(ticket, addr))
    return queue


def test_a_peer_that_answers_waits_for_one_turn_of_those_that_do_not():
    queue = silent_queue("abcdefgh")
    for ticket in (200, 201, 202):
        queue.put(command(ticket, "z"))
    assert [queue.next().ticket for _ in range(7)] == [100, 200, 101, 201, 102, 202, 103]
    assert [queue.next().ticket for _ in range(4)] == [104, 105, 106, 107], "nobody starves"


def test_a_peer_that_answers_again_is_as_good_as_any_and_an_abandoned_request_says_nothing():
    queue = silent_queue("ab")
    assert [queue.next().addr for _ in range(2)] == ["a", "b"]
    queue.on_end("a", answered=True)
    queue.on_end("b", answered=None)
    for ticket, addr in ((300, "b"), (301, "b"), (302, "a"), (303, "a")):
        queue.put(command(ticket, addr))
    assert [queue.next().ticket for _ in range(4)] == [302, 300, 303, 301]


def test_what_is_remembered_of_silent_peers_is_bounded():
    queue = FairQueue(per_peer=1)
    for number in range(5000):
        queue.put(command(number, str(number)))
        queue.next()
        queue.on_end(str(number), answered=False)
    assert len(queue._silent) == 4096


@given(
    st.integers(1, 3),
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.sampled_from("abc")),
            st.tuples(st.just("next"), st.none()),
            st.tuples(st.just("end"), st.integers(0, 30)),
            st.tuples(st.just("fail"), st.integers(0, 30)),
            st.tuples(st.just("withdraw"), st.integers(0, 30)),
        ),
        max_size=60,
    ),
)
def test_the_queue_loses_nothing_and_keeps_its_limit(per_peer, steps):
    queue = FairQueue(per_peer=per_peer)
    waiting, under_way = {}, {}
    for ticket, (step, value) in enumerate(steps):
        if step == "put":
            queue.put(command(ticket, value))
            waiting[ticket] = value
        elif step == "withdraw":
            assert queue.withdraw(value) == (waiting.pop(value, None) is not None)
        elif step in ("end", "fail") and value in under_way:
            queue.on_end(under_way.pop(value), answered=step == "end")
        elif step == "next":
            count = {addr: list(under_way.values()).count(addr) for addr in "abc"}
            may_start = {addr for addr in waiting.values() if count[addr] < per_peer}
            taken = queue.next()
            assert (taken is None) == (not may_start)
            if taken is not None:
                assert taken.addr in may_start
                assert taken.ticket == min(t for t, addr in waiting.items() if addr == taken.addr)
                under_way[taken.ticket] = waiting.pop(taken.ticket)
        assert len(queue) == len(waiting)
        count = {addr: list(under_way.values()).count(addr) for addr in "abc"}
        assert queue.has_startable() == any(count[addr] < per_peer for addr in waiting.values())


# -- name look-ups


@pytest.fixture
def machine():
    machine = FakeMachine()
    machine.transport = transport = Transport(machine, OPTIONS)
    transport.start()
    yield machine
    assert transport.stop()
    machine.close()


def test_a_name_is_looked_up_and_its_addresses_tried(machine):
    with HostileHost() as host:
        peer = host.peer(answers())
        assert machine.fetch(peer.addr.replace("127.0.0.1", "localhost")).status == 200


def test_a_name_that_does_not_exist_is_a_dns_error(machine, monkeypatch):
    def unknown(*_args, **_options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(names.socket, "getaddrinfo", unknown)
    fact = machine.fetch("no-such-host.invalid:80")
    assert (fact.what, fact.message) == ("dns", "the name was not found: name or service not known")


@pytest.mark.parametrize("name", ["a" * 70 + ".invalid", "a..b", "127.1"])
def test_a_name_that_cannot_exist_is_one_error(machine, name):
    assert machine.fetch(f"{name}:80").what in ("dns", "other")


def test_a_look_up_that_hangs_ends_with_the_connect_timeout_and_delays_no_other(machine, monkeypatch):
    hung = threading.Event()
    real = socket.getaddrinfo

    def look_up(host, *rest, **options):
        if host.startswith("hangs"):
            hung.wait(10)
            raise socket.gaierror(socket.EAI_AGAIN, "too late")
        return real(host, *rest, **options)

    monkeypatch.setattr(names.socket, "getaddrinfo", look_up)
    try:
        with HostileHost() as host:
            peer = host.peer(answers())
            tickets = [machine.ask(f"hangs-{i}.invalid:80") for i in range(8)]
            assert machine.fetch(peer.addr.replace("127.0.0.1", "localhost")).status == 200
            for ticket in tickets:
                fact = machine.wait(ticket)
                assert (fact.what, fact.message) == ("timeout", "no connection within 0.3 s")
    finally:
        hung.set()


def test_more_hung_look_ups_than_threads_give_up_in_the_queue(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(names.socket, "getaddrinfo", lambda *_a, **_o: release.wait(10) and [])

    async def main():
        resolver = names.Names(max_wait_s=0.1, max_threads=2)
        asking = [asyncio.create_task(resolver.resolve(f"h{i}", 1)) for i in range(5)]
        await asyncio.sleep(0.3)
        assert resolver._threads == 2
        release.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
        await resolver.close()
        return found

    found = asyncio.run(main())
    assert found[:2] == [[], []]
    assert [type(exc) for exc in found[2:]] == [socket.gaierror] * 3


def test_idle_look_up_threads_end(monkeypatch):
    monkeypatch.setattr(names, "IDLE_S", 0.05)

    async def main():
        resolver = names.Names(max_wait_s=1.0)
        await resolver.resolve("localhost", 1)
        await asyncio.sleep(0.3)
        assert resolver._threads == 0
        await resolver.resolve("localhost", 1)
        await resolver.close()

    asyncio.run(main())


# -- the polite selector


# -- connections that are not to be reused


def test_marks_of_renewed_peers_go_when_they_are_too_old_however_often_some_are_renewed(monkeypatch):
    async def renew():
        connections = Connections(names.Names(max_wait_s=1.0), max_age_s=10.0, max_idle=8)
        now = 100.0
        monkeypatch.setattr(connections._loop, "time", lambda: now)
        for addr in "abcad":
            connections.renew(addr)
            now += 4.0
        monkeypatch.undo()
        return dict(connections._renewed)

    assert asyncio.run(renew()) == {"c": 108.0, "a": 112.0, "d": 116.0}


def test_events_are_given_out_a_few_at_a_time_and_none_is_lost_or_stale():
    pairs = [socket.socketpair() for _ in range(10)]
    selector = PoliteSelector()
    for ours, theirs in pairs:
        theirs.send(b"x")
        selector.register(ours, selectors.EVENT_READ)
    first = selector.select(0)
    assert len(first) == EVENTS_PER_TURN
    gone = next(ours for ours, _ in pairs if ours not in {key.fileobj for key, _ in first})
    selector.unregister(gone)
    seen = {key.fileobj for key, _ in first}
    for fileobj in list(seen):
        fileobj.recv(1)
    for _ in range(20):
        for key, _ in selector.select(0):
            key.fileobj.recv(1)
            seen.add(key.fileobj)
    assert seen == {ours for ours, _ in pairs} - {gone}
    selector.close()
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_a_burst_of_answers_is_worked_off_in_short_slices(machine):
    gate = asyncio.Event()

    with HostileHost() as host:
        peers = [host.peer(answers_when(gate)) for _ in range(64)]
        tickets = [machine.ask(peer.addr) for peer in peers]
        while sum(peer.requests for peer in peers) < 64:
            time.sleep(0.01)
        gc.disable()  # a collection is not the transport's slice
        machine.transport._selector.longest_slice_s = 0.0
        host.set(gate)
        facts = [machine.wait(ticket) for ticket in tickets]
        gc.enable()
    assert {fact.status for fact in facts} == {200}
    # 64 in one slice would take some 20 ms; the bar is 1 ms, the rest is for slow machines
    assert 0.0 < machine.transport.longest_slice_s() < 0.005


# -- imports and exit


def run_python(code, timeout_s=20.0):
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr, time.monotonic() - began


def test_importing_the_transport_imports_neither_asyncio_nor_httptools():
    code = "import sys, disagg.transport\nprint([name for name in ('asyncio', 'httptools') if name in sys.modules])"
    assert run_python(code)[:3] == (0, "[]\n", "")


HUNG_EXIT = """
import socket, threading, time
from fake_machine import FakeMachine
from disagg.transport import Transport, TransportOptions, names
names.socket.getaddrinfo = lambda *a, **o: threading.Event().wait(30)
machine = FakeMachine()
transport = Transport(machine, TransportOptions(1.0, 2.0, 2.0, 64))
transport.start()
silent = socket.create_server(("127.0.0.1", 0))
tickets = [machine.ask(f"127.0.0.1:{silent.getsockname()[1]}"), machine.ask("hangs.invalid:1")]
time.sleep(0.3)
print("end", time.monotonic())
"""


@pytest.mark.parametrize("last", ["", "import atexit; atexit.register(transport.stop)"])
def test_the_interpreter_exits_at_once_with_a_hung_look_up(last):
    code, out, err, _ = run_python(HUNG_EXIT.replace("print(", f"{last}\nprint("))
    assert (code, err) == (0, "")
    assert time.monotonic() - float(out.split()[1]) < 3.0


FORKED_EXIT = """
import os, sys
from fake_machine import FakeMachine
from hostile import HostileHost, answers, answers_when
from disagg.transport import Transport, TransportOptions
host = HostileHost().__enter__()
peer = host.peer(answers())
machine = FakeMachine()
transport = Transport(machine, TransportOptions(1.0, 2.0, 2.0, 64))
transport.start()
assert machine.fetch(peer.addr).status == 200
child = os.fork()
if child == 0:
    del transport, machine
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
for _ in range(3):
    assert machine.fetch(peer.addr).status == 200
assert transport.stop()
host.__exit__()
machine.close()
"""


def test_a_forked_child_that_exits_normally_leaves_its_parents_loop_alone():
    # the child's copy of the loop shares the parent's epoll: closing it would unregister the parent's sockets
    code, _, err, _ = run_python(FORKED_EXIT)
    assert (code, err) == (0, "")
