"""Where on the graph a layer's channels can be seen, be fewer than the stream's, or be folded with a norm.

Layers that write streams are followed on the graph, from their weights to the modules that return what they computed:

- *Sites* are where scores look at channels while the network runs: after the batch norm that follows a layer, where
  nothing else takes the layer's output. Where a writer is no module's own output (attention that owns its projections),
  the channels are seen on their way into the layers that read them.
- *Free writers* are layers that may keep fewer channels than the stream that they write into. The paper prunes the
  outputs of every convolution by itself, those into a residual stream too. Such a layer, with its norm, becomes small,
  and a gather spreads its channels over the stream, with zeros for those that it does not write. That can be done
  wherever what it writes is the output of a module that is called once.
- *Folds* are layers and the batch norms that alone take their outputs.

All of it is plain data, so that scoring needs no graph: it works on pruned networks, and on structures from the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import nn
from torch.fx import Node

from spalier.adapters.geometry import Added
from spalier.structure.graph import Value, Walk, module_of, operation, placeholders
from spalier.structure.recording import Program
from spalier.structure.streams import Assembly, AxisUnits, Member, Stream

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
    """Counted from the end: batches may have more axes than the example."""
    units: AxisUnits
    """All streams on that axis, in the base."""
    norm: str | None = None
    """The batch norm that is between the layer and here."""


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
    """The axis of that module's output, counted from the end."""


def layer_name(tensor: str) -> str:
    """How a layer is called by the name of its weight.

    >>> layer_name("layer1.0.conv1.weight"), layer_name("attention.in_proj_weight")
    ('layer1.0.conv1', 'attention.in_proj_weight')
    """
    return tensor.removesuffix(".weight")


