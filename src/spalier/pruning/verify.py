"""The masked network: the base's graph with zeros for all that is gone. What a pruned network has to equal.

Where statistics run over pruned channels (layer norm, group norm, standardised weights) a zero would still count, so
there the mask means removal: the mean is taken over what is left.

Compare a pruned network with the masked one, and find the first module that differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from spalier.adapters.attachment import Changes
from spalier.pruning.plan import Kept
from spalier.structure.capture import arguments, copied, in_eval_mode, module_of, operation, preserved
from spalier.structure.labels import Mask
from spalier.structure.streams import kept_indices
from spalier.structure.structure import Captured, Structure
from spalier.structure.walk import Statistic, Value
from spalier.text import first_line

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
        self.statistics = {statistic.node: statistic for statistic in captured.walk.statistics}
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
            units = self.captured.assembly.units_on(fields)
            mask = torch.from_numpy(kept_indices(units, value.shape[axis], self.after.streams))
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


_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.complex64: 1e-4, torch.complex128: 1e-8}
"""Largest difference, relative to the largest entry; half precision gets 2e-2."""


def tolerance(captured: Captured) -> float:
    """How far two ways of computing the same may differ, by the coarsest numbers on the way (a norm may cast)."""
    made = (node.meta.get("val") for node in captured.program.graph.nodes)
    kinds = {t.dtype for t in made if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())}
    return max((_TOLERANCE.get(kind, 2e-2) for kind in kinds), default=0.0)


def is_close(found: Sequence[Any], wanted: Sequence[Any], tolerance: float) -> bool:
    """True where two networks have returned the same, to rounding."""
    ours, theirs = ([x for x in each if isinstance(x, Tensor)] for each in (found, wanted))
    return len(ours) == len(theirs) and all(
        _is_close(a, b, tolerance) for a, b in zip(ours, theirs, strict=True)
    )


def _is_close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    if found.shape != wanted.shape:
        return False
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return torch.equal(found, wanted)
    if not wanted.numel():
        return True
    finite = torch.isfinite(wanted)
    if not torch.equal(found[~finite].nan_to_num(), wanted[~finite].nan_to_num()) or not finite.any():
        return bool((~finite).all()) and torch.equal(torch.isnan(found), torch.isnan(wanted))
    scale = wanted[finite].abs().max().clamp(min=torch.finfo(wanted.dtype).tiny)
    difference = (found[finite] - wanted[finite]).abs().max()
    return bool(difference <= tolerance * scale)


def first_difference(
    net: nn.Module,
    structure: Structure,
    read: Read,
    before: Kept,
    left: Kept,
    changes: Changes,
    failure: Exception | None,
) -> str:
    """Where the pruned network parts from the masked one; takes the changes back on the way."""
    assert structure.captured is not None
    outputs, running = _leaf_outputs(net, structure.captured.example)
    kinds = {path: type(module).__name__ for path, module in net.named_modules()}
    if failure is not None:
        place = running or ""
        return f"{place or 'the network itself'} ({kinds[place]}) fails with {first_line(failure)!r}"
    changes.undo_()
    ends = _ends(structure.captured, outputs)
    masked = masked_run(structure, read, before, left, set(ends))
    limit = tolerance(structure.captured)
    for node, value in masked.items():
        place = ends[node]
        if not _is_close(outputs[place], _left_of(structure.captured, node, value, left), limit):
            return f"{place} ({kinds[place]}) is the first to differ"
    return "its output differs, though no module of it does"


def _leaf_outputs(net: nn.Module, example: Any) -> tuple[dict[str, Tensor], str | None]:
    """What each module without children returned in its first call; and the module that was running at an error."""
    outputs: dict[str, Tensor] = {}
    running: list[str] = []
    handles = []
    for path, module in net.named_modules():
        handles.append(module.register_forward_pre_hook(_enter(running, path)))
        handles.append(module.register_forward_hook(_leave(running, path, outputs)))
    args, kwargs = arguments(copied(example))
    try:
        with preserved(net), in_eval_mode(net), torch.no_grad():
            net(*args, **kwargs)
    except Exception:  # the caller has caught it before, and asks where
        return outputs, running[-1] if running else ""
    finally:
        for handle in handles:
            handle.remove()
    return outputs, None


def _enter(running: list[str], path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        running.append(path)

    return hook


def _leave(running: list[str], path: str, outputs: dict[str, Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()
        if isinstance(output, Tensor) and not any(
            m is not module and list(m.parameters()) for m in module.modules()
        ):
            outputs.setdefault(path, output.detach().clone())

    return hook


def _ends(captured: Captured, outputs: Mapping[str, Tensor]) -> dict[Node, str]:
    """The node that each of these modules returns, in the graph's order."""
    last: dict[str, Node] = {}
    for node in captured.program.graph.nodes:
        if node.op == "call_function":
            last[module_of(node)] = node
    order = {node: number for number, node in enumerate(captured.program.graph.nodes)}
    chosen = {node: place for place, node in last.items() if place in outputs}
    return dict(sorted(chosen.items(), key=lambda item: order[item[0]]))


def _left_of(captured: Captured, node: Node, value: Tensor, left: Kept) -> Tensor:
    carried = captured.walk.values.get(node)
    if not isinstance(carried, Value):
        return value
    for axis, fields in carried.fields.items():
        mask = kept_indices(captured.assembly.units_on(fields), value.shape[axis], left.streams)
        value = value.index_select(axis, torch.from_numpy(np.flatnonzero(mask)).to(value.device))
    return value
