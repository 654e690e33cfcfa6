"""Contenders take turns, so that whatever else the machine does falls on all of them alike."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

Run = Callable[[], Any]
Clock = Callable[[], float]
MOST_CALLS = 10_000
"""In one turn, however short a call is."""


def take_turns(
    runs: Mapping[str, Run], *, rounds: int, seconds: float, clock: Clock
) -> dict[str, tuple[int, list[float]]]:
    """For each contender, how many calls a turn has, and the median seconds of a call in each round.

    Every round begins with another contender. A turn has as many calls as take ``seconds``, and where these are
    several, one before them that is not counted: it brings the weights back into the caches.
    """
    calls = {name: _calls(run, seconds, clock) for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    with without_collection():
        for _ in range(rounds):
            for name in order:
                found[name].append(_turn(runs[name], calls[name], clock))
            order = [*order[1:], *order[:1]]
    return {name: (calls[name], times) for name, times in found.items()}


def _calls(run: Run, seconds: float, clock: Clock) -> int:
    """How many calls take that long; after one that may have been slow by being an early one."""
    run()
    took = _timed(run, clock)
    return MOST_CALLS if took * MOST_CALLS <= seconds else max(1, math.ceil(seconds / took))


def _turn(run: Run, calls: int, clock: Clock) -> float:
    if calls > 1:
        run()
    return median([_timed(run, clock) for _ in range(calls)])


def _timed(run: Run, clock: Clock) -> float:
    start = clock()
    run()
    return clock() - start


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect garbage now, and not while something is timed."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
