"""From labels to streams: tensor axes that carry the same channels, and the units that can be taken out of them.

Free writers: layers that may keep fewer channels than the stream that they write into.

The paper prunes every convolution's outputs by itself, those into a residual stream too. Such a layer, with the norm
that follows it, becomes small, and a gather spreads its channels over the stream. That can be done wherever what it
writes is the output of a module that is called once: zeros stand there for the channels that it does not write, in the
masked network as in the pruned one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from spalier.adapters.geometry import Added
from spalier.structure.arithmetic import TAPS
from spalier.structure.capture import module_of, operation, placeholders
from spalier.structure.labels import NONE, Ints, LabelledAxis, Labels, Resolved
from spalier.structure.walk import Findings, Kind, Role, Value


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
    streams_of: Ints
    """For each atom, its stream; -1 for none."""
    units_of: Ints
    """For each atom, its unit in that stream."""
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
            positions, atoms = self.resolved.atoms(labels)
            stream, unit = self.streams_of[atoms], self.units_of[atoms]
            found = []
            for number in np.unique(stream[stream != NONE]):
                units = np.full(len(labels), NONE)
                units[positions[stream == number]] = unit[stream == number]
                found.append((int(number), units))
            self._known[key] = found
        return self._known[key]

    def without(self, refused: dict[int, str]) -> Assembly:
        """The same without some streams, which are frozen now, and why."""
        kept = [number for number in range(len(self.streams)) if number not in refused]
        renumbered = np.full(len(self.streams) + 1, NONE)  # the last entry is what -1 finds
        renumbered[kept] = np.arange(len(kept))
        frozen = [
            Frozen(m.tensor, m.axis, int((m.units != NONE).sum()), len(m.units), reason)
            for number, reason in refused.items()
            for m in self.streams[number].members
        ]
        return Assembly(
            [self.streams[n] for n in kept],
            self.frozen + frozen,
            self.resolved,
            renumbered[self.streams_of],
            self.units_of,
        )


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
    streams, refused, stream_of, unit_of = _streams(labels, found, kinds)
    return Assembly(streams, _frozen(labels, resolved, found, refused), resolved, stream_of, unit_of)


def _occurrences(labels: Labels, resolved: Resolved) -> _Occurrences:
    starts = np.array([axis.start for axis in labels.axes] or [0])
    label, atom = resolved.atoms(np.arange(labels.size))
    axis = np.searchsorted(starts, label, side="right") - 1
    return _Occurrences(atom, axis, label - starts[axis])


def _kinds(labels: Labels, resolved: Resolved, roles: Sequence[Role]) -> dict[int, Kind]:
    """What each axis of a parameter is to the channels on it."""
    of_owner: dict[str, list[int]] = defaultdict(list)
    for number, axis in enumerate(labels.axes):
        of_owner[axis.owner].append(number)
    kinds: dict[int, Kind] = {}
    atoms: dict[int, Ints] = {}
    rank: dict[Kind, int] = {"rider": 0, "reader": 1, "writer": 2}
    touched = np.zeros(labels.size, bool)
    for role in roles:
        if role.role == "rider":
            continue
        marked = resolved.atoms(role.labels)[1]
        touched[marked] = True
        candidates = [n for owner in role.sources for n in of_owner[owner]]
        own = [n for n in candidates if _holds(labels.axes[n], role.labels)]
        for number in own or candidates:  # a weight that was split first has labels of the view
            if number not in atoms:
                axis = labels.axes[number]
                atoms[number] = resolved.atoms(np.arange(axis.start, axis.start + axis.size))[1]
            if rank[role.role] > rank[kinds.get(number, "rider")] and touched[atoms[number]].any():
                kinds[number] = role.role
        touched[marked] = False
    return kinds


def _holds(axis: LabelledAxis, labels: Ints) -> bool:
    return bool(((labels >= axis.start) & (labels < axis.start + axis.size)).any())


def _streams(
    labels: Labels, found: _Occurrences, kinds: dict[int, Kind]
) -> tuple[list[Stream], dict[str, Ints], Ints, Ints]:
    """Atoms that lie on the same axes, equally often, are the units of one stream."""
    streams: list[Stream] = []
    refused: dict[str, list[Ints]] = defaultdict(list)
    stream_of, unit_of = np.full(labels.size, NONE), np.full(labels.size, NONE)
    names: dict[str, int] = defaultdict(int)
    for atoms, chosen in _groups(found):
        unit = np.searchsorted(atoms, found.atom[chosen])
        members = _members(labels.axes, found.axis[chosen], found.index[chosen], unit, kinds)
        reason = _refusal(members, len(atoms))
        if reason:
            refused[reason].append(atoms)
            continue
        stream_of[atoms], unit_of[atoms] = len(streams), np.arange(len(atoms))
        first = next((m for m in members if m.role == "writer"), members[0])
        name = first.tensor.rpartition(".")[0] or first.tensor
        names[name] += 1
        suffix = f"#{names[name]}" if names[name] > 1 else ""
        streams.append(Stream(name + suffix, len(atoms), tuple(members)))
    return streams, {reason: np.concatenate(atoms) for reason, atoms in refused.items()}, stream_of, unit_of


def _refusal(members: list[Member], units: int) -> str:
    if units == 1:
        return "its channels go together or not at all"
    if not any(member.role == "reader" for member in members):
        return "no layer reads it"
    return ""


def _groups(found: _Occurrences) -> list[tuple[Ints, Ints]]:
    """Sorted atoms of one signature each, with the occurrences of them, in the order of their first labels."""
    if not len(found.atom):
        return []
    atoms, place = np.unique(found.atom, return_inverse=True)
    weights = np.random.default_rng(0).integers(1, 2**62, int(found.axis.max()) + 1)
    signature = np.zeros(len(atoms), np.int64)
    with np.errstate(over="ignore"):
        np.add.at(signature, place, weights[found.axis])
    _, first, group = np.unique(signature, return_index=True, return_inverse=True)
    order = np.argsort(group[place], kind="stable")
    bounds = np.searchsorted(group[place][order], np.arange(len(first) + 1))
    return [
        (atoms[group == number], np.sort(order[bounds[number] : bounds[number + 1]]))
        for number in np.argsort(first)
    ]


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
    labels: Labels, resolved: Resolved, found: _Occurrences, refused: dict[str, Ints]
) -> list[Frozen]:
    texts = list(dict.fromkeys([*resolved.reasons.values(), *refused]))
    number = {text: index for index, text in enumerate(texts)}
    reason = np.full(labels.size, NONE)
    for root, text in resolved.reasons.items():
        reason[root] = number[text]
    for text, atoms in refused.items():
        reason[atoms] = number[text]
    starts = np.array([axis.start for axis in labels.axes] or [0])
    free = np.zeros(labels.size, bool)
    allowed = reason[found.atom] == NONE
    free[starts[found.axis[allowed]] + found.index[allowed]] = True
    listed = []
    for axis in labels.axes:
        whole = slice(axis.start, axis.start + axis.size)
        held = resolved.root[whole][~free[whole]] if axis.owner else np.empty(0, np.int64)
        why, counts = np.unique(_why(held, resolved, reason), return_counts=True)
        named = ((texts[index], int(count)) for index, count in zip(why, counts, strict=True))
        listed += [
            Frozen(axis.owner, axis.axis, count, axis.size, text) for text, count in named if text != TAPS
        ]
    return listed


def _why(roots: Ints, resolved: Resolved, reason: Ints) -> Ints:
    """The reason of each root, or that of a member of it that must stay."""
    why = reason[roots]
    for index in np.flatnonzero(why == NONE):
        members = resolved.members[:, resolved.made == roots[index]].ravel()
        why[index] = reason[members[members != NONE]].max()
    return why


@dataclass(frozen=True)
class FreeWriter:
    """A layer, and perhaps its norm, that may keep channels of its own."""

    name: str
    """The path of the layer."""
    stream: int
    members: tuple[tuple[str, int], ...]
    """Its tensors, and the axis of each that carries the stream; index i is unit i."""
    module: str
    """Where its channels are spread over the stream: after this module."""
    axis: int
    """The axis of that module's output."""


