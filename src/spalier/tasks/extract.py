"""From an adapted network to a task: which units it has left, and all that it has learned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spalier.adapters.attach import check_finite
from spalier.adapters.attachment import Attachment, Owner, attachment_of, moved, owners_of
from spalier.adapters.forward import updates
from spalier.adapters.geometry import first_names, is_finite, is_norm, tensors_of
from spalier.adapters.kinds import LowRank, Pointwise, Update
from spalier.budget import Meter
from spalier.errors import AttachmentError, ConfigError, NonFiniteError, PlanError
from spalier.pruning.attributes import resized_by_tensors
from spalier.pruning.cuts import cut
from spalier.pruning.plan import MARK, Kept, kept_of
from spalier.structure.structure import Structure
from spalier.tasks import fingerprint, table
from spalier.tasks.description import Density, Learned
from spalier.tasks.fingerprint import Fingerprint
from spalier.tasks.table import Integers, Mask, Placement, Row, Source, Table, Values, Writer


@dataclass
class Described:
    """All that makes a task of a network."""

    table: Table
    masks: list[Mask]
    adapters: Tensor
    values: Tensor
    integers: tuple[int, ...]
    base: Fingerprint
    density: Density
    learned: int
    adapter: dict[str, Any]


def describe(net: nn.Module, structure: Structure | None) -> Described:
    """What a task file has to hold of an adapted network."""
    attachment = attachment_of(net)
    attachment.check_present(whole=True)
    check_finite(net)
    if structure is not None and not isinstance(structure, Structure):
        raise ConfigError(f"structure is a {type(structure).__name__}, expected what trace returns")
    structure = structure or attachment.structure
    if structure is None and attachment.task is not None:
        return _again(net, attachment.task)
    if MARK in net.__dict__ and structure is None:
        raise PlanError(
            "the network is pruned, and its structure is not known; pass structure= as for prune_"
        )
    return _Describer(net, attachment, structure).described()


def _again(net: nn.Module, task: Learned) -> Described:
    """A task that was applied and trained on: the same table and masks, other numbers."""
    owners = owners_of(net, first_names(tensors_of(net)))
    adapters: list[Tensor] = []
    values: list[Tensor] = []
    integers: list[int] = []
    for row in task.table.rows:
        for name in row.names:
            owner = owners[name][0]
            tensor = owner.tensor
            if isinstance(row.source, Values):
                values.append(tensor.detach().flatten())
            elif isinstance(row.source, Integers):
                integers += [int(n) for n in tensor.flatten().tolist()]
            else:
                update = next(
                    (u for o in owners[name] if (u := updates(o.module).get(o.key)) is not None), None
                )
                adapters += [] if update is None else [p.detach().flatten() for p in update.parameters()]
    said = task.description
    return Described(
        task.table,
        task.masks,
        _flat(adapters),
        _flat(values),
        tuple(integers),
        said.base,
        said.density,
        said.learned,
        dict(said.adapter),
    )


@dataclass
class _Describer:
    net: nn.Module
    attachment: Attachment
    structure: Structure | None
    adapters: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    integers: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def described(self) -> Described:
        structure = self.structure
        self.kept = Kept((), {}) if structure is None else kept_of(self.net, structure)
        self.ties = first_names(tensors_of(self.net))
        self.owners = owners_of(self.net, self.ties)
        self.bases = _base_tensors(self.attachment, self.owners)
        self.writers = (
            [] if structure is None else [w for w in structure.writers if w.name in self.kept.writers]
        )
        self.learned_in = {
            id(entry.copy) for entry in self.attachment.replaced if isinstance(entry.copy, nn.Parameter)
        }
        for name in self.owners:
            self._add(name)
        streams = () if structure is None else tuple((s.name, s.size) for s in structure.streams)
        own = [self.kept.writers[w.name] for w in self.writers]
        heads = self.attachment.heads
        made = Table(
            streams,
            tuple(Writer(w.name, w.stream, w.module, w.axis) for w in self.writers),
            _grouped(self.rows),
            self._attributes(),
            heads,
            () if structure is None else structure.folds,
        )
        taken = {name: self.bases[name] for name in self.owners if name not in made.own}
        architecture = fingerprint.architecture(self.attachment.modules, self.ties, heads)
        learned = sum(t.numel() for t in self.adapters) + sum(
            self._current(n).numel() for n in self.owners if id(self._current(n)) in self.learned_in
        )
        return Described(
            made,
            [*self.kept.streams, *own],
            _flat(self.adapters),
            _flat(self.values),
            tuple(self.integers),
            Fingerprint(architecture, fingerprint.values(taken)),
            self._density(),
            learned,
            _adapter(self.attachment.adapter),
        )

    def _current(self, name: str) -> Tensor:
        return self.owners[name][0].tensor

    def _add(self, name: str) -> None:
        """A row for a tensor, unless it is the base's as it is."""
        tensor = self._current(name)
        update = next((u for o in self.owners[name] if (u := updates(o.module).get(o.key)) is not None), None)
        axes = self._axes(name)
        source: Source = table.Frozen()
        if update is not None:
            source = self._adapted(name, update)
            self.adapters += [p.detach().flatten() for p in update.parameters()]
        elif self._is_own(name, tensor):
            if tensor.is_floating_point():
                source = Values()
                if not is_finite(tensor):
                    raise NonFiniteError(
                        f"{name} has changed since attach_, and holds NaN or infinite values"
                    )
                self.values.append(tensor.detach().flatten())
            else:
                source = Integers()
                self.integers += self._numbers(name, tensor)
        elif not any(axes):
            return
        whole = tuple(tensor.shape) if self.structure is None else self.structure.shapes[name]
        path, _, key = name.rpartition(".")
        self.rows.append(Row(path, (key,), whole, axes, source))

    def _is_own(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor is the task's own: it learns, or it is a buffer that has changed."""
        if id(tensor) in self.learned_in:
            return True
        if isinstance(tensor, nn.Parameter):
            return False
        if is_norm(self.owners[name][0].module) or name.rpartition(".")[0] in self.attachment.heads:
            return True
        base = self.bases[name]
        if self.structure is not None:
            masks = self.kept.of(self.structure, name)
            base = cut(base, tuple(None if m.all() else np.flatnonzero(m) for m in masks))
        return not torch.equal(tensor, base.to(tensor.device))

    def _numbers(self, name: str, tensor: Tensor) -> list[int]:
        if (
            tensor.shape != self.bases[name].shape
            or tensor.numel() > 4096
            or tensor.is_complex()
            or any(self._axes(name))
        ):
            raise AttachmentError(
                f"{name} ({tensor.dtype}) has changed since attach_, and a task file cannot hold it; expected few "
                "whole numbers: keep such state outside of the network"
            )
        return [int(n) for n in tensor.flatten().tolist()]

    def _adapted(self, name: str, update: Update) -> Source:
        owner = self.owners[name][0]
        noted = (self.net.__dict__.get(MARK) or {}).get("attributes", {}).get(name.rpartition(".")[0], {})
        groups = noted.get("groups", getattr(owner.module, "groups", 1))  # as the base has them
        inputs_first = update.geometry.inputs_first
        if type(update) is LowRank:
            taps = math.prod(update.down.shape[2:])
            return table.LowRank(update.rank, taps, groups, inputs_first, update.stays_whole)
        if type(update) is Pointwise:
            return table.Pointwise(groups, inputs_first)
        raise AttachmentError(
            f"the adapter of {name} is a {type(update).__name__}, which the task format does not know; fuse the "
            "network and save that instead"
        )

    def _axes(self, name: str) -> tuple[tuple[Placement, ...], ...]:
        if self.structure is None:
            return ((),) * self._current(name).dim()
        found = []
        for axis in range(len(self.structure.shapes[name])):
            placed = [
                Placement(number, None if self._is_whole(number, units) else units)
                for number, units in self.structure.axes.get((name, axis), ())
            ]
            for number, writer in enumerate(self.writers, start=len(self.structure.streams)):
                if (name, axis) in writer.members:
                    placed.append(Placement(number))
            found.append(tuple(placed))
        return tuple(found)

    def _is_whole(self, stream: int, units: Any) -> bool:
        """Whether each index of an axis is the unit of the same number."""
        assert self.structure is not None
        return np.array_equal(units, np.arange(self.structure.streams[stream].size))

    def _attributes(self) -> dict[str, dict[str, int | tuple[int, ...]]]:
        """Sizes that a module's tensors do not tell."""
        noted = (self.net.__dict__.get(MARK) or {}).get("attributes", {})
        modules = dict(self.net.named_modules())
        found: dict[str, dict[str, int | tuple[int, ...]]] = {}
        for path, values in noted.items():
            module = modules[path]
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder):
                continue  # building closes their fast paths by itself
            if isinstance(module, nn.MultiheadAttention):
                found[path] = {"num_heads": module.num_heads}
            elif resized_by_tensors(module, {}) is None:
                found[path] = {key: module.__dict__[key] for key in values}
        return found

    def _density(self) -> Density:
        if self.structure is None:
            total = sum(
                self._current(n).numel() for n in self.owners if isinstance(self._current(n), nn.Parameter)
            )
            return Density(None, (total, total), None)
        return Density(**Meter(self.net, self.structure).densities())


