"""`Task`: what one task has learned on a frozen base, in memory and as a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spalier import files
from spalier.errors import ConfigError, TaskFileError
from spalier.tasks import container
from spalier.tasks.base import Base
from spalier.tasks.build import build
from spalier.tasks.container import SUFFIX, check_name
from spalier.tasks.description import Description, Learned, Storage
from spalier.tasks.table import Table

if TYPE_CHECKING:
    from spalier.structure.structure import Structure
    from spalier.tasks.costs import StorageCosts


@dataclass(frozen=True, eq=False, repr=False)
class Task(Learned):
    """Which channels a task keeps of its base, and what it has learned.

    >>> from spalier import SPLoRA, attach_, models
    >>> base = models.resnet18(classes=10)
    >>> net = models.resnet18(classes=10)
    >>> _ = net.load_state_dict(base.state_dict())
    >>> _ = attach_(net, SPLoRA(rank=2), head="fc")
    >>> task = Task.of(net, "digits", metrics={"accuracy": 0.98})
    >>> plain = task.build(base)
    >>> type(plain).__name__, plain.training
    ('ResNet', False)
    """

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
        from spalier.tasks.extract import describe  # the training side; loading needs none of it

        check_name(name)
        if isinstance(classes, str):
            raise TaskFileError("metadata", f"classes is the text {classes!a}, expected a list of names")
        found = describe(net, structure)
        description = Description(
            name,
            found.adapter,
            found.base,
            found.density,
            found.learned,
            metrics=_plain(_dict("metrics", metrics)),
            classes=tuple(_plain(list(classes if classes is not None else ()))),
            preprocessing=_plain(_dict("preprocessing", preprocessing)),
            licence=licence or "",
            provenance=_plain({**_versions(), **_dict("provenance", provenance)}),
        )
        return Task(
            description,
            found.table,
            found.masks,
            found.adapters,
            torch.empty(0),
            found.values,
            found.integers,
        )

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
            share: whether tensors may lie in one piece of memory, and those that the task takes as they are may be
                the base's own: quicker and smaller, for a network that is only run, as a `Switcher` does.
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

    def storage_costs(self, base: nn.Module, batches: Iterable[Any]) -> StorageCosts:
        """What each storage costs in accuracy and saves in bytes, on batches of inputs and class numbers. Print it."""
        from spalier.tasks.costs import storage_costs

        return storage_costs(self, base, batches)

    def save(self, path: str | os.PathLike[str], *, storage: Storage = "exact") -> int:
        """Write NAME.task.safetensors, whole and durable or not at all; how many bytes it has.

        ``storage="exact"`` keeps every bit; the smaller ones are those of `stored_as`.
        """
        target = _path(path)
        if not target.name.endswith(SUFFIX):
            raise TaskFileError("name", f"{target.name!a} does not end in {SUFFIX}, as task files do")
        check_name(target.name.removesuffix(SUFFIX))
        data = self.to_bytes(storage=storage)
        files.write(target, data)
        return len(data)

    @staticmethod
    def load(path: str | os.PathLike[str], *, limit: int = container.MAX_BYTES) -> Task:
        """Read a task file. No code of it is run, nothing in it is trusted; what is wrong is a `TaskFileError`.

        Args:
            path: one regular file, no link.
            limit: how many bytes it may have.
        """
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise ConfigError(f"limit is {limit!r}, expected a number of bytes")
        return _checked(container.read(_path(path), limit))


def _checked(contents: container.Contents) -> Task:
    """A task of what a file holds, where all of it fits together."""
    fields, tensors = dict(contents.description), contents.tensors
    length, runs = fields.pop("table", None), fields.pop("integers", [])
    description = Description.from_dict(fields)
    lacking = {"table", "masks", "adapters", "values"} - set(tensors)
    if lacking:
        raise TaskFileError("tensors", f"the file has no {', '.join(sorted(lacking))}")
    table = Table.from_bytes(tensors["table"].numpy().tobytes(), length)
    masks = table.unpack(tensors["masks"].numpy())
    scales = tensors.get("scales", torch.empty(0, device="cpu"))
    integers = _expanded(runs, table.integers)
    task = Task(description, table, masks, tensors["adapters"], scales, tensors["values"], integers)
    task.check()
    return task


def _expanded(runs: object, count: int) -> tuple[int, ...]:
    """Whole numbers from pairs of a number and how often it comes, as many as the table has places for."""
    pairs: list[Any] = runs if isinstance(runs, list) else [None]
    for pair in pairs:
        fits = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        if not fits or not -(2**63) <= pair[0] < 2**63 or not 0 < pair[1] <= count:
            raise TaskFileError(
                "metadata", "the description's integers are no pairs of a number and its times"
            )
    if sum(times for _, times in pairs) != count:
        raise TaskFileError("sizes", f"the description's integers are not the {count} that the table has")
    return tuple(number for number, times in pairs for _ in range(times))


def _dict(what: str, value: object) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise TaskFileError("metadata", f"{what} is a {type(value).__name__}, expected a dict")
    return dict(value or {})


def _plain(value: Any) -> Any:
    """Plain data: scalars of numpy and PyTorch become numbers, paths text."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    is_scalar = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return value.item() if is_scalar else value


def _path(path: object) -> Path:
    try:
        return Path(path)  # type: ignore[arg-type]
    except TypeError:
        raise TaskFileError("name", f"the path is a {type(path).__name__}, expected a file's name") from None


def _versions() -> dict[str, str]:
    import spalier

    return {"spalier": spalier.__version__, "torch": torch.__version__.partition("+")[0]}
