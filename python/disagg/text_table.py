"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

__all__ = ["Row", "set_table"]

Row: TypeAlias = tuple[str, ...]


def set_table(head: Row, rows: Sequence[Row], right: Collection[int] = ()) -> list[str]:
    """Set columns as wide as their longest cell, two blanks apart; `right` are the columns of numbers."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(row: Row) -> str:
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return [line(head), "  ".join("-" * width for width in widths), *(line(row) for row in rows)]
