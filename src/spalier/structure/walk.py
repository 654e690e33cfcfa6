"""Walk over a network's graph and let each operation say what it does to the labels that pass through it.

An operation without a rule freezes what it touches, so the walk may find less than there is, never more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from spalier.structure.capture import module_of, operation, source
from spalier.structure.labels import Ints, Labels
from spalier.structure.values import Meeting, Value

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
