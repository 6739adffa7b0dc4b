"""A prefill worker: some of the prefill engines, each behind a port of its own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any

from disagg import BootstrapServer
from disagg.simulate import impostors
from disagg.simulate.channel import Channel, Done, Go, Ready
from disagg.simulate.facts import PeerFacts, PrefillResult, PrefillSetup
from disagg.simulate.plan import RESTART_AWAY_S
from disagg.simulate.scenario import Behaviour, PeerSpec, Rank
from disagg.transport.attempt import Attempt
from disagg.transport.exchange import Exchange
from disagg.transport.options import Command, TransportOptions

__all__ = ["rank_body", "run"]

NS = 1_000_000_000
# How many ranks register at the same time; engines of one machine start about together.
REGISTRATIONS = 8
# How often to try to listen on its old port again: the kernel may hold it for a moment.
PORT_TRIES = 40
WRITE_S = 10.0
MAX_ANSWER = 4096


def run(setup: object, channel: Channel) -> None:
    """Run the worker's engines until the parent says finish."""
    if not isinstance(setup, PrefillSetup):
        raise TypeError(f"a prefill worker cannot be set up with {type(setup).__name__}")
    asyncio.run(_Worker(setup, channel).run())


class _Worker:
    def __init__(self, setup: PrefillSetup, channel: Channel) -> None:
        self._setup = setup
        self._channel = channel
        self._result = PrefillResult({peer.index: PeerFacts() for peer in setup.peers})
        self._servers: dict[int, BootstrapServer | impostors.Impostor] = {}
        self._addresses: dict[int, str] = {}
        self._limit = asyncio.Semaphore(REGISTRATIONS)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        self._http = Exchange(TransportOptions(WRITE_S, WRITE_S, WRITE_S, max_in_flight=1))
        try:
            for peer in self._setup.peers:
                await self._start(peer)
            self._channel.send(Ready(self._addresses))
            go = await self._receive()
            if isinstance(go, Go):
                self._begin(go.start_ns)
                await self._receive()  # Finish
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await self._http.close()
        for server in self._servers.values():
            server.close()
        self._channel.send(Done(self._result))

    async def _receive(self) -> object:
        """Wait for a message without stopping the engines."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        loop.add_reader(self._channel.fileno(), arrived.set)
        await arrived.wait()
        loop.remove_reader(self._channel.fileno())
        return self._channel.receive()  # messages to a worker are short: the rest is there

    async def _start(self, peer: PeerSpec) -> None:
        server: BootstrapServer | impostors.Impostor
        if peer.behaviour is Behaviour.REFUSING:
            server = impostors.refusing()
        elif peer.behaviour is Behaviour.SILENT:
            server = await impostors.silent()
        elif peer.behaviour is Behaviour.RUBBISH:
            server = await impostors.rubbish()
        else:
            server = BootstrapServer("127.0.0.1", 0)
        self._servers[peer.index] = server
        self._addresses[peer.index] = server.address
        if peer.has_registry:
            await self._register_engine(peer, 0, without_last=peer.behaviour is Behaviour.SLOW_START)

    def _begin(self, start_ns: int) -> None:
        for peer in self._setup.peers:
            if peer.behaviour is Behaviour.SLOW_START:
                due_ns = start_ns + int(self._setup.last_rank_s[peer.index] * NS)
                self._spawn(self._register_last(peer, due_ns))
            elif peer.behaviour is Behaviour.RESTARTING:
                self._spawn(self._restart(peer, start_ns + int(self._setup.restart_s * NS)))
        self._spawn(self._register_rooms(start_ns))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._result.problems.append(f"{type(error).__name__}: {error}")

    # Ranks.

    async def _register_engine(self, peer: PeerSpec, life: int, *, without_last: bool = False) -> None:
        *others, last = peer.layouts[life].ranks()
        await asyncio.gather(*(self._register_rank(peer, life, rank) for rank in others))
        if not without_last:
            await self._register_whole(peer, life, last)

    async def _register_last(self, peer: PeerSpec, due_ns: int) -> None:
        await _sleep_until(due_ns)
        *_, last = peer.layouts[0].ranks()
        await self._register_whole(peer, 0, last)

    async def _register_whole(self, peer: PeerSpec, life: int, last: Rank) -> None:
        before = time.monotonic_ns()
        await self._register_rank(peer, life, last)
        self._result.facts[peer.index].whole_ns.append((before, time.monotonic_ns()))

    async def _register_rank(self, peer: PeerSpec, life: int, rank: Rank) -> None:
        async with self._limit:
            await self._write("PUT", peer.index, "/route", rank_body(peer, life, rank))

    async def _restart(self, peer: PeerSpec, due_ns: int) -> None:
        await _sleep_until(due_ns)
        self._result.facts[peer.index].away_ns = time.monotonic_ns()
        self._servers[peer.index].close()
        await asyncio.sleep(RESTART_AWAY_S)
        host, _, port = self._addresses[peer.index].rpartition(":")
        for tries in range(1, PORT_TRIES + 1):
            try:
                self._servers[peer.index] = BootstrapServer(host, int(port))
                break
            except OSError:
                if tries == PORT_TRIES:
                    raise
                await asyncio.sleep(0.05)
        await self._register_engine(peer, 1)

    # Rooms.

    async def _register_rooms(self, start_ns: int) -> None:
        for register_s, request, peer, room, dp_rank in self._setup.rooms:
            await _sleep_until(start_ns + int(register_s * NS))
            self._spawn(self._register_room(request, peer, room, dp_rank))

    async def _register_room(self, request: int, peer: int, room: int, dp_rank: int) -> None:
        before = time.monotonic_ns()
        self._result.registered_ns[request] = (before, 0)
        await self._write("POST", peer, "/register_dp_rank", {"bootstrap_room": room, "dp_rank": dp_rank})
        self._result.registered_ns[request] = (before, time.monotonic_ns())

    async def _write(self, method: str, peer: int, path: str, body: dict[str, object]) -> None:
        addr = self._addresses[peer]
        command = Command(0, "topology", addr, method, path, json.dumps(body).encode(), MAX_ANSWER)
        attempt = Attempt(command, now=0.0, connect_s=WRITE_S, total_s=WRITE_S)
        async with asyncio.timeout(WRITE_S):
            answer = await self._http.run(attempt)
        if answer.status != 200:
            text = answer.body.decode(errors="replace")
            self._result.problems.append(f"{method} http://{addr}{path} was answered {answer.status}: {text[:200]}")


def rank_body(peer: PeerSpec, life: int, rank: Rank) -> dict[str, object]:
    """Return what a rank sends when it registers, as SGLang 0.5.23 does (WIRE.md section 2)."""
    layout = peer.layouts[life]
    ip, port = peer.rank_address(life, rank)
    plain = layout.plain_dp
    return {
        "attn_tp_size": layout.tp,
        "attn_tp_rank": rank.tp,
        "attn_cp_size": layout.cp,
        "attn_cp_rank": rank.cp,
        "attn_dp_size": 1 if plain else layout.dp,
        "attn_dp_rank": 0 if plain else rank.dp,
        "pp_size": layout.pp,
        "pp_rank": rank.pp,
        "system_dp_size": layout.dp if plain else 1,
        "system_dp_rank": rank.dp if plain else 0,
        "rank_ip": ip,
        "rank_port": port,
        "page_size": layout.page_size,
        "kv_cache_dtype": "auto",
        "load_balance_method": "follow_bootstrap_room" if peer.follows_room else "round_robin",
    }


async def _sleep_until(due_ns: int) -> None:
    await asyncio.sleep(max(0.0, (due_ns - time.monotonic_ns()) / NS))
