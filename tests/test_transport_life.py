"""The transport's life: start, stop from anywhere, death with a reason, and fork."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest

from disagg.transport import Transport
from fake_machine import FakeMachine, options, running
from hostile import answers, silent


def test_stop_is_idempotent_and_prompt_with_requests_under_way(host):
    peers = [host.peer(silent()) for _ in range(8)]
    machine = FakeMachine()
    transport = Transport(machine, options(total_timeout_s=60))
    transport.start()
    for i in range(200):
        machine.ask(peers[i % 8].addr)
    time.sleep(0.2)
    began = time.monotonic()
    assert transport.stop()
    assert transport.stop()
    assert time.monotonic() - began < 1.0
    assert not transport.is_alive()
    assert transport.death_reason() is None
    assert machine.facts == {}
    assert machine.failed_all == []
    with pytest.raises(RuntimeError, match="was stopped"):
        transport.start()
    machine.close()


def test_stop_before_start_and_from_many_threads_returns(host):
    machine = FakeMachine()
    assert Transport(machine, options()).stop()
    transport = Transport(machine, options())
    transport.start()
    threads = [threading.Thread(target=transport.stop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    machine.close()


def test_stop_on_the_transports_own_thread_does_not_wait(host):
    peer = host.peer(answers())
    returned = []

    class Stopper(FakeMachine):
        def on_response(self, *fact):
            returned.append(transport.stop())
            super().on_response(*fact)

    machine = Stopper()
    transport = Transport(machine, options())
    transport.start()
    machine.fetch(peer.addr)
    transport._thread.join(5)
    assert returned == [False]
    assert not transport.is_alive()
    assert transport.death_reason() is None
    machine.close()


def test_a_bug_in_taking_commands_fails_everything_at_once(host):
    class Broken(FakeMachine):
        def take_commands(self, limit, /):
            if self.commands:
                raise ZeroDivisionError("a bug")
            return super().take_commands(limit)

    machine = Broken()
    transport = Transport(machine, options())
    transport.start()
    machine.ask("127.0.0.1:1")
    machine.wait_until(lambda: machine.failed_all, 5)
    assert machine.failed_all == ["ZeroDivisionError: a bug"]
    transport._thread.join(5)
    assert not transport.is_alive()
    assert transport.death_reason() == "ZeroDivisionError: a bug"
    assert transport.stop()
    machine.close()


def test_a_fact_that_the_machine_chokes_on_ends_that_request_only(host):
    peer = host.peer(answers())

    class Choking(FakeMachine):
        def on_response(self, ticket, *rest):
            if ticket == 1:
                raise ValueError("bad fact")
            super().on_response(ticket, *rest)

    machine = Choking()
    transport = Transport(machine, options())
    transport.start()
    first, second = machine.fetch(peer.addr), machine.fetch(peer.addr)
    assert (first.what, first.message) == ("other", "ValueError('bad fact')")
    assert second.status == 200
    assert transport.stop()
    machine.close()


def test_a_panic_in_the_machine_ends_the_transport(host):
    peer = host.peer(answers())

    class PanicError(BaseException):
        """Like a Rust panic, which is no Exception either."""

    class Panicking(FakeMachine):
        def on_response(self, *fact):
            raise PanicError("oh")

    machine = Panicking()
    transport = Transport(machine, options())
    transport.start()
    machine.ask(peer.addr)
    machine.wait_until(lambda: machine.failed_all, 5)
    assert transport.death_reason() == "PanicError: oh"
    assert transport.stop()
    machine.close()


def test_a_start_that_fails_says_why():
    class NoBell(FakeMachine):
        def bell_fileno(self):
            return 999_999

    machine = NoBell()
    with pytest.raises(RuntimeError, match="did not start: OSError"):
        Transport(machine, options()).start()
    assert len(machine.failed_all) == 1
    machine.close()


def test_a_malformed_command_ends_that_request_only(host):
    peer = host.peer(answers())
    with running() as (machine, _):
        assert machine.fetch("127.0.0.1:99999").what == "other"
        assert machine.fetch(peer.addr, method="G\nET").what == "other"
        assert machine.fetch(peer.addr).status == 200


def test_a_forked_child_touches_nothing_of_its_parent(host):
    peer = host.peer(answers())
    with running() as (machine, transport):
        machine.fetch(peer.addr)
        child = os.fork()
        if child == 0:
            alive, stopped = transport.is_alive(), transport.stop()
            del transport
            gc.collect()
            os._exit(0 if (not alive and stopped) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert transport.is_alive()
        assert machine.fetch(peer.addr).status == 200
