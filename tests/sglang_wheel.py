"""SGLang's published wheels for the interop tests: fetched once by pip, checked, unpacked outside the project.

`site("0.5.23")` returns the folder that `real_sglang.load` takes. Several processes may ask at once: one fetches, the
others wait for it.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

SHA256 = {
    "0.5.23": "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937",
    "0.5.10": "ac8855a5d57dac8831fee526bca5212f1ae451f378e2ab08b3baecbc4deb4076",
    "0.5.9": "8a936c4d25fea605f44254e533cff2144c73ceffbc1f8738aba393461bbb64d1",
}
# What SGLang's control-plane modules import.
NEEDED = ("aiohttp", "msgspec", "numpy", "psutil", "requests", "zmq")
TRIES = 3
TRY_TIMEOUT_S = 180.0


class WheelUnavailable(Exception):
    """The wheel could not be fetched: no network, no pip, or not the file it should be."""


def site_or_skip(version: str) -> Path:
    """The unpacked wheel of `version`, or a skip of the running test that says what is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"SGLang's modules import {', '.join(missing)}: pip install 'disagg[test]'")
    try:
        return site(version)
    except WheelUnavailable as why:
        pytest.skip(str(why))


def site(version: str, folder: Path | None = None) -> Path:
    """The unpacked wheel of `version`, a key of SHA256, below `folder` (default: the user's cache).

    Raises:
        WheelUnavailable: after three tries.
    """
    folder = folder or cache_folder()
    unpacked = folder / f"sglang-{version}"
    if unpacked.is_dir():
        return unpacked
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"sglang-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not unpacked.is_dir():
            _fetch(version, unpacked)
    return unpacked


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "disagg"


def _fetch(version: str, unpacked: Path) -> None:
    failures = []
    for _ in range(TRIES):
        scratch = Path(tempfile.mkdtemp(dir=unpacked.parent, prefix="fetch-"))
        try:
            wheel = _download(version, scratch)
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(scratch / "site")
            # In one step: a folder of the final name is a whole one.
            (scratch / "site").rename(unpacked)
        except (WheelUnavailable, OSError, zipfile.BadZipFile) as failure:
            failures.append(str(failure))
        else:
            return
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    raise WheelUnavailable(f"no wheel of sglang {version} after {TRIES} tries: {failures[-1]}")


def _download(version: str, scratch: Path) -> Path:
    platform = ["--python-version", "3.11", "--implementation", "cp", "--platform", "manylinux_2_34_x86_64"]
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary", ":all:", *platform, "--dest", str(scratch), f"sglang=={version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise WheelUnavailable(f"pip took more than {TRY_TIMEOUT_S:.0f} s") from None
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise WheelUnavailable(done.stderr.strip()[-500:] or f"pip ended with {done.returncode}")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != SHA256[version]:
        raise WheelUnavailable(f"{wheels[0].name} has sha256 {digest}, not {SHA256[version]}")
    return wheels[0]
