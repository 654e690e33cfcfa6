"""Image files: found in folders by class, checked, and decoded once into square arrays of bytes."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from spalier.data.data import BadFile, Data, Images, Ints, Split, digest, held_out, limited
from spalier.errors import ConfigError, DataError
from spalier.text import first_few, import_optional, printable

# Pillow also reads formats such as EPS by starting other programs; only these are admitted.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "AVIF", "JPEG2000")
TRAIN, VALIDATION, TEST, UNUSED = range(4)
"""The split that a sample belongs to."""
SPLIT_NAMES = {
    TRAIN: ("train", "training", "trainval"),
    VALIDATION: ("validation", "valid", "val", "dev"),
    TEST: ("test", "testing"),
}
"""What folders, and splits of other libraries, are called; the first is what messages say."""
MAX_FILE_BYTES = 256 * 2**20
_LOOKS = 11  # images whose size is looked at
_TEST_SHARE, _TEST_SEED = 0.2, 2023
_LISTED = 20  # bad files that an error shows; it counts the rest
_IMAGE_NAME = re.compile(r"\.(jpe?g|jpe|jfif|mpo|png|gif|bmp|webp|tiff?|p[bgnp]m|avif|jp2)$", re.IGNORECASE)
_CLUTTER = {"thumbs.db", "desktop.ini", "_ds_store", "__macosx"}


@dataclass(frozen=True)
class File:
    """A sample that can be read: bytes or an image of Pillow, or a text."""

    name: str
    read: Callable[[], Any]
    size: int = 0


@dataclass(frozen=True)
class Samples:
    """What a source finds, before anything is decoded: files, their labels, and the split that each belongs to."""

    classes: tuple[str, ...]
    labels: Ints
    splits: Ints
    files: tuple[File, ...]
    notes: tuple[str, ...] = ()
    bad: tuple[BadFile, ...] = ()

    def __len__(self) -> int:
        return len(self.files)

    def at(self, rows: Ints) -> Samples:
        """Some of the samples."""
        files = tuple(self.files[i] for i in rows)
        return replace(self, labels=self.labels[rows], splits=self.splits[rows], files=files)

    def check(self, name: str, what: str, skip_bad: bool) -> None:
        """Refuse samples that cannot be used, classes that nothing can be learned of, and a single class."""
        if self.bad and not skip_bad:
            raise _refusal(name, "files" if what == "images" else what, self.bad, len(self) + len(self.bad))
        labels = self.labels[self.splits == TRAIN]
        if not len(labels):
            raise DataError(f"{printable(name)} has no training {what} that can be used; expected some")
        if not self.classes:
            return
        empty = [each for i, each in enumerate(self.classes) if i not in labels]
        if empty:
            raise DataError(
                f"{printable(name)} has classes without any training {what.removesuffix('s')} that can be used: "
                f"{first_few(empty, _LISTED)}; add {what}, remove the classes, or pass classes= without them"
            )
        if len(self.classes) < 2:
            raise DataError(
                f"{printable(name)} has a single class, {first_few(self.classes)}; expected at least two to tell apart"
            )

    def with_note(self, note: str) -> Samples:
        """The same with something that the summary will say."""
        return replace(self, notes=(*self.notes, note))

    def with_classes(self, wanted: Sequence[str]) -> Samples:
        """The samples of some classes, numbered in the order given."""
        unknown = [name for name in wanted if name not in self.classes]
        if unknown or len(set(wanted)) < len(wanted):
            raise ConfigError(
                f"classes asks for {first_few(unknown) if unknown else 'one twice'}, expected different ones of "
                f"{first_few(self.classes, 20)}"
            )
        numbers = np.full(len(self.classes) + 1, -1)  # the last is for the label -1, which stays what it is
        numbers[[self.classes.index(name) for name in wanted]] = np.arange(len(wanted))
        rows = np.flatnonzero(numbers[self.labels] >= 0)
        return replace(self.at(rows), classes=tuple(wanted), labels=numbers[self.labels[rows]])

    def with_limit(self, most: int, seed: int) -> Samples:
        """At most so many training samples, of all classes."""
        training = np.flatnonzero(self.splits == TRAIN)
        keep = np.ones(len(self), bool)
        keep[training] = limited(self.labels[training], most, seed)
        note = f"max_train_samples: {keep[training].sum():,} of {len(training):,} training samples"
        return self if keep.all() else self.at(np.flatnonzero(keep)).with_note(note)

    def with_test(self) -> Samples:
        """The same with a share of each training class as the test split, whatever the seed, if there is none yet."""
        if (self.splits == TEST).any() or not (self.splits == TRAIN).any():
            return self
        note = f"test: {_TEST_SHARE:.0%} of each class taken from training, the same whatever the seed"
        return self._held_out(_TEST_SHARE, _TEST_SEED, TEST).with_note(note)

    def with_validation(self, share: float, seed: int) -> Samples:
        """The set's own validation split, or a share of each training class."""
        own = self.splits == VALIDATION
        if own.any() and share == 0:
            unused = replace(self, splits=np.where(own, UNUSED, self.splits))
            return unused.with_note(f"validation: the set's own {own.sum():,} are not used")
        if own.any():
            return self.with_note("validation: the set's own")
        if share == 0:
            return self
        counts = np.bincount(self.labels[self.splits == TRAIN] + 1)[1:]  # without the label -1
        single = [self.classes[i] for i in np.flatnonzero(counts == 1)]
        note = (f"validation: none of {first_few(single)}, of one sample each",) if single else ()
        return replace(self._held_out(share, seed, VALIDATION), notes=(*self.notes, *note))

    def to_data(
        self,
        name: str,
        shape: tuple[int, ...],
        preprocessing: dict[str, Any],
        make: Callable[[Ints], Split],
        contents: Iterable[str],
    ) -> Data:
        """The data of these samples, where ``make`` gives the split of some of them; the digest is of ``contents``."""
        train, *others = (make(np.flatnonzero(self.splits == split)) for split in (TRAIN, VALIDATION, TEST))
        validation, test = (split if len(split) else None for split in others)
        *first, said = contents
        found = digest(*first, self.labels, self.splits, said, *self.classes)
        splits = (train, validation, test)
        return Data(name, self.classes, shape, *splits, preprocessing, found, skipped=self.bad, notes=self.notes)

    def _held_out(self, share: float, seed: int, split: int) -> Samples:
        splits, training = self.splits.copy(), np.flatnonzero(self.splits == TRAIN)
        splits[training[held_out(self.labels[training], share, seed)]] = split
        return replace(self, splits=splits)


