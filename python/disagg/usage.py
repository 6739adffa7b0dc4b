"""Wrong use of the command line, and the checks that several commands share."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["UsageError", "check_writable"]


class UsageError(ValueError):
    """The operator asked for something that cannot be done; the text is one line for them."""


def check_writable(option: str, path: Path) -> None:
    """Find out now, not after the work, that the file cannot be written.

    Raises UsageError naming the option, the path and what is wrong with it.
    """
    folder = path.parent
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder")
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise UsageError(f"{option} {path}: not writable")
