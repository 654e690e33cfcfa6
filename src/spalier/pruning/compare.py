"""Compare a pruned network with the masked one, and find the first module that differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node

from spalier.adapters.changes import Changes
from spalier.pruning.kept import Kept
from spalier.pruning.masking import Read, masked_run
from spalier.structure.capture import arguments, copied, first_line, in_eval_mode, module_of, preserved
from spalier.structure.streams import present
from spalier.structure.structure import Captured, Structure
from spalier.structure.values import Value

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
    carried = captured.walk.found.values.get(node)
    if not isinstance(carried, Value):
        return value
    for axis, fields in carried.fields.items():
        mask = present(captured.assembly.placed(fields), value.shape[axis], left.streams)
        value = value.index_select(axis, torch.from_numpy(np.flatnonzero(mask)).to(value.device))
    return value
