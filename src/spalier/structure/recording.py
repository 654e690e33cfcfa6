"""Record the graph of a network on a twin of it that computes shapes alone.

`torch.export` gives the same graph, and does much more on the way: three quarters of its time go into what nobody needs
here. So operations are noted where it notes them, before PyTorch takes them apart, and nothing else is done. What
cannot be noted so, sizes that depend on values and parts under autocast, is left to `torch.export`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from spalier.adapters.attachment import MARK
from spalier.adapters.geometry import plain_tensors


@dataclass(eq=False)
class Twin:
    """A copy of a network, in eval mode and without adapters, whose tensors have shapes alone."""

    net: nn.Module
    mode: FakeTensorMode
    constants: dict[int, Tensor]
    """Tensors of the network that are neither parameters nor buffers, by the ids of the twin's."""


@dataclass(eq=False)
class Program:
    """The graph of one forward, with the meanings of its placeholders."""

    module: GraphModule
    tensors: dict[str, str]
    """Parameters and buffers by the names of their placeholders."""
    constants: dict[str, Tensor]
    """Likewise the values of tensors that the network's code holds."""
    twin: Twin | None = None
    """What it was recorded on; None where it was exported."""

    @property
    def graph(self) -> Graph:
        """The graph without those inside of it."""
        return self.module.graph

    @classmethod
    def of(cls, exported: ExportedProgram) -> Program:
        """A graph of `torch.export`."""
        signature = exported.graph_signature
        lifted = signature.inputs_to_lifted_tensor_constants
        constants = {place: exported.constants[name] for place, name in lifted.items()}
        tensors = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        return cls(exported.graph_module, tensors, constants)


