"""The HTTP transport: carries out what the machine asks for, on one thread of its own.

The machine (`disagg._core.Resolver` or `disagg.reference`) puts commands into a queue and rings a bell; the
transport takes them, makes one HTTP request of each, and hands status and bytes back as facts. It decides
nothing: no retries, no parsing, no meaning of a status.

Importing this package imports neither asyncio nor aiohttp; `Transport.start()` does.
"""

from disagg.transport.options import Machine, Report, TransportOptions
from disagg.transport.thread import Transport

__all__ = ["Machine", "Report", "Transport", "TransportOptions"]
