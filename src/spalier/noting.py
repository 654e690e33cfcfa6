"""What a network computes with while it runs without values, and what of it need not run again.

The dry run of `spalier.trace` notes which views a network's code makes, and which numbers it takes (`Noted`). It runs
many times, with other channels gone each time, and remembers what each module made (`Memory`).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import is_
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spalier.adapters.attachment import Owner
from spalier.structure.arithmetic import fresh
from spalier.structure.graph import RULES, module_of
from spalier.structure.recording import Program
from spalier.structure.structure import Structure

Fact = Hashable
"""A number, the shape of a tensor that is made of nothing, or the values of a constant."""
NO_SIZES: frozenset[Fact] = frozenset((0, float("inf"), float("-inf")))
"""What operations fill masks with on their own."""


class Noted(TorchDispatchMode):
    """Notes the shapes that views make, and the numbers that operations take, by the module that asks for them."""

    def __init__(self, running: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = running
        self.log: list[tuple[Literal["views", "facts", "made", "wrong", "set_right"], str, Any]] = []
        """All of it in the order of the run, with the paths of the modules."""
        self.views: dict[str, list[tuple[int, ...]]] = {}
        self.facts: dict[str, list[Fact]] = {}
        self.made: dict[str, list[tuple[int, ...]]] = {}
        """Shapes of tensors that are made of a shape alone."""
        self.wrong: dict[str, list[Any]] = {}
        """Sizes and numbers that were set right."""
        self.set_right: dict[str, list[Any]] = {}
        """The kinds of views that were looked at for that."""
        self.counts: Counter[tuple[str, Any]] = Counter()
        """How many of each there are so far, by module and kind."""
        self.outputs: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note one operation."""
        # what is computed from constants alone has values, which the network's code may ask for
        is_constant = not any(isinstance(a, FakeTensor) for a in args) and _are_constants((args, kwargs))
        with unset_fake_temporarily() if is_constant else nullcontext():
            # the kernel takes more than PyTorch says of it without values
            out = _grouped(*args[:2]) if func is torch.ops.aten._grouped_mm.default else func(*args, **(kwargs or {}))
        if func in _VIEWS:
            self.log.append(("views", self.running[-1], known_shape(out)))
        elif _kind_of(func)[1] and 0 not in (shape := known_shape(out)) and shape:  # else it holds nothing of a size
            self.log.append(("made", self.running[-1], shape))
        self.log += [("facts", self.running[-1], fact) for fact in _facts(func, args, kwargs or {}, out)]
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to see to that costs time with every operation

    def count(self, place: str, kind: Any) -> int:
        """The number of a view among those of its kind that a module makes, however often it runs."""
        self.recall([("set_right", place, kind)])
        return self.counts[place, kind] - 1

    def recall(self, log: list[tuple[Any, str, Any]]) -> None:
        """Note what was noted before."""
        self.log += log
        self.counts.update((place, what) for kind, place, what in log if kind == "set_right")

    def sorted_(self) -> Noted:
        """The log by modules."""
        for kind, place, what in self.log:
            getattr(self, kind).setdefault(place, []).append(what)
        return self


