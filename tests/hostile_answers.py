"""Hostile HTTP answers, drawn at random from families of what can be wrong; the same seed draws the same ones.

An `Answers` is what one peer says on each of its connections: the bytes for its first request, its second, ...; after
the last ones it closes, resets, or holds the connection. Most families tell which kinds of failure may come of them.
"""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass, replace

from hostile import TOPOLOGY, response

ENDPOINT = b'{"rank_ip": "10.0.0.7", "rank_port": 41000}'
ROOM = b"ROOM_ASKED"
"""As long as the room that takes its place."""
ENDS = ["close", "close", "close", "reset", "hold"]
UNUSABLE = frozenset({"unreachable", "protocol_error"})
"""Of an answer that cannot be read: nothing at all, or a part of one."""
ANY = frozenset({"unreachable", "not_ready", "protocol_error", "not_a_registry", "incompatible", "dp_rank_timeout",
                 "endpoint_timeout", "rank_missing", "dp_rank_out_of_range", "request_timeout"})  # fmt: skip


@dataclass(frozen=True)
class Answers:
    """`kinds` are the failures that may come of it; `may_resolve` if chance can make it a good answer."""

    family: str
    parts: tuple[bytes, ...]
    then: str
    kinds: frozenset[str] = ANY
    may_resolve: bool = False

    async def __call__(self, connection):
        """Behave so: what a `hostile.Peer` is given."""
        for part in self.parts:
            if not await connection.request():
                return
            await connection.send(part)
        if self.then == "reset":
            connection.reset()
        elif self.then == "hold":
            await connection.hold()


def draw(rng: random.Random, room: int) -> Answers:
    """One peer's answers, of whom the dp rank of `room`, of ten digits, may be asked."""
    drawn = rng.choice(FAMILIES)(rng)
    return replace(drawn, parts=tuple(part.replace(ROOM, b"%d" % room) for part in drawn.parts))


def one(rng, family, data, kinds=ANY, then=None):
    return Answers(family, (data,), then or rng.choice(ENDS), kinds)


# -- the head


