"""Plain text tables.

Units along an axis, written short: mostly each of n in turn, for a run of indices each, several times over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]


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


def pattern(units: int, run: int, times: int) -> Ints:
    """Each of several units in turn, for a run of indices each, the whole several times over.

    >>> pattern(2, 2, 2).tolist()
    [0, 0, 1, 1, 0, 0, 1, 1]
    """
    return np.tile(np.repeat(np.arange(units), run), times)


def pattern_of(units: Ints) -> tuple[int, int, int] | None:
    """The pattern that some units are; None where they are none.

    >>> pattern_of(np.array([0, 0, 1, 1])), pattern_of(np.array([0, 2, 1]))
    ((2, 2, 1), None)
    """
    count = int(units.max()) + 1
    for run in (1, int((units != units[0]).argmax()) or len(units)):
        if count and len(units) % (count * run) == 0:
            times = len(units) // (count * run)
            if np.array_equal(units, pattern(count, run, times)):
                return count, run, times
    return None
