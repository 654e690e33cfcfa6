"""Every image decoded once, in threads: into memory, or into a file that later runs map."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spalier.data.augment import Bytes
from spalier.data.images import Unusable, contents, square
from spalier.data.samples import Bad, File, digest
from spalier.data.text import imported, shown
from spalier.errors import DataError

VERSION = 1
"""Of what decoding does; another one makes caches anew."""


@dataclass(frozen=True)
class Decoded:
    """Pixels of all files, (n, side, side, 3), what is wrong with which, and a digest of each file's bytes."""

    images: Bytes
    wrong: dict[int, str]
    digests: tuple[str, ...]

    def bad(self, files: Sequence[File]) -> tuple[Bad, ...]:
        """The files that cannot be used."""
        return tuple(Bad(files[i].name, reason) for i, reason in sorted(self.wrong.items()))


def decoded(files: Sequence[File], side: int, cache: str | os.PathLike[str] | None) -> Decoded:
    """Read and decode all files, or take what a cache has of exactly these."""
    imported("PIL.Image", "reading images")  # a missing library is no fault of the first file
    shape = (len(files), side, side, 3)
    try:
        if cache is None:
            return _decode(files, np.zeros(shape, np.uint8))
        return _Cache(Path(cache).expanduser(), files, shape).get()
    except MemoryError as error:
        raise DataError(
            f"memory ran out: {len(files):,} images of {side}x{side} take {np.prod(shape):,} bytes; pass cache= to "
            "keep them in a file, a smaller size, or a limit"
        ) from error


def _decode(files: Sequence[File], images: Bytes) -> Decoded:
    wrong: dict[int, str] = {}
    digests = [""] * len(files)

    def one(i: int) -> None:
        try:
            data = contents(files[i])
            images[i] = square(data, images.shape[1])
            digests[i] = hashlib.sha256(data).hexdigest()
        except Unusable as error:
            wrong[i] = str(error)

    with _quiet_pillow(), _threads() as threads:
        for _ in threads.map(one, range(len(files))):
            pass
    return Decoded(images, wrong, tuple(digests))


@contextlib.contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt does not wait for all the rest


@contextlib.contextmanager
def _quiet_pillow() -> Iterator[None]:
    """Large images and odd metadata are looked at by us; set here since filters are shared by threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        warnings.filterwarnings(
            "ignore", category=imported("PIL.Image", "reading images").DecompressionBombWarning
        )
        yield


class _Cache:
    """Decoded images in a folder: an array, and beside it what it was made of. Written whole, or not at all."""

    def __init__(self, folder: Path, files: Sequence[File], shape: tuple[int, int, int, int]) -> None:
        self.files, self.shape = files, shape
        listing = [f"{file.name}\0{file.size}\0{file.stamp}" for file in files]
        self.key = digest(f"{VERSION}\0{shape[1]}", *listing)
        self.array, self.record = (folder / f"{self.key[:24]}.{suffix}" for suffix in ("npy", "json"))

    def get(self) -> Decoded:
        found = self._read()
        return self._made() if found is None else found

    def _read(self) -> Decoded | None:
        if not self.record.exists():
            return None
        try:
            record = json.loads(self.record.read_text())
            images = np.load(self.array, mmap_mode="r", allow_pickle=False)
            wrong = {int(i): str(reason) for i, reason in record["wrong"].items()}
            digests = tuple(map(str, record["digests"]))
            fits = record["key"] == self.key and images.shape == self.shape and images.dtype == np.uint8
            if fits and len(digests) == len(self.files):
                return Decoded(images, wrong, digests)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
        else:
            reason = "it is of something else"
        logging.getLogger("spalier").warning(
            "the cache %s is made anew: %s", shown(self.array), shown(reason)
        )
        return None

    def _made(self) -> Decoded:
        scratch = self.array.with_name(f".{self.array.name}.{os.getpid()}")
        try:
            self.array.parent.mkdir(parents=True, exist_ok=True)
            images = np.lib.format.open_memmap(scratch, "w+", np.uint8, self.shape)
            _reserve(scratch)
            made = _decode(self.files, images)
            images.flush()
            scratch.replace(self.array)
            self._write_record(made)
        except OSError as error:
            raise DataError(
                f"the cache {shown(self.array.parent)} cannot be written: {error.strerror or error}; it needs "
                f"{np.prod(self.shape):,} bytes: pass another folder, or none to hold the images in memory"
            ) from error
        finally:
            with contextlib.suppress(OSError):  # there is no such folder; that is what is said
                scratch.unlink()
        return Decoded(np.load(self.array, mmap_mode="r", allow_pickle=False), made.wrong, made.digests)

    def _write_record(self, made: Decoded) -> None:
        record: dict[str, Any] = {"key": self.key, "wrong": made.wrong, "digests": made.digests}
        scratch = self.record.with_name(f".{self.record.name}.{os.getpid()}")
        scratch.write_text(json.dumps(record) + "\n")
        scratch.replace(self.record)


def _reserve(path: Path) -> None:
    """Take the space now: a disk that is full later would end the process, not the call."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
