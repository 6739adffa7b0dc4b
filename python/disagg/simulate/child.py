"""Entry of every child process: `python -m disagg.simulate.child ROLE FD`, started by the runner only."""

from __future__ import annotations

import signal
import socket
import sys

from disagg.simulate.channel import Channel

__all__ = ["main"]


def main(role: str, descriptor: int) -> None:
    """Run one role until the parent says so, or is gone."""
    # Ctrl-C is the parent's to handle; a child ends when its parent says so or closes the channel.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        setup = channel.receive()
        if role == "prefill":
            from disagg.simulate import prefill  # noqa: PLC0415  (each role loads only what it needs)

            prefill.run(setup, channel)
        elif role == "feeder":
            from disagg.simulate import feeder  # noqa: PLC0415

            feeder.run(setup, channel)
        else:
            from disagg.simulate import scheduler  # noqa: PLC0415

            scheduler.run(setup, channel)
    except (EOFError, BrokenPipeError):
        sys.exit(3)  # the parent is gone: nobody is left to tell


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