def _refusal(name: str, what: str, bad: Sequence[BadFile], total: int) -> DataError:
    lines = [f"  {entry}" for entry in bad[:_LISTED]]
    if len(bad) > _LISTED:
        lines.append(f"  and {len(bad) - _LISTED:,} more")
    return DataError(
        f"{len(bad):,} of {total:,} {what} of {printable(name)} cannot be used; repair or remove them, or pass "
        "skip_bad=True to leave them out:\n" + "\n".join(lines)
    )


# -- finding files ----------------------------------------------------------------------------------------------------


def find_in_folder(path: str, labels: bool) -> Samples:
    """PATH/train/CLASS/* with val and test beside it, or PATH/CLASS/*; without labels, all images below PATH."""
    root = Path(path).expanduser()
    if not root.is_dir():
        raise DataError(f"there is no folder {printable(root.absolute())}; expected folder:PATH with images by class")
    split_folders, others = _split_folders(root, labels)
    folders = split_folders or {TRAIN: root}
    classes = _classes(folders) if labels else ()
    found = [
        (file, label, split)
        for split, folder in folders.items()
        for file, label in _files(folder, folder.name if split_folders else "", classes)
    ]
    good = [(file, label, split) for file, label, split in found if isinstance(file, File)]
    samples = Samples(
        classes,
        labels=np.array([label for _, label, _ in good], np.int64),
        splits=np.array([split for _, _, split in good], np.int64),
        files=tuple(file for file, _, _ in good),
        notes=(f"not looked at: {first_few(others)}",) if others else (),
        bad=tuple(file for file, _, _ in found if isinstance(file, BadFile)),
    )
    return samples if TEST in split_folders else samples.with_test()


