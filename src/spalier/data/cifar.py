"""CIFAR-10 and CIFAR-100 in their official layouts: pickled or binary, unpacked or as archives; or grids of WebP."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spalier.data.archives import Reader, folder_reader, tar_reader
from spalier.data.augment import Bytes, Ints, Recipe
from spalier.data.images import Unusable, rgb
from spalier.data.pickles import Array, unpickled
from spalier.data.places import missing, roots
from spalier.data.samples import TEST, TRAIN, Samples, check_labels, resized, small
from spalier.data.text import shown
from spalier.errors import DataError

SIDE = 32
PIXELS = 3 * SIDE * SIDE

Batch = tuple[Bytes, Ints]


@dataclass(frozen=True)
class _Layout:
    """One way in which a set is published: its folder, its archive, and how its files are read."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    names: str
    batch: Callable[[bytes, str], Batch]
    classes: Callable[[bytes, str], tuple[str, ...]]

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test, self.names)

    def reader(self, root: Path) -> Reader | None:
        """How its files are read, if it is here."""
        for folder in (root / self.folder, root):
            if folder.name == self.folder and folder.is_dir():
                return folder_reader(folder)
        archive = root / self.archive
        return tar_reader(archive, self.folder, self.files) if archive.is_file() else None


@dataclass(frozen=True)
class _Set:
    """What is known of one of the two sets."""

    name: str
    classes: int
    layouts: tuple[_Layout, ...]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def cifar(name: str, folder: Path, size: int | None) -> tuple[Samples, Recipe]:
    """CIFAR-10 or CIFAR-100 from whichever layout is in the folder."""
    wanted = SETS[name]
    for root in roots(folder, [name]):
        for layout in wanted.layouts:
            reader = layout.reader(root)
            if reader is not None:
                return _made(wanted, *_official(layout, reader), size)
        if name == "cifar10" and (root / "labels.json").is_file() and (root / "test_batch.webp").is_file():
            batches = [n for n in _FIVE if (root / f"{n}.webp").is_file()]
            samples, recipe = _made(wanted, *_grids(root, batches), size)
            note = f"training: {', '.join(batches)}, {len(batches)} of 5 batches"
            return (samples if len(batches) == 5 else samples.noted(note)), recipe
    looked_for = [item for layout in wanted.layouts for item in (layout.folder + "/", layout.archive)]
    origin = "https://www.cs.toronto.edu/~kriz/cifar.html"
    raise missing(name, folder, looked_for, origin)


def _made(
    wanted: _Set, classes: tuple[str, ...], train: Batch, test: Batch, size: int | None
) -> tuple[Samples, Recipe]:
    if len(classes) != wanted.classes:
        raise DataError(f"{wanted.name} names {len(classes)} classes, expected {wanted.classes}")
    for what, (_, labels) in {"training": train, "test": test}.items():
        check_labels(labels, wanted.classes, f"{wanted.name}, {what}")
    images, labels = np.concatenate([train[0], test[0]]), np.concatenate([train[1], test[1]])
    parts = np.repeat([TRAIN, TEST], [len(train[1]), len(test[1])])
    side = size or SIDE
    return Samples(classes, labels, parts, resized(images, side)), small(side, wanted.mean, wanted.std)


def _official(layout: _Layout, read: Reader) -> tuple[tuple[str, ...], Batch, Batch]:
    classes = layout.classes(read(layout.names), layout.names)
    batches = [layout.batch(read(name), name) for name in layout.train]
    images, labels = (np.concatenate(pieces) for pieces in zip(*batches, strict=True))
    return classes, (images, labels), layout.batch(read(layout.test), layout.test)


def _planes(data: Bytes) -> Bytes:
    """Red, green and blue planes in a row to (n, 32, 32, 3)."""
    return np.ascontiguousarray(data.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1))


def _binary(records: bytes, name: str, labels: int) -> Batch:
    """Records of label bytes, the last of which counts, and 3,072 pixels."""
    length = labels + PIXELS
    if not records or len(records) % length:
        raise DataError(
            f"{name} has {len(records):,} bytes, expected a multiple of {length:,}; fetch it again"
        )
    table = np.frombuffer(records, np.uint8).reshape(-1, length)
    return _planes(table[:, labels:]), table[:, labels - 1].astype(np.int64)


