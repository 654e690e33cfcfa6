"""From an adapted network to a task: which units it has left, and all that it has learned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spalier.adapters.attach import check_finite
from spalier.adapters.attachment import Attachment, Owner, attachment_of, moved, owners_of, update_of
from spalier.adapters.calls import CALLS
from spalier.adapters.geometry import first_names, is_finite, is_norm, tensors_of
from spalier.adapters.kinds import ByLayer, Coded, LowRank, Pointwise, Stored, Update
from spalier.budget import Meter
from spalier.errors import AttachmentError, ConfigError, NonFiniteError, PlanError
from spalier.pruning.modules import resized_by_tensors
from spalier.pruning.plan import PRUNED_MARK, Kept, kept_of
from spalier.pruning.prune import cut
from spalier.structure.graph import arguments
from spalier.structure.structure import Structure
from spalier.tasks import rows as kinds
from spalier.tasks.dry_run import described_inputs
from spalier.tasks.format import DTYPES, Density, Fingerprint, architecture_digest, values_digest
from spalier.tasks.numbers import assembled, joined
from spalier.tasks.rows import Ints, Placement, Row, Source
from spalier.tasks.table import Table, Writer
from spalier.tasks.task import Task, TaskInfo

_MAX_NUMEL = 4096
"""Larger tensors of integers are no counters but other state, which a task file is not made for."""


def extract(net: nn.Module, structure: Structure | None, name: str, said: Mapping[str, Any]) -> Task:
    """The task that an adapted network has learned; ``said`` are the fields of its `TaskInfo` that users give."""
    attachment = attachment_of(net)
    attachment.check_present(whole=True)
    check_finite(net)
    if structure is not None and not isinstance(structure, Structure):
        raise ConfigError(f"structure is a {type(structure).__name__}, expected what trace returns")
    structure = structure or attachment.structure
    owners = owners_of(net, first_names(tensors_of(net)))
    if structure is None and attachment.task is not None:
        # a task that was applied and trained on: the same table and masks, other numbers
        task: Task = attachment.task
        info = replace(task.info, name=name, storage="exact", **said)
        made = replace(task.table, rows=tuple(_as_it_is(row, owners) for row in task.table.rows))
        return replace(task, info=info, table=made, **_numbers(made.rows, owners))
    if PRUNED_MARK in net.__dict__ and structure is None:
        raise PlanError("the network is pruned, and its structure is not known; pass structure= as for prune_")
    return _Extractor(net, attachment, structure, owners).task(name, said)


def check_savable(net: nn.Module, structure: Structure | None) -> None:
    """Refuse what no task file could hold of a network that was just adapted, however it is pruned and trained.

    Adapters of one's own are no part of the format, and nobody has to save them.
    """
    owners = owners_of(net, first_names(tensors_of(net)))
    extractor = _Extractor(net, attachment_of(net), structure, owners)
    extractor.writers = [] if structure is None else list(structure.writers)  # all, so the longest table
    known = [n for n in owners if (u := update_of(owners[n])) is None or source_of(u, 1) is not None]
    extractor.table(known).to_bytes()


def _as_it_is(row: Row, owners: Mapping[str, list[Owner]]) -> Row:
    """The row with its adapter's present rank and levels: bytes have become numbers again, components may have gone."""
    update = update_of(owners[row.names[0]])
    if isinstance(row.source, str) or update is None:
        return row
    source = source_of(update, row.source.groups)
    return row if source == row.source else replace(row, source=source or row.source)


def _numbers(rows: Sequence[Row], owners: Mapping[str, list[Owner]]) -> dict[str, Any]:
    """All that was learned, in the order of the rows."""
    adapters: list[Stored] = []
    values: list[Tensor] = []
    integers: list[int] = []
    for row in rows:
        for name in row.names:
            tensor, update = owners[name][0].tensor, update_of(owners[name])
            if row.source == "values":
                values.append(tensor.detach().flatten().cpu())
            elif row.source == "integers":
                integers += [int(n) for n in tensor.flatten().tolist()]
            elif update is not None:
                adapters += update.stored()
    return {**assembled(adapters), "values": joined(values), "integers": tuple(integers)}