class Memory:
    """What a twin's modules made, so that a run goes only through what it changes.

    A module that is cut in the same streams, and given the same shapes, makes the same. One that changes itself, or
    that is given or returns anything but tensors and plain values, runs each time.
    """

    def __init__(self, net: nn.Module, structure: Structure, owners: Mapping[str, list[Owner]]) -> None:
        own: dict[nn.Module, set[int]] = {}
        for (tensor, _), units in structure.axes.items():
            for owner in owners[tensor]:
                own.setdefault(owner.module, set()).update(stream for stream, _ in units)
        for extent in structure.extents:
            streams = {stream for units in extent.units for stream, _ in units}
            own.setdefault(net.get_submodule(extent.module), set()).update(streams)
        self.cut: frozenset[int] = frozenset()
        """The streams that have fewer units now."""
        self.is_off = False
        self._known: dict[tuple[Hashable, ...], tuple[Any, Hashable, list[Any]]] = {}
        self._paths = {module: path for path, module in net.named_modules()}
        inside = {module: list(module.modules()) for module in net.modules()}
        self._dicts = {module: [each.__dict__ for each in parts] for module, parts in inside.items()}
        self._inside = {
            m: frozenset[int]().union(*(own.get(each, ()) for each in parts)) for m, parts in inside.items()
        }
        """The streams that a module is cut in; without the network, which never runs twice alike, and what changes."""
        del self._inside[net]

    def forget_(self, path: str, streams: Iterable[int]) -> None:
        """A module runs otherwise from now on, with sizes of these streams too."""
        around = {module for module, own in self._paths.items() if f"{path}.".startswith(f"{own}.")}
        self._known = {key: known for key, known in self._known.items() if key[0] not in around}
        self._inside.update({module: self._inside[module].union(streams) for module in around & self._inside.keys()})

    @contextmanager
    def recalling(self, noted: Noted) -> Iterator[None]:
        """Let calls of the twin's modules pass through the memory, as `torch.fx` has them pass through its tracer."""
        own: Any = nn.Module.__call__

        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if self.is_off or module not in self._inside:
                return own(module, *args, **kwargs)
            return self._call(noted, partial(own, module), module, args, kwargs)

        setattr(nn.Module, "__call__", call)  # noqa: B010  (mypy takes it for a method)
        try:
            yield
        finally:
            setattr(nn.Module, "__call__", own)  # noqa: B010

    def _call(self, noted: Noted, run: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = _plain((args, tuple(kwargs.items())))
        inside = f"{self._paths[module]}."
        counts = frozenset(each for each in noted.counts.items() if f"{each[0][0]}.".startswith(inside))
        key = (module, module.training, self.cut & self._inside[module], given, counts)
        known = self._known.get(key)
        if known is not None and _plain(known[0]) == known[1]:  # else it was changed in place since
            noted.recall(known[2])
            return known[0]
        start, before = len(noted.log), _state(self._dicts[module])
        out = run(*args, **kwargs)
        made, after = _plain(out), _state(self._dicts[module])
        if len(before) != len(after) or not all(map(is_, before, after)):  # others may read what it keeps
            del self._inside[module]
        elif given is not None and made is not None and _plain((args, tuple(kwargs.items()))) == given:
            self._known[key] = out, made, noted.log[start:]
        return out


def _plain(value: Any) -> Hashable:
    """What a run without values can know of an argument; None where it is more than tensors and plain values."""
    if isinstance(value, FakeTensor):
        sizes = (*value.shape, *value.stride())
        return (tuple(value.shape), value.stride(), value.dtype) if all(type(n) is int for n in sizes) else None
    if isinstance(value, tuple | list):
        inner = tuple(map(_plain, value))
        return None if None in inner else (type(value), inner)
    return (type(value), value) if value is None or isinstance(value, bool | int | float | str) else None


def _state(dicts: list[dict[str, Any]]) -> list[Any]:
    """All attributes of a module and those inside of it, and how much is in those that hold several."""
    values = [value for each in dicts for value in each.values()]
    return values + [len(value) for value in values if isinstance(value, list | dict | set)]


def _are_constants(given: Any) -> bool:
    kinds = {isinstance(each, FakeTensor) for each in tree_leaves(given) if isinstance(each, Tensor)}
    return kinds == {False}


def _grouped(x: Tensor, weights: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], (x @ weights[0]).shape[-1]))


_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def facts_of_graph(program: Program) -> dict[str, set[Fact]]:
    """What each module's code computes with in the whole network, so far as the graph shows it."""
    found: dict[str, set[Fact]] = {}

    def value(node: Node) -> Any:
        return program.constants.get(node.name, node.meta.get("val"))

    for graph in program.module.modules():
        for node in graph.graph.nodes if isinstance(graph, GraphModule) else ():
            if isinstance(node.target, OpOverload):
                args, kwargs = map_aggregate((node.args, node.kwargs), lambda a: value(a) if isinstance(a, Node) else a)
                facts = _facts(node.target, args, kwargs, node.meta.get("val"))
                found.setdefault(module_of(node), set(NO_SIZES)).update(facts)
    return found


def _facts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> list[Fact]:
    """What an operation takes beside the network's own tensors, and that is no size of what it makes."""
    is_pointwise, is_fresh, numbers = _kind_of(func)
    found: list[Fact] = []
    takes_tensor = False
    for key, value in itertools.chain(enumerate(args), kwargs.items()):
        if isinstance(value, Tensor):
            takes_tensor = True
            if not isinstance(value, FakeTensor):
                found.append(_constant(value))
        elif isinstance(value, float | complex) or (type(value) is int and (is_pointwise or key in numbers)):
            found.append(value if value == value else "nan")
        elif isinstance(value, list | tuple):
            takes_tensor = takes_tensor or any(isinstance(each, Tensor) for each in value)
    if isinstance(made, Tensor) and not is_fresh and not takes_tensor:
        shape = known_shape(made)
        found += [("shape", *shape)] if shape and 0 not in shape else []  # else it holds nothing of a size
    return found


@functools.cache
def _kind_of(func: Any) -> tuple[bool, bool, frozenset[int | str]]:
    """Whether it computes entry by entry; whether it makes a tensor of a shape alone; where it takes numbers."""
    schema = func._schema.arguments
    numbers = [(place, each.name) for place, each in enumerate(schema) if "number" in str(each.type)]
    name = func.overloadpacket.__name__.rstrip("_")
    is_fresh = RULES.get(name) is fresh
    return torch.Tag.pointwise in func.tags, is_fresh, frozenset(key for keys in numbers for key in keys)


def known_shape(tensor: Tensor) -> tuple[int, ...]:
    """A shape; -1 for an axis whose size depends on values, as in the graph."""
    return tuple(n if isinstance(n, int) else -1 for n in tensor.shape)


def _constant(tensor: Tensor) -> Fact:
    with unset_fake_temporarily():
        few = tensor.reshape(-1).tolist() if tensor.numel() <= 16 else [hash(tensor.detach().cpu().numpy().tobytes())]
    return ("values", *tensor.shape, *(n if n == n else "nan" for n in few))
