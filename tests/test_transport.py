"""The transport at work: facts for commands, connections, limits, fairness, timers."""

from __future__ import annotations

import socket
import time

import pytest

from disagg.transport import Transport
from fake_machine import FakeMachine, options, running
from hostile import (
    TOPOLOGY,
    answers,
    dies_between_requests,
    response,
    silent,
)

SAYS = ("X-SGLang-Disaggregation-Instance-ID: life-1", "X-Disagg-Epoch: 7", "X-Disagg-Features: table")


# -- what a request looks like, and its answer


def test_an_answer_comes_back_with_status_body_and_what_its_headers_say_of_the_peer(host):
    peer = host.peer(answers(response("200 OK", TOPOLOGY, *SAYS)))
    with running() as (machine, _):
        fact = machine.fetch(peer.addr, "/route?prefill_dp_rank=-1&x=%2F+a")
    assert (fact.status, fact.body, fact.headers) == (200, TOPOLOGY, ("life-1", "7", "table"))
    head = peer.heads[0].decode().lower()
    assert head.startswith("get /route?prefill_dp_rank=-1&x=%2f+a http/1.1\r\n")
    assert "\r\naccept-encoding: identity\r\n" in head
    assert "\r\nx-disagg-client: 1\r\n" in head
    assert "\r\nuser-agent: disagg/" in head
    assert f"\r\nhost: {peer.addr}\r\n" in head
    assert "cookie" not in head


def test_a_post_sends_its_body_as_json(host):
    peer = host.peer(answers(response(body=b'{"7": 1}')))
    with running() as (machine, _):
        fact = machine.fetch(
            peer.addr, "/query_dp_ranks", kind="dp_ranks", method="POST", body=b'{"bootstrap_rooms":[7]}'
        )
    assert (fact.status, fact.body, fact.headers) == (200, b'{"7": 1}', (None, None, None))
    assert peer.bodies == [b'{"bootstrap_rooms":[7]}']
    assert b"content-type: application/json" in peer.heads[0].lower()


def test_commands_older_than_the_start_are_carried_out(host):
    peer = host.peer(answers())
    machine = FakeMachine()
    ticket = machine.ask(peer.addr)
    transport = Transport(machine, options())
    transport.start()
    assert machine.wait(ticket).status == 200
    assert transport.stop()
    machine.close()


def test_more_commands_than_a_batch_are_all_carried_out(host):
    peers = [host.peer(answers()) for _ in range(5)]
    with running() as (machine, _):
        tickets = [machine.ask(peers[i % 5].addr) for i in range(300)]
        assert {machine.wait(ticket).status for ticket in tickets} == {200}
    assert sum(peer.requests for peer in peers) == 300


def test_ipv6_peers_are_reached(host):
    try:
        peer = host.peer(answers(), host="::1")
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with running() as (machine, _):
        assert machine.fetch(peer.addr).status == 200
        zoned = peer.addr.replace("]", f"%{socket.if_nametoindex('lo')}]")
        assert machine.fetch(zoned).status == 200
    assert f"host: {peer.addr}\r\n".encode() in peer.heads[1].lower(), "a zone means nothing to the peer"


def test_environment_proxies_are_not_used(host, monkeypatch):
    peer, proxy = host.peer(answers()), host.peer(answers())
    monkeypatch.setenv("http_proxy", f"http://{proxy.addr}")
    with running() as (machine, _):
        assert machine.fetch(peer.addr).status == 200
    assert (peer.requests, proxy.requests) == (1, 0)


# -- connections


def test_a_connection_is_reused_until_it_is_old(host):
    peer = host.peer(answers())
    with running(max_connection_age_s=0.3) as (machine, _):
        for _ in range(3):
            machine.fetch(peer.addr)
        assert peer.connections == 1
        time.sleep(0.35)
        machine.fetch(peer.addr)
        assert peer.connections == 2


def test_a_connection_in_constant_use_is_not_reused_past_its_age(host):
    peer = host.peer(answers())
    with running(max_connection_age_s=0.3) as (machine, _):
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            machine.fetch(peer.addr)
        assert 3 <= peer.connections <= 6


def test_idle_connections_are_bounded_in_number(host):
    peers = [host.peer(answers()) for _ in range(12)]
    with running(max_idle_connections=4) as (machine, transport):
        for peer in peers:
            machine.fetch(peer.addr)
        pool = transport._driver._exchange.pool
        deadline = time.monotonic() + 5
        while len(pool) > 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(pool) == pool.idle_count() == 4


def test_a_heartbeat_has_a_connection_of_its_own(host):
    peer = host.peer(answers())
    with running() as (machine, _):
        machine.fetch(peer.addr)
        for _ in range(3):
            machine.fetch(peer.addr, "/health", kind="heartbeat")
        machine.fetch(peer.addr)
    assert peer.connections == 4, "one shared by the fetches, one for each heartbeat"
    assert b"connection: close" in peer.heads[1].lower()


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_kept_alive_connection_that_dies_is_retried_once(host, method):
    peer = host.peer(dies_between_requests())
    with running() as (machine, _):
        for _ in range(4):
            body = b"{}" if method == "POST" else None
            assert machine.fetch(peer.addr, method=method, body=body).status == 200
    assert peer.connections == peer.requests == 4


