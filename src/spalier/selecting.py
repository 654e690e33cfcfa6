"""`select`: from scores and a budget to a plan.

A budget is a prefix: all steps of all layers lie in one row, the least first (`Order`), and a bisection finds the
shortest prefix whose size is within the budget. Local ranking is the same with each layer's own share as the key, and
rounding makes steps of several units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from torch import nn

from spalier.adapters.attachment import attachment_of, is_marked
from spalier.adapters.kinds import LowRank
from spalier.adapters.targets import Names, select_named
from spalier.budget import Latency, Meter, first_step
from spalier.criteria.criterion import Normalise
from spalier.criteria.score import Aggregate, Floats, Scores, normalised
from spalier.distributed import assert_same_on_every_rank
from spalier.errors import BudgetError, ConfigError, PlanError
from spalier.pruning.plan import Kept, Plan, Writers, narrowed
from spalier.structure.labels import Ints, Mask
from spalier.structure.structure import Structure, structure_of
from spalier.text import check_integer

Ranking = Literal["global", "local"]
Masks = dict[str, Mask]
_LEAST = 3
"""Units that every layer keeps where nobody says how many: with one or two nothing much passes."""


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
    aggregate: Aggregate = "mean",
    min_keep: int | None = None,
    round_to: int = 1,
    protect: str | Sequence[str] | None = None,
    example: Any = None,
    structure: Structure | None = None,
) -> Plan:
    """Plan what stays of ``net`` so that it meets a budget: the least units go first, and no more than have to.

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
        aggregate: how the scores of coupled writers become one: their mean, sum or max. A unit of a stream with
            several writers takes a channel from each of them; the mean is what it is worth for each channel. With
            ``macs=`` convolutional networks fare better with the sum (benchmarks/choices.py).
        min_keep: how many units stay everywhere; by default half of the share that was asked for, of each layer, and
            three at least, so that no layer collapses while others stay whole; one where that cannot be.
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
    if ranking not in ("global", "local"):
        raise ConfigError(f"ranking is {ranking!r}, expected 'global' or 'local'")
    if writers not in ("coupled", "free"):
        raise ConfigError(f"writers is {writers!r}, expected 'coupled' or 'free'")
    if min_keep is not None:
        check_integer("min_keep", min_keep, 1)
    check_integer("round_to", round_to, 1)
    shares = {"channels": channels, "weights": weights, "macs": macs, "latency": latency}
    budget = _budget(shares, bytes, rank)
    structure = structure_of(net, structure or (scores.structure if scores is not None else None))
    search = _Search(net, Meter(net, structure), ranking, writers, _protected(net, structure, protect))
    if scores is None and budget is not None and budget[0] != "bytes":
        raise PlanError(f"a budget of {budget[0]} needs scores; pass what score returns")

    def plan_with(least: int, share: float = 0.0) -> Plan:
        groups = [] if scores is None else search.groups(scores, normalise, aggregate, least, share, round_to)
        return search.plan(Order(groups, ranking), budget, rank, example)

    try:
        plan = plan_with(_LEAST, _floor(budget)) if min_keep is None else plan_with(min_keep)
    except BudgetError:  # a floor that nobody asked for is in nobody's way
        if min_keep is not None:
            raise
        plan = plan_with(1)
    assert_same_on_every_rank("the plan", (plan.keep, plan.ranks, plan.writers))
    return plan


def _budget(shares: Mapping[str, float | None], size: int | None, rank: float | None) -> tuple[str, float] | None:
    """The kind and value of the one budget that was given; None for ranks alone."""
    given = {name: value for name, value in shares.items() if value is not None}
    for name, value in (*given.items(), *([] if rank is None else [("rank", rank)])):
        if not 0 < value <= 1:
            raise BudgetError(f"{name} is {value!r}, expected a share of the unpruned network, above 0 and at most 1")
    if size is not None:
        if size != int(size) or size < 1:
            raise BudgetError(f"bytes is {size!r}, expected a whole number of bytes above 0")
        given["bytes"] = size
    if len(given) > 1:
        raise BudgetError(f"{' and '.join(given)} were given; expected one budget, and perhaps rank beside it")
    if not given and rank is None:
        raise BudgetError("no budget was given; expected channels=, weights=, macs=, latency=, bytes= or rank=")
    return next(iter(given.items()), None)


