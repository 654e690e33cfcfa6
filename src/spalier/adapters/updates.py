"""What a task learns of one weight: the update, as a module that sits beside the weight it updates.

An update is drawn near zero, follows the weight's dtype and device, and knows how to add itself to the weight.
Removing channels from the weight removes the same rows and columns here (Eq. 4).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spalier.adapters.geometry import Added, Geometry
from spalier.errors import PruneError

if TYPE_CHECKING:
    from spalier.adapters.geometry import Indices

    Kept = tuple[Indices | None, ...]  # for each axis, the indices that stay; None where all do


class Update(Added):
    """What an adapter builds for one weight: called with the frozen weight, it returns the fused one."""

    geometry: Geometry

    def cuts(self, outputs: Indices, inputs: Indices) -> list[tuple[nn.Parameter, Kept]]:
        """What stays of each parameter where the weight keeps these outputs and inputs."""
        raise PruneError(f"{type(self).__name__} does not say how it is cut; define its cuts()")

    def narrowed(self, geometry: Geometry, outputs: Indices, inputs: Indices) -> dict[str, object]:
        """The attributes and buffers that go with it."""
        return {"geometry": geometry}


class LowRank(Update):
    """``up^T down``: ``down`` projects the inputs to r channels, ``up`` brings these to the outputs (Eq. 3).

    In a grouped layer each group has its own r channels, so the cost stays r (in + out).
    """

    down: nn.Parameter
    up: nn.Parameter
    kept_inputs: Tensor | None
    kept_outputs: Tensor | None

    def __init__(
        self,
        geometry: Geometry,
        rank: int,
        weight: Tensor,
        *,
        whole_kernel: bool,
        init_range: float,
        stays_whole: bool = False,
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.stays_whole = stays_whole
        """True for plain LoRA, which goes on learning for all channels of the base, those that are gone too."""
        self.first_rank = rank
        """The rank that it began with."""
        self.register_buffer("kept_inputs", None)
        self.register_buffer("kept_outputs", None)
        taps = geometry.kernel if whole_kernel else ()
        self.down = nn.Parameter(weight.new_empty(rank, geometry.inputs, *taps))
        self.up = nn.Parameter(weight.new_empty(rank, geometry.outputs))
        self._initialise(init_range)

    @property
    def rank(self) -> int:
        """How many channels the bottleneck has."""
        return len(self.down)

    def factors(self, *, inputs_first: bool) -> tuple[Tensor, Tensor]:
        """``(down, up)`` for a layer whose weight lies that way round.

        A weight tied between an embedding and a linear layer lies both ways, and so does its one update.
        """
        down, up = self._left()
        return (down, up) if inputs_first == self.geometry.inputs_first else (up, down)

    def _left(self) -> tuple[Tensor, Tensor]:
        """The factors for the channels that are left."""
        down: Tensor = self.down if self.kept_inputs is None else self.down.index_select(1, self.kept_inputs)
        up: Tensor = self.up if self.kept_outputs is None else self.up.index_select(1, self.kept_outputs)
        return down, up

    def cuts(self, outputs: Indices, inputs: Indices) -> list[tuple[nn.Parameter, Kept]]:
        """The same rows and columns as the weight's (Eq. 4)."""
        return [] if self.stays_whole else [(self.down, (None, inputs)), (self.up, (None, outputs))]

    @torch.no_grad()
    def importance(self) -> Tensor:
        """The size of each component of the bottleneck: the Frobenius norm of what it adds to the weight."""
        groups = self.geometry.groups  # each group has matrices of its own
        sizes = torch.ones(self.rank, groups, dtype=torch.float64, device=self.down.device)
        for factor in self._left():
            sizes *= factor.double().reshape(self.rank, groups, -1).square().sum(2)
        return sizes.sum(1).sqrt()

    def rank_cuts(self, components: Indices) -> list[tuple[nn.Parameter, Kept]]:
        """What stays of each factor where the bottleneck keeps these components."""
        return [(f, (components, *(None,) * (f.dim() - 1))) for f in (self.down, self.up)]

    def narrowed(self, geometry: Geometry, outputs: Indices, inputs: Indices) -> dict[str, object]:
        """A factor that stays whole notes which channels are left."""
        if not self.stays_whole:
            return {"geometry": geometry}
        left = {"kept_inputs": inputs, "kept_outputs": outputs}
        noted: dict[str, object] = {"geometry": geometry}
        for key, index in left.items():
            before = getattr(self, key)
            now = torch.from_numpy(index).to(self.down.device)
            noted[key] = now if before is None else before[now]
        return noted

    def forward(self, weight: Tensor) -> Tensor:
        """The fused weight, differentiable in the factors; the base weight is left as it is."""
        down, up = self._left()
        return add_(weight.clone(), low_rank(down, up, self.geometry), self.geometry)

    def extra_repr(self) -> str:
        """What ``print`` shows of it."""
        taps = "whole kernel" if self.down.dim() > 2 else "centre tap" if self.geometry.kernel else ""
        parts = [f"{self.geometry.inputs}, {self.geometry.outputs}", f"rank={self.rank}", taps]
        return ", ".join(filter(None, parts))

    @torch.no_grad()
    def _initialise(self, init_range: float) -> None:
        nn.init.uniform_(self.up, -init_range, init_range)
        nn.init.uniform_(self.down, *_symmetric(1 / math.sqrt(self.geometry.fan_in)))
        if (
            self.geometry.padding_idx is not None
        ):  # that row learns nothing, so its update must start at nothing
            self.down[:, self.geometry.padding_idx] = 0


