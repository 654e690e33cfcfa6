"""From labels to streams: sets of tensor axes that carry the same channels, and the units that can be taken out of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from spalier.structure.arithmetic import TAPS
from spalier.structure.labels import NONE, Ints, LabelledAxis, Labels, Resolved
from spalier.structure.walk import Role

Kind = Literal["writer", "reader", "rider"]


@dataclass(frozen=True, eq=False)
class Member:
    """An axis of a parameter or buffer that carries a stream."""

    tensor: str
    axis: int
    role: Kind
    units: Ints
    """For each index of the axis, the unit that it goes with; -1 for none."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Channels that must move together: which axes carry them, and how many units of them there are."""

    name: str
    size: int
    """How many units there are."""
    members: tuple[Member, ...]

    @cached_property
    def writers(self) -> tuple[str, ...]:
        """The parameters whose outputs enter the stream."""
        return self._of("writer")

    @cached_property
    def readers(self) -> tuple[str, ...]:
        """The parameters that contract it away."""
        return self._of("reader")

    @cached_property
    def riders(self) -> tuple[str, ...]:
        """Biases, norms, statistics, scales, depthwise kernels: what has an entry for each channel and mixes none."""
        return self._of("rider")

    def _of(self, role: Kind) -> tuple[str, ...]:
        return tuple(member.tensor for member in self.members if member.role == role)


@dataclass(frozen=True)
class Frozen:
    """Indices of an axis that must stay, and why."""

    tensor: str
    axis: int
    count: int
    size: int
    reason: str


@dataclass(frozen=True)
class _Occurrences:
    """Which atom (a free root) is at which index of which axis; three parallel arrays."""

    atom: Ints
    axis: Ints
    index: Ints


Placed = tuple[tuple[int, Ints], ...]
"""For each stream on an axis, its number and the unit at each index."""


@dataclass(frozen=True)
class Assembly:
    """Streams in the order of the parameters, and what is frozen."""

    streams: list[Stream]
    frozen: list[Frozen]
    resolved: Resolved
    units: dict[int, tuple[int, int]]
    """For each atom, its stream and unit."""
    _known: dict[int, list[tuple[int, Ints]]] = field(default_factory=dict, repr=False)

    def placed(self, fields: Sequence[Ints]) -> Placed:
        """The units along an axis that has these fields."""
        arrays: dict[int, Ints] = {}
        for labels in fields:
            for stream, units in self._placed(labels):
                taken = arrays.setdefault(stream, np.full(len(labels), NONE))
                arrays[stream] = np.where(units == NONE, taken, units)
        return tuple(sorted(arrays.items(), key=lambda item: item[0]))

    def _placed(self, labels: Ints) -> list[tuple[int, Ints]]:
        key = id(labels)  # fields live as long as the walk that made them
        if key not in self._known:
            index = np.flatnonzero(labels != NONE)
            roots = self.resolved.root[labels[index]]
            arrays: dict[int, Ints] = {}
            for position, atoms in zip(index, self.resolved.atoms(roots), strict=True):
                for stream, unit in (self.units[atom] for atom in atoms if atom in self.units):
                    arrays.setdefault(stream, np.full(len(labels), NONE))[position] = unit
            self._known[key] = list(arrays.items())
        return self._known[key]

    def without(self, refused: dict[int, str]) -> Assembly:
        """The same without some streams, which are frozen now, and why."""
        kept = [number for number in range(len(self.streams)) if number not in refused]
        renumbered = {old: new for new, old in enumerate(kept)}
        units = {a: (renumbered[s], u) for a, (s, u) in self.units.items() if s in renumbered}
        frozen = [
            Frozen(m.tensor, m.axis, int((m.units != NONE).sum()), len(m.units), reason)
            for number, reason in refused.items()
            for m in self.streams[number].members
        ]
        return Assembly([self.streams[n] for n in kept], self.frozen + frozen, self.resolved, units)


