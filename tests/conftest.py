"""Shared set-up of the tests: where shared/ is, what a skip means in CI, and the hypothesis profiles."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
REQUIRE_ALL = os.environ.get("DISAGG_REQUIRE_ALL") == "1"

settings.register_profile("default", max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("default"), max_examples=10_000)
settings.load_profile("default")


def shared_folder() -> Path:
    return Path(os.environ.get("DISAGG_SHARED", ROOT.parent / "shared"))


def pytest_sessionstart(session):
    # A shell without job control starts what runs in the background with SIGINT ignored, and our children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if REQUIRE_ALL and not (shared_folder() / "DESIGN.md").is_file():
        pytest.exit(f"DISAGG_REQUIRE_ALL=1, but there is no shared folder at {shared_folder()}", returncode=1)


def pytest_collection_modifyitems(config, items):
    long_profile = config.getoption("--hypothesis-profile", default=None) == "long"
    if config.option.markexpr or long_profile or os.environ.get("DISAGG_LONG") == "1":
        return
    chosen = [item for item in items if "long" not in item.keywords]
    config.hook.pytest_deselected(items=[item for item in items if "long" in item.keywords])
    items[:] = chosen


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if REQUIRE_ALL and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under DISAGG_REQUIRE_ALL=1: {report.longrepr}"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with the design, the recorded data and the SGLang tools."""
    folder = shared_folder()
    if not folder.is_dir():
        pytest.skip(f"no shared folder at {folder}; set DISAGG_SHARED")
    return folder


@pytest.fixture
def host():
    """Hostile peers on loopback."""
    from hostile import HostileHost

    with HostileHost() as host:
        yield host


@pytest.fixture
def map_engines(capfd):
    """Run `disagg map` in this process; returns (status, stdout, stderr)."""

    from disagg.cli.app import run

    def call(*arguments):
        status = run(["map", *map(str, arguments)])
        out, err = capfd.readouterr()
        return status, out, err

    return call
