"""A task whose weights come from other sources: learned in full before, and from an adapter now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spalier.adapters.kinds import Stored
from spalier.tasks.extract import grouped, settings_of
from spalier.tasks.format import Fingerprint, values_digest
from spalier.tasks.numbers import assembled
from spalier.tasks.rows import Row, Source
from spalier.tasks.task import Task, own_tensors

Sources = Mapping[str, tuple[Source, Sequence[Stored] | Tensor]]
"""For each weight by its name: where its numbers come from now, and these."""


def rewritten(task: Task, sources: Sources, adapter: Any, base: Mapping[str, Tensor]) -> Task:
    """The task with these sources; ``base`` has all tensors of the base by their first names."""
    tensors, matrices = own_tensors(task, "values", task.values), task.stored()
    own = {name: next(tensors) for row in task.table.rows if row.source == "values" for name in row.names}
    adapted = {row.names[0]: [next(matrices) for _ in cut.matrices] for row, cut in task.cut_rows if cut.matrices}
    rows: list[Row] = []
    stored: list[Stored] = []
    values: list[Tensor] = []
    # a row for each tensor
    for row in (replace(several, keys=(key,)) for several in task.table.rows for key in several.keys):
        (name,) = row.names
        source, numbers = sources.get(name, (row.source, None))
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
    taken = {name: tensor for name, tensor in base.items() if name not in made.own}
    info = replace(
        task.info, adapter=settings_of(adapter), base=Fingerprint(task.info.base.architecture, values_digest(taken))
    )
    held: dict[str, Any] = {**assembled(stored), "values": torch.cat(values) if values else task.values[:0]}
    return replace(task, info=info, table=made, **held)
