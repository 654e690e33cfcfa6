"""`open_data`: a data set by name, of scikit-learn, torchvision, Hugging Face, folders of images or files of texts."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spalier.data.data import (
    ArraySplit,
    BadFile,
    Data,
    Ints,
    Preprocessing,
    check_labels,
    check_share,
    class_names,
    gather_labels,
)
from spalier.data.images import (
    SPLIT_NAMES,
    TEST,
    TRAIN,
    File,
    Samples,
    decode_files,
    find_in_folder,
    pillow,
    usual_size,
)
from spalier.data.texts import Columns, columns_of, find_texts, text_data, to_samples
from spalier.errors import ConfigError, DataError
from spalier.text import check_integer, first_few, import_optional, printable

NAMES = ("digits", "torchvision:NAME", "hf:NAME", "folder:PATH", "text:PATH")
_DATA_FOLDER_VARIABLE = "SPALIER_DATA"
_NOT_MIRRORED = ("MNIST", "EMNIST", "KMNIST", "QMNIST", "USPS", "SVHN", "GTSRB", "RenderedSST2")


def open_data(
    name: str,
    *,
    folder: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
    validation_split: float = 0.1,
    seed: int = 0,
    skip_bad: bool = False,
    labels: bool = True,
    max_train_samples: int | None = None,
    classes: Sequence[str] | None = None,
    download: bool = False,
    tokenizer: str | None = None,
    max_length: int | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
) -> Data:
    """Find a data set, check all of it, decode or tokenise it once, and split it.

    Args:
        name: digits, torchvision:NAME, hf:NAME, folder:PATH or text:PATH.
        folder: where sets of torchvision are; by default the folder that the environment variable SPALIER_DATA names,
            or ``data``.
        image_size: the side of the images; by default their own where they are small, and 224 at most.
        validation_split: the share of each training class that is held out, where the set has no validation split.
        seed: draws the validation split, and the samples that ``max_train_samples`` leaves.
        skip_bad: leave out files that cannot be used, and record them, instead of an error that lists them.
        labels: False takes images without classes.
        max_train_samples: at most so many training samples, of all classes, validation included.
        classes: only these classes, numbered in this order.
        download: let torchvision download a set that is not there.
        tokenizer: for texts, the network whose tokenizer is used: hf:NAME, or a folder. A set of hf:NAME has texts
            where it is given.
        max_length: tokens of a text at most, longer ones are cut; by default what the tokenizer says, at most 512.
        text_column: the column of texts; by default text, sentence, question...
        label_column: the column of classes; by default label, class, category...

    >>> print(open_data("digits"))  # doctest: +ELLIPSIS
    digits: 10 classes, 3 x 8 x 8
    split       samples  classes  smallest  largest
    training      1,294  ...
    """
    check_integer("seed", seed)
    share = check_share(validation_split)
    size = None if image_size is None else check_integer("image_size", image_size, 4)
    limited = partial(_limited, labels=labels, classes=classes, most=max_train_samples, seed=seed)
    if tokenizer is not None or name.startswith("text:"):
        found = _find_texts(name, tokenizer, labels, (text_column, label_column))
        return text_data(name, limited(found), tokenizer or "", max_length, share, seed, skip_bad)
    root = folder or os.environ.get(_DATA_FOLDER_VARIABLE) or "data"
    samples, preprocessing = _find(name, Path(root).expanduser(), size, labels, download)
    samples = limited(samples)
    if not len(samples) and not samples.bad:
        raise DataError(f"{printable(name)} has no images at all; expected some")
    decoded = decode_files(samples.files, preprocessing.stored)
    wrong = [BadFile(samples.files[i].name, reason) for i, reason in sorted(decoded.wrong.items())]
    # Rows of the images that can be used: nothing is copied to leave out a few.
    rows = np.array([i for i in range(len(samples)) if i not in decoded.wrong], np.int64)
    samples = replace(samples.at(rows), bad=(*samples.bad, *wrong))
    samples.check(name, "images", skip_bad)
    samples = samples.with_validation(share, seed)
    contents = [f"{file.name}\0{decoded.digests[i]}" for i, file in zip(rows, samples.files, strict=True)]
    return samples.to_data(
        name,
        (3, preprocessing.size, preprocessing.size),
        preprocessing.as_dict(),
        lambda at: ArraySplit(decoded.images, rows[at], samples.labels[at], preprocessing),
        [*contents, str(preprocessing)],
    )


def _limited(samples: Samples, labels: bool, classes: Sequence[str] | None, most: int | None, seed: int) -> Samples:
    """The samples that were asked for."""
    if not labels:
        samples = replace(samples, classes=(), labels=np.full(len(samples), -1))
    if classes is not None:
        samples = samples.with_classes([classes] if isinstance(classes, str) else classes)
    if most is not None:
        samples = samples.with_limit(check_integer("max_train_samples", most, 1), seed)
    return samples


def _find(name: str, folder: Path, size: int | None, labels: bool, download: bool) -> tuple[Samples, Preprocessing]:
    kind, _, rest = name.partition(":")
    if name == "digits":
        half = (0.5, 0.5, 0.5)
        return _digits(), Preprocessing.small(size or 8, half, half, flip=False)
    if kind == "torchvision" and rest:
        return _torchvision(rest, folder, size, download)
    if kind == "hf" and rest:
        samples = _hugging_face(rest, labels)
        return samples, _preprocessing(size or usual_size(samples.files))
    if kind == "folder" and rest:
        samples = find_in_folder(rest, labels)
        return samples, _preprocessing(size or usual_size(samples.files))
    raise DataError(
        f"there is no data set {printable(name)!r}; expected one of {', '.join(NAMES)}, or Data.of(dataset)"
    )


def _find_texts(name: str, tokenizer: str | None, labels: bool, columns: Columns) -> Samples:
    kind, _, rest = name.partition(":")
    if tokenizer is None:
        raise ConfigError(f"{printable(name)} needs the tokenizer of a network; pass tokenizer=, such as hf:NAME")
    if kind == "text" and rest:
        return find_texts(rest, labels, columns)
    if kind != "hf" or not rest:
        raise ConfigError(f"tokenizer is set, and {printable(name)} has no texts; expected text:PATH or hf:NAME")
    library = import_optional("datasets", f"hf:{printable(rest)}", DataError)
    splits = _hugging_face_splits(library, rest)
    features = splits[TRAIN].features
    text, label = columns_of(name, list(features), *columns, labels=labels)
    classes = getattr(features[label], "names", None) if labels else None
    rows = (
        (split, f"{SPLIT_NAMES[split][0]}/{i}", words, said)
        for split, found in splits.items()
        if not labels or set(found[label]) != {-1}  # how test samples without labels are published
        for i, (words, said) in enumerate(
            zip(found[text], found[label] if labels else [None] * len(found), strict=True)
        )
    )
    return to_samples(rows, classes, labels).with_test()


def _preprocessing(size: int) -> Preprocessing:
    return Preprocessing.photographs(size) if size > 64 else Preprocessing.small(size)


# -- the sources ------------------------------------------------------------------------------------------------------


def _digits() -> Samples:
    """scikit-learn's handwritten digits: 1,797 images of 8x8 that come with the library."""
    found = import_optional("sklearn.datasets", "the data set digits", DataError).load_digits()
    images = np.round(found.images * (255 / 16)).astype(np.uint8)  # 0..16 to 0..255
    files = tuple(File(str(i), partial(pillow().fromarray, image)) for i, image in enumerate(images))
    labels = found.target.astype(np.int64)
    return Samples(tuple("0123456789"), labels, np.full(len(labels), TRAIN), files).with_test()


