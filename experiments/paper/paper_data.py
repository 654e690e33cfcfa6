"""The paper's three data sets: whole, as published, or the reduced copies that the mini scale takes.

| name | whole | reduced |
|---|---|---|
| cifar10 | as torchvision keeps it | ``cifar10/``: grids of images as lossless WebP, with ``labels.json`` |
| flowers102 | as torchvision keeps it | ``flowers102/``: a zip archive, the official tables, ``test_subset.json`` |
| catsanddogs | ``catsanddogs/`` as unpacked from Kaggle | ``catsdogs/``: a zip archive of the same layout |
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from spalier.data import Data
from spalier.data.data import ArraySplit, Images, Ints, Preprocessing, digest, limited
from spalier.data.images import center_square, decode, pillow, to_rgb
from spalier.errors import DataError
from spalier.text import import_optional

ORIGINS = {
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar.html",
    "flowers102": "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
    "catsanddogs": "https://www.kaggle.com/datasets/tongpython/cat-and-dog",
}
_CIFAR_MEAN, _CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

Labelled = tuple[Images, Ints]
"""Images (n, side, side, 3) and their classes."""


def open_set(
    name: str,
    folder: Path,
    *,
    image_size: int | None = None,
    max_train_samples: int | None = None,
    validation_split: float = 0.0,
    seed: int = 0,
) -> Data:
    """A data set of the paper; validation samples are not held out."""
    assert validation_split == 0.0, "the paper's protocol has no validation samples"
    if name == "cifar10":
        preprocessing = Preprocessing.small(32, _CIFAR_MEAN, _CIFAR_STD)
    else:
        preprocessing = Preprocessing.photographs(image_size or 224)
    read = {"cifar10": _cifar10, "flowers102": _flowers102, "catsanddogs": _cats_and_dogs}[name]
    try:
        classes, train, test = read(folder, preprocessing.stored)
    except (OSError, RuntimeError) as error:  # a RuntimeError is torchvision's for a set that is not there
        raise DataError(f"{name} is not in {folder}: {error}; get it from {ORIGINS[name]}") from error
    images, labels = np.concatenate([train[0], test[0]]), np.concatenate([train[1], test[1]])
    rows = np.arange(len(train[1]))
    if max_train_samples is not None:
        rows = np.flatnonzero(limited(train[1], max_train_samples, seed))
    tested = np.arange(len(train[1]), len(labels))
    return Data(
        name=name,
        classes=tuple(classes),
        shape=(3, preprocessing.size, preprocessing.size),
        train=ArraySplit(images, rows, labels[rows], preprocessing),
        validation=None,
        test=ArraySplit(images, tested, labels[tested], preprocessing),
        preprocessing=preprocessing.as_dict(),
        digest=digest(images, labels, rows, str(preprocessing)),
    )


def _cifar10(folder: Path, side: int) -> tuple[list[str], Labelled, Labelled]:
    root = folder / "cifar10"
    if (root / "labels.json").is_file():
        batches = [grid(root, path.stem) for path in sorted(root.glob("data_batch_*.webp"))]
        images, labels = (np.concatenate(each) for each in zip(*batches, strict=True))
        return (
            json.loads((root / "labels.json").read_text())["classes"],
            (images, labels),
            grid(root, "test_batch"),
        )
    train, test = (_torchvision("CIFAR10", folder, train=flag) for flag in (True, False))
    return train.classes, (train.data, np.array(train.targets)), (test.data, np.array(test.targets))


def grid(root: Path, name: str) -> Labelled:
    """A batch of CIFAR as one image, with 32x32 images side by side, and their labels."""
    labels = np.array(json.loads((root / "labels.json").read_text())[name], np.int64)
    pixels = np.asarray(pillow().open(root / f"{name}.webp").convert("RGB"))
    rows, columns = pixels.shape[0] // 32, pixels.shape[1] // 32
    images = pixels.reshape(rows, 32, columns, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)
    assert len(images) == len(labels)
    return images, labels


def _flowers102(folder: Path, side: int) -> tuple[list[str], Labelled, Labelled]:
    """The official splits for training and for validation together are the training set, as in the paper."""
    classes = [str(i + 1) for i in range(102)]
    root = folder / "flowers102"
    if not (root / "test_subset.json").is_file():
        train, val, test = (_torchvision("Flowers102", folder, split=s) for s in ("train", "val", "test"))
        files = [_decoded(dataset._image_files, side) for dataset in (train, val, test)]
        images = np.concatenate(files[:2])
        return classes, (images, np.array(train._labels + val._labels)), (files[2], np.array(test._labels))
    tables = import_optional("scipy.io", "flowers102", DataError)
    split, labels = (tables.loadmat(root / f"{name}.mat", squeeze_me=True) for name in ("setid", "imagelabels"))
    train_ids = np.concatenate([split["trnid"], split["valid"]])
    test_ids = np.array(json.loads((root / "test_subset.json").read_text())["test_subset"])
    packed = _folder_or_zip(root)
    found = []
    for ids in (train_ids, test_ids):
        files = [packed / "jpg" / f"image_{i:05d}.jpg" for i in ids]
        found.append((_decoded(files, side), labels["labels"][ids - 1].astype(np.int64) - 1))
    return classes, found[0], found[1]


def _cats_and_dogs(folder: Path, side: int) -> tuple[list[str], Labelled, Labelled]:
    root = _folder_or_zip(folder / ("catsanddogs" if (folder / "catsanddogs").is_dir() else "catsdogs"))
    found = []
    for half in ("training_set", "test_set"):
        # Kaggle's archive has a folder of the same name inside.
        inner = root / half / half if (root / half / half).is_dir() else root / half
        files = [_images_in(inner / animal) for animal in ("cats", "dogs")]
        labels = np.repeat([0, 1], [len(files[0]), len(files[1])])
        found.append((_decoded([*files[0], *files[1]], side), labels))
    return ["cats", "dogs"], found[0], found[1]


def _images_in(folder: Any) -> list[Any]:
    return sorted((file for file in folder.iterdir() if file.name.endswith(".jpg")), key=lambda file: file.name)


def _folder_or_zip(root: Path) -> Any:
    """A folder, or the zip archive in it, which has the same methods."""
    archive = next(root.glob("*.zip"), None)
    return root if archive is None else zipfile.Path(archive)


def _decoded(files: Iterable[Any], side: int) -> Images:
    def one(file: Any) -> Images:
        return center_square(to_rgb(decode(file.read_bytes())), side)

    with ThreadPoolExecutor() as threads:
        return np.stack(list(threads.map(one, files)))


def _torchvision(name: str, folder: Path, **options: Any) -> Any:
    library = import_optional("torchvision.datasets", f"the whole {name}", DataError)
    return getattr(library, name)(str(folder), **options)
