"""What repeated measurements say: medians, quartiles, and an interval for a median that assumes no distribution.

Contenders take turns, so that whatever else the machine does falls on all of them alike.

Where something was measured.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

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


def machine(device: torch.device, threads: int) -> dict[str, str | int]:
    """The processor and versions, as plain data."""
    found: dict[str, str | int] = {"cpu": processor(), "cores": cores(), "threads": threads}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    elif device.type != "cpu":
        found["device"] = str(device)
    found["torch"] = torch.__version__
    if "onnxruntime" in sys.modules:
        found["onnxruntime"] = str(sys.modules["onnxruntime"].__version__)
    return found


def processor() -> str:
    """What the system calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine()


def cores() -> int:
    """How many of them this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
