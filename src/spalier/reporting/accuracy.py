"""Accuracy against what a task costs: learned parameters, MACs, latency (figures 3, 5 and 6 of the paper)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spalier.reporting.figure import Cell, Dot, Figure, Line, Mark, Panel, Whisker
from spalier.reporting.model import MEASURES, Entry, Findings
from spalier.reporting.naming import density, percent, short
from spalier.reporting.scales import Axis, linear, logarithmic
from spalier.reporting.series import Facet, Mean, Series, facets, mean


@dataclass(frozen=True)
class Against:
    """What lies on the x axis."""

    name: str
    number: str
    title: str
    label: str
    unit: str
    caption: str
    missing: str
    joined: bool = True


AGAINST = (
    Against(
        "accuracy-learned",
        "learned",
        "Accuracy against learned parameters",
        "learned parameters",
        "learned",
        "Further left is a smaller file; higher is better.",
        "No task says how many parameters it has learned, or how accurate it is.",
    ),
    Against(
        "accuracy-macs",
        "macs_left",
        "Accuracy against MACs",
        "multiply-accumulates of one sample",
        "MACs",
        "Further left is less work for each sample.",
        "No task says both how accurate it is and how many MACs it takes.",
    ),
    Against(
        "accuracy-latency",
        "latency_ms",
        "Accuracy against latency",
        "milliseconds for one sample",
        "ms",
        "Measured at the end of each block, for one sample, on the machine of the run: not in turns, so noisy, and "
        "not joined by lines. The command spalier bench compares with care.",
        "Latency was not measured: the files of tasks do not hold it, runs do.",
        joined=False,
    ),
)


def accuracy(findings: Findings) -> Iterator[Figure]:
    """The figures whose numbers are known."""
    panels = facets(findings)
    for against in AGAINST:
        if any(_is_known(findings, against, e) for e in findings.entries):
            yield _figure(findings, against, panels)


def missing(findings: Findings) -> list[str]:
    """What cannot be drawn, in words."""
    return [
        against.missing
        for against in AGAINST
        if findings.entries and not any(_is_known(findings, against, e) for e in findings.entries)
    ]


def _is_known(findings: Findings, against: Against, entry: Entry) -> bool:
    x, y = entry.number(against.number), entry.number(findings.measure)
    return x is not None and x > 0 and y is not None


def _figure(findings: Findings, against: Against, found: Sequence[Facet]) -> Figure:
    entries = [e for e in findings.entries if _is_known(findings, against, e)]
    left_out = len(findings.entries) - len(entries)
    x = logarithmic(against.label, [float(e.number(against.number) or 1) for e in entries])
    ys = {
        task: _accuracies(findings, [f for f in found if f.task == task]) for task in {f.task for f in found}
    }
    panels = [_panel(findings, against, facet, x, ys[facet.task], len(found) > 1) for facet in found]
    seeds = any(len(p) > 1 for facet in found for s in facet.series for p in s.points)
    caption = against.caption + (
        " Means over seeds with standard deviations; faint points are single runs." if seeds else ""
    )
    if left_out:
        caption += f" {left_out} without these numbers are not shown."
    columns = [
        "series",
        "density",
        "tasks",
        against.label,
        MEASURES[findings.measure],
        "standard deviation",
        "task",
    ]
    if len(found) > 1:
        columns.insert(0, "panel")
    rows = [row for facet in found for row in _rows(findings, against, facet, len(found) > 1)]
    panels = [panel for panel in panels if panel.marks]
    return Figure(against.name, against.title, caption, panels, columns, rows, wide=len(panels) > 1)


def _accuracies(findings: Findings, found: Sequence[Facet]) -> Axis:
    """The y axis of all panels of a task, with room for error bars; accuracies on several data do not compare."""
    points = [point for facet in found for series in facet.series for point in series.points]
    values = [v for point in points for e in point if (v := e.number(findings.measure)) is not None]
    for each in (mean(point, findings.measure) for point in points):
        if each is not None and each.deviation is not None:
            values += [max(each.value - each.deviation, 0), min(each.value + each.deviation, 1)]
    label = MEASURES[findings.measure]
    return linear(label, values, least=0, most=1, text=lambda v: f"{100 * v:.4g}%")


def _panel(findings: Findings, against: Against, facet: Facet, x: Axis, y: Axis, several: bool) -> Panel:
    marks: list[Mark] = []
    single = len(facet.series) == 1
    for series in facet.series:
        marks += _series(findings, against, series, single and several)
    order = (Whisker, Line, Dot)
    marks.sort(key=lambda m: (order.index(type(m)), isinstance(m, Dot) and not m.small))
    return Panel(x, y, marks, facet.title, height=250 if not several else 180)


def _series(findings: Findings, against: Against, series: Series, unnamed: bool) -> Iterator[Mark]:
    line = []
    for entries in series.points:
        known = [e for e in entries if _is_known(findings, against, e)]
        x, y = mean(known, against.number), mean(known, findings.measure)
        if x is None or y is None:
            continue
        line.append((x.value, y.value))
        if y.deviation is not None:
            yield Whisker(x.value, max(y.value - y.deviation, 0), min(y.value + y.deviation, 1), series.css)
            for entry in known:
                yield _single(findings, against, series, entry)
        tip = _tip(findings, against, series.label, known, x, y)
        yield Dot(x.value, y.value, series.css, tip, known[0].key, series.shape)
    if line:
        yield Line(line, series.css, "" if unnamed else series.label, against.joined)


def _single(findings: Findings, against: Against, series: Series, entry: Entry) -> Dot:
    x, y = entry.number(against.number), entry.number(findings.measure)
    assert x is not None
    assert y is not None
    tip = f"{entry.name}, seed {entry.seed}\n{MEASURES[findings.measure]} {percent(y, 2)}\n{against.label} {short(x)}"
    return Dot(x, y, f"{series.css} faint", tip, entry.key, series.shape, small=True)


def _tip(findings: Findings, against: Against, label: str, entries: Sequence[Entry], x: Mean, y: Mean) -> str:
    first = entries[0]
    many = "" if y.deviation is None else f" ± {100 * y.deviation:.2f}, {y.count} seeds"
    lines = [
        f"{label}, density {density(first.target)}",
        f"{MEASURES[findings.measure]} {percent(y.value, 2)}{many}",
    ]
    lines.append(f"{short(x.value)} {against.unit}")
    lines += [
        f"{percent(found.value)} of {word}"
        for n, word in (("channels", "channels"), ("macs", "MACs"))
        if (found := mean(entries, n)) is not None
    ]
    return "\n".join(lines)


def _rows(findings: Findings, against: Against, facet: Facet, several: bool) -> Iterator[list[Cell]]:
    for series in facet.series:
        for entries in series.points:
            known = [e for e in entries if _is_known(findings, against, e)]
            x, y = mean(known, against.number), mean(known, findings.measure)
            if x is None or y is None:
                continue
            value = int(x.value) if x.value == int(x.value) else x.value
            cells: list[Cell] = [series.label, density(known[0].target), y.count, value, y.value, y.deviation]
            yield ([facet.title] if several else []) + cells + [", ".join(e.key for e in known)]
