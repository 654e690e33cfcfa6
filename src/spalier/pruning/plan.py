"""Plans: which units of each stream stay, and what is left of a network's base.

Units are numbered as in the unpruned base, for ever. So plans, task files and scores of one network mean the same units
however often it has been pruned. What is left is remembered on the network itself, as plain numbers (`Kept`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from spalier.adapters.attachment import Owner
from spalier.adapters.geometry import tensors_of
from spalier.errors import PlanError
from spalier.structure.labels import Ints, Mask
from spalier.structure.streams import kept_indices
from spalier.structure.structure import Structure
from spalier.text import InNotebooks, first_few, near, percent, table

PRUNED_MARK = "_spalier_kept"
"""The private attribute of a pruned network that holds the kept units of its base."""
Writers = Literal["coupled", "free"]


@dataclass(frozen=True)
class Prediction:
    """Sizes and costs before and after; `count` finds the same numbers in the pruned network."""

    channels: int
    """Output channels of the layers that write streams: what the paper's density counts."""
    channels_base: int
    parameters: int
    parameters_base: int
    learned: int
    bytes: int
    """Of the fused network's parameters and buffers."""
    macs: int | None
    macs_base: int | None
    task_bytes: int | None
    """What a task file holds in float32, its header left out; None for a network without adapters."""
    latency: float | None = None
    """Measured seconds for one batch, where the budget was one of latency."""
    latency_base: float | None = None

    @property
    def density(self) -> dict[str, float]:
        """What is left of the unpruned network: of channels (the paper's density), of weights, and of MACs."""
        found = {
            "channels": self.channels / max(self.channels_base, 1),
            "weights": self.parameters / max(self.parameters_base, 1),
        }
        if self.macs is not None and self.macs_base:
            found["macs"] = self.macs / self.macs_base
        return found

    def __str__(self) -> str:
        density = self.density
        lines = [
            f"channels    {self.channels:,} of {self.channels_base:,} ({density['channels']:.1%})",
            f"parameters  {self.parameters:,} of {self.parameters_base:,} ({density['weights']:.1%}), "
            f"learned {self.learned:,}",
        ]
        if self.macs is not None:
            share = f" of {self.macs_base:,} ({density['macs']:.1%})" if "macs" in density else ""
            lines.append(f"MACs        {self.macs:,}{share}")
        task = f", of the task {self.task_bytes:,}" if self.task_bytes else ""
        lines.append(f"bytes       {self.bytes:,}{task}")
        if self.latency is not None and self.latency_base:
            lines.append(
                f"latency     {1e3 * self.latency:.2f} ms of {1e3 * self.latency_base:.2f} "
                f"({self.latency / self.latency_base:.1%}), measured"
            )
        return "\n".join(lines)


