"""One HTTP request: sent, its answer read within bounds, its troubles named.

This is the one place where exceptions of the network are caught. Nothing here looks into a body.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import socket
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.http_exceptions import LineTooLong
from yarl import URL

from disagg.transport.attempt import Answer, Attempt
from disagg.transport.connections import CURRENT, BoundedConnector
from disagg.transport.names import ForbiddenAddress, Names

if TYPE_CHECKING:
    from aiohttp import ClientHandlerType, ClientRequest, ClientResponse

    from disagg.transport.options import Command, TransportOptions

__all__ = ["Exchange", "ExchangeError"]


class ExchangeError(Exception):
    """There was no usable answer: `what` is one of the machine's words, `message` one short line."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(what, message)
        self.what = what
        self.message = message


class Exchange:
    """The HTTP client: two pools, one of which reuses connections. Make and use it inside a running loop."""

    def __init__(self, options: TransportOptions) -> None:
        self._names = Names(max_wait_s=options.connect_timeout_s, allows=options.allows_resolved)
        self.pool = self._connector(options, reuse=True)
        # Heartbeats go out on connections of their own: one kept alive may lead to a process that was
        # replaced behind its address and still drains.
        self._fresh = self._connector(options, reuse=False)
        self._session = _session(self.pool, options)
        self._heartbeat_session = _session(self._fresh, options)
        self._said: OrderedDict[int, int] = OrderedDict()

    async def run(self, attempt: Attempt) -> Answer:
        """Make the request of this attempt once; once more if a reused connection was closed under it.

        Raises ExchangeError. A refusal (not 2xx) counts as soon as its status is read, see `Attempt.refusal`.
        """
        CURRENT.set(attempt)
        command = attempt.command
        session = self._heartbeat_session if command.kind == "heartbeat" else self._session
        try:
            async with session.request(
                command.method,
                URL(f"http://{command.addr}{command.path}", encoded=True),
                data=command.body,
                headers=_headers(command),
                allow_redirects=False,
            ) as response:
                answer = await _read(response, attempt)
        except (aiohttp.ClientError, OSError) as exc:
            if attempt.refusal is not None:
                return attempt.refusal
            trouble = _named(exc)
        else:
            self._compare(attempt, answer)
            return answer
        # Outside the handler: chained exceptions hold each other's frames, and cyclic garbage makes the
        # collector stop every thread for tens of milliseconds.
        raise ExchangeError(*trouble)

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

    def on_end(self, attempt: Attempt) -> None:
        """Take in that an attempt is over, however it ended."""
        self.pool.on_end(attempt)
        self._fresh.on_end(attempt)

    async def close(self) -> None:
        """Close all connections."""
        try:
            await self._session.close()
        finally:  # also when it is cancelled while it waits
            try:
                await self._heartbeat_session.close()
            finally:
                await self._names.close()

    def _connector(self, options: TransportOptions, *, reuse: bool) -> BoundedConnector:
        return BoundedConnector(
            self._names,
            max_age_s=options.max_connection_age_s,
            max_idle=options.max_idle_connections,
            reuse=reuse,
        )


def _session(connector: BoundedConnector, options: TransportOptions) -> aiohttp.ClientSession:
    token = options.token
    authorization = {} if token is None else {"Authorization": f"Bearer {token.reveal()}"}
    return aiohttp.ClientSession(
        connector=connector,
        headers={
            "Accept-Encoding": "identity",
            "User-Agent": f"disagg/{_version()}",
            "X-Disagg-Client": "1",
            **authorization,
        },
        # The driver keeps the time: aiohttp's timers fire together after a pause, and it rounds those over
        # 5 s to whole seconds, so many would be due at once.
        timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        max_line_size=MAX_LINE,
        max_field_size=MAX_LINE,
        middlewares=(_retry_once_if_reused,),
    )


