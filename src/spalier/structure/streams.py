"""From labels to streams: tensor axes that carry the same channels, and the units that can be taken out of them.

Once the facts about labels are resolved, every index of a parameter's axis is gone with some *atoms*, labels that are
free to go. Atoms that lie on the same axes, equally often, are the units of one stream (`assemble`).

`AxisUnits` says which units of which streams lie along an axis. With it `Extent` and `Cost` tell sizes and
multiply-accumulates for any choice of units.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from spalier.structure.arithmetic import TAPS
from spalier.structure.graph import Kind, Role, Term, Walk, module_of, operation, shape_of
from spalier.structure.labels import NONE, Ints, LabelledAxis, Mask, Resolved
from spalier.structure.recording import Program

AxisUnits = tuple[tuple[int, Ints], ...]
"""For each stream on an axis, its number and the unit at each index; NONE where an index goes with none."""


def kept_indices(units: AxisUnits, size: int, keep: Sequence[Mask]) -> Mask:
    """Which indices of an axis are left where these units of each stream are kept."""
    left = np.ones(size, bool)
    for stream, each in units:  # an index is gone as soon as one of its units is
        left &= (each == NONE) | keep[stream][each]
    return left


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
    """Coupled channels, which can only go together: the axes that carry them, and how many units there are."""

    name: str
    size: int
    """How many units there are."""
    members: tuple[Member, ...]
    least: int = 1
    """How many have to stay: a weight that is standardised over its inputs needs two of them to have a spread."""

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


@dataclass(frozen=True, eq=False)
class Extent:
    """Sizes that a module's own code uses: of a view such as (heads, head size), or of what a norm averages."""

    module: str
    sizes: tuple[int, ...]
    units: tuple[AxisUnits, ...]

    def left(self, keep: Sequence[Mask]) -> tuple[int, ...]:
        """The sizes that are left; -1 stays, which depends on values."""
        pairs = zip(self.units, self.sizes, strict=True)
        return tuple(size if size < 0 else int(kept_indices(units, size, keep).sum()) for units, size in pairs)


@dataclass(frozen=True, eq=False)
class View:
    """A size that a module's code gets wrong where channels go, as it takes the width of another tensor.

    It is that of one axis, counted from the end, of all its views that have so many axes before and after, and leave
    the same one open.
    """

    module: str
    before: int
    after: int
    open: int
    axis: int
    size: int
    units: AxisUnits

    def left(self, keep: Sequence[Mask]) -> tuple[int, int, int, int, int]:
        """The view, and the size that is left."""
        (size,) = Extent("", (self.size,), (self.units,)).left(keep)
        return self.before, self.after, self.open, self.axis, size


@dataclass(frozen=True)
class Scale:
    """A number that a module's code makes of a width: it multiplies or divides tensors with so many axes."""

    module: str
    axes: int
    number: float


@dataclass(frozen=True, eq=False)
class Cost:
    """The multiply-accumulates of one contraction: ``times`` the product of what is left of some axes."""

    module: str
    times: int
    tensor: str
    """A parameter, and the axes of it that count; empty where none is contracted as it is."""
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    units: tuple[AxisUnits, ...]

    def left(self, keep: Sequence[Mask], sizes_of: Mapping[str, Sequence[int]]) -> int:
        """What is left where these units stay; ``sizes_of`` are the sizes of each parameter's axes."""
        own = [sizes_of[self.tensor][axis] for axis in self.axes]
        return self.times * math.prod(own) * math.prod(Extent("", self.sizes, self.units).left(keep))


