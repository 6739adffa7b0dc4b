"""What the transport makes of hostile peers: bounded time and memory, one fact, and nobody else hurt."""

from __future__ import annotations

import time

import pytest

from disagg.transport import Transport, TransportOptions
from fake_machine import FakeMachine
from hostile import (
    TOPOLOGY,
    answers,
    big_body,
    black_hole,
    closes_half_way,
    continues_for_ever,
    drips,
    garbage,
    gzipped,
    hangs_up,
    html,
    huge_headers,
    many_headers,
    not_ready,
    redirects,
    refusing_address,
    resets,
    response,
    says,
    silent,
)

TOTAL_S = 0.5


@pytest.fixture(scope="module")
def machine():
    machine = FakeMachine()
    transport = Transport(machine, TransportOptions(0.3, TOTAL_S, 0.8, 1024))
    transport.start()
    yield machine
    assert transport.is_alive(), "no peer may end the transport"
    assert transport.stop()
    machine.close()


@pytest.fixture(autouse=True)
def _a_healthy_peer_is_not_hurt(host, machine):
    """After each test, and whatever its peer did, another peer is answered at once."""
    yield
    peer = host.peer(answers())
    began = time.monotonic()
    assert machine.fetch(peer.addr).body == TOPOLOGY
    assert time.monotonic() - began < 0.3


def timed(machine, addr, **wanted):
    began = time.monotonic()
    fact = machine.fetch(addr, **wanted)
    return fact, time.monotonic() - began


# -- peers that take their time


@pytest.mark.parametrize(
    "behave",
    [silent(), drips(interval_s=0.05), continues_for_ever(), drips(b"\r\n" * 1000, interval_s=0.01)],
    ids=["silent", "drips", "continues for ever", "drips blank lines"],
)
def test_the_total_timeout_is_a_total(host, machine, behave):
    fact, took_s = timed(machine, host.peer(behave).addr)
    assert (fact.what, fact.message) == ("timeout", "no complete answer within 0.5 s")
    assert TOTAL_S <= took_s < TOTAL_S + 0.25


def test_a_body_that_drips_does_not_extend_the_total_timeout(host, machine):
    async def behave(connection):
        await connection.request()
        await connection.send(response(body=b"", length=1000))
        await drips(b"x" * 1000, interval_s=0.02)(connection)

    async def drip_at_once(connection):
        await connection.request()
        await connection.send(response(body=b"", length=10_000))
        for _ in range(10_000):
            await connection.send(b" ")

    for peer in (host.peer(behave),):
        fact, took_s = timed(machine, peer.addr)
        assert fact.what == "timeout"
        assert TOTAL_S <= took_s < TOTAL_S + 0.25
    assert machine.fetch(host.peer(drip_at_once).addr).body == b" " * 10_000


def test_a_heartbeat_has_a_timeout_of_its_own(host, machine):
    fact, took_s = timed(machine, host.peer(silent()).addr, kind="heartbeat")
    assert fact.what == "timeout"
    assert 0.8 <= took_s < 1.05


def test_a_connection_that_is_not_accepted_ends_with_the_connect_timeout(machine):
    with black_hole() as addr:
        fact, took_s = timed(machine, addr)
    assert (fact.what, fact.message) == ("timeout", "no connection within 0.3 s")
    assert 0.3 <= took_s < 0.5


# -- peers that go away


def test_a_refused_connection_is_one_fact_at_once(machine):
    with refusing_address() as addr:
        fact, took_s = timed(machine, addr)
    assert (fact.what, fact.message) == ("refused", "connection refused (ECONNREFUSED)")
    assert took_s < 0.2


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("behave", "message"),
    [
        (resets(), "connection reset by peer (ECONNRESET)"),
        (hangs_up(), "the connection was closed before an answer"),
        (says(b"HTTP/1.1 200 OK\r\nContent-Le"), "the connection was closed before an answer"),
    ],
    ids=["resets", "hangs up", "hangs up within the headers"],
)
def test_a_new_connection_that_is_dropped_is_not_retried(host, machine, behave, message, method):
    peer = host.peer(behave)
    fact = machine.fetch(peer.addr, method=method, body=b"{}" if method == "POST" else None)
    assert (fact.what, fact.message) == ("reset", message)
    assert peer.requests == peer.connections == 1


@pytest.mark.parametrize(
    "behave",
    [
        closes_half_way(),
        says(response(body=TOPOLOGY[:20], length=len(TOPOLOGY)), then="reset"),
        says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nhalf a chunk"),
        says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"),
    ],
    ids=["closes half-way", "resets half-way", "half a chunk", "no last chunk"],
)
def test_half_a_body_is_cut(host, machine, behave):
    fact = machine.fetch(host.peer(behave).addr)
    assert (fact.what, fact.message) == ("cut", "the body ended before it was complete")


def test_a_body_that_ends_with_the_connection_is_complete(host, machine):
    peer = host.peer(says(b"HTTP/1.0 200 OK\r\n\r\n" + TOPOLOGY))
    assert machine.fetch(peer.addr).body == TOPOLOGY


# -- peers that say too much, or something else


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
def test_ten_megabytes_are_not_read(host, machine, announced):
    peer = host.peer(big_body(announced=announced))
    fact, took_s = timed(machine, peer.addr)
    assert fact.what == "oversized"
    assert "65536" in fact.message
    assert took_s < 0.3
    time.sleep(0.1)
    assert len(peer.bodies) < 200, "the connection was closed long before the last block"