@dataclass
class _Extractor:
    """Looks at each tensor of an adapted network: is it the base's, cut, adapted, or the task's own?"""

    net: nn.Module
    attachment: Attachment
    structure: Structure | None
    owners: Mapping[str, list[Owner]]

    def __post_init__(self) -> None:
        structure = self.structure
        self.kept = Kept((), {}) if structure is None else kept_of(self.net, structure)
        self.bases = base_tensors(self.attachment, self.owners)
        writers = () if structure is None else structure.writers
        self.writers = [w for w in writers if w.name in self.kept.writers]
        """Free writers that have fewer units than their stream."""
        self.learned = {id(entry.copy) for entry in self.attachment.replaced if isinstance(entry.copy, nn.Parameter)}
        """Parameters that learn in copies of the base's."""
        self.placements: dict[tuple[int, bytes], Placement] = {}
        self.attributes = (self.net.__dict__.get(PRUNED_MARK) or {}).get("attributes", {})
        """The base's values of attributes that pruning has changed, by module."""

    def task(self, name: str, said: Mapping[str, Any]) -> Task:
        attachment = self.attachment
        made = self.table(self.owners)
        masks = [*self.kept.streams, *(self.kept.writers[w.name] for w in self.writers)]
        ties = first_names(tensors_of(self.net))
        base = Fingerprint(
            architecture_digest(attachment.modules, ties, attachment.heads),
            values_digest({n: self.bases[n] for n in self.owners if n not in made.not_compared}),
        )
        numbers = _numbers(made.rows, self.owners)
        tensors = [owners[0].tensor for owners in self.owners.values()]
        updates = {id(u): u for owners in self.owners.values() if (u := update_of(owners)) is not None}
        learned = sum(p.numel() for u in updates.values() for p in u.parameters())
        learned += sum(t.numel() for t in tensors if id(t) in self.learned)
        example = None if self.structure is None else self.structure.example
        inputs = {} if example is None else described_inputs(*arguments(example))
        density = self._density(tensors)
        info = TaskInfo(name, settings_of(attachment.adapter), base, density, learned, inputs=inputs, **said)
        return Task(info, made, masks, **numbers)

    def table(self, names: Iterable[str]) -> Table:
        """Where the values of these tensors come from."""
        structure = self.structure
        return Table(
            () if structure is None else tuple((s.name, s.size) for s in structure.streams),
            tuple(Writer(w.name, w.stream, w.module, w.axis) for w in self.writers),
            grouped([row for name in names if (row := self._row(name)) is not None]),
            self._sizes(),
            self.attachment.heads,
            () if structure is None else structure.folds,
            {path: m.__dict__[CALLS] for path, m in self.net.named_modules() if CALLS in m.__dict__},
        )

    def _row(self, name: str) -> Row | None:
        """A row for a tensor, unless it is the base's as it is."""
        tensor, update = self.owners[name][0].tensor, update_of(self.owners[name])
        axes = self._axes(name, tensor)
        source: Source = "base"
        if update is not None:
            source = self._adapted(name, update)
        elif self._is_own(name, tensor):
            source = "values" if tensor.is_floating_point() else "integers"
            self._check_own(name, tensor, is_cut=any(axes))
        elif not any(axes):
            return None
        shape = tuple(tensor.shape) if self.structure is None else self.structure.shapes[name]
        path, _, key = name.rpartition(".")
        return Row(path, (key,), shape, axes, source)

    def _is_own(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor is the task's own: it learns, or it is a buffer that has changed."""
        if isinstance(tensor, nn.Parameter):
            return id(tensor) in self.learned
        if name.rpartition(".")[0] in self.attachment.heads:
            return True
        if is_norm(self.owners[name][0].module) and (tensor.is_floating_point() or not tensor.dim()):
            return True  # statistics, and how many batches they are of
        base = self.bases[name]
        if self.structure is not None:
            masks = self.kept.of(self.structure, name)
            base = cut(base, tuple(None if m.all() else np.flatnonzero(m) for m in masks))
        return not torch.equal(tensor, base.to(tensor.device))

    def _check_own(self, name: str, tensor: Tensor, *, is_cut: bool) -> None:
        learns = isinstance(tensor, nn.Parameter)
        if tensor.dtype not in DTYPES.values() and (learns or tensor.is_floating_point()):
            raise AttachmentError(
                f"{name} ({tensor.dtype}) is the task's own, and a task file cannot hold it; expected float16, "
                "bfloat16, float32 or float64: convert it, or let it stay frozen (targets=, norms=)"
            )
        if tensor.is_floating_point():
            if not is_finite(tensor):
                raise NonFiniteError(f"{name} has changed since attach_, and holds NaN or infinite values")
            return
        is_resized = is_cut or tensor.shape != self.bases[name].shape
        if is_resized or tensor.numel() > _MAX_NUMEL or tensor.is_complex():
            raise AttachmentError(
                f"{name} ({tensor.dtype}) has changed since attach_, and a task file cannot hold it; expected few "
                "integers: keep such state outside of the network"
            )

    def _adapted(self, name: str, update: Update) -> Source:
        found = source_of(update, base_groups(self.net, self.owners[name][0].module, name))
        if found is None:
            raise AttachmentError(
                f"the adapter of {name} is a {type(update).__name__}, which the task format does not know; fuse the "
                "network and save that instead"
            )
        return found

    def _axes(self, name: str, tensor: Tensor) -> tuple[tuple[Placement, ...], ...]:
        """The masks on each axis of a tensor."""
        structure = self.structure
        if structure is None:
            return ((),) * tensor.dim()
        found = []
        for axis in range(len(structure.shapes[name])):
            placed = [self._placement(stream, units) for stream, units in structure.axes.get((name, axis), ())]
            for number, writer in enumerate(self.writers, start=len(structure.streams)):
                if (name, axis) in writer.members:
                    placed.append(Placement(number))
            found.append(tuple(placed))
        return tuple(found)

    def _placement(self, stream: int, units: Ints) -> Placement:
        """A stream's mask on an axis; many axes have it alike."""
        key = (stream, units.tobytes())
        if key not in self.placements:
            assert self.structure is not None
            is_plain = np.array_equal(units, np.arange(self.structure.streams[stream].size))
            self.placements[key] = Placement(stream) if is_plain else Placement.of(stream, units)
        return self.placements[key]

    def _sizes(self) -> dict[str, dict[str, int | tuple[int, ...]]]:
        """Sizes that a module's code holds and its tensors do not tell, by path."""
        modules = dict(self.net.named_modules())
        found: dict[str, dict[str, int | tuple[int, ...]]] = {}
        for path, values in self.attributes.items():
            module = modules[path]
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder):
                continue  # building closes their fast paths by itself
            if isinstance(module, nn.MultiheadAttention):
                found[path] = {"num_heads": module.num_heads}
            elif resized_by_tensors(module, {}) is None:
                found[path] = {key: module.__dict__[key] for key in values}
        return found

    def _density(self, tensors: Sequence[Tensor]) -> Density:
        if self.structure is not None:
            return Density(**Meter(self.net, self.structure).densities())
        total = sum(tensor.numel() for tensor in tensors if isinstance(tensor, nn.Parameter))
        return Density(None, (total, total), None)


