"""`Loader`: the batches of an epoch, the same whatever the number of workers, processes or restarts."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from spalier.data.data import ORDER, Ints, Split, generator
from spalier.errors import ConfigError, DataError, SpalierError
from spalier.text import check_integer

Batch = tuple[Any, Tensor]
"""Images, or a dict of keyword arguments; and labels."""
_Key = tuple[int | None, Ints]
_GROUPED = 50  # batches that are sorted by length together: more would make epochs alike, fewer would pad more


class Loader:
    """Batches of a split, by epoch.

    A batch of ``batch_size`` samples is shared by ``world_size`` processes: number ``rank`` gets every
    world_size-th sample of it. Order and augmentation depend on ``seed``, the epoch and the sample alone, so that any
    batch can be had again. Samples are augmented when they are shuffled, unless ``augment`` says otherwise. Texts that
    are shuffled are grouped by length, so that little is padded. Where the last batch is not dropped, it is cut to a
    multiple of ``round_last``, so that processes can share it equally.

    >>> from spalier.data import open_data
    >>> data = open_data("digits")
    >>> images, labels = next(Loader(data.train, batch_size=32).epoch(0))
    >>> images.shape, labels.shape
    (torch.Size([32, 3, 8, 8]), torch.Size([32]))
    """

    def __init__(
        self,
        split: Split,
        batch_size: int = 256,
        seed: int = 0,
        augment: bool | None = None,
        num_workers: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        round_last: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if len(split) == 0:
            raise DataError("there is nothing to load: the split has no samples")
        self.split, self.shuffle, self.drop_last = split, shuffle, drop_last
        self.seed = check_integer("seed", seed)
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self.num_workers = check_integer("num_workers", num_workers)
        self.round_last = check_integer("round_last", round_last, 1)
        self.rank, self.world_size = check_integer("rank", rank), check_integer("world_size", world_size, 1)
        self.augment = shuffle if augment is None else augment
        self._check_shares()
        self._keys: list[_Key] = []
        self._loader: DataLoader[Any] | None = None
        self._turn = 0

    def __len__(self) -> int:
        """Batches of an epoch, of all processes together."""
        whole, rest = divmod(len(self.split), self.batch_size)
        return max(1, whole) if self.drop_last else whole + (rest >= self.round_last)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Batches number ``start``, ``start + 1``, ... of an epoch; a share without samples is left out."""
        epoch, start = check_integer("epoch", epoch), check_integer("start", start)
        if start > len(self):
            raise ConfigError(f"start is {start}, expected at most the {len(self)} batches of an epoch")
        moment = epoch if self.augment else None
        keys = [(moment, mine) for mine in self._shares(epoch, start) if len(mine)]
        if self.num_workers:
            return self._from_workers(keys)
        return (self.split.fetch(indices, moment, self.seed) for moment, indices in keys)

    def close(self) -> None:
        """End the workers. An epoch that is still being read ends with an error."""
        loader, self._loader, self._turn = self._loader, None, self._turn + 1
        if loader is not None and loader._iterator is not None:
            loader._iterator._shutdown_workers()  # type: ignore[attr-defined]
            loader._iterator = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_shares(self) -> None:
        if self.rank >= self.world_size:
            raise ConfigError(f"rank is {self.rank}, expected less than the {self.world_size} processes")
        only = min(self.batch_size, len(self.split)) if self.drop_last else self.batch_size
        for together in (self.batch_size, only):
            if together % self.world_size:
                raise ConfigError(
                    f"a batch of {together} cannot be shared equally by {self.world_size} processes; "
                    f"pass a multiple of {self.world_size}, and no more than there are samples ({len(self.split):,})"
                )

    def _shares(self, epoch: int, start: int) -> Iterator[Ints]:
        count = len(self.split)
        numbers = generator(self.seed, epoch, ORDER)
        order = numbers.permutation(count) if self.shuffle else np.arange(count)
        lengths = getattr(self.split, "lengths", None)
        if self.shuffle and lengths is not None:
            order = grouped(order, lengths, self.batch_size, numbers)
        for i in range(start, len(self)):
            batch = order[i * self.batch_size : (i + 1) * self.batch_size]
            if len(batch) < self.batch_size:
                batch = batch[: len(batch) // self.round_last * self.round_last]
            yield batch[self.rank :: self.world_size]

    def _from_workers(self, keys: list[_Key]) -> Iterator[Batch]:
        self._turn += 1
        turn, self._keys[:] = self._turn, keys
        if not keys:
            return
        batches = self._started()
        for _ in keys:
            if turn != self._turn:
                raise ConfigError("this epoch was left for another, or the loader closed; start it again")
            found = self._next(batches)
            if isinstance(found, SpalierError):
                raise found
            yield found

    def _started(self) -> Iterator[Batch | SpalierError]:
        if self._loader is None:
            self._loader = DataLoader(
                _Batches(self.split, self.seed),
                sampler=self._keys,
                batch_size=None,
                num_workers=self.num_workers,
                worker_init_fn=_start_worker,
                persistent_workers=True,
                generator=torch.Generator(),  # the global one stays where it is, as without workers
                # Forked workers share the images; other platforms have their own way to start processes.
                multiprocessing_context="fork" if sys.platform.startswith("linux") else None,
            )
        with _dead_worker_explained(self), _signal_handler_kept():
            return iter(self._loader)

    def _next(self, batches: Iterator[Batch | SpalierError]) -> Batch | SpalierError:
        with _dead_worker_explained(self):
            return next(batches)


def grouped(order: Ints, lengths: Ints, size: int, numbers: np.random.Generator) -> Ints:
    """Another order, whose batches hold samples of about one length: sorted within many batches, which are shuffled.

    >>> grouped(np.arange(6), np.array([9, 1, 8, 2, 9, 1]), 2, np.random.default_rng(0))
    array([0, 4, 1, 5, 3, 2])
    """
    whole = len(order) // size * size
    reach = _GROUPED * size
    pieces = [order[i : min(i + reach, whole)] for i in range(0, whole, reach)]
    batches = [piece[np.argsort(lengths[piece], kind="stable")].reshape(-1, size) for piece in pieces]
    if not batches:
        return order
    every = np.concatenate(batches)
    return np.concatenate([every[numbers.permutation(len(every))].ravel(), order[whole:]])


def _start_worker(_: int) -> None:
    """Leave Ctrl-C to the parent, which ends its workers; do not inherit the parent's handlers of signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Batches(Dataset[Any]):
    """Whole batches by key, so that a worker does all of the work. Errors come back as values, unwrapped."""

    def __init__(self, split: Split, seed: int) -> None:
        self.split, self.seed = split, seed

    def __getitem__(self, key: _Key) -> Batch | SpalierError:
        epoch, indices = key
        try:
            return self.split.fetch(indices, epoch, self.seed)
        except SpalierError as error:
            error.add_note("".join(traceback.format_exception(error)))  # a traceback cannot be sent
            return error


@contextmanager
def _dead_worker_explained(loader: Loader) -> Iterator[None]:
    """Turn what PyTorch says of a dead worker into our error; the loader starts anew after it."""
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:  # EOFError: it died while it handed a batch over
        if isinstance(error, RuntimeError) and "worker" not in str(error):
            raise
        running = None if loader._loader is None else loader._loader._iterator
        codes = {worker.exitcode for worker in getattr(running, "_workers", ())}
        ends = sorted(signal.Signals(-c).name if c < 0 else f"exit code {c}" for c in codes if c)
        exits = ", ".join(ends) or str(error).partition("\n")[0] or type(error).__name__
        loader.close()
        raise DataError(
            f"a data-loader worker died ({exits}); memory may have run out, /dev/shm may "
            f"be too small, or the data set's own code crashed: pass fewer than {loader.num_workers} workers (0 runs "
            "everything in this process and shows the crash), or give the machine more (shared) memory"
        ) from error


@contextmanager
def _signal_handler_kept() -> Iterator[None]:
    """Remove the handler that PyTorch sets: when a worker dies, it raises in the middle of whatever runs.

    Without it, the call that waits for a batch notices some seconds later.
    """
    is_main = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGCHLD) if is_main else None
    try:
        yield
    finally:
        if handler is not None:  # None: set by other than Python, and cannot be set again
            signal.signal(signal.SIGCHLD, handler)