def _base_tensors(attachment: Attachment, owners: Mapping[str, list[Owner]]) -> dict[str, Tensor]:
    """Every tensor of the base, as it was before it was adapted and pruned."""
    before = {(id(m), place, key): value for m, place, key, value in reversed(attachment.pruned.entries)}
    before |= {(id(e.module), e.kind, e.key): e.moved_original() for e in attachment.replaced}
    found = {}
    for name, several in owners.items():
        owner = several[0]
        current = owner.tensor
        found[name] = moved(before.get((id(owner.module), owner.place, owner.key), current), current)
    return found


def _grouped(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Tensors of a module that follow each other and are alike share a row."""
    found: list[Row] = []
    for row in rows:
        last = found[-1] if found else None
        if (
            last is not None
            and isinstance(row.source, Values | table.Frozen | Integers)
            and _alike(last, row)
        ):
            found[-1] = dataclasses.replace(last, keys=last.keys + row.keys)
        else:
            found.append(row)
    return tuple(found)


def _alike(one: Row, other: Row) -> bool:
    def coded(row: Row) -> list[Any]:
        return [[(p.mask, None if p.units is None else p.units.tolist()) for p in on] for on in row.axes]

    same = (one.path, one.shape, type(one.source)) == (other.path, other.shape, type(other.source))
    return same and coded(one) == coded(other)


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of all numbers, in the widest dtype that there is, so that none is changed."""
    if not parts:
        return torch.empty(0, device="cpu")
    dtype = parts[0].dtype
    for part in parts:
        dtype = torch.promote_types(dtype, part.dtype)
    return torch.cat([part.cpu().to(dtype) for part in parts])


def _adapter(adapter: Any) -> dict[str, Any]:
    fields = dataclasses.fields(adapter) if dataclasses.is_dataclass(adapter) else ()
    return {"kind": type(adapter).__name__, **{f.name: getattr(adapter, f.name) for f in fields}}
