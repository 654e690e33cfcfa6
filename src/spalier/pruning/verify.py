"""Prove that a pruned network computes what the masked network computes.

The masked network is the base's graph, run on the current values with adapters fused, and with zeros for all that is to
go. Parameters are made as they are needed and dropped again, so there is never a second base in memory.

Where statistics run over pruned channels (layer norm, group norm, lengths, standardised weights) a zero would still
count. There the mask means removal: the mean is taken over what is left.

If the two differ, `verify` finds the first module that does, and names it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from spalier.adapters.attach import detach_
from spalier.adapters.attachment import Changes, fused_value, is_marked
from spalier.adapters.geometry import Added
from spalier.errors import PruneError
from spalier.pruning.plan import PRUNED_MARK, Reduction
from spalier.structure.graph import Value, arguments, copied, hooked, in_eval_mode, module_of, operation, preserved
from spalier.structure.labels import Ints, Mask
from spalier.structure.recording import follow_calls
from spalier.structure.streams import kept_indices
from spalier.structure.structure import Captured, Structure, capture_again_
from spalier.text import first_line


def reference(reduction: Reduction) -> list[Any]:
    """What the masked network returns for the example, as a flat list; an error where there is nothing to compare."""
    _ensure_captured_(reduction.net, reduction.structure)
    with preserved(reduction.net):
        try:
            outputs = _masked_outputs(reduction)
        except Exception as error:  # whatever the graph's operations raise
            raise PruneError(
                f"the masked network does not run on the example ({error}), so nothing can be compared; trace with an "
                "example of the right dtype and device"
            ) from error
    if not any(isinstance(x, Tensor) and torch.isfinite(x).any() for x in outputs):
        raise PruneError(
            "the masked network returns no finite number on the example, so nothing can be compared; trace with "
            "another example, or load sound weights"
        )
    return outputs


def _ensure_captured_(net: nn.Module, structure: Structure) -> None:
    """Capture the graph of the unpruned network, which an adapted one has in it, where the structure was loaded."""
    if structure.captured is not None:
        return
    is_pruned = PRUNED_MARK in net.__dict__
    if structure.example is None or (is_pruned and not is_marked(net)):
        raise PruneError(
            "the structure was loaded without the network's graph, which can be captured before the first pruning "
            "only, so nothing can be compared; pass check=False, or trace the whole network first"
        )
    if is_pruned:
        net = copy.deepcopy(net)
        detach_(net)
    capture_again_(net, structure)


@torch.no_grad()
def verify(reduction: Reduction, wanted: Sequence[Any], changes: Changes) -> None:
    """Compare a pruned network with what the masked one returned; where they differ, say where."""
    net, captured = reduction.net, reduction.structure.captured
    assert captured is not None
    args, kwargs = arguments(copied(captured.example))
    failure: Exception | None = None
    with preserved(net), in_eval_mode(net):
        try:
            found = tree_leaves(net(*args, **kwargs))
            if is_close(found, wanted, tolerance(captured)):
                return
        except Exception as error:  # whatever the network's own code raises
            failure = error
    place, where = _first_difference(reduction, changes, failure)
    refusal = PruneError(
        f"the pruned network does not compute what the masked one does: {where}; nothing was changed. "
        "If its code holds sizes of its own, say how they follow (spalier.resizes), or keep the part whole"
    )
    refusal.place = place
    raise refusal from failure


# comparing

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
    return len(ours) == len(theirs) and all(map(partial(_is_close, tolerance=tolerance), ours, theirs))


def _is_close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    if found.shape != wanted.shape:
        return False
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return torch.equal(found, wanted)
    finite = wanted[torch.isfinite(wanted)].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    # the same infinities and NaNs in the same places are equal: masks of attention are full of them
    return torch.allclose(found.to(wanted), wanted, rtol=0, atol=tolerance * largest, equal_nan=True)


def _first_difference(reduction: Reduction, changes: Changes, failure: Exception | None) -> tuple[str, str]:
    """The module where the pruned network and the masked one part, and how; takes the changes back on the way."""
    net, captured = reduction.net, reduction.structure.captured
    assert captured is not None
    outputs, running = _leaf_outputs(net, captured.example)
    kinds = {path: type(module).__name__ for path, module in net.named_modules()}
    if failure is not None:
        place = running[-1] if running else ""
        return place, f"{place or 'the network itself'} ({kinds[place]}) fails with {first_line(failure)!r}"
    changes.undo_()  # the masked network runs on the values from before
    # the last operation of a module is what it returns
    last = {module_of(n): n for n in captured.program.graph.nodes if n.op == "call_function"}
    ends = {node: place for place, node in last.items() if place in outputs}
    masked = _MaskedRun(reduction, captured, watched=set(ends))
    masked.outputs()
    for node, value in masked.seen.items():
        place = ends[node]
        if not _is_close(outputs[place], _left_of(captured, node, value, reduction), tolerance(captured)):
            return place, f"{place} ({kinds[place]}) is the first to differ"
    return "", "its output differs, though no module of it does"


def _leaf_outputs(net: nn.Module, example: Any) -> tuple[dict[str, Tensor], list[str]]:
    """What each innermost module returned in its first call; and the modules that were running at an error."""
    outputs: dict[str, Tensor] = {}
    running: list[str] = []

    def keep(path: str, module: nn.Module, args: Any, output: Any) -> None:
        # activations, adapters and gathers inside of a layer do not make it less of one
        parts = [m for m in module.modules() if m is not module and not isinstance(m, Added)]
        has_parts = any(True for part in parts for _ in part.parameters())
        if isinstance(output, Tensor) and not has_parts:
            outputs.setdefault(path, output.detach().clone())

    handles = follow_calls(net, running)
    handles += [module.register_forward_hook(partial(keep, path)) for path, module in net.named_modules()]
    args, kwargs = arguments(copied(example))
    with suppress(Exception), hooked(handles), preserved(net), in_eval_mode(net), torch.no_grad():
        net(*args, **kwargs)  # where it raises, the caller has caught that before, and asks where
    return outputs, running


def _left_of(captured: Captured, node: Node, value: Tensor, reduction: Reduction) -> Tensor:
    """What is left of a tensor of the masked network."""
    carried = captured.walk.values.get(node)
    for axis, fields in carried.fields.items() if isinstance(carried, Value) else ():
        mask = kept_indices(captured.assembly.units_on(fields), value.shape[axis], reduction.left.streams)
        value = value.index_select(axis, _places(mask, value))
    return value


def _places(mask: Mask, like: Tensor) -> Tensor:
    return torch.from_numpy(np.flatnonzero(mask)).to(like.device)


# the masked network


@torch.no_grad()
def _masked_outputs(reduction: Reduction) -> list[Any]:
    structure = reduction.structure
    assert structure.captured is not None
    run = _MaskedRun(reduction, structure.captured)
    outputs = run.outputs()
    if any(isinstance(x, Tensor) and not torch.isfinite(x).all() for x in outputs):
        # a weight that is divided by its own norm has no zero rows: there what writes a channel stays as it is, and
        # only what reads it is masked
        run.only = {(m.tensor, m.axis) for s in structure.streams for m in s.members if m.role == "reader"}
        outputs = run.outputs()
    return outputs


class _MaskedRun:
    """Runs the base's graph with zeros for what is gone."""

    def __init__(self, reduction: Reduction, captured: Captured, watched: set[Node] | None = None) -> None:
        self.reduction, self.captured = reduction, captured
        self.owners = captured.program.tensors
        self.statistics = {statistic.node: statistic for statistic in captured.walk.statistics}
        self.watched = watched or set()
        self.seen: dict[Node, Any] = {}
        """What the nodes that are watched have computed, in order."""
        self.only: set[tuple[str, int]] | None = None
        """The axes that are masked; None for all."""

    def outputs(self) -> list[Any]:
        program = self.captured.program
        args, kwargs = arguments(copied(self.captured.example))
        given = iter(tree_leaves((args, kwargs)))
        values: dict[Node, Any] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name not in self.owners:
                constant = program.constants.get(node.name)
                values[node] = next(given) if constant is None else constant
        return tree_leaves(self._run(program.module, values))

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
                for used in node.all_input_nodes:  # what nobody needs any more is dropped
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
            return _statistic(node, args, self._presence(self.statistics[node].fields, args[0]))
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
        structure = self.reduction.structure
        first = structure.names[name]
        value = fused_value(self.reduction.owners, first)
        was, left = (kept.of(structure, first) for kept in (self.reduction.before, self.reduction.left))
        if all(mask.all() for mask in left):  # most tensors of a first prune, uncopied
            return value
        full = self._base_shaped(value, was)
        for axis, mask in enumerate(left):
            if not mask.all() and (self.only is None or (first, axis) in self.only):
                full.index_fill_(axis, _places(~mask, full), 0)
        return full

    def _base_shaped(self, value: Tensor, was: list[Mask]) -> Tensor:
        """A copy of the base's shape, with what is left at its place."""
        if all(mask.all() for mask in was):
            return value.clone()
        for axis, mask in enumerate(was):
            if not mask.all():
                shape = (*value.shape[:axis], len(mask), *value.shape[axis + 1 :])
                # where writers are not masked, rows that were cut before must not be zeros either
                wide = value.new_zeros(shape) if self.only is None else _anything(value, shape)
                value = wide.index_copy_(axis, _places(mask, value), value)
        return value

    def _presence(self, over: Mapping[int, Sequence[Ints]], value: Tensor) -> Tensor:
        """One where an entry is left, broadcast against the tensor that statistics are taken of."""
        left = torch.ones([1] * value.dim(), dtype=value.dtype, device=value.device)
        for axis, fields in over.items():
            units = self.captured.assembly.units_on(fields)
            mask = torch.from_numpy(kept_indices(units, value.shape[axis], self.reduction.left.streams))
            left = left * mask.to(left).view([-1 if a == axis else 1 for a in range(value.dim())])
        return left


