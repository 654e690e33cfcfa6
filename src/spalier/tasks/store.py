"""`Store`: a folder of tasks, each file of it whole whatever happens; and what storing tasks costs.

The paper's T > 1/d leaves out the adapters themselves. With d the density of the weights and a the share of the base's
bytes that a task file has, T tasks cost 1 + T a bases' worth as task files and T d as networks of their own; files pay
from T (d - a) > 1 on.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spalier import files
from spalier.errors import ConfigError, TaskFileError
from spalier.tasks.base import Base
from spalier.tasks.build import build
from spalier.tasks.format import MAX_BYTES, SUFFIX, check_name, forget_digests
from spalier.tasks.task import STORAGES, Storage, Task, TaskInfo
from spalier.text import InNotebooks, close_names, first_few, near, printable, table


@dataclass(frozen=True)
class StoreEntry:
    """A task of a store: its size, and what it says of itself, or what is wrong with it."""

    name: str
    size: int
    info: TaskInfo | None
    error: TaskFileError | None

    @property
    def is_sound(self) -> bool:
        """True where nothing is wrong."""
        return self.error is None


class StoreList(InNotebooks, list[StoreEntry]):
    """The tasks of a store by name, those that differ by their density alone from the densest on. Print it."""

    def __str__(self) -> str:
        rows = [[printable(entry.name), f"{entry.size:,}", *_state(entry)] for entry in self]
        return table(["task", "bytes", "learned", "channels", "weights", "state"], rows)


def _state(entry: StoreEntry) -> list[str]:
    if entry.info is None:
        return ["-", "-", "-", entry.error.code if entry.error else ""]
    pairs = entry.info.density.channels, entry.info.density.weights
    shares = [f"{pair[0] / pair[1]:.1%}" if pair else "-" for pair in pairs]
    own = "" if entry.info.name == entry.name else f", calls itself {entry.info.name}"
    return [f"{entry.info.learned:,}", *shares, f"sound{own}"]


def _by_density(entry: StoreEntry) -> tuple[str, float, str]:
    channels = entry.info.density.channels if entry.info else None
    family = re.sub(r"-(start|\d+(\.\d+)?)(?=-|$)", "", entry.name)
    return family, -channels[0] / channels[1] if channels else -math.inf, entry.name


class Store(InNotebooks):
    """A folder of task files; print it for a list. Several processes may read and write it at once.

    >>> import tempfile
    >>> store = Store(tempfile.mkdtemp())
    >>> list(store), "flowers" in store
    ([], False)
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            # absolute: the same after a change of the working folder
            self.folder = Path(folder).expanduser().absolute()
            self.folder.mkdir(parents=True, exist_ok=True)
            files.sweep(self.folder)
        except (OSError, TypeError, ValueError) as error:
            raise TaskFileError(
                "unreadable", f"{str(folder)!a} cannot be a store: {files.reason(error)}; pass a folder"
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
        return any(name == other for other in self)

    def __repr__(self) -> str:
        return f"Store({str(self.folder)!r}, {len(self)} tasks)"

    def __str__(self) -> str:
        return f"{self!r}\n{self.list()}" if len(self) else repr(self)

    def load(self, name: str) -> Task:
        """Read a task. In a store it is called like its file, whatever name it was saved under; a warning says so."""
        task = self._load(name)
        if task.name == name:
            return task
        warnings.warn(
            f"the file {name}{SUFFIX} holds a task that calls itself {task.name!a}; here it is {name!a}. Store.add "
            "with overwrite=True writes that name into the file",
            stacklevel=2,
        )
        return replace(task, info=replace(task.info, name=name))

    def read(self, name: str) -> tuple[Task, str]:
        """A task, and the SHA-256 of its file, from one reading."""
        data = self._read_bytes(name)
        return Task.from_bytes(data), hashlib.sha256(data).hexdigest()

    def _read_bytes(self, name: str) -> bytes:
        """The contents of a task's file, which nobody has looked at yet."""
        with files.opened(self.path(name), MAX_BYTES) as (file, size):
            return bytes(files.read_exactly(file, size))

    def _load(self, name: str) -> Task:
        try:
            return Task.load(self.path(name))
        except TaskFileError as error:
            if error.code != "missing":
                raise
            raise self._missing(name) from None

    def _missing(self, name: str) -> TaskFileError:
        close = close_names(name, self)
        meant = f"did you mean {near(name, close)}?" if close else f"it has {first_few(list(self)) or 'none'}"
        return TaskFileError("missing", f"the store has no task {name!r}; {meant}")

    def add(self, task: Task, name: str | None = None, *, storage: Storage = "exact", overwrite: bool = False) -> Path:
        """Write a task into the store, under its own name or another; whole and durable, or not at all."""
        if not isinstance(task, Task):
            raise TaskFileError("name", f"what is added is a {type(task).__name__}, expected a Task (Task.of)")
        name = task.name if name is None else name
        target = self.path(name)
        with self._lock():  # nobody may take the name between the look and the write
            files.sweep(self.folder)
            self.check_free(name, overwrite=overwrite)
            replace(task, info=replace(task.info, name=name)).save(target, storage=storage)
        return target

    def check_free(self, name: str, *, overwrite: bool) -> None:
        """Refuse a name that another task has, or has but for the case of its letters."""
        for other in self:
            if other.lower() == name.lower() and not (overwrite and other == name):
                advice = "pass overwrite=True to replace it" if other == name else "file systems mix them up"
                raise TaskFileError("exists", f"the store has a task {other!r} already; {advice}")

    def remove(self, name: str) -> None:
        """Take a task out of the store."""
        path = self.path(name)
        with self._lock():
            try:
                path.unlink()
                files.sync_folder(self.folder)
            except FileNotFoundError:
                raise self._missing(name) from None
            except OSError as error:
                raise TaskFileError("write", f"{name!r} could not be removed: {error.strerror}") from error

    def list(self) -> StoreList:
        """Every task with its size and density; what cannot be read is listed with its error."""
        return self.verify()

    def verify(self, base: nn.Module | None = None) -> StoreList:
        """Read every file; with a base, look at all its values again, and check that its tasks can be built."""
        if base is not None:
            forget_digests()
        known = None if base is None else Base(base)
        found = StoreList()
        for name in self:
            info, error = None, None
            try:
                task = self._load(name)
                if known is not None:
                    build(task, known, fold=False, share=True)
                info = task.info
            except TaskFileError as wrong:
                error = wrong
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                size = (self.folder / f"{name}{SUFFIX}").lstat().st_size
                found.append(StoreEntry(name, size, info, error))
        found.sort(key=_by_density)
        return found

    def report(self, base: nn.Module | None = None) -> StoreReport:
        """Bytes on disk and in memory for all tasks on one base, and when that pays against a network for each.

        Without a base, bytes are counted in float32.
        """
        entries = self.verify(base)
        infos = [(entry, entry.info) for entry in entries if entry.info is not None]
        bases = {info.base.architecture for _, info in infos}
        if len(bases) > 1:
            raise TaskFileError("base", f"the store's tasks are for {len(bases)} bases; keep a store for each base")
        parameters = [] if base is None else [*base.parameters()]
        width = parameters[0].element_size() if parameters else 4
        costs, whole = [], sum(p.nbytes for p in parameters)
        for entry, info in infos:
            if info.density.weights is None:
                raise TaskFileError("metadata", f"the task {entry.name!r} does not say how many weights it keeps")
            kept, of = info.density.weights
            costs.append(TaskCost(entry.name, entry.size, kept * width))
            whole = whole if parameters else max(whole, of * width)
        left_out = tuple(f"{entry.name!a} ({entry.error.code})" for entry in entries if entry.error)
        return StoreReport(whole, tuple(costs), left_out)

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


# what many tasks cost together


@dataclass(frozen=True)
class TaskCost:
    """One task: bytes of its file, and of a network of its own."""

    name: str
    file: int
    network: int


@dataclass(frozen=True)
class StoreReport(InNotebooks):
    """Bytes of all tasks on one base, and when that pays. Print it."""

    base: int
    """Bytes of the base."""
    costs: tuple[TaskCost, ...]
    left_out: tuple[str, ...] = ()
    """Tasks that cannot be read or built, and why: they are not counted."""

    @property
    def on_disk(self) -> int:
        """The base and all task files."""
        return self.base + sum(cost.file for cost in self.costs)

    @property
    def networks(self) -> int:
        """A network of its own for each task."""
        return sum(cost.network for cost in self.costs)

    def resident(self, ready: int | None = None) -> int:
        """Bytes in memory: the base, and so many built networks, the largest ones; all of them if not said."""
        sizes = sorted((cost.network for cost in self.costs), reverse=True)
        return self.base + sum(sizes[:ready])

    @property
    def break_even(self) -> int | None:
        """From how many such tasks on the base and their files take fewer bytes than networks; None if never."""
        if not self.costs:
            return None
        return self._pays_from((self.networks - self.on_disk + self.base) / len(self.costs))

    def _pays_from(self, saved: float) -> int | None:
        """How many tasks that each save so many bytes outweigh the base."""
        return None if saved <= 0 else math.floor(self.base / saved) + 1

    def __str__(self) -> str:
        rows = []
        for cost in self.costs:
            even = self._pays_from(cost.network - cost.file)
            share = f"{cost.file / cost.network:.1%}"
            pays = "never" if even is None else f"{even:,}"
            rows.append([cost.name, f"{cost.file:,}", f"{cost.network:,}", share, pays])
        lines = [
            table(["task", "file", "network", "file / network", "pays from"], rows),
            f"on disk: {self.on_disk:,} bytes with the base ({self.base:,}), {self.networks:,} as networks",
            f"in memory: {self.resident(1):,} bytes with one task ready, {self.resident():,} with all",
            "pays from: with so many tasks like it, the base and task files take less than networks of their own",
        ]
        if len(self.costs) > 1:
            even = self.break_even
            pays = "never pays" if even is None else f"pays from {even:,} tasks on"
            lines.append(f"a mix like these {len(self.costs):,} tasks {pays}")
        if self.left_out:
            lines.append(f"not counted: {', '.join(self.left_out)}")
        return "\n".join(lines)


# what a smaller storage costs


@dataclass(frozen=True)
class StorageCost:
    """One way to store a task."""

    storage: Storage
    bytes: int
    accuracy: float
    """The share of samples whose largest output is their class."""
    deviation: float
    """How far outputs are from those of the exact task, as a share of their size."""
    error: TaskFileError | None = None
    """Why the task cannot be stored so, if it cannot."""


class StorageCosts(InNotebooks, list[StorageCost]):
    """All ways to store a task, side by side. Print it."""

    def __str__(self) -> str:
        rows = []
        for c in self:
            points = f"{100 * (c.accuracy - self[0].accuracy):+.2f}"
            known = [f"{c.bytes:,}", f"{c.accuracy:.2%}", points, f"{c.deviation:.1e}"]
            rows.append([c.storage, *(known if c.error is None else ["-", "-", "-", str(c.error)])])
        return table(["storage", "bytes", "accuracy", "points", "deviation"], rows)


@torch.no_grad()
def storage_costs(task: Task, base: nn.Module, batches: Iterable[Any]) -> StorageCosts:
    """Every storage of a task, measured on batches of inputs and class numbers."""
    seen = [(x, y) for x, y in batches]
    if not seen:
        raise ConfigError("batches is empty, expected pairs of inputs and class numbers")
    prepared, labels = Base(base), torch.cat([y.cpu() for _, y in seen])

    def outputs(stored: Task) -> Tensor:
        net = build(stored, prepared, fold=False, share=True)
        return torch.cat([net(x).cpu() for x, _ in seen])

    exact = outputs(task)
    size = float(exact.double().norm())
    found = StorageCosts()
    for storage in STORAGES:
        try:
            stored = task if storage == "exact" else task.stored_as(storage)
            out = outputs(stored)
        except TaskFileError as error:
            found.append(StorageCost(storage, 0, 0.0, 0.0, error))
            continue
        accuracy = float((out.argmax(1) == labels).float().mean())
        deviation = float((out - exact).double().norm()) / size if size else 0.0
        found.append(StorageCost(storage, len(stored.to_bytes()), accuracy, deviation))
    return found
