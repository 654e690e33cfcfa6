"""`Store`: a folder of tasks. Every file in it is whole, whoever writes and whatever happens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from spalier import files
from spalier.errors import TaskFileError
from spalier.tasks import fingerprint
from spalier.tasks.base import Base
from spalier.tasks.build import build
from spalier.tasks.container import SUFFIX, check_name
from spalier.tasks.costs import Report, report
from spalier.tasks.description import Description, Storage
from spalier.tasks.task import Task
from spalier.text import table


@dataclass(frozen=True)
class Listed:
    """A task of a store: its size, and what it says of itself, or what is wrong with it."""

    name: str
    size: int
    info: Description | None
    error: TaskFileError | None

    @property
    def is_sound(self) -> bool:
        """True where nothing is wrong."""
        return self.error is None


class Listing(list[Listed]):
    """The tasks of a store by name. Print it."""

    def __str__(self) -> str:
        return table(
            ["task", "bytes", "learned", "channels", "weights", "state"], [_row(entry) for entry in self]
        )


class Store:
    """A folder of task files. Several processes may read and write it at once.

    >>> import tempfile
    >>> store = Store(tempfile.mkdtemp())
    >>> list(store), "flowers" in store
    ([], False)
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            self.folder = (
                Path(folder).expanduser().absolute()
            )  # the same after a change of the working folder
        except TypeError:
            raise TaskFileError(
                "name", f"the folder is a {type(folder).__name__}, expected its name"
            ) from None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.sweep(self.folder)
        except (OSError, ValueError) as error:
            raise TaskFileError(
                "unreadable", f"{str(self.folder)!a} cannot be a store: {files.reason(error)}; pass a folder"
            ) from error

    def path(self, name: str) -> Path:
        """Where a task's file is."""
        return self.folder / f"{check_name(name)}{SUFFIX}"

    def __iter__(self) -> Iterator[str]:
        """The names of all tasks, in order."""
        names = (p.name.removesuffix(SUFFIX) for p in self.folder.glob(f"*{SUFFIX}"))
        return iter(sorted(name for name in names if not name.startswith(".")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in set(self)

    def __repr__(self) -> str:
        return f"Store({str(self.folder)!r}, {len(self)} tasks)"

    def load(self, name: str) -> Task:
        """Read a task."""
        try:
            return Task.load(self.path(name))
        except TaskFileError as error:
            if error.code != "missing":
                raise
            known = ", ".join(ascii(name)[1:-1][:40] for name in list(self)[:5]) or "none"
            raise TaskFileError("missing", f"the store has no task {name!r}; it has {known}") from None

    def add(
        self, task: Task, name: str | None = None, *, storage: Storage = "exact", overwrite: bool = False
    ) -> Path:
        """Write a task into the store, under its own name or another; whole and durable, or not at all."""
        if not isinstance(task, Task):
            raise TaskFileError(
                "name", f"what is added is a {type(task).__name__}, expected a Task (Task.of)"
            )
        target = self.path(task.name if name is None else name)
        task = replace(task, description=replace(task.description, name=name or task.name))
        data = task.to_bytes(storage=storage)
        with self._lock():
            files.sweep(self.folder)
            for other in self:
                if other.lower() == target.name.removesuffix(SUFFIX).lower():
                    same = other == target.name.removesuffix(SUFFIX)
                    if not same or not overwrite:
                        advice = "pass overwrite=True to replace it" if same else "file systems mix them up"
                        raise TaskFileError("exists", f"the store has a task {other!r} already; {advice}")
            files.write(target, data)
        return target

    def remove(self, name: str) -> None:
        """Take a task out of the store."""
        path = self.path(name)
        with self._lock():
            try:
                path.unlink()
                files.sync_folder(self.folder)
            except FileNotFoundError:
                raise TaskFileError("missing", f"the store has no task {name!r}") from None
            except OSError as error:
                raise TaskFileError("write", f"{name!r} could not be removed: {error.strerror}") from error

    def list(self) -> Listing:
        """Every task with its size and density; what cannot be read is listed with its error."""
        return self._listing(None)

    def verify(self, base: nn.Module | None = None) -> Listing:
        """Read every file; with a base, look at all its values again, and check that its tasks can be built."""
        if base is not None:
            fingerprint.forget()
        return self._listing(None if base is None else Base(base))

    def report(self, base: nn.Module | None = None) -> Report:
        """Bytes on disk and in memory for all tasks on one base, and when that pays against a network for each."""
        if base is not None:
            base = Base(base).net
        return report(self.verify(base), base)

    def push(self, name: str, repository: str, **options: Any) -> str:
        """Upload a task and a model card to the Hugging Face hub; the address. Needs ``spalier[hub]``."""
        from spalier.tasks.hub import push

        return push(self, name, repository, **options)

    def pull(self, repository: str, name: str, **options: Any) -> Path:
        """Download a task from the Hugging Face hub, check it, and add it. Needs ``spalier[hub]``."""
        from spalier.tasks.hub import pull

        return pull(self, repository, name, **options)

    def _lock(self) -> files.FolderLock:
        try:
            return files.FolderLock(self.folder)
        except OSError as error:
            raise TaskFileError(
                "write", f"{str(self.folder)!a} cannot be locked for writing: {files.reason(error)}"
            ) from error

    def _listing(self, base: Base | None) -> Listing:
        found = Listing()
        for name in self:
            path = self.folder / f"{name}{SUFFIX}"
            info, error = None, None
            try:
                task = self.load(name)
                if base is not None:
                    build(task, base, fold=False, share=True)
                info = task.description
            except TaskFileError as wrong:
                error = wrong
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                found.append(Listed(name, path.lstat().st_size, info, error))
        return found


def _row(entry: Listed) -> list[str]:
    name = entry.name if entry.name.isprintable() else ascii(entry.name)  # whoever put the file there
    if entry.info is None:
        return [name, f"{entry.size:,}", "-", "-", "-", "" if entry.error is None else entry.error.code]
    density = entry.info.density
    shares = [f"{pair[0] / pair[1]:.1%}" if pair else "-" for pair in (density.channels, density.weights)]
    return [name, f"{entry.size:,}", f"{entry.info.learned:,}", *shares, "sound"]
