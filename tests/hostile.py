"""Hostile peers, for any test that has a client to annoy: real sockets on loopback, one thread for all.

    with HostileHost() as host:
        peer = host.peer(drip(interval_s=1.0))
        peer.addr            # "127.0.0.1:port"
        peer.requests        # how many requests it has read
        peer.connections     # how many connections it has accepted

A behaviour is a coroutine `(connection) -> None` called once per accepted connection; when it returns, the
connection is closed. `tests/conftest.py` may offer `HostileHost` as a fixture; nothing here needs pytest.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import struct
import threading

TOPOLOGY = (
    b'{"attn_tp_size":4,"attn_cp_size":1,"dp_size":1,"pp_size":1,"page_size":64,'
    b'"kv_cache_dtype":"auto","follow_bootstrap_room":true}'
)


class Connection:
    """One accepted connection, as a behaviour sees it."""

    def __init__(self, peer, reader, writer):
        self.peer, self.reader, self.writer = peer, reader, writer

    async def request(self):
        """Read one request and return its (head, body), or None when the client hung up."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
            body = await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        self.peer.heads.append(head)
        self.peer.bodies.append(body)
        return head, body

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()

    async def hold(self):
        """Stay until the client hangs up."""
        while await self.reader.read(65536):
            pass

    def reset(self):
        """Close with a TCP reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class Peer:
    """One listening address with one behaviour; `behave` may be replaced at any time."""

    def __init__(self, behave):
        self.behave = behave
        self.heads = []
        self.bodies = []
        self.connections = 0
        self.writers = set()
        self.server = None
        self.addr = ""
        self.tasks = set()

    @property
    def requests(self):
        return len(self.heads)

    async def serve(self, reader, writer):
        self.connections += 1
        self.writers.add(writer)
        self.tasks.add(asyncio.current_task())
        try:
            await self.behave(Connection(self, reader, writer))
        except (ConnectionError, asyncio.CancelledError):  # asyncio would log either
            pass
        finally:
            self.writers.discard(writer)
            self.tasks.discard(asyncio.current_task())
            writer.close()


class HostileHost:
    """Runs peers on a thread of its own; a context manager."""

    def __enter__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hostile", daemon=True)
        self._thread.start()
        self._peers = []
        return self

    def __exit__(self, *exc):
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def peer(self, behave, *, host="127.0.0.1", port=0) -> Peer:
        """Listen on a new address, or on the one given."""
        peer = Peer(behave)
        self._call(self._listen(peer, host, port))
        self._peers.append(peer)
        return peer

    def hang_up(self, peer):
        """Stop listening; connections that exist stay."""
        self._loop.call_soon_threadsafe(peer.server.close)
        self._call(asyncio.sleep(0))

    def cut_connections(self, peer):
        """Close the connections that it has, as a process that ends does."""
        self._loop.call_soon_threadsafe(lambda: [writer.close() for writer in list(peer.writers)])

    def forget(self, peers):
        """Stop listening, close all connections, and keep nothing of these peers."""
        self._call(self._forget(peers))
        self._peers = [peer for peer in self._peers if peer not in peers]

    def set(self, event):
        """Set an event that peers wait for."""
        self._loop.call_soon_threadsafe(event.set)

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _listen(self, peer, host, port):
        peer.server = await asyncio.start_server(peer.serve, host, port, backlog=1024)
        shown = f"[{host}]" if ":" in host else host
        peer.addr = f"{shown}:{peer.server.sockets[0].getsockname()[1]}"

    async def _forget(self, peers):
        for peer in peers:
            peer.server.close()
            for task in peer.tasks:
                task.cancel()

    async def _shut(self):
        for peer in self._peers:
            peer.server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # closed transports say good-bye in their next turn


def response(status="200 OK", body=TOPOLOGY, *headers, length=None):
    """Return the bytes of one answer; `headers` are lines without their end."""
    size = len(body) if length is None else length
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {size}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


# -- behaviours: what a peer does with a connection


def answers(data=None, *, delay_s=0.0):
    """A healthy peer (or one that always says `data`): answers every request, keeps connections."""
    data = response() if data is None else data

    async def behave(connection):
        while await connection.request():
            await asyncio.sleep(delay_s)
            await connection.send(data)

    return behave


def says(data, *, then="close"):
    """Answer the first request with these bytes; then close, reset, or hold the connection open."""

    async def behave(connection):
        if await connection.request():
            await connection.send(data)
            if then == "reset":
                connection.reset()
            elif then == "hold":
                await connection.hold()

    return behave


def silent():
    """Accept, read, never answer."""

    async def behave(connection):
        await connection.request()
        await connection.hold()

    return behave


def drips(data=None, *, interval_s=1.0):
    """Send the answer a byte at a time."""
    data = response() if data is None else data

    async def behave(connection):
        if await connection.request():
            for byte in data:
                await connection.send(bytes([byte]))
                await asyncio.sleep(interval_s)

    return behave


def resets(*, after_request=True):
    """Reset the connection, after the request was read or at once."""

    async def behave(connection):
        if after_request:
            await connection.request()
        connection.reset()

    return behave


def hangs_up():
    """Read the request and close without a word."""

    async def behave(connection):
        await connection.request()

    return behave


def closes_half_way():
    """Send half of the announced body and close."""
    return says(response(body=TOPOLOGY[: len(TOPOLOGY) // 2], length=len(TOPOLOGY)))


def redirects(to):
    """Send every client elsewhere."""
    return answers(response("302 Found", b"", f"Location: http://{to}/route"))


def big_body(size=10_000_000, *, announced=True):
    """Answer with a body of `size` bytes, its length announced or chunked."""

    async def behave(connection):
        if await connection.request():
            if announced:
                await connection.send(response(body=b"", length=size))
            else:
                await connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            block = b" " * 50_000
            for _ in range(size // len(block)):
                await connection.send(block if announced else b"c350\r\n" + block + b"\r\n")
                connection.peer.bodies.append(b"")  # counts blocks sent

    return behave


def html():
    """A web server that is no registry."""
    return answers(response("200 OK", b"<html><body>hello</body></html>", "Content-Type: text/html"))


def gzipped():
    """Compress although the client asked for identity."""
    return answers(response("200 OK", gzip.compress(TOPOLOGY), "Content-Encoding: gzip"))


def gzip_bomb(size=64 * 2**20):
    """A small compressed body that would unpack to `size` bytes."""
    return answers(response("200 OK", gzip.compress(b" " * size, 9), "Content-Encoding: gzip"))


def wrong_length(how):
    """Announce a length that is not the body's: "too long", "too short", "negative", or two of them ("duplicate")."""
    if how == "too long":
        return says(response(length=len(TOPOLOGY) + 10))
    if how == "duplicate":
        return answers(response("200 OK", TOPOLOGY, f"Content-Length: {len(TOPOLOGY) - 1}"))
    return answers(response(length={"too short": len(TOPOLOGY) - 5, "negative": -len(TOPOLOGY)}[how]))