class GraphSearch:
    """Follows layers on a graph."""

    def __init__(self, net: nn.Module, program: Program, walk: Walk, assembly: Assembly, names: dict[str, str]) -> None:
        self.net, self.program, self.walk, self.assembly = net, program, walk, assembly
        self.placeholders = placeholders(program, names)
        self.users = {name: [u for n in nodes for u in n.users] for name, nodes in self.placeholders.items()}
        self.norms = Counter(module_of(n) for n in program.graph.nodes if operation(n) == "batch_norm")
        """How often each batch norm runs."""

    # sites

    def sites(self) -> Iterator[Site]:
        """The sites of every stream, in the streams' order; a stream that can be seen nowhere has none."""
        for number, stream in enumerate(self.assembly.streams):
            written = [s for m in stream.members if m.role == "writer" for s in self._written(number, m)]
            if written:
                yield from written
            else:
                yield from (s for m in stream.members if m.role == "reader" for s in self._read(number, m))

    def _written(self, stream: int, member: Member) -> list[Site]:
        """What a writer returns, after its norm; nothing where some use of it is no module's own output."""
        sites: dict[tuple[str, str | None], Site] = {}
        free = self._free(stream, self.assembly.streams[stream], member)
        for node in self._uses(member.tensor):
            # a layer whose own channels are spread over the stream in front of its norm is seen there
            found = self._end(node, spread=None if free is None else free.module)
            axis = None if found is None else self._axis(found[0], stream)
            if found is None or axis is None:
                return []
            norm = found[1]
            path = norm or module_of(node)
            sites[path, norm] = Site(layer_name(member.tensor), stream, path, "output", *axis, norm)
        return list(sites.values())

    def _read(self, stream: int, member: Member) -> list[Site]:
        """What a reader takes."""
        name = layer_name(member.tensor)
        parent = self.net.get_submodule(name.rpartition(".")[0])
        if name.endswith("out_proj") and isinstance(parent, nn.MultiheadAttention):
            # it reads the weight and never calls the layer; for scores it is made to
            units = tuple(
                (number, other.units)
                for number, each in enumerate(self.assembly.streams)
                for other in each.members
                if (other.tensor, other.axis) == (member.tensor, member.axis)
            )
            return [Site(name, stream, name, "input", -1, units)]
        sites = {}
        for node in self._uses(member.tensor):
            given = node.args[0] if node.args else None
            path = module_of(node)
            if not isinstance(given, Node) or not self._is_leaf(path) or module_of(given) == path:
                return []
            axis = self._axis(given, stream)
            if axis is None:
                return []
            sites[path] = Site(name, stream, path, "input", *axis)
        return list(sites.values())

    def _uses(self, tensor: str) -> Iterator[Node]:
        """The first operations in which a parameter meets the network's input."""
        waiting = list(self.placeholders.get(tensor, ()))
        known = set(waiting)
        while waiting:
            for user in waiting.pop(0).users:
                if user in known or user.op != "call_function":
                    continue
                known.add(user)
                value = self.walk.values.get(user)
                if isinstance(value, Value) and value.is_static:  # a weight that is computed from it
                    waiting.append(user)
                else:
                    yield user

    def _end(self, node: Node, spread: str | None) -> tuple[Node, str | None] | None:
        """What a layer returns, or the batch norm behind it that alone takes its output; and that norm's path.

        ``spread`` is the module behind which the layer's own channels are spread, if it may have some.
        """
        path = module_of(node)
        # to the end of the layer's own forward
        while (after := _only_user(node)) is not None and module_of(after) == path:
            if operation(after) not in _PLAIN:
                return None
            node = after
        if not self._is_leaf(path) or any(module_of(user) == path for user in node.users):
            return None
        if after is None or operation(after) != "batch_norm" or after.args[0] is not node:
            return node, None
        norm = module_of(after)
        is_own = self.norms[norm] == 1 and spread in (None, norm)  # else it is others' too
        end = self._end_of_norm(after) if is_own else None
        return (node, None) if end is None else (end, norm)

    def _end_of_norm(self, norm: Node) -> Node | None:
        """What a norm returns; some libraries' norms hold an activation, which is no layer."""
        path, end = module_of(norm), norm
        if not path or any(True for child in self._children(path) for _ in child.parameters()):
            return None
        while any(f"{module_of(user)}.".startswith(f"{path}.") for user in end.users):
            after = _only_user(end)
            if after is None:
                return None
            end = after
        return end

    def _children(self, path: str) -> list[nn.Module]:
        return [m for m in self.net.get_submodule(path).children() if not isinstance(m, Added)]

    def _is_leaf(self, path: str) -> bool:
        return bool(path) and not self._children(path)

    def _axis(self, node: Node, stream: int) -> tuple[int, AxisUnits] | None:
        """The one axis of a node that carries a stream, from the end, and all streams on it."""
        value = self.walk.values.get(node)
        if not isinstance(value, Value):
            return None
        on = {axis: self.assembly.units_on(fields) for axis, fields in value.fields.items() if fields}
        axes = [axis for axis, units in on.items() if any(number == stream for number, _ in units)]
        return (axes[0] - len(value.shape), on[axes[0]]) if len(axes) == 1 else None

    # free writers

    def free_writers(self) -> Iterator[FreeWriter]:
        """Every layer of the network that can be a free writer, in the streams' order."""
        for number, stream in enumerate(self.assembly.streams):
            for member in stream.members:
                writer = self._free(number, stream, member) if member.role == "writer" else None
                if writer is not None:
                    yield writer

    def _free(self, number: int, stream: Stream, member: Member) -> FreeWriter | None:
        """Follow the writer's output as long as nothing else takes it; the last module's end is where it is spread."""
        if len(stream.writers) < 2:  # a single writer has the channels of the stream anyway
            return None
        path = member.tensor.rpartition(".")[0]
        on_stream = [m for m in stream.members if m is member or m.role == "rider"]
        uses = self.users.get(member.tensor, [])
        if not _is_plain(member.units) or len(uses) != 1:
            return None
        node: Node | None = uses[0]
        taken: list[tuple[str, int]] = []
        found: FreeWriter | None = None
        while node is not None:
            own = [m for m in on_stream if node in self.users.get(m.tensor, ())]
            if any(len(self.users[m.tensor]) > 1 or not _is_plain(m.units) for m in own):
                break  # others use these tensors too
            taken += [(m.tensor, m.axis) for m in own]
            module = module_of(node)
            end = self._end_of_module(node)
            axis, units = (None if end is None else self._axis(end, number)) or (0, ())
            is_plain = any(_is_plain(each) for stream_number, each in units if stream_number == number)
            if is_plain and (found is not None or module == path):
                found = FreeWriter(path, number, tuple(taken), module, axis)
            node = _norm_or_end(node)
        return found

    def _end_of_module(self, node: Node) -> Node | None:
        """What the module of a node returns, if that is the node's, and zero where it is: a gather can sit behind."""
        path = module_of(node)
        if operation(node) == "batch_norm" and self._children(path):
            end = self._end_of_norm(node)
            after = node
            while end is not None and after is not end:
                after = next(iter(after.users))
                if operation(after) not in _ZERO_AT_ZERO:
                    return None
            return end
        return node if self._is_leaf(path) and all(module_of(user) != path for user in node.users) else None


