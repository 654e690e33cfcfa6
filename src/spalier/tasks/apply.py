"""A task back on its base, in place: the adapted network that it was made of, to go on training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from spalier.adapters import kinds
from spalier.adapters.attach import attach_with_, detach_
from spalier.adapters.attachment import Changes, Owner, attachment_of, owners_of, update_of
from spalier.adapters.codes import LEVELS
from spalier.adapters.geometry import Geometry
from spalier.errors import SpalierError, TaskFileError
from spalier.pruning.modules import set_spread_
from spalier.pruning.plan import PRUNED_MARK
from spalier.pruning.prune import Cutter
from spalier.tasks import rows
from spalier.tasks.base import Base
from spalier.tasks.build import check_base, resized_attributes
from spalier.tasks.format import quoted
from spalier.tasks.numbers import as_numbers
from spalier.tasks.task import Task, own_tensors

if TYPE_CHECKING:
    from spalier.structure.structure import Structure


def apply_(task: Task, net: nn.Module, example: Any) -> None:
    """Attach, cut, and put in what was learned; on any error the base is as it was."""
    base = Base(net)
    check_base(task, base)
    apply_to_(task, base, None if example is None else _traced(task, base, example))


@torch.inference_mode(False)  # what learns has to be an ordinary tensor
def apply_to_(task: Task, base: Base, structure: Structure | None) -> None:
    """The same where the base is known to be the task's, and its structure may be known too."""
    net = base.net
    adapter = _adapter(task)  # whatever may fail comes before the base is changed
    _check_described(task, adapter, base)
    heads, own = list(task.table.heads), [row for row in task.table.rows if row.source == "values"]
    learned = _owners(base, {name for row in own for name in row.names}) - set(heads)
    chosen = _owners(base, {name for row, cut in task.cut_rows if cut.matrices for name in row.names})
    also = {name for row in own if row.path not in heads for name in row.names}
    if isinstance(adapter, kinds.FineTune):  # norms are among what was chosen, by whichever option
        chosen, learned, also = learned, set(), set()
    try:
        attach_with_(
            net,
            adapter,
            targets=lambda name, module: name in chosen,
            head=heads or None,
            norms=False,  # those that learn are among what follows; others may be the base's
            also={name for name in also if base.flags.get(name) is not None},
        )
    except SpalierError as error:
        raise TaskFileError("base", f"the task's adapters do not fit the base: {error}") from error
    changes = Changes()
    try:
        _fill_(task, net, base, changes)
        _resize_(task, net, changes, structure)
    except BaseException:
        changes.undo_()
        detach_(net)
        raise
    attachment = attachment_of(net)
    attachment.pruned.keep_(changes)
    attachment.structure = structure
    attachment.task = task


def _owners(base: Base, names: set[str]) -> set[str]:
    """The modules that hold any of these parameters, also those that share one with another."""
    return {
        name.rpartition(".")[0] for name, first in base.ties.items() if first in names and base.flags[first] is not None
    }


def _adapter(task: Task) -> Any:
    if task.info.adapter == {"kind": kinds.ByLayer.__name__}:
        made = {row.names[0]: _of_source(row.source) for row in task.table.rows}
        return kinds.ByLayer({name: adapter for name, adapter in made.items() if adapter is not None})
    settings, known = dict(task.info.adapter), {kind.__name__: kind for kind in kinds.ADAPTERS.values()}
    kind = known.get(settings.pop("kind"))
    options = set() if kind is None else {f.name for f in dataclasses.fields(kind)}
    try:
        if kind is None or not set(settings) <= options:
            raise ValueError(f"expected one of {', '.join(known)} and its settings")
        return kind(**settings)
    except (SpalierError, TypeError, ValueError) as error:
        raise TaskFileError("metadata", f"the adapter cannot be made again: {error}") from error


def _check_described(task: Task, adapter: Any, base: Base) -> None:
    """Whether the adapter that the file describes builds what its table has."""
    for row, cut in task.cut_rows if not isinstance(adapter, kinds.ByLayer) else ():
        found = _of_source(row.source)
        if found is None:
            continue
        is_same, geometry = type(found) is type(adapter), base.geometry(row.names[0])
        if is_same and isinstance(found, kinds.SPLoRA):
            is_same = found.kernel == adapter.kernel or math.prod(geometry.kernel) == 1
            usable = min(geometry.inputs * math.prod(geometry.kernel), geometry.outputs)
            is_same = is_same and _rank_of(adapter, geometry) <= max(found.rank, _MAX_RANK, usable)
        elif is_same and isinstance(found, kinds.SPDelta):
            # where one row is left, it has one scale either way
            is_same = found.by_row(geometry) == adapter.by_row(geometry) or cut.shape[0] == 1
            is_same = is_same and found.bits == adapter.bits
        if not is_same:
            raise TaskFileError("metadata", f"the adapter is said to be {adapter}, and {quoted(row.path)} has {found}")


_MAX_RANK = 1024
"""What rank a file may describe, though its table has a smaller one and the weight cannot use it.

Components may have been pruned, so more than the table has can be right; but memory is taken for what is described.
"""


def _rank_of(adapter: kinds.SPLoRA, geometry: Geometry) -> int:
    try:
        return adapter.fit(geometry).rank or 0
    except SpalierError as error:
        raise TaskFileError("metadata", f"the adapter does not fit: {error}") from error


_BITS = {levels: bits for bits, levels in LEVELS.items()}