def free_writers(
    net: nn.Module, program: ExportedProgram, found: Findings, assembly: Assembly, names: Mapping[str, str]
) -> list[FreeWriter]:
    """Every layer of the network that can be a free writer, in the streams' order."""
    found_at = placeholders(program, names)
    users = {name: [user for node in nodes for user in node.users] for name, nodes in found_at.items()}
    writers = []
    for number, stream in enumerate(assembly.streams):
        chosen = [m for m in stream.members if m.role == "writer" and _is_plain(m, stream)]
        if sum(member.role == "writer" for member in stream.members) > 1:
            made = (_free(net, users, found, number, stream, member) for member in chosen)
            writers += [writer for writer in made if writer is not None]
    return writers


def _is_plain(member: Member, stream: Stream) -> bool:
    return np.array_equal(member.units, np.arange(stream.size))


def _free(
    net: nn.Module,
    users: dict[str, list[Node]],
    found: Findings,
    number: int,
    stream: Stream,
    member: Member,
) -> FreeWriter | None:
    """Follow the writer's output as long as nothing else takes it; the last module's end is where it is spread."""
    riders = {m.tensor: m for m in stream.members if m.role == "rider" and _is_plain(m, stream)}
    on_stream = {**riders, member.tensor: member}
    path = member.tensor.rpartition(".")[0]
    if len(users.get(member.tensor, ())) != 1:
        return None
    node: Node | None = users[member.tensor][0]
    taken: list[tuple[str, int]] = []
    best: tuple[Node, list[tuple[str, int]]] | None = None
    while node is not None:
        own = _parameters_of(node, users, on_stream)
        if own is None:
            break
        taken += own
        if _is_end_of_leaf(net, node, path if best is None else None):
            best = (node, list(taken))
        node = _only_successor(node)
    if best is None:
        return None
    axis = _channel_axis(found, best[0], stream.size)
    if axis is None or (member.tensor, member.axis) not in best[1]:
        return None
    return FreeWriter(path, number, tuple(best[1]), module_of(best[0]), axis)


