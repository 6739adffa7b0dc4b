"""The mapping of a pair as an SVG drawing: both engines' ranks as grids, with the lines between them.

A row is a TP rank. The columns are the decode's stages and the prefill's CP ranks with their stages; a line stands for
all that one decode row reads of one prefill row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from disagg.rank_tables.pair import Pair
from disagg.rank_tables.text import engines
from disagg.usage import UsageError

__all__ = ["check_size", "draw"]

MARGIN, HEAD, GAP, LABELS = 24.0, 150.0, 280.0, 44.0
ROW, CELL = 22.0, 30.0  # the largest cell, in pixels
MAX_HEIGHT, MAX_GRID_WIDTH = 1600.0, 640.0
LEGIBLE = 9.0  # a label needs that much
MAX_ROWS, MAX_COLUMNS = 2048, 512
MAX_LINES = 4096
COLOURS = {"real": "#2f6fb0", "dummy": "#c9b458", "idle": "#ffffff", "decode": "#4b9a6a"}
STYLE = (
    "text{font:12px sans-serif;fill:#222}"
    ".t{font-size:14px;font-weight:bold}.r{text-anchor:end}.m{text-anchor:middle}"
    "rect{stroke:#666;stroke-width:.5}"
    "line{stroke:#2f6fb0;stroke-width:1.2}line.dummy{stroke:#b59b2a;stroke-dasharray:4 3}"
    "polygon{fill:#2f6fb0;fill-opacity:.25}"
)


@dataclass(frozen=True)
class Grid:
    """Where one engine's ranks are drawn."""

    left: float
    top: float
    rows: int
    columns: int
    height: float

    @property
    def row(self) -> float:
        return self.height / self.rows

    @property
    def cell(self) -> float:
        return min(CELL, MAX_GRID_WIDTH / self.columns)

    @property
    def right(self) -> float:
        return self.left + self.cell * self.columns

    def middle(self, row: int) -> float:
        """The height at which lines of that row begin or end."""
        return self.top + self.row * (row + 0.5)

    def rect(self, row: int, column: int, colour: str, title: str) -> str:
        x, y = self.left + self.cell * column, self.top + self.row * row
        return (
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{self.cell:.2f}" height="{self.row:.2f}" fill="{colour}">'
            f"<title>{escape(title)}</title></rect>"
        )


def draw(pair: Pair, *, rank: int | None = None) -> str:
    """Return the SVG document; with `rank`, only the lines of that engine rank.

    Raises what `check_size` raises.
    """
    check_size(pair)
    local, remote = pair.decode.tp_size, pair.prefill.attn_tp_size
    columns = pair.prefill.attn_cp_size * pair.prefill.pp_size
    height = min(MAX_HEIGHT, ROW * max(local, remote))
    ours = Grid(MARGIN + LABELS, HEAD, local, pair.decode.pp_size, height)
    theirs = Grid(ours.right + GAP, HEAD, remote, columns, height)
    width = max(theirs.right + LABELS + MARGIN, 640.0)
    bottom = HEAD + height + MARGIN
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom:.0f}" '
        f'viewBox="0 0 {width:.0f} {bottom:.0f}" role="img" aria-label="rank mapping">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width:.0f}" height="{bottom:.0f}" fill="#fff" style="stroke:none"/>',
        *_caption(pair),
        *_lines(pair, ours, theirs, rank),
        *_decode_grid(pair, ours),
        *_prefill_grid(pair, theirs),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def check_size(pair: Pair) -> None:
    """Raise UsageError when the engines are too large to draw."""
    rows = max(pair.decode.tp_size, pair.prefill.attn_tp_size)
    if rows > MAX_ROWS:
        raise UsageError(f"--svg: tp {rows} is too large to draw, at most {MAX_ROWS}; --json has every rank")
    columns = pair.prefill.attn_cp_size * pair.prefill.pp_size
    if columns > MAX_COLUMNS:
        raise UsageError(
            f"--svg: cp x pp of {columns} is too large to draw, at most {MAX_COLUMNS}; --json has every rank"
        )


