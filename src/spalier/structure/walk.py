"""What a tensor of the graph carries: labels along its axes, and how these move, split and meet.

A *field* is one label for each index of one axis. An axis may have several: an entry of the tensor is gone as soon as
one of the labels at its indices is.

Walk over a network's graph and let each operation say what it does to the labels that pass through it.

An operation without a rule freezes what it touches, so the walk may find less than there is, never more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from spalier.structure.capture import module_of, operation, source
from spalier.structure.labels import NONE, Ints, Labels

Fields = dict[int, list[Ints]]


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

    def all(self) -> Iterable[tuple[int, Ints]]:
        """Every field with its axis."""
        return [(axis, each) for axis, fields in self.fields.items() for each in fields]


class Meeting:
    """Records in `Labels` what operations say of fields."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.reason = ""
        """What is being looked at: the operation and its line."""
        self.splits: dict[tuple[str, tuple[int, ...]], list[Ints]] = {}
        """How a module's code splits axes: its path, the sizes, and the labels along each."""
        self.sized: dict[tuple[str, int], list[list[Ints]]] = {}
        """Axes whose sizes a module's code may hold: its path, the size, and the fields."""
        self.views: dict[str, list[Value]] = {}
        """What views make, in order, by the path of the module that asks for them."""

    def meet(self, sides: Sequence[list[Ints] | None]) -> list[Ints]:
        """Axes that run in parallel: their labels are one. None is an axis without any, where all others must stay."""
        labelled = [side for side in sides if side]
        if len(labelled) < len(sides):
            for each in (field for side in labelled for field in side):
                self.labels.freeze(each, f"{self.reason}: the other side carries no channels")
            return []
        kept = labelled[0]
        for side in labelled[1:]:
            kept = self._match(kept, side)
        return kept

    def _match(self, left: list[Ints], right: list[Ints]) -> list[Ints]:
        if len(left) == len(right):
            for a, b in zip(left, right, strict=True):
                if a is not b:
                    self._pair(a, b, left, right)
            return left
        if len(left) > len(right):
            left, right = right, left
        if len(left) == 1:
            self.labels.define(left[0], np.stack(right), self.reason)
        else:
            self.freeze(left + right)
        return right

    def _pair(self, a: Ints, b: Ints, left: list[Ints], right: list[Ints]) -> None:
        """Among several fields an entry without a label in one of them may have its label in another."""
        if len(left) == 1:
            self.labels.pair(a, b, self.reason)
            return
        both = (a != NONE) & (b != NONE)
        self.labels.pair(a[both], b[both], self.reason)
        self.labels.freeze(np.concatenate([a[~both], b[~both]]), self.reason)

    def freeze(self, fields: Iterable[Ints]) -> None:
        """All labels of these fields must stay."""
        for each in fields:
            self.labels.freeze(each, self.reason)

    def freeze_all(self, value: Value, axes: Iterable[int] | None = None) -> None:
        """All labels of a tensor, or of some of its axes, must stay."""
        for axis in list(value.fields) if axes is None else [a % len(value.shape) for a in axes]:
            self.freeze(value.on(axis))

    def split(self, fields: list[Ints], sizes: tuple[int, ...], where: str | None = None) -> list[list[Ints]]:
        """Each field seen as an array of these sizes; fields for each of its axes."""
        parts: list[list[Ints]] = [[] for _ in sizes]
        for each in fields:
            for axis, found in self._straight(torch.from_numpy(each).view(sizes), where):
                parts[axis].append(found)
        return parts

    def moved(
        self, value: Value, move: Callable[[Tensor], Tensor], shape: Sequence[int], where: str | None
    ) -> Value:
        """Run a data movement on the fields themselves."""
        out = Value(tuple(shape), {}, value.sources)
        for axis, each in value.all():
            dims = [len(each) if a == axis else 1 for a in range(len(value.shape))]
            result = move(torch.from_numpy(each).view(dims).expand(value.shape))
            for new, found in self._straight(result, where):
                out.fields.setdefault(new, []).append(found)
        return out

    def note_sizes(self, value: Value, where: str) -> None:
        """A module's code may hold the sizes of these axes."""
        for axis, fields in value.fields.items():
            if fields:
                self.sized.setdefault((where, value.shape[axis]), []).append(fields)

    def _straight(self, array: Tensor, where: str | None) -> list[tuple[int, Ints]]:
        """Fields along one axis each that say the same as an array of labels."""
        narrow, axes = _narrowed(array)
        if not axes:  # one channel of many, picked or spread
            self.labels.freeze(narrow.reshape(-1).numpy(), self.reason)
            return []
        if len(axes) == 1:
            return [(axes[0], narrow.reshape(-1).numpy())]
        sizes = tuple(narrow.shape[a] for a in axes)
        factors = [self.labels.new(n) for n in sizes]
        grid = np.meshgrid(*factors, indexing="ij")
        self.labels.define(narrow.reshape(-1).numpy(), np.stack([g.ravel() for g in grid]), self.reason)
        self._couple(where, sizes, factors)
        return list(zip(axes, factors, strict=True))

    def _couple(self, where: str | None, sizes: tuple[int, ...], factors: list[Ints]) -> None:
        """One module splits all its tensors by the same attributes: query, key and value have one head size."""
        if where is not None:
            known = self.splits.setdefault((where, sizes), factors)
            for a, b in zip(known, factors, strict=True):
                if a is not b:
                    self.labels.pair(a, b, self.reason)


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


Result = Value | list[Value]
Rule = Callable[["Walk", Node], Result]
RULES: dict[str, Rule] = {}
Kind = Literal["writer", "reader", "rider"]


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what operations of these names do."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
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
    fields: dict[int, list[Ints]]


