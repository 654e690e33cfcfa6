"""Files that are read once, written whole or not at all, and folders that one process at a time works in."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, ClassVar, Self

from spalier.errors import TaskFileError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LEFTOVER_AGE = 60.0
"""Seconds after which a temporary file that nobody holds a lock on is a leftover of a writer that died."""
_PREFIX, _TEMPORARY = ".spalier-", ".tmp"
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


@contextlib.contextmanager
def opened(path: Path, limit: int | None = None) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its size. Whatever else has that name is refused, and never opened for long."""
    try:
        _check_kind(path, path.lstat())
        # a pipe that takes the file's place after the look above must not block
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _FLAGS)
    except FileNotFoundError:
        raise TaskFileError("missing", f"there is no file {str(path)!a}") from None
    except (OSError, ValueError) as error:
        raise TaskFileError("unreadable", f"{str(path)!a} cannot be opened: {reason(error)}") from None
    with os.fdopen(handle, "rb", buffering=0) as file:
        found = os.fstat(handle)
        _check_kind(path, found)
        if limit is not None and found.st_size > limit:
            raise TaskFileError("too-large", f"the file has {found.st_size:,} bytes, more than the limit of {limit:,}")
        yield file, found.st_size
        now = os.fstat(handle)
        if (now.st_size, now.st_mtime_ns) != (found.st_size, found.st_mtime_ns):
            raise TaskFileError("changed", f"{str(path)!a} was changed while it was read; try again")


def _check_kind(path: Path, found: os.stat_result) -> None:
    shown = ascii(str(path))
    if stat.S_ISLNK(found.st_mode):
        raise TaskFileError("symlink", f"{shown} is a symbolic link; pass the file that it points to")
    if not stat.S_ISREG(found.st_mode):
        kind = "folder" if stat.S_ISDIR(found.st_mode) else "device, pipe or socket"
        raise TaskFileError("not-regular", f"{shown} is a {kind}, expected a regular file")
    if found.st_nlink > 1:
        raise TaskFileError(
            "hard-link", f"{shown} has {found.st_nlink} names (hard links), so others may change it; copy it first"
        )


def stamp(path: str | Path) -> tuple[int, int, int]:
    """What changes whenever a file of this name is written anew, or replaced."""
    found = os.lstat(path)
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_exactly(file: BinaryIO, size: int) -> bytearray:
    """The next bytes of a file; an error if there are fewer."""
    try:
        buffer = bytearray(size)
    except (MemoryError, OverflowError):
        raise TaskFileError("too-large", f"the file describes {size:,} bytes, more than memory holds") from None
    view, filled = memoryview(buffer), 0
    while filled < size:
        try:
            count = file.readinto(view[filled:])  # type: ignore[attr-defined]
        except OSError as error:
            raise TaskFileError("unreadable", f"the file cannot be read: {reason(error)}") from None
        if not count:
            raise TaskFileError("truncated", f"the file ends after {filled} of {size} bytes that were expected here")
        filled += count
    return buffer


def write(path: Path, data: bytes) -> None:
    """Put a file in place, whole and durable; whatever goes wrong, what was there before is still there."""
    temporary = path.parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}{_TEMPORARY}"
    try:
        if path.is_dir() and not path.is_symlink():
            raise IsADirectoryError("it is a folder")
        try:
            _write_new(temporary, data)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError, ValueError):
                temporary.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise TaskFileError(
            "write", f"{str(path)!a} could not be written: {reason(error)}; what was there before is unchanged"
        ) from error
    try:
        sync_folder(path.parent)
    except OSError as error:
        raise TaskFileError(
            "write",
            f"{str(path)!a} is in place, but its folder could not be flushed to disk: {reason(error)}; a crash of the "
            "machine may undo it, so write it again",
        ) from error


def _write_new(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)
    with os.fdopen(handle, "wb") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)  # `sweep` leaves alone what is locked
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Let a rename or removal in a folder reach the disk."""
    if os.name == "nt":
        return  # folders cannot be opened there, and renames are journalled
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot flush folders
            raise
    finally:
        os.close(handle)


def sweep(folder: Path) -> list[Path]:
    """Remove the temporary files of writers that died; one that is being written is locked, and stays."""
    removed = []
    for path in folder.glob(f"{_PREFIX}*{_TEMPORARY}"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > LEFTOVER_AGE and _is_unlocked(path):
                path.unlink()
                removed.append(path)
    return removed


def _is_unlocked(path: Path) -> bool:
    if fcntl is None or not stat.S_ISREG(path.lstat().st_mode):
        return True
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


class FolderLock:
    """Keeps other processes and threads that ask for the same lock out of a folder, until it is closed or left.

    Raises `BlockingIOError` where another holds the lock and ``wait`` is False, and other kinds of `OSError` where the
    folder cannot be written. Without POSIX file locks (Windows) nobody is kept out.
    """

    _held: ClassVar[set[int]] = set()

    def __init__(self, folder: Path, *, wait: bool = True) -> None:
        self._handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | _FLAGS, 0o666)
        self._held.add(self._handle)
        try:
            if fcntl is not None:
                fcntl.flock(self._handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others in."""
        if self._handle in self._held:
            self._held.remove(self._handle)
            os.close(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def _close_all(cls) -> None:
        # a lock lasts until every process has closed it: forked ones, of data loaders say, must not outlive the owner
        while cls._held:
            os.close(cls._held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=FolderLock._close_all)


def reason(error: Exception) -> str:
    """What went wrong, in a few words."""
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