def bad_status_line(rng):
    lines = [
        b"", b"\r\n", b"\r\n" * rng.randrange(2, 500), b"HTTP/1.1", b"HTTP/1.1 ", b"HTTP/1.1 abc OK", b"HTTP/1.1 20 OK",
        b"HTTP/1.1 2000 OK", b"HTTP/9.9 200 OK", b"HTTP/1.1200 OK", b"http/1.1 200 OK", b"HTTP/1.1 -200 OK",
        b"HTTP/1.1 \xb2\xb0\xb0 OK", b"HTTP/1.1 200" + b" " * 9000, b"HTTP/1.1 " + b"2" * rng.randrange(4, 9000),
        b"GET / HTTP/1.1", b"ICY 200 OK", b"SSH-2.0-OpenSSH_9.6", b"220 mail ESMTP", b"\x16\x03\x01\x02\x00",
        b"HTTP/1.1\t200\tOK", b"HTTP/1.1 200 \x1b[2J\x00", b"HTTP/\x00.1 200 OK",
    ]  # fmt: skip
    rest = rng.choice([b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n{}\n", b"\n\n", b""])
    return one(rng, "bad status line", rng.choice(lines) + rest)


def other_status(rng):
    code = rng.choice([100, 101, 199, 204, 206, 299, 300, 304, 400, 401, 403, 404, 405, 408, 409, 413, 415, 418, 422,
                       429, 500, 501, 502, 503, 504, 511, 599, 600, 999, rng.randrange(100, 1000)])  # fmt: skip
    body = rng.choice([b"", b"no", b"\x00\x1b[31m\r\n", b"x" * rng.randrange(5000), "\u202e\u2028".encode()])
    return one(rng, "other status", response(f"{code} {text(rng)}", body), then=rng.choice(["close", "hold"]))


def redirect(rng):
    code = rng.choice([300, 301, 302, 303, 305, 307, 308])
    to = rng.choice(
        ["http://127.0.0.1:1/", "/route", "//", "file:///etc/passwd", "\x1b]0;x\x07", "http://[", "x" * 5000]
    )
    return one(rng, "redirect", response(f"{code} Found", b"", f"Location: {to}"), ANY & {"not_a_registry", *UNUSABLE})


def informational_flood(rng):
    code = rng.choice([100, 102, 103, 199])
    flood = f"HTTP/1.1 {code} Wait\r\n\r\n".encode() * rng.randrange(1, 2000)
    return one(rng, "1xx flood", flood, UNUSABLE | {"not_a_registry"})


def wrong_length(rng):
    size = len(TOPOLOGY)
    length = rng.choice([
        -1, "", " ", "+5", "1e3", "0x10", "1 2", "5,5", "abc", "\xb2", "9" * rng.randrange(19, 4000), 2**31, 2**63,
        2**64, size - 1, size // 2, 1, 0, size + 1, 65_536, 65_537, "NaN", "1_0", "\x00",
    ])  # fmt: skip
    return one(rng, "wrong length", response(length=length), UNUSABLE)


def two_lengths(rng):
    lengths = [rng.randrange(2 * len(TOPOLOGY)) for _ in range(rng.randrange(2, 4))]
    if len(set(lengths)) == 1:
        lengths[0] += 1
    head = "".join(f"{rng.choice(['Content-Length', 'content-length', 'CONTENT-LENGTH'])}: {n}\r\n" for n in lengths)
    return one(rng, "two lengths", b"HTTP/1.1 200 OK\r\n" + head.encode() + b"\r\n" + TOPOLOGY, UNUSABLE)


def bad_chunks(rng):
    size = f"{len(TOPOLOGY):x}".encode()
    chunks = rng.choice([
        b"zz\r\n", b"-5\r\n{}\r\n", b"fffffffffffffffff\r\n{}", b"7fffffff\r\n" + TOPOLOGY, b"0\r\n", b"0\r\n\r\n",
        size + b"\r\n" + TOPOLOGY, size + b"\r\n" + TOPOLOGY + b"\r\n", size + b"\r\n{}\r\n0\r\n\r\n",
        b"1\r\n{}\r\n0\r\n\r\n", b"2;" + b"x" * 9000 + b"\r\n{}\r\n0\r\n\r\n", b"2\r\n{}\r\n" * rng.randrange(3, 3000),
        b"\r\n", b"2\n{}\n0\n\n", b"0" * 300 + b"2\r\n{}\r\n0\r\n\r\n", noise(rng, 300),
    ])  # fmt: skip
    both = rng.choice([b"", b"", b"Content-Length: 2\r\n"])
    coding = rng.choice([b"chunked", b"chunked", b"chunked, chunked", b"gzip, chunked", b"\x0bchunked", b"identity"])
    head = b"HTTP/1.1 200 OK\r\n" + both + b"Transfer-Encoding: " + coding + b"\r\n\r\n"
    return one(rng, "bad chunks", head + chunks, UNUSABLE)


def strange_headers(rng):
    headers = rng.choice([
        [b"X: " + b"a" * rng.randrange(8191, 200_000)], [b"a" * rng.randrange(8191, 50_000) + b": x"],
        [b"X%d: a" % n for n in range(rng.randrange(2000, 12_000))], [b"no colon"], [b": no name"], [b"X : y"],
        [b"X: a\x00b"], [b"\x00: a"], [b"X\xff: a"], [b" folded"], [b"\tX: folded"], [b"X: a\rY: b"],
        [b"\x7f\x1b[0m: x"], [noise(rng, 60)],
    ])  # fmt: skip
    body = rng.choice([b"{}", b"", b"null", TOPOLOGY[:-1]])
    head = b"HTTP/1.1 200 OK\r\n" + b"".join(header + b"\r\n" for header in headers)
    return one(rng, "strange headers", head + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def hostile_peer_headers(rng):
    name = rng.choice(["X-SGLang-Disaggregation-Instance-ID", "X-Disagg-Epoch", "X-Disagg-Features"])
    value = rng.choice(
        [b"\xff\xfe", b"\xc3\x28", b"a" * 8000, b"-1", b"9" * 400, b"table, " * 900, "\u202e".encode(), b""]
    )
    data = response(body=b"{}").replace(b"\r\n", b"\r\n" + name.encode() + b": " + value + b"\r\n", 1)
    return one(rng, "hostile peer headers", data, ANY & {"protocol_error", "unreachable"})


def compressed(rng):
    coding = rng.choice(["gzip", "deflate", "br", "zstd", "x-gzip", "gzip, gzip", "\x1b[5m", "?" * 4000])
    return one(rng, "compressed", response("200 OK", gzip.compress(TOPOLOGY), f"Content-Encoding: {coding}"), UNUSABLE)


# -- the whole


def cut(rng):
    whole = response()
    return one(rng, "cut", whole[: rng.randrange(len(whole))], UNUSABLE)


def all_noise(rng):
    return one(rng, "noise", noise(rng, rng.choice([1, 10, 100, 5000, 100_000])))


def mutated(rng):
    """A good answer with a few bytes changed, which may not matter."""
    data = bytearray(response())
    for _ in range(rng.randrange(1, 12)):
        data[rng.randrange(len(data))] = rng.choice([rng.randrange(256), 0, 10, 13, 32, 255])
    return Answers("mutated", (bytes(data), response(body=ENDPOINT)), rng.choice(ENDS), may_resolve=True)


# -- the body


def no_topology(rng):
    depth = rng.choice([100, 1000, 20_000, 60_000])
    body = rng.choice([
        b"", b" ", b"null", b"true", b"0", b'""', b"[]", b"{}", b"{", b"[[[", b"nul", b"{}{}", TOPOLOGY + b"x",
        b"[" * depth, b'{"a":' * (depth // 5), b"[" * depth + b"]" * (depth // 10), b'{"a":' * 100 + b"1" + b"}" * 100,
        b"\xff\xfe{}", b"\x00", TOPOLOGY.decode().encode("utf-16"), TOPOLOGY[: rng.randrange(1, len(TOPOLOGY))],
        b"<html>\x1b[2J</html>", b"x" * rng.randrange(1, 200_000), b"9" * 60_000, b'"' + b"\\u0000" * 900 + b'"',
        noise(rng, rng.randrange(1, 3000)), b"1e999999", b"-", b"[1e5,]", b"// comment\n{}", b"{'attn_tp_size': 4}",
    ])  # fmt: skip
    return one(rng, "no topology", response(body=body), UNUSABLE)


def bad_field(rng):
    field = rng.choice(["attn_tp_size", "attn_cp_size", "dp_size", "pp_size", "page_size", "follow_bootstrap_room"])
    bad = rng.choice([
        "-1", "1.5", "8.0", '"-4"', '" 4"', '"4_0"', '"0x4"', "[]", "{}", '"\\u0664"', "1e3", '"\\u001b[2J"', '"\\n"',
        "9" * rng.randrange(20, 5000), "-" + "9" * 400, '"' + "a" * rng.randrange(100, 50_000) + '"', '"\\ud800"',
        "[" * 90 + "]" * 90, '"\\u202e\\u2028"', "99999999999", '"' + "9" * 4300 + '"', "NaN", "Infinity",
    ])  # fmt: skip
    said = json.loads(TOPOLOGY) | {field: "#"}
    body = json.dumps(said).replace('"#"', bad).encode("utf-8", "surrogatepass")
    return one(rng, "bad field", response(body=body), UNUSABLE)


def duplicate_keys(rng):
    key = rng.choice(list(json.loads(TOPOLOGY)))
    body = TOPOLOGY[:-1] + f', "{key}": {rng.randrange(1, 9)}'.encode() + b"}"
    return one(rng, "duplicate keys", response(body=body), UNUSABLE)


def absurd_sizes(rng):
    size = rng.choice([0, 3, 7, 65_535, 65_536, 10**7, 2**31, 2**63, 2**64, 10**30])
    field = rng.choice(["attn_tp_size", "attn_cp_size", "pp_size", "page_size"])
    body = json.dumps(json.loads(TOPOLOGY) | {"dp_size": rng.choice([1, 65_535]), field: size}).encode()
    return Answers("absurd sizes", (response(body=body),), rng.choice(ENDS), may_resolve=True)


def null_sizes(rng):
    body = json.dumps(dict.fromkeys(json.loads(TOPOLOGY)) | {"page_size": 64}).encode()
    return one(rng, "null sizes", response(body=body), ANY & {"not_ready", *UNUSABLE})


def misfit(rng):
    other = rng.choice([{"page_size": 63}, {"kv_cache_dtype": "\x1b[31m\u2028fp8"}, {"pp_size": 3, "page_size": 1}])
    kinds = frozenset({"incompatible", *UNUSABLE})
    return one(rng, "misfit", response(body=json.dumps(json.loads(TOPOLOGY) | other).encode()), kinds)


# -- later answers


def garbage_later(rng):
    """A good topology; what is asked next on that connection gets something hostile."""
    later = rng.choice([f for f in FAMILIES if f not in (garbage_later, mutated, absurd_sizes, null_sizes)])(rng)
    said = rng.choice([{}, {"dp_size": 4, "follow_bootstrap_room": False}])
    first = response(body=json.dumps(json.loads(TOPOLOGY) | {"attn_tp_size": 1} | said).encode())
    return Answers("garbage later", (first, *later.parts), later.then)


def bad_rank(rng):
    body = rng.choice([
        b'{"rank_ip": "\\u001b[2J", "rank_port": 1}', b'{"rank_ip": "10.0.0.7"}', b'{"rank_ip": 5, "rank_port": 5}',
        b'{"rank_ip": "a", "rank_port": 9e4}', b'{"rank_ip": "", "rank_port": 80}', b'{"rank_ip": "a", "rank_port": 0}',
        b'{"rank_ip": "a\\nb", "rank_port": 80}', b'{"rank_ip": "a", "rank_ip": "b", "rank_port": 80}', b"[]",
        b'{"rank_ip": "' + b"a" * 70_000 + b'", "rank_port": 80}', b'{"rank_ip": null, "rank_port": null}',
    ])  # fmt: skip
    first = response(body=json.dumps(json.loads(TOPOLOGY) | {"attn_tp_size": 1}).encode())
    kinds = frozenset({"endpoint_timeout", *UNUSABLE})
    return Answers("bad rank", (first, response(body=body)), rng.choice(ENDS), kinds)


def bad_dp_rank(rng):
    body = rng.choice([
        b"{}", b"[]", b'{"ROOM": -1}', b'{"ROOM": 4}', b'{"ROOM": 70000}', b'{"ROOM": "x"}', b'{"ROOM": 1.0}', b"{",
        b'{" ROOM": 0}', b'{"ROOM": 0, "ROOM": 1}', b'{"ROOM": null}', b'{"' + b"9" * 900 + b'": 0}', b'{"ROOM": true}',
    ])  # fmt: skip
    said = json.loads(TOPOLOGY) | {"attn_tp_size": 1, "dp_size": 4, "follow_bootstrap_room": False}
    first, later = response(body=json.dumps(said).encode()), response(body=body.replace(b"ROOM", ROOM))
    return Answers("bad dp rank", (first, *[later] * 20), rng.choice(ENDS))


def noise(rng, size):
    return rng.randbytes(size)


def text(rng):
    return rng.choice(["OK", "", "\x1b[2J", "\xff", "a" * 5000, "\x00", "two  words"])


FAMILIES = [
    bad_status_line, other_status, redirect, informational_flood, wrong_length, two_lengths, bad_chunks,
    strange_headers, hostile_peer_headers, compressed, cut, all_noise, mutated, no_topology, bad_field, duplicate_keys,
    absurd_sizes, null_sizes, misfit, garbage_later, bad_rank, bad_dp_rank,
]  # fmt: skip
