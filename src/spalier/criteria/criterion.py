"""What a criterion is: a small frozen object that turns weights, or what passes through the network, into numbers.

Write one of your own as a subclass of `WeightCriterion` or `ActivationCriterion` with one method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from spalier.criteria.probe import Probe, Values
from spalier.criteria.scores import Normalise
from spalier.errors import ScoreError


@dataclass(frozen=True)
class Criterion:
    """Anything that scores units. `measure` gets a `Probe` of the network and returns a tensor for each layer."""

    normalise: ClassVar[Normalise] = "l2"
    """How `select` normalises a layer's scores by default."""
    needs_batches: ClassVar[bool] = True

    def measure(self, probe: Probe, batches: Any, loss: Any) -> Values:
        """A score for every unit that is left, by stream and layer."""
        raise ScoreError(f"{type(self).__name__} does not say how it measures; define measure()")

    @property
    def name(self) -> str:
        """What tables call it."""
        return type(self).__name__.lower()


@dataclass(frozen=True)
class WeightCriterion(Criterion):
    """Scores a unit by the weights that write it. Define ``of_weights``.

    >>> class Spread(WeightCriterion):
    ...     def of_weights(self, weights):
    ...         return weights.std(1)
    """

    normalise: ClassVar[Normalise] = "sum"
    needs_batches: ClassVar[bool] = False
    folded: ClassVar[bool] = True
    """Whether the norm behind a layer is folded into its weights."""
    literal: bool = False

    def of_weights(self, weights: Tensor) -> Tensor:
        """One number for each row: the fused weights that write one unit, (units, entries)."""
        raise ScoreError(f"{type(self).__name__} does not say what a weight is worth; define of_weights()")

    def measure(self, probe: Probe, batches: Any, loss: Any) -> Values:
        """A score for every unit that is left, by stream and layer."""
        weights = probe.weights(fused=not self.literal, folded=self.folded)
        return {place: self.of_weights(rows) for place, rows in weights}


@dataclass(frozen=True)
class ActivationCriterion(Criterion):
    """Scores a unit by what passes through it. Define ``of_activations``.

    >>> class Loudness(ActivationCriterion):
    ...     needs_gradients = False
    ...     def of_activations(self, values, gradients):
    ...         return values.abs().mean(1)
    """

    needs_gradients: ClassVar[bool] = True
    needs_values: ClassVar[bool] = True
    """What is not needed is not kept, and is None."""
    signed: ClassVar[bool] = False
    """Whether a negative number means something, so that no absolute value is taken."""
    literal: bool = False
    """The paper's definition: before the norm, in train mode, and no absolute value until everything is summed."""

    def of_activations(self, values: Any, gradients: Any) -> Tensor:
        """A number for each sample and channel, (samples, channels), of (samples, positions, channels).

        Gradients are those of each sample's own loss. Channels of one unit, and calls of one layer, are added up; then
        the absolute value is taken for each sample, and the mean over all samples.
        """
        raise ScoreError(
            f"{type(self).__name__} does not say what an activation is worth; define of_activations()"
        )

    def measure(self, probe: Probe, batches: Any, loss: Any) -> Values:
        """A score for every unit that is left, by stream and layer."""
        return probe.observe(
            batches,
            loss,
            self.of_activations,
            what=self.name,
            gradients=self.needs_gradients,
            values=self.needs_values,
            signed=self.signed,
            literal=self.literal,
        )
