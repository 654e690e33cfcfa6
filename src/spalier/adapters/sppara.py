"""SPPaRA: a full pointwise residual beside each weight, the parallel adapter that SPLoRA makes low-rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spalier.adapters.config import Fit, check_init_range
from spalier.adapters.layers import Geometry
from spalier.adapters.updates import Pointwise


@dataclass(frozen=True)
class SPPaRA:
    """Structured Pruning Parallel Residual Adapter: in * out learned numbers for a layer, whatever its kernel.

    Args:
        init_range: the residual starts uniform in ±init_range.

    >>> SPPaRA()
    SPPaRA(init_range=0.0001)
    """

    init_range: float = 1e-4

    def __post_init__(self) -> None:
        check_init_range(self.init_range)

    def fit(self, geometry: Geometry) -> Fit:
        """What a layer's residual costs."""
        return Fit(rank=None, learned=geometry.inputs * geometry.outputs // geometry.groups)

    def build(self, geometry: Geometry, fit: Fit, weight: Tensor) -> Pointwise:
        """The residual of one weight, near zero, with the weight's dtype and device."""
        return Pointwise(geometry, weight, init_range=self.init_range)
