"""Where mutants live: copies of the core and of the Python package in a temporary folder, with their tests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from mutation_row import BadMutation, Mutation

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("DISAGG_SHARED", ROOT.parent / "shared")).resolve()
BUILD_TIMEOUT_S = 600
TEST_TIMEOUT_S = 120
SEED = "1"
"""Of all random draws: a mutant must not be red on one day and green on the next."""
BROKEN_MUTANT = ("NameError", "UnboundLocalError", "AttributeError", "ImportError", "SyntaxError")
UNWANTED = shutil.ignore_patterns("target", "__pycache__", "proptest-regressions", "*.so", "*.pyd", ".*")


class CoreBed:
    """A copy of the Cargo workspace with one target folder for all mutants."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        for name in ("Cargo.toml", "Cargo.lock"):
            shutil.copy(ROOT / name, folder)
        shutil.copytree(ROOT / "rust", folder / "rust", ignore=UNWANTED)
        self.environ = cleaned_environ() | {
            "CARGO_TARGET_DIR": str(folder / "target"),
            # A mutant may leave a variable unused; that must not fail the build where warnings are denied.
            "RUSTFLAGS": "--cap-lints=warn",
            "PROPTEST_RNG_SEED": SEED,
            # Else a failure of one mutant is tried first on the next.
            "PROPTEST_DISABLE_FAILURE_PERSISTENCE": "1",
        }

    def path(self, mutation: Mutation) -> Path:
        return self.folder / mutation.file

    def first_failure(self) -> str | None:
        """Builds and runs the tests: the first that fails, by name. Raises Broken if they do not build or run."""
        cargo = ["cargo", "test", "--locked", "-p", "disagg-core", "--lib"]
        built = run([*cargo, "--no-run"], self.folder, self.environ, BUILD_TIMEOUT_S)
        if built.returncode != 0:
            raise Broken(f"does not compile:\n{tail(built)}")
        ours = ["rank_mapping::", "compat::tests::", "topology::tests::"]
        tested = run([*cargo, "--", *ours], self.folder, self.environ, TEST_TIMEOUT_S)
        summary = re.search(r"^test result: (ok|FAILED)\. (\d+) passed; (\d+) failed", tested.stdout, re.MULTILINE)
        if summary is None or (tested.returncode == 0) != (summary[1] == "ok"):
            raise Broken(f"the tests ended with {tested.returncode} and no result:\n{tail(tested)}")
        if int(summary[2]) + int(summary[3]) == 0:
            raise Broken(f"no test ran:\n{tail(tested)}")
        failed = sorted(re.findall(r"^test (\S+) .*\.\.\. FAILED$", tested.stdout, re.MULTILINE))
        if not failed and tested.returncode != 0:
            raise Broken(f"the tests failed without a name:\n{tail(tested)}")
        return failed[0] if failed else None


class ReferenceBed:
    """A copy of the Python package, with the compiled module of the installed one, and of its tests."""

    FILES = ("test_rank_mapping.py", "test_serve_ranks.py", "test_compat.py")

    def __init__(self, folder: Path):
        self.folder = folder
        # Apart from the tests: their folder is the one of the run, which Python puts in front of PYTHONPATH.
        self.package = folder / "packages" / "disagg"
        shutil.copytree(ROOT / "python" / "disagg", self.package, ignore=UNWANTED)
        compiled = importlib.util.find_spec("disagg._core")
        if compiled is None or compiled.origin is None:
            raise Broken("disagg is not installed, and the reference's tests need its compiled module")
        shutil.copy(compiled.origin, self.package)
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=UNWANTED)
        shutil.copy(ROOT / "pyproject.toml", folder)
        (folder / "benches").mkdir()
        self.environ = cleaned_environ() | {
            "PYTHONPATH": str(self.package.parent),
            "DISAGG_SHARED": str(SHARED),
            # A compiled module is told from a stale one by second and size: two mutants can have both in common.
            "PYTHONDONTWRITEBYTECODE": "1",
            # The summary of a failure ends where the line does, and a long test's name leaves no room for its error.
            "COLUMNS": "400",
        }
        self._check_that_the_copy_is_loaded()

    def _check_that_the_copy_is_loaded(self) -> None:
        ask = "import disagg._core, disagg.reference.mapping as m; print(m.__file__); print(disagg._core.__file__)"
        told = run([sys.executable, "-c", ask], self.folder, self.environ, TEST_TIMEOUT_S)
        places = [Path(line) for line in told.stdout.split()]
        if len(places) != 2 or not all(place.is_relative_to(self.package) for place in places):
            raise Broken(f"the tests would load another disagg than the copy:\n{tail(told)}")

    def path(self, mutation: Mutation) -> Path:
        return self.package.parent / Path(mutation.file).relative_to("python")

    def first_failure(self) -> str | None:
        """Runs the tests: the first that fails. Raises Broken if they do not run to their end."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "--color=no", "-p", "no:cacheprovider"]
        command += [f"--hypothesis-seed={SEED}", *(f"tests/{name}" for name in self.FILES)]
        # Failures that hypothesis keeps would be tried first on the next mutant.
        shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)
        tested = run(command, self.folder, self.environ, TEST_TIMEOUT_S)
        if tested.returncode == 0:
            return None
        failed = re.search(r"^FAILED tests/(\S+)(?: - (.*))?$", tested.stdout, re.MULTILINE)
        if tested.returncode != 1 or failed is None:
            raise Broken(f"pytest ended with {tested.returncode}:\n{tail(tested)}")
        if (failed[2] or "").startswith(BROKEN_MUTANT):
            raise Broken(f"does not run: {failed[2]}")
        return failed[1]


class Broken(Exception):
    """The tests of a bed say nothing about its source: it does not build, or they do not run."""


def first_failure_of(bed: CoreBed | ReferenceBed, mutation: Mutation) -> str | None:
    """The first test that fails with the bug in the bed's copy, which is as before afterwards."""
    path = bed.path(mutation)
    sound = path.read_text()
    mutated = mutation.mutated(sound)
    try:
        path.write_text(mutated)
        return bed.first_failure()
    except Broken as broken:
        raise BadMutation(mutation, str(broken)) from broken
    finally:
        path.write_text(sound)


def cleaned_environ() -> dict[str, str]:
    """Ours, without what would change what the tests are."""
    unwanted = ("PYTEST_", "PROPTEST_", "HYPOTHESIS_", "DISAGG_LONG", "PYTHONPATH", "CARGO_ENCODED_RUSTFLAGS")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}


def run(
    command: list[str], folder: Path, environ: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Runs a command whose whole process group dies with it, also on a timeout and on Ctrl-C."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException as stopped:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself in the meantime
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(stopped, subprocess.TimeoutExpired):
            raise Broken(f"{' '.join(command[:4])} ... took more than {timeout_s} s") from stopped
        raise
    return subprocess.CompletedProcess(command, process.returncode, output)


def tail(ended: subprocess.CompletedProcess[str], lines: int = 30) -> str:
    return "\n".join(ended.stdout.splitlines()[-lines:])
