"""The figures that compare tasks: accuracy against what it costs (figures 3, 5 and 6 of the paper), and break-even."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spalier.adapters import ADAPTERS
from spalier.reporting import draw
from spalier.reporting.load import MEASURES, TASK_SETTINGS, ReportData, TaskResult
from spalier.text import Mean, clean, mean, percent, short_number

MOST_SERIES = 12
"""How many series one panel may have."""

# -- series -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Point:
    """The tasks of all seeds at one density; series of points lie in panels."""

    panel: str
    subject: str
    """What was learned: accuracies compare between panels of one subject."""
    series: str
    number: int
    """Of the series among all of them."""
    tasks: Sequence[TaskResult]

    @property
    def css(self) -> str:
        """The class of its colour."""
        return f"s{self.number % draw.COLOURS}"

    @property
    def shape(self) -> int:
        """Where all colours are taken, a series has another shape."""
        return self.number // draw.COLOURS

    @property
    def density(self) -> str:
        """What was asked for."""
        return draw.density(self.tasks[0].target)

    def values(self, name: str) -> list[float]:
        """A number of all tasks that have it."""
        return [task.numbers[name] for task in self.tasks if name in task.numbers]

    def mean(self, name: str) -> Mean:
        """The mean of a number that some task has."""
        found = mean(self.values(name))
        assert found is not None
        return found


def setting_name(setting: str, value: Any) -> str:
    """A setting's value in the label of a series.

    >>> setting_name("method", "splora"), setting_name("rank", 8), setting_name("data", "folder:/some/where/birds")
    ('SPLoRA', 'rank 8', 'birds')
    """
    if setting == "method" and value in ADAPTERS and value != "fine-pruning":
        return ADAPTERS[value].__name__
    if setting == "data" and ":" in str(value):
        return str(value).partition(":")[2].rstrip("/").rpartition("/")[2] or str(value)
    if setting == "classes" and value:
        return " ".join(map(str, value))
    if isinstance(value, str):
        return value
    if setting == "code":  # learned directly: nothing to say
        return ""
    return f"{setting} {'none' if value is None else json.dumps(value, default=str)}"


def method_name(task: TaskResult) -> str:
    """The narrow form that was written, or the method with its rank: SPLoRA-8."""
    if task.settings.get("code"):
        return clean(str(task.settings["code"]))
    method, rank = task.settings.get("method"), task.settings.get("rank")
    name = setting_name("method", method)
    return clean(f"{name}-{rank}" if method in ("splora", "lora") and rank is not None else name)


def label_of(task: TaskResult, names: Sequence[str]) -> str:
    """What tells a task from others, in words."""
    return clean(", ".join(filter(None, (setting_name(name, task.settings.get(name)) for name in names))))


def points(data: ReportData) -> list[Point]:
    """All tasks, by panel and series: a panel for each data set, and for more settings where series are too many."""
    varied = list(data.varied)

    def order(task: TaskResult) -> tuple[float, ...]:
        method, values = task.settings.get("method"), (task.settings.get(name) for name in varied)
        place = [*ADAPTERS, method].index(method)  # adapters before the baseline, fine-pruning
        return place, *(float(v) if isinstance(v, int | float) else 0.0 for v in values)

    subject = [name for name in TASK_SETTINGS if name in varied]
    outside = list(subject) if len(subject) < len(varied) else []
    while True:
        inside = [name for name in varied if name not in outside]
        panels: dict[str, dict[str, list[TaskResult]]] = {}
        for task in sorted(data.tasks, key=order):
            series = panels.setdefault(label_of(task, outside), {})
            series.setdefault(label_of(task, inside) or method_name(task), []).append(task)
        if not inside or max(map(len, panels.values()), default=0) <= MOST_SERIES:
            break
        outside.append(inside[0])
    subject = [name for name in subject if name in outside]
    labels = list(dict.fromkeys(label for series in panels.values() for label in series))
    return [
        Point(panel, label_of(together[0], subject), label, labels.index(label), together)
        for panel, series in panels.items()
        for label, tasks in series.items()
        for together in _by_density(tasks)
    ]


def _by_density(tasks: Sequence[TaskResult]) -> list[list[TaskResult]]:
    """Tasks by falling density; those of several seeds are together, and no seed twice."""
    found: list[list[TaskResult]] = []
    for task in sorted(tasks, key=lambda t: -t.target):
        seed = task.settings.get("seed")
        for together in found:
            if together[0].target == task.target and all(t.settings.get("seed") != seed for t in together):
                together.append(task)
                break
        else:
            found.append([task])
    return found


# -- accuracy ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One number of all tasks against another one."""

    name: str
    title: str
    number: str
    """Which one the x axis is."""
    label: str
    unit: str
    caption: str
    joined: bool = True
    text: draw.Format = short_number
    measure: str = ""
    """Which one the y axis is; by default the accuracy that is known."""

    def known(self, task: TaskResult, data: ReportData) -> bool:
        """Whether a task has both numbers; zero has no place on a logarithmic axis."""
        return task.numbers.get(self.number, 0) > 0 and (self.measure or data.measure) in task.numbers