def test_only_one_retry_is_made_when_a_kept_alive_connection_dies(host):
    peer = host.peer(answers())
    with running() as (machine, _):
        assert machine.fetch(peer.addr).status == 200

        async def drop(connection):
            await connection.request()

        def die_now():
            for task in _tasks_of(host):
                task.cancel()

        peer.behave = drop
        host._loop.call_soon_threadsafe(die_now)
        time.sleep(0.05)
        assert machine.fetch(peer.addr).what == "reset"
    assert peer.requests == 2


def _tasks_of(host):
    import asyncio

    return [task for task in asyncio.all_tasks(host._loop) if not task.done()]


# -- limits and fairness


def test_a_busy_peer_does_not_delay_another(host):
    busy, other = host.peer(silent()), host.peer(answers())
    with running(total_timeout_s=0.5) as (machine, _):
        tickets = [machine.ask(busy.addr) for _ in range(100)]
        began = time.monotonic()
        assert machine.fetch(other.addr).status == 200
        assert time.monotonic() - began < 0.3
        for ticket in tickets:
            machine.cancel(ticket)


def test_a_peer_has_at_most_sixteen_requests_under_way(host):
    peer = host.peer(silent())
    with running(total_timeout_s=0.5) as (machine, _):
        tickets = [machine.ask(peer.addr) for _ in range(40)]
        time.sleep(0.3)
        assert peer.connections == 16
        assert {machine.wait(ticket).what for ticket in tickets} == {"timeout"}
        assert peer.connections == 40, "those that waited got their turn, and their full timeout"


def test_all_peers_together_have_at_most_max_in_flight(host):
    peers = [host.peer(silent()) for _ in range(10)]
    with running(total_timeout_s=0.5, max_in_flight=4) as (machine, _):
        tickets = [machine.ask(peer.addr) for peer in peers]
        time.sleep(0.3)
        assert sum(peer.connections for peer in peers) == 4
        assert {machine.wait(ticket).what for ticket in tickets} == {"timeout"}


def test_starts_keep_their_distance(host):
    peers = [host.peer(silent()) for _ in range(20)]
    with running(turn_gap_s=0.02, total_timeout_s=0.5) as (machine, _):
        began = time.monotonic()
        for ticket in [machine.ask(peer.addr) for peer in peers]:
            machine.wait(ticket)
        ends = sorted(fact.at for fact in machine.facts.values())
    assert ends[-1] - began >= 0.5 + 19 * 0.02
    assert ends[-1] - ends[0] >= 19 * 0.015, "time-outs are as far apart as the starts"


def test_a_cancelled_request_yields_no_fact(host):
    peer = host.peer(silent())
    with running(total_timeout_s=0.5) as (machine, transport):
        under_way = [machine.ask(peer.addr) for _ in range(16)]
        waiting = [machine.ask(peer.addr) for _ in range(4)]
        time.sleep(0.2)
        for ticket in under_way + waiting:
            machine.cancel(ticket)
        machine.cancel(12345)  # of a ticket that never was
        time.sleep(0.7)
        assert machine.facts == {}
        assert peer.connections == 16
        driver = transport._driver
        assert (len(driver._queue), len(driver._attempts), driver._deadlines) == (0, 0, [])


# -- the machine's timer


def test_the_machines_timer_is_fired_when_due(host):
    with running() as (machine, _):
        machine.timer_at = due = time.monotonic() + 0.2
        machine.ring()
        machine.wait_until(lambda: machine.timers_fired == 1, 2)
        assert 0 <= time.monotonic() - due < 0.1


def test_an_earlier_timer_replaces_a_later_one(host):
    with running() as (machine, _):
        machine.timer_at = time.monotonic() + 30
        machine.ring()
        time.sleep(0.1)
        machine.timer_at = time.monotonic() + 0.1
        machine.ring()
        machine.wait_until(lambda: machine.timers_fired == 1, 2)


def test_an_answer_that_waits_while_the_loop_is_held_up_is_not_a_timeout(host):
    peer = host.peer(answers(delay_s=0.1))

    class Slow(FakeMachine):
        def on_timer(self):
            if self.timer_at is not None:
                time.sleep(1.0)  # as if another thread held the interpreter for that long
            super().on_timer()

    machine = Slow()
    transport = Transport(machine, options(total_timeout_s=0.5))
    transport.start()
    machine.fetch(peer.addr)
    tickets = [machine.ask(peer.addr) for _ in range(16)]
    while peer.requests < 17:
        time.sleep(0.001)
    machine.timer_at = time.monotonic()
    machine.ring()
    assert {machine.wait(ticket).status for ticket in tickets} == {200}
    assert transport.stop()
    machine.close()