def _torchvision(name: str, folder: Path, size: int | None, download: bool) -> tuple[Samples, Preprocessing]:
    """A set of torchvision.datasets that gives images of Pillow and a class each."""
    library = import_optional("torchvision.datasets", f"torchvision:{printable(name)}", DataError)
    make = getattr(library, name, None)
    if not inspect.isclass(make) or not issubclass(make, library.VisionDataset):
        raise DataError(
            f"torchvision.datasets has no {printable(name)!r}; expected the name of one of its classes, such as "
            "torchvision:CIFAR10"
        )
    splits = _torchvision_splits(make, folder, download)
    image, label = splits[TRAIN][0]
    if not hasattr(image, "convert") or not isinstance(label, int | np.integer):
        raise DataError(
            f"torchvision:{name} gives ({type(image).__name__}, {type(label).__name__}), expected (image, int); "
            "pass Data.of a dataset whose transforms give an image and a class"
        )
    labels = np.concatenate([gather_labels(dataset, f"torchvision:{name}") for dataset in splits.values()])
    classes = class_names(splits[TRAIN])
    files = tuple(
        File(f"{SPLIT_NAMES[split][0]}/{i}", partial(_image_at, dataset, i))
        for split, dataset in splits.items()
        for i in range(len(dataset))
    )
    which = np.repeat(list(splits), [len(dataset) for dataset in splits.values()])
    samples = Samples(classes, check_labels(labels, len(classes), f"torchvision:{name}"), which, files)
    preprocessing = _preprocessing(size or usual_size(files))
    return samples.with_test(), replace(preprocessing, flip=name not in _NOT_MIRRORED)


def _image_at(dataset: Any, index: int) -> Any:
    return dataset[index][0]


