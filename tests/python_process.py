"""Python programs in processes of their own, given as text."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def start_python(code, *flags):
    """Start a program that may import from here; what Python is given besides the code are `flags`."""
    return subprocess.Popen(
        [sys.executable, *flags, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__)},
    )


def run_python(code, *flags):
    """Run a program with warnings as errors, or with `flags`; returns status, stdout and stderr."""
    process = start_python(code, *(flags or ("-Werror",)))
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err
