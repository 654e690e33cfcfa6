"""The masked network: the base's graph with zeros for all that is gone. What a pruned network has to equal.

Where statistics run over pruned channels (layer norm, group norm, standardised weights) a zero would still count, so
there the mask means removal: the mean is taken over what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from spalier.pruning.kept import Kept
from spalier.structure.capture import arguments, copied, operation
from spalier.structure.streams import present
from spalier.structure.structure import Captured, Mask, Structure
from spalier.structure.walk import Statistic

Read = Callable[[str], Tensor]
"""The current value of a parameter or buffer, its adapter fused."""


@torch.no_grad()
def masked_outputs(structure: Structure, read: Read, before: Kept, after: Kept) -> list[Any]:
    """What the masked network returns for the example, as a flat list.

    A weight that is divided by its own norm has no zero rows: where zeros lead to NaN, what writes a channel stays as
    it is, and what reads it is masked alone.
    """
    assert structure.captured is not None
    run = _Run(structure, structure.captured, read, before, after)
    outputs = run.outputs()
    if any(isinstance(x, Tensor) and not torch.isfinite(x).all() for x in outputs):
        run.only = {(m.tensor, m.axis) for s in structure.streams for m in s.members if m.role == "reader"}
        outputs = run.outputs()
    return outputs


@torch.no_grad()
def masked_run(
    structure: Structure, read: Read, before: Kept, after: Kept, nodes: set[Node]
) -> dict[Node, Any]:
    """What these nodes of the masked network compute for the example, in order."""
    assert structure.captured is not None
    run = _Run(structure, structure.captured, read, before, after)
    run.watched = nodes
    run.outputs()
    return run.seen


class _Run:
    """One run of the base's graph; parameters are made as they are needed and dropped again."""

    def __init__(
        self, structure: Structure, captured: Captured, read: Read, before: Kept, after: Kept
    ) -> None:
        self.structure, self.captured, self.read = structure, captured, read
        self.before, self.after = before, after
        signature = captured.program.graph_signature
        self.owners = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self.statistics = {statistic.node: statistic for statistic in captured.walk.found.statistics}
        self.seen: dict[Node, Any] = {}
        self.watched: set[Node] = set()
        self.only: set[tuple[str, int]] | None = None
        """The axes that are masked; None for all."""

    def outputs(self) -> list[Any]:
        program = self.captured.program
        args, kwargs = arguments(copied(self.captured.example))
        given = iter(tree_leaves((args, kwargs)))
        constants = program.graph_signature.inputs_to_lifted_tensor_constants
        values: dict[Node, Any] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name not in self.owners:
                lifted = constants.get(node.name)
                values[node] = next(given) if lifted is None else program.constants[lifted]
        return tree_leaves(self._run(program.graph_module, values))

    def _run(self, module: GraphModule, values: dict[Node, Any]) -> Any:
        remaining = {node: len(node.users) for node in module.graph.nodes}
        for node in module.graph.nodes:
            if node.op == "output":
                return map_arg(node.args[0], lambda n: self._value(n, values))
            if node.op == "get_attr":
                values[node] = getattr(module, str(node.target))
            elif node.op == "call_function":
                values[node] = self._call(node, values)
                if node in self.watched:
                    self.seen[node] = values[node].clone()  # later operations may write into it
                for used in node.all_input_nodes:
                    remaining[used] -= 1
                    if remaining[used] == 0:
                        values.pop(used, None)
        raise AssertionError("a graph without an output")

    def _call(self, node: Node, values: dict[Node, Any]) -> Any:
        args: Any = map_arg(node.args, lambda n: self._value(n, values))
        kwargs = map_arg(node.kwargs, lambda n: self._value(n, values))
        inner = next((i for i, a in enumerate(args) if isinstance(a, GraphModule)), None)
        if inner is not None:
            return self._call_inner(node, inner, args)
        if node in self.statistics:
            return _statistic(node, args, self._masks(self.statistics[node], args[0]))
        function: Any = node.target
        return function(*args, **kwargs)

    def _call_inner(self, node: Node, place: int, args: Any) -> Any:
        """A part of the graph under a switch: gradients are off anyway, autocast is kept."""
        module: GraphModule = args[place]
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        values = dict(zip(inputs, args[place + 1 :], strict=True))
        if operation(node) == "wrap_with_autocast":
            device, dtype, enabled, cache = args[:4]
            with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache):
                return self._run(module, values)
        return self._run(module, values)

    def _value(self, node: Node, values: Mapping[Node, Any]) -> Any:
        return values[node] if node in values else self._masked(self.owners[node.name])

    def _masked(self, name: str) -> Tensor:
        """A tensor of the base's shape with zeros for what is gone."""
        first = self.structure.names[name]
        value = self.read(first)
        was, left = (kept.of(self.structure, first) for kept in (self.before, self.after))
        if all(mask.all() for mask in left):
            return value
        full = self._spread_out(value, was)
        for axis, mask in enumerate(left):
            if mask.all() or (self.only is not None and (first, axis) not in self.only):
                continue
            full.index_fill_(axis, torch.from_numpy(np.flatnonzero(~mask)).to(full.device), 0)
        return full

    def _spread_out(self, value: Tensor, was: list[Mask]) -> Tensor:
        """A tensor of the base's shape, a copy, with what was pruned before at its place."""
        if all(mask.all() for mask in was):
            return value.clone()
        for axis, mask in enumerate(was):
            if not mask.all():
                shape = (*value.shape[:axis], len(mask), *value.shape[axis + 1 :])
                wide = value.new_zeros(shape) if self.only is None else _anything(value, shape)
                value = wide.index_copy_(axis, torch.from_numpy(np.flatnonzero(mask)).to(value.device), value)
        return value

    def _masks(self, statistic: Statistic, value: Tensor) -> Tensor:
        """One where an entry is left, broadcast against the tensor that statistics are taken of."""
        shape = [1] * value.dim()
        left = torch.ones(shape, dtype=value.dtype, device=value.device)
        for axis, fields in statistic.fields.items():
            placed = self.captured.assembly.placed(fields)
            mask = torch.from_numpy(present(placed, value.shape[axis], self.after.streams))
            dims = [len(mask) if a == axis else 1 for a in range(value.dim())]
            left = left * mask.to(left).view(dims)
        return left


