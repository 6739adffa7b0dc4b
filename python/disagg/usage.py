"""Wrong use of the command line, and the checks that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

__all__ = ["KvName", "UsageError", "check_kv", "check_writable"]

KvName = Literal["mha", "mla", "hybrid_mla"]


class UsageError(ValueError):
    """The operator asked for something that cannot be done; the text is one line for them."""


def check_kv(name: str) -> None:
    """Raise UsageError unless it is a KvName."""
    kinds = get_args(KvName)
    if name not in kinds:
        raise UsageError(f"--kv {name}: must be one of {', '.join(kinds)}")


def check_writable(option: str, path: Path) -> None:
    """Find out now, not after the work, that the file cannot be written.

    Raises UsageError naming the option, the path and what is wrong with it.
    """
    try:
        problem = _problem(path)
    except OSError as error:  # a name that is too long, for one
        problem = (error.strerror or str(error)).lower()
    if problem is not None:
        raise UsageError(f"{option} {path}: {problem}")


def _problem(path: Path) -> str | None:
    folder = path.parent
    if path.is_dir():
        return "is a folder"
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        return "not writable"
    return None
