"""Python programs in processes of their own, given as text."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager


@contextmanager
def running_python(code, *flags):
    """A program that may import from here, until the block ends; what Python is given besides the code are `flags`."""
    process = subprocess.Popen(
        [sys.executable, *flags, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run_python(code, *flags):
    """Run a program with warnings as errors, or with `flags`; returns status, stdout and stderr."""
    with running_python(code, *(flags or ("-Werror",))) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err
