"""What a report is made of: runs, the tasks that came out of them, and what is known of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["run", "sweep", "store", "folder of runs"]
MEASURES = {"test": "test accuracy", "validation": "validation accuracy"}
"""What accuracy may be of, the better measure first."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of the base, and which of its output channels a task keeps."""

    name: str
    kept: npt.NDArray[np.bool_]

    @property
    def channels(self) -> int:
        """How many the base has."""
        return len(self.kept)

    @property
    def left(self) -> int:
        """How many the task keeps."""
        return int(self.kept.sum())


@dataclass(frozen=True)
class Scores:
    """How many units had which score before a prune: below the edges, in each bin, above them."""

    criterion: str
    samples: int
    edges: Sequence[float]
    streams: Mapping[str, tuple[Sequence[int], Sequence[int]]]
    """Counts of those that were kept and of those that were removed, by stream."""


@dataclass(frozen=True)
class Example:
    """An image that was classified rightly or wrongly."""

    label: int
    guess: int
    confidence: float
    png: bytes


@dataclass(frozen=True, eq=False)
class Entry:
    """One task: its numbers, and what can be seen of it."""

    key: str
    """Unique in the report; the fragment of its address."""
    name: str
    run: str
    settings: Mapping[str, Any]
    """What tells it from tasks of other runs: data, method, rank..."""
    seed: Any
    target: float
    """The density that was asked for; tasks of several seeds are brought together by it."""
    numbers: Mapping[str, float | None]
    """test, validation, channels, weights, macs (shares), macs_left, learned, latency_ms, bytes, network, base..."""
    classes: Sequence[str] = ()
    confusion: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    layers: Sequence[Layer] = ()
    scores: Scores | None = None
    examples: Sequence[Example] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """What else the task's file says, as text."""
    architecture: str = ""

    def number(self, name: str) -> float | None:
        """A number, None where it is not known."""
        return self.numbers.get(name)


@dataclass(frozen=True)
class Epoch:
    """A line of a run's metrics."""

    block: int
    step: int
    loss: float | None
    validation: float | None


@dataclass(frozen=True, eq=False)
class Run:
    """A row of tasks that came out of one another; in a store, those that seem to have."""

    name: str
    entries: Sequence[Entry]
    epochs: Sequence[Epoch] = ()
    state: str = "done"
    targets: Mapping[int, float] = field(default_factory=dict)
    """What each block led to, by its number; those whose task cannot be read too."""


@dataclass(frozen=True, eq=False)
class Findings:
    """All that a folder holds, for a report."""

    kind: Kind
    name: str
    runs: Sequence[Run]
    settings: Mapping[str, Any]
    """Settings that all runs share."""
    varied: Sequence[str]
    """Settings that tell series apart, without the seed."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Runs that failed, and files that cannot be read, with what is wrong."""
    date: str = ""
    repeats: Mapping[str, str] = field(default_factory=dict)
    """Runs that are not shown, since another one has the same settings and the same seed: that one's name."""

    @property
    def entries(self) -> list[Entry]:
        """The tasks of all runs."""
        return [entry for run in self.runs for entry in run.entries]

    @property
    def measure(self) -> str:
        """What accuracy is shown: of test samples where there are any."""
        known = (m for m in MEASURES if any(e.number(m) is not None for e in self.entries))
        return next(known, "test")
