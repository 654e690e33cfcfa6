"""What tasks take on disk, and from how many on one base with task files takes less than networks of their own.

The densities of a run are alternatives, and so are methods: nothing is averaged over either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spalier.reporting.figure import Box, Cell, Dot, Figure, Line, Mark, Panel, Rule
from spalier.reporting.model import Entry, Findings
from spalier.reporting.naming import TASK_SETTINGS, clean, density, size, value_name
from spalier.reporting.scales import Axis, linear, logarithmic
from spalier.reporting.series import COLOURS, MOST, facets, mean, method_name, method_rank
from spalier.tasks.costs import Cost, Report

MOST_BARS = 40
MOST_LINES = 5
"""For how many methods there is a panel with bytes by number of tasks."""
NEVER = "never"


def sizes(findings: Findings) -> list[Figure]:
    """The figures about bytes."""
    known = [e for e in findings.entries if e.number("bytes")]
    if not known:
        return []
    found = [_files(findings, known)]
    even = break_even(findings, known)
    return [*found, even] if even is not None else found


def _files(findings: Findings, known: Sequence[Entry]) -> Figure:
    caption = f"Bytes of each task's file: {_inside(known)}."
    points = [(facet, s, point) for facet in facets(findings) for s in facet.series for point in s.points]
    if len(findings.runs) == 1:
        bars = [(e.name, e, float(e.number("bytes") or 0)) for e in known]
    else:
        bars = [
            (", ".join(filter(None, [facet.title, s.label, density(point[0].target)])), point[0], found.value)
            for facet, s, point in points
            if (found := mean(point, "bytes")) is not None
        ]
        caption += " Means over seeds." if any(len(point) > 1 for _, _, point in points) else ""
    if len(bars) > MOST_BARS:
        bars = sorted(bars, key=lambda b: -b[2])[:MOST_BARS]
        caption += f" The {MOST_BARS} largest; the table has more."
    top = len(bars) - 1
    marks: list[Mark] = [
        Box(0, top - i - 0.35, count, top - i + 0.35, "kept", f"{name}\n{size(count)}", entry.key)
        for i, (name, entry, count) in enumerate(bars)
    ]
    x = linear("", [0, *(b[2] for b in bars)], least=0, text=size)
    y = Axis("", -0.7, top + 0.7, tuple((float(top - i), clean(b[0])) for i, b in enumerate(bars)))
    rows: list[list[Cell]] = [
        [e.run, e.name, *(_whole(e.number(n)) for n in ("bytes", "network", "base")), pays_from([e])]
        for e in known
    ]
    columns = ["run", "task", "file bytes", "network bytes", "base bytes", "pays from so many tasks on"]
    panel = Panel(x, y, marks, height=max(17 * len(bars), 40))
    return Figure("files", "Files", caption, [panel], columns, rows, "files")


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _inside(entries: Sequence[Entry]) -> str:
    """What files hold, by method."""
    whole = {e.settings.get("method") in ("fine-pruning", "finetune") for e in entries}
    adapters, weights = "masks, adapters, norms and head", "masks and all weights that are left"
    if whole == {True, False}:
        return f"{adapters}; those of fine-pruning hold {weights}"
    return weights if True in whole else adapters


# -- break-even -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _At:
    """Tasks of one method at one density."""

    target: float
    report: Report

    @property
    def means(self) -> tuple[float, float]:
        """Bytes of a file, and of a network."""
        count = len(self.report.costs)
        return sum(c.file for c in self.report.costs) / count, self.report.networks / count


def pays_from(entries: Sequence[Entry]) -> int | str | None:
    """From how many tasks like these on files pay; None where their bytes are not known."""
    report = _report(entries)
    return None if report is None else report.break_even or NEVER


def _report(entries: Sequence[Entry]) -> Report | None:
    costs = [
        (Cost(e.name, int(f), int(n)), int(b))
        for e in entries
        if (f := e.number("bytes")) and (n := e.number("network")) and (b := e.number("base"))
    ]
    return Report(max(b for _, b in costs), tuple(c for c, _ in costs)) if costs else None


def break_even(findings: Findings, known: Sequence[Entry]) -> Figure | None:
    """Where files pay, by density for each method; bytes by number of tasks at the lowest density of each."""
    methods = _methods(findings, known)
    if not methods:
        return None
    shown = dict(list(methods.items())[:MOST])
    lined = dict(list(shown.items())[:MOST_LINES])
    panels = [_by_density(shown)] if any(at.report.break_even for row in shown.values() for at in row) else []
    panels += [_by_tasks(row[-1], f"{label} at {density(row[-1].target)}") for label, row in lined.items()]
    columns = [
        "method",
        "density",
        "tasks",
        "file bytes",
        "network bytes",
        "base bytes",
        "pays from so many tasks on",
    ]
    rows: list[list[Cell]] = [
        [label, density(at.target), len(at.report.costs), *map(round, at.means), at.report.base, _even(at)]
        for label, row in methods.items()
        for at in row
    ]
    caption = " ".join(_caption(methods, len(lined)))
    return Figure("break-even", "Break-even", caption, panels, columns, rows, "files", wide=len(panels) > 1)


def _even(at: _At) -> int | str:
    return at.report.break_even or NEVER


def _methods(findings: Findings, known: Sequence[Entry]) -> dict[str, list[_At]]:
    """Tasks by base and method, rank and whatever else differs but the task and the seed; by falling density."""
    several = len({e.architecture for e in known}) > 1
    names = [name for name in findings.varied if name not in (*TASK_SETTINGS, "base")]
    found: dict[str, dict[float, list[Entry]]] = {}
    for entry in sorted(known, key=method_rank):
        label = ", ".join(value_name(name, entry.settings.get(name)) for name in names) or method_name(entry)
        label += f", base {entry.architecture[:8]}" if several else ""
        found.setdefault(clean(label), {}).setdefault(entry.target, []).append(entry)
    rows = {
        label: [_At(t, r) for t in sorted(held, reverse=True) if (r := _report(held[t])) is not None]
        for label, held in found.items()
    }
    return {label: row for label, row in rows.items() if row}


def _caption(methods: dict[str, list[_At]], lined: int) -> Iterator[str]:
    yield (
        "From how many tasks of one method and density on the base and their files take fewer bytes than networks of "
        "their own, in float32."
    )
    if any(len(at.report.costs) > 1 for row in methods.values() for at in row):
        yield "Means over tasks and seeds of the same method and density."
    never = [_never(label, row) for label, row in methods.items() if any(_even(at) == NEVER for at in row)]
    if never:
        yield f"Never: {'; '.join(never)}."
    yield f"Bytes by number of tasks are for the lowest density of {'the' if len(methods) == 1 else 'each'} method."
    if lined < len(methods):
        yield f"The first {lined} of {len(methods)} methods; the table has more."


def _never(label: str, row: Sequence[_At]) -> str:
    found = [density(at.target) for at in row if _even(at) == NEVER]
    return f"{label} at any density" if len(found) == len(row) > 1 else f"{label} at {', '.join(found)}"


def _by_density(methods: dict[str, list[_At]]) -> Panel:
    evens = [(at.target, float(e)) for row in methods.values() for at in row if (e := at.report.break_even)]
    marks: list[Mark] = []
    for number, (label, row) in enumerate(methods.items()):
        css = f"s{number % COLOURS}"
        points = [(at.target, float(e)) for at in row if (e := at.report.break_even)]
        if points:
            marks.append(Line(points, css, label if len(methods) > 1 else ""))
        marks += [
            Dot(
                x,
                y,
                css,
                f"{label}, density {density(x)}\npays from {y:,.0f} tasks on",
                shape=number // COLOURS,
            )
            for x, y in points
        ]
    marks.sort(key=lambda m: isinstance(m, Dot))
    x = logarithmic("density", [at.target for row in methods.values() for at in row], text=density)
    y = logarithmic("pays from so many tasks on", [e for _, e in evens], text=lambda v: f"{v:,.4g}")
    return Panel(
        x, Axis(y.label, y.low, y.high, y.ticks, log=True, grid=True), marks, "by density", height=230
    )


def _by_tasks(at: _At, title: str) -> Panel:
    (file, network), even = at.means, at.report.break_even
    most = 10 if even is None else min(max(2 * even, 4), 10 * even)
    x = Axis("tasks", 0, most, tuple((float(t), f"{t:,}") for t in _ticks(most)))
    y = linear("bytes on disk", [0, at.report.base + most * file, most * network], least=0, text=size)
    marks: list[Mark] = [
        Line([(0, at.report.base), (most, at.report.base + most * file)], "s0", "base and files"),
        Line([(0, 0), (most, most * network)], "s2", "networks"),
    ]
    if even is not None:
        marks.insert(0, Rule(even, f"from {even:,} on"))
    return Panel(x, y, marks, title if even is not None else f"{title}: never", height=230)


def _ticks(most: int) -> list[int]:
    """Whole numbers from 0 to the largest, about six."""
    rough = max(1.0, most / 6)
    power = 10 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough)
    return list(range(0, most + 1, step))