async def _retry_once_if_reused(request: ClientRequest, send: ClientHandlerType) -> ClientResponse:
    """Send again if the peer closed a kept-alive connection, which says nothing about the request.

    aiohttp would retry any GET by itself, also on a new connection, which doubles the requests to a peer
    that drops them; raising an error of our own prevents that. POST /query_dp_ranks only reads, so it is
    sent again as well.
    """
    attempt = CURRENT.get()
    try:
        return await send(request)
    except _DROPPED as exc:
        if isinstance(exc, aiohttp.ClientConnectorError) or not attempt.reused:
            raise ExchangeError(*_named(exc)) from None
    attempt.wants_fresh = True  # the peer's other idle connections are as old
    try:
        return await send(request)
    except _DROPPED as exc:
        raise ExchangeError(*_named(exc)) from None


_DROPPED = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)


async def _read(response: ClientResponse, attempt: Attempt) -> Answer:
    max_body = attempt.command.max_body
    instance, epoch, features = (_text(response.headers.get(name)) for name in PEER_HEADERS)
    headers = instance, epoch, features
    refused = not HTTP_OK <= response.status < HTTP_REDIRECT
    if refused:
        attempt.refusal = Answer(response.status, b"", headers)
        max_body = min(max_body, SHORT_BODY)
    try:
        body = await _body(response, max_body)
    except ExchangeError:
        response.close()
        if attempt.refusal is not None:
            return attempt.refusal
        raise
    return Answer(response.status, body, headers)


async def _body(response: ClientResponse, max_body: int) -> bytes:
    encoding = response.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise ExchangeError("encoding", f"content encoding {_text(encoding)!r:.40} was not asked for")
    announced = response.content_length
    if announced is not None and announced > max_body:
        raise ExchangeError("oversized", f"the body is announced with {announced} bytes, over {max_body}")
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_body:
            raise ExchangeError("oversized", f"the body is over {max_body} bytes")
    return bytes(body)


def _text(header: str | None) -> str | None:
    """Escape what is not ASCII: undecodable bytes come as lone surrogates, which no Rust string can hold."""
    return header and header.encode("ascii", "backslashreplace").decode("ascii")


def _headers(command: Command) -> dict[str, str]:
    headers = {}
    if command.body is not None:
        headers["Content-Type"] = "application/json"
    if "%" in command.addr:  # a zone means something on this machine only
        host, _, port = command.addr.rpartition("]:")
        headers["Host"] = f"{host.partition('%')[0]}]:{port}"
    return headers


def _named(exc: aiohttp.ClientError | OSError) -> tuple[str, str]:
    """Say in the machine's words what went wrong; never with anything that the peer sent."""
    if isinstance(exc, aiohttp.ClientPayloadError):
        return "cut", "the body ended before it was complete"
    if isinstance(exc, aiohttp.ServerDisconnectedError):
        return "reset", "the connection was closed before an answer"
    if isinstance(exc, aiohttp.ClientResponseError):
        if _caused_by(exc, LineTooLong):
            return "oversized", f"a header is over {MAX_LINE} bytes"
        return "other", "the answer is not HTTP/1.1"
    return _named_by_system(exc.os_error if isinstance(exc, aiohttp.ClientConnectorError) else exc)


def _named_by_system(reason: Exception) -> tuple[str, str]:
    if isinstance(reason, ForbiddenAddress):
        return "forbidden", str(reason)
    if isinstance(reason, socket.gaierror):
        return "dns", f"the name was not found: {(reason.strerror or '?').lower()}"
    if isinstance(reason, OSError) and reason.errno is not None:
        name = errno.errorcode.get(reason.errno, str(reason.errno))
        return WHAT_OF.get(reason.errno, "other"), f"{os.strerror(reason.errno).lower()} ({name})"
    return "other", type(reason).__name__


def _caused_by(exc: BaseException | None, kind: type[BaseException]) -> bool:
    while exc is not None:
        if isinstance(exc, kind):
            return True
        exc = exc.__cause__
    return False


def _version() -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("disagg")
    return "0"


# Which life of the peer, which snapshot, and what it can do; in the order of `PeerHeaders`.
PEER_HEADERS = ("X-SGLang-Disaggregation-Instance-ID", "X-Disagg-Epoch", "X-Disagg-Features")
HTTP_OK = 200
HTTP_REDIRECT = 300
MAX_LINE = 8190
SHORT_BODY = 1024
MOST_SAID = 8192
WHAT_OF = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "reset",
    errno.EPIPE: "reset",
    errno.ECONNABORTED: "reset",
    errno.ETIMEDOUT: "timeout",
}
