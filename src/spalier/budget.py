"""What is left of a network where these units and components stay: counted from shapes alone, nothing is run.

From scores to an order: which units go first.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from spalier.adapters.attachment import attachment_of, is_marked, owners_of
from spalier.adapters.forward import updates
from spalier.adapters.geometry import is_norm
from spalier.adapters.kinds import LowRank
from spalier.counting import count
from spalier.criteria.criterion import Normalise
from spalier.criteria.score import Aggregate, Floats, Scores, normalised
from spalier.errors import BudgetError, SpalierError
from spalier.pruning.cuts import cuts_of
from spalier.pruning.plan import Kept, Plan, Prediction, Writers, kept_of
from spalier.pruning.prune import prune_
from spalier.structure.labels import Ints, Mask
from spalier.structure.structure import Structure

Ranks = Mapping[str, int]
"""How many components of each adapter stay, by the path of its layer."""


class Meter:
    """Counts a network as it would be."""

    def __init__(self, net: nn.Module, structure: Structure) -> None:
        self.net, self.structure = net, structure
        self.kept = kept_of(net, structure)
        self._uncounted = ""
        """Why nothing can be counted, if so."""
        self.whole = Kept(tuple(np.ones(s.size, bool) for s in structure.streams), {})
        self.owners = owners_of(net, structure.names)
        self.writers = sorted(
            {(m.tensor, m.axis) for s in structure.streams for m in s.members if m.role == "writer"}
        )

    # the sizes that budgets are about

    def channels(self, kept: Kept) -> int:
        """Output channels of the layers that write streams."""
        return sum(int(kept.of(self.structure, tensor)[axis].sum()) for tensor, axis in self.writers)

    def parameters(self, kept: Kept) -> int:
        """Parameters of the fused network."""
        return sum(math.prod(self._sizes(kept, name)) for name in self.structure.parameters)

    def macs(self, kept: Kept) -> int:
        """Multiply-accumulates of one sample of the example; what the structure does not know of stays as it is."""
        if self._counted is None:
            raise BudgetError(
                f"the multiply-accumulates of this network cannot be counted ({self._uncounted}); use another budget, "
                "or trace it with an example that says how many samples it holds"
            )
        return (self._terms(kept) + self._unknown) // self._samples

    def task_bytes(self, kept: Kept, ranks: Ranks) -> int:
        """What a task file holds in float32: learned parameters, statistics of norms, and a bit for each unit."""
        bits = [s.size for s in self.structure.streams] + [
            self.structure.streams[w.stream].size for w in self.structure.writers if w.name in kept.writers
        ]
        masks = sum(math.ceil(size / 8) for size in bits)
        return 4 * (self.learned(kept, ranks) + self._statistics(kept)) + masks

    def densities(self) -> dict[str, tuple[int, int] | None]:
        """What is left of the base, and of how much: channels, weights, and MACs where they can be counted."""
        known = self._counted is not None and not self._unknown
        return {
            "channels": (self.channels(self.kept), self.channels(self.whole)) if self.writers else None,
            "weights": (self.parameters(self.kept), self.parameters(self.whole)),
            "macs": (self.macs(self.kept), self.macs(self.whole)) if known else None,
        }

    # details

    def _sizes(self, kept: Kept, tensor: str) -> list[int]:
        return [int(mask.sum()) for mask in kept.of(self.structure, tensor)]

    def _terms(self, kept: Kept) -> int:
        tensors = {cost.tensor for cost in self.structure.costs if cost.tensor}
        sizes = {name: self._sizes(kept, name) for name in tensors}
        return sum(cost.left(kept.streams, sizes) for cost in self.structure.costs)

    def learned(self, kept: Kept, ranks: Ranks) -> int:
        """Parameters that learn: adapters, norms, head."""
        cuts = cuts_of(self.structure, self.kept, kept)
        total, seen = 0, set()
        for name, owners in self.owners.items():
            tensor = owners[0].tensor
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                total += math.prod(self._sizes(kept, name))
            for owner in owners:
                update = updates(owner.module).get(owner.key)
                if update is not None and update not in seen:
                    seen.add(update)
                    total += self._left_of(update, tensor, cuts.get(name), ranks.get(self._paths[update]))
        return total

    @cached_property
    def _paths(self) -> dict[Any, str]:
        if not is_marked(self.net):
            return {}
        found: dict[Any, str] = {}
        for entry in attachment_of(self.net).updated:
            found.setdefault(entry.update, entry.path)
        return found

    def _left_of(self, update: Any, weight: Tensor, indices: Any, rank: int | None) -> int:
        """How many numbers of an update are left."""
        sizes = {parameter: list(parameter.shape) for parameter in update.parameters()}
        if indices is not None:
            shape = tuple(weight.shape)
            first, second = (
                np.arange(n) if i is None else i for n, i in zip(shape[:2], indices[:2], strict=True)
            )
            _, outputs, inputs = update.geometry.cut(first, second)
            for parameter, left in update.cuts(outputs, inputs):
                sizes[parameter] = [
                    n if i is None else len(i) for n, i in zip(parameter.shape, left, strict=False)
                ] + [*parameter.shape[len(left) :]]
        if rank is not None and isinstance(update, LowRank):
            for factor in (update.down, update.up):
                sizes[factor][0] = rank
        return sum(math.prod(size) for size in sizes.values())

    def _statistics(self, kept: Kept) -> int:
        """Running means and variances of norms."""
        return sum(
            math.prod(self._sizes(kept, name))
            for name, owners in self.owners.items()
            if owners[0].place == "_buffers" and is_norm(owners[0].module) and self._is_float(name)
        )

    def _is_float(self, name: str) -> bool:
        owner = self.owners[name][0]
        tensor = owner.tensor
        return tensor.is_floating_point()

    def _bytes(self, kept: Kept) -> int:
        total = 0
        for name, owners in self.owners.items():
            tensor = owners[0].tensor
            total += math.prod(self._sizes(kept, name)) * tensor.element_size()
        for writer in self.structure.writers:  # a gather holds the place of each channel of the stream
            if writer.name in kept.writers:
                total += 8 * int(kept.streams[writer.stream].sum())
        return total

    @cached_property
    def _unknown(self) -> int:
        """What `count` finds now beside what the structure knows of: recurrent layers, say."""
        return 0 if self._counted is None else self._counted.macs * self._samples - self._terms(self.kept)

    @cached_property
    def _samples(self) -> int:
        found = None if self._counted is None else self._counted.samples
        return found or 1

    @cached_property
    def _counted(self) -> Any:
        """What the network computes now; None where the example is gone or does not say."""
        if self.structure.example is None:
            self._uncounted = "it was traced elsewhere, and there is no example"
            return None
        try:
            return count(self.net, self.structure.example)
        except SpalierError as error:  # a plan then says nothing of MACs, and a budget of them is refused
            self._uncounted = str(error)
            return None

    def predict(self, plan: Plan, kept: Kept) -> Prediction:
        """All of it, for a plan and what it leaves."""
        ranks = {name: len(components) for name, components in plan.ranks.items()}
        macs, base = self._macs_after(plan, kept)
        return Prediction(
            self.channels(kept),
            self.channels(self.whole),
            self.parameters(kept),
            self.parameters(self.whole),
            self.learned(kept, ranks),
            self._bytes(kept),
            macs,
            base,
            self.task_bytes(kept, ranks) if is_marked(self.net) else None,
        )

    def _macs_after(self, plan: Plan, kept: Kept) -> tuple[int | None, int | None]:
        if self._counted is None:
            return None, None
        if not self._unknown:
            return self.macs(kept), self.macs(self.whole)
        # some operation is counted otherwise than the structure says (recurrent layers, einsum): prune a copy and look
        twin = copy.deepcopy(self.net)
        prune_(twin, plan, check=False)
        return count(twin, self.structure.example).macs, None


Ranking = Literal["global", "local"]


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
    order = alive[np.lexsort((-alive, scores[alive]))]
    least = max(min(min_keep, len(order)), 1)
    least = math.ceil(least / multiple) * multiple
    widths = (
        np.arange((len(order) - 1) // multiple * multiple, least - 1, -multiple)
        if len(order)
        else np.array([])
    )
    ends = (len(order) - widths).astype(np.int64)
    return Group(name, len(scores), order, scores[order], ends)


def unit_groups(
    structure: Structure,
    scores: Scores,
    kept: Kept,
    *,
    writers: Writers,
    normalise: Normalise | None,
    aggregate: Aggregate,
    min_keep: int,
    round_to: int,
    protected: set[str],
) -> list[Group]:
    """The units of every stream, or of every free writer, but for those that are protected."""
    free = {w.name: structure.streams[w.stream].name for w in structure.writers} if writers == "free" else {}
    made = []
    for stream in structure.streams:
        own = [name for name, into in free.items() if into == stream.name]
        multiple = _multiple(structure, stream.name, round_to)
        values = {
            name: _of_writer(scores, stream.name, name, kept, normalise)
            for name in own
            if name not in protected
        }
        if not own and f"stream:{stream.name}" not in protected:
            values = {stream.name: scores.of(stream.name, normalise, aggregate)}
        for name, value in values.items():
            made.append(group(name, value, min_keep=min_keep, multiple=multiple))
    return made


def _of_writer(scores: Scores, stream: str, writer: str, kept: Kept, normalise: Normalise | None) -> Floats:
    how = normalise or scores.normalise
    parts = scores.layers[stream]
    value = normalised(parts[writer], how) if writer in parts else scores.of(stream, how)
    if writer in kept.writers:
        value = np.where(kept.writers[writer], value, np.nan)
    return value


def _multiple(structure: Structure, stream: str, round_to: int) -> int:
    """Of how many units a multiple has to stay so that widths are multiples of ``round_to``."""
    found = structure[stream]
    member = next((m for m in found.members if m.role == "writer"), found.members[0])
    first = np.flatnonzero(member.units == 0)
    several = len(structure.axes[member.tensor, member.axis]) > 1
    if several and len(first) > 1 and first[-1] - first[0] >= len(first):
        return round_to  # positions of heads, where heads may go too: each head is as wide as it has to be
    return round_to // math.gcd(round_to, max(len(first), 1))


class Order:
    """All steps of all groups in one row, the least one first; a prefix of it is a plan."""

    def __init__(self, groups: Sequence[Group], ranking: Ranking) -> None:
        self.groups = groups
        keys, owner = [], []
        for number, each in enumerate(groups):
            keys.append(_keys(each, ranking))
            owner.append(np.full(len(each.ends), number))
        key = np.concatenate(keys) if keys else np.array([])
        place = np.concatenate(owner) if owner else np.array([], np.int64)
        steps = np.concatenate([np.arange(len(g.ends)) for g in groups]) if groups else place
        self._row = place[np.lexsort((steps, place, key))]

    def __len__(self) -> int:
        return len(self._row)

    def masks(self, steps: int) -> dict[str, Mask]:
        """What every group keeps after so many steps."""
        taken = np.bincount(self._row[:steps], minlength=len(self.groups))
        return {g.name: g.mask(int(n)) for g, n in zip(self.groups, taken, strict=True)}


def _keys(each: Group, ranking: Ranking) -> Floats:
    """When each step is due: by its units' mean score, or by the share of the layer that it leaves."""
    if ranking == "local":
        gone_before = each.size - len(each.order)
        shares: Floats = (gone_before + each.ends) / each.size
        return shares
    starts = [0, *each.ends.tolist()]
    means = [each.scores[a:b].mean() for a, b in pairwise(starts)]
    return np.maximum.accumulate(np.array(means)) if means else np.array([])


def components(importances: Mapping[str, Floats], min_rank: int = 1) -> list[Group]:
    """The components of every adapter's bottleneck."""
    return [group(name, values, min_keep=min_rank) for name, values in importances.items()]


def first_step(most: int, holds: Callable[[int], bool]) -> int | None:
    """The smallest number of steps at which something holds that goes on to hold; None if it never does."""
    if not holds(most):
        return None
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
