"""What a network has left of its base: remembered on the network as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from spalier.adapters.tensors import tensors_of
from spalier.errors import PlanError
from spalier.pruning.plan import Plan, Writers
from spalier.structure.streams import present
from spalier.structure.structure import Mask, Structure

MARK = "_spalier_kept"
"""The private attribute of a pruned network that holds the kept units of its base."""


@dataclass(frozen=True)
class Kept:
    """The units that are left of each stream, and of each free writer that has fewer than its stream."""

    streams: tuple[Mask, ...]
    writers: dict[str, Mask]
    _known: dict[str, list[Mask]] = field(default_factory=dict, repr=False)

    def _indices(self, structure: Structure, tensor: str, axis: int) -> Mask:
        size = structure.shapes[tensor][axis]
        left = present(structure.axes.get((tensor, axis), ()), size, self.streams)
        for writer in structure.writers:
            if writer.name in self.writers and (tensor, axis) in writer.members:
                left &= self.writers[writer.name]
        return left

    def of(self, structure: Structure, tensor: str) -> list[Mask]:
        """Which indices of each axis of a base tensor are left."""
        if tensor not in self._known:
            axes = range(len(structure.shapes[tensor]))
            self._known[tensor] = [self._indices(structure, tensor, axis) for axis in axes]
        return self._known[tensor]

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
    found = net.__dict__.get(MARK)
    return None if found is None else {kind: dict(found[kind]) for kind in ("streams", "writers")}


def kept_of(net: nn.Module, structure: Structure) -> Kept:
    """What a network has left, checked against its tensors."""
    found = net.__dict__.get(MARK)
    if found is None:
        kept = Kept(tuple(np.ones(stream.size, bool) for stream in structure.streams), {})
    else:
        if found["fingerprint"] != structure.fingerprint:
            raise PlanError(
                "the plan is for another network: this one was pruned with a structure of its own; "
                "use the structure that it was pruned with first"
            )
        masks = tuple(_mask(found["streams"][s.name], s.size) for s in structure.streams)
        sizes = {w.name: structure.streams[w.stream].size for w in structure.writers}
        kept = Kept(masks, {name: _mask(units, sizes[name]) for name, units in found["writers"].items()})
    _check_tensors(tensors_of(net), structure, kept, pruned=found is not None)
    return kept


def _mask(units: list[int], size: int) -> Mask:
    mask = np.zeros(size, bool)
    mask[units] = True
    return mask


def _check_tensors(tensors: Mapping[str, Tensor], structure: Structure, kept: Kept, *, pruned: bool) -> None:
    unlike = set(tensors) ^ set(structure.names)
    if unlike:
        name = sorted(unlike)[0]
        where = "the network" if name in tensors else "the structure"
        raise PlanError(
            f"the plan is for another network, or the network was changed since it was traced: only {where} has "
            f"{name!r}; trace it again"
        )
    for name, first in structure.names.items():
        expected = tuple(int(mask.sum()) for mask in kept.of(structure, first))
        if tuple(tensors[name].shape) != expected:
            raise PlanError(
                f"the plan is for another network, or the network was changed since it was traced: {name} has shape "
                f"{tuple(tensors[name].shape)}, expected {expected}; {'' if pruned else 'trace it again'}".rstrip(
                    "; "
                )
            )


def after(plan: Plan, kept: Kept) -> Kept:
    """What is left once a plan has been carried out."""
    structure = plan.structure
    chosen: dict[str, Mask] = {}
    for name, units in plan.keep.items():
        stream = kept.streams[_stream(structure, name) if _is_free(plan, name) else structure.index[name]]
        chosen[name] = _subset(
            name, units, kept.writers.get(name, stream) if _is_free(plan, name) else stream
        )
    left = settled(structure, kept, chosen, plan.writers)
    for name, mask in left.writers.items():
        if not mask.any():
            raise PlanError(f"the plan empties {name!r}; at least one unit has to stay")
    return left


def settled(structure: Structure, kept: Kept, chosen: Mapping[str, Mask], writers: Writers) -> Kept:
    """What is left where these streams and free writers keep what is chosen for them, and the others what they have."""
    free = {w.name for w in structure.writers} if writers == "free" else set()
    streams = [
        chosen[stream.name] if stream.name in chosen and stream.name not in free else mask
        for stream, mask in zip(structure.streams, kept.streams, strict=True)
    ]
    own = {name: mask & streams[_stream(structure, name)] for name, mask in kept.writers.items()}
    for number, stream in enumerate(structure.streams):
        several = [w for w in structure.writers if w.stream == number]
        if not any(w.name in chosen and w.name in free for w in several):
            continue
        for w in several:
            own[w.name] = chosen.get(w.name, own.get(w.name, streams[number]))
        if len(several) == len(
            stream.writers
        ):  # else a writer that is not free keeps the stream as wide as it is
            streams[number] = np.logical_or.reduce([own[w.name] for w in several]) & streams[number]
    fewer = {n: m for n, m in own.items() if not np.array_equal(m, streams[_stream(structure, n)])}
    return Kept(tuple(streams), fewer)


def _is_free(plan: Plan, name: str) -> bool:
    """A stream is named after its first writer; with free writers the name means that layer."""
    return plan.writers == "free" and any(w.name == name for w in plan.structure.writers)


def _stream(structure: Structure, writer: str) -> int:
    return next(w.stream for w in structure.writers if w.name == writer)


def _subset(name: str, units: tuple[int, ...], before: Mask) -> Mask:
    mask = _mask(list(units), len(before))
    gone = np.flatnonzero(mask & ~before)
    if len(gone):
        raise PlanError(f"unit {gone[0]} of {name!r} is gone already; a plan can only keep what is left")
    return mask