def _split_folders(root: Path, labels: bool) -> tuple[dict[int, Path], list[str]]:
    """The folders of splits, if there is one for training with classes in it; and what else is there."""
    folders = _folders(root)
    named = {split: [n for n in folders if n.lower() in names] for split, names in SPLIT_NAMES.items()}
    # "train" is also a vehicle: a class, unless there are folders of classes in it.
    if not named[TRAIN] or (labels and not any(_folders(root / name) for name in named[TRAIN])):
        if labels and folders and sum(map(len, named.values())) == len(folders):
            raise DataError(
                f"{printable(root)} has {first_few(folders)}, expected train/CLASS/ among them, or CLASS/ alone"
            )
        return {}, []
    for names in named.values():
        if len(names) > 1:
            raise DataError(f"{printable(root)} has {first_few(names)}, expected one of them; leave or rename one")
    splits = {split: root / names[0] for split, names in named.items() if names}
    return splits, [name for name in folders if root / name not in splits.values()]


def _classes(folders: dict[int, Path]) -> tuple[str, ...]:
    classes = _folders(folders[TRAIN])
    if not classes:
        raise DataError(
            f"{printable(folders[TRAIN])} has no folders of classes; expected CLASS/image.jpg, or labels=False for "
            "images without classes"
        )
    for folder in folders.values():
        unknown = sorted(set(_folders(folder)) - set(classes))
        if unknown:
            raise DataError(
                f"{printable(folder)} has classes that training has not: {first_few(unknown)}; remove or add them"
            )
    return tuple(classes)


def _files(folder: Path, prefix: str, classes: Sequence[str]) -> Iterator[tuple[File | BadFile, int]]:
    """Each file of a split with its label; -1 where there are no classes."""
    if not classes:
        yield from ((file, -1) for file in _walk(folder, prefix or ".", set()))
        return
    for entry in sorted(folder.iterdir()):
        name = f"{prefix}/{entry.name}".lstrip("/")
        if _is_clutter(entry.name):
            continue
        if entry.is_dir():
            for file in _walk(entry, name, set()):
                yield file, classes.index(entry.name)
        elif _IMAGE_NAME.search(entry.name):
            yield BadFile(name, "an image outside of the folders of classes"), -1


def _folders(path: Path) -> list[str]:
    try:
        return sorted(p.name for p in path.iterdir() if p.is_dir() and not _is_clutter(p.name))
    except OSError as error:
        raise DataError(f"{printable(path)} cannot be listed: {error.strerror or error}") from error


def _walk(path: Path, name: str, seen: set[tuple[int, int]]) -> Iterator[File | BadFile]:
    """All files below a folder in the order of their names. Links are followed; each folder is read once."""
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode):
            yield File(name, path.read_bytes, found.st_size)
        elif not stat.S_ISDIR(found.st_mode):  # pipes and devices are never opened
            yield BadFile(name, "not a regular file")
        elif (found.st_dev, found.st_ino) in seen:
            yield BadFile(name, "a link to a folder that is read already")
        else:
            seen.add((found.st_dev, found.st_ino))
            for entry in sorted(entry.name for entry in path.iterdir()):
                if not _is_clutter(entry):
                    yield from _walk(path / entry, f"{name}/{entry}", seen)
    except OSError as error:
        broken = path.is_symlink() and not path.exists()
        yield BadFile(name, "broken link" if broken else f"unreadable: {error.strerror or error}")


def _is_clutter(name: str) -> bool:
    """True for hidden files, and for what operating systems leave behind."""
    return name.startswith(".") or name.lower() in _CLUTTER


