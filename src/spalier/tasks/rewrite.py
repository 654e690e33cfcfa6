"""A task whose numbers come from other sources: learned in full before, and from an adapter or the base now."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spalier.adapters.attachment import Owner, attachment_of, owners_of
from spalier.adapters.geometry import first_names, tensors_of
from spalier.adapters.kinds import Stored
from spalier.pruning.prune import cut
from spalier.tasks.extract import base_tensors, grouped
from spalier.tasks.format import Fingerprint, values_digest
from spalier.tasks.numbers import assembled
from spalier.tasks.rows import Row, Source
from spalier.tasks.task import Task, own_tensors

Sources = Mapping[str, tuple[Source, Sequence[Stored] | Tensor | None]]
"""For each tensor by its name: where its numbers come from now, and these."""
_ALIKE = 8.0
"""How many times as large as the base's a norm's weight may be, and how many deviations its bias may be away: farther
ones would leave few of the 8 bits of its statistics to the others."""


def rewritten(task: Task, sources: Sources, settings: Mapping[str, Any], base: Mapping[str, Tensor]) -> Task:
    """The task with these sources and settings of its adapter; ``base`` has all tensors by their first names."""
    own, matrices = _own(task), task.stored()
    adapted = {row.names[0]: [next(matrices) for _ in left.matrices] for row, left in task.cut_rows if left.matrices}
    rows: list[Row] = []
    stored: list[Stored] = []
    values: list[Tensor] = []
    integers, counts = [], iter(task.integers)
    # a row for each tensor
    for row in (replace(several, keys=(key,)) for several in task.table.rows for key in several.keys):
        (name,) = row.names
        source, numbers = sources.get(name, (row.source, None))
        if row.source == "integers":
            found = [next(counts) for _ in range(math.prod(row.shape))]
            integers += found if source == "integers" else []
        if source == "base" and not any(row.axes):
            continue  # it is the base's as it is
        rows.append(replace(row, source=source))
        if source == "values":
            kept = numbers if isinstance(numbers, Tensor) else own[name]
            values.append(kept.detach().cpu().flatten())
        elif source not in ("base", "integers"):
            assert not isinstance(numbers, Tensor)
            stored += adapted[name] if numbers is None else numbers
    made = replace(task.table, rows=grouped(rows))
    taken = {name: tensor for name, tensor in base.items() if name not in made.not_compared}
    fingerprint = Fingerprint(task.info.base.architecture, values_digest(taken))
    info = replace(task.info, adapter=dict(settings), base=fingerprint)
    held: dict[str, Any] = {**assembled(stored), "values": torch.cat(values) if values else task.values[:0]}
    return replace(task, info=info, table=made, integers=tuple(integers), packed=None, **held)


def _own(task: Task) -> dict[str, Tensor]:
    """The task's own values, by the names of their tensors."""
    tensors = own_tensors(task, "values", task.values)
    return {name: next(tensors) for row in task.table.rows if row.source == "values" for name in row.names}


def with_base_norms(task: Task, net: nn.Module) -> Task:
    """The task of an adapted network, with statistics alone of its batch norms."""
    owners = owners_of(net, first_names(tensors_of(net)))
    base = base_tensors(attachment_of(net), owners)
    return rewritten(task, base_norms(task, owners, base), task.info.adapter, base)


def base_norms(task: Task, owners: Mapping[str, list[Owner]], base: Mapping[str, Tensor]) -> Sources:
    """Batch norms with the base's weights and biases, and with statistics that let them compute what they did.

    w (x - m) / s + b  =  w' (x - m') / s' + b'   for   s' = s w' / w   and   m' = m - (b - b') s / w
    """
    found: dict[str, tuple[Source, Tensor | None]] = {}
    own, indices = _own(task), {name: left.indices for row, left in task.cut_rows for name in row.names}
    for path, norm in {name.rpartition(".")[0]: owners[name][0].module for name in own}.items():
        names = [f"{path}.{key}" for key in ("weight", "bias", "running_mean", "running_var")]
        if not isinstance(norm, _BatchNorm) or path in task.table.heads or not set(names) <= set(own):
            continue
        if any(owner.module is not norm for name in names for owner in owners[name]):
            continue  # another norm has one of them too
        weight, bias, mean, var = (own[name].double() for name in names)
        first, second = (cut(base[name], indices[name]).to(weight) for name in names[:2])
        ratio, deviation = first / weight, (var + norm.eps).sqrt()
        off, squared = (bias - second) / weight, (deviation * ratio) ** 2 - norm.eps
        are_alike = (ratio > 1 / _ALIKE) & (ratio < _ALIKE) & (off.abs() < _ALIKE) & (squared > 0)
        if bool((are_alike & squared.to(own[names[3]]).isfinite()).all()):  # half precision may not hold them
            found |= dict.fromkeys(names[:2], ("base", None))
            if norm.momentum is not None:  # else means go on from how many batches there were
                found[f"{path}.num_batches_tracked"] = "base", None
            moved = {names[2]: mean - off * deviation, names[3]: squared}
            found |= {name: ("values", values.to(own[name])) for name, values in moved.items()}
    return found
