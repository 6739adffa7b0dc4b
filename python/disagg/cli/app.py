"""The commands, and how they end: statuses and one-line errors."""

from __future__ import annotations

import importlib
import inspect
import io
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

import disagg

__all__ = ["run"]

# name: (module, function), in the order of the help. Only the module of the command that is called is loaded:
# `disagg map` answers before the simulation's modules would be there.
COMMANDS = {
    "map": ("disagg.cli.map", "map_engines"),
    "probe": ("disagg.cli.probe", "probe"),
    "simulate": ("disagg.cli.simulate", "simulate"),
}

# typer's own name for it moved between its versions; this one is public and its base is what it raises.
_UsageProblem: type[Exception] = typer.BadParameter.__mro__[1]


def _app(arguments: list[str]) -> typer.Typer:
    """The application, with the command that is called, or with all of them."""
    app = typer.Typer(
        name="disagg",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Control plane for prefill/decode-disaggregated LLM serving.",
    )
    app.callback()(disagg_command)
    called = [arguments[0]] if arguments and arguments[0] in COMMANDS else COMMANDS
    for name in called:
        module, function = COMMANDS[name]
        command = getattr(importlib.import_module(module), function)
        app.command(name, help=_paragraphs(command))(command)
    return app


def _paragraphs(command: Callable[..., int]) -> str:
    """Join the lines of each paragraph of a docstring: the help is set in the terminal's width."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"disagg {disagg.__version__}")
        raise typer.Exit


def disagg_command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Control plane for prefill/decode-disaggregated LLM serving."""


def run(arguments: list[str]) -> int:
    """Run the command line; returns its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal's encoding may lack what an option or a peer said
            stream.reconfigure(errors="backslashreplace")
    try:
        status = _app(arguments)(arguments, prog_name="disagg", standalone_mode=False)
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
    except _UsageProblem as problem:
        return _refuse(arguments, problem)
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone; nothing more can be said to them, not at exit either.
        _give_up_output()
        return 1
    except OSError as error:  # the commands name the files that they write: this is the output
        _give_up_output()
        print(f"disagg: the output could not be written: {(error.strerror or str(error)).lower()}", file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0


def _give_up_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(arguments: list[str], problem: Exception) -> int:
    text = str(getattr(problem, "format_message", problem.__str__)())
    if not text:  # no arguments at all: typer has shown the help
        return 2
    command = next((word for word in arguments[:1] if not word.startswith("-")), None)
    name = f"disagg {command}" if command in COMMANDS else "disagg"
    print(f"{name}: {' '.join(text.split())}", file=sys.stderr)
    return 2
