"""How well each class is recognised, and what it is predicted as."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spalier.reporting.figure import Box, Cell, Dot, Figure, Line, Mark, Panel
from spalier.reporting.model import Entry
from spalier.reporting.naming import breadth, fitted, percent
from spalier.reporting.scales import Axis, linear, linear_ticks

MOST_CLASSES = 40
"""How many classes are shown one by one."""
MOST_CELLS = 60
"""Up to how many classes there is a matrix; beyond that, the pairs that are confused most."""
MOST_COUNTS = 20
_PAIRS = 25


def per_class(entry: Entry, counts: Sequence[Sequence[int]], part: str, name: str) -> Figure:
    """How often each class is classified correctly."""
    found = [(_share(row[i], sum(row)), sum(row), i) for i, row in enumerate(counts)]
    found.sort(key=lambda f: (-1.0 if f[0] is None else f[0], -f[2]))
    known = [f for f in found if f[0] is not None]
    shown = known[:MOST_CLASSES]
    marks: list[Mark] = []
    for place, (share, total, i) in enumerate(shown):
        assert share is not None
        tip = f"{entry.classes[i]}\n{percent(share)} of {total} classified correctly"
        marks += [Line([(0, place), (share, place)], "stem"), Dot(share, place, "s0", tip)]
    ticks = tuple((t, f"{100 * t:.0f}%") for t in linear_ticks(0, 1, 4))
    names = tuple((float(i), fitted(entry.classes[f[2]], 110)) for i, f in enumerate(shown))
    panel = Panel(
        Axis("classified correctly", 0, 1, ticks),
        Axis("", -0.7, max(len(shown), 1) - 0.3, names),
        marks,
        height=max(16 * len(shown), 40),
    )
    more = len(known) - len(shown)
    caption = f"Shares of the {part} samples of each class."
    caption += f" The {len(shown)} worst of {len(known)} classes; the table has more." if more else ""
    unknown = [f for f in found if f[0] is None]
    rows: list[list[Cell]] = [[entry.classes[i], total, share] for share, total, i in [*known, *unknown]]
    columns = ["class", "samples", "classified correctly"]
    return Figure(f"classes-{name}", "Classes", caption, [panel], columns, rows, "task", entry.key)


def _share(count: int, of: int) -> float | None:
    return count / of if of else None


def confusion(entry: Entry, counts: Sequence[Sequence[int]], part: str, name: str) -> Figure:
    """Which classes are predicted as which."""
    wrong = [(row[j], i, j) for i, row in enumerate(counts) for j in range(len(row)) if i != j and row[j]]
    wrong.sort(key=lambda w: (-w[0], w[1], w[2]))
    many = len(counts) > MOST_CELLS
    panel = _pairs(entry, counts, wrong[:_PAIRS]) if many else _matrix(entry, counts)
    caption = (
        f"The pairs of {len(counts)} classes that are confused most, of {part} samples; the table has more."
        if many
        else f"{part.capitalize()} samples by what they are (rows) and what they are predicted as (columns); "
        "darker is a larger share of the row."
    )
    totals = [sum(row) for row in counts]
    rows: list[list[Cell]] = [
        [entry.classes[i], entry.classes[j], count, count / totals[i]] for count, i, j in wrong
    ]
    columns = ["class", "predicted as", "samples", "share of the class"]
    key = () if many else (("right", "right"), ("wrong", "wrong"))
    return Figure(
        f"confusion-{name}", "Confusion", caption, [panel], columns, rows, "task", entry.key, key=key
    )


def _matrix(entry: Entry, counts: Sequence[Sequence[int]]) -> Panel:
    size = len(counts)
    names = [fitted(c, 90) for c in entry.classes]
    marks: list[Mark] = [Box(0, 0, size, size, "frame")]
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            if count:
                share = count / sum(row)
                tip = f"{entry.classes[i]} predicted as {entry.classes[j]}\n{count} of {sum(row)} ({percent(share)})"
                css, text = ("right" if i == j else "wrong"), str(count) if size <= MOST_COUNTS else ""
                y = size - 1 - i
                marks.append(
                    Box(j, y, j + 1, y + 1, css, tip, strength=0.12 + 0.8 * math.sqrt(share), text=text)
                )
    every = math.ceil(size / 20)
    cell = 230 / size
    below = tuple((i + 0.5, n) for i, n in enumerate(names) if i % every == 0)
    beside = tuple((size - i - 0.5, n) for i, n in enumerate(names) if i % every == 0)
    upright = max((breadth(n) for n in names), default=0) > cell * every - 4
    return Panel(
        Axis("predicted as", 0, size, below),
        Axis("", 0, size, beside),
        marks,
        height=0,
        upright=upright,
        left_size=11 if size <= 14 else 9,
    )


def _pairs(entry: Entry, counts: Sequence[Sequence[int]], wrong: Sequence[tuple[int, int, int]]) -> Panel:
    top = len(wrong) - 1
    marks: list[Mark] = []
    names = []
    for place, (count, i, j) in enumerate(wrong):
        tip = f"{entry.classes[i]} predicted as {entry.classes[j]}\n{count} of {sum(counts[i])}"
        marks.append(Box(0, top - place - 0.35, count, top - place + 0.35, "wrong", tip))
        names.append((float(top - place), f"{fitted(entry.classes[i], 52)} → {fitted(entry.classes[j], 52)}"))
    x = linear("samples", [0, *(w[0] for w in wrong)], least=0)
    return Panel(
        x, Axis("", -0.7, max(len(wrong), 1) - 0.3, tuple(names)), marks, height=max(16 * len(wrong), 40)
    )
