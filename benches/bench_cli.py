"""How long a person waits for `disagg map`, and a process for `import disagg`: the interpreter's start included."""

from __future__ import annotations

import subprocess
import sys

import pytest

import disagg
from registry_client import register

PAIRS = {
    "tp 1024 onto tp 512": ("--decode", "tp=1024", "--prefill", "tp=512,dp=2"),
    "tp 512 onto tp 512 pp 2, sharded": ("--decode", "tp=512", "--prefill", "tp=512,pp=2,sharding=yes", "--kv", "mla"),
    "tp 1 onto cp 32 tp 8 pp 4": ("--decode", "tp=1", "--prefill", "tp=8,cp=32,pp=4", "--kv", "hybrid_mla"),
}


@pytest.mark.parametrize("output", ["table", "--full", "--json"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.benchmark(group="disagg map, the whole process")
def bench_map_command(benchmark, pair, output, scale):
    arguments = [*PAIRS[pair], *([] if output == "table" else [output])]
    shown = benchmark.pedantic(disagg_map, args=arguments, rounds=max(1, int(10 * scale)))
    assert ("decode_ranks" if output == "--json" else "what each prefill rank") in shown


@pytest.mark.benchmark(group="disagg map, the whole process")
def bench_map_command_of_a_live_registry(benchmark, scale):
    with disagg.BootstrapServer() as registry:
        register(registry.address, 512)
        arguments = ["--decode", "tp=1024", "--prefill", registry.address]
        shown = benchmark.pedantic(disagg_map, args=arguments, rounds=max(1, int(10 * scale)))
    assert "decode tp 2i and 2i+1 read prefill tp i" in shown


IMPORT = "import sys, disagg; print(*[name for name in ('asyncio', 'httptools', 'typer') if name in sys.modules])"


@pytest.mark.parametrize("code", ["print()", IMPORT], ids=["nothing", "import disagg"])
@pytest.mark.benchmark(group="import, the whole process")
def bench_import(benchmark, code, scale):
    shown = benchmark.pedantic(python, args=(code,), rounds=max(1, int(30 * scale)))
    assert shown == "\n", "it imports none of these"


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def disagg_map(*arguments: str) -> str:
    command = [sys.executable, "-m", "disagg.cli", "map", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
