"""Which samples go where: shares of each class, drawn by a seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spalier.data.augment import LIMIT, SPLIT, Ints, numbers
from spalier.errors import ConfigError

TEST_SEED, TEST_SHARE = 2023, 0.2
"""Test sets that a data set does not have itself are the same whatever the seed of a run."""


def held_out(labels: Ints, share: float, seed: int) -> NDArray[np.bool_]:
    """True for a share of each class, at least one and never all; a class of one sample keeps it.

    >>> held_out(np.array([0, 0, 0, 0, 1, 1, 2]), 0.25, seed=0).sum()
    np.int64(2)
    """
    counts = np.unique(labels, return_counts=True)[1]
    wanted = _spread(counts, round(share * len(labels)))
    return _draw(labels, np.clip(wanted, np.minimum(1, counts - 1), counts - 1), seed, SPLIT)


def limited(labels: Ints, limit: int, seed: int) -> NDArray[np.bool_]:
    """True for at most ``limit`` samples, all classes among them."""
    counts = np.unique(labels, return_counts=True)[1]
    if limit >= len(labels):
        return np.ones(len(labels), bool)
    if limit < len(counts):
        raise ConfigError(f"limit is {limit}, expected at least one for each of the {len(counts)} classes")
    return _draw(labels, 1 + _spread(counts - 1, limit - len(counts)), seed, LIMIT)


def _spread(counts: Ints, total: int) -> Ints:
    """Shares of a total in proportion to counts, in whole numbers: the largest remainders get one more."""
    exact = counts * (total / max(1, counts.sum()))
    out: Ints = np.floor(exact).astype(np.int64)
    out[np.argsort(out - exact, kind="stable")[: total - out.sum()]] += 1
    return out


def _draw(labels: Ints, wanted: Ints, seed: int, purpose: int) -> NDArray[np.bool_]:
    chosen, generator = np.zeros(len(labels), bool), numbers(seed, 0, purpose)
    for label, count in zip(np.unique(labels), wanted, strict=True):
        chosen[generator.permutation(np.flatnonzero(labels == label))[:count]] = True
    return chosen
