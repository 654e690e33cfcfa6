"""Data sets of the Hugging Face hub, or of that library's folders: the column of images, the column of classes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spalier.data.augment import Ints, Recipe
from spalier.data.folder import recipe_of, tested
from spalier.data.images import LARGEST_FILE
from spalier.data.samples import TEST, TRAIN, VALIDATION, File, Samples, check_labels, digest
from spalier.data.text import imported, shown, some
from spalier.errors import DataError

SPLITS = {TRAIN: ("train", "training"), VALIDATION: ("validation", "valid", "val", "dev"), TEST: ("test",)}
PREFERRED = ("label", "labels", "fine_label")


def hugging_face(name: str, size: int | None, labels: bool = True) -> tuple[Samples, Recipe]:
    """The splits train, validation and test of a data set; a missing test is carved as for folders."""
    library = imported("datasets", f"hf:{shown(name)}")
    splits = _splits(library, name)
    features = splits[TRAIN].features
    image = _column(name, features, library.Image, "images", ("image", "img"))
    label = _column(name, features, library.ClassLabel, "classes", PREFERRED) if labels else None
    classes = tuple(map(str, features[label].names)) if label else ()
    known = {part: _labels(name, rows, label, classes) for part, rows in splits.items()}
    left_out = [part for part in known if labels and part != TRAIN and (known[part] == -1).all()]
    used = [part for part in known if part not in left_out]
    every = np.concatenate([known[part] for part in used])
    parts = np.repeat(used, [len(known[part]) for part in used])
    files = tuple(file for part in used for file in _files(library, splits[part], SPLITS[part][0], image))
    notes = tuple(f"{SPLITS[part][0]}: left out, its samples have no labels" for part in left_out)
    if labels:
        check_labels(every, len(classes), f"hf:{shown(name)}")
    samples = Samples(classes, every, parts, files=files, notes=notes)
    return samples if TEST in used else tested(samples), recipe_of(size)


def _splits(library: Any, name: str) -> dict[int, Any]:
    path = Path(name).expanduser()
    saved = any((path / mark).is_file() for mark in ("dataset_dict.json", "state.json"))
    try:
        found = library.load_from_disk(str(path)) if saved else library.load_dataset(name)
    except Exception as error:  # the library and the network raise anything
        raise DataError(
            f"hf:{shown(name)} cannot be loaded: {type(error).__name__}: {shown(error)}; expected a data set of "
            "https://huggingface.co/datasets, or a folder that datasets can read"
        ) from error
    splits = found if isinstance(found, dict) else {"train": found}
    chosen = {
        part: splits[n] for part, names in SPLITS.items() for n in names if n in splits and len(splits[n])
    }
    if TRAIN not in chosen:
        raise DataError(f"hf:{shown(name)} has the splits {some(list(splits))}, expected train among them")
    return chosen


def _column(name: str, features: Any, kind: Any, what: str, preferred: tuple[str, ...]) -> str:
    found = [column for column, feature in features.items() if isinstance(feature, kind)]
    best = [column for column in preferred if column in found]
    if len(found) != 1 and not best:
        kinds = ", ".join(f"{shown(c)} ({type(f).__name__})" for c, f in features.items())
        raise DataError(
            f"hf:{shown(name)} has {len(found)} columns of {what} ({kind.__name__}), expected one, or one called "
            f"{preferred[0]}; it has {kinds}: rename or cast a column, or pass a dataset to Data.of"
        )
    return str(best[0] if best else found[0])


def _labels(name: str, rows: Any, label: str | None, classes: tuple[str, ...]) -> Ints:
    """The label of each row, -1 where it has none."""
    if label is None or label not in rows.features:
        return np.full(len(rows), -1)
    own = tuple(map(str, getattr(rows.features[label], "names", ())))
    if own != classes:
        raise DataError(f"hf:{shown(name)} has splits of other classes: {some(own)} and {some(classes)}")
    return np.array([-1 if value is None else value for value in rows[label]], np.int64)


def _files(library: Any, rows: Any, split: str, image: str) -> Iterator[File]:
    if image not in rows.features:
        raise DataError(
            f"the split {split} has no column {shown(image)} as train has; it has {some(list(rows.features))}"
        )
    raw = rows.select_columns([image]).cast_column(image, library.Image(decode=False))
    stamp = int(digest(str(raw._fingerprint))[:15], 16)  # the library's own, other for other contents
    for i in range(len(rows)):
        yield File(f"{split}/{i}", 1, stamp, partial(_bytes, raw, i, image))


def _bytes(rows: Any, index: int, image: str) -> bytes:
    entry = rows[index][image]
    if entry is None:
        return b""
    data: bytes | None = entry["bytes"]
    if data is None:
        with Path(entry["path"]).open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    return data
