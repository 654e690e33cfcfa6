"""The best approximation of one weight's delta by an adapter: as an `Update` that is set, not trained.

Errors are measured by a `Metric`: what the layer's inputs are like, and how much the loss feels of each output. Without
data both are the same in all directions, and the best low-rank update is the SVD of the delta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from spalier.adapters.codes import best_scales, codes_of, scale_of
from spalier.adapters.geometry import Geometry
from spalier.adapters.kinds import Coded, LoRA, LowRank, Pointwise, SPDelta, SPLoRA, SPPaRA, Update
from spalier.errors import ConfigError, RankError
from spalier.pruning.regression import reduced


@dataclass(frozen=True)
class Metric:
    """What an error of a layer's weight does."""

    gram: Tensor | None = None
    """Second moments of the layer's inputs, (in * taps, in * taps); None where they are not known."""
    outputs: Tensor | None = None
    """What the loss feels of each output, (out,); None for the same."""
    power: float = 1.0
    """The inputs' mean square, where the moments are not known."""

    def in_all_directions(self) -> Metric:
        """The same on average, for a weight inside of what was measured."""
        power = self.power if self.gram is None else float(self.gram.diagonal().mean())
        return Metric(power=power * (1.0 if self.outputs is None else float(self.outputs.mean())))


@dataclass
class Delta:
    """What was learned for one weight, as far as the network still has it."""

    name: str
    path: str
    """Of the layer."""
    geometry: Geometry
    base: Tensor
    """What is left of the base's weight."""
    fused: Tensor
    """What the network computes with."""
    metric: Metric = field(default_factory=Metric)

    @cached_property
    def values(self) -> Tensor:
        """What was added to the base."""
        return self.fused - self.base

    @property
    def is_layers_own(self) -> bool:
        """Whether it is what the layer multiplies its input with; attention has several others."""
        return self.name.rpartition(".")[2] == "weight"

    @property
    def is_nothing(self) -> bool:
        """Whether the weight is still the base's."""
        return not bool(self.values.count_nonzero())

    def error(self, made: Tensor | None = None) -> float:
        """What is missing of the layer's output with another delta, in the metric; None for no delta at all."""
        return self._power(self.values if made is None else self.values - made)

    @cached_property
    def size(self) -> float:
        """The layer's output in the same measure."""
        return self._power(self.fused)

    def _power(self, weight: Tensor) -> float:
        metric = self.metric
        if metric.gram is None:
            rows = self.geometry.grouped(weight).flatten(2).square().sum(2).flatten() * metric.power
        else:
            matrix = weight.flatten(1).to(metric.gram)
            rows = ((matrix @ metric.gram) * matrix).sum(1)
        if metric.outputs is not None:
            rows = rows * metric.outputs
        return max(float(rows.double().sum()), 0.0)


def approximation(delta: Delta, adapter: Any) -> Update:
    """The update that an adapter's best approximation of a delta is."""
    weight, geometry = delta.base, delta.geometry
    if isinstance(adapter, LoRA) or not isinstance(adapter, SPLoRA | SPDelta | SPPaRA):
        raise ConfigError(f"refit_ cannot write {adapter!r}; expected SPLoRA, SPDelta, SPPaRA or FineTune")
    fit = adapter.fit(geometry)
    update = adapter.build(geometry, fit, weight)
    with torch.no_grad():
        if isinstance(update, LowRank):
            _check_rank(delta, update)
            down, up = low_rank_of(delta, update.rank, whole=update.down.dim() > 2)
            _set_(update, down=down, up=up)
        elif isinstance(update, Coded):
            set_codes_(update, delta.values, delta.metric.gram)
        elif isinstance(update, Pointwise):
            _set_(update, residual=_centre(geometry.grouped(delta.values), geometry).flatten(0, 1))
    return update


def _set_(update: nn.Module, **values: Tensor) -> None:
    for name, value in values.items():
        parameter = update.get_parameter(name)
        parameter.copy_(value.reshape(parameter.shape))


