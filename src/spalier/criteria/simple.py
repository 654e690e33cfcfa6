"""Criteria that look at weights alone, and the random control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from spalier.criteria.criterion import Criterion, WeightCriterion
from spalier.criteria.probe import Probe, Values
from spalier.criteria.scores import Normalise
from spalier.errors import ConfigError
from spalier.structure.sites import layer_name


@dataclass(frozen=True)
class Weight(WeightCriterion):
    """The L_p norm of the fused weights that write a unit, the batch norm behind them folded in.

    ``literal=True`` scores the frozen base's weights without their adapters, as the published code did.
    """

    p: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.p, int | float) or not self.p > 0:
            raise ConfigError(f"p is {self.p!r}, expected a positive number such as 1 or 2")

    def of_weights(self, weights: Tensor) -> Tensor:
        """Their L_p norm."""
        norms: Tensor = torch.linalg.vector_norm(weights, self.p, 1, dtype=torch.float64)
        return norms


@dataclass(frozen=True)
class Magnitude(WeightCriterion):
    """The mean absolute value of the fused weights that write a unit, norms left out."""

    folded: ClassVar[bool] = False

    def of_weights(self, weights: Tensor) -> Tensor:
        """Their mean absolute value."""
        sums: Tensor = torch.linalg.vector_norm(weights, 1, 1, dtype=torch.float64)
        return sums / weights.shape[1]


@dataclass(frozen=True)
class Random(Criterion):
    """Random numbers: the control that every other criterion has to beat."""

    normalise: ClassVar[Normalise] = "none"
    needs_batches: ClassVar[bool] = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"seed is {self.seed!r}, expected an integer of at least 0")

    def measure(self, probe: Probe, batches: Any, loss: Any) -> Values:
        """One draw for every unit of the base, so that what is left keeps its number."""
        generator = torch.Generator().manual_seed(self.seed)
        found: Values = {}
        for number, stream in enumerate(probe.structure.streams):
            for name in dict.fromkeys(map(layer_name, stream.writers)):
                drawn = torch.rand(stream.size, generator=generator, dtype=torch.float64)
                left = probe.kept.writers.get(name, probe.kept.streams[number])
                found[number, name] = drawn[torch.from_numpy(left)]
        return found
