"""All figures of a report, by where they belong."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spalier.reporting.accuracy import accuracy
from spalier.reporting.details import details
from spalier.reporting.figure import Figure
from spalier.reporting.learning import learning
from spalier.reporting.model import Findings
from spalier.reporting.sizes import sizes
from spalier.reporting.wall import wall


@dataclass(frozen=True)
class Plates:
    """The figures."""

    overview: Sequence[Figure]
    walls: Sequence[Figure | None]
    """By run, as the curves."""
    curves: Sequence[Figure | None]
    details: Mapping[str, Sequence[Figure]]
    """By task."""
    files: Sequence[Figure]

    def all(self) -> list[Figure]:
        """In the order of the page."""
        runs = [f for pair in zip(self.walls, self.curves, strict=True) for f in pair if f is not None]
        return [
            *self.overview,
            *runs,
            *(f for several in self.details.values() for f in several),
            *self.files,
        ]


def plates(findings: Findings) -> Plates:
    """Draw up every figure that there are numbers for."""
    runs = [run for run in findings.runs if run.entries or run.epochs]
    names, single = _Names(), len(runs) == 1
    own = ["" if single else f"-{names.of(run.name)}" for run in runs]
    return Plates(
        list(accuracy(findings)),
        [wall(run, f"wall{name}") for run, name in zip(runs, own, strict=True)],
        [learning(run, f"learning{name}") for run, name in zip(runs, own, strict=True)],
        {
            entry.key: list(details(entry, names.of(entry.name if single else entry.key)))
            for run in runs
            for entry in run.entries
        },
        sizes(findings),
    )


class _Names:
    """Names that are safe in files and addresses, and no two the same."""

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def of(self, text: str) -> str:
        plain = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:80] or "x"
        found, count = plain, 1
        while found.lower() in self.taken:
            count += 1
            found = f"{plain}-{count}"
        self.taken.add(found.lower())
        return found
