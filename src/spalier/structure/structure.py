"""A structure as plain data that JSON can hold.

The structure of a network: its streams, what is frozen and why, and what its code holds of their sizes.

A short name for a network's architecture: its modules, their settings, the shapes of its tensors, the example.

A structure as plain data: stable JSON, and a cache by the network's fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten

from spalier.adapters.attachment import attachment_of, is_marked
from spalier.adapters.geometry import Added
from spalier.errors import ConfigError, TraceError
from spalier.structure.labels import Ints
from spalier.structure.sites import Cost, Site
from spalier.structure.streams import Assembly, FreeWriter, Frozen, Member, Placed, Stream, present
from spalier.structure.walk import Walk
from spalier.text import pattern, pattern_of, table

FORMAT = 3


def to_dict(structure: Any) -> dict[str, Any]:
    """A structure as JSON can hold it; equal structures give equal data."""
    return {
        "format": FORMAT,
        "fingerprint": structure.fingerprint,
        "shapes": {name: list(shape) for name, shape in sorted(structure.shapes.items())},
        "ties": {name: first for name, first in sorted(structure.names.items()) if name != first},
        "parameters": sorted(structure.parameters),
        "streams": [
            {
                "name": stream.name,
                "units": stream.size,
                "members": [[m.tensor, m.axis, m.role, _coded(m.units)] for m in stream.members],
            }
            for stream in structure.streams
        ],
        "frozen": [[f.tensor, f.axis, f.count, f.size, f.reason] for f in structure.frozen],
        "writers": [
            [w.name, w.stream, [list(member) for member in w.members], w.module, w.axis]
            for w in structure.writers
        ],
        "extents": [
            [e.module, list(e.sizes), [_placed(placed) for placed in e.placed]] for e in structure.extents
        ],
        "sites": [
            [s.writer, s.stream, s.module, s.side, s.axis, _placed(s.placed), s.norm] for s in structure.sites
        ],
        "costs": [
            [c.module, c.times, c.tensor, list(c.axes), list(c.sizes), [_placed(p) for p in c.placed]]
            for c in structure.costs
        ],
        "folds": [list(pair) for pair in structure.folds],
    }


def _placed(placed: Any) -> list[Any]:
    return [[stream, _coded(units)] for stream, units in placed]


def _coded(units: Ints) -> list[int] | dict[str, int]:
    """Units along an axis, as a pattern if they are one."""
    found = pattern_of(units)
    return [int(unit) for unit in units] if found is None else dict(zip(_FIELDS, found, strict=True))


_FIELDS = ("units", "run", "times")


def decoded(code: list[int] | dict[str, int]) -> Ints:
    """Units along an axis, as they were before they were written down."""
    return pattern(*(code[field] for field in _FIELDS)) if isinstance(code, dict) else np.array(code)


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


def structure_of(net: nn.Module, given: Structure | None) -> Structure:
    """The structure that was passed, or the one that an adapted network remembers."""
    if not isinstance(net, nn.Module):
        raise ConfigError(f"net is a {type(net).__name__}, expected a torch.nn.Module")
    if isinstance(net, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ConfigError(
            f"net is wrapped in {type(net).__name__}; pass the network inside of it, net.module"
        )
    if given is not None:
        if not isinstance(given, Structure):
            raise ConfigError(f"structure is a {type(given).__name__}, expected what trace returns")
        return given
    found = attachment_of(net).structure if is_marked(net) else None
    if not isinstance(found, Structure):
        raise TraceError(
            "which channels of this network are coupled is not known; pass structure=trace(net, example), or give "
            "attach_ an example="
        )
    return found


def _short(names: Sequence[str]) -> str:
    layers = list(dict.fromkeys(name.removesuffix(".weight") for name in names))
    return ", ".join(layers[:2]) + (f" and {len(layers) - 2} more" if len(layers) > 2 else "") or "-"


VERSION = 1
"""Rises whenever the same network would be given another structure."""


def fingerprint(net: nn.Module, example: Any, freeze: Any = None) -> str:
    """Equal for networks of the same architecture, whatever their weights and adapters.

    >>> a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    >>> x = torch.zeros(1, 4)
    >>> fingerprint(a, x) == fingerprint(b, x) != fingerprint(nn.Linear(4, 5), x)
    True
    """
    if callable(freeze):  # two predicates may have the same code and mean different modules
        freeze = [path for path, module in net.named_modules() if freeze(path, module)]
    digest = hashlib.sha256(f"{VERSION} {torch.__version__} {freeze!r}".encode())
    seen: set[type] = set()
    for path, module in net.named_modules():
        if isinstance(module, Added):
            continue
        kind = type(module)
        digest.update(f"{path}|{kind.__module__}.{kind.__qualname__}|{module.extra_repr()}".encode())
        if kind not in seen:
            seen.add(kind)
            digest.update(_code(kind))
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            digest.update(f"{key}{None if tensor is None else tuple(tensor.shape)}".encode())
    leaves, spec = tree_flatten(example)
    digest.update(str(spec).encode())
    for leaf in leaves:
        digest.update(
            f"{tuple(leaf.shape)}{leaf.dtype}".encode() if isinstance(leaf, Tensor) else repr(leaf).encode()
        )
    return digest.hexdigest()


def _code(kind: type) -> bytes:
    """What a class's forward says; a change of it is a change of the network."""
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    if code is None:
        return b""
    constants = [c for c in code.co_consts if isinstance(c, int | float | str | tuple | None)]
    return bytes(code.co_code) + repr((code.co_names, constants)).encode()


