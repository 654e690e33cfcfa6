"""Plain text tables."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need; numbers to the right, words to the left.

    >>> print(table(["layer", "learned"], [["conv1", "536"], ["fc", "5,130"]]))
    layer  learned
    conv1      536
    fc       5,130
    """
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [bool(rows) and all(_is_number(cell) for cell in column[1:]) for column in columns]
    lines = []
    for cells in (header, *rows):
        padded = (
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(cells, widths, right, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell == "-"
