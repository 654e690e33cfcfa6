"""`prune_`: take units out of a network physically, and prove that nothing else has changed.

It knows the base's graph, what is left of the base, and the plan:

1. The base's graph runs on the current values, adapters fused, with zeros for all that is to go (`verify.reference`).
2. Tensors, updates, optimizer state and attributes are cut, with every change in a log (`Cutter`, `apply_`).
3. The network itself runs, and must return the same (`verify.verify`).
4. On a difference, an error or an interrupt the log is played back: nothing was changed.

Parameters that learn stay the same objects with other values, so optimizers, and whoever else holds them, go on with
them. Frozen base tensors give way to new ones and are left untouched, so `detach_` can give the whole base back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer

from spalier.adapters.attach import fuse
from spalier.adapters.attachment import Attachment, Changes, Owner, attachment_of, is_marked, owners_of
from spalier.adapters.calls import Calls, corrected_with
from spalier.adapters.geometry import Geometry
from spalier.adapters.kinds import LowRank, Update
from spalier.errors import PlanError, PruneError
from spalier.pruning.modules import Resize, resized, set_spread_
from spalier.pruning.plan import PRUNED_MARK, Indices, Plan, Reduction, Writers, kept_after, kept_of
from spalier.pruning.recovery import Recovered, Recovery, calibration_of, recover_, wishes_of
from spalier.pruning.verify import reference, verify
from spalier.structure.labels import Ints
from spalier.structure.structure import Structure


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
    with torch.inference_mode(False):  # tensors that are made under it could never learn
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
    # up to here nothing is changed; whatever was asked wrongly is refused by now
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
            wishes = wishes_of(reduction, calibration[0])
            recovered = recover_(net, teacher, *calibration, changes, wishes)
    except BaseException as error:  # an interrupt too
        changes.undo_()
        if isinstance(error, PruneError) and error.place is not None:
            raise PruneError(f"{error}: {_remedy(plan, reduction, attachment, error.place)}") from error
        raise
    cut_optimizers_(optimizers, cutter.sliced)  # last: it is the one thing that no log takes back
    for parameter in () if recovered is None else recovered.parameters:
        for each in optimizers:
            each.state.pop(parameter, None)  # its momentum was that of other factors
    if attachment is not None:
        attachment.pruned.keep_(changes)  # for detach_
        attachment.structure = attachment.structure or structure
        attachment.task = None  # it has other masks now
    return recovered


def _parameters(reduction: Reduction) -> list[Tensor]:
    """What is cut: tensors, and the parameters of their updates."""
    owners = [owner for name in reduction.cuts for owner in reduction.owners[name]]
    updates = [owner.update for owner in owners if owner.update is not None]
    return [*(owner.tensor for owner in owners), *(p for update in updates for p in update.parameters())]


def _remedy(plan: Plan, reduction: Reduction, attachment: Attachment | None, place: str) -> str:
    """What to keep whole, so that the rest of a plan that was refused can be carried out."""
    structure = plan.structure
    names = _to_blame(plan, reduction, attachment, place)
    streams = [structure.streams[_stream(structure, name, plan.writers)] for name in names]
    writers = [next((m for m in s.members if m.role == "writer"), s.members[0]).tensor for s in streams]
    layers = list(dict.fromkeys(tensor.rpartition(".")[0] for tensor in writers if "." in tensor))
    whole = f"pass protect={layers} to select, or freeze={layers} to trace, or " if layers else ""
    return f"{whole}leave {', '.join(map(repr, names))} out of the plan"


def _to_blame(plan: Plan, reduction: Reduction, attachment: Attachment | None, place: str) -> list[str]:
    """The streams that are refused when they are cut alone, those that have to do with a module first.

    Where none is, the nearest ones: they fail together.
    """
    structure, before = plan.structure, reduction.before
    waiting = {name: structure.streams[_stream(structure, name, plan.writers)] for name in plan.keep}
    nearest: list[str] = []
    for path in _upwards(place):
        inside = f"{path}." if path else ""
        near = [n for n, stream in waiting.items() if any(m.tensor.startswith(inside) for m in stream.members)]
        guilty = []
        for name in near:
            left = kept_after(Plan(structure, {name: plan.keep[name]}, writers=plan.writers), before)
            alone = Reduction(reduction.net, structure, reduction.owners, before, left)
            changes = Changes()
            try:
                wanted = reference(alone)
                apply_(alone, Cutter(attachment, changes))
                verify(alone, wanted, changes)
            except PruneError:
                guilty.append(name)
            finally:
                changes.undo_()
        if guilty:
            return guilty
        nearest = nearest or near
        waiting = {name: stream for name, stream in waiting.items() if name not in near}
    return nearest or list(waiting)


def _upwards(path: str) -> list[str]:
    """A module, and all that hold it, up to the network itself."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _stream(structure: Structure, name: str, writers: Writers) -> int:
    """The number of the stream that a plan means by a name, or of the stream that a free writer writes."""
    free = writers == "free" and name in structure.free_writers
    return structure.free_writers[name] if free else structure.index[name]


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
    cutter.changes.set_(net, "", PRUNED_MARK, left.to_dict(structure, attributes))


