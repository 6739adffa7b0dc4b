"""The feeder process: writes each arrival into the logs of the scheduler and the control when it is due."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from disagg.simulate.channel import Channel, Done, Go, Ready
from disagg.simulate.plan import PlannedRequest
from disagg.simulate.shared import Arrival, ArrivalLog, Field, SharedMemory, StatusPage

__all__ = ["FeederSetup", "run"]

# The longest sleep, so that a stop is seen soon.
NAP_S = 0.05


@dataclass(frozen=True, slots=True)
class FeederSetup:
    """What the feeder gets; `memories` are (descriptor, size) of the arrival logs and of the status page."""

    requests: tuple[PlannedRequest, ...]
    logs: tuple[tuple[int, int], ...]
    status: tuple[int, int]


def run(setup: object, channel: Channel) -> None:
    """Feed the whole plan, or as much as comes before the parent says stop."""
    if not isinstance(setup, FeederSetup):
        raise TypeError(f"the feeder cannot be set up with {type(setup).__name__}")
    logs = [ArrivalLog(SharedMemory(size, descriptor)) for descriptor, size in setup.logs]
    status = StatusPage(SharedMemory(setup.status[1], setup.status[0]))
    channel.send(Ready({}))
    go = channel.receive()
    if not isinstance(go, Go):
        return
    parent = os.getppid()
    for number, planned in enumerate(setup.requests):
        if not _wait(go.start_ns + int(planned.due_s * 1e9), status, parent):
            break
        arrival = Arrival(number, planned.peer, planned.room, planned.preset)
        for log in logs:
            log.write(arrival)
        status[Field.SENT] = number + 1
    status[Field.SENT_ALL] = 1
    channel.send(Done(status[Field.SENT]))
    channel.receive()  # Finish, or the parent is gone


def _wait(due_ns: int, status: StatusPage, parent: int) -> bool:
    """Sleep until `due_ns`; False when the run was stopped or the parent is gone."""
    while (left_s := (due_ns - time.monotonic_ns()) / 1e9) > 0:
        if status[Field.STOP] or os.getppid() != parent:
            return False
        time.sleep(min(left_s, NAP_S))
    return not status[Field.STOP]
