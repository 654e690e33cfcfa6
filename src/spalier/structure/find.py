"""Find a network's structure on its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from spalier.adapters.attach import Names, select_named
from spalier.adapters.geometry import first_names, tensors_of
from spalier.structure import arithmetic, movement  # noqa: F401  (importing them registers their rules)
from spalier.structure.capture import capture, copied, module_of
from spalier.structure.labels import Labels
from spalier.structure.sites import costs_of, find_folds, find_sites
from spalier.structure.streams import Assembly, assemble, free_writers
from spalier.structure.structure import Captured, Extent, Structure, fingerprint
from spalier.structure.walk import Value, Walk

UNUSED = "not used on this example"
Freeze = str | Sequence[str] | Callable[[str, nn.Module], bool] | None


def find(net: nn.Module, example: Any, freeze: Freeze = None) -> Structure:
    """The structure of a network, as its graph has it."""
    example = copied(example)
    program = capture(net, example)
    tensors = tensors_of(net)
    names = first_names(tensors)
    walk = Walk(Labels())
    inputs = _inputs(walk, program, tensors, names)
    _freeze_chosen(walk, net, freeze, inputs)
    walk.run(program.graph_module, inputs)
    assembly = assemble(walk.labels, walk.labels.resolved(), walk.found.roles)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    mark = fingerprint(net, example, freeze)
    return _structure(net, mark, shapes, names, freeze, Captured(program, example, walk, assembly))


def without(net: nn.Module, structure: Structure, refused: dict[int, str]) -> Structure:
    """The same structure where these streams are frozen too, and why."""
    assert structure.captured is not None
    captured = replace(structure.captured, assembly=structure.captured.assembly.without(refused))
    return _structure(
        net, structure.fingerprint, structure.shapes, structure.names, structure.freeze, captured
    )


def _structure(
    net: nn.Module,
    mark: str,
    shapes: dict[str, tuple[int, ...]],
    names: dict[str, str],
    freeze: Freeze,
    captured: Captured,
) -> Structure:
    walk, assembly = captured.walk, captured.assembly
    return Structure(
        mark,
        shapes,
        names,
        frozenset(
            names[name] for name, tensor in tensors_of(net).items() if isinstance(tensor, nn.Parameter)
        ),
        tuple(assembly.streams),
        tuple(assembly.frozen),
        tuple(free_writers(net, captured.program, walk.found, assembly, names)),
        tuple(_extents(walk, assembly)),
        tuple(find_sites(net, captured.program, walk.found, assembly, names)),
        tuple(costs_of(walk.found.terms, assembly)),
        tuple(find_folds(captured.program, names)),
        captured,
        captured.example,
        freeze,
    )


def capture_again_(net: nn.Module, structure: Structure) -> None:
    """Give a structure that was loaded the graph of its network."""
    fresh = find(net, structure.example, structure.freeze)
    refused = {n: "" for n, stream in enumerate(fresh.streams) if stream.name not in structure.index}
    object.__setattr__(structure, "captured", without(net, fresh, refused).captured)


def _inputs(
    walk: Walk, program: ExportedProgram, tensors: dict[str, Tensor], names: dict[str, str]
) -> dict[str, Value]:
    """Fresh labels for every axis of every parameter and buffer, by the names of their placeholders."""
    signature = program.graph_signature
    owners = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    used = {names[owner] for place, owner in owners.items() if owner in names and nodes[place].users}
    values: dict[str, Value] = {}
    inputs: dict[str, Value] = {}
    for place, owner in owners.items():
        if owner in names:  # else an adapter's, which this graph does not use
            name = names[owner]
            if name not in values:
                values[name] = _labelled(walk.labels, name, tuple(tensors[name].shape))
                if name not in used:
                    walk.reason = UNUSED
                    walk.freeze_all(values[name])
            inputs[place] = values[name]
    for place in signature.inputs_to_lifted_tensor_constants:
        inputs[place] = Value(tuple(nodes[place].meta["val"].shape), {}, frozenset())
    return inputs


def _labelled(labels: Labels, name: str, shape: tuple[int, ...]) -> Value:
    """A single channel cannot go, so an axis of size 1 needs no label."""
    fields = {axis: [labels.new(size, name, axis)] for axis, size in enumerate(shape) if size > 1}
    return Value(shape, fields, frozenset({name}))


def _freeze_chosen(walk: Walk, net: nn.Module, freeze: Freeze, inputs: dict[str, Value]) -> None:
    names = Names(net)
    if callable(freeze) and not isinstance(freeze, str):
        chosen = {m for m in names.of if freeze(names.of[m][0], m)}
    else:
        chosen = select_named(names, "freeze", freeze)
    owners = {path for module in chosen for path in names.of[module]}
    walk.reason = "as asked"
    for value in inputs.values():
        if any(source.rpartition(".")[0] in owners for source in value.sources or ()):
            walk.freeze_all(value)


def _extents(walk: Walk, assembly: Assembly) -> list[Extent]:
    found = [
        Extent(where, sizes, tuple(assembly.placed([labels]) for labels in factors))
        for (where, sizes), factors in walk.splits.items()
    ]
    for (where, size), several in walk.sized.items():
        different = {tuple(map(id, fields)): fields for fields in several}
        found += [Extent(where, (size,), (assembly.placed(fields),)) for fields in different.values()]
    for statistic in walk.found.statistics:
        axes = sorted(statistic.fields)
        sizes = tuple(len(statistic.fields[axis][0]) for axis in axes)
        placed = tuple(assembly.placed(statistic.fields[axis]) for axis in axes)
        found.append(Extent(module_of(statistic.node), sizes, placed))
    return [extent for extent in found if any(extent.placed)]
