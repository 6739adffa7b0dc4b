"""What the README shows is run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from conftest import ROOT

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


def test_commands_are_those_of_ci():
    ci = (ROOT / ".ci" / "run").read_text()
    install, test = blocks("sh")[1].split("#")[0].strip().split(" && ")
    assert install.split()[-1] in ci
    assert test in ci


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
