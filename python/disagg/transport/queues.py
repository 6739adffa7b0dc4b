"""Which request starts next: first come first served within a peer, round robin over the peers.

Peers that answer, or were never asked, go before those whose last request got no answer: hundreds of silent ones, whose
attempts time out and start again together, would otherwise hold up each request of a healthy one by as many turns.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from disagg.transport.options import Command

__all__ = ["FairQueue"]


class FairQueue:
    """Requests that wait for their turn, and how many of each peer are under way.

    A peer with many requests delays only its own: each turn serves the peer that has waited longest, and a
    peer with `per_peer` requests under way is passed over until one of them ends. Of two turns in a row, at most
    one goes to a peer that did not answer while others wait, and at least one while it waits. Everything is O(1) except
    `withdraw`, which is linear in the requests that this one peer has waiting.
    """

    def __init__(self, *, per_peer: int) -> None:
        self._per_peer = per_peer
        self._waiting: dict[str, deque[Command]] = {}
        # peers with something that waits and room to start it: those that answer, those that did not
        self._ring: OrderedDict[str, None] = OrderedDict()
        self._silent_ring: OrderedDict[str, None] = OrderedDict()
        self._silent: OrderedDict[str, None] = OrderedDict()
        self._silent_went_last = False
        self._under_way: Counter[str] = Counter()
        self._addr_of: dict[int, str] = {}

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._addr_of)

    def has_startable(self) -> bool:
        """Whether `next` would give a request."""
        return bool(self._ring or self._silent_ring)

    def put(self, command: Command) -> None:
        """Let a request wait for its turn."""
        self._waiting.setdefault(command.addr, deque()).append(command)
        self._addr_of[command.ticket] = command.addr
        self._enter_ring(command.addr)

    def next(self) -> Command | None:
        """Take the request whose turn it is, which is then under way, or None if none may start."""
        if not self.has_startable():
            return None
        silent = bool(self._silent_ring) and (not self._ring or not self._silent_went_last)
        self._silent_went_last = silent
        addr, _ = (self._silent_ring if silent else self._ring).popitem(last=False)
        lane = self._waiting[addr]
        command = lane.popleft()
        if not lane:
            del self._waiting[addr]
        del self._addr_of[command.ticket]
        self._under_way[addr] += 1
        self._enter_ring(addr)
        return command

    def on_end(self, addr: str, *, answered: bool | None) -> None:
        """Take in that a request of this peer is no longer under way; `answered` is None when it was abandoned."""
        if answered:
            self._silent.pop(addr, None)
        elif answered is not None:
            self._silent[addr] = None
            if len(self._silent) > MOST_SILENT:
                self._silent.popitem(last=False)
        self._under_way[addr] -= 1
        if self._under_way[addr] <= 0:
            del self._under_way[addr]
        self._enter_ring(addr)

    def withdraw(self, ticket: int) -> bool:
        """Take a waiting request out again; False if it does not wait (any more)."""
        addr = self._addr_of.pop(ticket, None)
        if addr is None:
            return False
        kept = deque(command for command in self._waiting[addr] if command.ticket != ticket)
        if kept:
            self._waiting[addr] = kept
        else:
            del self._waiting[addr]
            self._ring.pop(addr, None)
            self._silent_ring.pop(addr, None)
        return True

    def _enter_ring(self, addr: str) -> None:
        """Put a peer at the end of the ring, unless it is in it or has nothing to start."""
        may_start = addr in self._waiting and self._under_way[addr] < self._per_peer
        if may_start and addr not in self._ring and addr not in self._silent_ring:
            (self._silent_ring if addr in self._silent else self._ring)[addr] = None


# As many as a Resolver knows addresses, by default; those that went silent first count as answering again.
MOST_SILENT = 4096
