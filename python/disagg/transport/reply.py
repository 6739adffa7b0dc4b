"""One answer as it comes in: parsed, bounded, and what became of it.

httptools (llhttp) parses, and is strict: two lengths, a length beside chunks, folded or malformed headers and bare line
feeds are errors. It bounds nothing, so all bounds are here.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING, NamedTuple

import httptools

from disagg.transport.attempt import Answer
from disagg.transport.names import ForbiddenAddress

if TYPE_CHECKING:
    import asyncio
    from typing import TypeAlias

    from disagg.transport.attempt import Attempt
    from disagg.transport.options import PeerHeaders

    Outcome: TypeAlias = "Answer | Trouble"

__all__ = ["Reply", "Trouble", "named_by_system"]


class Trouble(NamedTuple):
    """There is no usable answer: `what` is one of the machine's words, `message` one short line.

    `dropped` if the connection was closed before an answer, which on a reused one says nothing about the request.
    """

    what: str
    message: str
    dropped: bool = False


class Reply:
    """The answer to one attempt's request; sets `outcome` once, to an Answer or a Trouble.

    A refusal (not 2xx) counts as soon as its status is read, see `Attempt.refusal`. Nothing here looks into a body, and
    nothing that the peer sent but the three headers goes into an outcome's text.
    """

    __slots__ = (
        "_attempt",
        "_body",
        "_ends_with_connection",
        "_head",
        "_head_size",
        "_headers",
        "_is_interim",
        "_line_count",
        "_line_start",
        "_longest_line",
        "_max_body",
        "_parser",
        "_size",
        "is_complete",
        "outcome",
    )

    def __init__(self, attempt: Attempt, outcome: asyncio.Future[Outcome]) -> None:
        self.outcome = outcome
        self.is_complete = False
        """Whether the connection is left where another request can be sent."""
        self._attempt = attempt
        self._max_body = attempt.command.max_body
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._head: bytearray | None = bytearray()  # None once it is whole
        self._head_size = 0
        self._line_start = 0
        self._line_count = 0
        self._longest_line = 0
        self._size = 0
        self._body = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._is_interim = False
        self._ends_with_connection = True

    def feed(self, data: bytes) -> None:
        """Take in what came; sets the outcome if it is all, or too much, or no HTTP."""
        self._size += len(data)
        while data and self._parser is not None:
            if self._head is not None:
                data = self._feed_head(data)
            else:
                if self._size > self._head_size + SPARE + OVERHEAD * self._max_body:
                    self._end(self._oversized())
                    return
                self._parse(data)
                data = b""
        if data:  # nobody asked for what follows an answer
            self.is_complete = False

    def on_end(self, reason: Exception | None) -> None:
        """Take in that the connection has ended: nothing more will come."""
        if self._parser is None:
            return
        if self._head is not None:
            text = "the connection was closed before an answer"
            trouble = Trouble("reset", text) if reason is None else named_by_system(reason)
            self._end(trouble._replace(dropped=True))
        elif reason is None and self._ends_with_connection:
            self._end(self._answer())
        else:
            self._end(Trouble("cut", "the body ended before it was complete"))

    # -- the head

    def _feed_head(self, data: bytes) -> bytes:
        """Take in what belongs to the head, and parse it once it is whole; returns the rest."""
        head = self._head
        if head is None or self._parser is None:
            return data
        known = len(head)
        head += data
        size = self._end_of_head(known)
        trouble = self._trouble_so_far(known)
        if trouble is not None:
            self._end(trouble)
        if trouble is not None or size is None:
            return b""
        self._head_size += size
        self._line_start = 0
        self._head = None
        rest = bytes(head[size:])
        self._parse(bytes(head[:size]))
        if self._parser is not None and (self._is_interim or self._parser.get_status_code() == 0):
            # 100 Continue, or blank lines: the answer is still to come.
            self._is_interim = False
            self._head = bytearray()
            self._headers.clear()
        return rest

    def _end_of_head(self, known: int) -> int | None:
        """How long the head is, if it is whole; looks at what came after the first `known` bytes only."""
        head = self._head or b""
        newline = head.find(b"\n", known)
        while newline >= 0:
            line = head[self._line_start : newline]
            self._line_start = newline + 1
            self._line_count += 1
            self._longest_line = max(self._longest_line, len(line))
            if line in (b"", b"\r"):
                return newline + 1
            newline = head.find(b"\n", newline + 1)
        self._longest_line = max(self._longest_line, len(head) - self._line_start)
        return None

    def _trouble_so_far(self, known: int) -> Trouble | None:
        head = self._head or b""
        if known < len(PREFIX):
            begin = head[: 4 * len(PREFIX)].lstrip(b"\r\n")[: len(PREFIX)]
            if not PREFIX.startswith(begin):
                return NO_HTTP  # an SSH server's greeting, say, after which nothing comes
        if self._longest_line > MAX_LINE:
            return Trouble("oversized", f"a header is over {MAX_LINE} bytes")
        if self._line_count > MAX_LINES or self._head_size + self._line_start > MAX_HEAD:
            return Trouble("other", f"the answer has over {MAX_LINES} headers, or {MAX_HEAD} bytes of them")
        return None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take in a header, or after a body in chunks a trailer."""
        name = name.lower()
        if name in KNOWN and name not in self._headers:
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        """Take in that the head is whole."""
        parser = self._parser
        if parser is None:
            return
        status = parser.get_status_code()
        if HTTP_FIRST <= status < HTTP_OK and status != HTTP_UPGRADE:
            self._is_interim = True
            return
        if not HTTP_OK <= status < HTTP_REDIRECT:
            self._attempt.refusal = Answer(status, b"", self._peer_headers())
            self._max_body = min(self._max_body, SHORT_BODY)
        announced = self._headers.get(b"content-length")
        self._ends_with_connection = announced is None and b"transfer-encoding" not in self._headers
        trouble = self._trouble_of_head(parser, status, None if announced is None else int(announced))
        if trouble is not None:
            self._end(trouble)

    def _trouble_of_head(
        self, parser: httptools.HttpResponseParser, status: int, announced: int | None
    ) -> Trouble | None:
        if parser.get_http_version() not in VERSIONS or not HTTP_OK <= status <= HTTP_LAST:
            self._attempt.refusal = None
            return NO_HTTP
        for header in (b"content-encoding", b"transfer-encoding"):
            coding = self._headers.get(header, b"").strip().lower()
            if coding not in (b"", b"identity") and (header, coding) != (b"transfer-encoding", b"chunked"):
                return Trouble("encoding", f"content encoding {_text(coding)!r:.40} was not asked for")
        if announced is not None and announced > self._max_body:
            return Trouble("oversized", f"the body is announced with {announced} bytes, over {self._max_body}")
        return None

    # -- the body

    def on_body(self, data: bytes) -> None:
        """Take in a piece of the body."""
        if self._parser is None:
            return
        if len(self._body) + len(data) > self._max_body:
            self._end(self._oversized())
        else:
            self._body += data

    def on_message_complete(self) -> None:
        """Take in that the body is whole."""
        if self._parser is not None and not self._is_interim:
            self.is_complete = self._parser.should_keep_alive()
            self._end(self._answer())

    def on_message_begin(self) -> None:
        """Take in that an answer begins; a second one is more than was asked for."""
        if self._parser is None:
            self.is_complete = False

    def _parse(self, data: bytes) -> None:
        parser = self._parser
        if parser is None:
            return
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.is_complete = False
            self._end(NO_HTTP)

    def _answer(self) -> Answer:
        parser = self._parser
        status = 0 if parser is None else parser.get_status_code()
        return Answer(status, bytes(self._body), self._peer_headers())

    def _peer_headers(self) -> PeerHeaders:
        instance, epoch, features = (_text(self._headers.get(name)) for name in PEER_HEADERS)
        return instance, epoch, features

    def _oversized(self) -> Trouble:
        return Trouble("oversized", f"the body is over {self._max_body} bytes")

    def _end(self, outcome: Outcome) -> None:
        if self._parser is None:
            return
        self._parser = None  # it refers to this object
        refusal = self._attempt.refusal
        if refusal is not None and isinstance(outcome, Trouble):
            outcome = refusal
        if not self.outcome.done():
            self.outcome.set_result(outcome)


