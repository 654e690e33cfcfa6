"""What a network computes, as products of sizes: multiply-accumulates that shrink as channels go.

Sites: where a stream's channels can be seen while the network runs, one for each layer that writes it.

A layer's channels are seen after the norm that follows it, where nothing else takes its output. Where a writer is no
module's own output (attention that owns its projections), the channels are seen on their way into the layers that read
them. Sites are plain data, so a structure from the cache has them too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node

from spalier.adapters.geometry import Added
from spalier.structure.capture import module_of, operation, placeholders
from spalier.structure.streams import Assembly, Member, Placed, present
from spalier.structure.walk import Findings, Term, Value

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Cost:
    """The multiply-accumulates of one contraction: ``times`` the product of what is left of some axes."""

    module: str
    times: int
    tensor: str
    """A parameter, and the axes of it that count; empty where none is contracted as it is."""
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    placed: tuple[Placed, ...]

    def left(self, keep: Sequence[Mask], sizes_of: dict[str, list[int]]) -> int:
        """What is left where these units stay; ``sizes_of`` are the sizes of each parameter's axes."""
        own = [sizes_of[self.tensor][axis] for axis in self.axes]
        others = [
            int(present(placed, size, keep).sum())
            for placed, size in zip(self.placed, self.sizes, strict=True)
        ]
        return self.times * math.prod(own) * math.prod(others)


def costs_of(terms: Sequence[Term], assembly: Assembly) -> list[Cost]:
    """The terms by units; axes that nothing can be taken from are in ``times``."""
    made: dict[tuple[object, ...], Cost] = {}
    for number, term in enumerate(terms):
        times, sizes, placed = term.times, [], []
        for fields in term.fields:
            on = assembly.placed(fields)
            if on:
                sizes.append(len(fields[0]))
                placed.append(on)
            else:
                times *= len(fields[0])
        key = (number,) if placed else (term.module, term.tensor, term.axes)
        if key in made:
            times += made[key].times
        made[key] = Cost(term.module, times, term.tensor, term.axes, tuple(sizes), tuple(placed))
    return list(made.values())


Side = Literal["output", "input"]


@dataclass(frozen=True, eq=False)
class Site:
    """An axis of what a module takes or returns that carries a stream."""

    writer: str
    """The layer whose channels are seen here: the path of its weight, without ``.weight``."""
    stream: int
    module: str
    side: Side
    axis: int
    """Counted from the end."""
    placed: Placed
    """All streams on that axis, in the base."""
    norm: str | None = None
    """The batch norm that is between the layer and here."""


def layer_name(tensor: str) -> str:
    """How a layer is called by the name of its weight.

    >>> layer_name("layer1.0.conv1.weight"), layer_name("attention.in_proj_weight")
    ('layer1.0.conv1', 'attention.in_proj_weight')
    """
    return tensor.removesuffix(".weight")


def find_sites(
    net: nn.Module, program: ExportedProgram, found: Findings, assembly: Assembly, names: Mapping[str, str]
) -> list[Site]:
    """The sites of every stream, in the streams' order; a stream that can be seen nowhere has none."""
    norms = Counter(module_of(n) for n in program.graph.nodes if operation(n) == "batch_norm")
    search = _Search(net, found, assembly, placeholders(program, names), norms)
    sites: list[Site] = []
    for number, stream in enumerate(assembly.streams):
        own = [m for m in stream.members if m.role == "writer"]
        seen = [site for member in own for site in search.written(number, member)]
        if not seen:
            read = [m for m in stream.members if m.role == "reader"]
            seen = [site for member in read for site in search.read(number, member)]
        sites += seen
    return sites


