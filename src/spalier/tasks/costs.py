"""What a smaller storage costs: built from each, the network is run on labelled data.

What many tasks cost together: on disk, in memory, and against a network for each.

The paper's T > 1/d leaves out the adapters themselves. With d the density of the weights and a the share of the base's
bytes that a task file has, T tasks cost 1 + T a bases' worth as task files and T d as networks of their own; files pay
from T (d - a) > 1 on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spalier.errors import ConfigError, TaskFileError
from spalier.tasks.base import Base
from spalier.tasks.build import build
from spalier.tasks.description import STORAGES, Learned, Storage
from spalier.text import table


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


@dataclass(frozen=True)
class Cost:
    """One task: bytes of its file, and of a network of its own."""

    name: str
    file: int
    network: int


@dataclass(frozen=True)
class Report:
    """Bytes of all tasks on one base, and when that pays. Print it."""

    base: int
    """Bytes of the base."""
    costs: tuple[Cost, ...]
    left_out: tuple[str, ...] = ()
    """Tasks that cannot be read or built, and why: they are not counted."""

    @property
    def on_disk(self) -> int:
        """The base and all task files."""
        return self.base + sum(cost.file for cost in self.costs)

    @property
    def networks(self) -> int:
        """A network of its own for each task."""
        return sum(cost.network for cost in self.costs)

    def resident(self, ready: int | None = None) -> int:
        """Bytes in memory: the base, and so many built networks, the largest ones; all of them if not said."""
        sizes = sorted((cost.network for cost in self.costs), reverse=True)
        return self.base + sum(sizes[:ready])

    @property
    def break_even(self) -> int | None:
        """From how many such tasks on the base and their files take fewer bytes than networks; None if never."""
        if not self.costs:
            return None
        saved = (self.networks - sum(cost.file for cost in self.costs)) / len(self.costs)
        return _pays_from(self.base, saved)

    def __str__(self) -> str:
        header = ["task", "file", "network", "file / network", "pays from"]
        bad = [f"not counted: {', '.join(self.left_out)}"] if self.left_out else []
        return "\n".join(
            [
                table(header, [self._row(cost) for cost in self.costs]),
                f"on disk: {self.on_disk:,} bytes with the base ({self.base:,}), {self.networks:,} as networks",
                f"in memory: {self.resident(1):,} bytes with one task ready, {self.resident():,} with all",
                "pays from: with so many tasks like it, the base and task files take less than networks of their own",
                *self._mix(),
                *bad,
            ]
        )

    def _row(self, cost: Cost) -> list[str]:
        even = _pays_from(self.base, cost.network - cost.file)
        share = f"{cost.file / cost.network:.1%}"
        return [
            cost.name,
            f"{cost.file:,}",
            f"{cost.network:,}",
            share,
            "never" if even is None else f"{even:,}",
        ]

    def _mix(self) -> list[str]:
        """What comes of these tasks together, where there are several."""
        if len(self.costs) < 2:
            return []
        even = self.break_even
        pays = "never pays" if even is None else f"pays from {even:,} tasks on"
        return [f"a mix like these {len(self.costs):,} tasks {pays}"]


def _pays_from(base: int, saved: float) -> int | None:
    """How many tasks that each save so many bytes outweigh the base."""
    return None if saved <= 0 else math.floor(base / saved) + 1


def report(listed: Sequence[Any], base: nn.Module | None) -> Report:
    """What the tasks of a store cost; without a base, in float32."""
    bad = tuple(f"{entry.name!a} ({entry.error.code})" for entry in listed if entry.info is None)
    listed = [entry for entry in listed if entry.info is not None]
    bases = {entry.info.base.architecture for entry in listed}
    if len(bases) > 1:
        raise TaskFileError(
            "base", f"the store's tasks are for {len(bases)} bases; keep a store for each base"
        )
    parameters = [] if base is None else list(base.parameters())
    width = parameters[0].element_size() if parameters else 4
    costs, whole = [], 0
    for entry in listed:
        weights = entry.info.density.weights
        if weights is None:
            raise TaskFileError("metadata", f"the task {entry.name!r} does not say how many weights it keeps")
        costs.append(Cost(entry.name, entry.size, weights[0] * width))
        whole = max(whole, weights[1] * width)
    if base is not None:
        whole = sum(p.numel() * p.element_size() for p in parameters)
    return Report(whole, tuple(costs), bad)
