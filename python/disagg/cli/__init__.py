"""The command line: `disagg`. Only this package imports typer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status.

    A wrong use is one line on stderr and status 2: what is wrong, and with which option or line of a file.
    """
    from disagg.cli.app import run  # noqa: PLC0415  (typer takes longer to load than the whole library)

    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))