@dataclass(frozen=True)
class Assembly:
    """Streams in the order of the parameters, and what is frozen."""

    streams: list[Stream]
    frozen: list[Frozen]
    resolved: Resolved
    streams_of: Ints
    """For each atom, its stream; -1 for none."""
    units_of: Ints
    """For each atom, its unit in that stream."""
    _known: dict[int, list[tuple[int, Ints]]] = field(default_factory=dict, repr=False)

    def units_on(self, fields: Sequence[Ints]) -> AxisUnits:
        """The units along an axis that has these fields."""
        arrays: dict[int, Ints] = {}
        for labels in fields:
            # fields of one stream fill each other's gaps: parts that were concatenated
            for stream, units in self._units_of_field(labels):
                taken = arrays.setdefault(stream, np.full(len(labels), NONE))
                arrays[stream] = np.where(units == NONE, taken, units)
        return tuple(sorted(arrays.items(), key=lambda item: item[0]))

    def _units_of_field(self, labels: Ints) -> list[tuple[int, Ints]]:
        key = id(labels)  # fields live as long as the walk that made them
        if key not in self._known:
            positions, atoms = self.resolved.atoms(labels)
            stream, unit = self.streams_of[atoms], self.units_of[atoms]
            found = []
            for number in np.unique(stream[stream != NONE]):
                units = np.full(len(labels), NONE)
                units[positions[stream == number]] = unit[stream == number]
                found.append((int(number), units))
            self._known[key] = found
        return self._known[key]

    def without(self, refused: Mapping[int, str]) -> Assembly:
        """The same with some streams frozen too, and why."""
        kept = [number for number in range(len(self.streams)) if number not in refused]
        renumbered = np.full(len(self.streams) + 1, NONE)  # the last entry is what -1 finds
        renumbered[kept] = np.arange(len(kept))
        frozen = [
            Frozen(m.tensor, m.axis, int((m.units != NONE).sum()), len(m.units), reason)
            for number, reason in refused.items()
            for m in self.streams[number].members
        ]
        streams = [self.streams[number] for number in kept]
        return Assembly(streams, self.frozen + frozen, self.resolved, renumbered[self.streams_of], self.units_of)


def extents_of(walk: Walk, assembly: Assembly) -> list[Extent]:
    """All sizes of labelled axes that modules' code may hold."""
    found = [
        Extent(module, sizes, tuple(assembly.units_on([labels]) for labels in factors))
        for (module, sizes), factors in walk.splits.items()
    ]
    for (module, size), several in walk.sized.items():
        # by identity, as one field passes through many views
        different = {tuple(map(id, fields)): fields for fields in several}
        found += [Extent(module, (size,), (assembly.units_on(fields),)) for fields in different.values()]
    for statistic in walk.statistics:
        fields = [statistic.fields[axis] for axis in sorted(statistic.fields)]
        sizes = tuple(len(each[0]) for each in fields)
        found.append(Extent(module_of(statistic.node), sizes, tuple(map(assembly.units_on, fields))))
    # an axis of the same size that stays makes it unclear which of the two an attribute means
    lost = {(e.module, n) for e in found for n, units in zip(e.sizes, e.units, strict=True) if units}
    return [e for e in found if any(e.units) or (len(e.sizes) == 1 and (e.module, e.sizes[0]) in lost)]


def views_of(walk: Walk, assembly: Assembly, wrong: Collection[tuple[str, int, int, int, int, int]]) -> list[View]:
    """The right sizes of views by module, kind and axis, and the number of the view among those of its kind.

    Where those that are wrong do not agree there is none. Of views with an open axis all have to: which are wrong does
    not show while they run.
    """
    found = []
    for kind, axis in sorted({(each[:4], each[4]) for each in wrong if each[2]}):
        values = walk.reshapes[kind]
        chosen = values if kind[3] else [values[each[5]] for each in wrong if (each[:4], each[4]) == (kind, axis)]
        sizes = {value.shape[-axis] for value in chosen}
        units = [assembly.units_on(value.on(-axis)) for value in chosen]
        if len(sizes) == 1 and len({tuple((n, u.tobytes()) for n, u in on) for on in units}) == 1:
            found.append(View(*kind, axis, sizes.pop(), units[0]))
    return found


def scales_of(program: Program, module: str) -> list[Scale]:
    """The numbers that tensors are scaled with in a module, where there is one for all with so many axes."""
    inside = f"{module}." if module else ""
    found: dict[int, set[float]] = defaultdict(set)
    for node in program.graph.nodes:
        is_scaled = node.op == "call_function" and operation(node) in ("mul", "div") and isinstance(node.args[1], float)
        if is_scaled and (module_of(node) == module or module_of(node).startswith(inside)):
            found[len(shape_of(node))].add(node.args[1])
    return [Scale(module, axes, *numbers) for axes, numbers in found.items() if len(numbers) == 1]


