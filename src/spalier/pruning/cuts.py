"""Cut tensors, adapters and optimizer state down to what is left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spalier.adapters.attachment import Attachment, Changes, Owner
from spalier.adapters.kinds import LowRank, Update
from spalier.errors import PlanError, PruneError
from spalier.pruning.plan import Kept
from spalier.structure.labels import Ints
from spalier.structure.structure import Structure

Indices = tuple[Ints | None, ...]
"""For each axis, the indices that stay; None where all do."""


def cut(tensor: Tensor, indices: Indices) -> Tensor:
    """What is left of a tensor, in its own memory and layout."""
    out = tensor
    for axis, index in enumerate(indices):
        if index is not None:
            out = out.index_select(axis, torch.from_numpy(index).to(out.device))
    if (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    ):
        out = out.contiguous(memory_format=torch.channels_last)
    return out


def cuts_of(structure: Structure, before: Kept, after: Kept) -> dict[str, Indices]:
    """For each tensor that loses something, the indices that stay, counted in the tensor as it is now."""
    found: dict[str, Indices] = {}
    for name in dict.fromkeys(tensor for tensor, _ in structure.axes):
        masks = zip(before.of(structure, name), after.of(structure, name), strict=True)
        indices = tuple(None if left[was].all() else np.flatnonzero(left[was]) for was, left in masks)
        if any(index is not None for index in indices):
            found[name] = indices
    return found


class Cutter:
    """Cuts the tensors of a network, and remembers what it did."""

    def __init__(self, attachment: Attachment | None, changes: Changes) -> None:
        self.changes = changes
        self.sliced: dict[Tensor, tuple[Tensor, Indices]] = {}
        """Each parameter that was cut: what it was, and the indices that stayed."""
        self._attachment = attachment
        self._copies = set() if attachment is None else {id(entry.copy) for entry in attachment.replaced}
        self._cut_updates: set[Update] = set()

    def cut_(self, owners: Sequence[Owner], indices: Indices) -> None:
        """Cut one tensor wherever it sits, and the update of it."""
        tensor = owners[0].tensor
        self._cut_updates_of(owners, tensor, indices)
        small = self._cut(tensor.detach(), indices)
        if isinstance(tensor, nn.Parameter) and (self._attachment is None or id(tensor) in self._copies):
            self._shrink_(tensor, small, indices)
            return
        new: Tensor = nn.Parameter(small, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else small
        self.sliced[tensor] = (new, indices)
        for owner in owners:
            self.changes.set_(owner.module, owner.place, owner.key, new)

    def cut_ranks_(self, components: Mapping[LowRank, Ints]) -> None:
        """Cut the bottlenecks of these updates down to the components that stay."""
        for update, kept in components.items():
            for factor, indices in update.rank_cuts(kept):
                self._shrink_(factor, self._cut(factor.detach(), indices), indices)

    def _cut(self, tensor: Tensor, indices: Indices) -> Tensor:
        return cut(tensor, indices)

    def _shrink_(self, parameter: nn.Parameter, small: Tensor, indices: Indices) -> None:
        """Keep the parameter itself, so that whoever trains it goes on with it."""
        before = self.sliced[parameter][1] if parameter in self.sliced else ()
        self.sliced[parameter] = (parameter, _merged(before, indices))
        grad = parameter.grad
        self.changes.set_values_(parameter, small)
        if grad is not None:
            parameter.grad = cut(grad, indices)

    def _cut_updates_of(self, owners: Sequence[Owner], weight: Tensor, indices: Indices) -> None:
        for owner in owners:
            update = owner.update
            if update is not None and update not in self._cut_updates:
                self._cut_updates.add(update)
                self._cut_update_(update, tuple(weight.shape), indices)

    def _cut_update_(self, update: Update, shape: tuple[int, ...], indices: Indices) -> None:
        first, second = (
            np.arange(n) if i is None else i for n, i in zip(shape[:2], indices[:2], strict=True)
        )
        geometry, outputs, inputs = update.geometry.cut(first, second)
        for parameter, kept in update.cuts(outputs, inputs):
            self._shrink_(parameter, self._cut(parameter.detach(), kept), kept)
        for key, value in update.narrowed(geometry, outputs, inputs).items():
            place = "_buffers" if isinstance(value, Tensor) else ""
            self.changes.set_(update, place, key, value)


def _merged(first: Indices, second: Indices) -> Indices:
    """Two cuts of one tensor, of different axes: its components and its channels."""
    pairs = zip_longest(first, second)
    return tuple(b if a is None else a if b is None else a[b] for a, b in pairs)


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
            raise PlanError(
                f"component {components[-1]} of {name!r} does not exist; it has rank {update.rank}"
            )
        found[update] = np.array(components)
    return found


def optimizers_of(net: nn.Module, given: object) -> list[Optimizer]:
    """The optimizers that were passed; each must train something of the network."""
    several = [given] if isinstance(given, Optimizer) else given if isinstance(given, list | tuple) else None
    if given is None:
        return []
    if several is None or not all(isinstance(each, Optimizer) for each in several):
        raise PruneError(
            f"optimizer is a {type(given).__name__}, expected a torch.optim.Optimizer or a list of them"
        )
    own = set(net.parameters())
    for optimizer in several:
        if own.isdisjoint(p for group in optimizer.param_groups for p in group["params"]):
            raise PruneError(
                f"the {type(optimizer).__name__} trains no parameter of this network; pass the one that does"
            )
    return list(several)


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


def cut_optimizers_(optimizers: Iterable[Optimizer], sliced: dict[Tensor, tuple[Tensor, Indices]]) -> None:
    """Cut the state of every parameter that was cut."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [sliced[p][0] if p in sliced else p for p in group["params"]]
        for parameter in [p for p in optimizer.state if p in sliced]:
            new, indices = sliced[parameter]
            state = optimizer.state.pop(parameter)
            optimizer.state[new] = {
                key: cut(value, indices) if isinstance(value, Tensor) and value.dim() else value
                for key, value in state.items()
            }
