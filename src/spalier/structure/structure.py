"""The structure of a network: its streams, what is frozen and why, and what its code holds of their sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.export import ExportedProgram

from spalier._table import table
from spalier.structure.coding import to_dict
from spalier.structure.costs import Cost
from spalier.structure.sites import Site
from spalier.structure.streams import Assembly, Frozen, Placed, Stream, present
from spalier.structure.walk import Walk
from spalier.structure.writers import FreeWriter

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Extent:
    """Sizes that a module's own code uses: of a view such as (heads, head size), or of what a norm averages."""

    module: str
    sizes: tuple[int, ...]
    placed: tuple[Placed, ...]

    def left(self, keep: Sequence[Mask]) -> tuple[int, ...]:
        """The sizes that are left."""
        pairs = zip(self.placed, self.sizes, strict=True)
        return tuple(int(present(placed, size, keep).sum()) for placed, size in pairs)


@dataclass(eq=False)
class Captured:
    """The graph that a structure was read from; not saved with it."""

    program: ExportedProgram
    example: Any
    walk: Walk
    assembly: Assembly


@dataclass(frozen=True, eq=False)
class Structure:
    """What can be pruned in a network, and what cannot, and why. Print it."""

    fingerprint: str
    shapes: dict[str, tuple[int, ...]]
    """The shape of every parameter and buffer."""
    names: dict[str, str]
    """For each name of a tensor, the first name that it goes by: tied tensors have several."""
    parameters: frozenset[str]
    """The tensors that are parameters, by their first names."""
    streams: tuple[Stream, ...]
    frozen: tuple[Frozen, ...]
    writers: tuple[FreeWriter, ...]
    """The layers that may keep channels of their own with ``writers="free"``."""
    extents: tuple[Extent, ...]
    sites: tuple[Site, ...]
    """Where each stream's channels can be seen while the network runs."""
    costs: tuple[Cost, ...]
    """What the network computes on the example."""
    folds: tuple[tuple[str, str], ...] = ()
    """Layers, and the batch norms that alone take their outputs: one can be folded into the other."""
    captured: Captured | None = field(default=None, repr=False)
    """The graph, to compare with; None where the structure was loaded and nothing had to be compared yet."""
    example: Any = field(default=None, repr=False)
    freeze: Any = field(default=None, repr=False)

    @property
    def units(self) -> int:
        """How many units there are in all streams."""
        return sum(stream.size for stream in self.streams)

    @property
    def prunable(self) -> float:
        """The share of all weights that some unit takes with it."""
        total = sum(math.prod(self.shapes[name]) for name in self.parameters)
        left = sum(math.prod(self._without_units(name)) for name in self.parameters)
        return (total - left) / total if total else 0.0

    def _without_units(self, name: str) -> list[int]:
        """How many indices of each axis go with no unit."""
        nothing = [np.zeros(stream.size, bool) for stream in self.streams]
        shape = self.shapes[name]
        return [int(present(self.axes.get((name, a), ()), n, nothing).sum()) for a, n in enumerate(shape)]

    def __getitem__(self, name: str) -> Stream:
        return self.streams[self.index[name]]

    @cached_property
    def index(self) -> dict[str, int]:
        """The number of each stream, by its name."""
        return {stream.name: number for number, stream in enumerate(self.streams)}

    @cached_property
    def axes(self) -> dict[tuple[str, int], Placed]:
        """The streams on each axis of each tensor."""
        found: dict[tuple[str, int], list[tuple[int, Any]]] = {}
        for number, stream in enumerate(self.streams):
            for member in stream.members:
                found.setdefault((member.tensor, member.axis), []).append((number, member.units))
        return {place: tuple(on) for place, on in found.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Structure:
        return self  # nothing changes it

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "captured": None}  # a graph does not pickle; it can be captured again

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data that JSON can hold, the same for the same network."""
        return to_dict(self)

    def __str__(self) -> str:
        rows = [
            [s.name, f"{s.size:,}", _short(s.writers), _short(s.readers), str(len(s.riders))]
            for s in self.streams
        ]
        text = table(["stream", "units", "writers", "readers", "riders"], rows) if rows else "no streams"
        frozen = [[f"{f.tensor}[{f.axis}]", f"{f.count:,} of {f.size:,}", f.reason] for f in self.frozen]
        if frozen:
            text += "\n\n" + table(["frozen", "indices", "why"], frozen)
        return f"{text}\n{self.units:,} units in {len(self.streams)} streams; {self.prunable:.1%} of the weights can go"


def _short(names: Sequence[str]) -> str:
    layers = list(dict.fromkeys(name.removesuffix(".weight") for name in names))
    return ", ".join(layers[:2]) + (f" and {len(layers) - 2} more" if len(layers) > 2 else "") or "-"
