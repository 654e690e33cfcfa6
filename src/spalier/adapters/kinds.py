"""What every adapter configuration shares.

SPLoRA, the paper's adapter (Eq. 4), and LoRA (Eq. 3), its baseline.

SPPaRA: a full pointwise residual beside each weight, the parallel adapter that SPLoRA makes low-rank.

Full fine-tuning behind the same interface: the baseline that learns every weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from spalier.adapters.geometry import Geometry
from spalier.adapters.updates import LowRank, Pointwise, Update
from spalier.errors import ConfigError, RankError


@dataclass(frozen=True)
class Fit:
    """What an adapter comes to on one weight."""

    rank: int | None
    learned: int


class Adapter(Protocol):
    """How to update frozen weights: one small frozen object that fits any geometry."""

    def fit(self, geometry: Geometry) -> Fit:
        """What the update of such a weight costs; ``learned`` 0 leaves the weight frozen."""
        ...

    def build(self, geometry: Geometry, fit: Fit, weight: Tensor) -> Update:
        """The update: a module that maps the frozen weight to the fused one, differentiably."""
        ...


def check_init_range(value: object) -> None:
    """Refuse what is not a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"init_range is {value!r}, expected a number")
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"init_range is {value}, expected a finite number of at least 0")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse what is not one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}")


Kernel = Literal["center", "full"]


@dataclass(frozen=True)
class SPLoRA:
    """Structured Pruning Low-rank Adapter: a rank-r update that is pruned along with the weight it updates.

    ``W_t = W_s + up^T down`` on the channels that are kept: r (in + out) learned numbers for a layer.

    Args:
        rank: a number of channels, or a fraction of the largest rank that a layer can use. Taken exactly as asked,
            except that a grouped layer takes no more than its groups can use.
        init_range: ``up`` starts uniform in ±init_range, so that the adapted network starts as the base.
        kernel: ``"center"`` updates the centre tap of a convolution (the paper's count), ``"full"`` every tap,
            at r (in * taps + out).
        cap: lower each layer's rank to the largest whose adapter costs no more than the weight it adapts.

    >>> SPLoRA(rank=8)
    SPLoRA(rank=8, init_range=0.0001, kernel='center', cap=False)
    """

    rank: int | float = 8
    init_range: float = 1e-4
    kernel: Kernel = "center"
    cap: bool = False

    def __post_init__(self) -> None:
        _check_rank(self.rank)
        check_init_range(self.init_range)
        check_choice("kernel", self.kernel, ("center", "full"))
        if not isinstance(self.cap, bool):
            raise ConfigError(f"cap is {self.cap!r}, expected True or False")

    def fit(self, geometry: Geometry) -> Fit:
        """The rank that a layer gets, and what it costs; nothing where a cap leaves no rank that pays."""
        rank = self._asked(geometry)
        if geometry.groups > 1:
            rank = min(rank, _usable(geometry, self.kernel))
        cost = geometry.inputs * self._taps(geometry) + geometry.outputs
        if self.cap:
            rank = min(rank, _usable(geometry, self.kernel), geometry.numel // cost)
        return Fit(rank=rank, learned=rank * cost)

    def build(self, geometry: Geometry, fit: Fit, weight: Tensor) -> LowRank:
        """The update of one weight, near zero, with the weight's dtype and device."""
        assert fit.rank
        whole = self.kernel == "full" and bool(geometry.kernel)
        return LowRank(
            geometry,
            fit.rank,
            weight,
            whole_kernel=whole,
            init_range=self.init_range,
            stays_whole=isinstance(self, LoRA),
        )

    def _asked(self, geometry: Geometry) -> int:
        if isinstance(self.rank, int):
            return self.rank
        usable = _usable(geometry, self.kernel)
        rank = round(self.rank * usable)
        if rank == 0:
            raise RankError(
                f"the fraction {self.rank} of {usable}, the largest rank this layer can use, rounds to 0; "
                "ask for a larger fraction or a number, or leave the layer out with targets="
            )
        return rank

    def _taps(self, geometry: Geometry) -> int:
        return math.prod(geometry.kernel) if self.kernel == "full" else 1


@dataclass(frozen=True)
class LoRA(SPLoRA):
    """Low-rank adaptation as published: ``up`` starts at zero, and pruning the weight leaves the adapter whole.

    A baseline: before any pruning it is SPLoRA; after it, a task still carries r (in + out) of the base's channels.

    >>> LoRA(rank=4).init_range
    0.0
    """

    init_range: float = 0.0


def _usable(geometry: Geometry, kernel: Kernel) -> int:
    """The largest rank that the matrix of one group can have."""
    taps = math.prod(geometry.kernel) if kernel == "full" else 1
    return min(geometry.inputs // geometry.groups * taps, geometry.outputs // geometry.groups)


def _check_rank(rank: object) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int | float):
        raise RankError(f"rank is {rank!r}, expected a positive integer or a fraction in (0, 1]")
    if isinstance(rank, int) and rank < 1:
        raise RankError(f"rank is {rank}, expected at least 1")
    if isinstance(rank, float) and not 0 < rank <= 1:
        raise RankError(
            f"rank is the fraction {rank}, expected in (0, 1]; write a number of channels as an integer, rank=8"
        )


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


@dataclass(frozen=True)
class FineTune:
    """Learn the weights themselves, in copies that `detach_` throws away; with pruning, the paper's fine-pruning.

    Without ``targets`` every parameter of the network learns, so that training is ordinary fine-tuning.

    >>> FineTune()
    FineTune()
    """


ADAPTERS: dict[str, type[Any]] = {
    "splora": SPLoRA,
    "sppara": SPPaRA,
    "lora": LoRA,
    "fine-pruning": FineTune,
}
"""Every adapter by the name of its method in settings and reports, in the order of reports.

Task files name the class instead.
"""