def _resize_(reduction: Reduction, changes: Changes) -> dict[str, dict[str, Any]]:
    """Let attributes follow; returns what they were in the base."""
    net = reduction.net
    kept: dict[nn.Module, dict[str, Any]] = {}
    for name, indices in reduction.cuts.items():
        for owner in reduction.owners[name]:
            kept.setdefault(owner.module, {})[owner.key] = indices
    for path, module in list(net.named_modules()):
        if module in kept and isinstance(module, ParametrizationList):
            # a weight that is computed from others is cut like that of these which is cut most: it has its shape
            layer, _, key = path.rpartition(".parametrizations.")
            most = max(kept[module].values(), key=lambda indices: sum(index is not None for index in indices))
            kept.setdefault(net.get_submodule(layer), {})[key] = most
    extents: dict[nn.Module, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for extent in reduction.structure.extents:
        sizes = extent.sizes, extent.left(reduction.left.streams)
        extents.setdefault(net.get_submodule(extent.module), []).append(sizes)
    # entries reason from the base's sizes, so these are remembered from the first cut on
    noted = (net.__dict__.get(PRUNED_MARK) or {}).get("attributes", {})
    base: dict[str, dict[str, Any]] = {path: dict(values) for path, values in noted.items()}
    touched = {*kept, *extents}
    for path, module in net.named_modules():
        if module in touched or _is_around_attention(module, touched):
            resize = Resize(kept.get(module, {}), tuple(extents.get(module, ())), base.get(path, {}))
            for key, value in resized(module, resize).items():
                if isinstance(value, int | tuple) and key in module.__dict__:  # sizes, no forwards
                    base.setdefault(path, {}).setdefault(key, module.__dict__[key])
                changes.set_(module, "", key, value)
    for path, calls in _calls(reduction).items():
        module = net.get_submodule(path)
        for key, value in corrected_with(module, calls).items():
            changes.set_(module, "", key, value)
    return base


def _calls(reduction: Reduction) -> dict[str, Calls]:
    """What has to be set right in modules' calls; nothing in those that have all their weights."""
    structure, left = reduction.structure, reduction.left
    found: dict[str, Calls] = {}
    modules = [*(v.module for v in structure.views), *(s.module for s in structure.scales), *structure.grouped]
    for path in dict.fromkeys(modules):
        own = [first for name, first in structure.names.items() if name.startswith(f"{path}." if path else "")]
        if not own or not all(mask.all() for name in own for mask in left.of(structure, name)):
            views = tuple(view.left(left.streams) for view in structure.views if view.module == path)
            found[path] = Calls(views, tuple((s.axes, s.number) for s in structure.scales if s.module == path))
    return found


def _is_around_attention(module: nn.Module, touched: set[nn.Module]) -> bool:
    """Attention whose output projection was cut, and layers with a fast path that knows nothing of it."""
    if isinstance(module, nn.MultiheadAttention):
        return module.out_proj in touched
    encoders = nn.TransformerEncoderLayer, nn.TransformerEncoder
    return isinstance(module, encoders) and not touched.isdisjoint(module.modules())


# cutting


def cut(tensor: Tensor, indices: Indices) -> Tensor:
    """What is left of a tensor, in its own memory and layout."""
    out = tensor
    for axis, index in enumerate(indices):
        if index is not None:
            out = out.index_select(axis, torch.from_numpy(index).to(out.device))
    layout = torch.channels_last  # which index_select does not keep
    if tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=layout):
        out = out.contiguous(memory_format=layout)
    return out


def cut_geometry(update: Update, shape: Sequence[int], indices: Indices) -> tuple[Geometry, Ints, Ints]:
    """The geometry that an update has once its weight, now of this shape, is cut; the outputs and inputs that stay."""
    sides = zip(shape[:2], indices[:2], strict=True)
    first, second = (np.arange(size) if index is None else index for size, index in sides)
    return update.geometry.cut(first, second)


