"""Tasks as series of points: one for each method, rank and so on, seeds brought together, data side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from spalier.reporting.model import Entry, Findings
from spalier.reporting.naming import TASK_SETTINGS, clean, value_name

MOST = 12
"""How many series one panel may have."""
COLOURS = 8
_METHODS = ("splora", "sppara", "lora", "fine-pruning")


@dataclass(frozen=True, eq=False)
class Series:
    """Tasks that belong together, by falling density; those of several seeds are one point."""

    label: str
    number: int
    points: Sequence[Sequence[Entry]]

    @property
    def css(self) -> str:
        """The class that says its colour."""
        return f"s{self.number % COLOURS}"

    @property
    def shape(self) -> int:
        """The shape of its points; colours come again with another one."""
        return self.number // COLOURS


@dataclass(frozen=True, eq=False)
class Facet:
    """Series that are shown in one panel."""

    title: str
    series: Sequence[Series]
    task: str = ""
    """What was learned: accuracies of panels with the same task compare."""


@dataclass(frozen=True)
class Mean:
    """A number over seeds."""

    value: float
    deviation: float | None
    """With n - 1; None for one value."""
    count: int


def mean(entries: Sequence[Entry], name: str) -> Mean | None:
    """The mean of a number over the tasks that have it; None where none has."""
    values = [v for v in (e.number(name) for e in entries) if v is not None]
    if not values:
        return None
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Mean(statistics.fmean(values), deviation, len(values))


def facets(findings: Findings) -> list[Facet]:
    """All tasks, as panels of series."""
    varied = list(findings.varied)

    def order(entry: Entry) -> tuple[float, ...]:
        given = (entry.settings.get(name) for name in varied)
        return method_rank(entry), *(float(v) if isinstance(v, int | float) else 0.0 for v in given)

    tasks = [name for name in TASK_SETTINGS if name in varied]
    split = tasks if tasks and len(tasks) < len(varied) else []
    while True:
        inside = [name for name in varied if name not in split]
        found = _split(sorted(findings.entries, key=order), split, inside)
        if not inside or max((len(labels) for labels in found.values()), default=0) <= MOST:
            break
        split.append(inside[0])
    labels = {label: None for series in found.values() for label in series}
    numbers = {label: number for number, label in enumerate(labels)}
    return [
        Facet(
            title,
            [Series(label, numbers[label], _points(held)) for label, held in series.items()],
            _label(next(iter(series.values()))[0], [name for name in split if name in TASK_SETTINGS]),
        )
        for title, series in found.items()
    ]


def _split(
    entries: Sequence[Entry], split: list[str], inside: list[str]
) -> dict[str, dict[str, list[Entry]]]:
    found: dict[str, dict[str, list[Entry]]] = {}
    for entry in entries:
        title = _label(entry, split)
        label = _label(entry, inside) or (method_name(entry) if not split else "")
        found.setdefault(title, {}).setdefault(label or method_name(entry), []).append(entry)
    return found


def method_rank(entry: Entry) -> int:
    """Adapters before the baseline."""
    method = entry.settings.get("method")
    return _METHODS.index(method) if method in _METHODS else len(_METHODS)


def _label(entry: Entry, names: Sequence[str]) -> str:
    return clean(", ".join(value_name(name, entry.settings.get(name)) for name in names))


def method_name(entry: Entry) -> str:
    """The method with its rank: SPLoRA-8."""
    method, rank = entry.settings.get("method"), entry.settings.get("rank")
    name = value_name("method", method)
    return clean(f"{name}-{rank}" if method in ("splora", "lora") and rank is not None else name)


def _points(entries: Sequence[Entry]) -> list[list[Entry]]:
    """By falling density, those of several seeds together; no seed is in a point twice."""
    by_target: dict[float, list[list[Entry]]] = {}
    for entry in entries:
        points = by_target.setdefault(entry.target, [])
        free = (p for p in points if all(e.seed != entry.seed for e in p))
        point = next(free, None)
        if point is None:
            points.append([entry])
        else:
            point.append(entry)
    return [point for target in sorted(by_target, reverse=True) for point in by_target[target]]