def from_dict(data: Mapping[str, Any]) -> Structure:
    """The structure that `to_dict` wrote down; it has no graph, so `prune_` needs ``check=False`` with it."""
    if data.get("format") != FORMAT:
        raise TraceError(
            f"the structure has format {data.get('format')!r}, expected {FORMAT}; trace the network again"
        )
    shapes = {name: tuple(shape) for name, shape in data["shapes"].items()}
    streams = tuple(
        Stream(s["name"], s["units"], tuple(Member(t, a, role, decoded(u)) for t, a, role, u in s["members"]))
        for s in data["streams"]
    )
    return Structure(
        data["fingerprint"],
        shapes,
        {name: data["ties"].get(name, name) for name in shapes},
        frozenset(data["parameters"]),
        streams,
        tuple(Frozen(*entry) for entry in data["frozen"]),
        tuple(
            FreeWriter(n, s, tuple((t, x) for t, x in members), m, a)
            for n, s, members, m, a in data["writers"]
        ),
        tuple(Extent(m, tuple(sizes), tuple(map(_replaced, placed))) for m, sizes, placed in data["extents"]),
        tuple(
            Site(writer, stream, module, side, axis, _replaced(placed), norm)
            for writer, stream, module, side, axis, placed, norm in data["sites"]
        ),
        tuple(
            Cost(module, times, tensor, tuple(axes), tuple(sizes), tuple(map(_replaced, placed)))
            for module, times, tensor, axes, sizes, placed in data["costs"]
        ),
        tuple((layer, norm) for layer, norm in data["folds"]),
    )


def _replaced(entries: list[Any]) -> Placed:
    return tuple((stream, decoded(units)) for stream, units in entries)


class Cache:
    """Structures in a folder, one JSON file for each fingerprint."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def get(self, fingerprint: str) -> Structure | None:
        """The structure of a network with this fingerprint; None if it is not there, or not whole."""
        try:
            data = json.loads((self.folder / f"{fingerprint}.json").read_text("utf-8"))
            structure = from_dict(data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, TraceError):
            return None
        return structure if structure.fingerprint == fingerprint else None

    def put(self, structure: Structure) -> None:
        """Write a structure down, all of it or nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(to_dict(structure), separators=(",", ":"))
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".json")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(self.folder / f"{structure.fingerprint}.json")
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
