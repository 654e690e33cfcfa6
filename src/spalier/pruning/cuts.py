"""Cut tensors, adapters and optimizer state down to what is left.

Parameters that learn stay the same objects with other values, so optimizers, and whoever else holds them, go on with
them. Frozen base tensors give way to new ones and are left untouched, so `detach_` can give the whole base back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spalier.adapters.attachment import Attachment, Changes, Owner, fused_value
from spalier.adapters.geometry import Geometry
from spalier.adapters.kinds import LowRank, Update
from spalier.errors import PlanError, PruneError
from spalier.pruning.plan import Kept
from spalier.structure.labels import Ints
from spalier.structure.structure import Structure

Indices = tuple[Ints | None, ...]
"""For each axis, the indices that stay; None where all do."""


@dataclass(frozen=True, eq=False)
class Reduction:
    """A network, what it has left of its base, and what it is to have left."""

    net: nn.Module
    structure: Structure
    owners: Mapping[str, list[Owner]]
    before: Kept
    left: Kept

    @cached_property
    def cuts(self) -> dict[str, Indices]:
        """For each tensor that loses something, the indices that stay, counted in the tensor as it is now."""
        return cuts_of(self.structure, self.before, self.left)

    def value(self, name: str) -> Tensor:
        """A tensor as the network computes with it: its adapter is fused."""
        return fused_value(self.owners, name)


def cuts_of(structure: Structure, before: Kept, left: Kept) -> dict[str, Indices]:
    """For each tensor that loses something, the indices that stay, counted in the tensor as it was before."""
    found: dict[str, Indices] = {}
    for name in dict.fromkeys(tensor for tensor, _ in structure.axes):
        masks = zip(before.of(structure, name), left.of(structure, name), strict=True)
        indices = tuple(None if stays[was].all() else np.flatnonzero(stays[was]) for was, stays in masks)
        if any(index is not None for index in indices):
            found[name] = indices
    return found


def cut(tensor: Tensor, indices: Indices) -> Tensor:
    """What is left of a tensor, in its own memory and layout."""
    out = tensor
    for axis, index in enumerate(indices):
        if index is not None:
            out = out.index_select(axis, torch.from_numpy(index).to(out.device))
    layout = torch.channels_last
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
        small = self._cut(tensor.detach(), indices)
        # a copy that learns, or any parameter of a network without adapters, stays the same object
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
        """Give a parameter other values, and its gradient with it."""
        before = self.sliced[parameter][1] if parameter in self.sliced else ()
        # a factor may be cut twice, along different axes: its components, and its channels
        merged = tuple(b if a is None else a if b is None else a[b] for a, b in zip_longest(before, indices))
        self.sliced[parameter] = (parameter, merged)
        grad = parameter.grad
        self.changes.set_values_(parameter, small)
        if grad is not None:
            parameter.grad = cut(grad, indices)

    def _cut_update_(self, update: Update, shape: Sequence[int], indices: Indices) -> None:
        geometry, outputs, inputs = cut_geometry(update, shape, indices)
        for parameter, kept in update.cuts(outputs, inputs):
            self._shrink_(parameter, self._cut(parameter.detach(), kept), kept)
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
            raise PlanError(
                f"component {components[-1]} of {name!r} does not exist; it has rank {update.rank}"
            )
        found[update] = np.array(components)
    return found


# optimizers


def optimizers_of(net: nn.Module, given: object) -> list[Optimizer]:
    """The optimizers that were passed; each must train something of the network."""
    several: list[Any] = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    own = set(net.parameters())
    for optimizer in several:
        if not isinstance(optimizer, Optimizer):
            raise PruneError(
                f"optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer or a list of them"
            )
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
        for parameter in [p for p in optimizer.state if p in sliced]:
            new, indices = sliced[parameter]
            state = optimizer.state.pop(parameter)
            optimizer.state[new] = {
                key: cut(value, indices) if isinstance(value, Tensor) and value.dim() else value
                for key, value in state.items()
            }
