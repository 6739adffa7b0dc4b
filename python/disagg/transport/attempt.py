"""One request on its way: what it holds, when it has to be over, and why it was ended."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import asyncio

    from disagg.transport.connection import Connection
    from disagg.transport.gate import Gate
    from disagg.transport.options import Command, PeerHeaders

__all__ = ["Answer", "Attempt", "Ended"]


class Answer(NamedTuple):
    """An answer of any status; `body` is empty where that is not 2xx and the body is long or broken."""

    status: int
    body: bytes
    headers: PeerHeaders = (None, None, None)


class Ended(enum.Enum):
    """Why the driver cancelled the task of an attempt."""

    NOT = enum.auto()
    TIMED_OUT = enum.auto()
    ABANDONED = enum.auto()


class Attempt:
    """The state of one request, shared by the driver, the connector and the exchange; loop thread only.

    `due` is when it times out, in the loop's time: until it is connected the connect timeout's end, then the
    total timeout's. The driver looks at it when the earlier one is over, so setting it is all it takes.
    `refusal` is the answer once a status other than 2xx was read; it stands however the rest ends. A `gate`, where
    there is one, decides when the answer is read.
    """

    __slots__ = (
        "answered",
        "command",
        "connect_s",
        "due",
        "ended",
        "final_due",
        "gate",
        "had_grace",
        "held",
        "refusal",
        "reused",
        "task",
        "total_s",
        "wants_fresh",
    )

    def __init__(
        self, command: Command, *, now: float, connect_s: float, total_s: float, gate: Gate | None = None
    ) -> None:
        self.command = command
        self.connect_s = connect_s
        self.total_s = total_s
        self.final_due = now + total_s
        self.due = now + min(connect_s, total_s)
        self.answered: bool | None = False
        self.ended = Ended.NOT
        self.gate = gate
        self.had_grace = False
        self.held: Connection | None = None
        self.refusal: Answer | None = None
        self.reused = False
        self.wants_fresh = False
        self.task: asyncio.Task[None] | None = None

    def on_connected(self, protocol: Connection, *, reused: bool) -> None:
        """Take in which connection the request goes out on."""
        self.leave_gate()  # a second try: the first connection was closed under it
        if self.gate is not None:
            self.gate.hold(self, protocol)
        self.held = protocol
        self.reused = reused
        self.due = self.final_due

    def is_held_back(self) -> bool:
        """Whether something of the answer has come, and the gate has not let it in yet."""
        return self.gate is not None and self.gate.holds_back(self)

    def leave_gate(self) -> None:
        """Take in that the connection, if there is one, is no longer used."""
        if self.gate is not None and self.held is not None:
            self.gate.let_go(self, self.held)

    def end(self, why: Ended) -> None:
        """Cancel the task, for this reason; the first reason stays."""
        if self.ended is Ended.NOT and self.task is not None:
            self.ended = why
            self.task.cancel()

    def timeout_text(self) -> str:
        """Say which timeout it was."""
        if self.held is None:
            return f"no connection within {min(self.connect_s, self.total_s):g} s"
        return f"no complete answer within {self.total_s:g} s"