def named_by_system(reason: Exception) -> Trouble:
    """Say in the machine's words what went wrong; never with anything that the peer sent."""
    if isinstance(reason, ForbiddenAddress):
        return Trouble("forbidden", str(reason))
    if isinstance(reason, socket.gaierror):
        return Trouble("dns", f"the name was not found: {(reason.strerror or '?').lower()}")
    if isinstance(reason, OSError) and reason.errno is not None:
        name = errno.errorcode.get(reason.errno, str(reason.errno))
        return Trouble(WHAT_OF.get(reason.errno, "other"), f"{os.strerror(reason.errno).lower()} ({name})")
    return Trouble("other", type(reason).__name__)


def _text(value: bytes | None) -> str | None:
    """Escape what is not ASCII."""
    return None if value is None else value.decode("ascii", "backslashreplace")


# Which life of the peer, which snapshot, and what it can do; in the order of `PeerHeaders`.
PEER_HEADERS = (b"x-sglang-disaggregation-instance-id", b"x-disagg-epoch", b"x-disagg-features")
KNOWN = frozenset((*PEER_HEADERS, b"content-encoding", b"transfer-encoding", b"content-length"))
NO_HTTP = Trouble("other", "the answer is not HTTP/1.1")
HTTP_FIRST, HTTP_UPGRADE, HTTP_OK, HTTP_REDIRECT, HTTP_LAST = 100, 101, 200, 300, 999
VERSIONS = ("1.0", "1.1")
PREFIX = b"HTTP/1."
MAX_LINE = 8190
MAX_LINES = 256
MAX_HEAD = 65_536
SHORT_BODY = 1024
# A body may come in chunks of a byte, six or more on the wire; and an empty one in a chunk with a long extension.
OVERHEAD = 8
SPARE = 16_384
WHAT_OF = {
    errno.ECONNREFUSED: "refused",
    errno.ECONNRESET: "reset",
    errno.EPIPE: "reset",
    errno.ECONNABORTED: "reset",
    errno.ETIMEDOUT: "timeout",
}
