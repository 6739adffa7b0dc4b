"""Prefill registries in a process of their own: silent, slow and healthy ones on loopback, for bench_faults.py.

    python fault_peers.py SILENT SLOW HEALTHY

prints one line of JSON with their ports and serves until its standard input ends. A silent peer accepts and never
answers; a slow one takes 0.3 s for each answer. All of one process, so that they take no time under the GIL of what
is measured; the processor cores are shared.
"""

from __future__ import annotations

import asyncio
import json
import sys

TOPOLOGY = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 64}
TOPOLOGY |= {"kv_cache_dtype": "auto", "follow_bootstrap_room": True}
ENDPOINT = {"rank_ip": "127.0.0.1", "rank_port": 41000}
SLOW_S = 0.3
BACKLOG = 1024


def answer(body: dict) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)


SAYS_TOPOLOGY, SAYS_ENDPOINT = answer(TOPOLOGY), answer(ENDPOINT)


class Silent(asyncio.Protocol):
    """Takes in what comes, and says nothing."""


class Healthy(asyncio.Protocol):
    """Answers each request, and keeps the connection."""

    delay_s = 0.0

    def connection_made(self, transport):
        self.transport, self.head = transport, b""

    def data_received(self, data):
        self.head += data
        while b"\r\n\r\n" in self.head:
            head, _, self.head = self.head.partition(b"\r\n\r\n")
            said = SAYS_TOPOLOGY if b"=-1" in head.partition(b"\r\n")[0] else SAYS_ENDPOINT
            if self.delay_s:
                asyncio.get_running_loop().call_later(self.delay_s, self.transport.write, said)
            else:
                self.transport.write(said)


class Slow(Healthy):
    """Answers in time, but only just."""

    delay_s = SLOW_S


async def main(counts: dict[type[asyncio.Protocol], int]) -> None:
    loop = asyncio.get_running_loop()
    servers, ports = [], {}
    for behaviour, count in counts.items():
        its = [await loop.create_server(behaviour, "127.0.0.1", 0, backlog=BACKLOG) for _ in range(count)]
        ports[behaviour.__name__.lower()] = [server.sockets[0].getsockname()[1] for server in its]
        servers += its
    print(json.dumps(ports), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    silent, slow, healthy = map(int, sys.argv[1:])
    asyncio.run(main({Silent: silent, Slow: slow, Healthy: healthy}))
