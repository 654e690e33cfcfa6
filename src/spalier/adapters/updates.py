"""What a task learns of one weight: the update, as a module that sits beside the weight it updates.

An update is drawn near zero, follows the weight's dtype and device, and knows how to add itself to the weight.
Removing channels from the weight removes the same rows and columns here (Eq. 4).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spalier.adapters.layers import Geometry


class Update(nn.Module):
    """What an adapter builds for one weight: called with the frozen weight, it returns the fused one."""


class LowRank(Update):
    """``up^T down``: ``down`` projects the inputs to r channels, ``up`` brings these to the outputs (Eq. 3).

    In a grouped layer each group has its own r channels, so the cost stays r (in + out).
    """

    down: nn.Parameter
    up: nn.Parameter

    def __init__(
        self, geometry: Geometry, rank: int, weight: Tensor, *, whole_kernel: bool, init_range: float
    ) -> None:
        super().__init__()
        self.geometry = geometry
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
        if inputs_first == self.geometry.inputs_first:
            return self.down, self.up
        return self.up, self.down

    def forward(self, weight: Tensor) -> Tensor:
        """The fused weight, differentiable in the factors; the base weight is left as it is."""
        shape, rank = self.geometry, self.rank
        down = self.down.view(rank, shape.groups, shape.inputs // shape.groups, *self.down.shape[2:])
        up = self.up.view(rank, shape.groups, shape.outputs // shape.groups)
        delta = torch.einsum("rgo,rgi...->goi...", up, down)
        return _added(weight, delta, shape)

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

    def forward(self, weight: Tensor) -> Tensor:
        """The fused weight, differentiable in the residual; the base weight is left as it is."""
        shape = self.geometry
        return _added(weight, self.residual.view(shape.groups, -1, self.residual.shape[1]), shape)

    def extra_repr(self) -> str:
        """What ``print`` shows of it."""
        return f"{self.geometry.inputs}, {self.geometry.outputs}"


def _added(weight: Tensor, delta: Tensor, geometry: Geometry) -> Tensor:
    """``weight`` plus a delta of (groups, out / groups, in / groups), or with the whole kernel behind it."""
    fused = weight.clone()
    view = geometry.grouped(fused)
    if delta.dim() < view.dim():
        for tap in geometry.centre:
            view = view.select(3, tap)
    view += delta
    return fused


def _symmetric(bound: float) -> tuple[float, float]:
    return -bound, bound
