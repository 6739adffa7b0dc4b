"""How large the benches are (whole with `--benchmark-enable`, a tenth as tests), and SGLang's own code beside ours."""

from __future__ import annotations

import gc
import importlib
import sys
from types import SimpleNamespace

import pytest

import sglang_wheel

# Those of the tests: a skip is a failure in CI, and where shared/ is.
from conftest import pytest_runtest_makereport, shared  # noqa: F401


@pytest.fixture
def scale(request) -> float:
    """Factor of every count: 1 when measuring, 0.1 when the benches run as tests."""
    return 1.0 if request.config.getoption("--benchmark-enable") else 0.1


@pytest.fixture
def settled():
    """Call it to have what was made so far out of the collector's way, as engines do once they are up."""

    def freeze():
        gc.collect()
        gc.freeze()

    yield freeze
    gc.unfreeze()


@pytest.fixture(scope="session")
def sglang(shared) -> SimpleNamespace:  # noqa: F811  (the fixture above)
    """SGLang 0.5.23's shipped control-plane modules, in this process once: both sides are measured in one run.

    Its loader answers imports of what is not installed until the process ends: its queue imports lazily.
    """
    return tool(shared, "real_sglang").load(sglang_wheel.site_or_skip("0.5.23"))


@pytest.fixture(scope="session")
def rig(sglang, shared):  # noqa: F811
    """What makes managers and queues of that SGLang; its configuration is process-wide, so there is one."""
    return tool(shared, "sglang_rig").Rig(sglang)


def tool(shared, name):  # noqa: F811
    """A module of shared/tools."""
    sys.path.insert(0, str(shared / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)
