"""The figures of docs/paper.md, drawn by the report's own code from the cells' results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from experiments.paper.cells import METHODS, RANKS
from experiments.paper.found import Found
from experiments.paper.protocol import Protocol
from experiments.paper.tables import DATA, NAMES
from spalier.reporting.comparisons import comparison_figures
from spalier.reporting.draw import Axis, Cell, Dot, ErrorBar, Figure, Line, Mark, Panel, linear, logarithmic
from spalier.reporting.draw import density as in_percent
from spalier.reporting.load import ReportData, Run, TaskResult
from spalier.text import Mean

ROWS, COLUMNS = 768, 3072


def figures(found: Found, protocol: Protocol) -> list[Figure]:
    """All that there are results for."""
    drawn = [theory(), *_accuracies(found, protocol), masks(found, protocol), ablation(found), worth(found)]
    return [figure for figure in drawn if figure.rows]


# -- figure 2: theory -------------------------------------------------------------------------------------------------


def learned_share(method: str, kept: float, rank: int = 0) -> float:
    """Learned weights of a 768x3072 matrix, as a share of it, where so much of its rows and of its columns is kept.

    >>> learned_share("fine-pruning", 0.5), learned_share("lora", 0.5, 32)
    (0.25, 0.052083333333333336)
    >>> learned_share("splora", 0.5, 32)
    0.026041666666666668
    """
    if method == "fine-pruning":
        return kept * kept
    thin = rank * (ROWS + COLUMNS) / (ROWS * COLUMNS)
    return thin if method == "lora" else thin * kept


def theory() -> Figure:
    """The paper's figure 2: learned weights against the density of weights."""
    kept = [10 ** (-2 * i / 40) for i in range(41)]
    series: list[tuple[str, str, int]] = [("fine-pruning", "fine-pruning", 0)]
    series += [(f"LoRA r{rank}", "lora", rank) for rank in (32, 8)]
    series += [(f"SPLoRA r{rank}", "splora", rank) for rank in (32, 8)]
    lines = [
        Line(
            [(share**2, learned_share(method, share, rank)) for share in kept if share**2 >= 1e-3],
            f"s{i}",
            label,
        )
        for i, (label, method, rank) in enumerate(series)
    ]
    x = logarithmic("weights kept", [1e-3, 1.0], text=in_percent)
    y = logarithmic("learned, of the whole matrix", [p for line in lines for _, p in line.points], text=in_percent)
    rows: list[list[Cell]] = [
        [label, share**2, learned_share(method, share, rank)]
        for label, method, rank in series
        for share in (1.0, 0.5**0.5, 0.3**0.5, 0.1**0.5, 0.1)
    ]
    return Figure(
        "theory",
        f"What a {ROWS}x{COLUMNS} matrix learns",
        "Rows and columns are kept alike. Fine-pruning learns all that is kept, LoRA always the same.",
        [Panel(x, y, lines)],
        ["series", "weights kept", "learned share"],
        rows,
    )


# -- figures 3, 5 and 6: accuracy against what a task costs -----------------------------------------------------------


def _accuracies(found: Found, protocol: Protocol) -> Iterator[Figure]:
    """Against learned parameters and MACs, by criterion; a figure for each data set."""
    for data in protocol.data:
        cells = [
            cell
            for criterion in protocol.criteria[data]
            for learning in METHODS
            for cell in found.pick(data=data, criterion=criterion, learning=learning)
        ]
        for figure in comparison_figures(_report_data(data, cells)) if cells else ():
            if figure.name != "accuracy-latency":  # which is measured in turns elsewhere
                yield replace(figure, name=f"{data}-{figure.name}", title=f"{DATA[data]}: {_lower(figure.title)}")


def _lower(title: str) -> str:
    return title[0].lower() + title[1:]


def _report_data(data: str, cells: Sequence[dict[str, Any]]) -> ReportData:
    """What a report would load from the folders of these runs."""
    runs = [Run(cell["cell"], [_task(cell, row) for row in cell["rows"]]) for cell in cells]
    several = len({cell["labels"]["criterion"] for cell in cells}) > 1
    return ReportData("folder of runs", data, runs, {}, ["criterion", "learning"] if several else ["learning"])


def _task(cell: dict[str, Any], row: dict[str, Any]) -> TaskResult:
    told = cell["labels"]
    return TaskResult(
        key=f"{cell['cell']}/{row['task']}",
        name=row["task"],
        run=cell["cell"],
        settings={
            "criterion": told["criterion"],
            "learning": NAMES[told["learning"]],
            "seed": told["seed"],
        },
        target=row["target"],
        numbers={name: value for name, value in row.items() if isinstance(value, int | float)},
    )


# -- masks, ranks -----------------------------------------------------------------------------------------------------