def _anything(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Values for rows that nothing reads any more, unlike each other so that they can be standardised."""
    if not like.is_floating_point():
        return like.new_zeros(shape)
    return torch.arange(math.prod(shape), device=like.device).view(shape).sin().to(like.dtype)


def _statistic(node: Node, args: Any, left: Tensor) -> Tensor:
    """A norm whose statistics count what is left alone."""
    name, x = operation(node), args[0]
    if name == "mean":
        keepdim = bool(args[2]) if len(args) > 2 else bool(node.kwargs.get("keepdim", False))
        return _mean(x, left, args[1], keepdim)
    if name in ("layer_norm", "rms_norm"):
        axes = list(range(x.dim() - len(args[1]), x.dim()))
        return _affine(
            _normed(x, left, axes, _epsilon(node, args, name), centred=name == "layer_norm"), args[2:4]
        )
    channels = [1, -1] + [1] * (x.dim() - 2)
    affine = [a.view(channels) if isinstance(a, Tensor) else None for a in args[2:4]]
    if name == "group_norm":
        shape = (len(x), args[1], -1)
        normed = _normed(
            x.reshape(shape),
            left.expand_as(x).reshape(shape),
            [2],
            args[4] if len(args) > 4 else 1e-5,
            centred=True,
        )
        return _affine(normed.view_as(x), affine)
    others = [axis for axis in range(x.dim()) if axis != 1]  # batch norm of a weight
    affine = [a.view(channels) if isinstance(a, Tensor) else None for a in args[1:3]]
    return _affine(_normed(x, left, others, args[7], centred=True), affine)


def _epsilon(node: Node, args: Any, name: str) -> float:
    place = 4 if name == "layer_norm" else 3
    found: Any = args[place] if len(args) > place else node.kwargs.get("eps")
    if found is not None:
        return float(found)
    return 1e-5 if name == "layer_norm" else torch.finfo(args[0].dtype).eps


def _mean(x: Tensor, left: Tensor, axes: Any, keepdim: bool) -> Tensor:
    total = (x * left).sum(axes, keepdim=keepdim)
    return total / left.expand_as(x).sum(axes, keepdim=keepdim).clamp(min=1)


def _normed(x: Tensor, left: Tensor, axes: list[int], epsilon: float, *, centred: bool) -> Tensor:
    if centred:
        x = x - _mean(x, left, axes, True)
    return x * torch.rsqrt(_mean(x * x, left, axes, True) + epsilon)


def _affine(x: Tensor, parameters: Any) -> Tensor:
    weight, bias = (*parameters, None, None)[:2]
    x = x * weight if isinstance(weight, Tensor) else x
    return x + bias if isinstance(bias, Tensor) else x
