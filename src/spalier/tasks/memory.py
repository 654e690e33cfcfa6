"""Memory of networks that are gone, to build others in: fresh memory costs more than filling it."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

IDLE = 2
"""How many pieces are kept that nobody uses."""


class Pool:
    """Hands out pieces of memory, and hands them out again once nothing refers to them any more.

    Tensors that lie in a piece keep a reference to it, and so does every view of them, so a piece that only the pool
    refers to is in nobody's hands: no one could write into it or see it change.
    """

    def __init__(self) -> None:
        self._pieces: list[Any] = []
        self._lock = threading.Lock()

    def take(self, size: int, dtype: Any) -> Any:
        """A piece of at least so many numbers, holding whatever it held."""
        with self._lock:
            for piece in self._pieces:
                fits = piece.dtype == dtype and size <= piece.size <= 2 * size
                if fits and sys.getrefcount(piece) == _ONLY_THE_POOL:
                    return piece
            made = np.empty(size, dtype)
            self._pieces.append(made)
            return made

    def trim(self) -> None:
        """Let go of what nobody uses, but for the largest pieces."""
        with self._lock:
            idle = []
            for number in range(len(self._pieces)):  # enumerate would refer to the piece too
                piece = self._pieces[number]
                if sys.getrefcount(piece) == _ONLY_THE_POOL:
                    idle.append((piece.nbytes, number))
            gone = {number for _, number in sorted(idle, reverse=True)[IDLE:]}
            self._pieces = [piece for number, piece in enumerate(self._pieces) if number not in gone]


_ONLY_THE_POOL = 3
"""References to a piece that is idle: the list's, the loop's, and that of the call which counts them."""
