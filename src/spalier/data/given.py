"""`Given`: a part made of a user's torch dataset. Its random transforms draw the same numbers wherever they run."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from spalier.data.augment import ITEM, Ints
from spalier.data.samples import check_labels, digest, in_range
from spalier.data.text import shown
from spalier.errors import ConfigError, DataError


class Given:
    """Samples of a map-style dataset of (image, label).

    Images are tensors, which pass as they are but for bytes, or of Pillow; bytes and Pillow's are scaled to 0..1.
    """

    augment = "own"

    def __init__(self, dataset: Dataset[Any], name: str, classes: int, labels: Ints | None = None) -> None:
        self.dataset, self.name, self._classes, self._labels = dataset, name, classes, labels
        self._length = _length(dataset, name)
        self.shape = tuple(self._item(0)[0].shape)

    def __len__(self) -> int:
        return self._length

    @property
    def labels(self) -> Ints:
        """The class of each sample: as the dataset lists them, else gathered from every item, once."""
        if self._labels is None:
            self._labels = check_labels(gathered(self.dataset, self.name), self._classes, self.name)
        return self._labels

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """All parts have images of one shape."""
        if self.shape != shape:
            raise DataError(f"{self.name} has images of {self.shape}, expected {shape} as in training")

    def fetch(
        self, indices: Ints, epoch: int | None, *, seed: int = 0, augment: str = "own"
    ) -> tuple[Tensor, Tensor]:
        """Images and labels; without an epoch, or augmentation, transforms draw the same every time."""
        if augment not in ("own", "none"):
            raise ConfigError(
                f'augment is {augment!r}, expected "own": a given data set has its own transforms'
            )
        moment = None if augment == "none" else epoch
        with _states_kept():
            items = [self._seeded(int(i), moment, seed) for i in indices]
        images = torch.stack([image for image, _ in items])
        labels = np.array([label for _, label in items], np.int64)
        if images.dim() == 4:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, torch.from_numpy(labels)

    def _seeded(self, index: int, epoch: int | None, seed: int) -> tuple[Tensor, int]:
        moment = 0 if epoch is None else epoch + 1
        state = np.random.SeedSequence((seed, moment, ITEM, index)).generate_state(4)
        random.seed(int(state[0]))
        np.random.seed(int(state[1]))
        torch.default_generator.manual_seed(int(state[2]) << 32 | int(state[3]))
        image, label = self._item(index)
        if image.shape != self.shape:
            raise DataError(
                f"{self.name}: sample {index} has shape {tuple(image.shape)}, expected {self.shape} as sample 0; "
                "let the data set's transform bring all to one size"
            )
        return image, label

    def _item(self, index: int) -> tuple[Tensor, int]:
        image, label = _pair(self.dataset, index, self.name)
        label = _integer(label, index, self.name)
        if not in_range(label, self._classes):
            raise DataError(
                f"{self.name}: sample {index} has label {label}, expected 0 to {self._classes - 1}; "
                "pass the names of all classes, or correct the labels"
            )
        return _floats(image, index, self.name), label


def class_names(train: Dataset[Any], classes: Sequence[str] | None) -> tuple[str, ...]:
    """The names as given, else the dataset's own, else numbers up to the largest label."""
    names = getattr(train, "classes", None) if classes is None else classes
    if names is None:
        labels = gathered(train, "training")
        if (labels == -1).all():
            return ()  # samples without labels, for a network that learns from another
        names = range(int(labels.max()) + 1)
    found = tuple(map(str, names))
    if len(found) < 2 or len(set(found)) < len(found):
        raise DataError(f"the classes are {found[:5]!r}, expected at least two different ones")
    return found


def listed(dataset: Dataset[Any]) -> Ints | None:
    """Labels that a dataset lists: in ``targets``, ``labels`` or tensors, of subsets and concatenations too."""
    if isinstance(dataset, Subset):
        inner = listed(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        pieces = [listed(piece) for piece in dataset.datasets]
        known = [piece for piece in pieces if piece is not None]
        return np.concatenate(known) if len(known) == len(pieces) else None
    if isinstance(dataset, TensorDataset):
        return _as_integers(dataset.tensors[1], dataset) if len(dataset.tensors) == 2 else None
    if getattr(dataset, "target_transform", None) is not None:
        return None  # what is listed is not what comes out
    tables = (getattr(dataset, name, None) for name in ("targets", "labels"))
    return next((found for found in (_as_integers(t, dataset) for t in tables) if found is not None), None)


def gathered(dataset: Dataset[Any], name: str) -> Ints:
    """Every label: as listed, else by looking at every item."""
    known = listed(dataset)
    if known is not None:
        return known
    with _states_kept():
        pairs = (_pair(dataset, i, name) for i in range(_length(dataset, name)))
        return np.array([_integer(label, i, name) for i, (_, label) in enumerate(pairs)], np.int64)


def given_digest(parts: Sequence[Given], classes: Sequence[str], looks: int = 16) -> str:
    """Lengths, listed labels, and a few samples of each part; not all, since each may be a file."""
    pieces: list[Any] = ["\0".join(classes)]
    for part in parts:
        known = listed(part.dataset)
        rows = np.unique(np.linspace(0, len(part) - 1, looks).astype(np.int64))
        images, labels = part.fetch(rows, None)
        pieces += [part.name, str(len(part)), b"" if known is None else known, images.numpy(), labels.numpy()]
    return digest(*pieces)


def _length(dataset: Dataset[Any], name: str) -> int:
    try:
        length = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(
            f"{name} is a {type(dataset).__name__} without len(), expected a map-style dataset of (image, label)"
        ) from None
    if length == 0:
        raise DataError(f"{name} is empty, expected at least one sample")
    return length


def _pair(dataset: Dataset[Any], index: int, name: str) -> tuple[Any, Any]:
    try:
        item = dataset[index]
    except Exception as error:
        failed = DataError(f"{name}: sample {index} cannot be had: {type(error).__name__}: {shown(error)}")
        failed.add_note(traceback.format_exc())  # the cause is lost on the way from a worker
        raise failed from error
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise DataError(f"{name}: sample {index} is a {type(item).__name__}, expected a pair (image, label)")
    return item[0], item[1]


def _integer(label: Any, index: int, name: str) -> int:
    single = isinstance(label, (Tensor, np.ndarray, np.generic)) and np.prod(label.shape) == 1
    whole = label.item() if single else label
    if isinstance(whole, bool) or not isinstance(whole, int):
        raise DataError(f"{name}: sample {index} has label {whole!r}, expected an integer")
    return whole


def _as_integers(labels: Any, dataset: Dataset[Any]) -> Ints | None:
    """A table of labels, if it is one of integers for all samples."""
    try:
        found = np.asarray(labels)
    except (ValueError, TypeError, RuntimeError):
        return None
    fits = found.ndim == 1 and len(found) == len(dataset) and found.dtype.kind in "iu"  # type: ignore[arg-type]
    return found.astype(np.int64) if fits else None


def _floats(image: Any, index: int, name: str) -> Tensor:
    if isinstance(image, Tensor):
        return image.float() / 255 if image.dtype == torch.uint8 else image.float()
    if hasattr(image, "convert"):  # Pillow's, without importing it
        rgb = np.array(image.convert("RGB"))
        return torch.from_numpy(rgb).permute(2, 0, 1).float() / 255
    raise DataError(
        f"{name}: sample {index} has an image of type {type(image).__name__}, expected a tensor or an image of Pillow"
    )


@contextmanager
def _states_kept() -> Iterator[None]:
    """The global generators are as they were afterwards."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
