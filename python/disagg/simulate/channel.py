"""Messages between the parent and its children: pickles with a length in front, over a socket pair."""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass

__all__ = ["Channel", "Done", "Finish", "Go", "Ready"]

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Ready:
    """Child to parent: set up. `addresses` of a prefill worker's peers by index."""

    addresses: dict[int, str]


@dataclass(frozen=True, slots=True)
class Go:
    """Parent to child: the run starts at `start_ns`; `addresses` of all peers by index."""

    start_ns: int
    addresses: dict[int, str]


@dataclass(frozen=True, slots=True)
class Finish:
    """Parent to child: the run is over."""


@dataclass(frozen=True, slots=True)
class Done:
    """Child to parent, its last message: what it saw."""

    result: object


class Channel:
    """One end of the pair. Only processes of one run are on it, so its pickles are our own."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """Return the socket's descriptor, for select and for a child to inherit."""
        return self._end.fileno()

    def send(self, message: object) -> None:
        """Send one message; waits while the other side reads. Raises OSError when it is gone."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._end.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> object:
        """Wait for one whole message. Raises EOFError when the other side is gone."""
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return pickle.loads(self._exactly(size))

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self._end.recv(min(size - len(data), 1 << 20))
            except ConnectionError:
                piece = b""
            if not piece:
                raise EOFError("the other process is gone")
            data += piece
        return bytes(data)