def _line(points: Iterable[tuple[float, Mean | None]], css: str, label: str) -> list[Mark]:
    """Means that are joined, with their deviations."""
    known = [(x, mean) for x, mean in points if mean is not None]
    marks: list[Mark] = [
        ErrorBar(x, mean.value - mean.deviation, mean.value + mean.deviation, css)
        for x, mean in known
        if mean.deviation is not None
    ]
    marks += [Line([(x, mean.value) for x, mean in known], css, label)] if known else []
    return marks + [Dot(x, mean.value, css, f"{label}\n{mean}") for x, mean in known]


def _accuracy_axis(marks: Iterable[Mark]) -> Axis:
    dots = [mark.y for mark in marks if isinstance(mark, Dot)]
    return linear("test accuracy", dots, most=100, text=lambda v: f"{v:g}%")


def masks(found: Found, protocol: Protocol) -> Figure:
    """Accuracy where masks hold, where they were released, and where the released are removed in the end."""
    ways = (
        ("enforced", "", "test"),
        ("released", "released", "test"),
        ("then removed", "released", "test_removed"),
    )
    densities = [0.7, 0.5, 0.3, 0.2, 0.1]
    panels, rows = [], list[list[Cell]]()
    drawn: list[tuple[str, list[Mark]]] = []
    for learning in METHODS:
        marks: list[Mark] = []
        for number, (words, variant, measure) in enumerate(ways):
            labels: dict[str, Any] = {
                "data": "cifar10",
                "criterion": "taylor",
                "learning": learning,
                "variant": variant,
            }
            points = [(d, found.mean(d, measure, **labels)) for d in densities]
            marks += _line(points, f"s{number}", words)
            rows += [[NAMES[learning], words, in_percent(d), mean.value, mean.deviation] for d, mean in points if mean]
        drawn.append((NAMES[learning], marks))
    x = logarithmic("channels that count as kept", densities, text=in_percent)
    y = _accuracy_axis(mark for _, marks in drawn for mark in marks)
    panels = [Panel(x, y, marks, title, height=200) for title, marks in drawn]
    return Figure(
        "masks",
        "CIFAR-10: masks that hold, and masks that do not",
        "Released masks are set at each prune and hold for no step of training, as in the published code.",
        panels,
        ["learning", "masks", "channels", "accuracy", "standard deviation"],
        rows,
    )


def ablation(found: Found) -> Figure:
    """The paper's figure 4 by rank: accuracy at each density."""
    found = found.alike(data=["cifar10"], criterion=["taylor"], learning=[f"r{rank}" for rank in RANKS], variant=[""])
    densities = [1.0, 0.5, 0.3, 0.2, 0.1]
    marks: list[Mark] = []
    rows = list[list[Cell]]()
    for number, at in enumerate(densities):
        points = [(float(r), found.mean(at, data="cifar10", criterion="taylor", learning=f"r{r}")) for r in RANKS]
        marks += _line(points, f"s{number}", in_percent(at))
        rows += [[in_percent(at), int(r), mean.value, mean.deviation] for r, mean in points if mean]
    x = Axis("rank", 0.8, 80, tuple((float(r), str(r)) for r in RANKS), log=True)
    return Figure(
        "ranks",
        "CIFAR-10: accuracy by rank, at each share of channels",
        "SPLoRA with Taylor scores.",
        [Panel(x, _accuracy_axis(marks), marks)],
        ["channels", "rank", "accuracy", "standard deviation"],
        rows,
    )


def worth(found: Found) -> Figure:
    """Accuracy at 10% of the channels against the bytes of the task's file."""
    found = found.alike(data=["cifar10"], criterion=["taylor"], variant=["", "rank-pruned=0.25", "rank-pruned=0.0625"])
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("centre tap", f"r{rank}", {"learning": f"r{rank}"}) for rank in RANKS
    ]
    kinds += [("whole kernel", f"r{rank}", {"learning": f"r{rank}", "kernel": "full"}) for rank in (1, 2, 8)]
    kinds += [
        ("r32, components pruned", v, {"learning": "r32", "variant": f"rank-pruned={v}"}) for v in ("0.25", "0.0625")
    ]
    kinds += [("fine-pruning", "", {"learning": "fine-pruning"})]
    marks: list[Mark] = []
    rows = list[list[Cell]]()
    groups = list(dict.fromkeys(group for group, _, _ in kinds))
    for number, group in enumerate(groups):
        points = []
        for _, name, labels in (kind for kind in kinds if kind[0] == group):
            test = found.mean(0.1, data="cifar10", criterion="taylor", **labels)
            size = found.mean(0.1, "bytes", scale=1, data="cifar10", criterion="taylor", **labels)
            if test is not None and size is not None:
                points.append((size.value, test))
                rows.append([group, name, round(size.value), test.value, test.deviation])
        marks += _line(sorted(points, key=lambda p: p[0]), f"s{number}", group)
    x = logarithmic("bytes of the task's file", [float(row[2] or 1) for row in rows])
    return Figure(
        "worth",
        "CIFAR-10: what bytes give at 10% of the channels",
        "Each point is a rank, rising to the right.",
        [Panel(x, _accuracy_axis(marks), marks)],
        ["adapter", "rank or share", "bytes", "accuracy", "standard deviation"],
        rows,
    )