def twin_of(net: nn.Module) -> Twin:
    """The same modules with tensors that have shapes alone; the network has to be as its base is."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # late: it brings sympy along

    # with a ShapeEnv, as in torch.export: sizes that depend on values are symbols instead of errors
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    memo: dict[int, Any] = plain_tensors(net)
    for tensor in (*net.parameters(), *net.buffers()):
        memo[id(tensor)] = fake = without_values(mode, tensor)
        if isinstance(tensor, nn.Parameter):
            fake._is_param = True  # as nn.Parameter does it for tensors of other classes, which it would copy first
    if MARK in net.__dict__:  # it holds the whole base
        memo[id(net.__dict__[MARK])] = "not copied"
    twin = Twin(copy.deepcopy(net, memo), mode, {})
    for module in twin.net.modules():
        module.__dict__.pop(MARK, None)
        for key, value in module.__dict__.items():
            if isinstance(value, Tensor):
                module.__dict__[key] = fake = mode.from_tensor(value, static_shapes=True)
                twin.constants[id(fake)] = value
    return twin


def without_values(mode: FakeTensorMode, tensor: Tensor, shape: Sequence[int] | None = None) -> FakeTensor:
    """A tensor that has a shape alone: that of another, in its layout, or the one that is given."""
    with unset_fake_temporarily():  # else the mode would follow how it is made
        if shape is None:
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        else:
            meta = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, meta, tensor.device)


def follow_calls(net: nn.Module, running: list[str]) -> list[Any]:
    """Hooks that keep the paths of the modules that are running, the innermost last; at an error they stay there."""

    def enter(path: str, *_: Any) -> None:
        running.append(path)

    def leave(*_: Any) -> None:
        running.pop()

    handles: list[Any] = []
    for path, module in net.named_modules():
        handles.append(module.register_forward_pre_hook(partial(enter, path), prepend=True))
        handles.append(module.register_forward_hook(leave))
    return handles


class UnrecordableError(Exception):
    """A graph needs more than operations on tensors of known sizes."""


def record(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """The graph of one forward of a network that is as its base is."""
    from torch._export.utils import _compiling_state_context  # libraries ask whether they are exported

    twin = twin_of(net)
    fake = partial(twin.mode.from_tensor, static_shapes=True)
    args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
    running: list[str] = []
    notes = _Recorder(twin, running)
    parameters: dict[str, Tensor] = dict(twin.net.named_parameters(remove_duplicate=False))
    buffers = dict(twin.net.named_buffers(remove_duplicate=False))
    for name, tensor in {**parameters, **buffers}.items():
        notes.tensors[notes.placeholder(tensor).name] = name
    for value in tree_leaves((args, kwargs)):
        notes.placeholder(value)
    handles = follow_calls(twin.net, running)
    with twin.mode, _compiling_state_context(), enable_python_dispatcher(), notes:
        out = twin.net(*args, **kwargs)
    for handle in handles:
        handle.remove()
    leaves = tree_leaves(out)
    if not all(value is None or isinstance(value, Tensor | bool | int | float | str) for value in leaves):
        raise UnrecordableError("the network returns more than tensors and plain values")
    notes.graph.output([notes.node_of(value) for value in leaves])
    return Program(_LazyGraphModule(nn.Module(), notes.graph), notes.tensors, notes.constants, twin)


class _Recorder(ProxyTorchDispatchMode):
    """Notes operations on tensors as nodes of a graph. PyTorch takes no other kind of mode so early."""

    def __init__(self, twin: Twin, running: list[str]) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self.twin, self.running = twin, running
        self.graph = Graph()
        self.tensors: dict[str, str] = {}
        self.constants: dict[str, Tensor] = {}
        self._nodes = WeakTensorKeyDictionary()
        """Where each tensor comes from."""
        self._last: Node | None = None
        self._numbers = itertools.count()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to see to that costs time with every operation

    __enter__ = TorchDispatchMode.__enter__
    __exit__ = TorchDispatchMode.__exit__

    def placeholder(self, value: Any) -> Node:
        """What comes from outside."""
        self._last = node = self.graph.placeholder(f"given_{next(self._numbers)}")
        node.meta["val"] = value
        if isinstance(value, Tensor):
            self._nodes[value] = node
        return node

    def node_of(self, value: Any) -> Any:
        """Where a tensor comes from; other values are what they are."""
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise UnrecordableError("a number depends on values")
        if not isinstance(value, Tensor):
            return value
        return self._nodes.get(value) or self._constant(value)

    def _constant(self, tensor: Tensor) -> Node:
        value = self.twin.constants.get(id(tensor), tensor)
        if isinstance(value, FakeTensor) or self._last is None:
            raise UnrecordableError("a tensor comes from nowhere")
        with self.graph.inserting_after(self._last):
            node = self.placeholder(tensor)
        self.constants[node.name] = value
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note one operation."""
        if not isinstance(func, OpOverload) or torch._C._is_any_autocast_enabled():
            raise UnrecordableError(f"{func} is no plain operation, or under autocast")
        given = map_aggregate((args, kwargs or {}), self.node_of)
        shape = args[0].shape if func._schema.is_mutable and isinstance(args[0], Tensor) else None
        out = func(*args, **(kwargs or {}))
        if shape is not None and args[0].shape != shape:
            raise UnrecordableError(f"{func} gives a tensor another shape in place")
        if isinstance(out, Tensor | list | tuple):
            # a constant may be written into, and is there for every run
            target = torch.ops.aten.lift_fresh_copy.default if func is torch.ops.aten.lift_fresh.default else func
            self._note(target, *given, out, {"nn_module_stack": {"": (self.running[-1], "")}, "stack_trace": _line()})
        else:
            self.node_of(out)
        return out

    def _note(self, target: Any, args: Any, kwargs: Any, made: Any, meta: dict[str, Any]) -> None:
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {**meta, "val": made.detach() if _is_factory(target) else made}
        if isinstance(made, Tensor):
            if made._has_symbolic_sizes_strides:
                raise UnrecordableError(f"what {target} makes has a size that depends on values")
            self._nodes[made] = node
        else:
            for place, each in enumerate(made):
                if isinstance(each, Tensor):
                    self._note(operator.getitem, (node, place), {}, each, meta)


@functools.cache
def _is_factory(target: Any) -> bool:
    """What makes a tensor of a shape must stay its only owner: PyTorch would hand out a copy of it."""
    return isinstance(target, OpOverload) and any(each.name == "pin_memory" for each in target._schema.arguments)


_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LAYERS = f"{_TORCH}nn{os.sep}"


def _line() -> str:
    """The innermost line of the network's own code, or else of a layer of PyTorch, as tracebacks have it."""
    frame: FrameType | None = sys._getframe(2)
    layer: FrameType | None = None
    while frame is not None and frame.f_code is not record.__code__ and frame.f_code.co_filename.startswith(_TORCH):
        layer = layer or (frame if frame.f_code.co_filename.startswith(_LAYERS) else None)
        frame = frame.f_back
    own = layer if frame is None or frame.f_code is record.__code__ else frame
    return f'File "{own.f_code.co_filename}", line {own.f_lineno}, in {own.f_code.co_name}' if own else ""
