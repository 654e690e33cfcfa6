"""Data sets of the Hugging Face hub, or of that library's folders: the column of images, the column of classes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spalier.data.augment import Ints, Recipe
from spalier.data.folder import recipe_of, tested
from spalier.data.images import LARGEST_FILE
from spalier.data.samples import TEST, TRAIN, VALIDATION, File, Samples, check_labels
from spalier.data.text import imported, shown, some
from spalier.errors import DataError

SPLITS = {TRAIN: ("train", "training"), VALIDATION: ("validation", "valid", "val", "dev"), TEST: ("test",)}
PREFERRED = ("label", "labels", "fine_label")


def hugging_face(name: str, size: int | None) -> tuple[Samples, Recipe]:
    """The splits train, validation and test of a data set; a missing test is carved as for folders."""
    library = imported("datasets", f"hf:{shown(name)}")
    splits = _splits(library, name)
    features = splits[TRAIN].features
    image = _column(name, features, library.Image, "images", ("image", "img"))
    label = _column(name, features, library.ClassLabel, "classes", PREFERRED)
    classes = tuple(map(str, features[label].names))
    pieces = [_part(library, rows, part, image, label) for part, rows in splits.items()]
    notes = tuple(f"{p.notes[0]}" for p in pieces if p.notes)
    pieces = [p for p in pieces if not p.notes]
    labels, parts = (np.concatenate([getattr(p, field) for p in pieces]) for field in ("labels", "parts"))
    check_labels(labels, len(classes), f"hf:{shown(name)}")
    samples = Samples(classes, labels, parts, files=tuple(f for p in pieces for f in p.files), notes=notes)
    return samples if TEST in parts else tested(samples), recipe_of(size)


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


def _part(library: Any, rows: Any, part: int, image: str, label: str) -> Samples:
    labels: Ints = np.array([-1 if value is None else value for value in rows[label]], np.int64)
    split = SPLITS[part][0]
    if part != TRAIN and (labels == -1).all():
        return Samples((), labels, labels, notes=(f"{split}: left out, its samples have no labels",))
    raw = rows.select_columns([image]).cast_column(image, library.Image(decode=False))
    stamp = int(raw._fingerprint, 16)  # of the library's own, changes with the contents
    files = tuple(File(f"{split}/{i}", 1, stamp, partial(_bytes, raw, i, image)) for i in range(len(labels)))
    return Samples((), labels, np.full(len(labels), part), files=files)


def _bytes(rows: Any, index: int, image: str) -> bytes:
    entry = rows[index][image]
    if entry is None:
        return b""
    data: bytes | None = entry["bytes"]
    if data is None:
        with Path(entry["path"]).open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    return data