COMPARISONS = (
    Comparison(
        *("accuracy-bytes", "Accuracy against bytes", "bytes", "bytes of the file", "bytes"),
        "Further left is a smaller file; higher is better.",
    ),
    Comparison(
        *("accuracy-learned", "Accuracy against learned parameters", "learned", "learned parameters", "learned"),
        "The paper's figure. What the file takes depends on how these numbers are stored, too.",
    ),
    Comparison(
        *("accuracy-macs", "Accuracy against MACs", "macs_left", "multiply-accumulates of one sample", "MACs"),
        "Further left is less work for each sample.",
    ),
    Comparison(
        *("accuracy-latency", "Accuracy against latency", "latency_ms", "milliseconds for one sample", "ms"),
        "Measured at the end of each block, for one sample, on the machine of the run: not in turns, so noisy, and "
        "not joined by lines. The command spalier bench compares with care.",
        joined=False,
    ),
    Comparison(
        *("break-even", "Break-even", "density", "density", "was asked for"),
        "From how many tasks like this one on the base and their files take fewer bytes than networks of their own, in "
        "float32. Tasks whose file is no smaller than that never pay.",
        text=draw.density,
        measure="pays",
    ),
)
_WORDS = {**MEASURES, "pays": "pays from so many tasks on"}


def comparison_figures(data: ReportData) -> Iterator[draw.Figure]:
    """Accuracy against each cost that is known, and what the bytes of files come to."""
    for each in COMPARISONS:
        found = []
        for point in points(data):
            known = [task for task in point.tasks if each.known(task, data)]
            found += [replace(point, tasks=known)] if known else []
        if found:
            yield _figure(data, each, found)


def missing(data: ReportData) -> list[str]:
    """The titles of what is not drawn, because no task has both numbers."""
    return [each.title for each in COMPARISONS if not any(each.known(task, data) for task in data.tasks)]


def _figure(data: ReportData, each: Comparison, found: Sequence[Point]) -> draw.Figure:
    x = draw.logarithmic(each.label, [v for point in found for v in point.values(each.number)], each.text)
    names, panels, rows = list(dict.fromkeys(point.panel for point in found)), [], draw.Rows()
    several, measure = len(names) > 1, each.measure or data.measure
    for name in names:
        inside = [point for point in found if point.panel == name]
        # all panels and figures of one subject share their y axis
        alike = [p for p in points(data) if p.subject == inside[0].subject and p.values(measure)]
        values = [v for p in alike for v in p.values(measure)]
        if each.measure:
            y = draw.logarithmic(_WORDS[measure], values, grid=True)
        else:
            values += [v for p in alike for v in p.mean(measure).share_range]
            y = draw.linear(_WORDS[measure], values, most=1, text=lambda v: f"{100 * v:.4g}%")
        marks = [mark for point in inside for mark in _point_marks(measure, each, point)]
        series = dict.fromkeys((point.series, point.css) for point in inside)
        for label, css in series:
            line = [p for p in inside if p.series == label]
            places = [(p.mean(each.number).value, p.mean(measure).value) for p in line]
            shown = label if not several or len(series) > 1 else ""
            marks.append(draw.Line(places, css, shown, each.joined))
        panels.append(draw.Panel(x, y, marks, name, height=220 if several else 320))
    for point in found:
        cost, mean = point.mean(each.number).value, point.mean(measure)
        told = ([point.panel] if several else []) + [point.series, point.density]
        known = [int(cost) if cost == int(cost) else cost, mean.value, mean.deviation]
        rows.append([*told, mean.count, *known, ", ".join(task.key for task in point.tasks)])
    columns = ["series", "density", "tasks", each.label, _WORDS[measure], "standard deviation", "task"]
    columns = ["panel", *columns] if several else columns
    caption = each.caption
    if any(len(point.tasks) > 1 for point in found):
        caption += " Means over seeds with standard deviations; faint points are single runs."
    if left_out := len(data.tasks) - sum(len(point.tasks) for point in found):
        caption += f" {left_out} without these numbers are not shown."
    return draw.Figure(each.name, each.title, caption, panels, columns, rows)


def _point_marks(measure: str, each: Comparison, point: Point) -> Iterator[draw.Mark]:
    """The mean of several seeds with its error bar and single runs, or the one task that there is."""
    x, y = point.mean(each.number).value, point.mean(measure)
    shown: draw.Format = short_number if each.measure else lambda v: percent(v, 2)
    name = f"{point.series}, density {point.density}"
    lines = [name, f"{_WORDS[measure]} {shown(y.value)}", f"{each.text(x)} {each.unit}"]
    for word in ("channels", "MACs"):
        if point.values(word.lower()):
            lines.append(f"{percent(point.mean(word.lower()).value)} of {word}")
    if y.deviation is not None:
        lines[1] += f" ± {y.deviation * (1 if each.measure else 100):.2f}, {y.count} seeds"
        if not each.measure:
            yield draw.ErrorBar(x, *y.share_range, point.css)
        for task in point.tasks:
            cost, value = task.numbers[each.number], task.numbers[measure]
            tip = f"{task.name}, seed {task.settings.get('seed')}\n{_WORDS[measure]} {shown(value)}"
            tip += f"\n{each.label} {each.text(cost)}"
            yield draw.Dot(cost, value, f"{point.css} faint", tip, task.key, point.shape, small=True)
    yield draw.Dot(x, y.value, point.css, "\n".join(lines), point.tasks[0].key, point.shape)
