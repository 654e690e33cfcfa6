"""The figures that compare tasks: accuracy against what it costs (figures 3, 5 and 6 of the paper), and bytes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spalier.adapters import ADAPTERS
from spalier.reporting import draw
from spalier.reporting.figures import bars
from spalier.reporting.load import MEASURES, TASK_SETTINGS, ReportData, TaskResult
from spalier.tasks.store import StoreReport, TaskCost
from spalier.text import byte_size, clean, percent, short_number

MOST_SERIES = 12
"""How many series one panel may have."""
MOST_BARS = 40
_BYTES = ("file bytes", "network bytes", "base bytes", "pays from so many tasks on")

# -- series -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Series:
    """Tasks that belong together, by falling density; those of several seeds are one point."""

    label: str
    css: str
    """The class of its colour."""
    shape: int
    """The shape of its points: where colours come again, it is another one."""
    points: Sequence[Sequence[TaskResult]]


def _look(number: int) -> tuple[str, int]:
    """Class and shape of a series."""
    return f"s{number % draw.COLOURS}", number // draw.COLOURS


@dataclass(frozen=True, eq=False)
class Facet:
    """Series that are shown in one panel."""

    title: str
    series: Sequence[Series]
    task: str = ""
    """What was learned: accuracies compare between panels of the same task."""


@dataclass(frozen=True)
class Mean:
    """A number over seeds."""

    value: float
    deviation: float | None
    """With n - 1; None for one value."""
    count: int


def mean(tasks: Sequence[TaskResult], name: str) -> Mean | None:
    """The mean of a number over the tasks that have it; None where none has."""
    values = [task.numbers[name] for task in tasks if name in task.numbers]
    if not values:
        return None
    return Mean(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


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
    return f"{setting} {'none' if value is None else json.dumps(value, default=str)}"


def method_order(task: TaskResult) -> int:
    """Adapters before the baseline, fine-pruning."""
    methods = [*ADAPTERS, task.settings.get("method")]
    return methods.index(task.settings.get("method"))


def method_name(task: TaskResult) -> str:
    """The method with its rank: SPLoRA-8."""
    method, rank = task.settings.get("method"), task.settings.get("rank")
    name = setting_name("method", method)
    return clean(f"{name}-{rank}" if method in ("splora", "lora") and rank is not None else name)


def label_of(task: TaskResult, names: Sequence[str]) -> str:
    """What tells a task from others, in words."""
    return clean(", ".join(setting_name(name, task.settings.get(name)) for name in names))


def facets(data: ReportData) -> list[Facet]:
    """All tasks, as panels of series: a panel for each data set, and for more settings where series are too many."""
    varied = list(data.varied)

    def order(task: TaskResult) -> tuple[float, ...]:
        values = (task.settings.get(name) for name in varied)
        return method_order(task), *(float(v) if isinstance(v, int | float) else 0.0 for v in values)

    tasks = [name for name in TASK_SETTINGS if name in varied]
    outside = tasks if tasks and len(tasks) < len(varied) else []
    while True:
        inside = [name for name in varied if name not in outside]
        found: dict[str, dict[str, list[TaskResult]]] = {}
        for task in sorted(data.tasks, key=order):
            panel = found.setdefault(label_of(task, outside), {})
            panel.setdefault(label_of(task, inside) or method_name(task), []).append(task)
        if not inside or max(map(len, found.values()), default=0) <= MOST_SERIES:
            break
        outside.append(inside[0])
    labels = list(dict.fromkeys(label for panel in found.values() for label in panel))
    return [
        Facet(
            title,
            [Series(label, *_look(labels.index(label)), _by_density(held)) for label, held in panel.items()],
            label_of(next(iter(panel.values()))[0], [name for name in outside if name in TASK_SETTINGS]),
        )
        for title, panel in found.items()
    ]


def _by_density(tasks: Sequence[TaskResult]) -> list[list[TaskResult]]:
    """Points by falling density; tasks of several seeds are one, and no seed is in a point twice."""
    points: list[list[TaskResult]] = []
    for task in sorted(tasks, key=lambda t: -t.target):
        seed = task.settings.get("seed")
        for point in points:
            if point[0].target == task.target and all(t.settings.get("seed") != seed for t in point):
                point.append(task)
                break
        else:
            points.append([task])
    return points


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
    missing: str
    joined: bool = True

    def is_known(self, task: TaskResult, measure: str) -> bool:
        """Whether a task has both numbers; zero has no place on a logarithmic axis."""
        return task.numbers.get(self.number, 0) > 0 and measure in task.numbers


COST_AXES = (
    CostAxis(
        *("accuracy-learned", "learned", "learned parameters", "learned parameters", "learned"),
        "Further left is a smaller file; higher is better.",
        "No task says how many parameters it has learned, or how accurate it is.",
    ),
    CostAxis(
        *("accuracy-macs", "macs_left", "MACs", "multiply-accumulates of one sample", "MACs"),
        "Further left is less work for each sample.",
        "No task says both how accurate it is and how many MACs it takes.",
    ),
    CostAxis(
        *("accuracy-latency", "latency_ms", "latency", "milliseconds for one sample", "ms"),
        "Measured at the end of each block, for one sample, on the machine of the run: not in turns, so noisy, and "
        "not joined by lines. The command spalier bench compares with care.",
        "Latency was not measured: the files of tasks do not hold it, runs do.",
        joined=False,
    ),
)


@dataclass(frozen=True)
class _Point:
    facet: Facet
    series: Series
    tasks: Sequence[TaskResult]
    x: Mean
    y: Mean

    @property
    def y_range(self) -> tuple[float, float]:
        deviation = self.y.deviation or 0.0
        return max(self.y.value - deviation, 0), min(self.y.value + deviation, 1)


def accuracy_figures(data: ReportData) -> Iterator[draw.Figure]:
    """Accuracy against each cost that is known."""
    found = facets(data)
    for axis in COST_AXES:
        points = list(_points(data, axis, found))
        if points:
            yield _accuracy_figure(data, axis, points)


def missing(data: ReportData) -> list[str]:
    """What cannot be drawn, in words."""
    unknown = [a for a in COST_AXES if not any(a.is_known(task, data.measure) for task in data.tasks)]
    return [axis.missing for axis in unknown] if data.tasks else []


def _points(data: ReportData, axis: CostAxis, found: Sequence[Facet]) -> Iterator[_Point]:
    for facet in found:
        for series in facet.series:
            for tasks in series.points:
                known = [task for task in tasks if axis.is_known(task, data.measure)]
                x, y = mean(known, axis.number), mean(known, data.measure)
                if x is not None and y is not None:
                    yield _Point(facet, series, known, x, y)


def _accuracy_figure(data: ReportData, axis: CostAxis, points: Sequence[_Point]) -> draw.Figure:
    tasks = [task for point in points for task in point.tasks]
    x = draw.logarithmic(axis.label, [task.numbers[axis.number] for task in tasks])
    shown, panels, rows = list(dict.fromkeys(point.facet for point in points)), [], draw.Rows()
    several = len(shown) > 1
    for facet in shown:
        alike = [point for point in points if point.facet.task == facet.task]  # these share their y axis
        values = [v for p in alike for v in (*p.y_range, *(t.numbers[data.measure] for t in p.tasks))]
        y = draw.linear(MEASURES[data.measure], values, most=1, text=lambda v: f"{100 * v:.4g}%")
        inside = [point for point in points if point.facet is facet]
        marks = [mark for point in inside for mark in _point_marks(data.measure, axis, point)]
        for series in dict.fromkeys(point.series for point in inside):
            line = [(point.x.value, point.y.value) for point in inside if point.series is series]
            label = series.label if not several or len(facet.series) > 1 else ""
            marks.append(draw.Line(line, series.css, label, axis.joined))
        panels.append(draw.Panel(x, y, marks, facet.title, height=180 if several else 250))
    for p in points:
        cost = int(p.x.value) if p.x.value == int(p.x.value) else p.x.value
        names = ([p.facet.title] if several else []) + [p.series.label, draw.density(p.tasks[0].target)]
        rows.append([*names, p.y.count, cost, p.y.value, p.y.deviation, ", ".join(t.key for t in p.tasks)])
    columns = ["series", "density", "tasks", axis.label, MEASURES[data.measure], "standard deviation", "task"]
    columns = ["panel", *columns] if several else columns
    caption = axis.caption
    if any(len(point.tasks) > 1 for point in points):
        caption += " Means over seeds with standard deviations; faint points are single runs."
    if len(tasks) < len(data.tasks):
        caption += f" {len(data.tasks) - len(tasks)} without these numbers are not shown."
    return draw.Figure(axis.name, f"Accuracy against {axis.title}", caption, panels, columns, rows)


def _point_marks(measure: str, axis: CostAxis, point: _Point) -> Iterator[draw.Mark]:
    """The mean of several seeds with its error bar and single runs, or the one task that there is."""
    series, x, y = point.series, point.x, point.y
    lines = [
        f"{series.label}, density {draw.density(point.tasks[0].target)}",
        f"{MEASURES[measure]} {percent(y.value, 2)}",
        f"{short_number(x.value)} {axis.unit}",
    ]
    for word in ("channels", "MACs"):
        if (found := mean(point.tasks, word.lower())) is not None:
            lines.append(f"{percent(found.value)} of {word}")
    if y.deviation is not None:
        lines[1] += f" ± {100 * y.deviation:.2f}, {y.count} seeds"
        yield draw.ErrorBar(x.value, *point.y_range, series.css)
        for task in point.tasks:
            at, accuracy = task.numbers[axis.number], task.numbers[measure]
            tip = f"{task.name}, seed {task.settings.get('seed')}\n{MEASURES[measure]} {percent(accuracy, 2)}"
            tip += f"\n{axis.label} {short_number(at)}"
            yield draw.Dot(at, accuracy, f"{series.css} faint", tip, task.key, series.shape, small=True)
    yield draw.Dot(x.value, y.value, series.css, "\n".join(lines), point.tasks[0].key, series.shape)


# -- bytes ------------------------------------------------------------------------------------------------------------


def bytes_figures(data: ReportData) -> list[draw.Figure]:
    """What files take on disk, and when that pays."""
    known = [task for task in data.tasks if task.numbers.get("bytes")]
    methods = _costs_by_method(data)
    return [_files_figure(data, known)] * bool(known) + [_break_even_figure(methods)] * bool(methods)


def _files_figure(data: ReportData, known: Sequence[TaskResult]) -> draw.Figure:
    """What the file of each task takes on disk; the mean over seeds, where there are several."""
    kinds = {task.settings.get("method") == "fine-pruning" for task in known}
    inside = ["masks, adapters, norms and head"] if False in kinds else []
    inside += ["for fine-pruning, masks and all weights that are left"] if True in kinds else []
    caption = f"Bytes of each task's file: {'; '.join(inside)}."
    points = [(facet, s, point) for facet in facets(data) for s in facet.series for point in s.points]
    rows = []
    for facet, series, point in points:
        if (found := mean(point, "bytes")) is not None:
            words = [facet.title, series.label, draw.density(point[0].target)]
            name = point[0].name if len(data.runs) == 1 else ", ".join(filter(None, words))
            rows.append((name, found.value, f"{name}\n{byte_size(found.value)}", point[0].key))
    caption += " Means over seeds." if any(len(point) > 1 for _, _, point in points) else ""
    if len(rows) > MOST_BARS:
        rows = sorted(rows, key=lambda row: -row[1])[:MOST_BARS]
        caption += f" The {MOST_BARS} largest; the table has more."
    cells: draw.Rows = [
        [t.run, t.name, *(t.numbers.get(n) for n in ("bytes", "network", "base")), _pays_from(_costs([t]))]
        for t in known
    ]
    columns = ["run", "task", *_BYTES]
    return draw.Figure(
        "files", "Files", caption, [bars("", rows, "kept", byte_size)], columns, cells, "files"
    )


def _costs(tasks: Sequence[TaskResult]) -> StoreReport | None:
    """Bytes of tasks like these; None where they are not known."""
    known = [t.numbers for t in tasks if all(t.numbers.get(n) for n in ("bytes", "network", "base"))]
    costs = tuple(TaskCost("", int(numbers["bytes"]), int(numbers["network"])) for numbers in known)
    return StoreReport(int(max(numbers["base"] for numbers in known)), costs) if known else None


def _pays_from(costs: StoreReport | None) -> int | str | None:
    return None if costs is None else costs.break_even or "never"


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
            rows.append([label, draw.density(target), count, *means, costs.base, _pays_from(costs)])
        points = [(target, float(even)) for target, c in by_density.items() if (even := c.break_even)]
        if points and number < MOST_SERIES:
            evens += [pays for _, pays in points]
            marks.append(draw.Line(points, css, label if len(methods) > 1 else ""))
            for target, pays in points:
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


def _costs_by_method(data: ReportData) -> Mapping[str, Mapping[float, StoreReport]]:
    """By base and method, rank and whatever else differs but the task and the seed; by falling density."""
    known = [task for task in data.tasks if _costs([task]) is not None]
    several = len({task.architecture for task in known}) > 1
    names = [name for name in data.varied if name not in (*TASK_SETTINGS, "base")]
    found: dict[str, dict[float, list[TaskResult]]] = {}
    for task in sorted(known, key=lambda t: (method_order(t), -t.target)):
        label = label_of(task, names) or method_name(task)
        label += f", base {task.architecture[:8]}" if several else ""
        found.setdefault(label, {}).setdefault(task.target, []).append(task)
    return {
        label: {t: costs for t in sorted(held, reverse=True) if (costs := _costs(held[t])) is not None}
        for label, held in found.items()
    }