class Pointwise(Update):
    """A full matrix added to the weight, at the centre tap of a kernel (SPPaRA)."""

    residual: nn.Parameter

    def __init__(self, geometry: Geometry, weight: Tensor, *, init_range: float) -> None:
        super().__init__()
        self.geometry = geometry
        shape = (geometry.outputs, geometry.inputs // geometry.groups)
        self.residual = nn.Parameter(weight.new_empty(shape))
        nn.init.uniform_(self.residual, -init_range, init_range)
        if geometry.padding_idx is not None:
            with torch.no_grad():
                self.residual[:, geometry.padding_idx] = 0

    def cuts(self, outputs: Indices, inputs: Indices) -> list[tuple[nn.Parameter, Kept]]:
        """The same rows and columns as the weight's."""
        import numpy as np

        size = self.geometry.inputs // self.geometry.groups
        return [(self.residual, (outputs, np.unique(inputs % size)))]  # the same ones in every group

    def forward(self, weight: Tensor) -> Tensor:
        """The fused weight, differentiable in the residual; the base weight is left as it is."""
        return add_(weight.clone(), pointwise(self.residual, self.geometry), self.geometry)

    def extra_repr(self) -> str:
        """What ``print`` shows of it."""
        return f"{self.geometry.inputs}, {self.geometry.outputs}"


def low_rank(down: Tensor, up: Tensor, geometry: Geometry) -> Tensor:
    """``up^T down`` for each group, as (groups, out / groups, in / groups), or with the whole kernel behind it."""
    rank, groups = len(down), geometry.groups
    down = down.reshape(rank, groups, geometry.inputs // groups, *down.shape[2:])
    up = up.reshape(rank, groups, geometry.outputs // groups)
    return torch.einsum("rgo,rgi...->goi...", up, down)


def pointwise(residual: Tensor, geometry: Geometry) -> Tensor:
    """A full matrix for each group."""
    return residual.view(geometry.groups, -1, residual.shape[1])


def add_(weight: Tensor, delta: Tensor, geometry: Geometry) -> Tensor:
    """Add a delta of (groups, out / groups, in / groups), or with the whole kernel behind it, to a weight."""
    view = geometry.grouped(weight)
    if delta.dim() < view.dim():
        for tap in geometry.centre:
            view = view.select(3, tap)
    view += delta
    return weight


def _symmetric(bound: float) -> tuple[float, float]:
    return -bound, bound
