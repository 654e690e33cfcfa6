"""The adapters of the paper: what each learns for one weight, and the settings that ask for it.

An adapter (`SPLoRA`, `SPDelta`, `SPPaRA`, `LoRA`) is a frozen dataclass of settings. It *fits* a weight's geometry,
which says what it costs there, and *builds* an `Update`: a module that sits beside the weight, starts near zero,
follows its dtype and device, and adds itself to it (Eq. 1-4). Pruning the weight removes the same rows and columns from
the update. `FineTune`, the baseline, learns the weights themselves. `ByLayer` has an adapter for each weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from spalier.adapters.codes import codes_of, levels_of, rounded
from spalier.adapters.geometry import Added, Geometry
from spalier.errors import ConfigError, PruneError, RankError

if TYPE_CHECKING:
    from spalier.adapters.geometry import Indices

    Kept = tuple[Indices | None, ...]


class Stored(NamedTuple):
    """A matrix as a task file has it: its numbers, or the codes of them."""

    values: Tensor
    """(rows, length)."""
    scale: Tensor | None = None
    """Of codes: one for each row, or one for all."""
    levels: int = 0
    """Of codes; 0 for numbers."""


class Update(Added):
    """What an adapter builds for one weight: called with the frozen weight, it returns the fused one."""

    geometry: Geometry

    def cuts(self, outputs: Indices, inputs: Indices) -> list[tuple[nn.Parameter, Kept]]:
        """What stays of each parameter where the weight keeps these outputs and inputs."""
        raise PruneError(f"{type(self).__name__} does not say how it is cut; define its cuts()")

    def narrowed(self, geometry: Geometry, outputs: Indices, inputs: Indices) -> dict[str, object]:
        """The attributes and buffers that go with it."""
        return {"geometry": geometry}

    def stored(self) -> list[Stored]:
        """Its matrices as a task file has them."""
        raise PruneError(f"{type(self).__name__} does not say how it is stored; define its stored()")


class LowRank(Update):
    """``up^T down``: ``down`` projects the inputs to r channels, ``up`` brings these to the outputs (Eq. 3).

    In a grouped layer each group has its own r channels, so the cost stays r (in + out). `refit_` may have rounded the
    factors to a few levels; they go on learning straight through that.
    """

    down: nn.Parameter
    up: nn.Parameter
    kept_inputs: Tensor | None
    kept_outputs: Tensor | None
    down_scale: Tensor | None
    up_scale: Tensor | None

    def __init__(
        self, geometry: Geometry, rank: int, like: Tensor, *, whole: bool, init_range: float, stays_whole: bool = False
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.stays_whole = stays_whole
        """True for plain LoRA, which goes on learning for all channels of the base, those that are gone too."""
        self.first_rank = rank
        """The rank that it began with."""
        self.register_buffer("kept_inputs", None)
        self.register_buffer("kept_outputs", None)
        self.levels = 0
        """How many levels the factors are rounded to; 0 where they are not."""
        self.register_buffer("down_scale", None)
        self.register_buffer("up_scale", None)
        taps = geometry.kernel if whole else ()
        self.down = nn.Parameter(like.new_empty(rank, geometry.inputs, *taps))
        self.up = nn.Parameter(like.new_empty(rank, geometry.outputs))
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
        down, up = self._rounded(self.down, self.down_scale), self._rounded(self.up, self.up_scale)
        down = down if self.kept_inputs is None else down.index_select(1, self.kept_inputs)
        up = up if self.kept_outputs is None else up.index_select(1, self.kept_outputs)
        return down, up

    def _rounded(self, factor: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None:
            return factor
        scale = scale.view(-1, *[1] * (factor.dim() - 1))  # one for each component
        return scale * rounded(factor, scale, self.levels)

    def stored(self) -> list[Stored]:
        """``down``, then ``up``; a row is a component."""
        return [self._stored(self.down, self.down_scale), self._stored(self.up, self.up_scale)]

    def _stored(self, factor: Tensor, scale: Tensor | None) -> Stored:
        matrix = factor.detach().flatten(1)
        if scale is None:
            return Stored(matrix)
        return Stored(codes_of(matrix, scale[:, None], self.levels), scale, self.levels)

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

    def rank_narrowed(self, components: Indices) -> dict[str, Tensor]:
        """The scales of the factors where the bottleneck keeps these components."""
        scales = {"down_scale": self.down_scale, "up_scale": self.up_scale}
        index = torch.from_numpy(components)
        return {key: scale[index.to(scale.device)] for key, scale in scales.items() if scale is not None}

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
        levels = f"{self.levels} levels" if self.levels else ""
        parts = [f"{self.geometry.inputs}, {self.geometry.outputs}", f"rank={self.rank}", taps, levels]
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

    def stored(self) -> list[Stored]:
        """A row is an output."""
        return [Stored(self.residual.detach())]

    def forward(self, weight: Tensor) -> Tensor:
        """The fused weight, differentiable in the residual; the base weight is left as it is."""
        return add_(weight.clone(), pointwise(self.residual, self.geometry), self.geometry)

    def extra_repr(self) -> str:
        """What ``print`` shows of it."""
        return f"{self.geometry.inputs}, {self.geometry.outputs}"


class Coded(Update):
    """A few bits for each entry of the weight, and a scale for each index of its first axis, or one for all.

    ``delta`` has the weight's shape and its unit. What is added is its nearest code times the scale. Codes have no
    gradient, so ``delta`` learns by that of the code, as if nothing had been rounded; and the scale by its gain.
    """

    delta: nn.Parameter
    gain: nn.Parameter
    scale: Tensor

    def __init__(self, geometry: Geometry, weight: Tensor, levels: int, *, by_row: bool, start: float) -> None:
        super().__init__()
        self.geometry, self.levels, self.by_row = geometry, levels, by_row
        rows = weight.detach().flatten(1)
        size = rows.float().square().mean(1 if by_row else (0, 1), keepdim=True).sqrt().view(-1)
        # with a scale of zero, what begins as zeros would never learn
        scale = start * torch.where(size > 0, size, torch.full_like(size, 1 / math.sqrt(geometry.fan_in)))
        self.register_buffer("scale", scale.to(weight.dtype))
        self.gain = nn.Parameter(torch.ones_like(self.scale))
        # signs know no zero, so they begin at random; other codes begin at zero, within half a step of it
        share = 1.0 if levels == 2 else 0.45
        self.delta = nn.Parameter((torch.rand_like(weight) * 2 - 1) * share * self._by_row(self.scale, weight))
        if geometry.padding_idx is not None:
            with torch.no_grad():  # that row of an embedding learns nothing
                self.scale[geometry.padding_idx] = 0

    def _by_row(self, scale: Tensor, like: Tensor) -> Tensor:
        return scale.view(-1, *[1] * (like.dim() - 1))

    def cuts(self, outputs: Indices, inputs: Indices) -> list[tuple[nn.Parameter, Kept]]:
        """The same rows and columns as the weight's."""
        first, second = self._sides(outputs, inputs)
        cut: list[tuple[nn.Parameter, Kept]] = [(self.delta, (first, second))]
        return [*cut, (self.gain, (first,))] if self.by_row else cut

    def _sides(self, outputs: Indices, inputs: Indices) -> tuple[Indices, Indices]:
        """The indices that stay along the weight's first two axes; the second counts inside of a group."""
        import numpy as np

        geometry = self.geometry
        first, second, size = outputs, inputs, geometry.inputs // geometry.groups
        if geometry.inputs_first:
            first, second, size = inputs, outputs, geometry.outputs // geometry.groups
        return first, np.unique(second % size)

    def narrowed(self, geometry: Geometry, outputs: Indices, inputs: Indices) -> dict[str, object]:
        """Scales go with their rows."""
        if not self.by_row:
            return {"geometry": geometry}
        first = torch.from_numpy(self._sides(outputs, inputs)[0]).to(self.scale.device)
        return {"geometry": geometry, "scale": self.scale[first]}

    def stored(self) -> list[Stored]:
        """The codes; a row is an index of the first axis."""
        matrix = self.delta.detach().flatten(1)
        return [Stored(codes_of(matrix, self.scale[:, None], self.levels), self._step().detach(), self.levels)]

    def _step(self) -> Tensor:
        return self.scale * self.gain

    def holding(self, values: Tensor, step: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """What its parameters and buffers are where values are rounded by a step, and codes multiplied by a scale."""
        gain = torch.where(step > 0, scale / step.clamp(min=1e-30), torch.ones_like(step))
        delta = values.reshape(self.delta.shape).to(self.delta).contiguous()
        return {"delta": delta, "gain": gain.to(self.gain), "scale": step.to(self.scale)}

    def forward(self, weight: Tensor) -> Tensor:
        """The fused weight, differentiable in delta and gain; the base weight is left as it is."""
        codes = rounded(self.delta, self._by_row(self.scale, weight), self.levels)
        return weight + self._by_row(self._step(), weight) * codes

    def extra_repr(self) -> str:
        """What ``print`` shows of it."""
        return f"{self.geometry.inputs}, {self.geometry.outputs}, {self.levels} levels"


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

    def build(self, geometry: Geometry, fit: Fit, weight: Tensor) -> Update:
        """The update: a module that maps the frozen weight to the fused one, differentiably."""


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
        taps = math.prod(geometry.kernel) if self.kernel == "full" else 1
        rank, usable = self.rank, geometry.largest_rank(taps)
        if isinstance(rank, float):
            rank = round(rank * usable)
            if rank == 0:
                raise RankError(
                    f"the fraction {self.rank} of {usable}, the largest rank this layer can use, rounds to 0; "
                    "ask for a larger fraction or a number, or leave the layer out with targets="
                )
        if geometry.groups > 1:
            rank = min(rank, usable)
        cost = geometry.inputs * taps + geometry.outputs
        if self.cap:
            rank = min(rank, usable, geometry.numel // cost)
        return Fit(rank=rank, learned=rank * cost)

    def build(self, geometry: Geometry, fit: Fit, weight: Tensor) -> LowRank:
        """The update of one weight, near zero, with the weight's dtype and device."""
        assert fit.rank
        whole, is_lora = self.kernel == "full" and bool(geometry.kernel), isinstance(self, LoRA)
        return LowRank(geometry, fit.rank, weight, whole=whole, init_range=self.init_range, stays_whole=is_lora)


@dataclass(frozen=True)
class LoRA(SPLoRA):
    """Low-rank adaptation as published: ``up`` starts at zero, and pruning the weight leaves the adapter whole.

    A baseline: before any pruning it is SPLoRA; after it, a task still carries r (in + out) of the base's channels.

    >>> LoRA(rank=4).init_range
    0.0
    """

    init_range: float = 0.0


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
class SPDelta:
    """Structured Pruning Delta: a few bits for each kept weight, ``W_t = W_s + s Q``, pruned along with the weight.

    Where few channels are left, few bits for each entry are a shorter code than few components. `refit_` writes what
    was learned wide in this form; it can be learned directly too.

    Args:
        bits: 1, 2, 3, 4 or 8: codes of 2, 3, 7, 15 or 255 levels.
        scales: ``"row"`` has a scale for each output channel (for each input where the weight has inputs first, as in
            an embedding), ``"layer"`` one for all.
        init_range: where the scale starts, as a share of the weights' own size.

    >>> SPDelta(bits=1)
    SPDelta(bits=1, scales='row', init_range=0.01)
    """

    bits: int = 1
    scales: Literal["row", "layer"] = "row"
    init_range: float = 0.01

    def __post_init__(self) -> None:
        levels_of(self.bits)
        check_choice("scales", self.scales, ("row", "layer"))
        check_init_range(self.init_range)
        if not self.init_range:
            raise ConfigError("init_range is 0, expected more: codes of the scale 0 never learn")

    def fit(self, geometry: Geometry) -> Fit:
        """What a layer's codes and scales come to, in learned numbers."""
        return Fit(rank=None, learned=geometry.numel + (geometry.shape[0] if self.by_row(geometry) else 1))

    def build(self, geometry: Geometry, fit: Fit, weight: Tensor) -> Coded:
        """The codes of one weight, with its dtype and device."""
        levels = levels_of(self.bits)
        return Coded(geometry, weight, levels, by_row=self.by_row(geometry), start=self.init_range)

    def by_row(self, geometry: Geometry) -> bool:
        """Whether each index of the first axis of such a weight has a scale of its own."""
        return self.scales == "row" or geometry.padding_idx is not None  # the row that never learns has the scale 0


@dataclass(frozen=True)
class ByLayer:
    """An adapter for each weight by its name; weights that are not named stay frozen.

    What `refit_` leaves behind where it spends a budget of bytes.

    >>> ByLayer({"conv1.weight": SPLoRA(rank=4), "fc1.weight": SPDelta(bits=1)})
    ByLayer(2 weights)
    """

    adapters: Mapping[str, Adapter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, adapter in self.adapters.items():
            if isinstance(adapter, type) or not (hasattr(adapter, "fit") and hasattr(adapter, "build")):
                raise ConfigError(f"the adapter of {name} is {adapter!r}, expected one such as SPLoRA(rank=8)")

    def __repr__(self) -> str:
        return f"ByLayer({len(self.adapters)} weights)"


@dataclass(frozen=True)
class FineTune:
    """Learn the weights themselves, in copies that `detach_` throws away; with pruning, the paper's fine-pruning.

    Without ``targets`` every parameter of the network learns, so that training is ordinary fine-tuning.

    >>> FineTune()
    FineTune()
    """


ADAPTERS: dict[str, type[Any]] = {
    "splora": SPLoRA,
    "spdelta": SPDelta,
    "sppara": SPPaRA,
    "lora": LoRA,
    "fine-pruning": FineTune,
}
"""Every adapter by the name of its method in settings and reports, in the order of reports.

Task files name the class instead.
"""
