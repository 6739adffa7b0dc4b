"""The child processes of a run: started, watched, and gone at the end whatever happens."""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from types import TracebackType

from disagg.simulate.channel import Channel, Done, Finish, Go, Ready

__all__ = ["Child", "ChildError", "Crew"]

# How long children may take to end after they were told to, before they are killed.
GOODBYE_S = 5.0


class ChildError(Exception):
    """A process of the run ended on its own: `role`, `pid` and `status` as subprocess has it."""

    def __init__(self, role: str, pid: int, status: int | None) -> None:
        if status is None:
            how = "does not answer"
        elif status < 0:
            how = f"was ended by {_signal_name(-status)}"
        else:
            how = f"ended with status {status}"
        super().__init__(f"the {role} process (pid {pid}) {how}")
        self.role = role
        self.pid = pid
        self.status = status


class Child:
    """One process, and the parent's end of its channel."""

    def __init__(self, role: str, kind: str, descriptors: Iterable[int]) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "disagg.simulate.child", kind, str(theirs.fileno())]
        # A process group of its own: the terminal's Ctrl-C reaches the parent only.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *descriptors),
            process_group=0,
        )
        theirs.close()
        self.role = role
        self.channel = Channel(ours)
        self.result: object = None
        self.done = False

    def died(self) -> ChildError:
        """Describe its end, waiting a moment for it to be complete."""
        try:
            status: int | None = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            status = None
        return ChildError(self.role, self.process.pid, status)


class Crew:
    """All children of one run. Leaving the context ends those that are left."""

    def __init__(self) -> None:
        self.children: dict[str, Child] = {}

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children.values():
            child.channel.close()
        deadline = time.monotonic() + (GOODBYE_S if kind is None else 0.2)
        for child in self.children.values():
            try:
                child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()

    def start(self, role: str, kind: str, setup: object, descriptors: Iterable[int] = ()) -> None:
        """Start a process and hand it its set-up."""
        child = self.children[role] = Child(role, kind, descriptors)
        self._send(child, setup)

    def ready(self, timeout_s: float) -> dict[int, str]:
        """Wait until every child is set up; returns the addresses of all peers. Raises ChildError."""
        addresses: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        for child in self.children.values():
            while not select.select([child.channel], [], [], 0.1)[0]:
                self.check()
                if time.monotonic() > deadline:
                    raise child.died()
            message = self._receive(child)
            if not isinstance(message, Ready):
                raise child.died()
            addresses |= message.addresses
        return addresses

    def go(self, go: Go) -> None:
        """Tell everybody when to start."""
        for child in self.children.values():
            self._send(child, go)

    def finish(self, role: str) -> None:
        """Tell one child that the run is over."""
        self._send(self.children[role], Finish())

    def wait(self, timeout_s: float) -> None:
        """Wait for results, at most `timeout_s`. Raises ChildError for a child that is gone without one."""
        waiting = [child for child in self.children.values() if not child.done]
        for channel in select.select([child.channel for child in waiting], [], [], timeout_s)[0]:
            child = next(child for child in waiting if child.channel is channel)
            message = self._receive(child)
            if isinstance(message, Done):
                child.result, child.done = message.result, True
        self.check()

    def result(self, role: str, timeout_s: float) -> object:
        """Wait for one child's result. Raises ChildError when it does not come in time."""
        child = self.children[role]
        deadline = time.monotonic() + timeout_s
        while not child.done:
            if time.monotonic() > deadline:
                raise child.died()
            self.wait(0.1)
        return child.result

    def check(self) -> None:
        """Raise ChildError for a child that ended before its result came."""
        for child in self.children.values():
            if not child.done and child.process.poll() is not None and not _readable(child):
                raise child.died()

    def _send(self, child: Child, message: object) -> None:
        try:
            child.channel.send(message)
        except OSError:
            raise child.died() from None

    def _receive(self, child: Child) -> object:
        try:
            return child.channel.receive()
        except EOFError:
            raise child.died() from None


def _readable(child: Child) -> bool:
    return bool(select.select([child.channel], [], [], 0)[0])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
