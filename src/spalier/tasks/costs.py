"""What a smaller storage costs: built from each, the network is run on labelled data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spalier._table import table
from spalier.errors import ConfigError, TaskFileError
from spalier.tasks.base import Base
from spalier.tasks.build import build
from spalier.tasks.learned import Learned
from spalier.tasks.storage import STORAGES, Storage


@dataclass(frozen=True)
class StorageCost:
    """One way to store a task."""

    storage: Storage
    bytes: int
    right: float
    """The share of samples whose largest output is their class."""
    deviation: float
    """How far outputs are from those of the exact task, as a share of their size."""
    error: TaskFileError | None = None
    """Why the task cannot be stored so, if it cannot."""


class StorageCosts(list[StorageCost]):
    """All ways to store a task, side by side. Print it."""

    def __str__(self) -> str:
        exact = self[0].right
        rows = [
            [
                c.storage,
                f"{c.bytes:,}",
                f"{c.right:.2%}",
                f"{100 * (c.right - exact):+.2f}",
                f"{c.deviation:.1e}",
            ]
            if c.error is None
            else [c.storage, "-", "-", "-", str(c.error)]
            for c in self
        ]
        return table(["storage", "bytes", "right", "points", "deviation"], rows)


@torch.no_grad()
def storage_costs(task: Learned, base: nn.Module, batches: Iterable[Any]) -> StorageCosts:
    """Every storage of a task, measured on batches of inputs and class numbers."""
    seen = [(x, y) for x, y in batches]
    if not seen:
        raise ConfigError("batches is empty, expected pairs of inputs and class numbers")
    prepared = Base(base)
    exact = _outputs(build(task, prepared, fold=False, share=True), seen)
    found = StorageCosts()
    for storage in STORAGES:
        try:
            stored = task if storage == "exact" else task.stored_as(storage)
            outputs = _outputs(build(stored, prepared, fold=False, share=True), seen)
        except TaskFileError as error:
            found.append(StorageCost(storage, 0, 0.0, 0.0, error))
            continue
        right = torch.cat([o.argmax(1) == y.to(o.device) for o, (_, y) in zip(outputs, seen, strict=True)])
        far = sum(float((o - e).double().square().sum()) for o, e in zip(outputs, exact, strict=True))
        size = sum(float(e.double().square().sum()) for e in exact)
        share = (far / size) ** 0.5 if size else 0.0
        found.append(StorageCost(storage, len(stored.to_bytes()), float(right.float().mean()), share))
    return found


def _outputs(net: nn.Module, batches: list[tuple[Any, Any]]) -> list[Tensor]:
    return [net(x) for x, _ in batches]
