"""How long calls take: the timing loop, statistics of what it measures, and the machine that it ran on."""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from timeit import repeat, timeit
from typing import Any

import torch

Call = Callable[[], Any]
Clock = Callable[[], float]

CONFIDENCE = 0.95
MIN_ROUNDS = 6
"""With five rounds or fewer, not even the smallest and the largest value enclose the median at 95% confidence."""
MAX_CALLS = 10_000
"""In one turn, however short a call is."""


# timing


def take_turns(
    calls: Mapping[str, Call], *, rounds: int, seconds: float = 0.0, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Time several calls in turns. For each, the median seconds in each round.

    In turns, whatever else the machine does falls on all calls alike.

    Garbage is not collected while a call runs.

    Args:
        calls: what to time, by name.
        rounds: how many turns each has.
        seconds: how long a turn takes at least; by default it is a single call.
        clock: seconds that never go back.
    """
    repeats = {name: _repeats(call, seconds, clock) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        for name in order:
            if repeats[name] > 1:
                calls[name]()  # brings the weights back into the caches, which the turns of others have filled
            found[name].append(median(repeat(calls[name], timer=clock, repeat=repeats[name], number=1)))
        # Each round starts with another call, so that none always follows the same one.
        order = [*order[1:], *order[:1]]
    return found


def finished(call: Call, device: torch.device) -> Call:
    """A call that returns once its device has computed everything: other devices than CPUs work asynchronously."""
    if device.type == "cpu":
        return call

    def run() -> Any:
        out = call()
        torch.accelerator.synchronize(device)
        return out

    return run


def _repeats(call: Call, seconds: float, clock: Clock) -> int:
    """How many calls take that long. The first call is not timed: it may pay for one-time work."""
    call()
    if not seconds:
        return 1
    took = timeit(call, timer=clock, number=1)
    return MAX_CALLS if took * MAX_CALLS <= seconds else max(1, math.ceil(seconds / took))


# statistics


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the bounds between which the true one lies; no distribution is assumed.

    >>> interval([3, 1, 2, 5, 4, 6])
    (3.5, 1, 6)
    """
    at, ordered = interval_rank(len(values)), sorted(values)
    assert at, f"{len(values)} values, fewer than {MIN_ROUNDS}"
    return median(ordered), ordered[at - 1], ordered[-at]


def interval_rank(count: int) -> int:
    """Which value from either end bounds the median: the innermost pair that does so with `CONFIDENCE`, from 1.

    Each value lies below the true median with a probability of one half, so how many do is a binomial number. 0 if
    there are fewer than `MIN_ROUNDS` values.

    >>> interval_rank(15), interval_rank(6), interval_rank(5)
    (4, 1, 0)
    """
    ways, found = 0, 0
    for below in range(count // 2):
        ways += math.comb(count, below)
        if 2 * ways > (1 - CONFIDENCE) * 2**count:
            break
        found = below + 1
    return found


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The middle half lies between them. Other work on the machine only ever adds time, so the lower one moves least.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 4.0)
    """
    low, _, high = quantiles(values, method="inclusive")
    return low, high


# the machine


def describe_machine(device: torch.device, threads: int) -> dict[str, str | int]:
    """The processor and versions, as plain data."""
    found: dict[str, str | int] = {"cpu": processor(), "cores": available_cores(), "threads": threads}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    elif device.type != "cpu":
        found["device"] = str(device)
    found["torch"] = torch.__version__
    if sys.modules.get("onnxruntime"):
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


def available_cores() -> int:
    """How many cores this process may use: containers and batch systems give fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
