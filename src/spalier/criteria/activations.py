"""Criteria of first order: what passes through a unit, and the loss's gradient there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from spalier.criteria.criterion import ActivationCriterion
from spalier.criteria.watching import mean_product


@dataclass(frozen=True)
class Gradient(ActivationCriterion):
    """The loss's gradient after the norm: its mean over positions, its absolute value for each sample."""

    needs_values: ClassVar[bool] = False

    def of_activations(self, values: Any, gradients: Any) -> Tensor:
        """The mean gradient."""
        mean: Tensor = gradients.mean(1)
        return mean if self.literal else mean.abs()


@dataclass(frozen=True)
class Taylor(ActivationCriterion):
    """How much the loss would change, to first order, without the unit; its absolute value for each sample."""

    def of_activations(self, values: Any, gradients: Any) -> Tensor:
        """Value times gradient, the mean over positions."""
        return mean_product(values, gradients)
