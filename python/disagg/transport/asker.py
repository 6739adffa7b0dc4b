"""Single questions to a registry, from a program that may wait for the answer: the command line."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from types import TracebackType
from typing import Self

from disagg._core import MAX_TOPOLOGY_BYTES
from disagg.transport.attempt import Answer
from disagg.transport.options import PeerHeaders, TransportOptions
from disagg.transport.secret import Secret
from disagg.transport.thread import Transport

__all__ = ["Asker", "NoAnswer"]


class NoAnswer(Exception):
    """There was no usable HTTP answer; `what` is the transport's word, the text one short line."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(what, message)
        self.what = what
        self.message = message

    def __str__(self) -> str:
        return self.message


class Asker:
    """Asks one question after another over the transport that a Resolver uses, with its limits.

    It is the transport's machine: a question is a command, its answer a fact. For one thread.
    """

    def __init__(self, *, timeout_s: float, token: Secret | None = None) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._commands: deque[tuple[int, str, str, str, str, bytes | None, int, int]] = deque()
        self._facts: queue.SimpleQueue[Answer | NoAnswer] = queue.SimpleQueue()
        self._lock = threading.Lock()
        limits = TransportOptions(
            connect_timeout_s=timeout_s,
            total_timeout_s=timeout_s,
            heartbeat_timeout_s=timeout_s,
            max_in_flight=1,
            token=token,
        )
        self._transport = Transport(self, limits)

    def ask(self, addr: str, path: str, body: bytes | None = None) -> Answer:
        """Return the answer of `addr`, a canonical address: to a GET, or to a POST of `body` (JSON).

        Raises NoAnswer.
        """
        with self._lock:
            self._commands.append(
                (0, "topology", addr, "GET" if body is None else "POST", path, body, MAX_TOPOLOGY_BYTES, 0)
            )
            os.write(self._write_end, b"!")
        if not self._transport.is_alive():  # else its end is the answer, whenever it comes
            raise NoAnswer("other", self._transport.death_reason() or "the transport does not run")
        fact = self._facts.get()
        if isinstance(fact, NoAnswer):
            raise fact
        return fact

    def __enter__(self) -> Self:
        self._transport.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.stop()
        os.close(self._read_end)
        os.close(self._write_end)

    # The transport's side.

    def bell_fileno(self) -> int:
        """Return the descriptor that is readable while a question waits."""
        return self._read_end

    def take_commands(self, limit: int, /) -> list[tuple[int, str, str, str, str, bytes | None, int, int]]:
        """Take the questions that wait."""
        with self._lock:
            taken = [self._commands.popleft() for _ in range(min(limit, len(self._commands)))]
            if taken:
                os.read(self._read_end, len(taken))
        return taken

    def on_response(self, ticket: int, status: int, body: bytes, headers: PeerHeaders, /) -> None:
        """Take in an answer of any status."""
        self._facts.put(Answer(status, body, headers))

    def on_error(self, ticket: int, what: str, message: str, /) -> None:
        """Take in that there was none."""
        self._facts.put(NoAnswer(what, message))

    def on_timer(self) -> None:
        """Do nothing: there are no timers."""

    def next_timer(self) -> float | None:
        """Return None: there are no timers."""
        return None

    def fail_all(self, reason: str, /) -> None:
        """Take in that the transport died."""
        self._facts.put(NoAnswer("other", reason))
