"""From scores to an order: which units go first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from spalier.criteria.scores import Aggregate, Floats, Normalise, Scores, normalised
from spalier.pruning.kept import Kept
from spalier.pruning.plan import Writers
from spalier.structure.labels import Ints
from spalier.structure.structure import Mask, Structure

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
