"""The hostile peers themselves: each does to a plain socket what its name says."""

from __future__ import annotations

import gzip
import selectors
import socket

from hostile import TOPOLOGY, black_hole, gzip_bomb, prefill, refusing_address, response, wrong_length

QUERY = b"GET /route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=%d&target_pp_rank=-1 HTTP/1.1\r\n\r\n"


def connect(addr, timeout_s=10):
    host, _, port = addr.rpartition(":")
    return socket.create_connection((host, int(port)), timeout_s)


def ask(sock, query=QUERY % -1):
    """Send a query; returns the head and the body of as many bytes as the head announces."""
    sock.sendall(query)
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
    while len(body) < length and (more := sock.recv(65536)):
        body += more
    return head, body


def test_a_black_hole_neither_accepts_nor_refuses():
    """No answer of any kind to a SYN: the kernel has dropped it, and goes on dropping while the client repeats it."""
    with black_hole() as addr, socket.socket() as sock, selectors.DefaultSelector() as selector:
        sock.setblocking(False)
        host, _, port = addr.rpartition(":")
        sock.connect_ex((host, int(port)))
        selector.register(sock, selectors.EVENT_WRITE)  # writable is connected, refused or reset
        assert selector.select(1.5) == [], "a client repeats its SYN after a second"
        with refusing_address() as nobody, socket.socket() as other:
            host, _, port = nobody.rpartition(":")
            other.setblocking(False)
            other.connect_ex((host, int(port)))
            selector.register(other, selectors.EVENT_WRITE)
            assert [key.fileobj for key, _ in selector.select(10)] == [other], "that one is told at once"
            selector.unregister(other)


def test_a_gzip_bomb_is_small_on_the_wire_and_large_unpacked(host):
    with connect(host.peer(gzip_bomb()).addr) as sock:
        head, body = ask(sock)
    assert b"Content-Encoding: gzip" in head
    assert len(body) < 65536
    assert len(gzip.decompress(body)) == 64 * 2**20


def test_a_prefill_answers_topology_and_ranks_and_closes_when_it_is_told_to(host):
    peer = host.peer(prefill(port=7000, answers_per_connection=2))
    with connect(peer.addr) as sock:
        assert ask(sock)[1] == TOPOLOGY
        assert ask(sock, QUERY % 3)[1] == b'{"rank_ip": "127.0.0.1", "rank_port": 7003}'
        assert sock.recv(1) == b"", "closed"
    assert (peer.connections, peer.requests) == (1, 2)


def test_wrong_lengths_are_wrong(host):
    sent = {}
    for how in ("too long", "too short", "negative", "duplicate"):
        with connect(host.peer(wrong_length(how)).addr) as sock:
            sock.sendall(QUERY % -1)
            sent[how] = b""
            while TOPOLOGY not in sent[how]:
                sent[how] += sock.recv(65536)
    lengths = {
        how: [int(line[16:]) - len(TOPOLOGY) for line in data.split(b"\r\n") if line.startswith(b"Content-Length: ")]
        for how, data in sent.items()
    }
    assert lengths == {"too long": [10], "too short": [-5], "negative": [-2 * len(TOPOLOGY)], "duplicate": [0, -1]}
    assert response().startswith(b"HTTP/1.1 200 OK\r\nContent-Length: ")