def test_a_body_of_exactly_the_limit_is_read_and_one_byte_more_is_not(host, machine):
    peer = host.peer(answers(response(body=b"x" * 1000)))
    assert machine.fetch(peer.addr, max_body=1000).body == b"x" * 1000
    assert machine.fetch(peer.addr, max_body=999).what == "oversized"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3e8\r\n" + b"x" * 1000 + b"\r\n0\r\n\r\n"
    peer = host.peer(answers(chunked))
    assert machine.fetch(peer.addr, max_body=1000).body == b"x" * 1000
    assert machine.fetch(peer.addr, max_body=999).what == "oversized"


def test_bytes_past_the_announced_length_are_never_part_of_a_body(host, machine):
    peer = host.peer(answers(response(body=TOPOLOGY + b"tail", length=len(TOPOLOGY))))
    for _ in range(3):
        fact = machine.fetch(peer.addr)
        assert fact.body == TOPOLOGY or fact.what == "other"


def test_a_length_that_is_no_number_is_no_http(host, machine):
    for length in ("-1", "1e3", "0x10", "9" * 5000):
        fact = machine.fetch(host.peer(says(response(length=length), then="hold")).addr)
        assert (fact.what, fact.message) == ("other", "the answer is not HTTP/1.1"), length


def test_a_redirect_is_an_answer_and_not_followed(host, machine):
    elsewhere = host.peer(answers())
    fact = machine.fetch(host.peer(redirects(elsewhere.addr)).addr)
    assert (fact.status, fact.body) == (302, b"")
    assert elsewhere.requests == 0


def test_html_is_handed_over_unread(host, machine):
    fact = machine.fetch(host.peer(html()).addr)
    assert (fact.status, fact.body) == (200, b"<html><body>hello</body></html>")


def test_a_compressed_body_is_refused(host, machine):
    fact = machine.fetch(host.peer(gzipped()).addr)
    assert (fact.what, fact.message) == ("encoding", "content encoding 'gzip' was not asked for")


@pytest.mark.parametrize("behave", [huge_headers(), says(b"HTTP/1.1 200 " + b"O" * 100_000)])
def test_a_huge_header_is_oversized(host, machine, behave):
    fact = machine.fetch(host.peer(behave).addr)
    assert (fact.what, fact.message) == ("oversized", "a header is over 8190 bytes")


def test_too_many_headers_are_refused(host, machine):
    assert machine.fetch(host.peer(many_headers()).addr).what == "other"


def test_garbage_is_named_without_quoting_it(host, machine):
    fact = machine.fetch(host.peer(garbage()).addr)
    assert (fact.what, fact.message) == ("other", "the answer is not HTTP/1.1")


def test_an_instance_that_is_not_text_is_escaped(host, machine):
    peer = host.peer(
        says(b"HTTP/1.1 200 OK\r\nX-SGLang-Disaggregation-Instance-ID: a\xff\xc3\xa9\r\nContent-Length: 0\r\n\r\n")
    )
    instance = machine.fetch(peer.addr).headers[0]
    assert instance.isascii()
    assert instance.startswith("a\\")


def test_a_chunk_whose_size_is_no_number_is_no_http(host, machine):
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    assert machine.fetch(host.peer(says(data)).addr).what == "other"


# -- refusals: the status counts, whatever becomes of the body


def test_503_for_ever_is_an_answer_each_time_on_one_connection(host, machine):
    peer = host.peer(not_ready())
    for _ in range(5):
        fact = machine.fetch(peer.addr)
        assert (fact.status, fact.body) == (503, b"not ready")
    assert peer.connections == 1


@pytest.mark.parametrize(
    "data",
    [
        response("503 Service Unavailable", b"x" * 1025),
        response("503 Service Unavailable", b"half", length=100),
        response("503 Service Unavailable", b"zip", "Content-Encoding: gzip"),
    ],
    ids=["over 1 KiB", "cut", "compressed"],
)
def test_a_refusal_with_an_unusable_body_counts_without_it(host, machine, data):
    fact = machine.fetch(host.peer(says(data)).addr)
    assert (fact.status, fact.body) == (503, b"")


def test_a_refusal_whose_body_never_comes_counts_at_the_timeout(host, machine):
    peer = host.peer(says(response("404 Not Found", b"", length=10), then="hold"))
    fact, took_s = timed(machine, peer.addr)
    assert (fact.status, fact.body) == (404, b"")
    assert TOTAL_S <= took_s < TOTAL_S + 0.25


def test_an_upgrade_that_nobody_asked_for_is_a_status(host, machine):
    data = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    fact = machine.fetch(host.peer(says(data, then="hold")).addr)
    assert fact.status == 101 or fact.what in ("other", "timeout")


# -- many at once


def test_all_kinds_together_each_end_once_and_in_time(host, machine):
    kinds = [
        silent,
        drips,
        resets,
        hangs_up,
        closes_half_way,
        big_body,
        html,
        gzipped,
        not_ready,
        huge_headers,
        garbage,
        continues_for_ever,
        answers,
    ]
    peers = [host.peer(kinds[i % len(kinds)]()) for i in range(8 * len(kinds))]
    seen = len(machine.facts_in_order)
    began = time.monotonic()
    tickets = [machine.ask(peer.addr) for peer in peers]
    for ticket in tickets:
        machine.wait(ticket)
    assert time.monotonic() - began < TOTAL_S + 2.0
    ended = [fact.ticket for fact in machine.facts_in_order[seen:]]
    assert sorted(ended) == tickets
