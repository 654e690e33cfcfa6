"""`open_data`: a data set by name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spalier.data.augment import Bytes, Ints, Recipe
from spalier.data.cifar import cifar
from spalier.data.data import Data
from spalier.data.decode import decoded
from spalier.data.digits import digits
from spalier.data.flowers import flowers102
from spalier.data.folder import by_class, cats_and_dogs
from spalier.data.hugging_face import hugging_face
from spalier.data.part import Pixels
from spalier.data.places import data_folder
from spalier.data.samples import TEST, TRAIN, UNUSED, VALIDATION, Bad, Samples, digest
from spalier.data.splits import held_out, limited
from spalier.data.text import shown, some, whole
from spalier.errors import ConfigError, DataError

NAMES = ("digits", "cifar10", "cifar100", "flowers102", "catsanddogs", "folder:PATH", "hf:NAME")
LISTED = 20
"""Bad files that an error shows; it counts the rest."""


def open_data(
    name: str,
    *,
    folder: str | os.PathLike[str] | None = None,
    size: int | None = None,
    validation: float = 0.1,
    seed: int = 0,
    skip_bad: bool = False,
    labels: bool = True,
    cache: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    classes: Sequence[str] | None = None,
) -> Data:
    """Find a data set, check all of it, decode it once, and split it.

    ``name`` is one of `NAMES`. Named sets lie in ``folder``, else in the folder that the variable SPALIER_DATA names,
    else in ``data``. ``size`` is the side of the images, ``validation`` the share of each training class that is held
    out. ``limit`` takes at most so many training samples, ``classes`` only those classes, in that order. Files that
    cannot be used are an error that lists them; ``skip_bad`` leaves them out instead and records them.
    ``labels=False`` admits images without classes. ``cache`` is a folder for decoded images, which are otherwise held
    in memory.

    >>> print(open_data("digits"))  # doctest: +ELLIPSIS
    digits: 10 classes, 3 x 8 x 8
    part        samples  classes  smallest  largest
    training      1,294  ...
    """
    _check_options(seed, validation, limit)
    size = None if size is None else whole("size", size, 4)
    samples, recipe = _source(name, data_folder(folder), size, labels)
    samples = samples if labels else _unlabelled(samples)
    samples = _kept(samples, classes) if classes is not None else samples
    samples = _limited(samples, limit, seed) if limit is not None else samples
    if not len(samples) and not samples.bad:
        raise DataError(f"{shown(name)} has no images at all; expected some")
    samples, images, content = _pixels(name, samples, recipe, cache, skip_bad)
    _check_classes(name, samples)
    samples = _validated(samples, float(validation), seed)
    return _data(name, samples, images, content, recipe)


def _check_options(seed: int, validation: float, limit: int | None) -> None:
    whole("seed", seed)
    if limit is not None:
        whole("limit", limit, 1)
    if not isinstance(validation, (int, float)) or isinstance(validation, bool) or not 0 <= validation < 1:
        raise ConfigError(f"validation is {validation!r}, expected a share of training, 0 to less than 1")


def _source(name: str, folder: Path, size: int | None, labels: bool) -> tuple[Samples, Recipe]:
    """What is there, before anything is decoded."""
    kind, _, rest = name.partition(":")
    if name == "digits":
        return digits(size)
    if name in ("cifar10", "cifar100"):
        return cifar(name, folder, size)
    if name == "flowers102":
        return flowers102(folder, size)
    if name == "catsanddogs":
        return cats_and_dogs(folder, size)
    if kind == "folder" and rest:
        return by_class(rest, size, labels)
    if kind == "hf" and rest:
        return hugging_face(rest, size, labels)
    raise DataError(
        f"there is no data set {shown(name)!r}; expected one of {', '.join(NAMES)}, or Data.of(dataset)"
    )


def _unlabelled(samples: Samples) -> Samples:
    return replace(samples, classes=(), labels=np.full(len(samples), -1))


def _kept(samples: Samples, classes: Sequence[str]) -> Samples:
    """Some of the classes, numbered in the order given."""
    wanted = [classes] if isinstance(classes, str) else list(classes)
    strange = [name for name in wanted if name not in samples.classes]
    if strange or len(set(wanted)) < len(wanted):
        raise ConfigError(
            f"classes asks for {some(strange) if strange else 'one twice'}, expected different ones of "
            f"{some(samples.classes, 20)}"
        )
    numbers = np.full(len(samples.classes) + 1, -1)
    numbers[[samples.classes.index(name) for name in wanted]] = np.arange(len(wanted))
    rows = np.flatnonzero(numbers[samples.labels] >= 0)
    return replace(samples.at(rows), classes=tuple(wanted), labels=numbers[samples.labels[rows]])


def _limited(samples: Samples, limit: int, seed: int) -> Samples:
    training = np.flatnonzero(samples.parts == TRAIN)
    keep = np.ones(len(samples), bool)
    keep[training] = limited(samples.labels[training], limit, seed)
    left_out = f"limit: {keep[training].sum():,} of {len(training):,} training samples"
    return samples if keep.all() else samples.at(np.flatnonzero(keep)).noted(left_out)


def _pixels(
    name: str, samples: Samples, recipe: Recipe, cache: str | os.PathLike[str] | None, skip_bad: bool
) -> tuple[Samples, _Rows, str]:
    """Everything decoded and checked; what cannot be used is an error, or left out and recorded."""
    if samples.pixels is not None:
        return samples, _Rows(samples.pixels, np.arange(len(samples))), digest(samples.pixels)
    found = decoded(samples.files, recipe.stored, cache)
    bad = (*samples.bad, *found.bad(samples.files))
    if bad and not skip_bad:
        raise _refused(name, bad, len(samples.files) + len(samples.bad))
    good = np.array([i for i in range(len(samples)) if i not in found.wrong], np.int64)
    content = digest(*(f"{samples.files[i].name}\0{found.digests[i]}" for i in good))
    return replace(samples.at(good), bad=bad), _Rows(found.images, good), content


class _Rows(NamedTuple):
    """Pixels of all files, and the rows of those that can be used: nothing is copied to leave out a few."""

    images: Bytes
    good: Ints


def _refused(name: str, bad: Sequence[Bad], total: int) -> DataError:
    lines = [f"  {entry}" for entry in bad[:LISTED]]
    if len(bad) > LISTED:
        lines.append(f"  and {len(bad) - LISTED:,} more")
    return DataError(
        f"{len(bad):,} of {total:,} files of {shown(name)} cannot be used; repair or remove them, or pass "
        "skip_bad=True to leave them out:\n" + "\n".join(lines)
    )


def _check_classes(name: str, samples: Samples) -> None:
    labels = samples.labels[samples.parts == TRAIN]
    if not len(labels):
        raise DataError(f"{shown(name)} has no training images that can be used; expected some")
    if not samples.classes:
        return
    counts = np.bincount(labels, minlength=len(samples.classes))
    empty = [samples.classes[i] for i in np.flatnonzero(counts == 0)]
    if empty:
        raise DataError(
            f"{shown(name)} has classes without any training image that can be used: {some(empty, LISTED)}; "
            "add images, remove the classes, or pass classes= without them"
        )
    if len(samples.classes) < 2:
        raise DataError(
            f"{shown(name)} has a single class, {some(samples.classes)}; expected at least two to tell apart"
        )


def _validated(samples: Samples, share: float, seed: int) -> Samples:
    """With a validation split: the set's own, or a share of each training class."""
    if share == 0:
        own = np.flatnonzero(samples.parts == VALIDATION)
        rest = replace(samples, parts=np.where(samples.parts == VALIDATION, UNUSED, samples.parts))
        return rest.noted(f"validation: the set's own {len(own):,} are not used") if len(own) else samples
    if (samples.parts == VALIDATION).any():
        return samples.noted("validation: the set's own")
    training = np.flatnonzero(samples.parts == TRAIN)
    parts, labels = samples.parts.copy(), samples.labels[training]
    parts[training[held_out(labels, share, seed)]] = VALIDATION
    single = [samples.classes[i] for i in np.flatnonzero(np.bincount(labels) == 1)] if samples.classes else []
    carved = replace(samples, parts=parts)
    return carved.noted(f"validation: none of {some(single)}, of one sample each") if single else carved


def _data(name: str, samples: Samples, pixels: _Rows, content: str, recipe: Recipe) -> Data:
    rows = [np.flatnonzero(samples.parts == part) for part in (TRAIN, VALIDATION, TEST)]
    train, validation, test = (
        Pixels(pixels.images, pixels.good[r], samples.labels[r], recipe) if len(r) else None for r in rows
    )
    assert train is not None
    return Data(
        name=name,
        classes=samples.classes,
        shape=(3, recipe.size, recipe.size),
        train=train,
        validation=validation,
        test=test,
        preprocessing=recipe.plain(),
        digest=digest(content, samples.labels, samples.parts, str(recipe), "\0".join(samples.classes)),
        skipped=samples.bad,
        notes=samples.notes,
    )
