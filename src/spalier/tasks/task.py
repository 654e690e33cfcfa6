"""`Task`: what one task has learned on a frozen base, in memory and as a file."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spalier.errors import TaskFileError
from spalier.tasks import container, files
from spalier.tasks.base import Base
from spalier.tasks.build import build, rows_of
from spalier.tasks.description import Description
from spalier.tasks.storage import Storage, check_storage, quantised, restored, stored
from spalier.tasks.table import Cuts, Mask, Table, Values
from spalier.tasks.text import SUFFIX, check_name

if TYPE_CHECKING:
    from spalier.structure.structure import Structure


@dataclass(frozen=True, eq=False)
class Task:
    """Which channels a task keeps of its base, and what it has learned.

    >>> from spalier import SPLoRA, attach_, models
    >>> base = models.resnet20(classes=10)
    >>> net = models.resnet20(classes=10)
    >>> _ = net.load_state_dict(base.state_dict())
    >>> _ = attach_(net, SPLoRA(rank=2), head="fc")
    >>> task = Task.of(net, "digits", metrics={"accuracy": 0.98})
    >>> plain = task.build(base)
    >>> type(plain).__name__, plain.training
    ('ResNet', False)
    """

    description: Description
    table: Table
    masks: list[Mask]
    adapters: Tensor
    """The numbers of all adapters in the order of the table, as they are stored."""
    scales: Tensor
    """With 8-bit storage, the scale of each row of each adapter."""
    values: Tensor
    """Norms with their statistics, biases, the head: all that is the task's own."""

    @staticmethod
    def of(
        net: nn.Module,
        name: str,
        *,
        metrics: Mapping[str, float] | None = None,
        classes: Sequence[str] = (),
        preprocessing: Mapping[str, Any] | None = None,
        licence: str = "",
        provenance: Mapping[str, Any] | None = None,
        structure: Structure | None = None,
    ) -> Task:
        """What an adapted network has learned, pruned or not; the network stays as it is.

        Args:
            net: a network that `attach_` was called on.
            name: letters, digits, '-', '_' and '.'; the file is called NAME.task.safetensors.
            metrics: numbers to remember: accuracy, loss.
            classes: the names of the classes, in the order of the outputs.
            preprocessing: how inputs are made, as plain data: size, mean, std.
            licence: under which the task may be used; an SPDX name.
            provenance: where it comes from, as plain data: data set, recipe, author.
            structure: what the network was pruned with, where it does not remember.
        """
        from spalier.tasks.describe import describe  # the training side; loading needs none of it

        check_name(name)
        found = describe(net, structure)
        description = Description(
            name,
            found.adapter,
            found.base,
            found.density,
            found.learned,
            metrics=dict(metrics or {}),
            classes=tuple(classes),
            preprocessing=dict(preprocessing or {}),
            licence=licence,
            provenance={**_versions(), **(provenance or {})},
        )
        return Task(description, found.table, found.masks, found.adapters, torch.empty(0), found.values)

    @property
    def name(self) -> str:
        """What the task is called."""
        return self.description.name

    def info(self) -> Description:
        """What the task says of itself. Print it."""
        return self.description

    def build(self, base: nn.Module, *, fold: bool = False, share: bool = False) -> nn.Module:
        """A plain, small, dense network in eval mode: the base cut down, the adapters added. The base is only read.

        Args:
            base: the network that the task was learned on; its head may have other classes.
            fold: fold every batch norm into the layer before it; an error where that would not be exact.
            share: whether tensors that the task takes as they are may be the base's own, to save memory.
        """
        return build(self, Base(base), fold=fold, share=share)

    def apply_(self, base: nn.Module, *, example: Any = None) -> None:
        """Make the base the adapted network again, in place, to go on training; `detach_` gives the base back.

        Args:
            base: the network that the task was learned on.
            example: an input for it, as for `trace`, to go on pruning.
        """
        from spalier.tasks.apply import apply_

        apply_(self, base, example)

    def stored_as(self, storage: Storage) -> Task:
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
        return replace(self, description=description, adapters=adapters, scales=torch.empty(0), values=values)

    def save(self, path: str | os.PathLike[str], *, storage: Storage = "exact") -> int:
        """Write NAME.task.safetensors, whole and durable or not at all; how many bytes it has.

        ``storage="exact"`` keeps every bit; the smaller ones are those of `stored_as`.
        """
        target = Path(path)
        if not target.name.endswith(SUFFIX):
            raise TaskFileError("name", f"{target.name!a} does not end in {SUFFIX}, as task files do")
        check_name(target.name.removesuffix(SUFFIX))
        data = self.to_bytes(storage=storage)
        files.write(target, data)
        return len(data)

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
        return container.pack({**task.description.to_dict(), "table": length}, tensors)

    @staticmethod
    def load(path: str | os.PathLike[str], *, limit: int = container.MAX_BYTES) -> Task:
        """Read a task file. No code of it is run, nothing in it is trusted; what is wrong is a `TaskFileError`.

        Args:
            path: one regular file, no link.
            limit: how many bytes it may have.
        """
        return _checked(container.read(_path(path), limit))

    def adapter_values(self) -> Tensor:
        """The numbers of all adapters."""
        return restored(self.adapters, self.scales, self.adapter_rows) if self._is_coded else self.adapters

    @property
    def _is_coded(self) -> bool:
        return self.adapters.dtype == torch.int8

    @cached_property
    def cuts(self) -> Cuts:
        """What the masks leave of each tensor."""
        return Cuts(self.masks)

    @cached_property
    def adapter_rows(self) -> list[tuple[int, int]]:
        """The matrices of all adapters: how many rows each has, and how long these are."""
        return [shape for row in self.table.rows for shape in rows_of(row)]

    def check(self) -> None:
        """Refuse numbers that the table has no place for, or that are none."""
        count = sum(rows * length for rows, length in self.adapter_rows)
        scales = sum(rows for rows, _ in self.adapter_rows) if self._is_coded else 0
        own = 0
        for row in self.table.rows:
            if isinstance(row.source, Values):
                own += len(row.keys) * math.prod(self.cuts.of(row).shape)
        for what, tensor, expected in (
            ("adapters", self.adapters, count),
            ("scales", self.scales, scales),
            ("values", self.values, own),
        ):
            if tensor.numel() != expected:
                raise TaskFileError(
                    "sizes", f"{what} has {tensor.numel():,} numbers, the table says {expected:,}"
                )
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise TaskFileError("non-finite", f"{what} holds NaN or infinite numbers")
        if self._is_coded != (self.description.storage == "int8"):
            raise TaskFileError(
                "metadata", f"the storage is said to be {self.description.storage}, and is not"
            )


def _checked(contents: container.Contents) -> Task:
    """A task of what a file holds, where all of it fits together."""
    fields, tensors = dict(contents.description), contents.tensors
    length = fields.pop("table", None)
    description = Description.from_dict(fields)
    lacking = {"table", "masks", "adapters", "values"} - set(tensors)
    if lacking:
        raise TaskFileError("tensors", f"the file has no {', '.join(sorted(lacking))}")
    table = Table.from_bytes(tensors["table"].numpy().tobytes(), length)
    masks = table.unpack(tensors["masks"].numpy())
    scales = tensors.get("scales", torch.empty(0))
    task = Task(description, table, masks, tensors["adapters"], scales, tensors["values"])
    task.check()
    return task


def _path(path: object) -> Path:
    try:
        return Path(path)  # type: ignore[arg-type]
    except TypeError:
        raise TaskFileError("name", f"the path is a {type(path).__name__}, expected a file's name") from None


def _versions() -> dict[str, str]:
    from spalier import __version__

    return {"spalier": __version__, "torch": torch.__version__.partition("+")[0]}
