"""From numbers to places and round marks: linear and logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from spalier.reporting.naming import short

Ticks = tuple[tuple[float, str], ...]
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_SETS: tuple[tuple[float, ...], ...] = (
    (1,),
    (1, 3),
    (1, 2, 5),
    (1, 1.5, 2, 3, 5, 7),
    (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
)


@dataclass(frozen=True)
class Axis:
    """What an axis shows, from where to where, and its ticks."""

    label: str
    low: float
    high: float
    ticks: Ticks = ()
    log: bool = False
    grid: bool = False

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one.

        >>> Axis("", 1, 100, log=True).share(10)
        0.5
        """
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        return (at - low) / (high - low)


def linear(
    label: str,
    values: Iterable[float],
    *,
    least: float | None = None,
    most: float | None = None,
    text: Callable[[float], str] = short,
    count: int = 5,
) -> Axis:
    """An axis for these values, with some room, but not beyond what is possible."""
    found = list(values) or [0.0, 1.0]
    low, high = min(found), max(found)
    room = 0.07 * (high - low) or 0.1 * abs(high) or 0.5
    low = low - room if least is None or low < least else max(low - room, least)
    high = high + room if most is None or high > most else min(high + room, most)
    if not low < high:
        low, high = low - 0.5, high + 0.5
    ticks = tuple((t, text(t)) for t in linear_ticks(low, high, count))
    return Axis(label, low, high, _distinct(ticks), grid=True)


def logarithmic(
    label: str, values: Iterable[float], *, text: Callable[[float], str] = short, count: int = 5
) -> Axis:
    """A logarithmic axis for these positive values, with some room."""
    found = [v for v in values if v > 0] or [1.0, 10.0]
    spread = math.log10(max(found) / min(found))
    room = 10 ** max(0.06 * spread, 0.03)
    low, high = min(found) / room, max(found) * room
    ticks = tuple((t, text(t)) for t in log_ticks(low, high, count))
    return Axis(label, low, high, _distinct(ticks), log=True)


def _distinct(ticks: Ticks) -> Ticks:
    """Ticks that round to the same text are told apart by no one; the first stays."""
    seen: dict[str, float] = {}
    for value, text in ticks:
        seen.setdefault(text, value)
    return tuple((value, text) for text, value in seen.items())


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two ends, about so many.

    >>> linear_ticks(0, 1), linear_ticks(0.93, 0.97, 4)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.93, 0.94, 0.95, 0.96, 0.97])
    """
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in _STEPS if s * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(i * step, digits) + 0.0 for i in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two ends of a logarithmic axis: the finest set of digits that is not too many.

    >>> log_ticks(1, 1000), log_ticks(90, 700)
    ([1.0, 10.0, 100.0, 1000.0], [100.0, 150.0, 200.0, 300.0, 500.0, 700.0])
    """
    best: list[float] = []
    for digits in _SETS:
        found = [
            float(f"{d:g}e{power}")
            for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for d in digits
        ]
        found = [t for t in found if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]
        if len(found) > count + 1 and len(best) >= 2:
            break
        best = found
    while len(best) > count + 2:
        best = best[::2]
    return best if len(best) >= 2 else linear_ticks(low, high, count)


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, each at least a gap from the next; in order, and inside where there is room.

    >>> spread_out([10, 11, 30], 5, 0, 100)
    [8.0, 13.0, 30.0]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    clusters: list[
        tuple[float, int]
    ] = []  # the mean of what is wanted, less the place within the cluster; how many
    for i in order:
        clusters.append((float(wanted[i]), 1))
        while len(clusters) > 1 and _start(clusters[-2], gap) + clusters[-2][1] * gap > _start(
            clusters[-1], gap
        ):
            (a, n), (b, m) = clusters[-2:]
            clusters[-2:] = [((a * n + b * m) / (n + m), n + m)]
    places = [_start(c, gap) + k * gap for c in clusters for k in range(c[1])]
    for k in range(len(places)):
        places[k] = max(places[k], low + k * gap)
    for k in range(len(places)):
        places[-1 - k] = min(places[-1 - k], max(high - k * gap, low + (len(places) - 1 - k) * gap))
    found = [0.0] * len(wanted)
    for place, i in zip(places, order, strict=True):
        found[i] = place
    return found


def _start(cluster: tuple[float, int], gap: float) -> float:
    return cluster[0] - (cluster[1] - 1) * gap / 2
