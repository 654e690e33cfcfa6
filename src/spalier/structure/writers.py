"""Free writers: layers that may keep fewer channels than the stream that they write into.

The paper prunes every convolution's outputs by itself, those into a residual stream too. Such a layer, with the norm
that follows it, becomes small, and a gather spreads its channels over the stream. That can be done wherever what it
writes is the output of a module that is called once: zeros stand there for the channels that it does not write, in the
masked network as in the pruned one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from spalier.adapters.layers import Added
from spalier.structure.capture import module_of, operation, placeholders
from spalier.structure.streams import Assembly, Member, Stream
from spalier.structure.values import Value
from spalier.structure.walk import Findings


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
