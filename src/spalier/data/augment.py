"""Whole batches of crops, flips and normalisation. What is drawn depends on seed, epoch and sample alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from spalier.errors import ConfigError

AUGMENTS = ("own", "flip-crop", "crop", "flip", "none")
ORDER, OFFSETS, ITEM, SPLIT, LIMIT = range(5)
"""What random numbers are for, so that no two uses share them."""

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


def numbers(seed: int, epoch: int, purpose: int) -> np.random.Generator:
    """Random numbers that belong to a seed, an epoch and a purpose."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, epoch, purpose))))


@dataclass(frozen=True)
class Recipe:
    """How stored images become a batch.

    ``size`` is the side of what comes out, ``stored`` the side of what is kept, ``pad`` the zeros around it in
    training, ``flip`` whether a mirrored image is still one of its class.
    """

    size: int
    stored: int
    pad: int
    flip: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def own(self) -> str:
        """The augmentation that suits the images."""
        return "flip-crop" if self.flip else "crop"

    def plain(self) -> dict[str, Any]:
        """As plain data, for the record of a run."""
        return {
            "size": self.size,
            "stored": self.stored,
            "pad": self.pad,
            "augment": self.own,
            "mean": list(self.mean),
            "std": list(self.std),
            "pixels": "0..255, divided by 255, less the mean, divided by the deviation",
        }


class Offsets(NamedTuple):
    """Where each sample is cropped, and whether it is mirrored."""

    tops: Ints
    lefts: Ints
    flips: NDArray[np.bool_]

    def at(self, indices: Ints) -> Offsets:
        """Those of some samples."""
        return Offsets(self.tops[indices], self.lefts[indices], self.flips[indices])


def check_augment(mode: str) -> str:
    """The name of an augmentation, or an error that lists them."""
    if mode not in AUGMENTS:
        raise ConfigError(f"augment is {mode!r}, expected one of {', '.join(AUGMENTS)}")
    return mode


def draw(recipe: Recipe, mode: str, count: int, seed: int, epoch: int) -> Offsets:
    """Crops and flips of every sample for one epoch, drawn at once."""
    generator, room = numbers(seed, epoch, OFFSETS), recipe.stored + 2 * recipe.pad - recipe.size
    tops, lefts = generator.integers(0, room + 1, (2, count))
    flips = generator.integers(0, 2, count).astype(bool)
    if "crop" not in mode:
        tops = lefts = np.full(count, room // 2)
    return Offsets(tops, lefts, flips & ("flip" in mode))


def crop(images: Bytes, tops: Ints, lefts: Ints, size: int) -> Bytes:
    """One window of each image: (n, h, w, 3) to (n, size, size, 3)."""
    count, height, width, channels = images.shape
    flat = np.ascontiguousarray(images).reshape(count, height, width * channels)
    image, row, byte = flat.strides
    every = as_strided(
        flat,
        (count, height - size + 1, width - size + 1, size, size * channels),
        (image, row, channels * byte, row, byte),  # rows of a window lie in one piece: copied as such
        writeable=False,
    )
    return every[np.arange(count), tops, lefts].reshape(count, size, size, channels)


def padded(images: Bytes, pad: int) -> Bytes:
    """Zeros around each image."""
    count, height, width, channels = images.shape
    out = np.zeros((count, height + 2 * pad, width + 2 * pad, channels), np.uint8)
    out[:, pad : pad + height, pad : pad + width] = images
    return out


def augmented(images: Bytes, offsets: Offsets, recipe: Recipe) -> Bytes:
    """Crops and flips of a batch: (n, stored, stored, 3) to (n, size, size, 3)."""
    out = crop(padded(images, recipe.pad), offsets.tops, offsets.lefts, recipe.size)
    out[offsets.flips] = out[offsets.flips, :, ::-1]
    return out


def centred(images: Bytes, size: int) -> Bytes:
    """The middle of each image."""
    start = (images.shape[1] - size) // 2
    return images[:, start : start + size, start : start + size]


def normalised(images: Bytes, recipe: Recipe) -> Tensor:
    """(n, h, w, 3) bytes to (n, 3, h, w) floats, channels last in memory."""
    count, height, width, _ = images.shape
    scale, shift = _rows(recipe, height * width)
    out = np.multiply(images.reshape(count, len(scale)), scale)
    out += shift
    return torch.from_numpy(out).view(count, height, width, 3).permute(0, 3, 1, 2)


@lru_cache(maxsize=8)
def _rows(recipe: Recipe, pixels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Factors and summands for an image in one row: long inner loops instead of loops over three channels."""
    mean, std = np.array(recipe.mean), np.array(recipe.std)
    scale, shift = 1 / (255 * std), -mean / std
    return np.tile(scale, pixels).astype(np.float32), np.tile(shift, pixels).astype(np.float32)
