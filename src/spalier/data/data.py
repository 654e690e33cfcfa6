"""`Data`: a data set that is ready to be learned from, its splits, and how their samples become batches.

Users' own datasets are splits too. Images in memory are cropped, flipped and normalised in whole batches. What
augmentation draws depends on seed, epoch and sample alone.
"""

from __future__ import annotations

import hashlib
import random
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from spalier.errors import ConfigError, DataError
from spalier.inputs import Inputs
from spalier.text import check_integer, printable, table

Images = NDArray[np.uint8]
Ints = NDArray[np.int64]
Color = tuple[float, float, float]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ORDER, OFFSETS, ITEM, SPLIT, LIMIT = range(5)
"""What random numbers are for, so that no two uses share a stream."""


def generator(seed: int, epoch: int, purpose: int) -> np.random.Generator:
    """Random numbers that belong to a seed, an epoch and a purpose."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, epoch, purpose))))


class Split(Protocol):
    """Samples by number. What `fetch` returns depends on seed, epoch and numbers alone."""

    @property
    def labels(self) -> Ints:
        """The class of each sample, -1 where there is none."""

    def __len__(self) -> int: ...

    def fetch(self, indices: Ints, epoch: int | None, seed: int = 0) -> tuple[Inputs, Tensor]:
        """Inputs of the network and labels of these samples; with an epoch of None they are not augmented."""


@dataclass(frozen=True)
class BadFile:
    """A file that cannot be used, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{printable(self.path)}: {printable(self.reason)}"