class Cutter:
    """Cuts the tensors of a network; every change goes into a log, so that it can be taken back."""

    def __init__(self, attachment: Attachment | None, changes: Changes) -> None:
        self.changes = changes
        self.sliced: dict[Tensor, tuple[Tensor, Indices]] = {}
        """Each parameter that was cut: what it is now, and the indices that stayed."""
        self._attachment = attachment
        self._copies = set() if attachment is None else {id(entry.copy) for entry in attachment.replaced}
        self._cut_updates: set[Update] = set()

    def cut_(self, owners: Sequence[Owner], indices: Indices) -> None:
        """Cut one tensor wherever it sits, and the updates of it."""
        tensor = owners[0].tensor
        for update in (owner.update for owner in owners):
            if update is not None and update not in self._cut_updates:  # tied weights share theirs
                self._cut_updates.add(update)
                self._cut_update_(update, tensor.shape, indices)
        # a copy that learns, or any parameter of a network without adapters, stays the same object
        if isinstance(tensor, nn.Parameter) and (self._attachment is None or id(tensor) in self._copies):
            self._shrink_(tensor, indices)
            return
        small = cut(tensor.detach(), indices)
        new: Tensor = nn.Parameter(small, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else small
        self.sliced[tensor] = (new, indices)
        for owner in owners:
            self.changes.set_(owner.module, owner.place, owner.key, new)

    def cut_ranks_(self, components: Mapping[LowRank, Ints]) -> None:
        """Cut the bottlenecks of these updates down to the components that stay."""
        for update, kept in components.items():
            for factor in (update.down, update.up):
                self._shrink_(factor, (kept,))
            for key, scale in update.rank_narrowed(kept).items():
                self.changes.set_(update, "_buffers", key, scale)

    def _shrink_(self, parameter: nn.Parameter, indices: Indices) -> None:
        """Give a parameter what is left of its values, and its gradient with it."""
        before = self.sliced[parameter][1] if parameter in self.sliced else ()
        # a factor may be cut twice, along different axes: its components, and its channels
        merged = tuple(b if a is None else a if b is None else a[b] for a, b in zip_longest(before, indices))
        self.sliced[parameter] = (parameter, merged)
        grad = parameter.grad
        self.changes.set_values_(parameter, cut(parameter.detach(), indices))
        if grad is not None:
            parameter.grad = cut(grad, indices)

    def _cut_update_(self, update: Update, shape: Sequence[int], indices: Indices) -> None:
        geometry, outputs, inputs = cut_geometry(update, shape, indices)
        for parameter, kept in update.cuts(outputs, inputs):
            self._shrink_(parameter, kept)
        for key, value in update.narrowed(geometry, outputs, inputs).items():
            self.changes.set_(update, "_buffers" if isinstance(value, Tensor) else "", key, value)


def components_of(attachment: Attachment | None, ranks: Mapping[str, tuple[int, ...]]) -> dict[LowRank, Ints]:
    """The updates whose bottleneck is cut, and the components that stay."""
    known = {} if attachment is None else {entry.path: entry.update for entry in attachment.updated}
    found: dict[LowRank, Ints] = {}
    for name, components in ranks.items():
        update = known.get(name)
        if not isinstance(update, LowRank):
            names = ", ".join(map(repr, list(known)[:3])) or "none: the network is not adapted"
            raise PlanError(f"{name!r} has no low-rank adapter; expected a name such as {names}")
        if components[-1] >= update.rank:
            raise PlanError(f"component {components[-1]} of {name!r} does not exist; it has rank {update.rank}")
        found[update] = np.array(components)
    return found


# optimizers


def optimizers_of(net: nn.Module, given: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """The optimizers that were passed; each must train something of the network."""
    several = [] if given is None else [given] if isinstance(given, Optimizer) else list(given)
    own = set(net.parameters())
    for optimizer in several:
        if own.isdisjoint(p for group in optimizer.param_groups for p in group["params"]):
            raise PruneError(
                f"the {type(optimizer).__name__} trains no parameter of this network; pass the one that does"
            )
    return several


def check_optimizers(optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> None:
    """Refuse state that is not laid out like its parameter: it could not be cut with it."""
    chosen = set(parameters)
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise PruneError(
                "LBFGS keeps one state for all parameters, which cannot be cut; make a new one after pruning"
            )
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if parameter in chosen else ():
                if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                    raise PruneError(
                        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a parameter of "
                        f"shape {tuple(parameter.shape)}, which cannot be cut with it; make a new one after pruning"
                    )


def cut_optimizers_(optimizers: Iterable[Optimizer], sliced: Mapping[Tensor, tuple[Tensor, Indices]]) -> None:
    """Cut the state of every parameter that was cut."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [sliced[p][0] if p in sliced else p for p in group["params"]]
        for parameter in [p for p in optimizer.state if p in sliced]:  # a list: the state changes below
            new, indices = sliced[parameter]
            state = optimizer.state.pop(parameter)
            optimizer.state[new] = {
                # step counters have no axes
                key: cut(value, indices) if isinstance(value, Tensor) and value.dim() else value
                for key, value in state.items()
            }
