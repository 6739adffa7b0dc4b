"""A process with requests pending ends as it would without them: quietly, at once, by the signal that it got."""

from __future__ import annotations

import signal
import time

import pytest

from hostile import HostileHost, silent
from python_process import run_python, running_python

BUSY = """
import asyncio, atexit, os, signal, sys, threading, time
import disagg
resolver = disagg.Resolver(disagg.DecodeRank(attn_tp_size=1, engine_rank=0), total_timeout_s=60)
for room in range(100):
    resolver.add(object(), PEERS[room % len(PEERS)], room)
while resolver.stats()["in_flight"] < len(PEERS):
    time.sleep(0.001)
"""


@pytest.fixture(scope="module")
def busy():
    """The start of a program with requests at silent peers."""
    with HostileHost() as host:
        yield BUSY.replace("PEERS", str([host.peer(silent()).addr for _ in range(8)]))


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("threading.Thread(target=sys.exit).start()", 0),
        ("atexit.register(resolver.close)", 0),
        ("resolver.myself = resolver", 0),
        # A scheduler that sits in poll while the interpreter goes.
        ("threading.Thread(target=lambda: [resolver.poll() for _ in iter(int, 1)], daemon=True).start()", 0),
        ("threading.Thread(target=lambda: [resolver.add(object(), '127.0.0.1:1', 7) for _ in iter(int, 1)],"
         " daemon=True).start(); time.sleep(0.1)", 0),
    ],
)  # fmt: skip
def test_exit_with_requests_pending_is_quiet_and_does_not_hang(busy, end, status):
    began = time.monotonic()
    assert run_python(f"{busy}\n{end}") == (status, "", "")
    assert time.monotonic() - began < 30, "far less than the requests' time limit"


def test_uncaught_exception_with_requests_pending_shows_itself_and_no_other(busy):
    status, _, err = run_python(f"{busy}\nraise ValueError('of the program')")
    assert status == 1
    assert err.count("Traceback") == 1
    assert err.endswith("ValueError: of the program\n")


def test_sigterm_has_its_default_action(busy):
    polls = f"{busy}\nprint('ready', flush=True)\nwhile True: resolver.poll(); time.sleep(0.001)"
    with running_python(polls, "-Werror") as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == -signal.SIGTERM


ENGINES = {
    "thread": """
try:
    with resolver:
        print('ready', flush=True)
        while True:
            resolver.poll()
            time.sleep(0.001)
except KeyboardInterrupt:
    print('interrupted', resolver.health().reason)
""",
    "event_loop": """
async def main():
    async with disagg.Resolver(
        disagg.DecodeRank(attn_tp_size=1, engine_rank=0), event_loop=asyncio.get_running_loop(), total_timeout_s=60
    ) as resolver:
        globals()['resolver'] = resolver
        for room, addr in enumerate(PEERS):
            resolver.add(object(), addr, room)
        while resolver.stats()["in_flight"] < len(PEERS):
            await asyncio.sleep(0.001)
        print('ready', flush=True)
        while True:
            resolver.poll()
            await asyncio.sleep(0.001)
resolver.close()
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print('interrupted', resolver.health().reason)
""",
}


@pytest.mark.parametrize("engine", ENGINES)
def test_ctrl_c_is_a_keyboard_interrupt_and_a_clean_end(host, engine):
    peers = str([host.peer(silent()).addr for _ in range(8)])
    # Who runs tests in the background may have them inherit that it is ignored.
    default = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    with running_python(default + (BUSY + ENGINES[engine]).replace("PEERS", peers), "-Werror") as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("interrupted the resolver was closed\n", "")
    assert process.returncode == 0
