"""One HTTP request: sent on a connection, its answer or trouble returned."""

from __future__ import annotations

import importlib.metadata
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

from disagg.transport.connections import Connections
from disagg.transport.names import Names
from disagg.transport.reply import HTTP_OK, Trouble, named_by_system

if TYPE_CHECKING:
    from disagg.transport.attempt import Answer, Attempt
    from disagg.transport.options import Command, TransportOptions
    from disagg.transport.reply import Outcome

__all__ = ["Exchange", "ExchangeError"]


class ExchangeError(Exception):
    """There was no usable answer: `what` is one of the machine's words, `message` one short line."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(what, message)
        self.what = what
        self.message = message


class Exchange:
    """The HTTP/1.1 client. It follows nothing, keeps no cookies and knows no proxies. Make it inside a running loop."""

    def __init__(self, options: TransportOptions) -> None:
        self._names = Names(max_wait_s=options.connect_timeout_s, allows=options.allows_resolved)
        self.pool = Connections(
            self._names, max_age_s=options.max_connection_age_s, max_idle=options.max_idle_connections
        )
        self._headers = _headers(options)
        self._said: OrderedDict[int, int] = OrderedDict()

    async def run(self, attempt: Attempt) -> Answer:
        """Make the request of this attempt once; once more if a reused connection was closed under it.

        Raises ExchangeError. A refusal (not 2xx) counts as soon as its status is read, see `Attempt.refusal`.
        """
        outcome = await self._ask(attempt)
        # POST /query_dp_ranks only reads, so it is sent again as well as a GET.
        if isinstance(outcome, Trouble) and outcome.dropped and attempt.reused:
            attempt.wants_fresh = True  # the peer's other idle connections are as old
            outcome = await self._ask(attempt)
        if isinstance(outcome, Trouble):
            raise ExchangeError(outcome.what, outcome.message)
        self._compare(attempt, outcome)
        return outcome

    async def close(self) -> None:
        """Close all connections."""
        self.pool.close()
        await self._names.close()

    async def _ask(self, attempt: Attempt) -> Outcome:
        command = attempt.command
        # Heartbeats go out on connections of their own: one kept alive may lead to a process that was
        # replaced behind its address and still drains.
        keeps = command.kind != "heartbeat"
        connection = self.pool.take(command.addr) if keeps and not attempt.wants_fresh else None
        reused = connection is not None
        if connection is None:
            try:
                connection = await self.pool.make(command.addr)
            except OSError as exc:
                return named_by_system(exc.with_traceback(None))
        attempt.on_connected(connection, reused=reused)
        try:
            return await connection.ask(self._request(command, keeps=keeps), attempt)
        finally:
            self.pool.give_back(connection, keep=keeps)

    def _request(self, command: Command, *, keeps: bool) -> bytes:
        body = command.body
        host = command.addr
        if "%" in host:  # a zone means something on this machine only
            bare, _, port = host.rpartition("]:")
            host = f"{bare.partition('%')[0]}]:{port}"
        words = command.method + command.path + host
        if not (words.isascii() and words.isprintable()) or " " in words:
            raise ValueError(f"malformed command: {command.method!r} {command.path!r} at {host!r}")
        lines = f"{command.method} {command.path} HTTP/1.1\r\nHost: {host}\r\n{self._headers}"
        if not keeps:
            lines += "Connection: close\r\n"
        if body is None:
            return f"{lines}\r\n".encode("ascii")
        lines += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return lines.encode("ascii") + body

    def _compare(self, attempt: Attempt, answer: Answer) -> None:
        """Leave the kept connections of a peer that a new one shows to be another process now.

        They may lead to the process that was replaced, which answers until it has drained, with ports that are gone.
        """
        command = attempt.command
        if answer.status != HTTP_OK or command.kind == "dp_ranks":
            return
        # Numbers only, as there may be thousands; two alike by chance cost no more than some connections.
        key, said = hash((command.addr, command.path)), hash((answer.headers, answer.body))
        before = self._said.get(key)
        if before not in (None, said):
            if attempt.reused:
                return
            self.pool.renew(command.addr)
        self._said[key] = said
        self._said.move_to_end(key)
        if len(self._said) > MOST_SAID:
            self._said.popitem(last=False)


def _headers(options: TransportOptions) -> str:
    """The lines that every request has."""
    lines = [
        "Accept: */*",
        "Accept-Encoding: identity",
        f"User-Agent: disagg/{_version()}",
        "X-Disagg-Client: 1",
    ]
    if options.token is not None:
        lines.append(f"Authorization: Bearer {options.token.reveal()}")
    return "".join(f"{line}\r\n" for line in lines)


def _version() -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("disagg")
    return "0"


MOST_SAID = 8192