def prefill(*, topology=TOPOLOGY, port=5000, instance=None, answers_per_connection=None):
    """A healthy engine: topology, then `port` plus the TP rank for each rank; knows the dp rank of no room.

    With `answers_per_connection` it closes a connection after so many, without having said that it would.
    """
    headers = [] if instance is None else [f"X-SGLang-Disaggregation-Instance-ID: {instance}"]

    async def behave(connection):
        answered = 0
        while answered != answers_per_connection and (request := await connection.request()):
            rank = request[0].partition(b"target_tp_rank=")[2].partition(b"&")[0]
            body = topology if rank == b"-1" else b"{}"
            if rank.isdigit():
                body = b'{"rank_ip": "127.0.0.1", "rank_port": %d}' % (port + int(rank))
            await connection.send(response("200 OK", body, *headers))
            answered += 1

    return behave


def answers_when(event, body=b"{}"):
    """Answer one request as soon as the event of the host's loop is set, which `host.set` does."""

    async def behave(connection):
        await connection.request()
        await event.wait()
        await connection.send(response("200 OK", body))

    return behave


def dies_between_requests(data=None):
    """Answer one request with keep-alive, then drop the connection when the next one arrives on it."""
    data = response() if data is None else data

    async def behave(connection):
        if await connection.request():
            await connection.send(data)
            if await connection.reader.read(1):
                connection.reset()

    return behave


def not_ready():
    """503 for ever."""
    return answers(response("503 Service Unavailable", b"not ready"))


def huge_headers(size=100_000):
    """One header line of `size` bytes."""
    return answers(response("200 OK", TOPOLOGY, "X-Filler: " + "a" * size))


def many_headers(count=10_000):
    """Thousands of short headers."""
    return answers(response("200 OK", TOPOLOGY, *(f"X-Filler-{i}: a" for i in range(count))))


def continues_for_ever():
    """100 Continue, again and again, never an answer."""

    async def behave(connection):
        if await connection.request():
            while True:
                await connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
                await asyncio.sleep(0.02)

    return behave


def garbage():
    """Bytes that are no HTTP (an SSH server's greeting)."""
    return says(b"SSH-2.0-OpenSSH_9.6 secret-of-the-peer\r\n")


# -- addresses at which no peer listens


@contextlib.contextmanager
def refusing_address():
    """An address that refuses connections, and that nobody else gets meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@contextlib.contextmanager
def black_hole():
    """An address that drops connection requests, because its queue of them is full.

    Linux does that (`net.ipv4.tcp_abort_on_overflow` is 0, its default); test_hostile.py sees to it.
    """
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        yield f"127.0.0.1:{full.getsockname()[1]}"
