"""What tasks take on disk, and from how many on one base with task files takes less than networks of their own."""

from __future__ import annotations

from collections.abc import Sequence

from spalier.reporting.figure import Box, Cell, Figure, Line, Mark, Panel, Rule
from spalier.reporting.model import Entry, Findings
from spalier.reporting.naming import clean, density, size
from spalier.reporting.scales import Axis, linear
from spalier.reporting.series import facets, mean, method_name
from spalier.tasks.report import Cost, Report

MOST_BARS = 40


def sizes(findings: Findings) -> list[Figure]:
    """The figures about bytes."""
    known = [e for e in findings.entries if e.number("bytes")]
    if not known:
        return []
    found = [_files(findings, known)]
    even = _break_even(known)
    return [*found, even] if even is not None else found


def _files(findings: Findings, known: Sequence[Entry]) -> Figure:
    caption = "Bytes of each task's file: masks, adapters, norms and head."
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
        [e.run, e.name, *(_whole(e.number(n)) for n in ("bytes", "network", "base")), _alone(e)]
        for e in known
    ]
    columns = ["run", "task", "file bytes", "network bytes", "base bytes", "break-even with such tasks"]
    panel = Panel(x, y, marks, height=max(17 * len(bars), 40))
    return Figure("files", "Files", caption, [panel], columns, rows, "files")


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _alone(entry: Entry) -> int | None:
    report = _report([entry])
    return None if report is None else report.break_even


def _report(entries: Sequence[Entry]) -> Report | None:
    costs = [
        (Cost(e.name, int(f), int(n)), int(b))
        for e in entries
        if (f := e.number("bytes")) and (n := e.number("network")) and (b := e.number("base"))
    ]
    return Report(max(b for _, b in costs), tuple(c for c, _ in costs)) if costs else None


def _break_even(known: Sequence[Entry]) -> Figure | None:
    """Bytes by number of tasks, for each base and method."""
    bases: dict[str, list[Entry]] = {}
    for entry in known:
        bases.setdefault(f"{method_name(entry)} {entry.architecture[:8]}", []).append(entry)
    reports = {name: r for name, held in bases.items() if (r := _report(held)) is not None}
    if not reports:
        return None
    several = len({e.architecture for e in known}) > 1
    titles = {name: name if several else name.rpartition(" ")[0] for name in reports}
    panels = [_lines(r, titles[name] if len(reports) > 1 else "") for name, r in reports.items()]
    words = [_words(titles[name] if len(reports) > 1 else "", report) for name, report in reports.items()]
    caption = f"Bytes on disk for so many tasks like the mean of these, in float32: {'; '.join(words)}."
    rows = [row for name, report in reports.items() for row in _rows(name, report)]
    columns = ["base", "tasks", "base and files", "networks"]
    return Figure("break-even", "Break-even", caption, panels, columns, rows, "files", wide=len(panels) > 1)


def _words(title: str, report: Report) -> str:
    even = report.break_even
    before = f"{title}: " if title else ""
    if even is None:
        return f"{before}networks of their own take less, however many there are"
    return f"{before}the base and task files take less from {even} tasks on"


def _range(report: Report) -> int:
    even = report.break_even
    return 10 if even is None else min(max(2 * even, 4), 10 * max(even, 1))


def _means(report: Report) -> tuple[float, float]:
    count = len(report.costs)
    return sum(c.file for c in report.costs) / count, report.networks / count


def _lines(report: Report, title: str) -> Panel:
    file, network = _means(report)
    most = _range(report)
    x = Axis("tasks", 0, most, tuple((float(t), str(t)) for t in _whole_ticks(most)))
    y = linear("bytes on disk", [0, report.base + most * file, most * network], least=0, text=size)
    marks: list[Mark] = [
        Line([(0, report.base), (most, report.base + most * file)], "s0", "base and files"),
        Line([(0, 0), (most, most * network)], "s2", "networks"),
    ]
    even = report.break_even
    if even is not None:
        marks.insert(0, Rule(even, f"from {even} on"))
    return Panel(x, y, marks, title, height=230)


def _whole_ticks(most: int) -> list[int]:
    step = max(1, -(-most // 6))
    for nice in (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2000, 5000, 10000):
        if nice >= step:
            step = nice
            break
    return list(range(0, most + 1, step))


def _rows(name: str, report: Report) -> list[list[Cell]]:
    file, network = _means(report)
    return [
        [name, t, round(report.base + t * file), round(t * network)] for t in _whole_ticks(_range(report))
    ]
