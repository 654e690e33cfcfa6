"""`score`: what each unit of a network is worth. `Scores`: the numbers, by stream and by the layers that write it.

Scores are kept as each layer saw them. They are normalised and brought together only in `select`, so one scoring
serves coupled and free writers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from spalier.criteria.criterion import KINDS, Criterion, Normalise
from spalier.criteria.lrp import LRP
from spalier.criteria.probe import Batches, Probe, Values
from spalier.distributed import summed_over_ranks
from spalier.errors import ConfigError, ScoreError
from spalier.structure.structure import Structure, structure_of
from spalier.text import InNotebooks, close_names, near, table

Floats = npt.NDArray[np.float64]
Aggregate = Literal["sum", "mean", "max"]

NORMALISATIONS = ("none", "sum", "l2", "mean", "max")
AGGREGATIONS = ("sum", "mean", "max")


@dataclass(frozen=True, eq=False, repr=False)
class Scores(InNotebooks):
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
        raise ScoreError(f"no layer {name!r} was scored; expected a name such as {near(name, known)}")

    def of(self, stream: str, normalise: Normalise | None = None, aggregate: Aggregate = "mean") -> Floats:
        """The scores of a stream: each of its layers normalised, then brought together."""
        if stream not in self.layers:
            raise ScoreError(f"no stream {stream!r} was scored; expected a name such as {near(stream, self.layers)}")
        parts = [normalised(each, normalise or self.normalise) for each in self.layers[stream].values()]
        gone = np.isnan(np.stack(parts)).all(0)
        stacked = np.nan_to_num(np.stack(parts))  # a unit that one writer alone has lost counts nothing there
        if aggregate not in AGGREGATIONS:
            raise ConfigError(f"aggregate is {aggregate!r}, expected one of {', '.join(AGGREGATIONS)}")
        total: Floats = getattr(np, aggregate)(stacked, axis=0)
        return np.where(gone, np.nan, total)

    def __repr__(self) -> str:
        units = sum(len(next(iter(parts.values()))) for parts in self.layers.values())
        return f"Scores({self.criterion}, {units:,} units in {len(self.layers):,} streams, {self.samples:,} samples)"

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


CRITERIA: dict[str, Callable[[], Criterion]] = {kind().name: kind for kind in (*KINDS[:4], LRP, *KINDS[4:])}


def score(
    net: nn.Module,
    batches: Batches | None = None,
    criterion: str | Criterion = "taylor",
    *,
    loss: Callable[..., Tensor] | None = None,
    structure: Structure | None = None,
) -> Scores:
    """Score every unit that ``net`` has left: how much it matters, by stream and by the layers that write it.

    All criteria look at fused weights. The network is not touched: what runs is a plain copy in eval mode, frozen. In a
    distributed run every rank scores its own batches, and all get the scores of all samples.

    Args:
        net: a network, adapted or not, pruned or not.
        batches: an iterable of ``(inputs, targets)`` or of dicts of keyword arguments; ``weight``, ``magnitude`` and
            ``random`` need none.
        criterion: a name (weight, magnitude, gradient, taylor, lrp, second_order, movement, random), or an object of
            `spalier.criteria` or your own.
        loss: a function of the network's output and the batch's targets that gives the mean over the batch; by default
            the output's own ``loss``. ``lrp`` needs none: it explains the target's output.
        structure: what `trace` found; an adapted network remembers it where ``attach_`` was given an example.

    >>> from spalier import trace
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> _ = net[0].weight.data.copy_(torch.tensor([[1., 2.], [0., 1.], [-4., 1.]]))
    >>> score(net, criterion="weight", structure=trace(net, torch.ones(1, 2)))["0"]
    array([3., 1., 5.])
    """
    chosen = criterion_of(criterion)
    structure = structure_of(net, structure)
    if not structure.streams:
        raise ScoreError("the network has nothing that can be pruned; print its structure to see why")
    probe = Probe(net, structure)
    with torch.inference_mode(False):
        values = chosen.measure(probe, batches if chosen.needs_batches else None, loss)
    if chosen.needs_batches:
        values, probe.samples = summed_over_ranks(values, probe.samples)
    layers = _layers(probe, values, chosen)
    return Scores(structure, chosen.name, chosen.normalise, layers, probe.samples)


def criterion_of(given: str | Criterion) -> Criterion:
    """The criterion that a name means, or the object itself."""
    if isinstance(given, Criterion):
        return given
    if isinstance(given, str) and given in CRITERIA:
        return CRITERIA[given]()
    meant = f"did you mean {near(given, CRITERIA)}? " if close_names(given, CRITERIA) else ""
    raise ConfigError(
        f"criterion is {given!r}, {meant}expected one of {', '.join(CRITERIA)}, or an object such as "
        "spalier.criteria.Weight(p=2)"
    )


def _layers(probe: Probe, values: Values, criterion: Criterion) -> dict[str, dict[str, Floats]]:
    """Scores of all units of the base; NaN for those that are gone."""
    found: dict[str, dict[str, Floats]] = {stream.name: {} for stream in probe.structure.streams}
    for (number, layer), value in values.items():
        stream = probe.structure.streams[number]
        alive = probe.kept.streams[number]
        if len(value) != alive.sum():
            alive = probe.kept.writers.get(layer, alive)
        given = value.detach().to("cpu", torch.float64).numpy()
        if given.shape != (int(alive.sum()),):
            raise ScoreError(
                f"{criterion.name} gives {layer!r} scores of shape {given.shape}, expected one for each of its "
                f"{int(alive.sum())} units"
            )
        if not np.isfinite(given).all():
            raise ScoreError(f"{layer!r} has scores that are NaN or infinite; go back to sound weights")
        scores = np.full(stream.size, np.nan)
        scores[alive] = given
        found[stream.name][layer] = scores
    missing = [name for name, parts in found.items() if not parts]
    if missing:
        raise ScoreError(f"{criterion.name} gives no scores for {missing[0]!r}; every stream needs some")
    return found