@dataclass(frozen=True, eq=False)
class Data:
    """A data set: its splits, and what was done to get them. Print it for a summary.

    ``digest`` tells data sets apart, ``preprocessing`` is plain data for the record of a run, ``skipped`` lists the
    files that were left out.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    train: Split = field(repr=False)
    validation: Split | None = field(repr=False)
    test: Split | None = field(repr=False)
    preprocessing: dict[str, Any] = field(repr=False)
    digest: str = field(repr=False)
    skipped: tuple[BadFile, ...] = ()
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(
        train: Dataset[Any] | DataLoader[Any],
        test: Dataset[Any] | DataLoader[Any] | None = None,
        validation: float | Dataset[Any] | DataLoader[Any] | None = None,
        *,
        classes: Sequence[str] | None = None,
        name: str = "given",
        seed: int = 0,
    ) -> Data:
        """Wrap map-style torch datasets of (image, label); their own transforms are applied as they are.

        A number for ``validation`` holds out that share of each training class. Of a `DataLoader` only its dataset
        is used: batches and workers are the run's.

        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> data = Data.of(TensorDataset(torch.rand(20, 3, 8, 8), torch.arange(20) % 2), validation=0.2)
        >>> len(data.train), len(data.validation), data.shape, data.classes
        (16, 4, (3, 8, 8), ('0', '1'))
        """
        names = class_names(_dataset(train, "training"), classes)
        is_share = isinstance(validation, int | float)
        given = {"training": train, "test": test, "validation": None if is_share else validation}
        splits = {
            part: DatasetSplit(_dataset(each, part), part, len(names))
            for part, each in given.items()
            if each is not None
        }
        if is_share:
            splits |= _hold_out(splits["training"], len(names), check_share(validation), check_integer("seed", seed))
        shape = splits["training"].shape
        for split in splits.values():
            if split.shape != shape:
                raise DataError(f"{split.name} has images of {split.shape}, expected {shape} as in training")
        return Data(
            name=name,
            classes=names,
            shape=shape,
            train=splits["training"],
            validation=splits.get("validation"),
            test=splits.get("test"),
            preprocessing={"size": shape[-1], "mean": None, "std": None, "augment": "the data set's own"},
            digest=_digest_of_datasets(list(splits.values()), names),
        )

    @property
    def is_text(self) -> bool:
        """Whether samples are texts, and not images."""
        return self.preprocessing.get("kind") == "text"

    def example(self, count: int = 2) -> Inputs:
        """Inputs of the shape that costs and latency are stated for."""
        made = getattr(self.train, "example", None)
        return torch.zeros(count, *self.shape) if made is None else made(count, *self.shape)

    def __str__(self) -> str:
        """The splits with their samples and classes, and what is worth knowing."""
        splits = {"training": self.train, "validation": self.validation, "test": self.test}
        rows = [[name, *self._counts(split.labels)] for name, split in splits.items() if split is not None]
        size = " x ".join(map(str, self.shape)) + (" tokens" if self.is_text else "")
        head = f"{printable(self.name)}: {len(self.classes)} classes, {size}"
        skipped = [f"left out: {bad}" for bad in self.skipped[:20]]
        if len(self.skipped) > 20:
            skipped.append(f"left out: {len(self.skipped) - 20:,} more")
        columns = ["split", "samples", "classes", "smallest", "largest"]
        return "\n".join([head, table(columns, rows), *self.notes, *skipped])

    def _counts(self, labels: Ints) -> list[str]:
        if not self.classes:
            return [f"{len(labels):,}", "-", "-", "-"]
        counts = np.bincount(labels, minlength=len(self.classes))
        extremes = (int(counts.argmin()), int(counts.argmax()))
        ends = [f"{counts[i]:,} ({printable(self.classes[i])})" for i in extremes]
        return [f"{len(labels):,}", f"{np.count_nonzero(counts):,}", *ends]


# -- users' datasets --------------------------------------------------------------------------------------------------


class DatasetSplit:
    """A split made of a map-style torch dataset of (image, label).

    Tensors of floats pass as they are. Bytes and images of Pillow are scaled to 0..1. Random transforms draw the same
    numbers wherever they run: the global generators are seeded for each sample, and put back afterwards.
    """

    def __init__(self, dataset: Any, name: str, classes: int, labels: Ints | None = None) -> None:
        self.dataset, self.name, self.classes, self._labels = dataset, name, classes, labels
        self.shape = tuple(self._image_and_label(0)[0].shape)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def labels(self) -> Ints:
        """The class of each sample: as the dataset lists them, else gathered from every item, once."""
        if self._labels is None:
            self._labels = check_labels(gather_labels(self.dataset, self.name), self.classes, self.name)
        return self._labels

    def fetch(self, indices: Ints, epoch: int | None, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Images and labels; with an epoch of None, random transforms draw the same every time."""
        moment = 0 if epoch is None else epoch + 1
        with _global_generators_kept():
            items = [self._seeded_item(int(i), moment, seed) for i in indices]
        images = torch.stack([image for image, _ in items])
        labels = np.array([label for _, label in items], np.int64)
        if images.dim() == 4:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, torch.from_numpy(labels)

    def _seeded_item(self, index: int, moment: int, seed: int) -> tuple[Tensor, int]:
        state = np.random.SeedSequence((seed, moment, ITEM, index)).generate_state(4)
        random.seed(int(state[0]))
        np.random.seed(int(state[1]))
        torch.default_generator.manual_seed(int(state[2]) << 32 | int(state[3]))
        image, label = self._image_and_label(index)
        if image.shape != self.shape:
            raise DataError(
                f"{self.name}: sample {index} has shape {tuple(image.shape)}, expected {self.shape} as sample 0; "
                "let the dataset's transform bring all to one size"
            )
        return image, label

    def _image_and_label(self, index: int) -> tuple[Tensor, int]:
        image, label = _item(self.dataset, index, self.name)
        if not _in_range(label, self.classes):
            raise DataError(
                f"{self.name}: sample {index} has label {label}, expected 0 to {self.classes - 1}; "
                "pass the names of all classes, or correct the labels"
            )
        if hasattr(image, "convert"):  # Pillow's, without importing it
            image = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        if not isinstance(image, Tensor):
            raise DataError(
                f"{self.name}: sample {index} has an image of type {type(image).__name__}, expected a tensor or an "
                "image of Pillow"
            )
        return image.float() / 255 if image.dtype == torch.uint8 else image.float(), label


