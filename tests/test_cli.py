"""The command line: help, version, and refusals of one line with status 2."""

import subprocess
import sys

import pytest

import disagg


def disagg_command(*arguments, timeout=60):
    command = [sys.executable, "-m", "disagg.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def refusal(*arguments):
    """Run a command that must be refused; returns its one line."""
    ended = disagg_command(*arguments)
    assert ended.returncode == 2, ended
    assert ended.stdout == ""
    lines = ended.stderr.splitlines()
    assert len(lines) == 1, ended.stderr
    assert "Traceback" not in lines[0]
    return lines[0]


def test_version_is_the_package_s():
    ended = disagg_command("--version")
    assert (ended.returncode, ended.stdout) == (0, f"disagg {disagg.__version__}\n")


def test_help_names_the_commands():
    ended = disagg_command("--help")
    assert ended.returncode == 0
    assert "simulate" in ended.stdout


def test_no_arguments_show_the_help():
    ended = disagg_command()
    assert "simulate" in ended.stdout + ended.stderr
    assert ended.returncode == 2


def test_simulate_help_states_units_and_defaults(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    ended = disagg_command("simulate", "--help")
    assert ended.returncode == 0
    for option in ("--scenario", "--peers", "--rate", "--trace", "--speedup", "--attempts", "--json"):
        assert option in ended.stdout
    text = " ".join(ended.stdout.replace("│", " ").split())
    assert "[default: mixed]" in text
    assert "[default: 300]" in text
    assert "Milliseconds of a scheduling cycle" in text
    assert "[default: 4]" in text


def test_an_unknown_command_is_one_line():
    assert refusal("simulatte").startswith("disagg: No such command 'simulatte'")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--rate", "-1"), "--rate -1: must be from 0.1 to 20000 requests a second"),
        (("--rate", "nan"), "--rate nan: must be from 0.1 to 20000 requests a second"),
        (("--duration", "0"), "--duration 0: must be from 0.5 to 3600 seconds"),
        (("--attempts", "0"), "--attempts 0: must be from 1 to 1000"),
        (("--interval-s", "0"), "--interval-s 0: must be from 0.01 to 60 seconds"),
        (("--total-timeout-s", "inf"), "--total-timeout-s inf: must be from 0.01 to 60 seconds"),
        (("--work-us", "1000"), "--work-us 1000: must be less than the cycle of 1 ms"),
        (("--kv", "gqa"), "--kv gqa: must be one of mha, mla, hybrid_mla"),
        (("--speedup", "2"), "--speedup 2: needs --trace; generated arrivals have --rate"),
        (
            ("--scenario", "healthy", "--healthy", "3"),
            "--healthy 3: the healthy scenario has all 12 peers healthy",
        ),
        (("--scenario", "dark", "--healthy", "13"), "--healthy 13: must be at most --peers 12"),
        (
            ("--peers", "8"),
            "--peers 8 --healthy 4: the mixed scenario needs at least 1 healthy peer and 8 others, one of each kind",
        ),
        (("--rate", "1000", "--duration", "3000"), "--rate 1000 --duration 3000: more than 1000000 requests"),
        (
            ("--json", "/no/such/folder/x.json"),
            "--json /no/such/folder/x.json: there is no folder /no/such/folder",
        ),
    ],
)
def test_a_wrong_option_is_refused_by_name_value_and_rule(arguments, line):
    assert refusal("simulate", *arguments) == f"disagg simulate: {line}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rate", "abc"), ("--rate", "valid")),
        (("--scenario", "weird"), ("--scenario", "weird", "healthy", "mixed", "dark")),
        (("--no-such-option",), ("--no-such-option",)),
        (("--trace",), ("--trace",)),
        (("surplus",), ("surplus",)),
    ],
)
def test_what_the_parser_refuses_is_one_line_too(arguments, words):
    line = refusal("simulate", *arguments)
    assert line.startswith("disagg simulate: ")
    assert all(word in line for word in words)


def test_a_trace_and_a_rate_exclude_each_other(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n')
    assert refusal("simulate", "--trace", trace, "--rate", "5") == (
        "disagg simulate: --rate 5: a trace has its own; use --speedup"
    )


def test_a_bad_trace_is_refused_with_file_and_line(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": "soon"}\n')
    assert refusal("simulate", "--trace", trace) == f"disagg simulate: {trace}:2: has no input_length"


def test_a_json_path_that_is_a_folder_is_refused_before_the_run(tmp_path):
    assert refusal("simulate", "--json", tmp_path) == f"disagg simulate: --json {tmp_path}: is a folder"


def test_importing_the_package_loads_neither_typer_nor_the_network():
    code = "import sys, disagg; print(sorted({'typer', 'rich', 'httptools', 'asyncio'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
