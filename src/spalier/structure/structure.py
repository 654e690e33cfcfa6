"""The structure of a network: `Structure`, how it is found on the graph, and how it is kept as plain data.

`find` captures the graph (`capture`), walks over it (`walk`), makes streams of the labels (`streams`) and looks for
sites, free writers and folds (`sites`). Only what the graph shows is known then; `spalier.trace` goes on with a dry run
that shows whether the network's code follows.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from spalier.adapters.attachment import attachment_of, is_marked
from spalier.adapters.geometry import Added, first_names, has_weight_hook, tensors_of
from spalier.adapters.targets import Names, select_named
from spalier.errors import ConfigError, PlanError, TraceError
from spalier.files import write
from spalier.structure import movement  # noqa: F401  (importing it registers its rules; streams imports arithmetic)
from spalier.structure.graph import Value, Walk, capture, copied
from spalier.structure.labels import Ints, Labels
from spalier.structure.recording import Program
from spalier.structure.sites import FreeWriter, GraphSearch, Site, find_folds
from spalier.structure.streams import (
    Assembly,
    AxisUnits,
    Cost,
    Extent,
    Frozen,
    Scale,
    Stream,
    View,
    assemble,
    costs_of,
    extents_of,
    kept_indices,
)
from spalier.text import InNotebooks, near, pattern, pattern_of, percent, table

UNUSED = "not used on this example"
Freeze = str | Sequence[str] | Callable[[str, nn.Module], bool] | None


@dataclass(eq=False)
class Captured:
    """The graph that a structure was read from; not saved with it."""

    program: Program
    example: Any
    walk: Walk
    assembly: Assembly


@dataclass(frozen=True, eq=False, repr=False)
class Structure(InNotebooks):
    """What can be pruned in a network, and what cannot, and why. Print it."""

    fingerprint: str
    shapes: dict[str, tuple[int, ...]]
    """The shape of every parameter and buffer."""
    names: dict[str, str]
    """For each name of a tensor, the first name that it goes by: tied tensors have several."""
    parameters: frozenset[str]
    """The tensors that are parameters, by their first names."""
    streams: tuple[Stream, ...] = ()
    frozen: tuple[Frozen, ...] = ()
    writers: tuple[FreeWriter, ...] = ()
    """The layers that may keep channels of their own with ``writers="free"``."""
    extents: tuple[Extent, ...] = ()
    """Sizes that modules' code uses, so that their attributes can follow."""
    views: tuple[View, ...] = ()
    """Sizes that modules' code gets wrong where channels go, and that are set right."""
    scales: tuple[Scale, ...] = ()
    """Numbers that it gets wrong likewise."""
    grouped: tuple[str, ...] = ()
    """Modules with grouped products, whose kernels take few widths."""
    sites: tuple[Site, ...] = ()
    """Where each stream's channels can be seen while the network runs."""
    costs: tuple[Cost, ...] = ()
    """What the network computes on the example."""
    folds: tuple[tuple[str, str], ...] = ()
    """Layers, and the batch norms that alone take their outputs: one can be folded into the other."""
    untried: str = ""
    """Why the network's own code could not be tried with fewer channels; empty where it was."""
    captured: Captured | None = None
    """The graph, to compare with; None where the structure was loaded and nothing had to be compared yet."""
    example: Any = None
    freeze: Any = None

    @property
    def units(self) -> int:
        """How many units there are in all streams."""
        return sum(stream.size for stream in self.streams)

    @property
    def prunable(self) -> float:
        """The share of all weights that some unit takes with it."""
        nothing = [np.zeros(stream.size, bool) for stream in self.streams]
        total = left = 0
        for name in self.parameters:
            shape = self.shapes[name]
            stays = [kept_indices(self.axes.get((name, a), ()), n, nothing).sum() for a, n in enumerate(shape)]
            total += math.prod(shape)
            left += math.prod(map(int, stays))
        return (total - left) / total if total else 0.0

    def __getitem__(self, name: str) -> Stream:
        if name not in self.index:
            raise PlanError(f"{name!r} is no stream of this network; expected a name such as {near(name, self.index)}")
        return self.streams[self.index[name]]

    @cached_property
    def index(self) -> dict[str, int]:
        """The number of each stream, by its name."""
        return {stream.name: number for number, stream in enumerate(self.streams)}

    @cached_property
    def free_writers(self) -> dict[str, int]:
        """The number of the stream that each free writer writes into, by the writer's name."""
        return {writer.name: writer.stream for writer in self.writers}

    @cached_property
    def axes(self) -> dict[tuple[str, int], AxisUnits]:
        """The units on each axis of each tensor."""
        found: dict[tuple[str, int], list[tuple[int, Ints]]] = {}
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
        return {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "shapes": {name: list(shape) for name, shape in sorted(self.shapes.items())},
            "ties": {name: first for name, first in sorted(self.names.items()) if name != first},
            "parameters": sorted(self.parameters),
            "untried": self.untried,
            **{key: _coded(getattr(self, key)) for key in _LISTS},
        }

    def __repr__(self) -> str:
        return f"Structure({self._summary()})"

    def _summary(self) -> str:
        return f"{self.units:,} units in {len(self.streams)} streams; {percent(self.prunable)} of the weights can go"

    def __str__(self) -> str:
        rows = [[s.name, f"{s.size:,}", _short(s.writers), _short(s.readers), str(len(s.riders))] for s in self.streams]
        text = table(["stream", "units", "writers", "readers", "riders"], rows) if rows else "no streams"
        frozen = [[f"{f.tensor}[{f.axis}]", f"{f.count:,} of {f.size:,}", f.reason] for f in self.frozen]
        if frozen:
            text += "\n\n" + table(["frozen", "indices", "why"], frozen)
        if self.untried:
            text += (
                f"\n\nnot tried with fewer channels, as it does not run without values: {self.untried}\n"
                "prune_ may refuse some of these units, and says then what to freeze"
            )
        return f"{text}\n{self._summary()}"


