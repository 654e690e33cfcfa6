"""`Pool`: memory of networks that are gone, lent again, since fresh memory costs more than filling it."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from typing import Any

import numpy as np

IDLE = 2
"""How many pieces are kept that nobody uses."""


class Pool:
    """Lends pieces of memory, and lends them again once whoever had them is gone.

    What is lent is an array; tensors that lie in it, and views of these, keep it alive. When the last of them goes, the
    array goes, and its memory comes back here: until then no one else can have it.
    """

    def __init__(self) -> None:
        self._idle: deque[Any] = deque()  # appended to by finalizers, which may run anywhere: no lock

    def take(self, size: int, dtype: Any) -> Any:
        """An array of so many numbers, holding whatever was there."""
        memory = self._fitting(size * np.dtype(dtype).itemsize)
        # a view of a memoryview is nobody's view: numpy lets slices refer to it, not to what is behind it
        lent = np.frombuffer(memoryview(memory), dtype, size)
        weakref.finalize(lent, self._idle.append, memory).atexit = False
        return lent

    def _fitting(self, size: int) -> Any:
        for _ in range(len(self._idle)):
            try:
                memory = self._idle.popleft()
            except IndexError:  # another thread was quicker
                break
            if size <= memory.nbytes <= 2 * size:
                return memory
            self._idle.append(memory)
        return np.empty(size, np.uint8)

    def trim(self) -> None:
        """Let go of what nobody uses, but for the largest pieces."""
        taken = []
        with contextlib.suppress(IndexError):  # other threads take from it too
            while True:
                taken.append(self._idle.popleft())
        self._idle.extend(sorted(taken, key=lambda memory: -memory.nbytes)[:IDLE])