@dataclass(frozen=True, eq=False, repr=False)
class Plan(InNotebooks):
    """Which units stay, counted as in the unpruned network; a stream that is not named keeps what it has.

    With ``writers="free"`` the layers that write into one stream may keep different units of it: name them by their
    path. A stream then keeps the units that any of its writers keeps.

    ``ranks`` are the components that stay of adapters' bottlenecks, by the paths of their layers; an adapter that is
    not named keeps all.
    """

    structure: Structure
    keep: Mapping[str, tuple[int, ...]]
    writers: Writers = "coupled"
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    prediction: Prediction | None = None
    """What the network will be, where `select` has made the plan."""

    def __init__(
        self,
        structure: Structure,
        keep: Mapping[str, Iterable[int]],
        *,
        writers: Writers = "coupled",
        ranks: Mapping[str, Iterable[int]] | None = None,
        prediction: Prediction | None = None,
    ) -> None:
        if writers not in ("coupled", "free"):
            raise PlanError(f"writers is {writers!r}, expected 'coupled' or 'free'")
        chosen = {name: _units(name, units, _size(structure, name, writers)) for name, units in keep.items()}
        components = {name: _units(name, kept, None) for name, kept in (ranks or {}).items()}
        # frozen, and its own constructor takes units of any kind of iterable
        given = {"structure": structure, "writers": writers, "prediction": prediction}
        self.__dict__.update(given, keep=chosen, ranks=components)

    @property
    def nearly_gone(self) -> dict[str, tuple[int, int]]:
        """Streams and writers that lose most of what they have, and keep under 5% or at most two units: kept and of."""
        sizes = {name: (len(units), _size(self.structure, name, self.writers)) for name, units in self.keep.items()}
        return {n: (kept, size) for n, (kept, size) in sizes.items() if size > 4 and (kept <= 2 or kept < size / 20)}

    def warning(self) -> str:
        """What to know of layers that nearly disappear, and what to try; empty where none does."""
        found = [f"{name} ({kept} of {size})" for name, (kept, size) in self.nearly_gone.items()]
        if not found:
            return ""
        return (
            f"nearly gone: {first_few(found, 8)}; what passes there is lost: try min_keep=4, "
            "ranking='local', protect=, or a larger budget"
        )

    def __repr__(self) -> str:
        sizes = {name: _size(self.structure, name, self.writers) for name in self.keep}
        kept = sum(map(len, self.keep.values()))
        names = "streams" if self.writers == "coupled" else "streams or writers"
        parts = [f"{kept:,} of {sum(sizes.values()):,} units in {len(sizes):,} {names}"]
        parts += [f"ranks of {len(self.ranks):,} adapters"] if self.ranks else []
        if self.prediction is not None:
            parts += [f"{percent(share)} of {what}" for what, share in self.prediction.density.items()]
        return f"Plan({', '.join(parts)})"

    def __str__(self) -> str:
        parts = []
        if self.keep or not self.ranks:
            head = "stream" if self.writers == "coupled" else "stream or writer"
            sizes = {name: _size(self.structure, name, self.writers) for name in self.keep}
            rows = [[name, f"{len(units):,}", f"{sizes[name]:,}"] for name, units in self.keep.items()]
            parts.append(table([head, "kept", "of"], rows))
        if self.ranks:
            parts.append(table(["adapter", "rank"], [[name, str(len(r))] for name, r in self.ranks.items()]))
        if self.prediction is not None:
            parts.append(str(self.prediction))
        if warning := self.warning():
            parts.append(warning)
        return "\n\n".join(parts)


def _size(structure: Structure, name: str, writers: Writers) -> int:
    """How many units a stream or a free writer has."""
    if writers == "free" and name in structure.free_writers:
        return structure.streams[structure.free_writers[name]].size
    if name in structure.index:
        return structure[name].size
    if name in structure.free_writers:
        raise PlanError(
            f"{name!r} writes into a stream with others; pass writers='free' to let it keep units of its own"
        )
    known = [*structure.index, *(structure.free_writers if writers == "free" else ())]
    raise PlanError(f"{name!r} is no stream of this network; expected a name such as {near(name, known)}")


def _units(name: str, units: Iterable[int], size: int | None) -> tuple[int, ...]:
    """Sorted numbers below ``size``, each once; how many components an adapter has, only the network knows."""
    given = units.tolist() if isinstance(units, Tensor | np.ndarray) else list(units)  # a generator, once
    if not all(isinstance(unit, int | np.integer) and not isinstance(unit, bool) for unit in given):
        below = "" if size is None else f" below {size}"
        raise PlanError(f"the units of {name!r} are {given!r}, expected whole numbers{below}")
    if not given:
        raise PlanError(f"the plan empties {name!r}; at least one unit has to stay")
    if len(set(given)) < len(given):
        twice = next(unit for unit in given if given.count(unit) > 1)
        raise PlanError(f"unit {twice} of {name!r} is named twice")
    outside = [unit for unit in given if unit < 0 or (size is not None and unit >= size)]
    if outside and size is None:
        raise PlanError(f"component {outside[0]} of {name!r} does not exist; they are counted from 0")
    if outside and size is not None:
        raise PlanError(f"unit {outside[0]} of {name!r} does not exist; it has {size} units, 0 to {size - 1}")
    return tuple(sorted(int(unit) for unit in given))


