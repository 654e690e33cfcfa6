"""Budgets of time: measured layer costs say where to look, and the pruned network itself is measured there.

`select`: from scores and a budget to a plan.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spalier.adapters.attach import Names, detach_, fuse, select_named
from spalier.adapters.attachment import attachment_of, is_marked
from spalier.adapters.kinds import LowRank
from spalier.budget import Meter, Order, Ranking, components, first_step, unit_groups
from spalier.criteria.criterion import Normalise
from spalier.criteria.score import AGGREGATIONS, NORMALISATIONS, Aggregate, Floats, Scores
from spalier.distributed import assert_same_on_every_rank, from_first_rank
from spalier.errors import BudgetError, ConfigError, PlanError
from spalier.pruning.plan import MARK, Kept, Plan, Writers, narrowed
from spalier.pruning.prune import prune_
from spalier.structure.capture import arguments, copied
from spalier.structure.labels import Mask
from spalier.structure.structure import Structure, structure_of

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


def select(
    net: nn.Module,
    scores: Scores | None = None,
    *,
    channels: float | None = None,
    weights: float | None = None,
    macs: float | None = None,
    latency: float | None = None,
    bytes: int | None = None,
    rank: float | None = None,
    ranking: Ranking = "global",
    writers: Writers = "coupled",
    normalise: Normalise | None = None,
    aggregate: Aggregate = "sum",
    min_keep: int = 1,
    round_to: int = 1,
    protect: str | Sequence[str] | None = None,
    example: Any = None,
    structure: Structure | None = None,
) -> Plan:
    """Plan what stays of ``net`` so that it meets a budget: the least units go first, until one more need not.

    Budgets are shares of the unpruned network in (0, 1], but for ``bytes``. Pass one of them, and ``rank`` beside it or
    alone. The plan prints what it will come to; `count` finds the same after `prune_`.

    Args:
        net: the network that was scored.
        scores: what `score` returned; not needed for ``rank`` alone.
        channels: of the output channels of all layers that can be pruned, the paper's density.
        weights: of all parameters.
        macs: of all multiply-accumulates.
        latency: of the time that one batch takes on this machine, measured.
        bytes: how large a task file may be, its header left out; adapters' ranks and channels shrink in step, or
            channels alone where ``rank`` is given, or ranks alone without scores.
        rank: of all components of adapters' bottlenecks; ranks differ from layer to layer afterwards.
        ranking: "global", over all layers, or "local", the same share of each.
        writers: "coupled", or "free" to let each layer that writes into a residual stream keep channels of its own.
        normalise: what each layer's scores are divided by first: none, sum, l2, mean or max; by default the
            criterion's choice.
        aggregate: how the scores of coupled writers are brought together: sum, mean or max. A unit of a stream with
            several writers takes a channel from each of them; the mean is what it is worth for each channel.
        min_keep: how many units stay everywhere.
        round_to: widths become multiples of this, 8 or 16 say, or stay whole.
        protect: layers that keep all their channels, names or patterns of modules.
        example: the batch whose latency counts; by default the example that the network was traced with.
        structure: what `trace` found, if neither scores nor network have it.

    >>> import torch
    >>> from spalier import score, trace
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> scores = score(net, criterion="weight", structure=trace(net, torch.ones(1, 2)))
    >>> print(select(net, scores, channels=0.5))
    stream  kept  of
         0     4   8
    <BLANKLINE>
    channels    4 of 8 (50.0%)
    parameters  22 of 42 (52.4%), learned 22
    MACs        16 of 32 (50.0%)
    bytes       88
    """
    options = _Options(ranking, writers, normalise, aggregate, min_keep, round_to)
    budget = _budget(channels=channels, weights=weights, macs=macs, latency=latency, bytes=bytes, rank=rank)
    if scores is not None and not isinstance(scores, Scores):
        raise ConfigError(f"scores is a {type(scores).__name__}, expected what score returns")
    structure = structure_of(net, structure or (scores.structure if scores is not None else None))
    meter = Meter(net, structure)
    search = _Search(net, meter, options, scores, protect)
    plan = search.plan(budget, rank, example)
    assert_same_on_every_rank("the plan", (plan.keep, plan.ranks, plan.writers))
    return plan


@dataclass(frozen=True)
class _Options:
    ranking: Ranking
    writers: Writers
    normalise: Normalise | None
    aggregate: Aggregate
    min_keep: int
    round_to: int

    def __post_init__(self) -> None:
        _check_one("ranking", self.ranking, ("global", "local"))
        _check_one("writers", self.writers, ("coupled", "free"))
        _check_one("normalise", self.normalise, (None, *NORMALISATIONS))
        _check_one("aggregate", self.aggregate, AGGREGATIONS)
        for name in ("min_keep", "round_to"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r}, expected an integer of at least 1")


def _check_one(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        words = ", ".join(repr(a) for a in allowed if a is not None)
        raise ConfigError(f"{name} is {value!r}, expected one of {words}")


@dataclass(frozen=True)
class _Budget:
    kind: str
    value: float


def _budget(*, rank: float | None, bytes: int | None, **shares: float | None) -> _Budget | None:
    given = {name: value for name, value in shares.items() if value is not None}
    for name, value in {**given, **({} if rank is None else {"rank": rank})}.items():
        number = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
        if not number or not 0 < value <= 1:
            raise BudgetError(
                f"{name} is {value!r}, expected a share of the unpruned network, above 0 and at most 1"
            )
    if bytes is not None:
        if not isinstance(bytes, int) or isinstance(bytes, bool) or bytes < 1:
            raise BudgetError(f"bytes is {bytes!r}, expected a whole number of bytes above 0")
        given["bytes"] = bytes
    if len(given) > 1:
        raise BudgetError(
            f"{' and '.join(given)} were given; expected one budget, and perhaps rank beside it"
        )
    if not given and rank is None:
        raise BudgetError(
            "no budget was given; expected channels=, weights=, macs=, latency=, bytes= or rank="
        )
    return _Budget(*next(iter(given.items()))) if given else None


Masks = dict[str, Mask]


class _Search:
    """Finds how far to go in the order of units and components."""

    def __init__(
        self, net: nn.Module, meter: Meter, options: _Options, scores: Scores | None, protect: Any
    ) -> None:
        self.net, self.meter, self.options, self.scores = net, meter, options, scores
        self.protected = _protected(net, meter.structure, protect)

    def plan(self, budget: _Budget | None, rank: float | None, example: Any) -> Plan:
        no_order = Order([], "local")
        wants_ranks = rank is not None or (budget is not None and budget.kind == "bytes")
        ranks = self._rank_order(needed=rank is not None or self.scores is None) if wants_ranks else no_order
        fixed: Masks = {}
        if rank is not None:
            whole, others = self._ranks(ranks)
            fixed = self._reach(
                ranks, lambda m: others + sum(int(x.sum()) for x in m.values()), rank, "rank", whole
            )
            ranks = no_order
        if budget is None:
            return self._made({}, fixed)
        if self.scores is None and budget.kind != "bytes":
            raise PlanError(f"a budget of {budget.kind} needs scores; pass what score returns")
        units = self._unit_order() if self.scores is not None else no_order
        if budget.kind == "bytes":
            chosen, left = self._within_bytes(units, ranks, fixed, int(budget.value))
            return self._made(chosen, left)
        if budget.kind == "latency":
            return self._within_latency(units, fixed, budget.value, example)
        measure = {"channels": self.meter.channels, "weights": self.meter.parameters, "macs": self.meter.macs}
        size = measure[budget.kind]
        whole = size(self.meter.whole)
        chosen = self._reach(units, lambda m: size(self._kept(m)), budget.value, budget.kind, whole)
        return self._made(chosen, fixed)

    def _kept(self, masks: Masks) -> Kept:
        return narrowed(self.meter.structure, self.meter.kept, masks, self.options.writers)

    def _unit_order(self) -> Order:
        assert self.scores is not None
        o = self.options
        groups = unit_groups(
            self.meter.structure,
            self.scores,
            self.meter.kept,
            writers=o.writers,
            normalise=o.normalise,
            aggregate=o.aggregate,
            min_keep=o.min_keep,
            round_to=o.round_to,
            protected=self.protected,
        )
        for each in groups:
            _check_alive(each.name, each.order, self.meter.kept, self.meter.structure, o.writers)
        return Order(groups, o.ranking)

    def _ranks(self, order: Order) -> tuple[int, int]:
        """How many components all adapters began with, and how many those that are protected have."""
        updates = {entry.update for entry in attachment_of(self.net).updated}
        low = [update for update in updates if isinstance(update, LowRank)]
        free = sum(g.size for g in order.groups)
        return sum(update.first_rank for update in low), sum(update.rank for update in low) - free

    def _rank_order(self, *, needed: bool) -> Order:
        found = importances(self.net)
        chosen = {name: value for name, value in found.items() if not self._is_protected(name)}
        if not chosen and needed:
            raise BudgetError(
                "no adapter here has a rank to prune; expected a network with SPLoRA or LoRA on it"
            )
        return Order(components(chosen), self.options.ranking)

    def _is_protected(self, adapter: str) -> bool:
        """An adapter of a layer's weight goes by the layer's name, another by its own."""
        return adapter in self.protected or (
            adapter.endswith("_weight") and adapter.rpartition(".")[0] in self.protected
        )

    def _reach(
        self,
        order: Order,
        size: Callable[[Masks], float],
        share: float,
        kind: str,
        whole: float | None = None,
    ) -> Masks:
        """The longest prefix that is left once the size is within its share of the whole."""
        total = size(order.masks(0)) if whole is None else whole
        limit = np.floor(share * total + 1e-9)
        steps = first_step(len(order), lambda n: size(order.masks(n)) <= limit)
        if steps is None:
            least = size(order.masks(len(order)))
            raise BudgetError(
                f"{kind}={share} cannot be reached: with all that may go gone, {least / total:.4f} is left "
                f"({int(least):,} of {int(total):,}); ask for that or more, or lower min_keep, round_to and protect"
            )
        return order.masks(steps)

    def _within_bytes(self, units: Order, ranks: Order, fixed: Masks, limit: int) -> tuple[Masks, Masks]:
        """Both orders in step: the same share of each is gone."""
        if not is_marked(self.net):
            raise BudgetError("a budget of bytes is one of a task file; expected an adapted network")
        longest = max(len(units), len(ranks))

        def at(step: int) -> tuple[Masks, Masks]:
            taken = [len(order) * step // max(longest, 1) for order in (units, ranks)]
            return units.masks(taken[0]), {**fixed, **ranks.masks(taken[1])}

        def size(step: int) -> int:
            masks, left = at(step)
            return self.meter.task_bytes(self._kept(masks), {n: int(m.sum()) for n, m in left.items()})

        steps = first_step(longest, lambda n: size(n) <= limit)
        if steps is None:
            raise BudgetError(
                f"bytes={limit:,} cannot be reached: with all that may go gone, {size(longest):,} are left; ask for "
                "that or more, or lower min_keep, round_to and protect"
            )
        return at(steps)

    def _within_latency(self, units: Order, fixed: Masks, share: float, example: Any) -> Plan:
        clock = Latency(self.net, self.meter, example)
        steps, measured, base = clock.search(
            len(units),
            lambda n: self._made(units.masks(n), fixed),
            lambda n: self._kept(units.masks(n)),
            share,
        )
        return self._made(units.masks(steps), fixed, measured, base)

    def _made(
        self, masks: Masks, ranks: Masks, latency: float | None = None, latency_base: float | None = None
    ) -> Plan:
        structure = self.meter.structure
        keep = {name: np.flatnonzero(mask).tolist() for name, mask in masks.items()}
        left = {name: np.flatnonzero(mask).tolist() for name, mask in ranks.items()}
        plan = Plan(structure, keep, writers=self.options.writers, ranks=left)
        prediction = self.meter.predict(plan, self._kept(masks))
        if latency is not None:
            prediction = replace(prediction, latency=latency, latency_base=latency_base)
        return Plan(structure, keep, writers=self.options.writers, ranks=left, prediction=prediction)


def importances(net: nn.Module) -> dict[str, Floats]:
    """The size of each component of each adapter, as a share of its fused weight's."""
    if not is_marked(net):
        return {}
    found: dict[str, Floats] = {}
    seen = set()
    for entry in attachment_of(net).updated:
        update = entry.update
        if isinstance(update, LowRank) and update not in seen:
            seen.add(update)
            size = float(update(entry.layer.get_parameter(entry.weight)).detach().double().norm())
            found[entry.path] = (update.importance() / max(size, 1e-30)).cpu().numpy()
    return found


def _protected(net: nn.Module, structure: Structure, protect: Any) -> set[str]:
    """The layers that are protected, and as ``stream:NAME`` the streams that they write."""
    if protect is None:
        return set()
    names = Names(net)
    chosen = {path for module in select_named(names, "protect", protect) for path in names.of[module]}
    written = {
        f"stream:{stream.name}"
        for stream in structure.streams
        if any(m.role == "writer" and m.tensor.rpartition(".")[0] in chosen for m in stream.members)
    }
    return chosen | written


def _check_alive(name: str, order: Any, kept: Kept, structure: Structure, writers: Writers) -> None:
    free = {w.name: w.stream for w in structure.writers} if writers == "free" else {}
    mask = kept.streams[free[name] if name in free else structure.index[name]]
    if name in free:
        mask = kept.writers.get(name, mask)
    if set(order.tolist()) != set(np.flatnonzero(mask).tolist()):
        raise PlanError(
            f"the scores of {name!r} are for other units than the network has left: it was pruned since; score it again"
        )
