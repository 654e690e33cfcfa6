"""Walk over a network's graph: each operation says what it does to the labels that pass through it.

What is known of a tensor is a `Value`: its shape, and the *fields* on its axes. A field is one label for each index of
one axis. An axis may have several fields, and an entry of the tensor is gone as soon as one of the labels at its
indices is.

The rules are functions of the walk and a node: `movement` has those of operations that move data, `arithmetic` those of
operations that compute. They use the methods here, which record facts in `Labels`. An operation without a rule freezes
all that it touches, so the walk may find less than there is, never more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from spalier.structure.capture import module_of, operation, source
from spalier.structure.labels import Ints, Labels

Fields = dict[int, list[Ints]]
Kind = Literal["writer", "reader", "rider"]


@dataclass
class Value:
    """A tensor's shape and the fields on its axes."""

    shape: tuple[int, ...]
    fields: Fields = field(default_factory=dict)
    sources: frozenset[str] | None = None
    """The parameters and buffers that it is computed from alone; None where the network's input has a part in it."""

    @property
    def is_static(self) -> bool:
        """True for what does not depend on the network's input."""
        return self.sources is not None

    def on(self, axis: int) -> list[Ints]:
        """The fields of an axis."""
        return self.fields.get(axis % max(len(self.shape), 1), [])


Result = Value | list[Value]
Rule = Callable[["Walk", Node], Result]
RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register what operations of these names, with spaces between them, do."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


@dataclass(frozen=True)
class Role:
    """Labels that a contraction writes or reads through parameters."""

    sources: frozenset[str]
    labels: Ints
    role: Kind


@dataclass(frozen=True)
class Statistic:
    """A mean over axes that carry labels: what is gone no longer counts."""

    node: Node
    fields: Fields


@dataclass(frozen=True)
class Term:
    """Multiply-accumulates: a number, times the sizes of a parameter's own axes, times those of labelled axes."""

    module: str
    times: int
    tensor: str
    axes: tuple[int, ...]
    fields: tuple[list[Ints], ...]