def _floor(budget: tuple[str, float] | None) -> float:
    """The share of its units that every layer keeps, where the budget is a share itself."""
    kind, value = budget or ("rank", 0.0)
    return value / 2 if kind in ("channels", "weights", "macs") else 0.0


def _protected(net: nn.Module, structure: Structure, protect: Any) -> set[str]:
    """The layers that are protected, and as ``stream:NAME`` the streams that they write."""
    if protect is None:
        return set()
    names = Names(net)
    chosen = {path for module in select_named(names, "protect", protect) for path in names.of[module]}
    written = {
        f"stream:{stream.name}"
        for stream in structure.streams
        if any(tensor.rpartition(".")[0] in chosen for tensor in stream.writers)
    }
    return chosen | written


# which units go first


@dataclass(frozen=True)
class Group:
    """Units that are ranked with each other in one layer: those of a stream, of a free writer, or of a bottleneck."""

    name: str
    size: int
    """How many units the base has."""
    order: Ints
    """The units that are left, the least one first."""
    scores: Floats
    """Their scores, in that order."""
    ends: Ints
    """How many are gone after each step."""

    def mask(self, steps: int) -> Mask:
        """What stays after so many steps."""
        mask = np.zeros(self.size, bool)
        gone = self.ends[steps - 1] if steps else 0
        mask[self.order[gone:]] = True
        return mask


