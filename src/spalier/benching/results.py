"""What a benchmark found: times, comparisons with the base, and verdicts that stay within what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, TypeVar

from spalier.text import table
from spalier.timing import CONFIDENCE, interval, quartiles

BASE = "base"
NOTHING = 0.02
"""A difference below two per cent is none, as for a budget of latency: it may come from where memory happens to lie."""
WIDE = 1.05
"""An interval that holds 1 and reaches beyond this does not say that a network is no faster."""
FIXED = 0.5
"""From which share on the time that does not grow with the batch is worth a word."""
Verdict = Literal["faster", "no faster", "slower", "not settled", "not measured"]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One network, in one backend, with one size of batch."""

    network: str
    backend: str
    batch: int
    seconds: tuple[float, ...] = ()
    """For one batch: the median of each round; empty if there is a problem."""
    calls: int = 0
    """In each round."""
    ready_seconds: float | None = None
    """Until the first output: compiled or exported, and run once; no part of ``seconds``."""
    macs: int | None = None
    """Of one sample."""
    problem: str = ""
    """Why there are no times."""

    @property
    def latency(self) -> float:
        """The median seconds for a batch."""
        return median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The seconds between which half of the rounds lie."""
        return quartiles(self.seconds)

    @property
    def throughput(self) -> float:
        """Samples in a second, at the median."""
        return self.batch / self.latency

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the rounds."""
        measured: dict[str, Any] = {}
        if self.seconds:
            measured = {
                "latency": self.latency,
                "quartiles": list(self.spread),
                "samples_per_second": self.throughput,
            }
        return {
            "network": self.network,
            "backend": self.backend,
            "batch": self.batch,
            "macs": self.macs,
            "problem": self.problem,
            "ready_seconds": self.ready_seconds,
            "calls": self.calls,
            "rounds": list(self.seconds),
            **measured,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A task's network against the base, in the same rounds. Print it for the verdict."""

    network: str
    backend: str
    batch: int
    verdict: Verdict
    speedup: float | None = None
    """The base's time over the network's: the median of the rounds' ratios."""
    low: float | None = None
    high: float | None = None
    macs_share: float | None = None
    """Of the base's MACs."""
    reason: str = ""
    """Where something that was measured explains it, or why nothing was."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**self.__dict__, "text": str(self)}

    def __str__(self) -> str:
        if self.speedup is None:
            return f"not measured: {self.reason}"
        span = f"{self.low:.2f}-{self.high:.2f}x"
        small = "" if self.macs_share is None else f" with {self.macs_share:.0%} of the MACs"
        if self.verdict == "no faster" and self.macs_share is not None and self.macs_share < 1:
            small = f" although it has {self.macs_share:.0%} of the MACs"
        text = {
            "faster": f"faster {self.speedup:.2f}x ({span}{small})",
            "slower": f"slower {self.speedup:.2f}x ({span}{small})",
            "no faster": f"no faster: {self.speedup:.2f}x ({span}{small})",
            "not settled": f"not settled: {span}{small}; measure with more rounds, or on a quieter machine",
        }[self.verdict]
        return f"{text}; {self.reason}" if self.reason else text


def compare(base: Timing, task: Timing, larger: Timing | None = None) -> Comparison:
    """What the rounds that both took part in say of a task's network.

    Args:
        base: the base, with the same backend and batch.
        task: the task's network.
        larger: the task's network with a larger batch, to tell the time that does not grow with it.
    """
    share = task.macs / base.macs if task.macs is not None and base.macs else None
    problem = task.problem or (base.problem and f"no base to compare with: {base.problem}")
    where = {"network": task.network, "backend": task.backend, "batch": task.batch, "macs_share": share}
    if problem:
        return Comparison(**where, verdict="not measured", reason=problem)  # type: ignore[arg-type]
    ratios = [slow / fast for slow, fast in zip(base.seconds, task.seconds, strict=True)]
    middle, low, high = interval(ratios)
    verdict = verdict_of(low, high)
    reason = _fixed(task, larger) if verdict in ("no faster", "slower") else ""
    return Comparison(**where, verdict=verdict, speedup=middle, low=low, high=high, reason=reason)  # type: ignore[arg-type]


def verdict_of(low: float, high: float) -> Verdict:
    """What an interval of the speed-up allows to say.

    >>> verdict_of(2.9, 3.3), verdict_of(0.97, 1.04), verdict_of(0.8, 0.9), verdict_of(0.7, 3.0)
    ('faster', 'no faster', 'slower', 'not settled')
    """
    if low > 1 + NOTHING:
        return "faster"
    if high < 1 - NOTHING:
        return "slower"
    return "no faster" if high <= WIDE else "not settled"


def _fixed(small: Timing, large: Timing | None) -> str:
    """How much of a batch's time is there whatever its size, where a line through two sizes says that it is much."""
    if large is None or not large.seconds or large.batch <= small.batch:
        return ""
    each = (large.latency - small.latency) / (large.batch - small.batch)
    share = min(1.0, 1 - each * small.batch / small.latency)
    if share < FIXED:
        return ""
    return (
        f"about {share:.0%} of its time at batch {small.batch} does not grow with the batch "
        f"({1e3 * large.latency:.3g} ms at batch {large.batch})"
    )


_Row = TypeVar("_Row", Timing, Comparison)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A base and tasks, measured side by side. Print it."""

    timings: tuple[Timing, ...]
    comparisons: tuple[Comparison, ...]
    machine: Mapping[str, str | int]
    rounds: int
    notes: tuple[str, ...] = ()

    def timing(self, network: str, backend: str, batch: int) -> Timing:
        """One network's times."""
        return _one(self.timings, network, backend, batch)

    def comparison(self, network: str, backend: str, batch: int) -> Comparison:
        """One task's network against the base."""
        return _one(self.comparisons, network, backend, batch)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, every round included."""
        return {
            "machine": dict(self.machine),
            "rounds": self.rounds,
            "confidence": CONFIDENCE,
            "notes": list(self.notes),
            "timings": [timing.to_dict() for timing in self.timings],
            "comparisons": [comparison.to_dict() for comparison in self.comparisons],
        }

    def __str__(self) -> str:
        machine = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        parts = [self._table(backend) for backend in dict.fromkeys(t.backend for t in self.timings)]
        foot = (
            f"{self.rounds} rounds in turns: medians, and between which values half of the rounds lie; speed-ups over "
            f"the base in the same rounds, with intervals of {CONFIDENCE:.0%}; less than {NOTHING:.0%} is no difference"
        )
        return "\n\n".join([*parts, "\n".join([*self.notes, foot, machine])])

    def _table(self, backend: str) -> str:
        own = [t for t in self.timings if t.backend == backend]
        problems = {t.problem for t in own}
        if len(problems) == 1 and "" not in problems:
            return f"{backend}\nnot measured: {problems.pop()}"
        header = ["network", "batch", "ms", "half within", "samples/s", "MACs", "ready, s", "verdict"]
        return f"{backend}\n" + table(header, [self._cells(t) for t in own])

    def _cells(self, timing: Timing) -> list[str]:
        macs = "-" if timing.macs is None else f"{timing.macs:,}"
        ready = "-" if timing.ready_seconds is None else f"{timing.ready_seconds:.2f}"
        if timing.problem:
            verdict = f"not measured: {timing.problem}"
            return [timing.network, str(timing.batch), "-", "-", "-", macs, ready, verdict]
        low, high = (f"{1e3 * value:.3f}" for value in timing.spread)
        verdict = ""
        if timing.network != BASE:
            verdict = str(self.comparison(timing.network, timing.backend, timing.batch))
        numbers = [f"{1e3 * timing.latency:.3f}", f"{low}-{high}", f"{timing.throughput:,.0f}"]
        return [timing.network, str(timing.batch), *numbers, macs, ready, verdict]


def _one(rows: Sequence[_Row], network: str, backend: str, batch: int) -> _Row:
    for row in rows:
        if (row.network, row.backend, row.batch) == (network, backend, batch):
            return row
    raise KeyError(f"{network!r} was not measured in {backend!r} with a batch of {batch}")
