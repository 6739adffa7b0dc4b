"""The commands, and how they end: statuses and one-line errors."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

import disagg
from disagg.cli.simulate import simulate

__all__ = ["app", "run"]

# typer's own name for it moved between its versions; this one is public and its base is what it raises.
_UsageProblem: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="disagg",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Control plane for prefill/decode-disaggregated LLM serving.",
)


def _paragraphs(command: Callable[..., int]) -> str:
    """Join the lines of each paragraph of a docstring: the help is set in the terminal's width."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


app.command("simulate", help=_paragraphs(simulate))(simulate)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"disagg {disagg.__version__}")
        raise typer.Exit


@app.callback()
def disagg_command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Control plane for prefill/decode-disaggregated LLM serving."""


def run(arguments: list[str]) -> int:
    """Run the command line; returns its exit status."""
    try:
        status = app(arguments, prog_name="disagg", standalone_mode=False)
        sys.stdout.flush()
    except _UsageProblem as problem:
        return _refuse(arguments, problem)
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; nothing more can be said to them, not at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status if isinstance(status, int) else 0


def _refuse(arguments: list[str], problem: Exception) -> int:
    text = str(getattr(problem, "format_message", problem.__str__)())
    if not text:  # no arguments at all: typer has shown the help
        return 2
    command = next((word for word in arguments[:1] if not word.startswith("-")), None)
    name = f"disagg {command}" if command == "simulate" else "disagg"
    print(f"{name}: {' '.join(text.split())}", file=sys.stderr)
    return 2