class Walk:
    """One walk over a graph and the graphs inside of it, and all that it has found."""

    def __init__(self) -> None:
        self.labels = Labels()
        self.values: dict[Node, Result] = {}
        """What each node of the graph carries."""
        self.roles: list[Role] = []
        self.statistics: list[Statistic] = []
        self.terms: list[Term] = []
        self.splits: dict[tuple[str, tuple[int, ...]], list[Ints]] = {}
        """How a module's code splits axes: its path, the sizes, and the labels along each."""
        self.sized: dict[tuple[str, int], list[list[Ints]]] = {}
        """Axes whose sizes a module's code may hold: its path, the size, and the fields."""
        self.views: dict[str, list[Value]] = {}
        """What views make, in order, by the path of the module that asks for them."""
        self.reason = ""
        """The operation that is being looked at, and its line."""
        self.place = ""
        """The path of the module whose code calls it."""
        self._graph: GraphModule | None = None
        self._owners: dict[int, str] = {}

    def run(self, graph: GraphModule, inputs: dict[str, Value]) -> None:
        """Visit every node; ``inputs`` are the parameters and buffers, by the names of their placeholders."""
        static = [value for value in inputs.values() if value.sources]
        self._owners = {id(value): name for value in static for name in value.sources or ()}
        for node in self._visit_all(graph, inputs):
            if isinstance(self.values.get(node), Value):  # somebody uses them
                self.freeze_all(self.value(node), reason="an output of the network")

    def _visit_all(self, graph: GraphModule, inputs: dict[str, Value]) -> list[Node]:
        """Visit a graph; the nodes that it returns."""
        outer, self._graph = self._graph, graph
        outputs: list[Node] = []
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = inputs.get(node.name) or _plain(node, None)
            elif node.op == "call_function":
                self.reason, self.place = source(node), module_of(node)
                self.values[node] = self._rule_of(node)(self, node)
            elif node.op == "output":
                outputs = list(node.all_input_nodes)
        self._graph = outer
        return outputs

    def _rule_of(self, node: Node) -> Rule:
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        return RULES.get(operation(node)) or (RULES["pointwise"] if is_pointwise else unknown)

    def inside(self, node: Node, body: Node, arguments: Sequence[Any]) -> Result:
        """A graph that is called as a whole."""
        inner = getattr(self._graph, str(body.target))
        names = [n.name for n in inner.graph.nodes if n.op == "placeholder"]
        given = {n: self.value(a) for n, a in zip(names, arguments, strict=True) if isinstance(a, Node)}
        outputs = self._visit_all(inner, given)
        self.reason, self.place = source(node), module_of(node)
        return [self.value(out) for out in outputs]

    # what nodes carry

    def value(self, node: Any) -> Value:
        """What a tensor of the graph carries."""
        found = self.values[node]
        return found if isinstance(found, Value) else _plain(node, None)

    def given(self, *nodes: Any) -> list[Value]:
        """What those of an operation's arguments carry that are tensors."""
        return [self.value(node) for node in nodes if isinstance(node, Node)]

    def operands(self, node: Node) -> list[Value]:
        """What all tensors carry that an operation takes."""
        return [self.value(n) for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]

    def owner(self, value: Value) -> str:
        """The parameter or buffer that a value is, as it is; empty for anything computed."""
        return self._owners.get(id(value), "")

    def plain(self, node: Node) -> Value:
        """A tensor without labels, computed from a node's operands."""
        return _plain(node, sources(self.operands(node)))

    # facts about labels

    def freeze(self, fields: Iterable[Ints], reason: str = "") -> None:
        """All labels of these fields must stay."""
        for each in fields:
            self.labels.freeze(each, reason or self.reason)

    def freeze_all(self, value: Value, axes: Iterable[int] | None = None, reason: str = "") -> None:
        """All labels of a tensor, or of some of its axes, must stay."""
        for axis in list(value.fields) if axes is None else axes:
            self.freeze(value.on(axis), reason)

    def meet(self, sides: Sequence[list[Ints]]) -> list[Ints]:
        """Axes that run in parallel: their labels are one. Where one of them has no labels, all others must stay."""
        labelled = [side for side in sides if side]
        if len(labelled) < len(sides):
            for side in labelled:
                self.freeze(side, f"{self.reason}: the other side carries no channels")
            return []
        met = labelled[0]
        for side in labelled[1:]:
            met = self._match(met, side)
        return met

    def _match(self, left: list[Ints], right: list[Ints]) -> list[Ints]:
        if len(left) == len(right):
            for a, b in zip(left, right, strict=True):
                if a is not b:
                    self.labels.pair(a, b, self.reason)
            return left
        fewer, more = sorted((left, right), key=len)
        if len(fewer) == 1:  # a plain axis meets one that a view made of heads and positions, say
            self.labels.define(fewer[0], np.stack(more), self.reason)
        else:
            self.freeze(left + right)
        return more

    def split(self, fields: list[Ints], sizes: tuple[int, ...], *, is_view: bool = False) -> list[list[Ints]]:
        """Each field seen as an array of these sizes: the fields of each of its axes."""
        parts: list[list[Ints]] = [[] for _ in sizes]
        for each in fields:
            for axis, found in self._straightened(torch.from_numpy(each).view(sizes), is_view=is_view):
                parts[axis].append(found)
        return parts

    def moved(self, value: Value, move: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Value:
        """Run a data movement on the fields themselves."""
        out = Value(shape, {}, value.sources)
        for axis, fields in value.fields.items():
            for each in fields:
                dims = [len(each) if a == axis else 1 for a in range(len(value.shape))]
                result = move(torch.from_numpy(each).view(dims).expand(value.shape))
                for new, found in self._straightened(result, is_view=True):
                    out.fields.setdefault(new, []).append(found)
        return out

    def _straightened(self, array: Tensor, *, is_view: bool) -> list[tuple[int, Ints]]:
        """Fields along one axis each that say the same as an array of labels.

        Where the array differs along several axes, each of them gets labels of its own, and a rule says that an entry
        is gone with its row or its column. So both can be pruned. A single field over all of these axes would have to
        choose between rows and columns.
        """
        narrow, axes = _narrowed(array)
        labels = narrow.reshape(-1).numpy()
        if not axes:  # one channel of many, picked or spread
            self.freeze([labels])
            return []
        if len(axes) == 1:
            return [(axes[0], labels)]
        sizes = tuple(narrow.shape[axis] for axis in axes)
        factors = [self.labels.new(size) for size in sizes]
        grid = np.meshgrid(*factors, indexing="ij")
        self.labels.define(labels, np.stack([each.ravel() for each in grid]), self.reason)
        if is_view:
            # one module splits all its tensors by the same attributes: query, key and value have one head size
            known = self.splits.setdefault((self.place, sizes), factors)
            for a, b in zip(known, factors, strict=True):
                if a is not b:
                    self.labels.pair(a, b, self.reason)
        return list(zip(axes, factors, strict=True))

    # what else is noted

    def note_sizes(self, value: Value) -> None:
        """The module's code may hold the sizes of these axes."""
        for axis, fields in value.fields.items():
            if fields:
                self.sized.setdefault((self.place, value.shape[axis]), []).append(fields)

    def note_role(self, value: Value, fields: list[Ints], role: Kind) -> None:
        """What a parameter is to the channels that it meets."""
        if value.sources:
            self.roles += [Role(value.sources, each, role) for each in fields]

    def note_statistic(self, node: Node, fields: Fields) -> None:
        """A mean over labelled axes: there a mask means removal, as a zero would still count."""
        kept = {axis: each for axis, each in fields.items() if each}
        if kept:
            self.statistics.append(Statistic(node, kept))

    def note_cost(self, times: int, tensor: str, axes: Iterable[int], fields: Iterable[list[Ints]]) -> None:
        """What a contraction costs."""
        self.terms.append(Term(self.place, times, tensor, tuple(axes), tuple(fields)))


def _narrowed(array: Tensor) -> tuple[Tensor, list[int]]:
    """One entry along every axis on which an array is constant, and the axes on which it is not."""
    axes = []
    for axis in range(array.dim()):
        if array.shape[axis] > 1:
            first = array.narrow(axis, 0, 1)
            if array.stride(axis) == 0 or torch.equal(first.expand_as(array), array):
                array = first
            else:
                axes.append(axis)
    return array, axes


def sources(values: Sequence[Value]) -> frozenset[str] | None:
    """The parameters that a tensor computed from these depends on; None if the network's input has a part in it."""
    if any(value.sources is None for value in values):
        return None
    return frozenset[str]().union(*(value.sources or () for value in values))


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of a tensor in the graph; -1 for an axis whose size depends on values."""
    return tuple(n if isinstance(n, int) else -1 for n in node.meta["val"].shape)


def argument(node: Node, index: int, name: str = "", default: Any = None) -> Any:
    """An argument of an operation, by its place or by its name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def unknown(walk: Walk, node: Node) -> Result:
    """An operation without a rule freezes all that it touches."""
    for each in node.all_input_nodes:
        found = walk.values.get(each, [])
        for value in found if isinstance(found, list) else [found]:
            walk.freeze_all(value)
    made = node.meta.get("val")
    if isinstance(made, tuple | list):
        origin = sources(walk.operands(node))
        return [Value(tuple(m.shape), {}, origin) for m in made if isinstance(m, Tensor)]
    return walk.plain(node)


def _plain(node: Node, origin: frozenset[str] | None) -> Value:
    return Value(shape_of(node) if isinstance(node.meta.get("val"), Tensor) else (), {}, origin)
