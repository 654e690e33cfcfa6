"""A task back on its base, in place: the adapted network that it was made of, to go on training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from spalier.adapters.attach import attach_, detach_
from spalier.adapters.attachment import Changes, attachment_of, owners_of
from spalier.adapters.forward import updates
from spalier.adapters.geometry import is_norm
from spalier.adapters.kinds import ADAPTERS, FineTune
from spalier.errors import SpalierError, TaskFileError
from spalier.pruning.cuts import Cutter
from spalier.pruning.modules import set_spread_
from spalier.pruning.plan import MARK
from spalier.tasks.base import Base
from spalier.tasks.build import check_base, sizes_left
from spalier.tasks.description import Learned, matrices
from spalier.tasks.table import Integers, Values

if TYPE_CHECKING:
    from spalier.structure.structure import Structure


def apply_(task: Learned, net: nn.Module, example: Any) -> None:
    """Attach, cut, and put in what was learned; on any error the base is as it was."""
    with torch.inference_mode(False):  # what learns has to be an ordinary tensor
        _apply_(task, net, example)


def _apply_(task: Learned, net: nn.Module, example: Any) -> None:
    base = Base(net)
    check_base(task, base)
    adapter = _adapter(task)
    structure = None if example is None else _traced(task, base, example)
    heads = list(task.table.heads)
    learned = _owners(
        base, {n for row in task.table.rows if isinstance(row.source, Values) for n in row.names}
    )
    learned -= set(heads)
    chosen = _owners(base, {name for row, cut in task.pieces if cut.matrices for name in row.names})
    if isinstance(adapter, FineTune):  # norms are among what was chosen, by whichever option
        chosen, learned = learned, set()
    try:
        attach_(
            net,
            adapter,
            targets=lambda name, module: name in chosen,
            head=heads or None,
            norms=any(is_norm(base.modules[path]) for path in learned if path in base.modules),
        )
    except SpalierError as error:
        raise TaskFileError("base", f"the task's adapters do not fit the base: {error}") from error
    changes = Changes()
    try:
        _fill_(task, net, base, changes, structure)
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
        name.rpartition(".")[0]
        for name, first in base.ties.items()
        if first in names and base.flags[first] is not None
    }


def _adapter(task: Learned) -> Any:
    settings, kinds = dict(task.description.adapter), {kind.__name__: kind for kind in ADAPTERS.values()}
    kind = kinds.get(settings.pop("kind"))
    known = set() if kind is None else {f.name for f in dataclasses.fields(kind)}
    try:
        if kind is None or not set(settings) <= known:
            raise ValueError(f"expected one of {', '.join(kinds)} and its settings")
        return kind(**settings)
    except (SpalierError, TypeError, ValueError) as error:
        raise TaskFileError("metadata", f"the adapter cannot be made again: {error}") from error


def _traced(task: Learned, base: Base, example: Any) -> Structure:
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
    if tuple((s.name, s.size) for s in structure.streams) != task.table.streams:
        raise TaskFileError("base", "the base's streams are not those that the task was pruned with")
    return structure


@torch.no_grad()
def _fill_(task: Learned, net: nn.Module, base: Base, changes: Changes, structure: Structure | None) -> None:
    owners = owners_of(net, base.ties)
    cutter = Cutter(attachment_of(net), changes)
    factors, values = matrices(task.adapter_values(), task.adapter_rows), _taken(task)
    for row, cut in task.pieces:
        for name in row.names:
            places = owners[name]
            if isinstance(row.source, Values | Integers):
                _put_(changes, places, next(values))
                continue
            if not cut.is_whole:
                cutter.cut_(places, cut.indices)
            update = next((u for o in places if (u := updates(o.module).get(o.key)) is not None), None)
            if update is not None:
                for parameter in update.parameters():
                    _set_values_(changes, parameter, next(factors))
    _follow_(task, net, changes, structure)


def _set_values_(changes: Changes, parameter: nn.Parameter, factor: Tensor) -> None:
    shape = (len(factor), factor[0].numel() // max(1, parameter[0, 0].numel()), *parameter.shape[2:])
    new = factor.to(parameter.device, parameter.dtype, copy=True).reshape(shape)
    changes.set_values_(parameter, new)


def _taken(task: Learned) -> Iterator[Tensor]:
    """The task's own tensors, in the order of the table."""
    values, integers = task.values, torch.tensor(task.integers, dtype=torch.int64, device="cpu")
    for row, cut in task.pieces:
        size = math.prod(cut.shape)
        for _ in row.names:
            if isinstance(row.source, Values):
                part, values = values[:size], values[size:]
                yield part.view(cut.shape)
            elif isinstance(row.source, Integers):
                part, integers = integers[:size], integers[size:]
                yield part.view(cut.shape)


def _put_(changes: Changes, places: Any, value: Tensor) -> None:
    """Let a learned tensor hold these values, wherever it sits."""
    current: Tensor = getattr(places[0].module, places[0].place)[places[0].key]
    new = value.to(current.device, current.dtype, copy=True)
    if isinstance(current, nn.Parameter):
        changes.set_values_(current, new)
        return
    for owner in places:
        changes.set_(owner.module, owner.place, owner.key, new)


def _follow_(task: Learned, net: nn.Module, changes: Changes, structure: Structure | None) -> None:
    """Attributes, gathers, and the record of what is left."""
    modules = dict(net.named_modules())
    before: dict[str, dict[str, Any]] = {}
    for path, values in sizes_left(task, modules).items():
        for key, value in values.items():
            old = modules[path].__dict__.get(key)
            if old != value:
                if isinstance(value, int | tuple) and old is not None and path not in task.table.heads:
                    before.setdefault(path, {})[key] = old
                changes.set_(modules[path], "", key, value)
    streams = len(task.table.streams)
    for number, writer in enumerate(task.table.writers, start=streams):
        own = task.masks[number][task.masks[writer.stream]]
        set_spread_(changes, modules[writer.module], own, writer.axis)
    if all(mask.all() for mask in task.masks):
        return
    named = [*(name for name, _ in task.table.streams), *(w.name for w in task.table.writers)]
    units = [np.flatnonzero(mask).tolist() for mask in task.masks]
    kept = {
        "fingerprint": "" if structure is None else structure.fingerprint,
        "streams": dict(zip(named[:streams], units[:streams], strict=True)),
        "writers": dict(zip(named[streams:], units[streams:], strict=True)),
        "attributes": before,
    }
    changes.set_(net, "", MARK, kept)