# what a network has left


@dataclass(frozen=True)
class Kept:
    """The units that are left of each stream, and of each free writer that has fewer than its stream."""

    streams: tuple[Mask, ...]
    writers: dict[str, Mask]
    _known: dict[str, list[Mask]] = field(default_factory=dict, repr=False)

    def units(self, structure: Structure, name: str, writers: Writers) -> Mask:
        """Which units a stream, or a free writer, has left.

        A stream is named after its first writer; with free writers that name means the layer.
        """
        if writers == "free" and name in structure.free_writers:
            return self.writers.get(name, self.streams[structure.free_writers[name]])
        return self.streams[structure.index[name]]

    def of(self, structure: Structure, tensor: str) -> list[Mask]:
        """Which indices of each axis of a base tensor are left."""
        if tensor not in self._known:
            axes = range(len(structure.shapes[tensor]))
            self._known[tensor] = [self._indices(structure, tensor, axis) for axis in axes]
        return self._known[tensor]

    def _indices(self, structure: Structure, tensor: str, axis: int) -> Mask:
        size = structure.shapes[tensor][axis]
        left = kept_indices(structure.axes.get((tensor, axis), ()), size, self.streams)
        # index i of a free writer's axis is unit i of its stream
        for writer in structure.writers:
            if writer.name in self.writers and (tensor, axis) in writer.members:
                left &= self.writers[writer.name]
        return left

    def to_dict(self, structure: Structure, attributes: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """As plain numbers, with the base's values of attributes that have changed."""
        named = {stream.name: mask for stream, mask in zip(structure.streams, self.streams, strict=True)}
        return {
            "fingerprint": structure.fingerprint,
            "streams": {name: np.flatnonzero(mask).tolist() for name, mask in named.items()},
            "writers": {name: np.flatnonzero(mask).tolist() for name, mask in self.writers.items()},
            "attributes": attributes,
        }


def kept_units(net: nn.Module) -> dict[str, dict[str, list[int]]] | None:
    """The units of the base that a pruned network has left, by stream and by free writer; None if it is whole."""
    found = net.__dict__.get(PRUNED_MARK)
    return None if found is None else {kind: dict(found[kind]) for kind in ("streams", "writers")}


def whole(structure: Structure) -> Kept:
    """What an unpruned network has left: everything."""
    return Kept(tuple(np.ones(stream.size, bool) for stream in structure.streams), {})


def kept_of(net: nn.Module, structure: Structure) -> Kept:
    """What a network has left, checked against its tensors."""
    found = net.__dict__.get(PRUNED_MARK)
    kept = whole(structure)
    if found is not None:
        if found["fingerprint"] != structure.fingerprint:
            raise PlanError(
                "the plan is for another network: this one was pruned with a structure of its own; "
                "use the structure that it was pruned with first"
            )
        masks = tuple(_mask(found["streams"][s.name], s.size) for s in structure.streams)
        sizes = {name: structure.streams[stream].size for name, stream in structure.free_writers.items()}
        kept = Kept(masks, {name: _mask(units, sizes[name]) for name, units in found["writers"].items()})
    _check_tensors(tensors_of(net), structure, kept, remedy="" if found else "; trace it again")
    return kept


def _mask(units: Iterable[int], size: int) -> Mask:
    mask = np.zeros(size, bool)
    mask[list(units)] = True
    return mask


def _check_tensors(tensors: Mapping[str, Tensor], structure: Structure, kept: Kept, remedy: str) -> None:
    wrong = "the plan is for another network, or the network was changed since it was traced"
    unlike = set(tensors) ^ set(structure.names)
    if unlike:
        name = min(unlike)
        where = "the network" if name in tensors else "the structure"
        raise PlanError(f"{wrong}: only {where} has {name!r}; trace it again")
    for name, first in structure.names.items():
        found, expected = tuple(tensors[name].shape), tuple(int(m.sum()) for m in kept.of(structure, first))
        if found != expected:
            raise PlanError(f"{wrong}: {name} has shape {found}, expected {expected}{remedy}")


def kept_after(plan: Plan, kept: Kept) -> Kept:
    """What is left once a plan has been carried out."""
    chosen: dict[str, Mask] = {}
    for name, units in plan.keep.items():
        before = kept.units(plan.structure, name, plan.writers)
        chosen[name] = _mask(units, len(before))
        gone = np.flatnonzero(chosen[name] & ~before)
        if len(gone):
            raise PlanError(f"unit {gone[0]} of {name!r} is gone already; a plan can only keep what is left")
    left = narrowed(plan.structure, kept, chosen, plan.writers)
    for stream, mask in zip(plan.structure.streams, left.streams, strict=True):
        if mask.sum() < stream.least:
            raise PlanError(
                f"the plan leaves {int(mask.sum())} unit of {stream.name!r}; at least {stream.least} have to stay, as "
                "a layer that reads it standardises its weights over its inputs"
            )
    for name, mask in left.writers.items():
        if not mask.any():
            had = np.flatnonzero(kept.writers[name]).tolist() if name in kept.writers else []
            which = f"; it has units of its own, {first_few(had)}: keep one of these" if had else ""
            raise PlanError(f"the plan empties {name!r}; at least one unit has to stay{which}")
    return left


def narrowed(structure: Structure, kept: Kept, chosen: Mapping[str, Mask], writers: Writers) -> Kept:
    """What is left where streams and free writers keep what is chosen for them, and the others what they have."""
    free = structure.free_writers
    is_named = set(free) & set(chosen) if writers == "free" else set()
    streams = [
        chosen[stream.name] if stream.name in chosen and stream.name not in is_named else mask
        for stream, mask in zip(structure.streams, kept.streams, strict=True)
    ]
    # a stream that becomes narrower takes its free writers with it
    own = {name: mask & streams[free[name]] for name, mask in kept.writers.items()}
    for number in {free[name] for name in is_named}:
        several = [name for name, stream in free.items() if stream == number]
        for name in several:
            own[name] = chosen.get(name, own.get(name, streams[number]))
        # a stream keeps what any of its writers writes; one that is not free keeps it as wide as it is
        if len(several) == len(structure.streams[number].writers):
            streams[number] = np.logical_or.reduce([own[name] for name in several]) & streams[number]
    # a writer that has all of its stream is an ordinary one again, without a gather
    fewer = {name: mask for name, mask in own.items() if not np.array_equal(mask, streams[free[name]])}
    return Kept(tuple(streams), fewer)


Indices = tuple[Ints | None, ...]
"""For each axis, the indices that stay; None where all do."""


@dataclass(frozen=True, eq=False)
class Reduction:
    """A network, what it has left of its base, and what it is to have left."""

    net: nn.Module
    structure: Structure
    owners: Mapping[str, list[Owner]]
    before: Kept
    left: Kept

    @cached_property
    def cuts(self) -> dict[str, Indices]:
        """For each tensor that loses something, the indices that stay, counted in the tensor as it is now."""
        return cuts_of(self.structure, self.before, self.left)


def cuts_of(structure: Structure, before: Kept, left: Kept) -> dict[str, Indices]:
    """For each tensor that loses something, the indices that stay, counted in the tensor as it was before."""
    found: dict[str, Indices] = {}
    kept = zip(structure.streams, before.streams, left.streams, strict=True)
    changed = [stream for stream, was, stays in kept if not np.array_equal(was, stays)]
    if before.writers or left.writers:  # their layers may lose what their streams keep
        changed = list(structure.streams)
    for name in dict.fromkeys(member.tensor for stream in changed for member in stream.members):
        # masks are counted in the base, indices in the tensor as it is: what was gone before is skipped
        masks = zip(before.of(structure, name), left.of(structure, name), strict=True)
        indices = tuple(None if stays[was].all() else np.flatnonzero(stays[was]) for was, stays in masks)
        if any(index is not None for index in indices):
            found[name] = indices
    return found
