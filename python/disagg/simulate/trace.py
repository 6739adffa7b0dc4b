"""Arrival times out of a trace file: Mooncake's JSONL, plain or gzipped."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from disagg.usage import UsageError

__all__ = ["MAX_REQUESTS", "TraceError", "read_trace"]

MAX_REQUESTS = 1_000_000
# A trace with the hashes of long prompts has lines of some 10 kB.
MAX_LINE = 4 * 1024 * 1024
GZIP_MAGIC = b"\x1f\x8b"
TOKENS = ("input_length", "output_length")


class TraceError(UsageError):
    """A trace that cannot be used: `path`, `line` (from 1; None when it is no line's fault) and `what`."""

    def __init__(self, path: Path, line: int | None, what: str) -> None:
        super().__init__(f"{path}: {what}" if line is None else f"{path}:{line}: {what}")
        self.path = path
        self.line = line
        self.what = what


def read_trace(path: Path) -> list[float]:
    """Return when each request arrives, in ms, ascending, the first as the trace has it.

    Each line is an object with `timestamp` in ms, `input_length` and `output_length` in tokens; other keys
    are ignored, and so are blank lines. Gzip is known by its first bytes, not by the name.

    Raises TraceError for a file that cannot be read, a line that is not such an object, timestamps that go
    back, no request at all, or more than a million.
    """
    times: list[float] = []
    number = 0
    try:
        with _open(path) as stream:
            for number, line in _lines(path, stream):
                if line.strip():
                    times.append(_timestamp(path, number, line, times[-1] if times else 0.0))
                if len(times) > MAX_REQUESTS:
                    raise TraceError(path, number, f"more than {MAX_REQUESTS} requests")
    except EOFError:
        raise TraceError(path, number + 1, "gzip data ends early") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(path, number + 1, f"bad gzip data: {error}") from None
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error.strerror or error}") from None
    if not times:
        raise TraceError(path, 1, "holds no request")
    return times


def _open(path: Path) -> BinaryIO:
    plain = path.open("rb")
    magic = plain.read(2)
    plain.seek(0)
    if magic != GZIP_MAGIC:
        return plain
    plain.close()
    return cast("BinaryIO", gzip.open(path, "rb"))


def _lines(path: Path, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise TraceError(path, number, f"line is longer than {MAX_LINE} bytes")
        yield number, line


def _timestamp(path: Path, number: int, line: bytes, last: float) -> float:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(path, number, f"not JSON: {error.msg} at column {error.colno}") from None
    except (UnicodeDecodeError, RecursionError, ValueError):
        raise TraceError(path, number, "not JSON in UTF-8") from None
    if not isinstance(record, dict):
        raise TraceError(path, number, f"must be an object, is {_shown(record)}")
    for name in ("timestamp", *TOKENS):
        if name not in record:
            raise TraceError(path, number, f"has no {name}")
    for name in TOKENS:
        if type(record[name]) is not int or record[name] < 0:
            raise TraceError(path, number, f"{name} must be an integer from 0, is {_shown(record[name])}")
    stamp = record["timestamp"]
    # Bounded at 2**53 ms, so that an int becomes a float exactly.
    if type(stamp) not in (int, float) or not math.isfinite(stamp) or not 0 <= stamp <= 2**53:
        raise TraceError(path, number, f"timestamp must be a number of ms from 0, is {_shown(stamp)}")
    if stamp < last:
        raise TraceError(path, number, f"timestamp {stamp:g} goes back: a line above has {last:g}")
    return float(stamp)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
