"""`Samples`: what a source finds, before anything is decoded or split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from spalier.data.augment import Bytes, Ints, Recipe
from spalier.data.text import shown
from spalier.errors import DataError

TRAIN, VALIDATION, TEST, UNUSED = range(4)
"""Where a sample belongs."""

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Bad:
    """A file that cannot be used, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{shown(self.path)}: {shown(self.reason)}"


@dataclass(frozen=True)
class File:
    """Bytes that can be read: a file, or a member of an archive. ``stamp`` changes when they do."""

    name: str
    size: int
    stamp: int
    read: Callable[[], bytes]


@dataclass(frozen=True)
class Samples:
    """The samples of a data set: bytes of pixels, or files. ``parts`` says where each belongs."""

    classes: tuple[str, ...]
    labels: Ints
    parts: Ints
    pixels: Bytes | None = None
    files: tuple[File, ...] = ()
    notes: tuple[str, ...] = ()
    bad: tuple[Bad, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, rows: Ints) -> Samples:
        """Some of the samples."""
        return replace(
            self,
            labels=self.labels[rows],
            parts=self.parts[rows],
            pixels=None if self.pixels is None else self.pixels[rows],
            files=tuple(self.files[i] for i in rows) if self.files else (),
        )

    def noted(self, note: str) -> Samples:
        """The same with something that the summary will say."""
        return replace(self, notes=(*self.notes, note))


def small(size: int, mean: Any, std: Any, *, flip: bool = True) -> Recipe:
    """Small images: stored as they come out, padded by an eighth for random crops."""
    return Recipe(size, size, max(1, size // 8), flip, mean, std)


def photographs(size: int) -> Recipe:
    """Photographs: stored with an eighth more, so that crops are of what is there."""
    return Recipe(size, round(size * 8 / 7), 0, True, *IMAGENET)


def resized(images: Bytes, size: int) -> Bytes:
    """Small square images at another size, bilinear."""
    if images.shape[1:3] == (size, size):
        return images
    planes = torch.from_numpy(images).permute(0, 3, 1, 2)
    out = [
        torch.nn.functional.interpolate(piece.float(), (size, size), mode="bilinear", antialias=True)
        for piece in planes.split(1024)
    ]
    return torch.cat([p.round_().clamp_(0, 255).byte() for p in out]).permute(0, 2, 3, 1).contiguous().numpy()


def digest(*pieces: Bytes | Ints | bytes | str) -> str:
    """A SHA-256 over arrays and text, each with its length, in hex."""
    whole = hashlib.sha256()
    for piece in pieces:
        data: Any = piece.encode("utf-8", "surrogateescape") if isinstance(piece, str) else piece
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else data
        whole.update(len(data).to_bytes(8, "little"))
        whole.update(data)
    return whole.hexdigest()


def in_range(labels: Any, classes: int) -> Any:
    """Which labels there can be; where there are no classes, -1 alone."""
    lowest = 0 if classes else -1
    return (lowest <= labels) & (labels < max(classes, lowest + 1))


def check_labels(labels: Ints, classes: int, what: str) -> Ints:
    """Labels in range, or an error that shows the first that is not."""
    wrong = np.flatnonzero(~in_range(labels, classes))
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{what}: sample {first} has label {labels[first]}, expected 0 to {classes - 1}; "
            f"{len(wrong):,} of {len(labels):,} are out of range"
        )
    return labels