def _anything(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Values for rows that nothing reads any more, unlike each other so that they can be standardised."""
    if not like.is_floating_point():
        return like.new_zeros(shape)
    return torch.arange(math.prod(shape), device=like.device).view(shape).sin().to(like.dtype)


def _statistic(node: Node, args: Any, left: Tensor) -> Tensor:
    """A norm whose statistics count what is left alone."""
    name = operation(node)
    x: Tensor = args[0]
    if name == "mean":
        keepdim = bool(args[2]) if len(args) > 2 else bool(node.kwargs.get("keepdim", False))
        return _mean(x, left, args[1], keepdim)
    if name in ("linalg_vector_norm", "norm"):
        function: Any = node.target
        length: Tensor = function(x * left, *args[1:], **node.kwargs)
        return length
    if name == "_weight_norm":
        own = int(args[2]) if len(args) > 2 else 0
        axes = [axis for axis in range(x.dim()) if own == -1 or axis != own]
        length = torch.linalg.vector_norm(x * left, dim=axes, keepdim=True)
        weight: Tensor = x / torch.where(length > 0, length, 1) * args[1]  # what is gone has none
        return weight
    if name in ("layer_norm", "rms_norm"):
        is_centred = name == "layer_norm"
        default = 1e-5 if is_centred else torch.finfo(x.dtype).eps
        axes = list(range(x.dim() - len(args[1]), x.dim()))
        epsilon = _epsilon(node, args, 4 if is_centred else 3, default)
        return _affine(_normed(x, left, axes, epsilon, is_centred=is_centred), args[2:4])
    channels = [1, -1] + [1] * (x.dim() - 2)
    first = 2 if name == "group_norm" else 1
    affine = [a.view(channels) if isinstance(a, Tensor) else None for a in args[first : first + 2]]
    if name == "group_norm":
        shape = (len(x), args[1], -1)
        grouped, left = x.reshape(shape), left.expand_as(x).reshape(shape)
        normed = _normed(grouped, left, [2], _epsilon(node, args, 4, 1e-5), is_centred=True)
        return _affine(normed.view_as(x), affine)
    others = [axis for axis in range(x.dim()) if axis != 1]  # batch norm of a weight
    return _affine(_normed(x, left, others, args[7], is_centred=True), affine)


def _epsilon(node: Node, args: Any, place: int, default: float) -> float:
    found: Any = args[place] if len(args) > place else node.kwargs.get("eps")
    return default if found is None else float(found)


def _mean(x: Tensor, left: Tensor, axes: Any, keepdim: bool) -> Tensor:
    total = (x * left).sum(axes, keepdim=keepdim)  # zeros alone would not do: a centred zero is no zero
    return total / left.expand_as(x).sum(axes, keepdim=keepdim).clamp(min=1)


def _normed(x: Tensor, left: Tensor, axes: list[int], epsilon: float, *, is_centred: bool) -> Tensor:
    if is_centred:
        x = x - _mean(x, left, axes, True)
    return x * torch.rsqrt(_mean(x * x, left, axes, True) + epsilon)


def _affine(x: Tensor, parameters: Sequence[Any]) -> Tensor:
    weight, bias = (*parameters, None, None)[:2]
    x = x * weight if isinstance(weight, Tensor) else x
    return x + bias if isinstance(bias, Tensor) else x