def class_names(train: Dataset[Any], classes: Sequence[str] | None = None) -> tuple[str, ...]:
    """The names as given, else the dataset's own, else numbers up to the largest label."""
    names = getattr(train, "classes", None) if classes is None else classes
    if names is None:
        labels = gather_labels(train, "training")
        if (labels == -1).all():
            return ()  # samples without labels, for a network that learns from another
        names = range(int(labels.max()) + 1)
    found = tuple(map(str, names))
    if len(found) < 2 or len(set(found)) < len(found):
        raise DataError(f"the classes are {found[:5]!r}, expected at least two different ones")
    return found


def listed_labels(dataset: Any) -> Ints | None:
    """Labels that a dataset lists in ``targets``, ``labels``, torchvision's ``_labels`` or tensors, also of subsets."""
    if isinstance(dataset, Subset):
        inner = listed_labels(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        pieces = [listed_labels(piece) for piece in dataset.datasets]
        known = [piece for piece in pieces if piece is not None]
        return np.concatenate(known) if len(known) == len(pieces) else None
    if getattr(dataset, "target_transform", None) is not None:
        return None  # what is listed is not what comes out
    names = ("targets", "labels", "_labels")
    lists = dataset.tensors[1:] if isinstance(dataset, TensorDataset) else [getattr(dataset, n, ()) for n in names]
    for listed in lists:
        with suppress(ValueError, TypeError, RuntimeError):  # ragged lists, and whatever else has such a name
            labels = np.asarray(listed)
            if labels.shape == (len(dataset),) and labels.dtype.kind in "iu":
                return labels.astype(np.int64)
    return None


def gather_labels(dataset: Any, name: str) -> Ints:
    """Every label: as listed, else by looking at every item."""
    known = listed_labels(dataset)
    if known is not None:
        return known
    with _global_generators_kept():
        return np.array([_item(dataset, i, name)[1] for i in range(len(dataset))], np.int64)


def _dataset(given: Any, name: str) -> Dataset[Any]:
    """A map-style dataset that has samples, also out of a loader."""
    dataset = given.dataset if isinstance(given, DataLoader) else given
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"{name} is a {type(dataset).__name__} without len(), expected a map-style dataset of (image, label)"
        )
    if len(dataset) == 0:
        raise DataError(f"{name} is empty, expected at least one sample")
    return dataset


def _item(dataset: Dataset[Any], index: int, name: str) -> tuple[Any, int]:
    """An image of any kind, and its label as an integer."""
    try:
        item = dataset[index]
    except Exception as error:
        failed = DataError(f"{name}: sample {index} cannot be had: {type(error).__name__}: {printable(error)}")
        failed.add_note(traceback.format_exc())  # the cause is lost on the way from a worker
        raise failed from error
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise DataError(f"{name}: sample {index} is a {type(item).__name__}, expected a pair (image, label)")
    image, label = item
    if isinstance(label, (Tensor, np.ndarray, np.generic)) and np.prod(label.shape) == 1:
        label = label.item()
    if isinstance(label, bool) or not isinstance(label, int):
        raise DataError(f"{name}: sample {index} has label {label!r}, expected an integer")
    return image, label


def _hold_out(train: DatasetSplit, classes: int, share: float, seed: int) -> dict[str, DatasetSplit]:
    """Training without a share of each class, and that share."""
    out = held_out(train.labels, share, seed) if share else np.zeros(len(train), bool)
    pieces = {"training": np.flatnonzero(~out), "validation": np.flatnonzero(out)}
    return {
        name: DatasetSplit(Subset(train.dataset, rows.tolist()), name, classes, train.labels[rows])
        for name, rows in pieces.items()
        if len(rows)
    }


def _digest_of_datasets(splits: Sequence[DatasetSplit], classes: Sequence[str], looks: int = 16) -> str:
    """Lengths, listed labels, and a few samples of each split; not all, since each may be a file."""
    pieces: list[Any] = ["\0".join(classes)]
    for split in splits:
        known = listed_labels(split.dataset)
        rows = np.unique(np.linspace(0, len(split) - 1, looks).astype(np.int64))
        images, labels = split.fetch(rows, None)
        pieces += [split.name, str(len(split)), b"" if known is None else known]
        pieces += [images.numpy(), labels.numpy()]
    return digest(*pieces)


