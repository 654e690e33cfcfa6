"""Budgets of time: measured layer costs say where to look, and the pruned network itself is measured there."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spalier.adapters.attach import detach_
from spalier.adapters.attachment import is_marked
from spalier.adapters.fuse import fuse
from spalier.budget.meter import Meter
from spalier.budget.ranking import first_step
from spalier.distributed import from_first_rank
from spalier.errors import BudgetError
from spalier.pruning.kept import MARK, Kept
from spalier.pruning.plan import Plan
from spalier.pruning.prune import prune_
from spalier.structure.capture import arguments, copied

GRID = (0.125, 0.25, 0.5, 1.0)
"""The shares of a layer's inputs and outputs at which it is timed."""
ROUNDS = 3
ATTEMPTS = 3
"""How often what was measured corrects the table."""


class Latency:
    """Times layers of other widths, and whole networks."""

    def __init__(self, net: nn.Module, meter: Meter, example: Any) -> None:
        self.net, self.meter = net, meter
        self.example = copied(meter.structure.example if example is None else example)
        if self.example is None:
            raise BudgetError("a budget of latency needs an example batch; pass example=")
        self.base = _base_of(net)
        self.table: dict[str, Any] = from_first_rank(self._measured_layers)

    def search(
        self, most: int, plan_at: Callable[[int], Plan], kept_at: Callable[[int], Kept], share: float
    ) -> tuple[int, float, float]:
        """How many steps bring the measured time within its share, that time, and the unpruned network's.

        The table says where to look, and what is measured there corrects it.
        """
        scale, best = 1.0, most
        whole = self._looked_up(self.meter.whole)
        tried: dict[int, tuple[float, float]] = {}
        for _ in range(ATTEMPTS):
            limit = share * whole / scale
            steps = first_step(most, lambda n, limit=limit: self._looked_up(kept_at(n)) <= limit)  # type: ignore[misc]
            best = most if steps is None else steps
            if best in tried:
                break
            small, base = tried[best] = self._measured(plan_at(best), whole)
            scale = (small / base) / max(self._looked_up(kept_at(best)) / whole, 1e-9)
            if 0.95 * share <= small / base <= share:
                break
        while not _within(tried, share) and max(tried) < most:  # the table was too hopeful: go on
            best = min(most, max(tried) + max(1, most // 20))
            tried[best] = self._measured(plan_at(best), whole)
        reached = _within(tried, share)
        if not reached:
            small, base = min(tried.values(), key=lambda pair: pair[0] / pair[1])
            raise BudgetError(
                f"latency={share} cannot be reached: with all that may go gone, {small / base:.3f} was measured; "
                "ask for that or more"
            )
        best = min(reached)
        small, base = tried[best]
        if small >= 0.98 * base:
            warnings.warn(
                f"the plan will not be faster: {1e3 * small:.2f} ms were measured, and {1e3 * base:.2f} ms without it; "
                "on this machine something other than the number of channels takes the time",
                stacklevel=4,
            )
        return best, small, base

    # whole networks

    def _measured(self, plan: Plan, whole: float) -> tuple[float, float]:
        found: tuple[float, float] = from_first_rank(lambda: self._timed(plan, whole))
        return found

    def _timed(self, plan: Plan, whole: float) -> tuple[float, float]:
        """Seconds of the pruned and of the unpruned network, in turns."""
        small = _plain(self.net)  # fused: it has no adapters any more, so ranks say nothing
        prune_(small, Plan(plan.structure, plan.keep, writers=plan.writers), check=False)
        if self.base is not None:
            fast, slow = seconds([small, self.base], self.example)
            return fast, slow
        (fast,) = seconds([small], self.example)
        return fast, whole

    # layers

    def _measured_layers(self) -> dict[str, Any]:
        """For each layer, seconds at each point of the grid; and what is left of the whole network's time."""
        net = _plain(self.net)
        shapes = _input_shapes(net, self.example)
        known: dict[Any, Any] = {}
        layers: dict[str, Any] = {}
        for name, (layer, shape) in shapes.items():
            key = (type(layer), shape, tuple(layer.weight.shape), repr(layer))
            if key not in known:
                known[key] = _timed_grid(layer, shape)
            layers[name] = known[key]
        (total,) = seconds([net], self.example)
        now = sum(_interpolated(grid, 1.0, 1.0) for grid in layers.values())
        return {"layers": layers, "rest": max(total - now, 0.0), "total": total}

    def _looked_up(self, kept: Kept) -> float:
        """What the table says of a network with these units."""
        structure, now = self.meter.structure, self.meter.kept
        found = 0.0
        for name, grid in self.table["layers"].items():
            tensor = structure.names[f"{name}.weight"]
            left, had = (k.of(structure, tensor) for k in (kept, now))
            out, into = (float(left[a].sum() / had[a].sum()) for a in (0, 1))
            found += _interpolated(grid, out, into)
        share = self.meter.channels(kept) / max(self.meter.channels(now), 1)  # norms, activations, sums
        return found + float(self.table["rest"]) * share


def _within(tried: dict[int, tuple[float, float]], share: float) -> list[int]:
    return [steps for steps, (small, base) in tried.items() if small <= share * base]


def _plain(net: nn.Module) -> nn.Module:
    """A copy to time: fused, in eval mode; it still knows what it has left of its base."""
    return (fuse(net) if is_marked(net) else copy.deepcopy(net)).eval()


def _base_of(net: nn.Module) -> nn.Module | None:
    """The unpruned network, if it can be had."""
    if MARK not in net.__dict__:
        return _plain(net)
    if not is_marked(net):
        return None
    twin = copy.deepcopy(net)
    detach_(twin)
    return twin.eval()


@torch.no_grad()
def seconds(nets: list[nn.Module], example: Any, rounds: int = 9) -> list[float]:
    """The median time of one forward of each network, measured in turns."""
    args, kwargs = arguments(example)
    for net in nets:
        net(*args, **kwargs)
    times: list[list[float]] = [[] for _ in nets]
    for _ in range(rounds):
        for net, row in zip(nets, times, strict=True):
            start = time.perf_counter()
            net(*args, **kwargs)
            row.append(time.perf_counter() - start)
    return [median(row) for row in times]


def _input_shapes(net: nn.Module, example: Any) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """The plain convolutions and linear layers that run, and what they take."""
    found: dict[str, tuple[Any, tuple[int, ...]]] = {}
    handles = []
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    for name, module in net.named_modules():
        if isinstance(module, kinds) and getattr(module, "groups", 1) == 1:

            def note(layer: nn.Module, args: Any, name: str = name) -> None:
                if args and isinstance(args[0], Tensor):
                    found.setdefault(name, (layer, tuple(args[0].shape)))

            handles.append(module.register_forward_pre_hook(note))
    args, kwargs = arguments(example)
    try:
        with torch.no_grad():
            net(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.no_grad()
def _timed_grid(layer: Any, shape: tuple[int, ...]) -> Any:
    """Seconds of a layer at each share of its outputs and inputs."""
    axis = len(shape) - 1 if isinstance(layer, nn.Linear) else len(shape) - layer.weight.dim() + 1
    grid = np.zeros((len(GRID), len(GRID)))
    narrow = copy.copy(layer)
    narrow._parameters = dict(layer._parameters)
    narrow._forward_hooks, narrow._forward_pre_hooks = (
        type(layer._forward_hooks)(),
        type(layer._forward_hooks)(),
    )
    for i, out in enumerate(GRID):
        for j, into in enumerate(GRID):
            outputs, inputs = (
                max(1, round(share * n)) for share, n in zip((out, into), layer.weight.shape, strict=False)
            )
            narrow._parameters["weight"] = nn.Parameter(
                layer.weight[:outputs, :inputs].clone(), requires_grad=False
            )
            if layer.bias is not None:
                narrow._parameters["bias"] = nn.Parameter(layer.bias[:outputs].clone(), requires_grad=False)
            size = [inputs if a == axis else n for a, n in enumerate(shape)]
            x = torch.ones(size, dtype=layer.weight.dtype, device=layer.weight.device)
            (grid[i, j],) = seconds([narrow], x, ROUNDS)
    return grid


def _interpolated(grid: Any, out: float, into: float) -> float:
    """Between the points of the grid, linearly in both shares; below the least, as at the least."""
    rows = [np.interp(into, GRID, row) for row in grid]
    return float(np.interp(out, GRID, rows))