def _parameters_of(
    node: Node, users: dict[str, list[Node]], on_stream: dict[str, Member]
) -> list[tuple[str, int]] | None:
    """The tensors of the stream that an operation takes; None where they are not its alone."""
    own = [(name, m.axis) for name, m in on_stream.items() if node in users.get(name, ())]
    return None if any(len(users[name]) > 1 for name, _ in own) else own


def _only_successor(node: Node) -> Node | None:
    """The next operation, if it is the only one that takes this output and a norm, or the end of the same layer."""
    if len(node.users) != 1:
        return None
    after = next(iter(node.users))
    if after.op != "call_function" or operation(after) not in {"batch_norm", "view"}:
        return None
    if operation(after) == "view" and module_of(after) != module_of(node):
        return None
    return after if after.args and after.args[0] is node else None


def _is_end_of_leaf(net: nn.Module, node: Node, path: str | None) -> bool:
    """True where a node is what a module without children returns."""
    place = module_of(node)
    if path is not None and place != path:
        return False
    leaf = net.get_submodule(place)
    inside = any(module_of(user) == place for user in node.users if user.op == "call_function")
    return all(isinstance(child, Added) for child in leaf.children()) and not inside


def _channel_axis(found: Findings, node: Node, size: int) -> int | None:
    value = found.values.get(node)
    if not isinstance(value, Value):
        return None
    axes = [axis for axis, fields in value.fields.items() if fields and value.shape[axis] == size]
    return axes[0] - len(value.shape) if len(axes) == 1 else None  # from the end: batches may have more axes