_ZERO_AT_ZERO = {
    *("relu", "relu6", "hardtanh", "leaky_relu", "elu", "celu", "selu", "silu", "gelu", "mish", "hardswish", "tanh"),
    *("dropout", "feature_dropout", "clone", "alias"),
}
"""Activations inside of norms after which a channel that is not there is zero."""
_PLAIN = {"view", "reshape", "add", "_unsafe_view"}
"""What may follow inside of a layer without making its output another: a bias, another shape."""


def _is_plain(units: Any) -> bool:
    """True where index i is unit i."""
    return np.array_equal(units, np.arange(len(units)))


def _only_user(node: Node) -> Node | None:
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return user if user.op == "call_function" else None


def _norm_or_end(node: Node) -> Node | None:
    """The only operation that takes this output, if it is a norm, or another shape inside of the same layer."""
    after = _only_user(node)
    if after is None or not after.args or after.args[0] is not node:
        return None
    is_shape = operation(after) == "view" and module_of(after) == module_of(node)
    return after if is_shape or operation(after) == "batch_norm" else None


# folds

_LAYERS = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


def find_folds(net: nn.Module, program: Program, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Layers, and the batch norms that alone take their outputs, channel by channel; each is called once.

    Norms of other libraries may do more than that, as long as nothing of it depends on what is folded.
    """
    tensors: dict[Any, str] = {node: name for name, nodes in placeholders(program, names).items() for node in nodes}
    kinds = (*_LAYERS, "batch_norm")
    calls = Counter(module_of(node) for node in program.graph.nodes if operation(node) in kinds)
    for node in program.graph.nodes:
        layer = node.args[0] if operation(node) == "batch_norm" else None
        if not isinstance(layer, Node) or operation(layer) not in _LAYERS or len(layer.users) != 1:
            continue
        path, norm = module_of(layer), module_of(node)
        bias = layer.args[2] if len(layer.args) > 2 else None
        owns_its_tensors = (
            tensors.get(layer.args[1]) == f"{path}.weight"
            and (bias is None or tensors.get(bias) == f"{path}.bias")
            and [tensors.get(t) for t in node.args[3:5]] == [f"{norm}.running_mean", f"{norm}.running_var"]
            and all(t is None or len(t.users) == 1 for t in node.args[1:5])
            and getattr(net.get_submodule(norm), "eps", None) == node.args[7]
        )
        # a linear layer of more axes has its channels last, a norm has them second
        on_channels = operation(layer) != "linear" or len(layer.meta["val"].shape) == 2
        if owns_its_tensors and on_channels and calls[path] == calls[norm] == 1:
            yield path, norm
