"""Peers without a registry: one that never answers, one that refuses, one that talks rubbish."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from itertools import cycle

__all__ = ["Impostor", "refusing", "rubbish", "silent"]

_HTML = b"<!doctype html><title>It works!</title><p>This is not a bootstrap server.\n"
_CUT_JSON = b'{"attn_tp_size": 4, "dp_size": 1, "pp_si'
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"

# Answers in turn: not JSON, JSON that stops in the middle, and half of the body that the head promised.
_RUBBISH = (
    _HEAD % len(_HTML) + _HTML,
    _HEAD % len(_CUT_JSON) + _CUT_JSON,
    _HEAD % 400 + _CUT_JSON,
)


# How a connection ends for a handler. It is cancelled only when the worker ends; asyncio of Python 3.11 logs
# a handler that ends by its cancellation as an error.
_GONE = (ConnectionError, asyncio.CancelledError)


class Impostor:
    """Something behind an address that is no registry; `close` frees the port."""

    def __init__(self, server: asyncio.Server | None, held: socket.socket) -> None:
        self._server = server
        self._held = held
        host, port = held.getsockname()[:2]
        self.address = f"{host}:{port}"

    def close(self) -> None:
        """Stop listening; open connections end with the process."""
        if self._server is not None:
            self._server.close()
        self._held.close()


def refusing() -> Impostor:
    """Hold a port that nobody listens on, so that nobody else takes it either."""
    return Impostor(None, _bound())


async def silent() -> Impostor:
    """Accept and read, never answer."""
    held = _bound()
    return Impostor(await asyncio.start_server(_read_for_ever, sock=held), held)


async def rubbish() -> Impostor:
    """Answer each request 200 with something that is no topology, then close."""
    answers = cycle(_RUBBISH)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(*_GONE, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(next(answers))
            await writer.drain()
        writer.close()

    held = _bound()
    return Impostor(await asyncio.start_server(answer, sock=held), held)


async def _read_for_ever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(*_GONE):
        while await reader.read(65_536):
            pass
    writer.close()


def _bound() -> socket.socket:
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    return held
