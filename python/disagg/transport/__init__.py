"""The HTTP transport: carries out what the machine asks for, on a thread of its own or on a loop that runs.

The machine (`disagg._core.Resolver` or `disagg.reference`) puts commands into a queue and rings a bell; the
transport takes them, makes one HTTP request of each, and hands status and bytes back as facts. It decides
nothing: no retries, no parsing, no meaning of a status.

Importing this package imports neither asyncio nor httptools; `start()` does.
"""

from disagg.transport.on_loop import LoopTransport
from disagg.transport.options import Machine, Report, TransportOptions
from disagg.transport.starter import Starter
from disagg.transport.thread import Transport

__all__ = ["LoopTransport", "Machine", "Report", "Starter", "Transport", "TransportOptions"]