@dataclass(frozen=True)
class Term:
    """Multiply-accumulates: a number, times the sizes of a parameter's own axes, times those of labelled axes."""

    module: str
    times: int
    tensor: str
    axes: tuple[int, ...]
    fields: tuple[list[Ints], ...]


@dataclass
class Findings:
    """What a walk has collected beside labels."""

    roles: list[Role] = field(default_factory=list)
    statistics: list[Statistic] = field(default_factory=list)
    values: dict[Node, Result] = field(default_factory=dict)
    terms: list[Term] = field(default_factory=list)


class Walk(Meeting):
    """One walk over a graph and the graphs inside of it."""

    def __init__(self, labels: Labels) -> None:
        super().__init__(labels)
        self.found = Findings()
        self._module: GraphModule | None = None
        self._owners: dict[int, str] = {}
        self.place = ""
        """The module whose code is being looked at."""

    def run(self, module: GraphModule, inputs: dict[str, Value]) -> None:
        """Visit every node; ``inputs`` are the parameters and buffers, by the names of their placeholders."""
        self._owners = {
            id(value): name for value in inputs.values() if value.sources for name in value.sources
        }
        self._visit_all(module, module.graph, inputs)

    def _visit_all(self, module: GraphModule, graph: Graph, inputs: dict[str, Value]) -> list[Node]:
        outer, self._module = self._module, module
        outputs: list[Node] = []
        for node in graph.nodes:
            if node.op == "placeholder":
                self.found.values[node] = inputs.get(node.name) or _plain(node, None)
            elif node.op == "call_function":
                self.reason, self.place = source(node), module_of(node)
                self.found.values[node] = self._visit(node)
            elif node.op == "output":
                outputs = list(node.all_input_nodes)
        self._module = outer
        if outer is None:
            self._freeze_outputs(outputs)
        return outputs

    def _visit(self, node: Node) -> Result:
        name = operation(node)
        found = RULES.get(name)
        if found is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            found = RULES["pointwise"]
        return (found or unknown)(self, node)

    def _freeze_outputs(self, outputs: list[Node]) -> None:
        for node in outputs:
            if isinstance(self.found.values.get(node), Value):
                self.reason = "an output of the network"
                self.freeze_all(self.value(node))

    def inside(self, node: Node, body: Node, arguments: Sequence[Any]) -> Result:
        """A graph that is called as a whole."""
        assert self._module is not None
        inner = getattr(self._module, str(body.target))
        names = [n.name for n in inner.graph.nodes if n.op == "placeholder"]
        given = {n: self.value(a) for n, a in zip(names, arguments, strict=True) if isinstance(a, Node)}
        outputs = self._visit_all(inner, inner.graph, given)
        self.reason = source(node)
        return [self.value(out) for out in outputs]

    def value(self, node: Any) -> Value:
        """What a tensor of the graph carries."""
        found = self.found.values[node]
        return found if isinstance(found, Value) else _plain(node, None)

    def parts(self, node: Any) -> list[Value]:
        """What the tensors of a tuple carry."""
        found = self.found.values.get(node)
        return found if isinstance(found, list) else []

    def operands(self, node: Node) -> list[Value]:
        """The tensors that an operation takes."""
        return [self.value(n) for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]

    def where(self, node: Node) -> str:
        """The module whose attributes an operation is written with."""
        return module_of(node)

    def role(self, value: Value, fields: list[Ints], role: Kind) -> None:
        """Remember what a parameter is to the channels that it meets."""
        if value.sources:
            for each in fields:
                self.found.roles.append(Role(value.sources, each, role))

    def statistic(self, node: Node, fields: dict[int, list[Ints]]) -> None:
        """Remember a mean over labelled axes."""
        kept = {axis: each for axis, each in fields.items() if each}
        if kept:
            self.found.statistics.append(Statistic(node, kept))

    def owner(self, value: Value) -> str:
        """The parameter or buffer that a value is, as it is; empty for anything computed."""
        return self._owners.get(id(value), "")

    def term(self, times: int, tensor: str, axes: Sequence[int], fields: Sequence[list[Ints]]) -> None:
        """Remember what a contraction costs."""
        self.found.terms.append(Term(self.place, times, tensor, tuple(axes), tuple(fields)))

    def plain(self, node: Node) -> Value:
        """A tensor without labels, computed from a node's operands."""
        return _plain(node, sources(self.operands(node)))


def sources(values: Sequence[Value]) -> frozenset[str] | None:
    """The parameters that a tensor computed from these depends on; None if the network's input has a part in it."""
    if any(value.sources is None for value in values):
        return None
    return frozenset[str]().union(*(value.sources or () for value in values))


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of a tensor in the graph; of an axis whose size depends on values, -1."""
    return tuple(n if isinstance(n, int) else -1 for n in node.meta["val"].shape)


def argument(node: Node, index: int, name: str = "", default: Any = None) -> Any:
    """An argument of an operation, by its place or by its name."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def unknown(walk: Walk, node: Node) -> Result:
    """An operation without a rule freezes all that it touches."""
    for each in node.all_input_nodes:
        found = walk.found.values.get(each, [])
        for value in found if isinstance(found, list) else [found]:
            walk.freeze_all(value)
    made = node.meta.get("val")
    if isinstance(made, tuple | list):
        origin = sources(walk.operands(node))
        return [Value(tuple(m.shape), {}, origin) for m in made if isinstance(m, Tensor)]
    return walk.plain(node)


def _plain(node: Node, origin: frozenset[str] | None) -> Value:
    return Value(shape_of(node) if isinstance(node.meta.get("val"), Tensor) else (), {}, origin)
