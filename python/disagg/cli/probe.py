"""`disagg probe`: an address in, what a person on call needs to know out."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.rank_tables.specs import DECODE_KEYS, parse_decode
from disagg.usage import UsageError, check_kv

if TYPE_CHECKING:
    from disagg.probe.look import Look
    from disagg.transport.secret import Secret

__all__ = ["probe"]

MAX_TIMEOUT_S = 600.0
MAX_RANKS_ASKED = 1_048_576
MAX_LOOKS = 1_000_000_000
MAX_TOKEN_BYTES = 4096


def probe(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="The registry: host:port, host, or http://host:port.")
    ],
    *,
    decode: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help=f"Say whether this decode engine fits: tp=8,pp=1. Keys: {', '.join(DECODE_KEYS)}. What is not given "
            f"is not compared.",
            show_default=False,
        ),
    ] = None,
    kv: Annotated[str, typer.Option(help="What the KV cache is made of: mha, mla or hybrid_mla.")] = "mha",
    ranks: Annotated[
        int, typer.Option(metavar="COUNT", help="Ask for the endpoints of this many ranks at most; 0 for none.")
    ] = 256,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on looking, and print again when something changed; ends with Ctrl-C.")
    ] = False,
    interval_s: Annotated[float, typer.Option(help="With --watch: seconds between two looks.")] = 2.0,
    looks: Annotated[
        int | None, typer.Option(metavar="COUNT", help="With --watch: end after so many looks.", show_default=False)
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="DISAGG_TOKEN_FILE", help="Send the bearer token that this file holds.", show_default=False
        ),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead, on one line.")] = False,
    timeout_s: Annotated[float, typer.Option(help="Seconds for each question.")] = 5.0,
) -> int:
    """Ask a live bootstrap registry, ours or SGLang's, what it has, and say what is wrong with it.

    Nothing is changed there: it is asked for its topology, the endpoints of its ranks and the dp ranks of no rooms.

    Exit status: 0 when it is ready (and the decode engine fits), 1 when it is not, or answers as no registry does,
    2 when it cannot be reached or for a wrong option. With --watch that of the last look.
    """
    from disagg.probe.look import look_at  # noqa: PLC0415  (brings in the network)
    from disagg.rank_tables.live import address_of  # noqa: PLC0415
    from disagg.transport.asker import Asker  # noqa: PLC0415

    try:
        _check("--timeout-s", timeout_s, 0.01, MAX_TIMEOUT_S, " seconds")
        _check("--interval-s", interval_s, 0.01, MAX_TIMEOUT_S, " seconds")
        _check("--ranks", ranks, 0, MAX_RANKS_ASKED)
        if looks is not None:
            _check("--looks", looks, 1, MAX_LOOKS)
            if not watch:
                raise UsageError(f"--looks {looks}: needs --watch")
        check_kv(kv)
        engine = None if decode is None else parse_decode(decode, kv)
        addr = address_of(address, "ADDRESS")
        token = None if token_file is None else _token(token_file)
    except UsageError as error:
        print(f"disagg probe: {error}", file=sys.stderr)
        return 2
    count = (looks or MAX_LOOKS) if watch else 1
    shown, status = None, 1
    with Asker(timeout_s=timeout_s, token=token) as asker:
        for number in range(count):
            if number:
                time.sleep(interval_s)
            look = look_at(asker, addr, decode=engine, most_ranks=ranks)
            status = look.state.exit_status
            if shown is None or _differ(shown, look):
                shown = look
                _show(look, as_json=json_, with_time=watch)
    return status


def _differ(before: Look, now: Look) -> bool:
    """Whether anything but the time that answers took is another one."""

    def facts(look: Look) -> tuple[object, ...]:
        fits = None if look.pair is None else look.pair.fits
        return (look.state, look.reason, look.instance, look.epoch, look.info, look.endpoints, look.era,
                look.features, look.dp_rank_query, fits, look.warnings())  # fmt: skip

    return facts(before) != facts(now)


def _show(look: Look, *, as_json: bool, with_time: bool) -> None:
    if as_json:
        from disagg.probe.document import describe  # noqa: PLC0415

        print(json.dumps(describe(look)), flush=True)
        return
    from disagg.probe.text import render  # noqa: PLC0415

    if with_time:
        print(datetime.now().astimezone().isoformat(timespec="seconds"))
    print(render(look), flush=True)


def _token(path: Path) -> Secret:
    from disagg.transport.secret import Secret  # noqa: PLC0415

    try:
        with path.open("rb") as file:
            text = file.read(MAX_TOKEN_BYTES + 1).strip()
    except OSError as error:
        raise UsageError(f"--token-file {path}: {(error.strerror or str(error)).lower()}") from None
    if not 0 < len(text) <= MAX_TOKEN_BYTES or not all(0x21 <= byte <= 0x7E for byte in text):
        raise UsageError(
            f"--token-file {path}: must hold one token of 1 to {MAX_TOKEN_BYTES} printable ASCII characters"
        )
    return Secret(text.decode("ascii"))


def _check(option: str, value: float, least: float, most: float, unit: str = "") -> None:
    if not least <= value <= most:
        raise UsageError(f"{option} {value:g}: must be from {least:g} to {most:g}{unit}")