def _check_rank(delta: Delta, update: LowRank) -> None:
    usable = delta.geometry.largest_rank(math.prod(update.down.shape[2:]))
    if update.rank > usable:
        raise RankError(
            f"rank {update.rank} is more than {delta.path or delta.name} can use now, which is {usable}; ask for that "
            "or less, or for SPLoRA(rank, cap=True), which lowers it layer by layer"
        )


def low_rank_of(delta: Delta, rank: int, *, whole: bool) -> tuple[Tensor, Tensor]:
    """The factors of the best update of a rank: ``down`` (rank, inputs, taps), ``up`` (rank, outputs).

    The first components of them are the best update of a lower rank.
    """
    geometry, metric = delta.geometry, delta.metric
    grouped = geometry.grouped(delta.values)
    matrices = grouped.flatten(2) if whole else _centre(grouped, geometry)  # (groups, out / groups, features)
    if metric.gram is not None and whole and geometry.groups == 1:
        sizes = torch.ones(len(matrices[0])) if metric.outputs is None else metric.outputs.sqrt()
        sizes = sizes.to(matrices).clamp(min=1e-6 * float(sizes.max()) + 1e-30)
        down, up = reduced((matrices[0] * sizes[:, None]).T.double(), rooted(metric.gram)[0], rank)
        return down.T.flip(0).to(matrices), (up / sizes.double()).flip(0).to(matrices)
    left, sizes, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    root = sizes[:, :rank].sqrt()
    up = (left[:, :, :rank] * root[:, None]).permute(2, 0, 1).flatten(1)  # (rank, groups * out / groups)
    down = (right[:, :rank] * root[:, :, None]).transpose(0, 1)  # (rank, groups, features)
    return down.to(matrices).flatten(1), up.to(matrices)


def rooted(gram: Tensor) -> tuple[Tensor, Tensor]:
    """A metric with as small a ridge as makes it positive, and its Cholesky root, in float64.

    Moments of fewer samples than features have zeros for eigenvalues, and sums round them to either side.
    """
    wide = gram.double()
    eye = torch.eye(len(gram), dtype=torch.float64, device=gram.device)
    for share in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2):
        metric = wide + (share * float(wide.diagonal().mean()) + 1e-30) * eye
        root, failed = torch.linalg.cholesky_ex(metric)
        if not failed:
            return metric, root
    # inputs that are nearly always zero, or of one direction alone: only their sizes count
    metric = torch.diag(wide.diagonal().clamp(min=1e-12))
    return metric, metric.sqrt()


def _centre(grouped: Tensor, geometry: Geometry) -> Tensor:
    """The centre tap of every entry: (groups, out / groups, in / groups)."""
    for tap in geometry.centre:
        grouped = grouped.select(3, tap)
    return grouped


def set_codes_(update: Coded, values: Tensor, gram: Tensor | None, step: Tensor | None = None) -> None:
    """Let codes come as near as they can to a delta; with a step to round by, or the best."""
    matrix = values.flatten(1).float()
    metric = gram if gram is not None and len(gram) == matrix.shape[1] else None  # else it is not for these rows
    if step is None:
        step, scale = best_scales(matrix, update.levels, metric, by_row=update.by_row)
    else:
        codes = codes_of(matrix, step[:, None], update.levels)
        scale, _ = scale_of(codes, matrix, metric, by_row=update.by_row)
    if update.geometry.padding_idx is not None:
        step = step.clone()
        step[update.geometry.padding_idx] = 0
    update.load_state_dict(update.holding(values, step, scale))


def round_factors_(update: LowRank, levels: int) -> None:
    """Let the factors of an update be codes of these levels."""
    for key, factor in (("down_scale", update.down), ("up_scale", update.up)):
        matrix = factor.detach().flatten(1).float()
        step, _ = best_scales(matrix, levels, free=False)
        update._buffers[key] = step.to(factor)
    update.levels = levels


def added(update: Update, delta: Delta) -> Tensor:
    """What an update adds to the weight."""
    with torch.no_grad():
        made: Tensor = update(torch.zeros_like(delta.base))
    return made
