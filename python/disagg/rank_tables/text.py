"""The mapping of a pair as text for people: at most 80 columns.

Engines of more than ROWS ranks are summarised: neighbours that read the same share a row, and when there are still more
rows than that, only the first and last are shown, below a sentence with the pattern.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from disagg.errors import Severity
from disagg.rank_tables.pair import DecodePlace, Pair, PrefillPlace
from disagg.rank_tables.room import RoomRank
from disagg.text_table import Row, set_table

__all__ = ["WIDTH", "engines", "render", "verdict"]

WIDTH = 80
ROWS = 16
FIRST, LAST = 6, 2


def render(pair: Pair, *, room: RoomRank | None, rank: int | None, full: bool) -> str:
    """All of it: the engines, whether they fit, and then the room, the pattern and the tables or all reasons."""
    lines = [*engines(pair), *verdict(pair)]
    if pair.fits:
        lines += ["", *_pattern(pair)]
        lines += [] if room is None else [*_wrapped(room.sentence())]
        lines += _one_rank(pair, rank, full=full) if rank is not None else _all_ranks(pair, full=full)
    return "\n".join(lines)


def engines(pair: Pair) -> list[str]:
    """One line an engine, with its sizes and the number of its ranks."""
    decode, prefill = pair.decode, pair.prefill
    per_group = prefill.attn_tp_size * prefill.attn_cp_size * prefill.pp_size
    rows = [
        _engine("decode", decode.dp_size, decode.first.attn_cp_size, decode.tp_size, decode.pp_size),
        _engine("prefill", prefill.dp_size, prefill.attn_cp_size, prefill.attn_tp_size, prefill.pp_size),
    ]
    return [*rows, f"kv {decode.first.kv}; {_count(per_group, 'prefill rank')} in a dp group"]


def _engine(name: str, dp: int, cp: int, tp: int, pp: int) -> str:
    return f"{name:8}dp {dp} x cp {cp} x tp {tp} x pp {pp} = {_count(dp * cp * tp * pp, 'rank')}"


def verdict(pair: Pair) -> list[str]:
    """Whether the pair fits, and every difference with its severity."""
    fatal = sum(reason.severity is Severity.FATAL for reason in pair.reasons)
    warnings = len(pair.reasons) - fatal
    counts = [_count(fatal, "reason")] if fatal else []
    counts += [_count(warnings, "warning")] if warnings else []
    head = ("does not fit" if fatal else "fits") + (f": {', '.join(counts)}" if counts else "")
    lines = [head]
    for reason in pair.reasons:
        lines += _wrapped(f"{reason.severity}: {reason.text}", indent="  ")
    return lines


def _pattern(pair: Pair) -> Iterator[str]:
    yield from _wrapped(_tp_pattern(pair))
    cp, stages = pair.prefill.attn_cp_size, pair.prefill.pp_size
    if cp > 1:
        read = pair.cp_ranks_read
        idle = f"of cp 0 to {cp - 1} only cp 0 is read, the others are idle"
        yield from _wrapped(idle if read == 1 else f"all {cp} cp ranks are read")
    if stages > 1 and pair.has_equal_stages:
        yield from _wrapped("each decode stage reads the prefill stage of its own number")
    elif stages > 1:
        yield from _wrapped(f"the decode holds all layers: it reads all {stages} stages, later ones contacted first")


def _tp_pattern(pair: Pair) -> str:
    local, remote = pair.decode.tp_size, pair.prefill.attn_tp_size
    if pair.is_sharded:
        return "every decode tp rank reads every prefill tp rank, each of which holds other pages (sharding)"
    if local == remote:
        return "decode tp i reads prefill tp i"
    if local > remote:
        return f"decode tp {_block(local // remote)} read prefill tp i"
    block = remote // local
    if not pair.has_dummies:
        return f"decode tp i reads prefill tp {_block(block)}"
    others = f"{block}i+1" + (f" to {block}i+{block - 1}" if block > 2 else "")
    return f"decode tp i reads prefill tp {block}i and contacts {others} as dummies: they wait for it, too"


def _block(size: int) -> str:
    return f"{size}i {'and' if size == 2 else 'to'} {size}i+{size - 1}"


def _all_ranks(pair: Pair, *, full: bool) -> list[str]:
    decode_ranks = pair.decode.tp_size * pair.decode.pp_size
    prefill_ranks = pair.prefill.attn_tp_size * pair.prefill.attn_cp_size * pair.prefill.pp_size
    if full or decode_ranks <= ROWS:
        reads = [_decode_row(pair, [place], str(place.pp)) for place in pair.decode_places()]
    else:
        reads = _grouped_decode_rows(pair)
    if full or prefill_ranks <= ROWS:
        serves = [_prefill_row([place], str(place.cp), str(place.pp)) for place in pair.prefill_places()]
    else:
        serves = _grouped_prefill_rows(pair)
    group = " of one dp group" if pair.prefill.dp_size > 1 or pair.decode.dp_size > 1 else ""
    return [
        "",
        f"what each decode rank{group} reads",
        *_table(DECODE_HEAD, reads, full=full, right=(6, 7)),
        "",
        f"what each prefill rank{group} serves",
        *_table(PREFILL_HEAD, serves, full=full, right=(6,)),
    ]


def _decode_row(pair: Pair, places: Sequence[DecodePlace], stage: str) -> Row:
    mapping = places[0].mapping
    stages = _ranks(mapping.target_pp_ranks)
    if len(places) > 1 or stage != str(places[0].pp):
        stages = "same" if pair.has_equal_stages and pair.prefill.pp_size > 1 else stages
    dummies = set(mapping.dummy_tp_ranks)
    return (
        _ranks([place.tp for place in places]),
        stage,
        _ranks(tp for tp in mapping.target_tp_ranks if tp not in dummies),
        _ranks(mapping.dummy_tp_ranks),
        _ranks(mapping.target_cp_ranks),
        stages,
        str(mapping.required_prefill_response_num),
        str(mapping.required_dst_info_num),
    )


def _grouped_decode_rows(pair: Pair) -> list[Row]:
    """Rows of neighbours that read the same; the stages, which all do alike, in one."""
    stages = _ranks(range(pair.decode.pp_size))
    places = (pair.decode_place(tp, 0) for tp in range(pair.decode.tp_size))
    return [_decode_row(pair, list(group), stages) for _, group in groupby(places, lambda place: place.mapping)]


def _prefill_row(places: Sequence[PrefillPlace], cp: str, pp: str) -> Row:
    served = places[0].served
    stage = "-" if served.decode_pp_rank is None else str(served.decode_pp_rank)
    return (
        _ranks([place.tp for place in places]),
        cp,
        pp,
        served.role,
        _ranks(served.decode_tp_ranks),
        stage,
        str(served.required_dst_info_num),
    )


def _grouped_prefill_rows(pair: Pair) -> list[Row]:
    """Rows of neighbours that serve the same; stages and CP ranks, which all do alike, in one."""
    stages, read, cp = _ranks(range(pair.prefill.pp_size)), pair.cp_ranks_read, pair.prefill.attn_cp_size
    places = (pair.prefill_place(tp, 0, 0) for tp in range(pair.prefill.attn_tp_size))
    rows = [
        _prefill_row(list(group), _ranks(range(read)), stages)
        for _, group in groupby(places, lambda place: place.served)
    ]
    if pair.has_equal_stages and pair.prefill.pp_size > 1:
        rows = [(*row[:5], "same", row[6]) for row in rows]
    if read < cp:
        tp = _ranks(range(pair.prefill.attn_tp_size))
        rows.append((tp, _ranks(range(read, cp)), stages, "idle", "-", "-", "0"))
    return rows


def _one_rank(pair: Pair, rank: int, *, full: bool) -> Iterator[str]:
    """What one engine rank reads, stage by stage: the contacts in order, and whom else they wait for."""
    tp = rank % pair.decode.tp_size
    for pp in range(pair.decode.pp_size):
        place = pair.decode_place(tp, pp)
        mapping, stage = place.mapping, f", stage {pp}" if pair.decode.pp_size > 1 else ""
        yield ""
        yield from _wrapped(
            f"decode rank {rank} (tp {tp}{stage}) awaits {_count(mapping.required_prefill_response_num, 'answer')}; "
            f"each prefill rank that it contacts waits for {_count(mapping.required_dst_info_num, 'decode rank')}"
        )
        rows: list[Row] = []
        for number, contact in enumerate(mapping.contacts(), 1):
            served = pair.prefill_place(contact.tp, contact.cp, contact.pp).served
            role = "dummy" if contact.dummy else "real"
            where = str(number), str(contact.tp), str(contact.cp), str(contact.pp)
            rows.append((*where, role, _ranks(served.decode_tp_ranks)))
        yield from _table(CONTACT_HEAD, rows, full=full, right=(0,))


def _table(head: Row, rows: list[Row], *, full: bool, right: tuple[int, ...]) -> list[str]:
    """Set the rows; unless `full`, only the first and last of very many."""
    left_out = len(rows) - FIRST - LAST
    if full or len(rows) <= ROWS:
        return set_table(head, rows, right)
    lines = set_table(head, rows[:FIRST] + rows[-LAST:], right)
    lines[-LAST:-LAST] = [f"... {left_out} more rows like these; --full shows them"]
    return lines


def _ranks(ranks: Iterable[int]) -> str:
    """Consecutive ranks as `first-last`; `-` for none."""
    known = list(ranks)
    if len(known) > 1:
        return f"{known[0]}-{known[-1]}"
    return str(known[0]) if known else "-"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


DECODE_HEAD = ("decode tp", "pp", "<- prefill tp", "dummy tp", "cp", "pp", "answers", "destinations")
PREFILL_HEAD = ("prefill tp", "cp", "pp", "role", "-> decode tp", "pp", "waits for")
CONTACT_HEAD = ("#", "prefill tp", "cp", "pp", "role", "waits for decode tp")
