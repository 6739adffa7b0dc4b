"""How large the benches are: whole with `--benchmark-enable`, a tenth as tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def scale(request) -> float:
    """Factor of every count: 1 when measuring, 0.1 when the benches run as tests."""
    return 1.0 if request.config.getoption("--benchmark-enable") else 0.1
