"""Scores: one number for each unit of each stream, from each layer that writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

import numpy as np
import numpy.typing as npt

from spalier.errors import ConfigError, ScoreError
from spalier.structure.structure import Structure
from spalier.text import table

Floats = npt.NDArray[np.float64]
Normalise = Literal["none", "sum", "l2", "mean", "max"]
Aggregate = Literal["sum", "mean", "max"]

NORMALISATIONS = ("none", "sum", "l2", "mean", "max")
AGGREGATIONS = ("sum", "mean", "max")


@dataclass(frozen=True, eq=False)
class Scores:
    """How much each unit matters: the higher, the longer it stays. Print it."""

    structure: Structure
    criterion: str
    normalise: Normalise
    """How `select` normalises each layer's scores unless told otherwise."""
    layers: Mapping[str, Mapping[str, Floats]]
    """By stream, and by the layers that write it: a score for each unit of the base, NaN where it is gone."""
    samples: int = 0
    """How many samples were looked at."""

    def __getitem__(self, name: str) -> Floats:
        """The scores of a layer, or of a stream that one layer alone writes, as they were measured."""
        found = [parts[name] for parts in self.layers.values() if name in parts]
        if not found and len(self.layers.get(name, ())) == 1:
            found = list(self.layers[name].values())
        if len(found) == 1:
            return found[0].copy()
        known = [layer for parts in self.layers.values() for layer in parts]
        close = get_close_matches(str(name), known, n=3) or known[:3]
        raise ScoreError(
            f"no layer {name!r} was scored; expected a name such as {', '.join(map(repr, close))}"
        )

    def of(self, stream: str, normalise: Normalise | None = None, aggregate: Aggregate = "sum") -> Floats:
        """The scores of a stream: each of its layers normalised, then brought together."""
        parts = [normalised(each, normalise or self.normalise) for each in self.layers[stream].values()]
        gone = np.isnan(np.stack(parts)).all(0)
        stacked = np.nan_to_num(np.stack(parts))  # a unit that one writer alone has lost counts nothing there
        if aggregate not in AGGREGATIONS:
            raise ConfigError(f"aggregate is {aggregate!r}, expected one of {', '.join(AGGREGATIONS)}")
        total: Floats = getattr(np, aggregate)(stacked, axis=0)
        return np.where(gone, np.nan, total)

    def __str__(self) -> str:
        rows = [
            [stream, layer, f"{np.isfinite(s).sum():,}", *(f"{v:.3g}" for v in _summary(s))]
            for stream, parts in self.layers.items()
            for layer, s in parts.items()
        ]
        text = table(["stream", "seen at", "units", "lowest", "median", "highest"], rows)
        over = f", {self.samples:,} samples" if self.samples else ""
        return f"{text}\n{self.criterion}{over}; normalised by {self.normalise}"


def _summary(scores: Floats) -> tuple[float, float, float]:
    alive = scores[~np.isnan(scores)]
    return float(alive.min()), float(np.median(alive)), float(alive.max())


def normalised(scores: Floats, how: Normalise) -> Floats:
    """A layer's scores, divided by their sum, L2 norm, mean or maximum over what is alive.

    >>> normalised(np.array([1.0, 3.0, np.nan]), "sum")
    array([0.25, 0.75,  nan])
    """
    alive = np.abs(scores[~np.isnan(scores)])
    if how not in NORMALISATIONS:
        raise ConfigError(f"normalise is {how!r}, expected one of {', '.join(NORMALISATIONS)}")
    size = 1.0
    if how == "l2":
        size = float(np.linalg.norm(alive))
    elif how != "none":
        size = float(getattr(np, how)(alive))
    return scores / size if size > 0 else scores.copy()
