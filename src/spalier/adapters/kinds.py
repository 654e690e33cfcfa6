"""The adapters of the paper: what each learns for one weight, and the settings that ask for it.

An adapter (`SPLoRA`, `LoRA`, `SPPaRA`) is a frozen dataclass of settings. It *fits* a weight's geometry, which says
what it costs there, and *builds* an `Update`: a module that sits beside the weight, starts near zero, follows its
dtype and device, and adds itself to it (Eq. 1-4). Pruning the weight removes the same rows and columns from the
update. `FineTune`, the baseline, learns the weights themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from spalier.adapters.geometry import Added, Geometry
from spalier.errors import ConfigError, PruneError, RankError

if TYPE_CHECKING:
    from spalier.adapters.geometry import Indices

    Kept = tuple[Indices | None, ...]


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
        # one factor near zero keeps the network as it was; the other must not be, or neither would get a gradient
        bound = 1 / math.sqrt(self.geometry.fan_in)
        nn.init.uniform_(self.up, -init_range, init_range)
        nn.init.uniform_(self.down, -bound, bound)
        # that row of an embedding learns nothing, so its update must start at nothing
        if self.geometry.padding_idx is not None:
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
