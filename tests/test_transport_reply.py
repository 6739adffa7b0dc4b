"""Answers byte by byte: the same however they are cut, and strict where two readers could differ."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.transport.attempt import Answer, Attempt
from disagg.transport.options import Command
from disagg.transport.reply import MAX_HEAD, MAX_LINE, MAX_LINES, Reply, Trouble

NOT_HTTP = Trouble("other", "the answer is not HTTP/1.1")
CUT = Trouble("cut", "the body ended before it was complete")
NONE = (None, None, None)


def read(*pieces, end=False, error=None, max_body=1000):
    """What comes of an answer in these pieces; returns (outcome or None, whether the connection may be used again)."""
    loop = asyncio.new_event_loop()
    attempt = Attempt(Command(1, "topology", "a:1", "GET", "/", None, max_body), now=0.0, connect_s=1.0, total_s=1.0)
    reply = Reply(attempt, loop.create_future())
    for piece in pieces:
        if not reply.outcome.done():
            reply.feed(piece)
    if end:
        reply.on_end(error)
    loop.close()
    return reply.outcome.result() if reply.outcome.done() else None, reply.is_complete


def head(*lines, status="200 OK", version="1.1"):
    return "\r\n".join((f"HTTP/{version} {status}", *lines, "", "")).encode("latin-1")


CHUNKED = head("Transfer-Encoding: chunked")
TWO = head("Content-Length: 2")


@pytest.mark.parametrize(
    ("data", "answer", "keeps"),
    [
        (TWO + b"{}", Answer(200, b"{}"), True),
        (CHUNKED + b"1\r\n{\r\n1;ext=x\r\n}\r\n0\r\nTrailer: x\r\n\r\n", Answer(200, b"{}"), True),
        (head("Content-Length: 2", "Connection: close") + b"{}", Answer(200, b"{}"), False),
        (head("Content-Length: 2", version="1.0") + b"{}", Answer(200, b"{}"), False),
        (head("Content-Length: 2", "Connection: keep-alive", version="1.0") + b"{}", Answer(200, b"{}"), True),
        (head(status="204 No Content"), Answer(204, b""), True),
        (head(status="304 Not Modified"), Answer(304, b""), True),
        (head("Content-Length: 0"), Answer(200, b""), True),
        (head(status="100 Continue") * 3 + TWO + b"{}", Answer(200, b"{}"), True),
        (head("Link: </x>", status="103 Early Hints") + TWO + b"{}", Answer(200, b"{}"), True),
        (b"\r\n\r\n" + TWO + b"{}", Answer(200, b"{}"), True),
        (head("Content-Length: 9", status="404 Not Found") + b"not found", Answer(404, b"not found"), True),
        (head("content-LENGTH:2") + b"{}", Answer(200, b"{}"), True),
        (head("Content-Length: 2", "Content-Encoding: identity") + b"{}", Answer(200, b"{}"), True),
        (head("Content-Length: 2", "Content-Encoding:") + b"{}", Answer(200, b"{}"), True),
        (TWO + b"{}HTTP/1.1 200 OK\r\n", Answer(200, b"{}"), False),
        (TWO + b"{}\x00junk", Answer(200, b"{}"), False),
    ],
)
def test_a_whole_answer(data, answer, keeps):
    assert read(data) == (answer, keeps)


@pytest.mark.parametrize(
    "data",
    [
        head("Content-Length: 2", "Content-Length: 3") + b"{}",
        head("Content-Length: 2", "Content-Length: 2") + b"{}",
        head("Content-Length: 2", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n",
        head("Transfer-Encoding: chunked", "Content-Length: 2") + b"2\r\n{}\r\n0\r\n\r\n",
        head("Content-Length: +2") + b"{}",
        head("Content-Length: 2, 2") + b"{}",
        head("Content-Length : 2") + b"{}",
        head("Content-Length: 0x2") + b"{}",
        head("Content-Length: 99999999999999999999999") + b"{}",
        head("A: b", " folded", "Content-Length: 2") + b"{}",
        head("A: b\0c", "Content-Length: 2") + b"{}",
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}",
        head("no colon", "Content-Length: 2") + b"{}",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"2\n{}\n0\n\n",
        CHUNKED + b"fffffffffffffffff\r\n",
        head("Content-Length: 2", version="2.0") + b"{}",
        head("Content-Length: 2", version="0.9") + b"{}",
        head("Content-Length: 2", status="099 OK") + b"{}",
        head("Content-Length: 2", status="20 OK") + b"{}",
        head("Upgrade: x", "Connection: Upgrade", status="101 Switching Protocols"),
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x16\x03\x01\x00",
    ],
)
def test_what_two_readers_could_take_for_two_answers_is_none(data):
    assert read(data) == (NOT_HTTP, False)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "GZIP", "identity, gzip"])
def test_a_body_in_a_coding_that_was_not_asked_for_is_not_read(coding):
    outcome, keeps = read(head("Content-Length: 2", f"Content-Encoding: {coding}") + b"{}")
    assert (outcome.what, keeps) == ("encoding", False)
    outcome, _ = read(head(f"Transfer-Encoding: {coding}, chunked") + b"2\r\n{}\r\n0\r\n\r\n")
    assert outcome.what == "encoding"


class TestBounds:
    def test_a_body_of_the_limit_is_read_and_one_byte_more_is_not(self):
        for framed in (
            head("Content-Length: 1000") + b"x" * 1000,
            CHUNKED + b"3e8\r\n" + b"x" * 1000 + b"\r\n0\r\n\r\n",
        ):
            assert read(framed)[0] == Answer(200, b"x" * 1000)
            assert read(framed, max_body=999)[0].what == "oversized"
        assert read(head("Content-Length: 1001"))[0].message == "the body is announced with 1001 bytes, over 1000"

    def test_a_body_in_chunks_of_a_byte_is_read(self):
        assert read(CHUNKED + b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n")[0] == Answer(200, b"x" * 1000)

    def test_what_surrounds_a_body_is_bounded_too(self):
        for filler in (b"1;" + b"x" * 1000 + b"\r\n{\r\n", b"0" * 1000 + b"1\r\n{\r\n"):
            outcome, _ = read(CHUNKED, *[filler] * 100, max_body=200)
            assert outcome is not None
        trailers = [b"A: " + b"x" * 1000 + b"\r\n"] * 100
        assert read(CHUNKED, b"0\r\n", *trailers)[0].what == "oversized"

    def test_a_line_of_the_head(self):
        fits = "A: " + "x" * (MAX_LINE - 5)
        assert read(head(fits, "Content-Length: 0"))[0] == Answer(200, b"")
        too_long = Trouble("oversized", f"a header is over {MAX_LINE} bytes")
        assert read(head(fits + "xx", "Content-Length: 0"))[0] == too_long
        assert read(b"HTTP/1.1 200 " + b"O" * MAX_LINE)[0] == too_long, "and need not end"

    def test_the_number_and_the_size_of_headers(self):
        assert read(head(*["A: b"] * (MAX_LINES - 5), "Content-Length: 0"))[0] == Answer(200, b"")
        assert read(head(*["A: b"] * MAX_LINES))[0].what == "other"
        assert read(head(*["A: " + "x" * 8000] * 9))[0].what == "other"

    def test_interim_answers_and_blank_lines_have_the_bounds_of_one_head(self):
        again = head(status="100 Continue")
        assert read(*[again] * (MAX_HEAD // len(again) + 2))[0].what == "other"
        assert read(*[b"\r\n" * 100] * (MAX_HEAD // 200 + 2))[0].what == "other"


class TestEnds:
    def test_a_body_without_a_length_ends_with_the_connection(self):
        assert read(head(), b"{}", end=True) == (Answer(200, b"{}"), False)
        assert read(head(), b"{}") == (None, False)
        assert read(head(), b"{}", end=True, error=ConnectionResetError(104, "reset"))[0] == CUT

    @pytest.mark.parametrize(
        "data", [TWO, TWO + b"{", CHUNKED, CHUNKED + b"2\r\n{}\r\n", CHUNKED + b"2\r\n{}\r\n0\r\n"]
    )
    def test_half_an_answer_is_cut(self, data):
        assert read(data, end=True)[0] == CUT

    @pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\n", head(status="100 Continue")])
    def test_an_end_before_the_answer_is_a_drop(self, data):
        outcome, _ = read(data, end=True)
        assert (outcome.what, outcome.dropped) == ("reset", True)
        outcome, _ = read(data, end=True, error=ConnectionResetError(104, "reset"))
        assert outcome == Trouble("reset", "connection reset by peer (ECONNRESET)", dropped=True)

    @pytest.mark.parametrize(
        "data",
        [
            head("Content-Length: 10", status="503 Busy") + b"half",
            head("Content-Length: 1025", status="503 Busy"),
            head("Content-Length: 2", "Content-Encoding: gzip", status="503 Busy") + b"{}",
            head("Transfer-Encoding: chunked", status="503 Busy") + b"zz\r\n",
        ],
    )
    def test_a_refusal_counts_whatever_becomes_of_its_body(self, data):
        assert read(data, end=True) == (Answer(503, b""), False)


def test_headers_that_concern_the_peer_come_with_any_status():
    says = ("X-Disagg-Epoch: 7", "X-SGLang-Disaggregation-Instance-ID: a\xff", "x-disagg-FEATURES: table", "X-Other: b")
    for status in ("200 OK", "503 Busy"):
        outcome, _ = read(head(*says, "X-Disagg-Epoch: 8", "Content-Length: 0", status=status))
        assert outcome.headers == ("a\\xff", "7", "table"), "the first of each"
    trailer = CHUNKED + b"0\r\nX-Disagg-Epoch: 7\r\n\r\n"
    assert read(trailer)[0].headers in (NONE, (None, "7", None))


ANSWERS = st.sampled_from(
    [
        TWO + b"{}", CHUNKED + b"1\r\n{\r\n1;e\r\n}\r\n0\r\nT: x\r\n\r\n", head(status="100 Continue") + TWO + b"{}",
        head("Content-Length: 9", status="404 Not Found") + b"not found", head() + b"until the end",
        head("Content-Length: 2", "Content-Length: 3") + b"{}", CHUNKED + b"2\r\n{}\r\nzz", b"\r\n\r\n" + TWO + b"{}",
        head("Content-Length: 2000") + b"x" * 2000, CHUNKED + b"7d0\r\n" + b"x" * 2000 + b"\r\n0\r\n\r\n",
        head("A: " + "x" * 9000), TWO + b"{}tail", head("Content-Encoding: gzip", "Content-Length: 2") + b"{}",
        head("Content-Length: 2", status="503 Busy") + b"no", b"SSH-2.0\r\n", b"HTTP/1.1 200 OK\nA: b\n\n", b"",
    ]
)  # fmt: skip


@given(ANSWERS | st.binary(max_size=200) | st.builds(lambda a, b: a + b, ANSWERS, st.binary(max_size=50)), st.data())
def test_an_answer_is_the_same_however_it_is_cut_into_pieces(data, draw):
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=12)))
    pieces = [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    whole, _ = read(data, end=True)
    assert read(*pieces, end=True)[0] == whole
    bytewise, _ = read(*[data[i : i + 1] for i in range(len(data))], end=True)
    assert bytewise == whole
