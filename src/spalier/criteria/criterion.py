"""Criteria: small frozen objects that give every unit of a network one number.

Write one of your own as a subclass of `WeightCriterion` or `ActivationCriterion` with one method. Those that come
with Spalier look at weights (`Weight`, `Magnitude`), at nothing (`Random`, the control), at activations and the
loss's gradient there (`Gradient`, `Taylor`), at where training drives a unit (`Movement`), or at the curvature of
the loss (`SecondOrder`). Relevance is in lrp.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from spalier.criteria.probe import Batch, Probe, Values, Watch, loss_of, mean_product, sample_axis, seeing, watched
from spalier.errors import ConfigError, ScoreError
from spalier.structure.graph import in_eval_mode
from spalier.structure.sites import layer_name

Normalise = Literal["none", "sum", "l2", "mean", "max"]


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
        raise ScoreError(f"{type(self).__name__} does not say what an activation is worth; define of_activations()")

    def measure(self, probe: Probe, batches: Any, loss: Any) -> Values:
        """A score for every unit that is left, by stream and layer."""
        twin, watches = probe.twin(), probe.watches()
        wanted = {"gradients": self.needs_gradients, "values": self.needs_values, "before_norm": self.literal}
        with in_eval_mode(twin), watched(twin, watches, self.of_activations, **wanted) as record:
            for norm in (m for m in twin.modules() if isinstance(m, _BatchNorm)):
                norm.training = self.literal  # the published code scored in train mode

            def one(batch: Batch) -> list[Tensor | None]:
                record.start(batch.size)
                with torch.set_grad_enabled(self.needs_gradients):
                    output = batch.run(twin)
                    if self.needs_gradients:  # of the loss's sum: here every sample counts as one
                        (loss_of(loss, output, batch, twin) * batch.size).backward()
                return record.take()

            return probe.means(watches, batches, one, what=self.name, signed=self.signed, literal=self.literal)


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
        return torch.linalg.vector_norm(weights, self.p, 1, dtype=torch.float64)  # type: ignore[no-any-return]


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


@dataclass(frozen=True)
class Movement(ActivationCriterion):
    """How much the loss would grow, to first order, without the unit, with its sign.

    That is minus weight times gradient: positive where the next step of training drives the unit away from zero.
    """

    signed: ClassVar[bool] = True

    def of_activations(self, values: Any, gradients: Any) -> Tensor:
        """Minus value times gradient, the sum over positions."""
        return mean_product(values, gradients) * -float(values.shape[1])


@dataclass(frozen=True)
class SecondOrder(Criterion):
    """``|g| + |H 1| / 2`` for each sample, where gates of value 1 multiply every unit of the network.

    g is the loss's gradient in the gates, H its Hessian, and H 1 one Hessian-vector product: how each unit's loss
    changes with all others, as in SOSP.
    """

    def measure(self, probe: Probe, batches: Any, loss: Any) -> Values:
        """A score for every unit that is left, by stream and layer."""
        twin, watches, samples = probe.twin(), probe.watches(), [0]
        gates: Gates = [[] for _ in watches]
        places = [
            (watch.site.module, watch.site.side, partial(_apply_gate, watch, made, samples))
            for watch, made in zip(watches, gates, strict=True)
        ]
        with in_eval_mode(twin), seeing(twin, places), sdpa_kernel(SDPBackend.MATH):
            return probe.means(watches, batches, lambda batch: _one(twin, batch, loss, gates, samples), what=self.name)

    @property
    def name(self) -> str:
        """What tables call it."""
        return "second_order"


Gates = list[list[Tensor]]
"""For each site, the gates of each call, (samples, units)."""


@torch.enable_grad()
def _one(twin: nn.Module, batch: Batch, loss: Any, gates: Gates, samples: list[int]) -> list[Tensor | None]:
    samples[:] = [batch.size]
    for each in gates:
        each.clear()
    value = loss_of(loss, batch.run(twin), batch, twin) * batch.size  # the sum of the samples' own losses
    flat = [gate for each in gates for gate in each]
    try:
        first = torch.autograd.grad(value, flat, create_graph=True, materialize_grads=True)
        total = torch.stack([gradient.sum() for gradient in first]).sum()
        second = torch.autograd.grad(total, flat, materialize_grads=True)
    except RuntimeError as error:
        raise ScoreError(
            f"second_order needs the gradient of a gradient, and some operation of this network has none: {error}; "
            "use criterion 'taylor'"
        ) from error
    slopes, bends = (gradient.detach() for gradient in first), iter(second)
    calls = [([next(slopes) for _ in each], [next(bends) for _ in each]) for each in gates]
    return [sum(a).abs() + sum(b).abs() / 2 if a else None for a, b in calls]  # type: ignore[union-attr]


def _apply_gate(watch: Watch, gates: list[Tensor], batch: list[int], value: Tensor) -> Tensor:
    """Every unit of every sample, of which the current batch has so many, times a gate of its own."""
    axis = watch.site.axis % value.dim()
    first = sample_axis(tuple(value.shape), axis, batch[0])
    samples = 1 if first is None else batch[0]
    gate = torch.ones(samples, watch.units, dtype=value.dtype, device=value.device).requires_grad_()
    gates.append(gate)
    padded = torch.cat([gate, torch.ones_like(gate[:, :1])], 1)[:, watch.where.to(value.device)]
    if first is None:
        return value * padded.view([-1 if a == axis else 1 for a in range(value.dim())])
    windows = value.shape[first] // samples  # those of one sample share its gates
    padded = padded.repeat_interleave(windows, 0)
    shape = [n if a in (first, axis) else 1 for a, n in enumerate(value.shape)]
    return value * (padded if first < axis else padded.T).reshape(shape)


KINDS: tuple[type[Criterion], ...] = (Weight, Magnitude, Gradient, Taylor, SecondOrder, Movement, Random)
"""Those of this file, in the order in which their names are listed."""