def _short(names: Sequence[str]) -> str:
    layers = list(dict.fromkeys(name.removesuffix(".weight") for name in names))
    return ", ".join(layers[:2]) + (f" and {len(layers) - 2} more" if len(layers) > 2 else "") or "-"


def structure_of(net: nn.Module, given: Structure | None) -> Structure:
    """The structure that was passed, or the one that an adapted network remembers."""
    if isinstance(net, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ConfigError(f"net is wrapped in {type(net).__name__}; pass the network inside of it, net.module")
    if given is not None:
        return given
    found = attachment_of(net).structure if is_marked(net) else None
    if not isinstance(found, Structure):
        raise TraceError(
            "which channels of this network are coupled is not known; pass structure=trace(net, example), or give "
            "attach_ an example="
        )
    return found


# finding it


def find(net: nn.Module, example: Any, freeze: Freeze = None) -> Structure:
    """The structure of a network, as its graph has it."""
    example = copied(example)
    program = capture(net, example)
    tensors = tensors_of(net)
    names = first_names(tensors)
    walk = Walk()
    inputs = _inputs(walk, program, tensors, names)
    _freeze_chosen(walk, net, freeze, inputs)
    _freeze_computed(walk, net, inputs)
    walk.run(program.module, inputs)
    captured = Captured(program, example, walk, assemble(walk))
    parameters = {names[name] for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
    structure = Structure(
        fingerprint=fingerprint(net, example, freeze),
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        names=names,
        parameters=frozenset(parameters),
        example=example,
        freeze=freeze,
    )
    return _read(net, structure, captured)


def without(net: nn.Module, structure: Structure, refused: Mapping[int, str]) -> Structure:
    """The same structure where these streams are frozen too, and why."""
    captured = structure.captured
    assert captured is not None
    # the walk stays as it is; only streams are numbered anew, so all that names them is read again
    return _read(net, structure, replace(captured, assembly=captured.assembly.without(refused)))


def _read(net: nn.Module, structure: Structure, captured: Captured) -> Structure:
    """A structure with what can be read off its graph."""
    program, walk, assembly = captured.program, captured.walk, captured.assembly
    search = GraphSearch(net, program, walk, assembly, structure.names)
    return replace(
        structure,
        streams=tuple(assembly.streams),
        frozen=tuple(assembly.frozen),
        writers=tuple(search.free_writers()),
        extents=tuple(extents_of(walk, assembly)),
        sites=tuple(search.sites()),
        costs=tuple(costs_of(walk.terms, assembly)),
        folds=tuple(find_folds(net, program, structure.names)),
        captured=captured,
    )


def capture_again_(net: nn.Module, structure: Structure) -> None:
    """Give a structure that was loaded the graph of its network."""
    fresh = find(net, structure.example, structure.freeze)
    # the dry run froze these when the structure was made
    refused = {n: "" for n, stream in enumerate(fresh.streams) if stream.name not in structure.index}
    # a cache, in a frozen object
    object.__setattr__(structure, "captured", without(net, fresh, refused).captured)


def _inputs(walk: Walk, program: Program, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Value]:
    """Fresh labels for every axis of every parameter and buffer, by the names of their placeholders."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    # a tied tensor has several placeholders; it is used if one of them is
    used = {names[owner] for place, owner in program.tensors.items() if owner in names and nodes[place].users}
    values: dict[str, Value] = {}
    inputs: dict[str, Value] = {}
    for place, owner in program.tensors.items():
        if owner in names:  # else an adapter's, which this graph does not use
            name = names[owner]
            if name not in values:
                values[name] = _labelled(walk.labels, name, tuple(tensors[name].shape))
                if name not in used:
                    walk.freeze_all(values[name], reason=UNUSED)
            inputs[place] = values[name]
    for place in program.constants:
        inputs[place] = Value(tuple(nodes[place].meta["val"].shape), {}, frozenset())
    return inputs


def _labelled(labels: Labels, name: str, shape: tuple[int, ...]) -> Value:
    """A single channel cannot go, so an axis of size 1 needs no label."""
    fields = {axis: [labels.new(size, name, axis)] for axis, size in enumerate(shape) if size > 1}
    return Value(shape, fields, frozenset({name}))


def _freeze_chosen(walk: Walk, net: nn.Module, freeze: Freeze, inputs: Mapping[str, Value]) -> None:
    names = Names(net)
    if callable(freeze):
        chosen = {m for m in names.of if freeze(names.of[m][0], m)}
    else:
        chosen = select_named(names, "freeze", freeze)
    owners = {path for module in chosen for path in names.of[module]}
    for value in inputs.values():
        if any(source.rpartition(".")[0] in owners for source in value.sources or ()):
            walk.freeze_all(value, reason="as asked")


def _freeze_computed(walk: Walk, net: nn.Module, inputs: Mapping[str, Value]) -> None:
    """Weights that a hook computes before each call would have other sizes in between."""
    hooked = {path for path, module in net.named_modules() if has_weight_hook(module)}
    for value in inputs.values():
        for path in hooked.intersection(source.rpartition(".")[0] for source in value.sources or ()):
            walk.freeze_all(value, reason=f"a hook computes the weight of {path}; use torch.nn.utils.parametrizations")


# what a network is known by

VERSION = 4
"""Rises whenever the same network would be given another structure."""


def fingerprint(net: nn.Module, example: Any, freeze: Any = None) -> str:
    """Equal for networks of the same architecture, whatever their weights and adapters.

    It covers the modules, their settings and code, the shapes of their tensors, and the example.

    >>> a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    >>> x = torch.zeros(1, 4)
    >>> fingerprint(a, x) == fingerprint(b, x) != fingerprint(nn.Linear(4, 5), x)
    True
    """
    if callable(freeze):  # two predicates may have the same code and mean different modules
        freeze = [path for path, module in net.named_modules() if freeze(path, module)]
    # another version of PyTorch may export another graph
    digest = hashlib.sha256(f"{VERSION} {torch.__version__} {freeze!r}".encode())
    seen: set[type] = set()
    for path, module in net.named_modules():
        if isinstance(module, Added):  # adapters and gathers
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
        text = f"{tuple(leaf.shape)}{leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)
        digest.update(text.encode())
    return digest.hexdigest()


def _code(kind: type) -> bytes:
    """What a class's forward says; a change of it is a change of the network."""
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    if code is None:
        return b""
    constants = [c for c in code.co_consts if isinstance(c, int | float | str | tuple | None)]
    return bytes(code.co_code) + repr((code.co_names, constants)).encode()


# plain data

FORMAT = 6
_LISTS = ("streams", "frozen", "writers", "extents", "views", "scales", "grouped", "sites", "costs", "folds")


def _coded(value: Any) -> Any:
    """Dataclasses and tuples as lists; units along an axis as a pattern, if they are one."""
    if isinstance(value, np.ndarray):
        found = pattern_of(value)
        return value.tolist() if found is None else {"pattern": list(found)}
    if is_dataclass(value):
        return [_coded(getattr(value, each.name)) for each in fields(value)]
    return [_coded(each) for each in value] if isinstance(value, tuple) else value


def from_dict(data: Mapping[str, Any]) -> Structure:
    """The structure that `Structure.to_dict` wrote down; it has no graph, so `prune_` needs ``check=False`` with it."""
    if data.get("format") != FORMAT:
        raise TraceError(f"the structure has format {data.get('format')!r}, expected {FORMAT}; trace the network again")
    shapes = {name: tuple(shape) for name, shape in data["shapes"].items()}
    kinds = get_type_hints(Structure)
    return Structure(
        fingerprint=data["fingerprint"],
        shapes=shapes,
        names={name: data["ties"].get(name, name) for name in shapes},
        parameters=frozenset(data["parameters"]),
        untried=str(data["untried"]),
        **{key: _reader(kinds[key])(data[key]) for key in _LISTS},
    )


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """What reads a value of this type from what `_coded` has written of it."""
    if get_origin(kind) is np.ndarray:
        return lambda code: pattern(*code["pattern"]) if isinstance(code, dict) else np.array(code)
    if not is_dataclass(kind) and get_origin(kind) is not tuple:
        return lambda code: code
    inside = get_args(kind) or tuple(get_type_hints(kind).values())
    readers = [_reader(each) for each in inside if each is not Ellipsis]
    if Ellipsis in inside:
        return lambda code: tuple(map(readers[0], code))
    made: Any = kind if is_dataclass(kind) else lambda *parts: parts
    return lambda code: made(*(read(part) for read, part in zip(readers, code, strict=True)))


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
            return None  # whatever is wrong with the file, tracing again is right
        return structure if structure.fingerprint == fingerprint else None  # a file that was renamed

    def put(self, structure: Structure) -> None:
        """Write a structure down, all of it or nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(structure.to_dict(), separators=(",", ":"))
        write(self.folder / f"{structure.fingerprint}.json", text.encode())
