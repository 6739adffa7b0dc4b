"""Real runs of `disagg simulate`: all processes, over HTTP, for a few seconds."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import disagg
from disagg.simulate import report

BUDGET_S = 60  # the most that a short run may take on a busy machine


def command(*arguments):
    return [sys.executable, "-m", "disagg.cli", "simulate", *map(str, arguments)]


def run(tmp_path, *arguments):
    """Run to the end; returns its status, its text and its JSON."""
    path = tmp_path / "report.json"
    ended = subprocess.run(
        command("--json", path, *arguments), capture_output=True, text=True, timeout=BUDGET_S, check=False
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    result = json.loads(path.read_text())
    assert ended.returncode == (0 if result["ok"] else 1), ended.stdout
    assert [left.name for left in tmp_path.iterdir()] == ["report.json"]
    return ended.returncode, ended.stdout, result


def ends(result):
    """Total of all ends of a report."""
    outcomes = result["outcomes"].values()
    return sum(each["routed"] + sum(each["failed"].values()) for each in outcomes)


def children_of(pid):
    """The pids and command lines of the processes whose parent is `pid`."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == pid:
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    return found


def is_gone(pid):
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def started(tmp_path, *arguments):
    """Start a run and wait until requests have arrived; returns the process and its children."""
    errors = tmp_path / "stderr"
    with errors.open("wb") as stream:
        process = subprocess.Popen(
            command("--duration", 30, *arguments), stdout=subprocess.PIPE, stderr=stream, text=True
        )
    deadline = time.monotonic() + BUDGET_S
    while not re.search(r"arrived [1-9]", errors.read_text()):
        assert process.poll() is None, errors.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process, children_of(process.pid), errors


def finished(process, errors):
    """Wait for its end; returns status, stdout and stderr."""
    out, _ = process.communicate(timeout=20)
    return process.returncode, out, errors.read_text()


def test_mixed_ends_as_the_ledger_says_with_every_kind_of_failure(tmp_path):
    status, text, result = run(tmp_path, "--duration", 6)
    assert (status, result["unexpected"], result["interrupted"]) == (0, 0, None), text
    assert {*result["failures"]} == {
        "unreachable", "not_ready", "protocol_error", "incompatible", "cooldown", "dp_rank_timeout",
    }  # fmt: skip
    assert ends(result) == result["requests"]["arrived"] == result["requests"]["planned"] > 1000
    assert "4 attempts 0.5 s apart, total timeout 1 s" in text
    assert "dp-rank timeout 5 s" in text
    assert result["events"] == {"peer_restarted": 1}
    assert "unexpected 0" in text.splitlines()[-1]
    assert max(map(len, text.splitlines())) <= 100
    silent = result["reasons"]["05-silent"]["unreachable"]
    addr = result["peers"]["05-silent"]["addr"]
    assert silent == f"{addr}: gave up after 4 attempts: no complete answer within 1 s"
    assert result["outcomes"]["07-restarting"]["failed"] == {}


@pytest.mark.parametrize("kv", ["mha", "mla", "hybrid_mla"])
def test_healthy_peers_route_everything(tmp_path, kv):
    status, text, result = run(tmp_path, "--duration", 2, "--scenario", "healthy", "--peers", 7, "--kv", kv, "--quiet")
    assert (status, text) == (0, "")
    assert result["failures"] == {}
    assert result["time_to_route_ms"]["count"] == result["requests"]["arrived"]
    assert {*result["http"]} >= {"topology", "dp_ranks", "endpoint", "heartbeat"}


def test_dark_peers_route_nothing(tmp_path):
    status, text, result = run(
        tmp_path,
        "--duration",
        3,
        "--scenario",
        "dark",
        "--peers",
        3,
        "--attempts",
        2,
        "--total-timeout-s",
        0.5,
    )
    assert status == 0, text
    assert {*result["failures"]} == {"unreachable", "protocol_error", "cooldown"}
    assert result["time_to_route_ms"]["count"] == 0


