"""`Data`: a data set that is ready to be learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset

from spalier.data.augment import Ints
from spalier.data.given import Given, class_names, given_digest
from spalier.data.part import Part
from spalier.data.samples import Bad
from spalier.data.splits import held_out
from spalier.data.text import shown, whole
from spalier.errors import ConfigError
from spalier.text import table

__all__ = ["Bad", "Data", "Part"]


@dataclass(frozen=True, eq=False)
class Data:
    """A data set: its parts, and what was done to get them. Print it.

    ``digest`` tells data sets apart, ``preprocessing`` is plain data for the record of a run, ``skipped`` lists files
    that were left out.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    train: Part = field(repr=False)
    validation: Part | None = field(repr=False)
    test: Part | None = field(repr=False)
    preprocessing: dict[str, Any] = field(repr=False)
    digest: str = field(repr=False)
    skipped: tuple[Bad, ...] = ()
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(
        train: Dataset[Any],
        test: Dataset[Any] | None = None,
        validation: float | Dataset[Any] | None = None,
        *,
        classes: Sequence[str] | None = None,
        name: str = "given",
        seed: int = 0,
    ) -> Data:
        """Any map-style torch dataset of (image, label); its own transforms are left as they are.

        A number for ``validation`` carves that share of each class from training.

        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> data = Data.of(TensorDataset(torch.rand(20, 3, 8, 8), torch.arange(20) % 2), validation=0.2)
        >>> len(data.train), len(data.validation), data.shape, data.classes
        (16, 4, (3, 8, 8), ('0', '1'))
        """
        names = class_names(train, classes)
        parts = {"training": Given(train, "training", len(names))}
        if test is not None:
            parts["test"] = Given(test, "test", len(names))
        if isinstance(validation, (int, float)):
            parts |= _carved(parts["training"], len(names), float(validation), whole("seed", seed))
        elif validation is not None:
            parts["validation"] = Given(validation, "validation", len(names))
        shape = parts["training"].shape
        for part in parts.values():
            part.check_shape(shape)
        return Data(
            name=name,
            classes=names,
            shape=shape,
            train=parts["training"],
            validation=parts.get("validation"),
            test=parts.get("test"),
            preprocessing={"size": shape[-1], "mean": None, "std": None, "augment": "the data set's own"},
            digest=given_digest(list(parts.values()), names),
        )

    def summary(self) -> str:
        """The parts with their samples and classes, and what is worth knowing."""
        parts = {"training": self.train, "validation": self.validation, "test": self.test}
        rows = [
            [name, *_counted(part.labels, self.classes)] for name, part in parts.items() if part is not None
        ]
        head = f"{shown(self.name)}: {len(self.classes)} classes, {' x '.join(map(str, self.shape))}"
        shown_table = table(["part", "samples", "classes", "smallest", "largest"], rows)
        left_out = [f"left out: {bad}" for bad in self.skipped[:20]]
        if len(self.skipped) > 20:
            left_out.append(f"left out: {len(self.skipped) - 20:,} more")
        return "\n".join([head, shown_table, *self.notes, *left_out])

    def __str__(self) -> str:
        return self.summary()


def _carved(train: Given, classes: int, share: float, seed: int) -> dict[str, Given]:
    if not 0 <= share < 1:
        raise ConfigError(f"validation is {share!r}, expected a share of training, 0 to less than 1")
    out = held_out(train.labels, share, seed) if share else np.zeros(len(train), bool)
    pieces = {"training": np.flatnonzero(~out), "validation": np.flatnonzero(out)}
    return {
        name: Given(Subset(train.dataset, rows.tolist()), name, classes, train.labels[rows])
        for name, rows in pieces.items()
        if len(rows)
    }


def _counted(labels: Ints, classes: tuple[str, ...]) -> list[str]:
    if not classes:
        return [f"{len(labels):,}", "-", "-", "-"]
    counts = np.bincount(labels, minlength=len(classes))
    ends = [f"{counts[i]:,} ({shown(classes[i])})" for i in (int(counts.argmin()), int(counts.argmax()))]
    return [f"{len(labels):,}", f"{np.count_nonzero(counts):,}", *ends]