def find_folds(program: ExportedProgram, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Layers, and the batch norms that alone take their outputs, channel by channel; each is called once."""
    tensors: dict[Any, str] = {
        node: name for name, nodes in placeholders(program, names).items() for node in nodes
    }
    calls = Counter(
        module_of(node) for node in program.graph.nodes if operation(node) in (*_LAYERS, "batch_norm")
    )
    found = []
    for node in program.graph.nodes:
        layer = node.args[0] if operation(node) == "batch_norm" else None
        if not isinstance(layer, Node) or operation(layer) not in _LAYERS or len(layer.users) != 1:
            continue
        path, norm = module_of(layer), module_of(node)
        bias = layer.args[2] if len(layer.args) > 2 else None
        own = [
            tensors.get(layer.args[1]) == f"{path}.weight",
            tensors.get(node.args[3]) == f"{norm}.running_mean",
        ]
        own.append(bias is None or tensors.get(bias) == f"{path}.bias")
        on_channels = operation(layer) != "linear" or len(layer.meta["val"].shape) == 2
        if all(own) and on_channels and calls[path] == calls[norm] == 1:
            found.append((path, norm))
    return found


_LAYERS = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


@dataclass(frozen=True)
class _Search:
    net: nn.Module
    found: Findings
    assembly: Assembly
    placeholders: Mapping[str, list[Node]]
    norms: Counter[str]
    """How often each batch norm runs."""

    def written(self, stream: int, member: Member) -> list[Site]:
        """What a writer returns, after its norm; nothing where some use of it is no module's own output."""
        sites: dict[tuple[str, str | None], Site] = {}
        for node in self._uses(member.tensor):
            found = self._end(node)
            axis, placed = self._axis(found[0], stream) if found is not None else (None, ())
            if found is None or axis is None:
                return []
            norm = found[1]
            path = norm or module_of(node)
            sites[path, norm] = Site(layer_name(member.tensor), stream, path, "output", axis, placed, norm)
        return list(sites.values())

    def read(self, stream: int, member: Member) -> list[Site]:
        """What a reader takes."""
        if member.tensor.endswith("out_proj.weight"):
            path = layer_name(member.tensor)
            if isinstance(self.net.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention):
                placed = self._placed_on(member)
                return [Site(path, stream, path, "input", -1, placed)]
        sites = {}
        for node in self._uses(member.tensor):
            given = node.args[0] if node.args else None
            path = module_of(node)
            if not isinstance(given, Node) or not self._is_leaf(path) or module_of(given) == path:
                return []
            axis, placed = self._axis(given, stream)
            if axis is None:
                return []
            sites[path] = Site(layer_name(member.tensor), stream, path, "input", axis, placed)
        return list(sites.values())

    def _placed_on(self, member: Member) -> Placed:
        streams = self.assembly.streams
        return tuple(
            (number, other.units)
            for number, stream in enumerate(streams)
            for other in stream.members
            if (other.tensor, other.axis) == (member.tensor, member.axis)
        )

    def _uses(self, tensor: str) -> Iterator[Node]:
        """The first operations that bring a parameter together with the network's input."""
        waiting = list(self.placeholders.get(tensor, ()))
        known = set(waiting)
        while waiting:
            for user in waiting.pop(0).users:
                if user in known or user.op != "call_function":
                    continue
                known.add(user)
                value = self.found.values.get(user)
                if isinstance(value, Value) and value.is_static:
                    waiting.append(user)
                else:
                    yield user

    def _end(self, node: Node) -> tuple[Node, str | None] | None:
        """What a layer returns, or the batch norm behind it that alone takes its output; and that norm's path."""
        path = module_of(node)
        while (after := _only_user(node)) is not None and module_of(after) == path:
            if operation(after) not in _PLAIN:
                return None
            node = after
        if not self._is_leaf(path) or any(module_of(user) == path for user in node.users):
            return None
        if after is None or operation(after) != "batch_norm" or after.args[0] is not node:
            return node, None
        end = None if self.norms[module_of(after)] > 1 else self._end_of_norm(after)  # else it is others' too
        return (node, None) if end is None else (end, module_of(after))

    def _end_of_norm(self, norm: Node) -> Node | None:
        """What a norm returns; some libraries' norms hold an activation, which is no layer."""
        path, end = module_of(norm), norm
        if not path or any(True for child in self._children(path) for _ in child.parameters()):
            return None
        while any(module_of(user).startswith(path) for user in end.users):
            after = _only_user(end)
            if after is None:
                return None
            end = after
        return end

    def _children(self, path: str) -> list[nn.Module]:
        return [m for m in self.net.get_submodule(path).children() if not isinstance(m, Added)]

    def _is_leaf(self, path: str) -> bool:
        return bool(path) and not self._children(path)

    def _axis(self, node: Node, stream: int) -> tuple[int | None, Placed]:
        value = self.found.values.get(node)
        if not isinstance(value, Value):
            return None, ()
        on = {axis: self.assembly.placed(fields) for axis, fields in value.fields.items() if fields}
        axes = [axis for axis, placed in on.items() if any(number == stream for number, _ in placed)]
        return (axes[0] - len(value.shape), on[axes[0]]) if len(axes) == 1 else (None, ())


_PLAIN = {"view", "reshape", "add", "_unsafe_view"}
"""What may follow inside of a layer without making its output another: a bias, another shape."""


def _only_user(node: Node) -> Node | None:
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return user if user.op == "call_function" else None
