"""Images in folders by class: any folder, and Cats & Dogs, whose archive has the same shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from spalier.data.archives import is_clutter, walk
from spalier.data.augment import Recipe
from spalier.data.images import SUFFIXES
from spalier.data.places import missing, roots, zip_with
from spalier.data.samples import IMAGENET, TEST, TRAIN, VALIDATION, Bad, File, Samples, photographs, small
from spalier.data.splits import TEST_SEED, TEST_SHARE, held_out
from spalier.data.text import shown, some
from spalier.errors import DataError

PARTS = {
    TRAIN: ("train", "training"),
    VALIDATION: ("val", "valid", "validation"),
    TEST: ("test", "testing"),
}
ANIMALS = ("cats", "dogs")
HALVES = {TRAIN: "training_set", TEST: "test_set"}

Found = tuple[File | Bad, int, int]
"""A file, its label, its part."""


def by_class(folder: str, size: int | None, labels: bool) -> tuple[Samples, Recipe]:
    """PATH/train/CLASS/* with val and test beside it, or PATH/CLASS/*; without labels, all images below PATH."""
    root = Path(folder).expanduser()
    if not folder or not root.is_dir():
        raise DataError(
            f"there is no folder {shown(root.absolute())}; expected folder:PATH with images by class"
        )
    split, others = _parts(root, labels)
    top = split or {TRAIN: root}
    classes = _classes(top) if labels else ()
    prefix = {part: path.name if split else "" for part, path in top.items()}
    found = [f for part, path in top.items() for f in _listed(path, prefix[part], part, classes)]
    samples = _samples(classes, found)
    if others:
        samples = samples.noted(f"not looked at: {some(others)}")
    return samples if TEST in split else tested(samples), recipe_of(size)


def recipe_of(size: int | None) -> Recipe:
    """Images of up to 64 are small ones, larger ones photographs."""
    return photographs(size or 224) if (size or 224) > 64 else small(size or 224, *IMAGENET)


def _parts(root: Path, labels: bool) -> tuple[dict[int, Path], list[str]]:
    """The folders of parts, if there is one for training that has folders in turn; and what else is there."""
    folders = _folders(root)
    named = {part: [n for n in folders if n.lower() in names] for part, names in PARTS.items()}
    train = named[TRAIN]
    if not train or (labels and not any(_folders(root / name) for name in train)):
        if folders and sum(map(len, named.values())) == len(folders) and labels:
            raise DataError(
                f"{shown(root)} has {some(folders)}, expected train/CLASS/ among them, or CLASS/ alone"
            )
        return {}, []
    doubled = [names for names in named.values() if len(names) > 1]
    if doubled:
        raise DataError(f"{shown(root)} has {some(doubled[0])}, expected one of them; leave or rename one")
    parts = {part: root / names[0] for part, names in named.items() if names}
    return parts, [n for n in folders if root / n not in parts.values()]


def _folders(path: Path) -> list[str]:
    try:
        return sorted(p.name for p in path.iterdir() if p.is_dir() and not is_clutter(p.name))
    except OSError as error:
        raise DataError(f"{shown(path)} cannot be listed: {error.strerror or error}") from error


def _classes(parts: dict[int, Path]) -> tuple[str, ...]:
    classes = _folders(parts[TRAIN])
    for path in parts.values():
        strange = sorted(set(_folders(path)) - set(classes))
        if strange:
            raise DataError(
                f"{shown(path)} has classes that training has not: {some(strange)}; remove or add them"
            )
    if not classes:
        raise DataError(
            f"{shown(parts[TRAIN])} has no folders of classes; expected CLASS/image.jpg, or labels=False for images "
            "without classes"
        )
    return tuple(classes)


def _listed(path: Path, prefix: str, part: int, classes: Sequence[str]) -> Iterable[Found]:
    if not classes:
        for file in walk(path, prefix or "."):
            yield file, -1, part
        return
    for entry in sorted(path.iterdir()):
        if entry.suffix.lower() in SUFFIXES and not is_clutter(entry.name) and not entry.is_dir():
            yield (
                Bad(f"{prefix}/{entry.name}".lstrip("/"), "an image outside of the folders of classes"),
                -1,
                part,
            )
    for name in sorted(set(classes) & set(_folders(path))):
        for file in walk(path / name, f"{prefix}/{name}".lstrip("/")):
            yield file, classes.index(name), part


def _samples(classes: tuple[str, ...], found: Iterable[Found]) -> Samples:
    good, bad = [], []
    for file, label, part in found:
        if isinstance(file, File):
            good.append((file, label, part))
        else:
            bad.append(file)
    labels, parts = (np.array([row[i] for row in good], np.int64) for i in (1, 2))
    return Samples(classes, labels, parts, files=tuple(row[0] for row in good), bad=tuple(bad))


def tested(samples: Samples) -> Samples:
    """A fifth of each class for the test, where there is none."""
    parts, training = samples.parts.copy(), np.flatnonzero(samples.parts == TRAIN)
    if len(training):
        parts[training[held_out(samples.labels[training], TEST_SHARE, TEST_SEED)]] = TEST
    note = f"test: {TEST_SHARE:.0%} of each class taken from training, the same whatever the seed"
    return replace(samples, parts=parts).noted(note)


def cats_and_dogs(folder: Path, size: int | None) -> tuple[Samples, Recipe]:
    """training_set and test_set with cats and dogs each, as folders or in a zip archive; nested twice too."""
    for root in roots(folder, ["catsanddogs", "catsdogs", "cat-and-dog"]):
        if all((root / half).is_dir() for half in HALVES.values()):
            return _samples(ANIMALS, _halves(root)), photographs(size or 224)
        packed = zip_with(root, "training_set/")
        if packed is not None:
            return _samples(ANIMALS, _unpacked(packed[1])), photographs(size or 224)
    looked_for = [
        *(f"{half}/{animal}/" for half in HALVES.values() for animal in ANIMALS),
        "a zip archive of them",
    ]
    origin = "https://www.kaggle.com/datasets/tongpython/cat-and-dog"
    raise missing("catsanddogs", folder, looked_for, origin)


def _halves(root: Path) -> Iterable[Found]:
    for part, half in HALVES.items():
        inner = root / half / half if (root / half / half).is_dir() else root / half
        for label, animal in enumerate(ANIMALS):
            for file in walk(inner / animal, f"{half}/{animal}"):
                yield file, label, part


def _unpacked(files: Sequence[File]) -> Iterable[Found]:
    for part, half in HALVES.items():
        for label, animal in enumerate(ANIMALS):
            places = (f"{half}/{animal}/", f"{half}/{half}/{animal}/")
            for file in sorted((f for f in files if f.name.startswith(places)), key=lambda f: f.name):
                yield file, label, part
