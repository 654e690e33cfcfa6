"""`trace`: find what can be pruned in a network, and say what cannot, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from spalier._table import table
from spalier.adapters.selection import Names, select_named
from spalier.adapters.updates import Update
from spalier.structure import arithmetic, movement  # noqa: F401  (their rules register themselves)
from spalier.structure.capture import capture
from spalier.structure.labels import Labels
from spalier.structure.streams import Frozen, Stream, assemble
from spalier.structure.values import Value
from spalier.structure.walk import Findings, Walk


@dataclass(frozen=True, eq=False)
class Structure:
    """The streams of a network, and what is frozen."""

    streams: tuple[Stream, ...]
    frozen: tuple[Frozen, ...]
    shapes: dict[str, tuple[int, ...]]
    aliases: dict[str, str]


@dataclass(eq=False)
class Traced:
    program: ExportedProgram
    labels: Labels
    found: Findings


def trace(net: nn.Module, example: Any, *, freeze: str | Sequence[str] | None = None) -> Structure:
    program = capture(net, example)
    labels = Labels()
    walk = Walk(labels)
    tensors = _tensors(net)
    canonical = canonical_names(tensors)
    values: dict[str, Value] = {}
    inputs: dict[str, Value] = {}
    signature = program.graph_signature
    owners = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    used = {canonical[owners[n.name]] for n in program.graph.nodes if n.op == "placeholder" and n.users and n.name in owners}
    for placeholder, name in owners.items():
        name = canonical[name]
        if name not in values:
            values[name] = _labelled(labels, name, tuple(tensors[name].shape))
            if name not in used:
                walk.reason = "not used on this example"
                walk.freeze_all(values[name])
        inputs[placeholder] = values[name]
    for placeholder in signature.inputs_to_lifted_tensor_constants:
        node = next(n for n in program.graph.nodes if n.name == placeholder)
        inputs[placeholder] = Value(tuple(node.meta["val"].shape), {}, frozenset())
    walk.run(program.graph_module, inputs)
    resolved = labels.resolved()
    streams, frozen = assemble(labels, resolved, walk.found.roles)
    return Structure(tuple(streams), tuple(frozen), {n: tuple(t.shape) for n, t in tensors.items()}, canonical)


def _labelled(labels, name, shape):
    fields = {a: [labels.new(n, name, a)] for a, n in enumerate(shape) if n > 1}
    return Value(shape, fields, frozenset({name}))


def _tensors(net: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under all its names, those of adapters left out."""
    found: dict[str, Tensor] = {}
    for path, module in net.named_modules(remove_duplicate=False):
        if not isinstance(module, Update):
            prefix = f"{path}." if path else ""
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    found[prefix + key] = tensor
    return found


def canonical_names(tensors: dict[str, Tensor]) -> dict[str, str]:
    """For each name of a tensor, the first name that it goes by."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