def _lines(data: bytes, name: str) -> tuple[str, ...]:
    return tuple(data.decode("utf-8", "replace").split())


def _pickled(data: bytes, name: str, key: bytes) -> Batch:
    found = unpickled(data, name)
    pixels, labels = found.get(b"data"), found.get(key)
    if not isinstance(pixels, Array) or not isinstance(labels, list):
        raise DataError(f"{name} has no data and {key.decode()}, expected a batch of CIFAR; fetch it again")
    images = _planes(pixels.bytes_of(PIXELS, name))
    if len(labels) != len(images) or not all(type(label) is int for label in labels):
        raise DataError(
            f"{name} has {len(labels)} labels, expected an integer for each of {len(images)} images"
        )
    return images, np.array(labels, np.int64)


def _pickled_names(data: bytes, name: str, key: bytes) -> tuple[str, ...]:
    names = unpickled(data, name).get(key)
    if not isinstance(names, list) or not all(isinstance(n, (bytes, str)) for n in names):
        raise DataError(f"{name} has no {key.decode()}, expected the names of the classes; fetch it again")
    return tuple(n.decode("utf-8", "replace") if isinstance(n, bytes) else n for n in names)


def _grids(root: Path, names: Sequence[str]) -> tuple[tuple[str, ...], Batch, Batch]:
    """Grids of 32x32 images, one WebP for each batch; whichever training batches are there."""
    try:
        listed = json.loads((root / "labels.json").read_text())
        classes = tuple(map(str, listed["classes"]))
        train, test = (
            [_grid(root / f"{n}.webp", listed[n]) for n in which] for which in (names, ["test_batch"])
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{type(error).__name__}: {shown(error)}"
        raise DataError(
            f"{shown(root / 'labels.json')} does not describe the batches beside it: {text}"
        ) from error
    if not train:
        raise DataError(
            f"{shown(root)} has no data_batch_1.webp to data_batch_5.webp; put at least one there"
        )
    images, labels = (np.concatenate(pieces) for pieces in zip(*train, strict=True))
    return classes, (images, labels), test[0]


def _grid(path: Path, labels: Sequence[int]) -> Batch:
    try:
        pixels = np.asarray(rgb(path.read_bytes()))
    except Unusable as error:
        raise DataError(f"{shown(path)}: {error}; fetch it again") from error
    rows, columns = pixels.shape[0] // SIDE, pixels.shape[1] // SIDE
    if pixels.shape[:2] != (rows * SIDE, columns * SIDE) or rows * columns != len(labels):
        raise DataError(
            f"{shown(path)} is {pixels.shape[1]} x {pixels.shape[0]}, for {len(labels)} images of 32x32"
        )
    cells = pixels.reshape(rows, SIDE, columns, SIDE, 3).transpose(0, 2, 1, 3, 4)
    return cells.reshape(-1, SIDE, SIDE, 3), np.array(labels, np.int64)


_FIVE = tuple(f"data_batch_{i}" for i in range(1, 6))
SETS = {
    "cifar10": _Set(
        "cifar10",
        10,
        (
            _Layout(
                "cifar-10-batches-py", "cifar-10-python.tar.gz", _FIVE, "test_batch", "batches.meta",
                lambda data, name: _pickled(data, name, b"labels"),
                lambda data, name: _pickled_names(data, name, b"label_names"),
            ),
            _Layout(
                "cifar-10-batches-bin", "cifar-10-binary.tar.gz", tuple(f"{n}.bin" for n in _FIVE),
                "test_batch.bin", "batches.meta.txt",
                lambda data, name: _binary(data, name, 1),
                _lines,
            ),
        ),
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    ),
    "cifar100": _Set(
        "cifar100",
        100,
        (
            _Layout(
                "cifar-100-python", "cifar-100-python.tar.gz", ("train",), "test", "meta",
                lambda data, name: _pickled(data, name, b"fine_labels"),
                lambda data, name: _pickled_names(data, name, b"fine_label_names"),
            ),
            _Layout(
                "cifar-100-binary", "cifar-100-binary.tar.gz", ("train.bin",), "test.bin",
                "fine_label_names.txt",
                lambda data, name: _binary(data, name, 2),
                _lines,
            ),
        ),
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
    ),
}  # fmt: skip
"""The two sets: layouts, and the usual means and deviations of their training images."""
