"""Files in folders and archives alike, by name. Archives are read in place: no name of theirs becomes a path."""

from __future__ import annotations

import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from spalier.data.images import LARGEST_FILE, Unusable
from spalier.data.samples import Bad, File
from spalier.data.text import shown
from spalier.errors import DataError

CLUTTER = {"thumbs.db", "desktop.ini", "_ds_store", "__macosx"}
"""What systems leave behind; like hidden files, it is no sample."""
LARGEST_ARCHIVE = 4 * 2**30
"""Bytes that are unpacked of one compressed archive, which is held in memory."""

Reader = Callable[[str], bytes]


def is_clutter(name: str) -> bool:
    """True for hidden files and what systems leave behind."""
    return name.startswith(".") or name.lower() in CLUTTER


def on_disk(path: Path, name: str) -> File | Bad:
    """A regular file, or why it is none; pipes and devices are never opened."""
    try:
        found = path.stat()
    except OSError as error:
        link = "broken link" if path.is_symlink() else f"unreadable: {error.strerror or error}"
        return Bad(name, link)
    if not stat.S_ISREG(found.st_mode):
        return Bad(name, "not a regular file")
    return File(name, found.st_size, found.st_mtime_ns, partial(_capped, path))


def _capped(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(LARGEST_FILE + 1)


def walk(folder: Path, name: str) -> Iterator[File | Bad]:
    """All files below a folder in order of their names, links followed, each folder once."""
    seen: set[tuple[int, int]] = set()
    yield from _walk(folder, name, seen)


def _walk(folder: Path, name: str, seen: set[tuple[int, int]]) -> Iterator[File | Bad]:
    try:
        found = folder.stat()
        entries = sorted(entry for entry in os.listdir(folder) if not is_clutter(entry))  # noqa: PTH208
    except OSError as error:
        yield Bad(name, f"unreadable: {error.strerror or error}")
        return
    if (found.st_dev, found.st_ino) in seen:
        yield Bad(name, "a link to a folder that is read already")
        return
    seen.add((found.st_dev, found.st_ino))
    for entry in entries:
        path = folder / entry
        if path.is_dir():
            yield from _walk(path, f"{name}/{entry}", seen)
        else:
            yield on_disk(path, f"{name}/{entry}")


def zip_files(path: Path) -> list[File]:
    """The members of a zip archive; their bytes are read when asked for."""
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise DataError(f"{shown(path)} is not a readable zip archive: {error}; fetch it again") from error
    return [
        File(info.filename, info.file_size, info.CRC, partial(_member, archive, info))
        for info in archive.infolist()
        if not info.is_dir() and not any(is_clutter(piece) for piece in info.filename.split("/"))
    ]


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    try:
        with archive.open(info) as member:
            data = member.read(LARGEST_FILE + 1)  # the archive's word for a size is not taken
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise Unusable(f"damaged in the archive: {error}") from error
    if len(data) > LARGEST_FILE:
        raise Unusable(f"too large: unpacks to more than {LARGEST_FILE:,} bytes")
    return data


def tar_members(path: Path, wanted: Iterable[str]) -> dict[str, bytes]:
    """Members of a compressed tar archive by their exact names, in one pass."""
    names, found, total = set(wanted), dict[str, bytes](), 0
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                total += member.size
                _check_size(path, name, member.size, total)
                data = archive.extractfile(member) if name in names and member.isreg() else None
                if data is not None:
                    found[name] = data.read()
    except (OSError, tarfile.TarError, zlib.error, EOFError, ValueError) as error:
        raise DataError(f"{shown(path)} is not a readable archive: {error}; fetch it again") from error
    return found


def _check_size(path: Path, name: str, size: int, total: int) -> None:
    if size > LARGEST_FILE or total > LARGEST_ARCHIVE:
        raise DataError(
            f"{shown(path)} holds {shown(name)} of {size:,} bytes, {total:,} so far; at most {LARGEST_FILE:,} and "
            f"{LARGEST_ARCHIVE:,} are read: unpack the archive yourself if that is right"
        )


def folder_reader(folder: Path) -> Reader:
    """Files of a folder by name."""

    def read(name: str) -> bytes:
        file = on_disk(folder / name, str(folder / name))
        if isinstance(file, Bad):
            raise DataError(f"{file}; unpack the archive again")
        try:
            return file.read()
        except OSError as error:
            raise DataError(f"{shown(file.name)} cannot be read: {error.strerror or error}") from error

    return read


def tar_reader(path: Path, prefix: str, names: Iterable[str]) -> Reader:
    """Members of a tar archive by name, below a prefix; read in one pass, here."""
    found = tar_members(path, [f"{prefix}/{name}" for name in names])

    def read(name: str) -> bytes:
        if f"{prefix}/{name}" not in found:
            raise DataError(f"{shown(path)} has no {prefix}/{name}; fetch the archive again")
        return found[f"{prefix}/{name}"]

    return read
