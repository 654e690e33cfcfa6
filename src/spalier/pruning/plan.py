"""What a network will be once a plan has been carried out.

Plans: which units of each stream stay.

What a network has left of its base: remembered on the network as plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from spalier.adapters.geometry import tensors_of
from spalier.errors import PlanError
from spalier.structure.labels import Mask
from spalier.structure.streams import kept_indices
from spalier.structure.structure import Structure
from spalier.text import table


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
        lines.append(
            f"bytes       {self.bytes:,}" + (f", of the task {self.task_bytes:,}" if self.task_bytes else "")
        )
        if self.latency is not None and self.latency_base:
            lines.append(
                f"latency     {1e3 * self.latency:.2f} ms of {1e3 * self.latency_base:.2f} "
                f"({self.latency / self.latency_base:.1%}), measured"
            )
        return "\n".join(lines)


Writers = Literal["coupled", "free"]


@dataclass(frozen=True, eq=False)
class Plan:
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
        if not isinstance(structure, Structure):
            raise PlanError(f"structure is a {type(structure).__name__}, expected what trace returns")
        if writers not in ("coupled", "free"):
            raise PlanError(f"writers is {writers!r}, expected 'coupled' or 'free'")
        if not isinstance(keep, Mapping):
            raise PlanError(
                f"keep is a {type(keep).__name__}, expected a dict of stream names and unit numbers"
            )
        chosen = {name: _units(name, units, _size(structure, name, writers)) for name, units in keep.items()}
        object.__setattr__(self, "structure", structure)
        object.__setattr__(self, "keep", chosen)
        object.__setattr__(self, "writers", writers)
        components = {name: _units(name, kept, None) for name, kept in (ranks or {}).items()}
        object.__setattr__(self, "ranks", components)
        object.__setattr__(self, "prediction", prediction)

    def __str__(self) -> str:
        sizes = {name: _size(self.structure, name, self.writers) for name in self.keep}
        rows = [[name, f"{len(units):,}", f"{sizes[name]:,}"] for name, units in self.keep.items()]
        parts = []
        if rows or not self.ranks:
            head = "stream" if self.writers == "coupled" else "stream or writer"
            parts.append(table([head, "kept", "of"], rows))
        if self.ranks:
            parts.append(table(["adapter", "rank"], [[name, str(len(r))] for name, r in self.ranks.items()]))
        if self.prediction is not None:
            parts.append(str(self.prediction))
        return "\n\n".join(parts)


def _size(structure: Structure, name: str, writers: Writers) -> int:
    """How many units a stream or a free writer has."""
    if writers == "free":
        for writer in structure.writers:
            if writer.name == name:
                return structure.streams[writer.stream].size
    if name in structure.index:
        return structure[name].size
    free = [writer.name for writer in structure.writers]
    if name in free:
        raise PlanError(
            f"{name!r} writes into a stream with others; pass writers='free' to let it keep units of its own"
        )
    known = [*structure.index, *(free if writers == "free" else [])]
    close = get_close_matches(str(name), known, n=3) or known[:3] or ["none: it has no streams"]
    raise PlanError(
        f"{name!r} is no stream of this network; expected a name such as {', '.join(map(repr, close))}"
    )


def _units(name: str, units: Iterable[int], size: int | None) -> tuple[int, ...]:
    """Sorted numbers below ``size``, each once; how many components an adapter has, only the network knows."""
    try:
        units = units.tolist() if isinstance(units, Tensor | np.ndarray) else list(units)
        given = [int(unit) for unit in units]
        exact = all(isinstance(u, int | np.integer) and not isinstance(u, bool) for u in units)
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact:
        below = "" if size is None else f" below {size}"
        raise PlanError(f"the units of {name!r} are {units!r}, expected whole numbers{below}")
    if not given:
        raise PlanError(f"the plan empties {name!r}; at least one unit has to stay")
    if len(set(given)) < len(given):
        twice = next(u for u in given if given.count(u) > 1)
        raise PlanError(f"unit {twice} of {name!r} is named twice")
    outside = [u for u in given if u < 0 or (size is not None and u >= size)]
    if outside and size is None:
        raise PlanError(f"component {outside[0]} of {name!r} does not exist; they are counted from 0")
    if outside and size is not None:
        raise PlanError(f"unit {outside[0]} of {name!r} does not exist; it has {size} units, 0 to {size - 1}")
    return tuple(sorted(given))


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
        left = kept_indices(structure.axes.get((tensor, axis), ()), size, self.streams)
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
