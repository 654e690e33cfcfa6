"""`prune_`: take units out of a network physically, and prove that nothing else has changed.

It knows the base's graph, what is left of the base, and the plan:

1. The base's graph runs on the current values, adapters fused, with zeros for all that is to go (`verify.reference`).
2. Tensors, updates and attributes are cut, with every change in a log (`apply_`).
3. The network itself runs, and must return the same (`verify.verify`).
4. On a difference, an error or an interrupt the log is played back: nothing was changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spalier.adapters.attach import fuse
from spalier.adapters.attachment import Changes, attachment_of, is_marked, owners_of
from spalier.adapters.forward import updates
from spalier.pruning.cuts import (
    Cutter,
    Reduction,
    check_optimizers,
    components_of,
    cut_optimizers_,
    optimizers_of,
)
from spalier.pruning.modules import Resize, resized, set_spread_
from spalier.pruning.plan import MARK, Plan, kept_after, kept_of
from spalier.pruning.recovery import Recovered, Recovery, calibration_of, recover_
from spalier.pruning.verify import reference, verify


def prune_(
    net: nn.Module,
    plan: Plan,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    check: bool = True,
    recover: Iterable[Any] | Recovery | None = None,
) -> Recovered | None:
    """Take what a plan leaves out of ``net``, in place: weights, biases, adapters, norms and their statistics.

    The network is physically smaller afterwards. Its learned parameters stay the same objects, and the state of an
    optimizer is cut with them, so training goes on. The units that are left, counted in the base, are remembered on
    the network. An adapted network's base tensors are not touched: `detach_` gives the whole base back.

    On the example that the network was traced with, it must compute what the masked network computes; otherwise
    everything is rolled back and the error names the first module that differs.

    Args:
        net: the network that was traced, or its adapted form, pruned before or not.
        plan: which units stay.
        optimizer: one or several, whose state is cut along.
        check: whether to compare with the masked network; on the meta device there is nothing to compare.
        recover: calibration batches, or a `Recovery` of them: batch norms take new statistics, and each adapter
            becomes the low-rank update that best restores its layer's output, in closed form and without labels. The
            optimizer begins anew with what was set. What was done is returned.

    >>> from spalier import Plan, trace
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> plan = Plan(trace(net, torch.randn(1, 4)), {"0": [0, 3, 5]})
    >>> prune_(net, plan)
    >>> net
    Sequential(
      (0): Linear(in_features=4, out_features=3, bias=True)
      (1): ReLU()
      (2): Linear(in_features=3, out_features=2, bias=True)
    )
    """
    with torch.inference_mode(False):
        return _prune_(net, plan, optimizer, check, recover)


def _prune_(net: nn.Module, plan: Plan, optimizer: Any, check: bool, recover: Any) -> Recovered | None:
    structure = plan.structure
    attachment = attachment_of(net) if is_marked(net) else None
    calibration = None if recover is None else calibration_of(recover)
    before = kept_of(net, structure)
    reduction = Reduction(net, structure, owners_of(net, structure.names), before, kept_after(plan, before))
    components = components_of(attachment, plan.ranks)
    optimizers = optimizers_of(net, optimizer)
    check_optimizers(optimizers, [*_parameters(reduction), *(p for u in components for p in u.parameters())])
    has_values = not any(tensor.is_meta for tensor in net.parameters())
    changes = Changes()
    cutter = Cutter(attachment, changes)
    recovered = teacher = None
    try:
        if calibration is not None:  # the network as it is, to recover what it computes
            teacher = copy.deepcopy(net) if attachment is None else fuse(net)
        cutter.cut_ranks_(components)  # before the masked run, which has the same ranks then
        wanted = reference(reduction) if check and has_values else None
        apply_(reduction, cutter)
        if wanted is not None:
            verify(reduction, wanted, changes)
        if calibration is not None and teacher is not None:
            centred = {site.writer for site in structure.sites if site.norm}
            outputs = _kept_outputs(reduction)
            recovered = recover_(net, teacher, attachment, *calibration, outputs, centred, changes)
    except BaseException:  # an interrupt too
        changes.undo_()
        raise
    cut_optimizers_(optimizers, cutter.sliced)
    for parameter in () if recovered is None else recovered.parameters:
        for each in optimizers:
            each.state.pop(parameter, None)  # its momentum was that of other factors
    if attachment is not None:
        attachment.pruned.keep_(changes)
        attachment.structure = attachment.structure or structure
        attachment.task = None  # it has other masks now
    return recovered


def _parameters(reduction: Reduction) -> list[Tensor]:
    """What is cut: tensors, and the parameters of their updates."""
    found: list[Tensor] = []
    for owner in (owner for name in reduction.cuts for owner in reduction.owners[name]):
        found.append(owner.tensor)
        found += [p for update in updates(owner.module).values() for p in update.parameters()]
    return found


def _kept_outputs(reduction: Reduction) -> dict[str, Any]:
    """For each layer that has lost outputs, those that stayed."""
    paths = {module: path for path, module in reduction.net.named_modules()}
    return {
        paths[owner.module]: indices[0]
        for name, indices in reduction.cuts.items()
        for owner in reduction.owners[name]
        if owner.key == "weight" and indices[0] is not None
    }


def apply_(reduction: Reduction, cutter: Cutter) -> None:
    """Cut the tensors, then let attributes and gathers follow."""
    net, structure, left = reduction.net, reduction.structure, reduction.left
    for name, indices in reduction.cuts.items():
        cutter.cut_(reduction.owners[name], indices)
    attributes = _resize_(reduction, cutter.changes)
    for writer in structure.writers:
        has = writer.name in left.writers
        if has or writer.name in reduction.before.writers:
            own = left.writers[writer.name][left.streams[writer.stream]] if has else None
            set_spread_(cutter.changes, net.get_submodule(writer.module), own, writer.axis)
    cutter.changes.set_(net, "", MARK, left.to_dict(structure, attributes))


def _resize_(reduction: Reduction, changes: Changes) -> dict[str, dict[str, Any]]:
    """Let attributes follow; returns what they were in the base."""
    net = reduction.net
    kept: dict[nn.Module, dict[str, Any]] = {}
    for name, indices in reduction.cuts.items():
        for owner in reduction.owners[name]:
            kept.setdefault(owner.module, {})[owner.key] = indices
    extents: dict[nn.Module, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for extent in reduction.structure.extents:
        sizes = extent.sizes, extent.left(reduction.left.streams)
        extents.setdefault(net.get_submodule(extent.module), []).append(sizes)
    # entries reason from the base's sizes, so these are remembered from the first cut on
    noted = (net.__dict__.get(MARK) or {}).get("attributes", {})
    base: dict[str, dict[str, Any]] = {path: dict(values) for path, values in noted.items()}
    touched = {*kept, *extents}
    for path, module in net.named_modules():
        if module in touched or _is_around_attention(module, touched):
            resize = Resize(kept.get(module, {}), tuple(extents.get(module, ())), base.get(path, {}))
            for key, value in resized(module, resize).items():
                if isinstance(value, int | tuple) and key in module.__dict__:
                    base.setdefault(path, {}).setdefault(key, module.__dict__[key])
                changes.set_(module, "", key, value)
    return base


def _is_around_attention(module: nn.Module, touched: set[nn.Module]) -> bool:
    """Attention whose output projection was cut, and layers with a fast path that knows nothing of it."""
    if isinstance(module, nn.MultiheadAttention):
        return module.out_proj in touched
    encoders = nn.TransformerEncoderLayer, nn.TransformerEncoder
    return isinstance(module, encoders) and not touched.isdisjoint(module.modules())
