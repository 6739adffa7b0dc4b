"""What the README shows is run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from conftest import ROOT
from disagg.cli.app import run as run_command

README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_block_runs_as_it_stands(number):
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", blocks("python")[number]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr


MAP_COMMANDS = [line.split("#")[0].split() for line in README.splitlines() if line.startswith("disagg map")]


@pytest.mark.parametrize("command", [command for command in MAP_COMMANDS if "http" not in " ".join(command)])
def test_shown_mapping_commands_answer(command, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert run_command(command[1:]) == 0
    assert "what each decode rank" in capfd.readouterr().out or (tmp_path / "map.svg").exists()


def test_commands_are_those_of_ci():
    ci = (ROOT / ".ci" / "run").read_text()
    install, test = blocks("sh")[1].split("#")[0].strip().split(" && ")
    assert install.split()[-1] in ci
    assert test in ci


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
