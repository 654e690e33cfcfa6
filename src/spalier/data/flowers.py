"""Oxford Flowers 102: train and val together are the training set (2,040), tstid the test set (6,149)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from spalier.data.archives import folder_reader, on_disk, tar_members
from spalier.data.augment import Ints, Recipe
from spalier.data.places import missing, roots, zip_with
from spalier.data.samples import TEST, TRAIN, Bad, File, Samples, check_labels, photographs
from spalier.data.text import imported, shown
from spalier.errors import DataError

CLASSES = 102
TABLES = ("setid.mat", "imagelabels.mat")
ARCHIVE = "102flowers.tgz"

Finder = Callable[[str], File | Bad]


def flowers102(folder: Path, size: int | None) -> tuple[Samples, Recipe]:
    """The flowers from a folder of images, the official archive, or a zip archive of some."""
    for root in roots(folder, ["flowers102", "flowers-102"]):
        find = _finder(root)
        if find is not None and all((root / name).is_file() for name in TABLES):
            return _samples(root, find), photographs(size or 224)
    looked_for = ["jpg/", ARCHIVE, "a zip archive with jpg/", *TABLES]
    origin = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/ (102flowers.tgz, setid.mat, imagelabels.mat)"
    raise missing("flowers102", folder, looked_for, origin)


def _samples(root: Path, find: Finder) -> Samples:
    train, every, labels = _tables(root)
    test = _present(root, every)
    ids = np.concatenate([train, test])
    if len(ids) == 0 or ids.min() < 1 or ids.max() > len(labels) or len(np.unique(ids)) < len(ids):
        raise DataError(
            f"{shown(root / TABLES[0])} does not fit {TABLES[1]}, or names images twice; fetch both again"
        )
    chosen = check_labels(labels[ids - 1] - 1, CLASSES, "flowers102")
    parts = np.repeat([TRAIN, TEST], [len(train), len(test)])
    found = [find(f"jpg/image_{i:05d}.jpg") for i in ids]
    files, bad = [f for f in found if isinstance(f, File)], [f for f in found if isinstance(f, Bad)]
    rows = np.array([isinstance(f, File) for f in found], bool)
    names = tuple(str(i + 1) for i in range(CLASSES))
    samples = Samples(names, chosen[rows], parts[rows], files=tuple(files), bad=tuple(bad))
    note = f"test: {len(test):,} of {len(every):,}, as test_subset.json lists them"
    return samples if len(test) == len(every) else samples.noted(note)


def _tables(root: Path) -> tuple[Ints, Ints, Ints]:
    split, labels = (_table(root, name) for name in TABLES)
    try:
        train, val, test, every = (
            np.asarray(values).reshape(-1).astype(np.int64)
            for values in (split["trnid"], split["valid"], split["tstid"], labels["labels"])
        )
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"{' and '.join(TABLES)} lack {shown(error)}; fetch them again") from error
    return np.concatenate([train, val]), test, every


def _table(root: Path, name: str) -> dict[str, Any]:
    read = imported("scipy.io", "the data set flowers102").loadmat
    try:
        table: dict[str, Any] = read(BytesIO(folder_reader(root)(name)))
    except DataError:
        raise
    except Exception as error:  # a damaged file raises anything
        raise DataError(
            f"{shown(root / name)} is not a readable table: {shown(error)}; fetch it again"
        ) from error
    return table


def _present(root: Path, test: Ints) -> Ints:
    """The test images that are there, where a list says that not all are."""
    path = root / "test_subset.json"
    if not path.is_file():
        return test
    try:
        some = np.array(json.loads(path.read_text())["test_subset"], np.int64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{shown(path)} does not list the test images that are there: {shown(error)}"
        ) from error
    if not np.isin(some, test).all():
        raise DataError(f"{shown(path)} lists images that {TABLES[0]} does not have in its test set")
    return some


def _finder(root: Path) -> Finder | None:
    """How an image is found by its official name, if any are here."""
    if (root / "jpg").is_dir():
        return lambda name: on_disk(root / name, name)
    if (root / ARCHIVE).is_file():
        return _Tar(root / ARCHIVE).find
    packed = zip_with(root, "jpg/image_")
    if packed is None:
        return None
    members = {file.name: file for file in packed[1]}
    return lambda name: members.get(name, Bad(name, f"missing in {packed[0].name}"))


class _Tar:
    """The official archive, unpacked into memory by the first read; a cache of decoded images needs none."""

    def __init__(self, path: Path) -> None:
        self.path, self.stat = path, path.stat()
        self.names: list[str] = []
        self.members: dict[str, bytes] | None = None
        self.lock = threading.Lock()

    def find(self, name: str) -> File:
        self.names.append(name)
        return File(name, 1, self.stat.st_mtime_ns ^ self.stat.st_size, partial(self.read, name))

    def read(self, name: str) -> bytes:
        with self.lock:
            if self.members is None:
                self.members = tar_members(self.path, self.names)
        if name not in self.members:
            raise FileNotFoundError(f"missing in {self.path.name}")
        return self.members[name]
