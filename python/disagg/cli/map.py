"""`disagg map`: options in, tables or reasons out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from disagg.errors import PeerUnreachable, ProtocolError
from disagg.printable import printable
from disagg.rank_tables.pair import Pair
from disagg.rank_tables.room import RoomRank, check_room, rank_by_rule
from disagg.rank_tables.specs import DECODE_KEYS, PREFILL_KEYS, parse_decode, parse_prefill
from disagg.usage import UsageError, check_writable

if TYPE_CHECKING:
    from disagg._core import PrefillInfo

__all__ = ["map_engines"]

MAX_TIMEOUT_S = 600.0


def map_engines(
    *,
    decode: Annotated[
        str,
        typer.Option(
            metavar="KEY=VALUE,...",
            help=f"The decode engine: tp=8,pp=1. tp is attention TP, dp the number of its groups. "
            f"Keys: {', '.join(DECODE_KEYS)}. What is not given is not compared.",
        ),
    ],
    prefill: Annotated[
        str,
        typer.Option(
            metavar="KEY=VALUE,...|ADDRESS",
            help=f"The prefill engine: tp=4,pp=2,dp=2, or the address of its live registry (http://host:port or "
            f"host:port). Keys: {', '.join(PREFILL_KEYS)}.",
        ),
    ],
    kv: Annotated[str, typer.Option(help="What the KV cache is made of: mha, mla or hybrid_mla.")] = "mha",
    room: Annotated[
        int | None, typer.Option(metavar="ROOM", help="Say which dp rank holds this room.", show_default=False)
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="RANK",
            help="Show only this TP rank of the decode engine, with its contacts in order.",
            show_default=False,
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show every rank of large engines.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object with every rank instead.")] = False,
    svg: Annotated[
        Path | None,
        typer.Option(help="Draw both engines' ranks and the lines between them to this file.", show_default=False),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds for each question to a live registry.")] = 5.0,
) -> int:
    """Show which prefill ranks each rank of a decode engine reads, and which decode ranks each prefill rank serves.

    Or say that the two engines do not fit, with every reason at once.

    Exit status: 0 when they fit, 1 when they do not or a live registry is not ready, 2 for a wrong option or a
    registry that cannot be reached.
    """
    try:
        return _show(
            _Wanted(
                decode=decode,
                prefill=prefill,
                kv=kv,
                room=room,
                rank=rank,
                full=full,
                json=json_,
                svg=svg,
                timeout_s=timeout_s,
            )
        )
    except (UsageError, PeerUnreachable) as error:
        return _complain(str(error), 2)


class _Wanted(NamedTuple):
    decode: str
    prefill: str
    kv: str
    room: int | None
    rank: int | None
    full: bool
    json: bool
    svg: Path | None
    timeout_s: float


class _Prefill(NamedTuple):
    info: PrefillInfo
    address: str | None
    room: RoomRank | None


def _show(wanted: _Wanted) -> int:
    decode = parse_decode(wanted.decode, wanted.kv)
    rank, ranks = wanted.rank, decode.engine_tp_size
    if rank is not None and not 0 <= rank < ranks:
        raise UsageError(f"--rank {rank}: must be from 0 to {ranks - 1}, below the decode engine's tp x dp")
    if wanted.room is not None:
        check_room(wanted.room)
    if wanted.svg is not None:
        check_writable("--svg", wanted.svg)
    if "=" in wanted.prefill and "://" not in wanted.prefill:
        info = parse_prefill(wanted.prefill)
        prefill = _Prefill(info, None, None if wanted.room is None else _by_rule(wanted.room, info))
    else:
        from disagg.rank_tables.live import NotReady  # noqa: PLC0415  (brings in the network)

        try:
            prefill = _ask(wanted)
        except NotReady as error:
            return _complain(str(error), 1)
        except ProtocolError as error:
            return _complain(f"{wanted.prefill} answered with a bad topology: {error}", 1)
    # A layout of speculative decoding cannot be given here, and what is not given is not compared.
    pair = Pair(decode.with_fields(spec_layout=prefill.info.spec_layout), prefill.info)
    if wanted.svg is not None and pair.fits:
        from disagg.rank_tables.drawing import check_size  # noqa: PLC0415

        check_size(pair)
    _print(pair, prefill, wanted)
    if not pair.fits:
        return 1 if wanted.svg is None else _complain(f"--svg {wanted.svg}: not written, the engines do not fit", 1)
    if wanted.svg is not None:
        _draw(pair, wanted.svg, rank)
    return 0


def _by_rule(room: int, info: PrefillInfo) -> RoomRank:
    return rank_by_rule(room, info) or RoomRank(room, None, "only its registry knows")


def _ask(wanted: _Wanted) -> _Prefill:
    from disagg.rank_tables.live import address_of, ask_room, ask_topology  # noqa: PLC0415
    from disagg.transport.asker import Asker  # noqa: PLC0415

    if not 0.01 <= wanted.timeout_s <= MAX_TIMEOUT_S:
        raise UsageError(f"--timeout-s {wanted.timeout_s:g}: must be from 0.01 to {MAX_TIMEOUT_S:g} seconds")
    address = address_of(wanted.prefill)
    with Asker(timeout_s=wanted.timeout_s) as asker:
        topology = ask_topology(asker, address)
        room = None if wanted.room is None else ask_room(asker, address, wanted.room, topology)
    return _Prefill(topology.info, address, room)


def _print(pair: Pair, prefill: _Prefill, wanted: _Wanted) -> None:
    if wanted.json:
        from disagg.rank_tables.document import describe  # noqa: PLC0415

        described = describe(pair, address=prefill.address, room=prefill.room, rank=wanted.rank)
        print(json.dumps(described))
        return
    from disagg.rank_tables.text import render  # noqa: PLC0415

    print(render(pair, room=prefill.room, rank=wanted.rank, full=wanted.full))


def _draw(pair: Pair, path: Path, rank: int | None) -> None:
    from disagg.rank_tables.drawing import draw  # noqa: PLC0415

    try:
        path.write_text(draw(pair, rank=rank), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--svg {path}: {error.strerror or error}") from None


def _complain(text: str, status: int) -> int:
    print(f"disagg map: {printable(text)}", file=sys.stderr)
    return status
