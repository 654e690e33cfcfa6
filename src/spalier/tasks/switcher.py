"""`Switcher`: one base in memory, many tasks, each a ready network in milliseconds."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import nn

from spalier import files
from spalier.errors import TaskFileError
from spalier.tasks.base import Base
from spalier.tasks.build import build, bytes_beside
from spalier.tasks.memory import Pool
from spalier.tasks.store import Store
from spalier.tasks.task import TaskInfo
from spalier.text import InNotebooks, check_integer, table


@dataclass(frozen=True)
class ReadyNetwork:
    """A built network, and the file that it was built of."""

    name: str
    net: nn.Module
    info: TaskInfo
    bytes: int
    stamp: tuple[int, int, int]
    digest: str = ""
    """The SHA-256 of the file; empty where the switcher was not asked to note it."""


class Switcher(InNotebooks):
    """Serves the tasks of a store from one base.

    Networks are built when they are first asked for and kept, the ones used last first, under a limit of bytes. Any
    number of threads may activate and call; a call runs to its end on the network that it began with. A task that
    cannot be built raises, and the one that was active stays so. A file that was replaced is built anew.

    Args:
        base: the frozen network. It is only read, and must not be changed.
        store: a `Store`, or its folder.
        limit: how many bytes the ready networks may take together, beyond what they share with the base; the active
            one is always kept. None for no limit. The memory of a network that was dropped may be kept to build the
            next one in.
        fold: fold batch norms, as in `Task.build`.
        digests: note the SHA-256 of each file that is read.
    """

    def __init__(
        self,
        base: nn.Module,
        store: Store | str | os.PathLike[str],
        *,
        limit: int | None = None,
        fold: bool = False,
        digests: bool = False,
    ) -> None:
        self.store = store if isinstance(store, Store) else Store(store)
        self.limit = None if limit is None else check_integer("limit", limit)
        self._fold, self._digests = fold, digests
        self._base = Base(base)
        self._ready: OrderedDict[str, ReadyNetwork] = OrderedDict()
        self._building: dict[str, threading.Lock] = {}
        self._active: ReadyNetwork | None = None
        self._paths: dict[str, str] = {}  # making a path costs more than the rest of a warm activation
        self._pool = Pool()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        active = self.active
        now = "none active" if active is None else f"{active!r} active"
        ready = f"{len(self.ready)} of {len(self.store)} tasks ready in {self.bytes:,} bytes"
        return f"Switcher({type(self._base.net).__name__}, {ready}, {now})"

    def __str__(self) -> str:
        with self._lock:
            sizes = {name: entry.bytes for name, entry in self._ready.items()}
        states = dict.fromkeys(sizes, "ready") | {self.active: "active"}
        rows = [[name, states.get(name, "on disk"), f"{sizes.get(name, 0):,}"] for name in self.store]
        return f"{self!r}\n{table(['task', 'state', 'bytes beside the base'], rows)}" if rows else repr(self)

    @property
    def active(self) -> str | None:
        """The name of the active task."""
        active = self._active
        return None if active is None else active.name

    @property
    def ready(self) -> list[str]:
        """The tasks whose networks are built, the one used last at the end."""
        with self._lock:
            return list(self._ready)

    @property
    def bytes(self) -> int:
        """What the ready networks take beyond the base."""
        with self._lock:
            return sum(entry.bytes for entry in self._ready.values())

    def activate(self, name: str) -> nn.Module:
        """Make a task the active one; its network, which stays usable whatever is activated later."""
        return self._network(name, activate=True).net

    def network(self, name: str) -> nn.Module:
        """The network of a task, without making it the active one."""
        return self._network(name, activate=False).net

    def fetch(self, name: str) -> ReadyNetwork:
        """The network of a task with what its file says, built where it has to be; it is not made the active one."""
        return self._network(name, activate=False)

    def look(self, name: str) -> ReadyNetwork | None:
        """The same where it is ready, and its file has not changed; None where it would have to be built."""
        return self._found(name, self._stamp(name))

    def _found(self, name: str, stamp: tuple[int, int, int]) -> ReadyNetwork | None:
        with self._lock:
            found = self._ready.get(name)
            if found is None or found.stamp != stamp:
                return None
            self._ready.move_to_end(name)
            return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the active network."""
        active = self._active
        if active is None:
            raise TaskFileError("missing", "no task is active; call activate(name) first")
        return active.net(*args, **kwargs)

    def _network(self, name: str, *, activate: bool) -> ReadyNetwork:
        found = self._find_or_build(name, self._stamp(name))
        with self._lock:
            if activate:
                self._active = found
            dropped = self._evict()
        if dropped:
            dropped.clear()  # outside of the lock, as networks take a while to go
            self._pool.trim()
        return found

    def _find_or_build(self, name: str, stamp: tuple[int, int, int]) -> ReadyNetwork:
        with self._lock:
            building = self._building.setdefault(name, threading.Lock())
        with building:  # one thread builds, the others find it ready
            if (found := self._found(name, stamp)) is not None:
                return found
            task, digest = self.store.read(name) if self._digests else (self.store.load(name), "")
            net = build(task, self._base, fold=self._fold, share=True, pool=self._pool)
            made = ReadyNetwork(name, net, task.info, bytes_beside(task, self._base), stamp, digest)
            with self._lock:
                self._ready[name] = made
                self._ready.move_to_end(name)
            return made

    def _stamp(self, name: str) -> tuple[int, int, int]:
        path = self._paths.get(name) or str(self.store.path(name))
        try:
            found = files.stamp(path)
        except OSError:
            with self._lock:
                self._ready.pop(name, None)
            self.store.load(name)  # says what is wrong
            raise
        self._paths[name] = path
        return found

    def _evict(self) -> list[ReadyNetwork]:
        """Drop the networks that were not used for longest, until the rest fits. Call it with the lock held."""
        dropped: list[ReadyNetwork] = []
        if self.limit is None:
            return dropped
        total = sum(entry.bytes for entry in self._ready.values())
        for name in list(self._ready)[:-1]:  # the last one was asked for just now
            if total > self.limit and self._ready[name] is not self._active:
                dropped.append(self._ready.pop(name))
                total -= dropped[-1].bytes
        return dropped
