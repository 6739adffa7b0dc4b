"""New connections: to a number at once, to a name by the addresses that were looked up and checked."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import TYPE_CHECKING

from disagg.transport.names import literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from disagg.transport.names import Names, Place

__all__ = ["dial"]


async def dial(names: Names, host: str, port: int) -> socket.socket:
    """Return a connected socket, which does not block.

    Raises OSError, for the last address if there are several. An address that takes longer than STAGGER_S has company
    from then on by the next one: where a name has two families, one of them may lead nowhere.
    """
    known = literal(host, port)
    places = [known] if known is not None else await names.resolve(host, port)
    if not places:
        raise socket.gaierror(socket.EAI_NONAME, "the name has no address")
    return await (_connect(places[0]) if len(places) == 1 else _connect_to_first(places))


async def _connect(place: Place) -> socket.socket:
    family, sockaddr = place
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, sockaddr)
    except BaseException:
        sock.close()
        raise
    return sock


async def _connect_to_first(places: Sequence[Place]) -> socket.socket:
    left = deque(places[:MOST_PLACES])
    trying: set[asyncio.Task[socket.socket]] = set()
    failure: BaseException | None = None
    try:
        while left or trying:
            if left:
                trying.add(asyncio.create_task(_connect(left.popleft())))
            timeout = STAGGER_S if left else None
            done, trying = await asyncio.wait(trying, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            connected = [task.result() for task in done if task.exception() is None]
            for spare in connected[1:]:
                spare.close()
            if connected:
                return connected[0]
            failure = next((task.exception() for task in done), failure)
    finally:
        for task in trying:
            task.add_done_callback(_close_unwanted)
            task.cancel()
    raise OSError(*failure.args) if isinstance(failure, OSError) else OSError("no address could be connected to")


def _close_unwanted(task: asyncio.Task[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


STAGGER_S = 0.25
MOST_PLACES = 8