def usual_size(files: Sequence[File]) -> int:
    """The side that images get where nobody says: as they are where they are small, 224 where they are large.

    A few of them are looked at, and the middle one counts; between 64 and 224 it is a multiple of 32.
    """
    sides = []
    for i in np.unique(np.linspace(0, len(files) - 1, _LOOKS).astype(np.int64)) if files else ():
        with suppress(Exception):  # what cannot be read is reported when all of them are
            found = files[i].read() if files[i].size <= MAX_FILE_BYTES else b""
            image = pillow().open(BytesIO(found), formats=_formats()) if isinstance(found, bytes) else found
            sides.append(min(image.size))
    side = sorted(sides)[len(sides) // 2] if sides else 224
    return max(side, 8) if side <= 64 else min(224, -(-side // 32) * 32)


# -- decoding them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoded:
    """Images of all files (n, side, side, 3), what is wrong with which, and a digest of each file's contents."""

    images: Images
    wrong: dict[int, str]
    digests: Sequence[str]


def decode_files(files: Sequence[File], side: int) -> Decoded:
    """Read and decode all files."""
    pillow()  # a missing library is no fault of the first file
    shape = (len(files), side, side, 3)
    try:
        return _decode_into(np.zeros(shape, np.uint8), files)
    except MemoryError as error:
        raise DataError(
            f"memory ran out: {len(files):,} images of {side}x{side} take {np.prod(shape):,} bytes; pass a smaller "
            "image_size, max_train_samples, or Data.of(dataset), which reads images as they are needed"
        ) from error


def _decode_into(images: Images, files: Sequence[File]) -> Decoded:
    wrong: dict[int, str] = {}
    digests = [""] * len(files)

    def decode_one(i: int) -> None:
        if files[i].size > MAX_FILE_BYTES:
            wrong[i] = f"too large: {files[i].size:,} bytes, at most {MAX_FILE_BYTES:,} are read"
            return
        try:
            found = files[i].read()
            if found == b"":
                wrong[i] = "empty: 0 bytes"
                return
            image = to_rgb(decode(found) if isinstance(found, bytes) else found)
            images[i] = center_square(image, images.shape[1])
            digests[i] = hashlib.sha256(found if isinstance(found, bytes) else images[i].tobytes()).hexdigest()
        except MemoryError:
            raise
        except Exception as error:
            wrong[i] = why_unusable(error)

    threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    with warnings.catch_warnings():  # out here, since all threads share the filters
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.filterwarnings("ignore", category=pillow().DecompressionBombWarning)  # checked by us
        try:
            for _ in threads.map(decode_one, range(len(files))):
                pass
        finally:
            threads.shutdown(cancel_futures=True)  # an interrupt does not wait for all the rest
    return Decoded(images, wrong, digests)


# -- decoding ---------------------------------------------------------------------------------------------------------


def center_square(image: Any, side: int) -> Images:
    """The middle square of an RGB image of Pillow, resized: (side, side, 3)."""
    width, height = image.size
    short = min(width, height)
    left, top = (width - short) / 2, (height - short) / 2
    # Cut and resized in one step: a strip of 1 x 100,000 pixels would become huge if it were resized first.
    box = (left, top, left + short, top + short)
    return np.asarray(image.resize((side, side), resample=pillow().Resampling.BILINEAR, box=box))


def decode(data: bytes, pixels: int | None = None) -> Any:
    """An image of Pillow from a file's bytes, of at most so many pixels: that is checked before any is decoded."""
    image = pillow().open(BytesIO(data), formats=_formats())
    width, height = image.size
    own = pillow().MAX_IMAGE_PIXELS  # Pillow itself only warns up to twice this
    most = min(pixels or width * height, 2 * own if own else width * height)
    if width * height > most:
        raise pillow().DecompressionBombError(f"{width:,} x {height:,} pixels, at most {most:,} are decoded")
    image.load()
    return image


def to_rgb(image: Any) -> Any:
    """An image of Pillow in RGB: EXIF's orientation applied, transparency on white, 16 bits as 8."""
    with suppress(Exception):  # a damaged EXIF block leaves the pixels as they are stored, as in any viewer
        image = import_optional("PIL.ImageOps", "reading images", DataError).exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image)
        if values.dtype.kind == "f" or values.min() < 0 or values.max() > 65535:
            raise ValueError("pixels beyond 16 bits, or not integers: save as 8 or 16 bits")
        # Pillow itself would clip values at 255.
        return pillow().fromarray((values.astype(np.int64) >> 8).astype(np.uint8)).convert("RGB")
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        over = image.convert("RGBA")
        white = pillow().new("RGBA", over.size, "white")
        return pillow().alpha_composite(white, over).convert("RGB")
    return image.convert("RGB")


def why_unusable(error: Exception) -> str:
    """What an error says of an image; decoders raise a dozen kinds."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:  # Pillow's own have none
        return f"unreadable: {error.strerror}"
    if isinstance(error, pillow().UnidentifiedImageError):
        return "not an image of a known format"
    if isinstance(error, pillow().DecompressionBombError):
        return f"bomb-sized: {text}"
    cut = any(word in text.lower() for word in ("truncated", "eof", "end of file", "not enough image data"))
    return f"truncated: {text}" if cut else f"damaged: {text}"


def pillow() -> Any:
    """The module ``PIL.Image``."""
    return import_optional("PIL.Image", "reading images", DataError)


@cache
def _formats() -> tuple[str, ...]:
    """The admitted formats that this build of Pillow has."""
    pillow().init()
    return tuple(name for name in FORMATS if name in pillow().OPEN)