def base_groups(net: nn.Module, module: nn.Module, name: str) -> int:
    """How many groups the layer of a weight has in the base."""
    noted = (net.__dict__.get(PRUNED_MARK) or {}).get("attributes", {}).get(name.rpartition(".")[0], {})
    return int(noted.get("groups", getattr(module, "groups", 1)))


def source_of(update: Update, groups: int) -> Source | None:
    """Where the numbers of a weight with this update come from; None for kinds that the format does not know."""
    inputs_first = update.geometry.inputs_first
    if type(update) is LowRank:
        taps = math.prod(update.down.shape[2:])
        return kinds.LowRank(update.rank, taps, groups, inputs_first, update.stays_whole, update.levels)
    if type(update) is Pointwise:
        return kinds.Pointwise(groups, inputs_first)
    if type(update) is Coded:
        return kinds.Delta(update.levels, update.by_row, groups, inputs_first)
    return None


def base_tensors(attachment: Attachment, owners: Mapping[str, list[Owner]]) -> dict[str, Tensor]:
    """Every tensor of the base, as it was before it was adapted and pruned."""
    # in reverse, so that the first of several changes of a tensor counts
    before = {(id(m), place, key): value for m, place, key, value in reversed(attachment.pruned.entries)}
    before |= {(id(e.module), e.kind, e.key): e.moved_original() for e in attachment.replaced}
    found = {}
    for name, (owner, *_) in owners.items():
        found[name] = moved(before.get((id(owner.module), owner.place, owner.key), owner.tensor), owner.tensor)
    return found


def grouped(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Tensors of a module that follow each other and are alike share a row."""
    found: list[Row] = []
    for row in rows:
        if found and isinstance(row.source, str) and _key(found[-1]) == _key(row):
            found[-1] = replace(found[-1], keys=found[-1].keys + row.keys)
        else:
            found.append(row)
    return tuple(found)


def _key(row: Row) -> tuple[Any, ...]:
    axes = [[(p.mask, p.runs, None if p.units is None else p.units.tolist()) for p in placed] for placed in row.axes]
    return row.path, row.shape, row.source, axes


def settings_of(adapter: Any) -> dict[str, Any]:
    """An adapter as the description has it: its kind, and its settings."""
    is_plain = dataclasses.is_dataclass(adapter) and not isinstance(adapter, ByLayer)  # the table has all of that
    settings = vars(adapter) if is_plain else {}
    return {"kind": type(adapter).__name__, **settings}
