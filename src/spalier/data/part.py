"""A part of a data set: training, validation or test. `Pixels` holds bytes; `spalier.data.given` wraps datasets."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spalier.data.augment import (
    Bytes,
    Ints,
    Offsets,
    Recipe,
    augmented,
    centred,
    check_augment,
    draw,
    normalised,
)


class Part(Protocol):
    """Samples by number. What `fetch` gives depends on seed, epoch and numbers alone."""

    @property
    def labels(self) -> Ints:
        """The class of each sample, -1 where there is none."""

    @property
    def augment(self) -> str:
        """The augmentation that suits the samples."""

    def __len__(self) -> int: ...

    def fetch(
        self, indices: Ints, epoch: int | None, *, seed: int = 0, augment: str = "own"
    ) -> tuple[Tensor, Tensor]:
        """Images and labels of these samples; an epoch of None is without augmentation."""


class Pixels:
    """A part whose images are bytes: rows of an array of (n, stored, stored, 3) that all parts share."""

    def __init__(self, images: Bytes, rows: Ints, labels: Ints, recipe: Recipe) -> None:
        self._images, self._rows, self._labels, self.recipe = images, rows, labels, recipe
        self._drawn: tuple[tuple[int, int, str], Offsets] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def labels(self) -> Ints:
        """The class of each sample, -1 where there is none."""
        return self._labels

    @property
    def augment(self) -> str:
        """The augmentation that suits the images."""
        return self.recipe.own

    def fetch(
        self, indices: Ints, epoch: int | None, *, seed: int = 0, augment: str = "own"
    ) -> tuple[Tensor, Tensor]:
        """Images (n, 3, size, size), channels last in memory, and labels; an epoch of None is without augmentation."""
        mode = self.recipe.own if check_augment(augment) == "own" else augment
        indices = np.asarray(indices)
        images, labels = self._images[self._rows[indices]], torch.from_numpy(self._labels[indices])
        if epoch is None or mode == "none":
            return normalised(centred(images, self.recipe.size), self.recipe), labels
        offsets = self._offsets(seed, epoch, mode).at(indices)
        return normalised(augmented(images, offsets, self.recipe), self.recipe), labels

    def _offsets(self, seed: int, epoch: int, mode: str) -> Offsets:
        key = (seed, epoch, mode)
        drawn = self._drawn
        if drawn is None or drawn[0] != key:
            drawn = self._drawn = (key, draw(self.recipe, mode, len(self), seed, epoch))
        return drawn[1]
