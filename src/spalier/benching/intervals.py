"""What repeated measurements say: medians, quartiles, and an interval for a median that assumes no distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median, quantiles

CONFIDENCE = 0.95
FEWEST = 6
"""With fewer values not even the least and the largest hold the median between them 95 times in a hundred."""


def rank(count: int) -> int:
    """Which value from either end bounds the median: the innermost pair that does so with `CONFIDENCE`, from 1.

    Each value lies below the true median with a chance of one half, so how many do is a binomial number. 0 if there
    are fewer than `FEWEST` values.

    >>> rank(15), rank(6), rank(5)
    (4, 1, 0)
    """
    ways, found = 0, 0
    for below in range(count // 2):
        ways += math.comb(count, below)
        if 2 * ways > (1 - CONFIDENCE) * 2**count:
            break
        found = below + 1
    return found


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the bounds between which the true one lies.

    >>> interval([3, 1, 2, 5, 4, 6])
    (3.5, 1, 6)
    """
    at, ordered = rank(len(values)), sorted(values)
    assert at, f"{len(values)} values, fewer than {FEWEST}"
    return median(ordered), ordered[at - 1], ordered[-at]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Between them lies the middle half.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 4.0)
    """
    low, _, high = quantiles(values, method="inclusive")
    return low, high
