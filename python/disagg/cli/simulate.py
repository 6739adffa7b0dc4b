"""`disagg simulate`: options in, exit status out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from disagg.simulate.crew import ChildError
from disagg.simulate.options import Options, Scenario
from disagg.simulate.plan import make_plan
from disagg.simulate.report import Report, write_json
from disagg.simulate.runner import simulate as run_simulation
from disagg.simulate.text import preamble, render
from disagg.usage import KvName, UsageError

__all__ = ["simulate"]

_DEFAULT = Options()
_PEERS, _LOAD, _RETRY, _LOOP, _OUTPUT = "Peers", "Load", "Retry and timeouts", "Scheduler loop", "Output"


def simulate(
    *,
    scenario: Annotated[
        Scenario,
        typer.Option(
            help="healthy: all are well. mixed: at least one each of healthy, slow start, silent, refusing, "
            "restarting with another TP size, rubbish, wrong page size, dp rank late, dp rank never. "
            "dark: those that are not healthy are silent, refuse or talk rubbish.",
            rich_help_panel=_PEERS,
        ),
    ] = _DEFAULT.scenario,
    peers: Annotated[int, typer.Option(help="Prefill engines.", rich_help_panel=_PEERS)] = _DEFAULT.peers,
    healthy: Annotated[
        int | None,
        typer.Option(
            help="How many of them are healthy; by default all in healthy, 4 in mixed, 0 in dark.",
            rich_help_panel=_PEERS,
        ),
    ] = _DEFAULT.healthy,
    rate: Annotated[
        float | None,
        typer.Option(
            help=f"Requests a second: Poisson, a fifth of them in bursts.  \\[default: {_DEFAULT.rate:g}]",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            help="Seconds of arrivals; by default a whole trace, "
            f"or {Options.DEFAULT_DURATION_S:g} s of generated ones.",
            rich_help_panel=_LOAD,
        ),
    ] = _DEFAULT.duration,
    seed: Annotated[int, typer.Option(help="Seed of all that is drawn.", rich_help_panel=_LOAD)] = _DEFAULT.seed,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Take arrival times from this file: Mooncake's JSONL, plain or gzipped.",
            rich_help_panel=_LOAD,
        ),
    ] = _DEFAULT.trace,
    speedup: Annotated[
        float, typer.Option(help="Divide the trace's times by this.", rich_help_panel=_LOAD)
    ] = _DEFAULT.speedup,
    attempts: Annotated[
        int, typer.Option(help="Failed attempts before a peer is given up.", rich_help_panel=_RETRY)
    ] = _DEFAULT.attempts,
    interval_s: Annotated[
        float, typer.Option(help="Seconds from the start of an attempt to the next.", rich_help_panel=_RETRY)
    ] = _DEFAULT.interval_s,
    min_wait_s: Annotated[
        float,
        typer.Option(help="Seconds that a request waits at least before it fails so.", rich_help_panel=_RETRY),
    ] = _DEFAULT.min_wait_s,
    cooldown_s: Annotated[
        float, typer.Option(help="Seconds before a peer that was given up is probed.", rich_help_panel=_RETRY)
    ] = _DEFAULT.cooldown_s,
    connect_timeout_s: Annotated[
        float, typer.Option(help="Seconds to connect.", rich_help_panel=_RETRY)
    ] = _DEFAULT.connect_timeout_s,
    total_timeout_s: Annotated[
        float, typer.Option(help="Seconds for a whole HTTP request.", rich_help_panel=_RETRY)
    ] = _DEFAULT.total_timeout_s,
    dp_rank_timeout_s: Annotated[
        float, typer.Option(help="Seconds for a request's dp rank to become known.", rich_help_panel=_RETRY)
    ] = _DEFAULT.dp_rank_timeout_s,
    heartbeat_interval_s: Annotated[
        float, typer.Option(help="Seconds between heartbeats of a known peer.", rich_help_panel=_RETRY)
    ] = _DEFAULT.heartbeat_interval_s,
    kv: Annotated[
        str, typer.Option(help="KV kind of the decode: mha, mla or hybrid_mla.", rich_help_panel=_LOOP)
    ] = _DEFAULT.kv,
    cycle_ms: Annotated[
        float, typer.Option(help="Milliseconds of a scheduling cycle.", rich_help_panel=_LOOP)
    ] = _DEFAULT.cycle_ms,
    work_us: Annotated[
        float, typer.Option(help="Microseconds of Python work in each cycle.", rich_help_panel=_LOOP)
    ] = _DEFAULT.work_us,
    json: Annotated[
        Path | None, typer.Option(help="Write all of the report to this file.", rich_help_panel=_OUTPUT)
    ] = _DEFAULT.json,
    progress: Annotated[
        bool,
        typer.Option(
            " /--no-progress",
            help="Show no progress while it runs.",
            rich_help_panel=_OUTPUT,
            show_default=False,
        ),
    ] = True,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing but errors.", rich_help_panel=_OUTPUT)
    ] = False,
) -> int:
    """Run a decode scheduler against prefill engines over real HTTP, and check the end of every request.

    Prefill engines on this machine's loopback, most of them in some trouble; one scheduler loop that places
    requests on them and must never wait; and a ledger that knows, without asking, how each request must end.

    Exit status: 0 when every request ended exactly once and as it had to, 1 when not, 2 for a wrong option or
    trace, 130 when Ctrl-C ended it early and nothing was unexpected until then.
    """
    try:
        if trace is not None and rate is not None:
            raise UsageError(f"--rate {rate:g}: a trace has its own; use --speedup")
        options = Options(
            scenario=scenario,
            peers=peers,
            healthy=healthy,
            rate=_DEFAULT.rate if rate is None else rate,
            duration=duration,
            seed=seed,
            trace=trace,
            speedup=speedup,
            attempts=attempts,
            interval_s=interval_s,
            min_wait_s=min_wait_s,
            cooldown_s=cooldown_s,
            connect_timeout_s=connect_timeout_s,
            total_timeout_s=total_timeout_s,
            dp_rank_timeout_s=dp_rank_timeout_s,
            heartbeat_interval_s=heartbeat_interval_s,
            kv=cast("KvName", kv),  # the check of all options refuses other names
            cycle_ms=cycle_ms,
            work_us=work_us,
            json=json,
        )
        return _run(options, progress=progress and not quiet, quiet=quiet)
    except UsageError as error:
        return _complain(str(error), 2)
    except ChildError as error:
        return _complain(f"{error}; there is no report", 1)
    except KeyboardInterrupt:
        return _complain("stopped at once; there is no report", 130)


def _run(options: Options, *, progress: bool, quiet: bool) -> int:
    plan = make_plan(options)
    if not quiet:
        print("\n".join(preamble(options)), flush=True)
    report = run_simulation(plan, sys.stderr if progress else None)
    if not quiet:
        print("\n" + render(report), flush=True)
    return _saved(report, options.json)


def _saved(report: Report, path: Path | None) -> int:
    """Write the JSON file, if one is wanted; returns the run's exit status, or 1 when that failed."""
    if path is not None:
        try:
            write_json(report, path)
        except OSError as error:
            return _complain(f"--json {path}: {error.strerror or error}", 1)
    return report.exit_status


def _complain(text: str, status: int) -> int:
    print(f"disagg simulate: {text}", file=sys.stderr)
    return status
