"""`prune_`: take units out of a network physically, and prove that nothing else has changed."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from spalier.adapters.attach import detach_, fuse
from spalier.adapters.attachment import (
    Attachment,
    Changes,
    Owner,
    attachment_of,
    fused_value,
    is_marked,
    owners_of,
)
from spalier.adapters.forward import updates
from spalier.errors import PlanError, PruneError
from spalier.pruning.attributes import Resize, resized
from spalier.pruning.cuts import (
    Cutter,
    Indices,
    check_optimizers,
    components_of,
    cut_optimizers_,
    cuts_of,
    optimizers_of,
)
from spalier.pruning.modules import set_spread_
from spalier.pruning.plan import MARK, Kept, Plan, after, kept_of
from spalier.pruning.recovery import Recovered, Recovery, calibration_of, recover_
from spalier.pruning.verify import first_difference, is_close, masked_outputs, tolerance
from spalier.structure.capture import arguments, copied, in_eval_mode, preserved
from spalier.structure.structure import Structure, capture_again_


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
    attachment = _checked(net, plan)
    calibration = None if recover is None else calibration_of(recover)
    structure = plan.structure
    before = kept_of(net, structure)
    left = after(plan, before)
    optimizers = optimizers_of(net, optimizer)
    cuts = cuts_of(structure, before, left)
    owners = owners_of(net, structure.names)
    components = components_of(attachment, plan.ranks)
    check_optimizers(
        optimizers, [*_parameters(owners, cuts), *(p for u in components for p in u.parameters())]
    )
    teacher = None if calibration is None else fuse(net) if attachment is not None else copy.deepcopy(net)
    recovered = None
    changes = Changes()
    cutter = Cutter(attachment, changes)
    try:
        cutter.cut_ranks_(components)
        wanted = _masked(net, structure, owners, before, left) if check and not _has_no_values(net) else None
        apply_(net, structure, cutter, cuts, owners, before, left)
        if wanted is not None:
            _verify(net, structure, wanted, owners, before, left, changes)
        if calibration is not None and teacher is not None:
            kept, centred = (
                _outputs_of(net, owners, cuts),
                {s.writer for s in structure.sites if s.norm},
            )
            recovered = recover_(net, teacher, attachment, *calibration, kept, centred, changes)
    except BaseException:
        changes.undo_()
        raise
    cut_optimizers_(optimizers, cutter.sliced)
    for each in optimizers:
        for parameter in (
            () if recovered is None else recovered.parameters
        ):  # its momentum was that of other factors
            each.state.pop(parameter, None)
    if attachment is not None:
        attachment.pruned.keep_(changes)
        attachment.structure = attachment.structure or structure
        attachment.task = None  # it has other masks now
    return recovered


def _outputs_of(
    net: nn.Module, owners: Mapping[str, list[Owner]], cuts: Mapping[str, Indices]
) -> dict[str, Any]:
    """For each layer that has lost outputs, those that stayed."""
    paths = {module: path for path, module in net.named_modules()}
    return {
        paths[owner.module]: indices[0]
        for name, indices in cuts.items()
        for owner in owners[name]
        if owner.key == "weight" and indices[0] is not None
    }


def _checked(net: nn.Module, plan: Plan) -> Attachment | None:
    if not isinstance(net, nn.Module):
        raise PlanError(f"net is a {type(net).__name__}, expected a torch.nn.Module")
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is a {type(plan).__name__}, expected a Plan of the units to keep")
    return attachment_of(net) if is_marked(net) else None


def apply_(
    net: nn.Module,
    structure: Structure,
    cutter: Cutter,
    cuts: Mapping[str, Indices],
    owners: Mapping[str, list[Owner]],
    before: Kept,
    left: Kept,
) -> None:
    """Cut the tensors, then let attributes and gathers follow."""
    for name, indices in cuts.items():
        cutter.cut_(owners[name], indices)
    attributes = _resize_(net, structure, cutter.changes, {n: (owners[n], i) for n, i in cuts.items()}, left)
    for writer in structure.writers:
        had, has = writer.name in before.writers, writer.name in left.writers
        if had or has:
            stream = left.streams[writer.stream]
            own = left.writers[writer.name][stream] if has else None
            set_spread_(cutter.changes, net.get_submodule(writer.module), own, writer.axis)
    cutter.changes.set_(net, "", MARK, left.to_dict(structure, attributes))


def _resize_(
    net: nn.Module,
    structure: Structure,
    changes: Changes,
    cuts: Mapping[str, tuple[list[Owner], Any]],
    left: Kept,
) -> dict[str, dict[str, Any]]:
    """Let attributes follow; what they were in the base."""
    kept: dict[nn.Module, dict[str, Any]] = {}
    for places, indices in cuts.values():
        for owner in places:
            kept.setdefault(owner.module, {})[owner.key] = indices
    extents: dict[nn.Module, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for extent in structure.extents:
        extents.setdefault(net.get_submodule(extent.module), []).append(
            (extent.sizes, extent.left(left.streams))
        )
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


def _parameters(owners: Mapping[str, list[Owner]], names: Iterable[str]) -> list[Tensor]:
    found: list[Tensor] = []
    for owner in (o for name in names for o in owners[name]):
        found.append(owner.tensor)
        found += [p for update in updates(owner.module).values() for p in update.parameters()]
    return found


def _whole(net: nn.Module) -> nn.Module:
    """The unpruned network; an adapted one has it with it."""
    if MARK not in net.__dict__:
        return net
    base = copy.deepcopy(net)
    detach_(base)
    return base


def _has_no_values(net: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in net.parameters())


def _masked(
    net: nn.Module, structure: Structure, owners: Mapping[str, list[Owner]], before: Kept, left: Kept
) -> list[Any]:
    if structure.captured is None:
        if structure.example is None or (MARK in net.__dict__ and not is_marked(net)):
            raise PruneError(
                "the structure was loaded without the network's graph, which can be captured before the first pruning "
                "only, so nothing can be compared; pass check=False, or trace the whole network first"
            )
        capture_again_(_whole(net), structure)
    with preserved(net):
        try:
            outputs = masked_outputs(structure, partial(fused_value, owners), before, left)
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


@torch.no_grad()
def _verify(
    net: nn.Module,
    structure: Structure,
    wanted: list[Any],
    owners: Mapping[str, list[Owner]],
    before: Kept,
    left: Kept,
    changes: Changes,
) -> None:
    """Compare with what the masked network returned; say where they part."""
    assert structure.captured is not None
    args, kwargs = arguments(copied(structure.captured.example))
    failure: Exception | None = None
    with preserved(net), in_eval_mode(net):
        try:
            found = tree_leaves(net(*args, **kwargs))
            if is_close(found, wanted, tolerance(structure.captured)):
                return
        except Exception as error:  # whatever the network's own code raises
            failure = error
    where = first_difference(net, structure, partial(fused_value, owners), before, left, changes, failure)
    raise PruneError(
        f"the pruned network does not compute what the masked one does: {where}; nothing was changed. "
        "If its code holds sizes of its own, say how they follow (spalier.resizes), or keep the part whole "
        "(trace(..., freeze=...))"
    ) from failure