def costs_of(terms: Sequence[Term], assembly: Assembly) -> list[Cost]:
    """The terms by units; axes that nothing can be taken from are in ``times``."""
    made: dict[tuple[object, ...], Cost] = {}
    for number, term in enumerate(terms):
        times, sizes, units = term.times, [], []
        for fields in term.fields:
            on = assembly.units_on(fields)
            if on:
                sizes.append(len(fields[0]))
                units.append(on)
            else:
                times *= len(fields[0])
        # terms of one parameter alone, a layer that is called twice, add up
        key = (number,) if units else (term.module, term.tensor, term.axes)
        if key in made:
            times += made[key].times
        made[key] = Cost(term.module, times, term.tensor, term.axes, tuple(sizes), tuple(units))
    return list(made.values())


# from labels to streams


@dataclass(frozen=True)
class _Occurrences:
    """Which atom is at which index of which axis; three parallel arrays."""

    atom: Ints
    axis: Ints
    index: Ints


def assemble(walk: Walk) -> Assembly:
    """Resolve the labels of a walk, and make streams of them."""
    axes, resolved = walk.labels.axes, walk.labels.resolved()
    size = walk.labels.size
    starts = np.array([axis.start for axis in axes] or [0])
    # labels are numbered axis by axis, so their axis is a lookup
    label, atom = resolved.atoms(np.arange(size))
    axis = np.searchsorted(starts, label, side="right") - 1
    found = _Occurrences(atom, axis, label - starts[axis])
    streams: list[Stream] = []
    refused: dict[str, list[Ints]] = defaultdict(list)
    stream_of, unit_of = np.full(size, NONE), np.full(size, NONE)
    roles = _roles(axes, size, resolved, walk.roles)
    names: dict[str, int] = defaultdict(int)
    for atoms, chosen in _groups(found):
        unit = np.searchsorted(atoms, found.atom[chosen])
        members = _members(axes, found.axis[chosen], found.index[chosen], unit, roles)
        if len(atoms) == 1:  # without its one unit it would be empty
            refused["its channels go together or not at all"].append(atoms)
        elif not any(member.role == "reader" for member in members):
            refused["no layer reads it"].append(atoms)
        elif all(member.role == "reader" for member in members):  # zeros that are read
            refused["no layer writes it"].append(atoms)
        else:
            stream_of[atoms], unit_of[atoms] = len(streams), np.arange(len(atoms))
            streams.append(Stream(_name(members, names), len(atoms), tuple(members)))
    frozen = _frozen(axes, size, resolved, found, {why: np.concatenate(each) for why, each in refused.items()})
    made = Assembly(streams, frozen, resolved, stream_of, unit_of)
    for number in _spreading(walk, made):
        streams[number] = replace(streams[number], least=2)
    return made


def _spreading(walk: Walk, assembly: Assembly) -> set[int]:
    """The streams of which one unit would leave a weight that is standardised a single entry: its spread is none."""
    ones = [np.arange(stream.size) == 0 for stream in assembly.streams]
    found: set[int] = set()
    for statistic in walk.statistics:
        if operation(statistic.node) == "batch_norm":  # of a weight; those of what is computed have statistics
            units = [assembly.units_on(fields) for fields in statistic.fields.values()]
            sizes = tuple(len(fields[0]) for fields in statistic.fields.values())
            counted = math.prod(n for axis, n in enumerate(shape_of(statistic.node)) if axis != 1)
            plain = counted // math.prod(sizes)  # axes without labels
            if plain * math.prod(Extent("", sizes, tuple(units)).left(ones)) < 2:
                found |= {number for on in units for number, _ in on}
    return found


def _name(members: Sequence[Member], taken: dict[str, int]) -> str:
    """A stream is called after its first writer; further ones of that layer (heads, positions) get a number."""
    first = next((m for m in members if m.role == "writer"), members[0])
    name = first.tensor.rpartition(".")[0] or first.tensor
    taken[name] += 1
    return f"{name}#{taken[name]}" if taken[name] > 1 else name


