"""The figures that compare tasks: accuracy against what it costs (figures 3, 5 and 6 of the paper), and bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spalier.adapters import ADAPTERS
from spalier.reporting import draw
from spalier.reporting.figures import bars
from spalier.reporting.load import MEASURES, TASK_SETTINGS, ReportData, TaskResult
from spalier.tasks import StoreReport, TaskCost
from spalier.text import Mean, byte_size, clean, mean, percent, short_number

MOST_SERIES = 12
"""How many series one panel may have."""
MOST_BARS = 40
_BYTES = ("file bytes", "network bytes", "base bytes", "pays from so many tasks on")

# -- series -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Point:
    """The tasks of all seeds at one density; series of points lie in panels."""

    panel: str
    subject: str
    """What was learned: accuracies compare between panels of one subject."""
    series: str
    css: str
    """The class of its colour."""
    shape: int
    """Where all colours are taken, a series has another shape."""
    tasks: Sequence[TaskResult]

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


def method_order(task: TaskResult) -> int:
    """Adapters before the baseline, fine-pruning."""
    methods = [*ADAPTERS, task.settings.get("method")]
    return methods.index(task.settings.get("method"))


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
        values = (task.settings.get(name) for name in varied)
        return method_order(task), *(float(v) if isinstance(v, int | float) else 0.0 for v in values)

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
        Point(panel, label_of(together[0], subject), label, *_look(labels.index(label)), together)
        for panel, series in panels.items()
        for label, tasks in series.items()
        for together in _by_density(tasks)
    ]


def _look(number: int) -> tuple[str, int]:
    """Class and shape of a series."""
    return f"s{number % draw.COLOURS}", number // draw.COLOURS


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
class CostAxis:
    """What accuracy is drawn against."""

    name: str
    number: str
    title: str
    label: str
    unit: str
    caption: str
    joined: bool = True

    def is_known(self, task: TaskResult, measure: str) -> bool:
        """Whether a task has both numbers; zero has no place on a logarithmic axis."""
        return task.numbers.get(self.number, 0) > 0 and measure in task.numbers


COST_AXES = (
    CostAxis(
        *("accuracy-bytes", "bytes", "bytes", "bytes of the file", "bytes"),
        "Further left is a smaller file; higher is better.",
    ),
    CostAxis(
        *("accuracy-learned", "learned", "learned parameters", "learned parameters", "learned"),
        "The paper's figure. What the file takes depends on how these numbers are stored, too.",
    ),
    CostAxis(
        *("accuracy-macs", "macs_left", "MACs", "multiply-accumulates of one sample", "MACs"),
        "Further left is less work for each sample.",
    ),
    CostAxis(
        *("accuracy-latency", "latency_ms", "latency", "milliseconds for one sample", "ms"),
        "Measured at the end of each block, for one sample, on the machine of the run: not in turns, so noisy, and "
        "not joined by lines. The command spalier bench compares with care.",
        joined=False,
    ),
)


def accuracy_figures(data: ReportData) -> Iterator[draw.Figure]:
    """Accuracy against each cost that is known."""
    for axis in COST_AXES:
        found = []
        for point in points(data):
            known = [task for task in point.tasks if axis.is_known(task, data.measure)]
            found += [replace(point, tasks=known)] if known else []
        if found:
            yield _accuracy_figure(data, axis, found)


def missing(data: ReportData) -> list[str]:
    """The names of what accuracy is not drawn against, because no task has both numbers."""
    return [a.title for a in COST_AXES if not any(a.is_known(task, data.measure) for task in data.tasks)]


def _accuracy_figure(data: ReportData, axis: CostAxis, found: Sequence[Point]) -> draw.Figure:
    x = draw.logarithmic(axis.label, [value for point in found for value in point.values(axis.number)])
    names, panels, rows = list(dict.fromkeys(point.panel for point in found)), [], draw.Rows()
    several = len(names) > 1
    for name in names:
        inside = [point for point in found if point.panel == name]
        # all panels and figures of one subject share their y axis
        alike = [p for p in points(data) if p.subject == inside[0].subject and p.values(data.measure)]
        values = [v for p in alike for v in (*p.mean(data.measure).share_range, *p.values(data.measure))]
        y = draw.linear(MEASURES[data.measure], values, most=1, text=lambda v: f"{100 * v:.4g}%")
        marks = [mark for point in inside for mark in _point_marks(data.measure, axis, point)]
        series = dict.fromkeys((point.series, point.css) for point in inside)
        for label, css in series:
            line = [p for p in inside if p.series == label]
            places = [(p.mean(axis.number).value, p.mean(data.measure).value) for p in line]
            shown = label if not several or len(series) > 1 else ""
            marks.append(draw.Line(places, css, shown, axis.joined))
        panels.append(draw.Panel(x, y, marks, name, height=220 if several else 320))
    for point in found:
        cost, accuracy = point.mean(axis.number).value, point.mean(data.measure)
        told = ([point.panel] if several else []) + [point.series, point.density]
        known = [int(cost) if cost == int(cost) else cost, accuracy.value, accuracy.deviation]
        rows.append([*told, accuracy.count, *known, ", ".join(task.key for task in point.tasks)])
    columns = ["series", "density", "tasks", axis.label, MEASURES[data.measure], "standard deviation", "task"]
    columns = ["panel", *columns] if several else columns
    caption = axis.caption
    if any(len(point.tasks) > 1 for point in found):
        caption += " Means over seeds with standard deviations; faint points are single runs."
    if left_out := len(data.tasks) - sum(len(point.tasks) for point in found):
        caption += f" {left_out} without these numbers are not shown."
    return draw.Figure(axis.name, f"Accuracy against {axis.title}", caption, panels, columns, rows)


def _point_marks(measure: str, axis: CostAxis, point: Point) -> Iterator[draw.Mark]:
    """The mean of several seeds with its error bar and single runs, or the one task that there is."""
    x, y = point.mean(axis.number).value, point.mean(measure)
    lines = [
        f"{point.series}, density {point.density}",
        f"{MEASURES[measure]} {percent(y.value, 2)}",
        f"{short_number(x)} {axis.unit}",
    ]
    for word in ("channels", "MACs"):
        if point.values(word.lower()):
            lines.append(f"{percent(point.mean(word.lower()).value)} of {word}")
    if y.deviation is not None:
        lines[1] += f" ± {100 * y.deviation:.2f}, {y.count} seeds"
        yield draw.ErrorBar(x, *y.share_range, point.css)
        for task in point.tasks:
            cost, accuracy = task.numbers[axis.number], task.numbers[measure]
            tip = f"{task.name}, seed {task.settings.get('seed')}\n{MEASURES[measure]} {percent(accuracy, 2)}"
            tip += f"\n{axis.label} {short_number(cost)}"
            yield draw.Dot(cost, accuracy, f"{point.css} faint", tip, task.key, point.shape, small=True)
    yield draw.Dot(x, y.value, point.css, "\n".join(lines), point.tasks[0].key, point.shape)


# -- bytes ------------------------------------------------------------------------------------------------------------


def bytes_figures(data: ReportData) -> list[draw.Figure]:
    """What files take on disk, and when that pays."""
    known = [t for t in data.tasks if all(t.numbers.get(name) for name in ("bytes", "network", "base"))]
    return [_files_figure(data, known), _break_even_figure(_costs_by_method(data, known))] if known else []


def _files_figure(data: ReportData, known: Sequence[TaskResult]) -> draw.Figure:
    """What the file of each task takes on disk; the mean over seeds, where there are several."""
    caption = (
        "Bytes of each task's file: masks, adapters, norms and head; for fine-pruning, masks and all weights that are "
        "left."
    )
    found, rows = [point for point in points(data) if point.values("bytes")], []
    for point in found:
        words = ", ".join(filter(None, [point.panel, point.series, point.density]))
        name, size = point.tasks[0].name if len(data.runs) == 1 else words, point.mean("bytes").value
        rows.append((name, size, f"{name}\n{byte_size(size)}", point.tasks[0].key))
    caption += " Means over seeds." if any(len(point.tasks) > 1 for point in found) else ""
    if len(rows) > MOST_BARS:
        rows = sorted(rows, key=lambda row: -row[1])[:MOST_BARS]
        caption += f" The {MOST_BARS} largest; the table has more."
    columns, cells = ["run", "task", *_BYTES], draw.Rows()
    for task in known:
        sizes = [task.numbers[name] for name in ("bytes", "network", "base")]
        cells.append([task.run, task.name, *sizes, _costs([task]).break_even or "never"])
    panel = bars("", rows, "kept", byte_size)
    return draw.Figure("files", "Files", caption, [panel], columns, cells, "files")


def _costs(tasks: Sequence[TaskResult]) -> StoreReport:
    """Bytes of tasks on one base."""
    costs = [TaskCost(t.name, int(t.numbers["bytes"]), int(t.numbers["network"])) for t in tasks]
    return StoreReport(int(max(task.numbers["base"] for task in tasks)), tuple(costs))


def _break_even_figure(methods: Mapping[str, Mapping[float, StoreReport]]) -> draw.Figure:
    """From how many tasks on a base and task files take less than networks, for each method and density.

    Densities and methods are alternatives: nothing is averaged over them.
    """
    marks, rows, evens, never = list[draw.Mark](), draw.Rows(), list[float](), list[str]()
    for number, (label, by_density) in enumerate(methods.items()):
        css, shape = _look(number)
        for target, costs in by_density.items():
            count = len(costs.costs)
            means = [round(total / count) for total in (costs.on_disk - costs.base, costs.networks)]
            rows.append([label, draw.density(target), count, *means, costs.base, costs.break_even or "never"])
        line = [(target, float(even)) for target, c in by_density.items() if (even := c.break_even)]
        if line and number < MOST_SERIES:
            evens += [pays for _, pays in line]
            marks.append(draw.Line(line, css, label if len(methods) > 1 else ""))
            for target, pays in line:
                tip = f"{label}, density {draw.density(target)}\npays from {pays:,.0f} tasks on"
                marks.append(draw.Dot(target, pays, css, tip, shape=shape))
        if missed := [draw.density(target) for target, c in by_density.items() if not c.break_even]:
            never.append(f"{label} at {', '.join(missed)}")
    targets = [target for by_density in methods.values() for target in by_density]
    x = draw.logarithmic("density", targets, text=draw.density)
    y = draw.logarithmic("pays from so many tasks on", evens, text=lambda v: f"{v:,.4g}", grid=True)
    caption = (
        "From how many tasks of one method and density on the base and their files take fewer bytes than networks of "
        "their own, in float32."
    )
    if any(len(costs.costs) > 1 for by_density in methods.values() for costs in by_density.values()):
        caption += " Means over tasks and seeds of the same method and density."
    caption += f" Never: {'; '.join(never)}." if never else ""
    if len(methods) > MOST_SERIES:
        caption += f" The first {MOST_SERIES} of {len(methods)} methods; the table has more."
    panels, columns = [draw.Panel(x, y, marks)] if evens else [], ["method", "density", "tasks", *_BYTES]
    return draw.Figure("break-even", "Break-even", caption, panels, columns, rows, "files")


def _costs_by_method(data: ReportData, known: Sequence[TaskResult]) -> dict[str, dict[float, StoreReport]]:
    """By base and method, rank and whatever else differs but the task and the seed; by falling density."""
    several = len({task.architecture for task in known}) > 1
    names = [name for name in data.varied if name not in (*TASK_SETTINGS, "base")]
    found: dict[str, dict[float, list[TaskResult]]] = {}
    for task in sorted(known, key=lambda t: (method_order(t), -t.target)):
        label = label_of(task, names) or method_name(task)
        label += f", base {task.architecture[:8]}" if several else ""
        found.setdefault(label, {}).setdefault(task.target, []).append(task)
    return {label: {target: _costs(held[target]) for target in held} for label, held in found.items()}