def test_a_trace_is_played(tmp_path):
    trace = tmp_path / "in" / "trace.jsonl"
    trace.parent.mkdir()
    record = '{"timestamp": %d, "input_length": 10, "output_length": 10}\n'
    trace.write_text("".join(record % (stamp * 10) for stamp in range(300)))
    out = tmp_path / "out"
    out.mkdir()
    status, text, result = run(
        out, "--trace", trace, "--speedup", 2, "--scenario", "healthy", "--peers", 2, "--no-progress"
    )
    assert status == 0, text
    assert result["requests"] == {"planned": 300, "arrived": 300}
    assert "trace trace.jsonl x 2" in text


def test_the_report_has_the_keys_that_its_schema_describes(tmp_path):
    _, _, result = run(tmp_path, "--duration", 1, "--scenario", "healthy", "--peers", 1)
    lines = re.findall(r"^    (\S.*?)(?:   +\S|$)", report.__doc__, flags=re.MULTILINE)
    described = {name.split(".")[0] for line in lines for name in line.split(", ")}
    assert described == set(result)
    assert (result["schema"], result["disagg"]) == (1, disagg.__version__)
    assert result["expected"] == {"00-healthy": {"routed": [result["requests"]["arrived"]] * 2, "failed": {}}}
    for name in ("cycle_ms", "control_cycle_ms", "call_ms", "time_to_route_ms", "healthy_time_to_route_ms"):
        assert {*result[name]} == {"count", "p50", "p99", "p99_9", "max"}
        assert result[name]["count"] > 0
    assert result["options"]["attempts"] == 4


def test_the_ledger_is_no_echo_of_the_resolver(tmp_path):
    """A resolver that is told another decode rank, fewer attempts and a shorter timeout is found out."""
    copy = tmp_path / "package" / "disagg"
    shutil.copytree(Path(disagg.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = copy / "simulate" / "scheduler.py"
    text = source.read_text()
    for right, wrong in (
        ("engine_rank=DECODE_RANK", "engine_rank=DECODE_RANK + 1"),
        ("max_attempts=options.attempts", "max_attempts=options.attempts - 1"),
        ("dp_rank_timeout_s=options.dp_rank_timeout_s", "dp_rank_timeout_s=1.0"),
    ):
        assert right in text
        text = text.replace(right, wrong)
    source.write_text(text)
    path = tmp_path / "report.json"
    ended = subprocess.run(
        command("--duration", 3, "--no-progress", "--json", path),
        capture_output=True, text=True, timeout=BUDGET_S, check=False,
        env=os.environ | {"PYTHONPATH": str(copy.parent)},
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    complaints = " ".join(json.loads(path.read_text())["complaints"])
    assert "the route had to be" in complaints
    assert "too early" in complaints
    assert "unexpected" in ended.stdout.splitlines()[-1]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_early_with_its_report(tmp_path, number, status):
    process, children, errors = started(tmp_path)
    process.send_signal(number)
    ended, text, _ = finished(process, errors)
    assert ended == status, text
    conclusion = text.splitlines()[-1]
    assert re.fullmatch(rf"ended early by {number.name}: all \d+ requests ended exactly once.*", conclusion)
    assert all(map(is_gone, children))


def test_a_second_signal_stops_at_once_without_orphans(tmp_path):
    process, children, errors = started(tmp_path)
    process.send_signal(signal.SIGINT)
    while "once more to stop at once" not in errors.read_text():
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    ended, text, _ = finished(process, errors)
    # It may just have been done with the orderly end.
    assert ended == 130
    assert "there is no report" in errors.read_text() or "ended early" in text
    assert all(map(is_gone, children))


@pytest.mark.parametrize("role", ["scheduler", "feeder", "prefill"])
def test_a_process_that_dies_is_named_and_the_others_end(tmp_path, role):
    process, children, errors = started(tmp_path)
    victim = next(pid for pid, line in children.items() if f"simulate.child {role}" in line)
    os.kill(victim, signal.SIGKILL)
    ended, _, error = finished(process, errors)
    assert ended == 1
    assert re.search(rf"{role}\S* process \(pid {victim}\) was ended by SIGKILL; there is no report\n\Z", error)
    assert all(map(is_gone, children))


def test_children_end_when_the_parent_is_killed(tmp_path):
    process, children, _ = started(tmp_path)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while not all(map(is_gone, children)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