def _roles(axes: list[LabelledAxis], size: int, resolved: Resolved, roles: Sequence[Role]) -> dict[int, Kind]:
    """What each axis of a parameter is to the channels on it; those that are not listed ride."""
    of_owner: dict[str, list[int]] = defaultdict(list)
    for number, axis in enumerate(axes):
        of_owner[axis.owner].append(number)
    found: dict[int, Kind] = {}
    atoms: dict[int, Ints] = {}
    # a weight that is used in several ways is what is most: tied layers write and read
    rank: dict[Kind, int] = {"rider": 0, "reader": 1, "writer": 2}
    touched = np.zeros(size, bool)  # one array for all roles: making it anew would cost more than all else
    for role in roles:
        if role.role == "rider":
            continue
        marked = resolved.atoms(role.labels)[1]
        touched[marked] = True
        candidates = [n for owner in role.sources for n in of_owner[owner]]
        own = [n for n in candidates if _holds(axes[n], role.labels)]
        for number in own or candidates:  # a weight that was split first has labels of the view
            if number not in atoms:
                axis = axes[number]
                atoms[number] = resolved.atoms(np.arange(axis.start, axis.start + axis.size))[1]
            if rank[role.role] > rank[found.get(number, "rider")] and touched[atoms[number]].any():
                found[number] = role.role
        touched[marked] = False
    return found


def _holds(axis: LabelledAxis, labels: Ints) -> bool:
    return bool(((labels >= axis.start) & (labels < axis.start + axis.size)).any())


def _groups(found: _Occurrences) -> list[tuple[Ints, Ints]]:
    """Sorted atoms of one signature each, with the occurrences of them, in the order of their first labels."""
    if not len(found.atom):
        return []
    atoms, place = np.unique(found.atom, return_inverse=True)
    # the signature of an atom is the sum of random numbers, one for each axis that it lies on: equal for the same axes,
    # and for others by a chance of 2^-62
    weights = np.random.default_rng(0).integers(1, 2**62, int(found.axis.max()) + 1)
    signature = np.zeros(len(atoms), np.int64)
    with np.errstate(over="ignore"):
        np.add.at(signature, place, weights[found.axis])
    _, first, group = np.unique(signature, return_index=True, return_inverse=True)
    order = np.argsort(group[place], kind="stable")
    bounds = np.searchsorted(group[place][order], np.arange(len(first) + 1))
    return [
        (atoms[group == number], np.sort(order[bounds[number] : bounds[number + 1]])) for number in np.argsort(first)
    ]


def _members(axes: list[LabelledAxis], axis: Ints, index: Ints, unit: Ints, roles: Mapping[int, Kind]) -> list[Member]:
    members = []
    for number in np.unique(axis):
        labelled = axes[number]
        if labelled.owner:
            units = np.full(labelled.size, NONE)
            units[index[axis == number]] = unit[axis == number]
            members.append(Member(labelled.owner, labelled.axis, roles.get(int(number), "rider"), units))
    return members


def _frozen(
    axes: list[LabelledAxis], size: int, resolved: Resolved, found: _Occurrences, refused: Mapping[str, Ints]
) -> list[Frozen]:
    """For each axis, how many of its indices must stay for which reason."""
    texts = list(dict.fromkeys([*resolved.reasons.values(), *refused]))
    number = {text: index for index, text in enumerate(texts)}
    reason = np.full(size, NONE)
    for root, text in resolved.reasons.items():
        reason[root] = number[text]
    for text, atoms in refused.items():
        reason[atoms] = number[text]
    starts = np.array([axis.start for axis in axes] or [0])
    free = np.zeros(size, bool)
    allowed = reason[found.atom] == NONE
    free[starts[found.axis[allowed]] + found.index[allowed]] = True
    listed = []
    for axis in axes:
        whole = slice(axis.start, axis.start + axis.size)
        # axes that views made are nobody's parameters, and not listed
        held = resolved.root[whole][~free[whole]] if axis.owner else np.empty(0, np.int64)
        why, counts = np.unique(_why(held, resolved, reason), return_counts=True)
        named = ((texts[index], int(count)) for index, count in zip(why, counts, strict=True))
        listed += [Frozen(axis.owner, axis.axis, count, axis.size, text) for text, count in named if text != TAPS]
    return listed


def _why(roots: Ints, resolved: Resolved, reason: Ints) -> Ints:
    """The reason of each root, or that of a member of it that must stay."""
    why = reason[roots]
    for index in np.flatnonzero(why == NONE):
        members = resolved.members[:, resolved.derived == roots[index]].ravel()
        why[index] = reason[members[members != NONE]].max()
    return why
