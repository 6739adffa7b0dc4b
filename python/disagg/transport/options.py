"""What the transport is given: its limits, and the machine that it drives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from disagg.transport.secret import Secret

__all__ = ["Command", "Machine", "Report", "TransportOptions"]


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Limits of the transport, all times in seconds.

    The first four are the Resolver's own, whose defaults live there. `connect_timeout_s` covers the name
    look-up and the connection; `total_timeout_s` covers everything from the start of a request to the last
    byte of its body, and `heartbeat_timeout_s` is the same for heartbeats. A request that waits for its
    turn is not yet in its timeout. `max_connection_age_s` bounds how long a connection is reused, so that a
    process replaced behind a stable address is seen; `turn_gap_s` is the least time between two turns.
    `token` is sent as `Authorization: Bearer` with every request. `allows_resolved` says whether an IP address
    that a name resolved to may be dialled, None that every one may; hosts of commands are not asked about, as
    the machine has done that.
    """

    connect_timeout_s: float
    total_timeout_s: float
    heartbeat_timeout_s: float
    max_in_flight: int
    max_in_flight_per_peer: int = 16
    max_connection_age_s: float = 15.0
    max_idle_connections: int = 256
    turn_gap_s: float = 0.001
    token: Secret | None = None
    allows_resolved: Callable[[str], bool] | None = None


class Command(NamedTuple):
    """One command of the machine, as `take_commands` gives it.

    `kind` is "topology", "dp_ranks", "endpoint" or "heartbeat": one HTTP request to http://{addr}{path}; or
    "cancel": abandon the request of that ticket. `wait_ms` is how long the peer was asked to wait before it
    answers, on top of the total timeout.
    """

    ticket: int
    kind: str
    addr: str
    method: str
    path: str
    body: bytes | None
    max_body: int
    wait_ms: int = 0


PeerHeaders: TypeAlias = tuple[str | None, str | None, str | None]
"""Instance, epoch and features of an answer, each None where the header is absent."""


class Machine(Protocol):
    """The driving functions of the machine; all may be called from any thread."""

    def bell_fileno(self) -> int:
        """Return a descriptor that is readable while commands wait to be taken."""

    def take_commands(self, limit: int, /) -> list[tuple[int, str, str, str, str, bytes | None, int, int]]:
        """Take at most `limit` commands; silences the bell with the last one."""

    def on_response(self, ticket: int, status: int, body: bytes, headers: PeerHeaders, /) -> None:
        """Take in a complete answer, of any status, with the headers that concern the peer."""

    def on_error(self, ticket: int, what: str, message: str, /) -> None:
        """Take in that there was no (usable) answer."""

    def on_timer(self) -> None:
        """Fire what is due; spurious calls are harmless."""

    def next_timer(self) -> float | None:
        """Return in how many seconds `on_timer` is due, or None."""

    def fail_all(self, reason: str, /) -> None:
        """Take in that the transport died."""


class Report(Protocol):
    """Tells people what happens; called on the transport's thread, where it must be short and must not raise."""

    def tick(self) -> float:
        """Tell what is new; returns in how many seconds to call again."""

    def end(self) -> None:
        """Tell what is left: the transport ends."""