def present(placed: Placed, size: int, keep: Sequence[npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
    """Which indices of an axis are left where these units of each stream are kept."""
    left = np.ones(size, bool)
    for stream, units in placed:
        left &= (units == NONE) | keep[stream][units]
    return left


def assemble(labels: Labels, resolved: Resolved, roles: Sequence[Role]) -> Assembly:
    """Make streams of all that is known."""
    found = _occurrences(labels, resolved)
    kinds = _kinds(labels, resolved, roles)
    streams, refused, units = _streams(labels.axes, found, kinds)
    return Assembly(streams, _frozen(labels.axes, resolved, found, refused), resolved, units)


def _occurrences(labels: Labels, resolved: Resolved) -> _Occurrences:
    atoms, axes, indices = [], [], []
    held = np.zeros(labels.size + 1, bool)
    held[list(resolved.reasons)] = True
    derived = np.zeros(labels.size + 1, bool)
    derived[list(resolved.members)] = True
    for number, axis in enumerate(labels.axes):
        roots = resolved.root[axis.start : axis.start + axis.size]
        free = np.flatnonzero(~held[roots] & ~derived[roots])
        atoms.append(roots[free])
        indices.append(free)
        made = np.flatnonzero(derived[roots])
        parts = resolved.atoms(roots[made])
        atoms.append(np.array([a for each in parts for a in each], np.int64))
        indices.append(np.repeat(made, [len(each) for each in parts]))
        axes.append(np.full(len(atoms[-1]) + len(free), number))
    empty = np.empty(0, np.int64)
    return _Occurrences(*(np.concatenate([empty, *arrays]) for arrays in (atoms, axes, indices)))


def _kinds(labels: Labels, resolved: Resolved, roles: Sequence[Role]) -> dict[int, Kind]:
    """What each axis of a parameter is to the channels on it."""
    of_owner: dict[str, list[int]] = defaultdict(list)
    for number, axis in enumerate(labels.axes):
        of_owner[axis.owner].append(number)
    kinds: dict[int, Kind] = {}
    atoms: dict[int, set[int]] = {}
    rank = {"rider": 0, "reader": 1, "writer": 2}
    for role in roles:
        touched = {a for each in resolved.atoms(np.unique(role.labels[role.labels != NONE])) for a in each}
        for number in (n for owner in role.sources for n in of_owner[owner]):
            if number not in atoms:
                axis = labels.axes[number]
                own = resolved.atoms(np.arange(axis.start, axis.start + axis.size))
                atoms[number] = {a for each in own for a in each}
            if atoms[number] & touched and rank[role.role] > rank[kinds.get(number, "rider")]:
                kinds[number] = role.role  # type: ignore[assignment]
    return kinds


def _streams(
    axes: list[LabelledAxis], found: _Occurrences, kinds: dict[int, Kind]
) -> tuple[list[Stream], dict[int, str], dict[int, tuple[int, int]]]:
    """Atoms that lie on the same axes, equally often, are the units of one stream."""
    streams: list[Stream] = []
    refused: dict[int, str] = {}
    place: dict[int, tuple[int, int]] = {}
    names: dict[str, int] = defaultdict(int)
    for atoms in _groups(found):
        chosen = np.isin(found.atom, atoms)
        unit = np.searchsorted(atoms, found.atom[chosen])
        members = _members(axes, found.axis[chosen], found.index[chosen], unit, kinds)
        reason = _refusal(members, len(atoms))
        if reason:
            refused |= dict.fromkeys(map(int, atoms), reason)
            continue
        place |= {int(atom): (len(streams), number) for number, atom in enumerate(atoms)}
        first = next((m for m in members if m.role == "writer"), members[0])
        name = first.tensor.rpartition(".")[0] or first.tensor
        names[name] += 1
        suffix = f"#{names[name]}" if names[name] > 1 else ""
        streams.append(Stream(name + suffix, len(atoms), tuple(members)))
    return streams, refused, place


def _refusal(members: list[Member], units: int) -> str:
    if units == 1:
        return "its channels go together or not at all"
    if not any(member.role == "reader" for member in members):
        return "no layer reads it"
    return ""


def _groups(found: _Occurrences) -> list[Ints]:
    """Sorted atoms of one signature each, in the order of their first labels."""
    if not len(found.atom):
        return []
    atoms, place = np.unique(found.atom, return_inverse=True)
    weights = np.random.default_rng(0).integers(1, 2**62, int(found.axis.max()) + 1)
    signature = np.zeros(len(atoms), np.int64)
    with np.errstate(over="ignore"):
        np.add.at(signature, place, weights[found.axis])
    _, first, group = np.unique(signature, return_index=True, return_inverse=True)
    return [atoms[group == number] for number in np.argsort(first)]


def _members(
    axes: list[LabelledAxis], axis: Ints, index: Ints, unit: Ints, kinds: dict[int, Kind]
) -> list[Member]:
    members = []
    for number in np.unique(axis):
        labelled = axes[number]
        if labelled.owner:
            units = np.full(labelled.size, NONE)
            units[index[axis == number]] = unit[axis == number]
            members.append(Member(labelled.owner, labelled.axis, kinds.get(int(number), "rider"), units))
    return members


def _frozen(
    axes: Iterable[LabelledAxis], resolved: Resolved, found: _Occurrences, refused: dict[int, str]
) -> list[Frozen]:
    free: npt.NDArray[np.bool_] = np.zeros(len(resolved.root) + 1, bool)
    starts = np.array([axis.start for axis in axes], np.int64)
    allowed = ~np.isin(found.atom, list(refused))
    free[starts[found.axis[allowed]] + found.index[allowed]] = True
    listed = []
    for axis in axes:
        if not axis.owner:
            continue
        reasons: dict[str, int] = defaultdict(int)
        for label in np.flatnonzero(~free[axis.start : axis.start + axis.size]) + axis.start:
            reasons[_reason(int(label), resolved, refused)] += 1
        listed += [
            Frozen(axis.owner, axis.axis, count, axis.size, reason)
            for reason, count in reasons.items()
            if reason != TAPS
        ]
    return listed


def _reason(label: int, resolved: Resolved, refused: dict[int, str]) -> str:
    root = int(resolved.root[label])
    while root not in resolved.reasons and root in resolved.members:
        root = int(resolved.root[resolved.members[root][0]])
    return resolved.reasons.get(root) or refused.get(root, "no layer reads it")
