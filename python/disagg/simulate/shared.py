"""Memory that processes of one run share: arrivals in, ends out, and a page of counters.

The scheduler's loop reads and writes these without a system call. Any call would release the GIL, and a loop
that gives the GIL away has to get it back from the Resolver's network thread; then the loop's own plumbing,
not the Resolver, would be what is measured. Each log has one writer and one reader; each counter one writer.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import zlib
from dataclasses import dataclass

__all__ = ["Arrival", "ArrivalLog", "End", "EndLog", "Field", "SharedMemory", "StatusPage"]


class SharedMemory:
    """Zeroed anonymous memory that children inherit by file descriptor."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.size = size
        if descriptor is None:
            descriptor = _anonymous_file()
            os.truncate(descriptor, size)
        self.descriptor = descriptor
        self.map = mmap.mmap(descriptor, size)

    def close(self) -> None:
        """Unmap and close this process's view."""
        self.map.close()
        os.close(self.descriptor)


def _anonymous_file() -> int:
    # A file on a disk would let the kernel's write-back stall a store; memfd is memory only.
    if hasattr(os, "memfd_create"):
        return os.memfd_create("disagg-simulate")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as it reaches the decode scheduler."""

    request: int
    peer: int
    room: int
    preset: int | None


class ArrivalLog:
    """Arrivals in order. Record: number from 1, room, peer, preset + 1, CRC-32 of these, padding.

    The reader trusts a record only when its number and checksum are right, so it never depends on the order
    in which the writer's stores become visible.
    """

    RECORD = struct.Struct("<QQIIII")
    _CHECKED = struct.Struct("<QQII")

    def __init__(self, memory: SharedMemory) -> None:
        self._map = memory.map
        self._next = 0
        self._capacity = memory.size // self.RECORD.size

    @classmethod
    def bytes_for(cls, requests: int) -> int:
        """How much memory a run of so many requests needs."""
        return max(1, requests) * cls.RECORD.size

    def write(self, arrival: Arrival) -> None:
        """Append; records must come in order of `request`, from 0."""
        preset = 0 if arrival.preset is None else arrival.preset + 1
        checked = self._CHECKED.pack(arrival.request + 1, arrival.room, arrival.peer, preset)
        record = checked + struct.pack("<II", zlib.crc32(checked), 0)
        offset = arrival.request * self.RECORD.size
        self._map[offset : offset + self.RECORD.size] = record

    def read(self) -> Arrival | None:
        """Take the next arrival, or None when it is not there (yet)."""
        if self._next >= self._capacity:
            return None
        offset = self._next * self.RECORD.size
        record = self._map[offset : offset + self.RECORD.size]
        number, room, peer, preset, checksum, _ = self.RECORD.unpack(record)
        if number != self._next + 1 or zlib.crc32(record[: self._CHECKED.size]) != checksum:
            return None
        self._next += 1
        return Arrival(number - 1, peer, room, preset - 1 if preset else None)


@dataclass(frozen=True, slots=True)
class End:
    """One end of a request as the scheduler saw it.

    `request` is None for an object that is none of ours. `detail` is the index of what came with it, `step`
    the number of the poll that gave it (0: `add` returned it). Times are monotonic ns.
    """

    request: int | None
    kind: int
    detail: int
    step: int
    added_ns: int
    ended_ns: int


ROUTED, FAILED, RAISED = 1, 2, 3
UNKNOWN_REQUEST = 2**32 - 1


class EndLog:
    """Ends in order of the scheduler's seeing them; ends past the capacity are counted and not kept."""

    RECORD = struct.Struct("<IIIIqq")

    def __init__(self, memory: SharedMemory) -> None:
        self._map = memory.map
        self._capacity = memory.size // self.RECORD.size
        self.count = 0

    @classmethod
    def bytes_for(cls, requests: int) -> int:
        """Twice as much as needed when each request ends once, to see it if they end twice."""
        return (2 * requests + 1024) * cls.RECORD.size

    def write(self, end: End) -> None:
        """Append one end."""
        if self.count < self._capacity:
            request = UNKNOWN_REQUEST if end.request is None else end.request
            values = (request, end.kind, end.detail, end.step, end.added_ns, end.ended_ns)
            self.RECORD.pack_into(self._map, self.count * self.RECORD.size, *values)
        self.count += 1

    def read(self, count: int) -> list[End]:
        """Return the first `count` ends, or as many as were kept."""
        ends = []
        for index in range(min(count, self._capacity)):
            record = self.RECORD.unpack_from(self._map, index * self.RECORD.size)
            request = None if record[0] == UNKNOWN_REQUEST else record[0]
            ends.append(End(request, *record[1:]))
        return ends


class Field:
    """Places on the status page, with who writes each."""

    STOP = 0  # parent: 1 when no more arrivals shall come
    CLOSE = 1  # parent: 1 when the loops shall end
    SENT = 2  # feeder: how many arrivals it wrote so far
    SENT_ALL = 3  # feeder: 1 when no more will come
    ADDED = 4  # scheduler, these and all below
    ROUTED = 5
    FAILED = 6
    WORST_CYCLE_NS = 7
    CYCLES = 8


class StatusPage:
    """64-bit counters; a store is one aligned machine word, so a reader sees the old or the new value."""

    SIZE = 4096

    def __init__(self, memory: SharedMemory) -> None:
        self._words = memoryview(memory.map).cast("Q")

    def __getitem__(self, field: int) -> int:
        return self._words[field]

    def __setitem__(self, field: int, value: int) -> None:
        self._words[field] = value

    def close(self) -> None:
        """Let go of the memory, so that it can be unmapped."""
        self._words.release()