def group(name: str, scores: Floats, *, min_keep: int = 1, multiple: int = 1) -> Group:
    """Order a layer's units; NaN is a unit that is gone. Of equal ones the later goes first.

    A step takes one unit, or as many as it takes to a width that is a multiple.

    >>> group("layer", np.array([3.0, 1.0, 2.0, 1.0, np.nan]), min_keep=2)
    Group(name='layer', size=5, order=array([3, 1, 2, 0]), scores=array([1., 1., 2., 3.]), ends=array([1, 2]))
    """
    alive = np.flatnonzero(~np.isnan(scores))
    order = alive[np.lexsort((-alive, scores[alive]))]  # by score, then from the last
    least = math.ceil(max(min(min_keep, len(order)), 1) / multiple) * multiple
    # the widths that steps lead to, from the largest below the present one
    widths = np.arange((len(order) - 1) // multiple * multiple, least - 1, -multiple)
    return Group(name, len(scores), order, scores[order], len(order) - widths)


class Order:
    """All steps of all groups in one row, the least one first; a prefix of it is a plan."""

    def __init__(self, groups: Sequence[Group], ranking: Ranking) -> None:
        self.groups = groups
        row = [
            (key, number, step) for number, each in enumerate(groups) for step, key in enumerate(_keys(each, ranking))
        ]
        # of equal keys the first layer's goes first, so that plans repeat
        self._row = np.array([number for _, number, _ in sorted(row)], np.int64)

    def __len__(self) -> int:
        return len(self._row)

    def masks(self, steps: int) -> Masks:
        """What every group keeps after so many steps."""
        taken = np.bincount(self._row[:steps], minlength=len(self.groups))
        return {g.name: g.mask(int(n)) for g, n in zip(self.groups, taken, strict=True)}


def _keys(each: Group, ranking: Ranking) -> Floats:
    """When each step is due: by its units' mean score, or by the share of the layer that it leaves."""
    if ranking == "local":
        gone_before = each.size - len(each.order)
        shares: Floats = (gone_before + each.ends) / each.size
        return shares
    means = [each.scores[a:b].mean() for a, b in pairwise([0, *each.ends.tolist()])]
    # units of one layer go in their order, so a step is due no sooner than those before it
    return np.maximum.accumulate(np.array(means)) if means else np.array([])


def importances(net: nn.Module) -> dict[str, Floats]:
    """The size of each component of each adapter, as a share of its fused weight's."""
    found: dict[str, Floats] = {}
    seen = set()
    for entry in attachment_of(net).updated if is_marked(net) else ():
        update = entry.update
        if isinstance(update, LowRank) and update not in seen:
            seen.add(update)
            # as a share, so that components of large and small layers can be compared
            size = float(update(entry.layer.get_parameter(entry.weight)).detach().double().norm())
            found[entry.path] = (update.importance() / max(size, 1e-30)).cpu().numpy()
    return found


# how far to go


@dataclass(frozen=True)
class _Search:
    """Finds how far to go in the order of units and components."""

    net: nn.Module
    meter: Meter
    ranking: Ranking
    writers: Writers
    protected: set[str]

    def groups(
        self, scores: Scores, normalise: Normalise | None, aggregate: Aggregate, keep: int, share: float, round_to: int
    ) -> list[Group]:
        """The units of every stream, or of every free writer, but for those that are protected."""
        structure, kept = self.meter.structure, self.meter.kept
        free = structure.free_writers if self.writers == "free" else {}
        made = []
        for number, stream in enumerate(structure.streams):
            own = [name for name, into in free.items() if into == number]
            values = {
                name: _of_writer(scores, stream.name, name, kept, normalise)
                for name in own
                if name not in self.protected
            }
            floor = max(keep, math.ceil(share * stream.size))
            least = floor
            if not own and f"stream:{stream.name}" not in self.protected:
                value, forced = _of_stream(scores.of(stream.name, normalise, aggregate), scores, number, kept)
                values, least = {stream.name: value}, max(floor, forced)
            multiple = _multiple(structure, stream.name, round_to)
            for name, value in values.items():
                if not np.array_equal(~np.isnan(value), kept.units(structure, name, self.writers)):
                    raise PlanError(
                        f"the scores of {name!r} are for other units than the network has left: it was pruned since; "
                        "score it again"
                    )
                made.append(group(name, value, min_keep=max(least, stream.least), multiple=multiple))
        return made

    def plan(self, units: Order, budget: tuple[str, float] | None, rank: float | None, example: Any) -> Plan:
        """The plan that meets the budget."""
        none, fixed = Order([], self.ranking), Masks()
        if rank is not None:
            _, fixed = self._reach(none, self._rank_order(needed=True), {}, "rank", rank)
        if budget is None:
            return self._predicted({}, fixed)
        kind, value = budget
        if kind == "latency":
            return self._within_latency(units, fixed, value, example)
        ranks = none
        if kind == "bytes":
            if not is_marked(self.net):
                raise BudgetError("a budget of bytes is one of a task file; expected an adapted network")
            ranks = self._rank_order(needed=not units.groups) if rank is None else none
        return self._predicted(*self._reach(units, ranks, fixed, kind, value))

    def _rank_order(self, *, needed: bool) -> Order:
        """The components of every adapter's bottleneck, but for those of protected layers."""
        found = [
            group(name, values)
            for name, values in importances(self.net).items()
            if name not in self.protected
            and not (name.endswith("_weight") and name.rpartition(".")[0] in self.protected)
        ]
        if not found and needed:
            raise BudgetError("no adapter here has a rank to prune; expected a network with SPLoRA or LoRA on it")
        return Order(found, self.ranking)

    def _reach(self, units: Order, ranks: Order, fixed: Masks, kind: str, value: float) -> tuple[Masks, Masks]:
        """The units and components that the shortest prefix leaves within the budget: of both the same share."""
        size, total = self._measure(kind)
        limit = value if total is None else math.floor(value * total + 1e-9)  # 0.7 of 10 is 7, whatever 0.7 * 10 is
        longest = max(len(units), len(ranks))

        def at(step: int) -> tuple[Masks, Masks]:
            # of the shorter order a step takes less than one
            taken = [len(order) * step // max(longest, 1) for order in (units, ranks)]
            return units.masks(taken[0]), {**fixed, **ranks.masks(taken[1])}

        steps = first_step(longest, lambda n: size(*at(n)) <= limit)
        if steps is None:
            least = size(*at(longest))
            left = f"{least:,} are left" if total is None else f"{least / total:.4f} is left ({least:,} of {total:,})"
            raise BudgetError(
                f"{kind}={f'{value:,}' if total is None else value} cannot be reached: with all that may go gone, "
                f"{left}; ask for that or more, or lower min_keep, round_to and protect"
            )
        return at(steps)

    def _measure(self, kind: str) -> tuple[Callable[[Masks, Masks], int], int | None]:
        """How large what is left of units and components is, and what a share is of; None for bytes."""
        if kind == "bytes":
            return lambda units, ranks: self.meter.task_bytes(self._kept(units), _counts(ranks)), None
        if kind == "rank":  # of all components that adapters began with; those of protected layers all stay
            updates = {entry.update: entry.path for entry in reversed(attachment_of(self.net).updated)}
            low = {path: update for update, path in updates.items() if isinstance(update, LowRank)}
            now = {path: update.rank for path, update in low.items()}
            return lambda _, ranks: sum({**now, **_counts(ranks)}.values()), sum(u.first_rank for u in low.values())
        sizes = {"channels": self.meter.channels, "weights": self.meter.parameters, "macs": self.meter.macs}
        return lambda units, _: sizes[kind](self._kept(units)), sizes[kind](self.meter.whole)

    def _within_latency(self, units: Order, fixed: Masks, share: float, example: Any) -> Plan:
        clock = Latency(self.net, self.meter, example)
        steps, measured, base = clock.search(
            len(units), lambda n: self._plan(units.masks(n), fixed), lambda n: self._kept(units.masks(n)), share
        )
        plan = self._predicted(units.masks(steps), fixed)
        assert plan.prediction is not None
        prediction = replace(plan.prediction, latency=measured, latency_base=base)
        return Plan(plan.structure, plan.keep, writers=plan.writers, ranks=plan.ranks, prediction=prediction)

    def _kept(self, masks: Masks) -> Kept:
        return narrowed(self.meter.structure, self.meter.kept, masks, self.writers)

    def _plan(self, masks: Masks, ranks: Masks, prediction: Any = None) -> Plan:
        keep, left = ({name: np.flatnonzero(mask) for name, mask in each.items()} for each in (masks, ranks))
        structure = self.meter.structure
        return Plan(structure, keep, writers=self.writers, ranks=left, prediction=prediction)

    def _predicted(self, masks: Masks, ranks: Masks) -> Plan:
        prediction = self.meter.predict(self._plan(masks, ranks), self._kept(masks))
        return self._plan(masks, ranks, prediction)


def _counts(masks: Masks) -> dict[str, int]:
    return {name: int(mask.sum()) for name, mask in masks.items()}


def _of_stream(value: Floats, scores: Scores, number: int, kept: Kept) -> tuple[Floats, int]:
    """The scores of a stream whose writers may have been free before, and how many of its units have to stay.

    A unit that no layer writes that was seen counts nothing: others write it still. Each writer that has units of its
    own needs one of them, so the best one is put above all.
    """
    structure, left = scores.structure, kept.streams[number]
    own = {name: mask for name, mask in kept.writers.items() if structure.free_writers[name] == number}
    written = [own.get(layer, left) for layer in scores.layers[structure.streams[number].name]]
    seen = np.logical_or.reduce(written)
    if not np.array_equal(~np.isnan(value), seen):
        return value, 0  # scores of another time, which are refused
    value = np.where(left & ~seen, 0.0, value)
    best = {int(np.argmax(np.where(mask, value, -np.inf))) for mask in own.values()}
    value[list(best)] = np.inf
    return value, len(best)


def _of_writer(scores: Scores, stream: str, writer: str, kept: Kept, normalise: Normalise | None) -> Floats:
    """The scores of a free writer; where it was not seen by itself, those of its stream."""
    parts = scores.layers[stream]
    how = normalise or scores.normalise
    value = normalised(parts[writer], how) if writer in parts else scores.of(stream, how)
    return np.where(kept.writers[writer], value, np.nan) if writer in kept.writers else value


def _multiple(structure: Structure, stream: str, round_to: int) -> int:
    """Of how many units a multiple has to stay so that widths are multiples of ``round_to``."""
    found = structure[stream]
    member = next((m for m in found.members if m.role == "writer"), found.members[0])
    first = np.flatnonzero(member.units == 0)
    several = len(structure.axes[member.tensor, member.axis]) > 1
    if several and len(first) > 1 and first[-1] - first[0] >= len(first):
        return round_to  # positions of heads, where heads may go too: each head is as wide as it has to be
    return round_to // math.gcd(round_to, max(len(first), 1))