def _of_source(source: rows.Source) -> Any:
    """The adapter that builds an update like this."""
    match source:
        case rows.LowRank():
            kind = kinds.LoRA if source.whole else kinds.SPLoRA
            return kind(rank=source.rank, kernel="full" if source.taps > 1 else "center")
        case rows.Delta():
            return kinds.SPDelta(bits=_BITS[source.levels], scales="row" if source.by_row else "layer")
        case rows.Pointwise():
            return kinds.SPPaRA()
    return None


def _traced(task: Task, base: Base, example: Any) -> Structure:
    from spalier.tracing import trace

    for row in task.table.rows:
        for name in row.names:
            if tuple(base.tensors[name].shape) != row.shape:
                raise TaskFileError(
                    "base",
                    f"to go on pruning, {name} of the base needs the task's shape {row.shape}; it has "
                    f"{tuple(base.tensors[name].shape)}: give it a head for the task's classes first",
                )
    structure = trace(base.net, example)
    # a task that was never traced has lost nothing
    if task.table.streams and tuple((s.name, s.size) for s in structure.streams) != task.table.streams:
        raise TaskFileError("base", "the base's streams are not those that the task was pruned with")
    return structure


@torch.no_grad()
def _fill_(task: Task, net: nn.Module, base: Base, changes: Changes) -> None:
    """Cut every tensor and its update, and give those that learn the task's numbers."""
    owners = owners_of(net, base.ties)
    cutter = Cutter(attachment_of(net), changes)
    stored = task.stored()
    values = own_tensors(task, "values", task.values)
    integers = own_tensors(task, "integers", torch.tensor(task.integers, dtype=torch.int64, device="cpu"))
    for row, cut in task.cut_rows:
        for name in row.names:
            places = owners[name]
            if row.source in ("values", "integers"):
                _put_(changes, places, next(values if row.source == "values" else integers))
                continue
            if not cut.is_whole:
                cutter.cut_(places, cut.indices)
            update = update_of(places)
            if update is not None:
                matrices = [next(stored) for _ in cut.matrices]
                # of 8-bit integers factors go on as numbers
                is_number = task.info.storage.startswith("int") and not isinstance(update, kinds.Coded)
                fill_(changes, update, list(map(as_numbers, matrices)) if is_number else matrices)


def fill_(changes: Changes, update: kinds.Update, stored: Sequence[kinds.Stored]) -> None:
    """Let an update hold what a task file has for it."""
    if isinstance(update, kinds.Coded):
        values, scale = _scaled(stored[0], update.delta)
        assert scale is not None
        changes.set_values_(update.delta, values.reshape(update.delta.shape))
        changes.set_values_(update.gain, torch.ones_like(scale))
        changes.set_(update, "_buffers", "scale", scale)
        return
    names = ("down_scale", "up_scale") if isinstance(update, kinds.LowRank) else ("",)
    for parameter, matrix, key in zip(update.parameters(), stored, names, strict=True):
        values, scale = _scaled(matrix, parameter)
        if scale is not None and key:  # other updates have no codes, so theirs go on as numbers
            changes.set_(update, "_buffers", key, scale)
            changes.set_(update, "", "levels", matrix.levels)
        # a factor may have another rank, or fewer channels, than the parameter has now
        taps = max(1, parameter[0, 0].numel())
        shape = len(values), values.shape[1] // taps, *parameter.shape[2:]
        changes.set_values_(parameter, values.reshape(shape))


def _scaled(matrix: kinds.Stored, like: nn.Parameter) -> tuple[Tensor, Tensor | None]:
    """The numbers that codes stand for, and their scales, which are not negative."""
    values = matrix.values.to(like.device, like.dtype, copy=True)
    if matrix.scale is None:
        return values, None
    scale = matrix.scale.to(like)
    return values * scale[:, None], scale.abs()


def _put_(changes: Changes, places: Sequence[Owner], value: Tensor) -> None:
    """Let a learned tensor hold these values, wherever it sits."""
    current = places[0].tensor
    new = value.to(current.device, current.dtype, copy=True)
    if isinstance(current, nn.Parameter):
        changes.set_values_(current, new)
        return
    for owner in places:
        changes.set_(owner.module, owner.place, owner.key, new)


def _resize_(task: Task, net: nn.Module, changes: Changes, structure: Structure | None) -> None:
    """Let attributes and gathers follow, and note which units are left."""
    modules, layers = dict(net.named_modules()), task.table
    before: dict[str, dict[str, Any]] = {}
    for path, values in resized_attributes(task, modules).items():
        for key, value in values.items():
            old = modules[path].__dict__.get(key)
            if old != value:
                if isinstance(value, int | tuple) and old is not None and path not in layers.heads:
                    before.setdefault(path, {})[key] = old
                changes.set_(modules[path], "", key, value)
    for writer, own in task.spreads:
        set_spread_(changes, modules[writer.module], own, writer.axis)
    if all(mask.all() for mask in task.masks):
        return
    units = [np.flatnonzero(mask).tolist() for mask in task.masks]
    kept = {
        "fingerprint": "" if structure is None else structure.fingerprint,
        "streams": {name: kept for (name, _), kept in zip(layers.streams, units, strict=False)},
        "writers": {w.name: kept for w, kept in zip(layers.writers, units[len(layers.streams) :], strict=True)},
        "attributes": before,
    }
    changes.set_(net, "", PRUNED_MARK, kept)
