"""What a task has learned: flat tensors, masks, and the table that says what they are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Self

import torch
from torch import Tensor

from spalier.errors import TaskFileError
from spalier.tasks import container
from spalier.tasks.description import Description
from spalier.tasks.fingerprint import largest
from spalier.tasks.storage import Storage, check_storage, quantised, restored, stored
from spalier.tasks.table import Cut, Mask, Matrices, Row, Table, Values


@dataclass(frozen=True, eq=False, repr=False)
class Learned:
    """The contents of a task file."""

    description: Description
    table: Table
    masks: list[Mask]
    adapters: Tensor
    """The numbers of all adapters in the order of the table, as they are stored."""
    scales: Tensor
    """With 8-bit storage, the scale of each row of each adapter."""
    values: Tensor
    """Norms with their statistics, biases, the head: all that is the task's own."""
    integers: tuple[int, ...] = ()
    """Whole numbers of the task's own: how many batches a norm has seen."""

    def __repr__(self) -> str:
        said = self.description
        return f"{type(self).__name__}({said.name!r}, {said.learned:,} learned, stored as {said.storage})"

    def stored_as(self, storage: Storage) -> Self:
        """The task as it is after it has been stored so: ``"fp16"``, ``"bf16"``, ``"int8"`` lose precision.

        ``"int8"`` stores adapters as integers with a scale for each row, and the rest in half precision.
        """
        check_storage(storage)
        description = replace(self.description, storage=storage)
        values = stored(self.values, storage, "norms or head")
        if storage == "int8":
            codes, scales = quantised(self.adapter_values(), self.adapter_rows)
            return replace(self, description=description, adapters=codes, scales=scales, values=values)
        adapters = stored(self.adapter_values(), storage, "adapters")
        return replace(
            self,
            description=description,
            adapters=adapters,
            scales=torch.empty(0, device="cpu"),
            values=values,
        )

    def to_bytes(self, *, storage: Storage = "exact") -> bytes:
        """The contents of the task's file."""
        task = self if storage == "exact" else self.stored_as(storage)
        raw, length = task.table.to_bytes()
        tensors = {
            "table": torch.frombuffer(bytearray(raw), dtype=torch.uint8),
            "masks": torch.from_numpy(task.table.pack(task.masks)),
            "adapters": task.adapters,
            "values": task.values,
        }
        if task.scales.numel():
            tensors["scales"] = task.scales
        fields = {**task.description.to_dict(), "table": length}
        if task.integers:
            fields["integers"] = [[number, len(list(run))] for number, run in groupby(task.integers)]
        return container.pack(fields, tensors)

    def adapter_values(self) -> Tensor:
        """The numbers of all adapters."""
        return restored(self.adapters, self.scales, self.adapter_rows) if self._is_coded else self.adapters

    @property
    def _is_coded(self) -> bool:
        return self.adapters.dtype == torch.int8

    @cached_property
    def pieces(self) -> list[tuple[Row, Cut]]:
        """The rows of the table, with what the masks leave of each."""
        return self.table.cut(self.masks)

    @cached_property
    def adapter_rows(self) -> Matrices:
        """The matrices of all adapters: how many rows each has, and how long these are."""
        return tuple([shape for _, cut in self.pieces for shape in cut.matrices])

    def check(self) -> None:
        """Refuse numbers that the table has no place for, or that are none."""
        count = sum(rows * length for rows, length in self.adapter_rows)
        scales = sum(rows for rows, _ in self.adapter_rows) if self._is_coded else 0
        own = sum(
            len(row.keys) * math.prod(cut.shape) for row, cut in self.pieces if isinstance(row.source, Values)
        )
        for what, tensor, expected in (
            ("adapters", self.adapters, count),
            ("scales", self.scales, scales),
            ("values", self.values, own),
        ):
            if tensor.numel() != expected:
                raise TaskFileError(
                    "sizes", f"{what} has {tensor.numel():,} numbers, the table says {expected:,}"
                )
            if not math.isfinite(largest(tensor)):
                raise TaskFileError("non-finite", f"{what} holds NaN or infinite numbers")
        if self._is_coded != (self.description.storage == "int8"):
            raise TaskFileError(
                "metadata", f"the storage is said to be {self.description.storage}, and is not"
            )
