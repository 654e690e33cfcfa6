"""The graph of a network: capture it, and walk over it.

The graph is that of one forward in eval mode and without adapters: these follow the shapes of the weights that they
update, so they say nothing of the structure. Capturing leaves no trace on a network.

On the walk each operation says what it does to the labels that pass through it. What is known of a tensor is a `Value`:
its shape, and the *fields* on its axes. A field is one label for each index of one axis. An axis may have several
fields, and an entry of the tensor is gone as soon as one of the labels at its indices is. Rules are functions of the
walk and a node: `movement` has those of operations that move data, `arithmetic` those of operations that compute. An
operation without a rule freezes all that it touches, so the walk may find less than there is, never more.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from spalier.adapters.forward import is_diverted, undivert_
from spalier.adapters.geometry import is_uninitialised
from spalier.errors import ExampleError, TraceError
from spalier.structure.labels import Ints, Labels
from spalier.structure.recording import Program, record
from spalier.text import first_line

# capturing

CAPTURING = threading.RLock()
"""Held while a network is captured or tried: `torch.export` keeps its state in globals, so one thread at a time."""


def capture(net: nn.Module, example: Any) -> Program:
    """The graph of one forward in eval mode; the network is left as it was."""
    if is_uninitialised(net):
        raise TraceError("the network has a lazy layer without a shape yet; run one batch through it first")
    args, kwargs = arguments(on_device_of(net, example))
    with CAPTURING, as_base(net), torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")  # of PyTorch's own, about its own code
        with suppress(Exception):  # whatever it is, the export below succeeds, or says what is wrong
            return record(net, args, kwargs)
        try:
            return Program.of(torch.export.export(net, args, kwargs, strict=False))
        except Exception as error:  # export raises a dozen kinds; the caller gets one of ours
            raise _refusal(net, args, kwargs, error) from error


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as positional and keyword arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple | list):
        return tuple(example), {}
    if isinstance(example, Tensor):
        return (example,), {}
    raise ExampleError(
        f"the example is a {type(example).__name__}; expected a tensor, a tuple of arguments or a dict of them"
    )


def on_device_of(net: nn.Module, example: Any) -> Any:
    """The example where the network is: on the meta device there is nothing to compute with."""
    first = next(net.parameters(), None)
    if first is None or not first.is_meta:
        return example
    return tree_map_only(Tensor, lambda t: t.to("meta"), example)


def _refusal(net: nn.Module, args: Any, kwargs: Any, error: Exception) -> Exception:
    """The network does not run on the example, or it runs and cannot be captured."""
    try:
        with torch.no_grad():
            net(*args, **kwargs)
    except Exception as inner:  # whatever the network's own code raises
        return ExampleError(
            f"the network does not run on the example: {first_line(inner)}; expected an input that "
            "net(example) takes, or a tuple or dict of them"
        )
    return TraceError(
        f"torch.export cannot capture this network: {first_line(error)}; control flow or shapes that depend on "
        "values have to go, or trace the part that can be captured"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """PyTorch logs errors of fake tensors; here a failure is an answer, and nobody's error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def copied(example: Any) -> Any:
    """An example that nobody else writes into."""
    return tree_map_only(Tensor, lambda t: t.detach().clone(), example)