def _torchvision_splits(make: Any, folder: Path, download: bool) -> dict[int, Any]:
    """The datasets of training, validation and test, as far as the set has them."""
    options = inspect.signature(make).parameters
    shared: dict[str, Any] = {"root": str(folder)} | ({"download": True} if download else {})
    try:
        if "train" in options:
            return {TRAIN: make(train=True, **shared), TEST: make(train=False, **shared)}
        if "split" not in options:
            return {TRAIN: make(**shared)}
        splits: dict[int, Any] = {}
        for split, names in SPLIT_NAMES.items():
            for name in names:
                # How torchvision refuses a split that the set does not have.
                with contextlib.suppress(ValueError):
                    if split not in splits:
                        splits[split] = make(split=name, **shared)
        if TRAIN not in splits:
            raise RuntimeError("it has no split called train")
        return splits
    except (OSError, RuntimeError, TypeError) as error:
        title = f"torchvision:{make.__name__}"
        call = f'open_data("{title}", folder="{printable(folder)}", download=True)'
        raise DataError(
            f"{title} cannot be opened in {printable(folder.absolute())}: {printable(error)}; {call} downloads most "
            f"sets once; folder= or the variable {_DATA_FOLDER_VARIABLE} names the folder that has it; sets that need "
            "other arguments go to Data.of"
        ) from error


def _hugging_face(name: str, labels: bool) -> Samples:
    """A set of the Hugging Face hub, or of a folder: its column of images, its column of classes."""
    library = import_optional("datasets", f"hf:{printable(name)}", DataError)
    splits = _hugging_face_splits(library, name)
    features = splits[TRAIN].features
    image = _column(name, features, library.Image, "images", ("image", "img"))
    usual = ("label", "labels", "fine_label")
    label = _column(name, features, library.ClassLabel, "classes", usual) if labels else None
    classes = tuple(map(str, features[label].names)) if label else ()
    known = {split: _hugging_face_labels(name, rows, label, classes) for split, rows in splits.items()}
    unlabelled = [split for split in known if labels and split != TRAIN and (known[split] == -1).all()]
    used = [split for split in known if split not in unlabelled]
    every = np.concatenate([known[split] for split in used])
    return Samples(
        classes,
        check_labels(every, len(classes), f"hf:{printable(name)}"),
        np.repeat(used, [len(known[split]) for split in used]),
        tuple(file for split in used for file in _rows(library, splits[split], SPLIT_NAMES[split][0], image)),
        notes=tuple(f"{SPLIT_NAMES[s][0]}: left out, its samples have no labels" for s in unlabelled),
    ).with_test()


def _hugging_face_splits(library: Any, name: str) -> dict[int, Any]:
    path = Path(name).expanduser()
    saved = any((path / mark).is_file() for mark in ("dataset_dict.json", "state.json"))
    try:
        found = library.load_from_disk(str(path)) if saved else library.load_dataset(name)
    except Exception as error:  # the library and the network raise anything
        raise DataError(
            f"hf:{printable(name)} cannot be loaded: {type(error).__name__}: {printable(error)}; expected a data set "
            "of https://huggingface.co/datasets, or a folder that datasets can read"
        ) from error
    splits = found if isinstance(found, dict) else {"train": found}
    full = {each: rows for each, rows in splits.items() if len(rows)}
    chosen = {split: full[each] for split, names in SPLIT_NAMES.items() for each in names if each in full}
    if TRAIN not in chosen:
        raise DataError(f"hf:{printable(name)} has the splits {first_few(list(splits))}, expected train among them")
    return chosen


def _column(name: str, features: Any, kind: Any, what: str, preferred: tuple[str, ...]) -> str:
    """The one column of a kind, or that of several which has the usual name."""
    found = [column for column, feature in features.items() if isinstance(feature, kind)]
    best = [column for column in preferred if column in found]
    if len(found) != 1 and not best:
        kinds = ", ".join(f"{printable(c)} ({type(f).__name__})" for c, f in features.items())
        raise DataError(
            f"hf:{printable(name)} has {len(found)} columns of {what} ({kind.__name__}), expected one, or one called "
            f"{preferred[0]}; it has {kinds}: rename or cast a column, pass a dataset to Data.of, or, if these are "
            "texts, set text_column to the column of them"
        )
    return str(best[0] if best else found[0])


def _hugging_face_labels(name: str, rows: Any, label: str | None, classes: tuple[str, ...]) -> Ints:
    """The label of each row, -1 where it has none."""
    if label is None or label not in rows.features:
        return np.full(len(rows), -1)
    own = tuple(map(str, getattr(rows.features[label], "names", ())))
    if own != classes:
        raise DataError(f"hf:{printable(name)} has splits of other classes: {first_few(own)} and {first_few(classes)}")
    return np.array([-1 if value is None else value for value in rows[label]], np.int64)


def _rows(library: Any, rows: Any, split: str, image: str) -> Iterator[File]:
    """The images of a split as they are stored: decoding them is ours, with its checks."""
    stored = rows.select_columns([image]).cast_column(image, library.Image(decode=False))
    for i in range(len(rows)):
        yield File(f"{split}/{i}", partial(_row_bytes, stored, i, image))


def _row_bytes(rows: Any, index: int, image: str) -> bytes:
    entry = rows[index][image] or {"bytes": b""}  # None: a row without an image
    return Path(entry["path"]).read_bytes() if entry["bytes"] is None else bytes(entry["bytes"])
