"""`Switcher`: one base in memory, many tasks, each a ready network in milliseconds."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import nn

from spalier.errors import ConfigError, TaskFileError
from spalier.tasks.base import Base, Pool
from spalier.tasks.build import build_and_weigh
from spalier.tasks.store import Store

Stamp = tuple[int, int, int]
"""What changes with every new file of a name."""


@dataclass(frozen=True)
class Ready:
    """A built network."""

    name: str
    net: nn.Module
    bytes: int
    stamp: Stamp


class Switcher:
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
    """

    def __init__(
        self,
        base: nn.Module,
        store: Store | str | os.PathLike[str],
        *,
        limit: int | None = None,
        fold: bool = False,
    ) -> None:
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise ConfigError(f"limit is {limit!r}, expected a number of bytes or None")
        if not isinstance(fold, bool):
            raise ConfigError(f"fold is {fold!r}, expected True or False")
        self.store = store if isinstance(store, Store) else Store(store)
        self.limit, self._fold = limit, fold
        self._base = Base(base)
        self._ready: OrderedDict[str, Ready] = OrderedDict()
        self._building: dict[str, Future[Ready]] = {}
        self._current: Ready | None = None
        self._paths: dict[str, str] = {}
        self._pool = Pool()
        self._lock = threading.Lock()

    @property
    def active(self) -> str | None:
        """The name of the active task."""
        current = self._current
        return None if current is None else current.name

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
        found = self._get(name)
        with self._lock:
            self._current = found
            gone = self._evict_()
        self._let_go(gone)
        return found.net

    def network(self, name: str) -> nn.Module:
        """The network of a task, without making it the active one."""
        found = self._get(name)
        with self._lock:
            gone = self._evict_()
        self._let_go(gone)
        return found.net

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the active network."""
        current = self._current
        if current is None:
            raise TaskFileError("missing", "no task is active; call activate(name) first")
        return current.net(*args, **kwargs)

    def _get(self, name: str) -> Ready:
        while True:
            stamp = self._stamp(name)
            found = self._once(name, stamp)
            if found.stamp == stamp:  # else the file was replaced while another thread built the one before
                return found

    def _once(self, name: str, stamp: Stamp) -> Ready:
        with self._lock:
            found = self._ready.get(name)
            if found is not None and found.stamp == stamp:
                self._ready.move_to_end(name)
                return found
            waiting = self._building.get(name)
            if waiting is None:
                mine: Future[Ready] = Future()
                self._building[name] = mine
        if waiting is not None:  # another thread builds it already
            return waiting.result()
        return self._build(name, stamp, mine)

    def _build(self, name: str, stamp: Stamp, promise: Future[Ready]) -> Ready:
        try:
            net, size = build_and_weigh(
                self.store.load(name), self._base, fold=self._fold, share=True, pool=self._pool
            )
            made = Ready(name, net, size, stamp)
        except BaseException as error:
            with self._lock:
                del self._building[name]
            promise.set_exception(error)
            raise
        with self._lock:
            self._ready[name] = made
            self._ready.move_to_end(name)
            del self._building[name]
        promise.set_result(made)
        return made

    def _stamp(self, name: str) -> Stamp:
        path = self._paths.get(name) or str(self.store.path(name))
        try:
            found = os.lstat(path)
        except OSError:
            with self._lock:
                self._ready.pop(name, None)
            self.store.load(name)  # says what is wrong
            raise
        self._paths[name] = path
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _let_go(self, gone: list[Ready]) -> None:
        """Outside of the lock, as networks take a while to go."""
        if gone:
            gone.clear()
            self._pool.trim()

    def _evict_(self) -> list[Ready]:
        """Drop the networks that were not used for longest, until the rest fits."""
        gone: list[Ready] = []
        if self.limit is None:
            return gone
        total = sum(entry.bytes for entry in self._ready.values())
        for name in list(self._ready):
            if total <= self.limit:
                break
            entry = self._ready[name]
            if entry is not self._current and name != next(reversed(self._ready)):
                total -= entry.bytes
                gone.append(self._ready.pop(name))
        return gone