@contextmanager
def preserved(net: nn.Module) -> Iterator[None]:
    """Run a network and put everything back: buffers that it writes into, random numbers that it draws."""
    # a forward may write into a buffer, or put another tensor in its place; both come back
    held = [(m, dict(m._buffers), [b if b is None else b.clone() for b in m._buffers.values()]) for m in net.modules()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            yield
        finally:
            for module, buffers, values in held:
                module._buffers.update(buffers)
                for buffer, value in zip(buffers.values(), values, strict=True):
                    if buffer is not None and value is not None and not torch.equal(buffer, value):
                        buffer.copy_(value)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Take hooks away at the end of the block."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield


@contextmanager
def in_eval_mode(net: nn.Module) -> Iterator[None]:
    """The network in eval mode for a while; what modules cache until they train is made anew before and after."""
    training = [m.training for m in net.modules()]
    # a switch of the mode drops caches, such as LeViT's table of biases; a network's own train() may return nothing
    net.train()
    net.eval()
    try:
        yield
    finally:
        net.train()
        for module, flag in zip(list(net.modules()), training, strict=True):
            module.training = flag


@contextmanager
def as_base(net: nn.Module) -> Iterator[None]:
    """The network in eval mode and without its adapters, for a while."""
    # the very same forwards are put back: making them anew would look at every layer's source
    diverted = [(m, m.__dict__["forward"]) for m in net.modules() if is_diverted(m)]
    for module, _ in diverted:
        undivert_(module)
    try:
        with in_eval_mode(net):
            yield
    finally:
        for module, forward in diverted:
            module.__dict__["forward"] = forward


# nodes of the graph


def operation(node: Node) -> str:
    """The name of a node's operation, in place or not.

    >>> class Fake: target = torch.ops.aten.relu_.default
    >>> operation(Fake)
    'relu'
    """
    packet = getattr(node.target, "overloadpacket", None)
    name = getattr(packet or node.target, "__name__", str(node.target))
    return name if name.startswith("__") else name.rstrip("_")


def placeholders(program: Program, names: Mapping[str, str]) -> dict[str, list[Node]]:
    """Where each parameter or buffer comes into the graph, by its first name."""
    nodes: dict[str, list[Node]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and program.tensors.get(node.name) in names:
            nodes.setdefault(names[program.tensors[node.name]], []).append(node)
    return nodes


def module_of(node: Node) -> str:
    """The path of the innermost module whose forward calls this operation."""
    stack = node.meta.get("nn_module_stack") or {}  # outermost first
    return [path for path, _ in stack.values()][-1] if stack else ""


def source(node: Node) -> str:
    """The operation, and the line of the network's own code that it comes from."""
    lines = (node.meta.get("stack_trace") or "").splitlines()
    frames = [line.strip() for line in lines if line.strip().startswith("File ")]
    own = [f for f in frames if "/torch/nn/" not in f] or frames  # a line of nn.Linear tells nobody anything
    if not own:
        return operation(node)
    file, line, *_ = own[-1].removeprefix("File ").split(", ")
    name = file.strip('"').replace("\\", "/").rsplit("/", 1)[-1]
    return f"{operation(node)} at {name}:{line.removeprefix('line ')}"


# the walk

Fields = dict[int, list[Ints]]
"""The fields of each axis."""
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
        self.reshapes: dict[tuple[str, int, int, int], list[Value]] = {}
        """The same by module, by how many axes there are before and after, and by the axis of size -1, from the end."""
        self.grouped: set[str] = set()
        """The modules whose code multiplies rows with the one or the other of several matrices."""
        self.made: dict[str, list[Value]] = {}
        """Tensors that are made of a shape alone, likewise."""
        self.reason = ""
        """The operation that is being looked at, and its line."""
        self.place = ""
        """The path of the module whose code calls it."""
        self._graph: GraphModule | None = None
        self._owners: dict[int, str] = {}

    def run(self, graph: GraphModule, inputs: dict[str, Value]) -> None:
        """Visit every node; ``inputs`` are the parameters and buffers, by the names of their placeholders."""
        # by identity: what is computed from a parameter has its sources too, and is no parameter
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
                self.values[node] = self._visit(node)
            elif node.op == "output":
                outputs = list(node.all_input_nodes)
        self._graph = outer
        return outputs

    def _visit(self, node: Node) -> Result:
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        found = RULES.get(operation(node)) or (RULES["pointwise"] if is_pointwise else unknown)
        try:
            return found(self, node)
        except (RuntimeError, TypeError, ValueError):
            # rules reckon with sizes; those that only a run can tell are none
            if not any(-1 in value.shape for value in (*self.operands(node), _plain(node, None))):
                raise
            self.reason += ": a size depends on values"
            return unknown(self, node)

    def inside(self, node: Node, body: Node, arguments: Sequence[Any]) -> Result:
        """A graph that is called as a whole."""
        inner = getattr(self._graph, str(body.target))
        names = [n.name for n in inner.graph.nodes if n.op == "placeholder"]
        given = {n: self.value(a) for n, a in zip(names, arguments, strict=True) if isinstance(a, Node)}
        outputs = self._visit_all(inner, given)
        # its nodes have set these
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
        if len(labelled) < len(sides):  # the network's input, a constant, a position
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
                if a is not b:  # a tensor that meets itself, x * sigmoid(x)
                    self.labels.pair(a, b, self.reason)
            return left
        fewer, more = sorted((left, right), key=len)
        if len(fewer) == 1:  # a plain axis meets one that a view made of heads and positions, say
            self.labels.define(fewer[0], np.stack(more), self.reason)
        else:  # two splits of unlike depth: which factor is which cannot be told
            self.freeze(left + right)
        return more

    def any_labels(self, shape: tuple[int, ...], axes: Iterable[int]) -> Fields:
        """Labels for axes along which all entries are alike: they are those of what the axes meet.

        The graph has their sizes as numbers. Whether the code takes these from the tensor that they meet, the dry run
        shows.
        """
        return {axis: [self.labels.new(shape[axis])] for axis in axes if shape[axis] > 1}

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
                # the labels as a tensor of the value's shape, constant along all other axes, without a copy
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
        """What a contraction of samples costs."""
        if not computes_weights(self.place):
            self.terms.append(Term(self.place, times, tensor, tuple(axes), tuple(fields)))


def computes_weights(module: str) -> bool:
    """Whether a module is a parametrization: what it computes is done once for all samples, however many there are."""
    return ".parametrizations." in f".{module}."


def _narrowed(array: Tensor) -> tuple[Tensor, list[int]]:
    """One entry along every axis on which an array is constant, and the axes on which it is not."""
    axes = []
    for axis in range(array.dim()):
        if array.shape[axis] > 1:
            first = array.narrow(axis, 0, 1)
            # a stride of 0 says so without a look at the values
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


def named(node: Node, name: str) -> Any:
    """An argument of an operation by its name, wherever it stands; None if it is not given and has no default."""
    for index, each in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if each.name == name:
            return argument(node, index, name, each.default_value)
    return None


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