@contextmanager
def _global_generators_kept() -> Iterator[None]:
    """The global generators are as they were afterwards."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


# -- which samples go where, and checks -------------------------------------------------------------------------------


def held_out(labels: Ints, share: float, seed: int) -> NDArray[np.bool_]:
    """True for a share of each class, at least one sample and never all; a class of one sample keeps it.

    >>> held_out(np.array([0, 0, 0, 0, 1, 1, 2]), 0.25, seed=0).sum()
    np.int64(2)
    """
    counts = np.unique(labels, return_counts=True)[1]
    wanted = _spread(counts, round(share * len(labels)))
    return _draw(labels, np.clip(wanted, np.minimum(1, counts - 1), counts - 1), seed, SPLIT)


def limited(labels: Ints, most: int, seed: int) -> NDArray[np.bool_]:
    """True for at most so many samples, all classes among them."""
    counts = np.unique(labels, return_counts=True)[1]
    if most >= len(labels):
        return np.ones(len(labels), bool)
    if most < len(counts):
        raise ConfigError(f"max_train_samples is {most}, expected at least one for each of the {len(counts)} classes")
    return _draw(labels, 1 + _spread(counts - 1, most - len(counts)), seed, LIMIT)


def _spread(counts: Ints, total: int) -> Ints:
    """Shares of a total in proportion to counts, in whole numbers: the largest remainders get one more."""
    exact = counts * (total / max(1, counts.sum()))
    out: Ints = np.floor(exact).astype(np.int64)
    out[np.argsort(out - exact, kind="stable")[: total - out.sum()]] += 1
    return out


def _draw(labels: Ints, wanted: Ints, seed: int, purpose: int) -> NDArray[np.bool_]:
    chosen, numbers = np.zeros(len(labels), bool), generator(seed, 0, purpose)
    for label, count in zip(np.unique(labels), wanted, strict=True):
        chosen[numbers.permutation(np.flatnonzero(labels == label))[:count]] = True
    return chosen


def check_share(share: Any) -> float:
    """The share of training that is held out for validation."""
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share < 1:
        raise ConfigError(f"the share for validation is {share!r}, expected a number from 0 to less than 1")
    return float(share)


def check_labels(labels: Ints, classes: int, what: str) -> Ints:
    """Labels in range, or an error that shows the first that is not."""
    wrong = np.flatnonzero(~_in_range(labels, classes))
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{what}: sample {first} has label {labels[first]}, expected 0 to {classes - 1}; "
            f"{len(wrong):,} of {len(labels):,} are out of range"
        )
    return labels


def _in_range(labels: Any, classes: int) -> Any:
    """Which labels there can be; where there are no classes, -1 alone."""
    return (labels >= 0) & (labels < classes) if classes else labels == -1


def digest(*pieces: Images | Ints | bytes | str) -> str:
    """A SHA-256 over arrays and text, each with its length, in hex."""
    found = hashlib.sha256()
    for piece in pieces:
        data: Any = piece.encode("utf-8", "surrogateescape") if isinstance(piece, str) else piece
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()


# -- augmentation -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preprocessing:
    """How stored images become a batch.

    ``size`` is the side of the images that come out, ``stored`` the side of those that are kept, ``pad`` the zeros
    around them in training. ``flip`` says whether a mirrored image still belongs to its class.
    """

    size: int
    stored: int
    pad: int
    flip: bool
    mean: Color
    std: Color

    @staticmethod
    def small(size: int, mean: Color = IMAGENET_MEAN, std: Color = IMAGENET_STD, flip: bool = True) -> Preprocessing:
        """Small images are stored as they come out, and padded by an eighth for random crops."""
        return Preprocessing(size, size, max(1, size // 8), flip, mean, std)

    @staticmethod
    def photographs(size: int) -> Preprocessing:
        """Photographs are stored an eighth larger, so that random crops hold nothing but picture."""
        return Preprocessing(size, round(size * 8 / 7), 0, True, IMAGENET_MEAN, IMAGENET_STD)

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for the record of a run."""
        return asdict(self) | {
            "mean": list(self.mean),
            "std": list(self.std),
            "augment": "flip-crop" if self.flip else "crop",
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


@lru_cache(maxsize=4)
def draw_offsets(preprocessing: Preprocessing, count: int, seed: int, epoch: int) -> Offsets:
    """Crops and flips of all samples for one epoch, drawn at once."""
    numbers = generator(seed, epoch, OFFSETS)
    room = preprocessing.stored + 2 * preprocessing.pad - preprocessing.size
    tops, lefts = numbers.integers(0, room + 1, (2, count))
    flips = numbers.integers(0, 2, count).astype(bool)
    return Offsets(tops, lefts, flips & preprocessing.flip)


def augment_batch(images: Images, offsets: Offsets, preprocessing: Preprocessing) -> Images:
    """Crops and flips of a batch: (n, stored, stored, 3) to (n, size, size, 3)."""
    count, height, width, channels = images.shape
    pad = preprocessing.pad
    padded = np.zeros((count, height + 2 * pad, width + 2 * pad, channels), np.uint8)
    padded[:, pad : pad + height, pad : pad + width] = images
    out = crop(padded, offsets.tops, offsets.lefts, preprocessing.size)
    out[offsets.flips] = out[offsets.flips, :, ::-1]
    return out


def crop(images: Images, tops: Ints, lefts: Ints, size: int) -> Images:
    """One window of each image: (n, h, w, 3) to (n, size, size, 3)."""
    count, height, width, channels = images.shape
    flat = np.ascontiguousarray(images).reshape(count, height, width * channels)
    # A view of every window. The rows of a window lie in one piece, so that numpy copies whole rows.
    windows = sliding_window_view(flat, (size, size * channels), (1, 2))[:, :, ::channels]
    return windows[np.arange(count), tops, lefts].reshape(count, size, size, channels)


def center_crop(images: Images, size: int) -> Images:
    """The middle of each image: (n, h, w, 3) to (n, size, size, 3)."""
    start = (images.shape[1] - size) // 2
    return images[:, start : start + size, start : start + size]


def normalize(images: Images, preprocessing: Preprocessing) -> Tensor:
    """(n, h, w, 3) bytes to (n, 3, h, w) floats, channels last in memory."""
    count, height, width, _ = images.shape
    scale, shift = _scale_and_shift(preprocessing, height * width)
    out = np.multiply(images.reshape(count, len(scale)), scale)
    out += shift
    return torch.from_numpy(out).view(count, height, width, 3).permute(0, 3, 1, 2)


@lru_cache(maxsize=8)
def _scale_and_shift(preprocessing: Preprocessing, pixels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Factors and summands for a whole image in one row: numpy is slow at inner loops over three channels."""
    mean, std = np.array(preprocessing.mean), np.array(preprocessing.std)
    scale, shift = 1 / (255 * std), -mean / std
    return np.tile(scale, pixels).astype(np.float32), np.tile(shift, pixels).astype(np.float32)


class ArraySplit:
    """A split whose images are bytes: rows of an array of (n, stored, stored, 3) that all splits share."""

    def __init__(self, images: Images, rows: Ints, labels: Ints, preprocessing: Preprocessing) -> None:
        self.images, self.rows, self.labels, self.preprocessing = images, rows, labels, preprocessing

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, indices: Ints, epoch: int | None, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Images (n, 3, size, size), channels last in memory, and labels; not augmented with an epoch of None."""
        indices = np.asarray(indices)
        images, labels = self.images[self.rows[indices]], torch.from_numpy(self.labels[indices])
        if epoch is None:
            images = center_crop(images, self.preprocessing.size)
        else:
            # the crops of an epoch are kept for its next batch
            offsets = draw_offsets(self.preprocessing, len(self), seed, epoch)
            images = augment_batch(images, offsets.at(indices), self.preprocessing)
        return normalize(images, self.preprocessing), labels