def _caption(pair: Pair) -> Iterator[str]:
    for number, line in enumerate(engines(pair)):
        kind = ' class="t"' if number < 2 else ""
        yield f'<text x="{MARGIN}" y="{MARGIN + 4 + 18 * number}"{kind}>{escape(line)}</text>'
    x, y = MARGIN, MARGIN + 4 + 18 * 4
    legend = [("decode rank", COLOURS["decode"]), ("prefill rank that is read", COLOURS["real"])]
    legend.append(("dummy: contacted, not read", COLOURS["dummy"]))
    legend.append(("idle", COLOURS["idle"]))
    for text, colour in legend:
        yield f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 17:.0f}" y="{y:.0f}">{text}</text>'
        x += 30 + 7 * len(text)


def _lines(pair: Pair, ours: Grid, theirs: Grid, rank: int | None) -> Iterator[str]:
    rows = range(pair.decode.tp_size) if rank is None else [rank % pair.decode.tp_size]
    if pair.is_sharded and len(rows) * theirs.rows > MAX_LINES:
        corners = (
            f"{ours.right:.2f},{ours.top} {theirs.left:.2f},{theirs.top} "
            f"{theirs.left:.2f},{theirs.top + theirs.height:.2f} {ours.right:.2f},{ours.top + ours.height:.2f}"
        )
        yield f'<polygon points="{corners}"><title>every decode row reads every prefill row</title></polygon>'
        return
    for tp in rows:
        mapping = pair.decode_place(tp, 0).mapping
        dummies = set(mapping.dummy_tp_ranks)
        for target in mapping.target_tp_ranks:
            kind = ' class="dummy"' if target in dummies else ""
            yield (
                f'<line{kind} x1="{ours.right:.2f}" y1="{ours.middle(tp):.2f}" '
                f'x2="{theirs.left:.2f}" y2="{theirs.middle(target):.2f}"/>'
            )


def _decode_grid(pair: Pair, grid: Grid) -> Iterator[str]:
    yield _title(grid, "decode")
    for tp in range(grid.rows):
        for pp in range(grid.columns):
            yield grid.rect(tp, pp, COLOURS["decode"], f"decode tp {tp} pp {pp}")
        if grid.row >= LEGIBLE:
            yield f'<text class="r" x="{grid.left - 6:.2f}" y="{grid.middle(tp) + 4:.2f}">tp {tp}</text>'
    yield from _column_labels(grid, [f"pp {pp}" for pp in range(grid.columns)])


def _prefill_grid(pair: Pair, grid: Grid) -> Iterator[str]:
    yield _title(grid, "prefill")
    stages = pair.prefill.pp_size
    for tp in range(grid.rows):
        for cp in range(pair.prefill.attn_cp_size):
            served = pair.prefill_place(tp, cp, 0).served
            for pp in range(stages):
                what = f"prefill tp {tp} cp {cp} pp {pp}: {served.role}, waits for {served.required_dst_info_num}"
                yield grid.rect(tp, cp * stages + pp, COLOURS[served.role], what)
        if grid.row >= LEGIBLE:
            yield f'<text x="{grid.right + 6:.2f}" y="{grid.middle(tp) + 4:.2f}">tp {tp}</text>'
    labels = [f"c{cp} p{pp}" for cp in range(pair.prefill.attn_cp_size) for pp in range(stages)]
    yield from _column_labels(grid, labels)


def _title(grid: Grid, name: str) -> str:
    return f'<text class="t" x="{grid.left:.2f}" y="{grid.top - 24:.2f}">{name}</text>'


def _column_labels(grid: Grid, labels: list[str]) -> Iterator[str]:
    if grid.cell < CELL:
        return
    for column, label in enumerate(labels):
        x = grid.left + grid.cell * (column + 0.5)
        yield f'<text class="m" x="{x:.2f}" y="{grid.top - 6:.2f}" style="font-size:9px">{label}</text>'
