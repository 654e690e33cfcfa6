"""Schedules: how much is left at each moment of training, and a class that steps any loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from spalier.budget import Meter
from spalier.criteria.criterion import Criterion
from spalier.criteria.score import criterion_of, score
from spalier.errors import ConfigError
from spalier.pruning.plan import Plan
from spalier.pruning.prune import prune_
from spalier.pruning.recovery import Recovery
from spalier.selecting import select
from spalier.structure.structure import Structure, structure_of

Budget = Literal["channels", "weights", "macs", "latency"]


def one_shot(progress: float, *, end: float, start: float = 1.0) -> float:
    """All at once, at the beginning.

    >>> one_shot(0.0, end=0.3), one_shot(1.0, end=0.3)
    (0.3, 0.3)
    """
    _check(progress, start, end)
    return end


def iterative(progress: float, *, end: float, start: float = 1.0, step: float = 0.05) -> float:
    """Equal steps with equal time after each, and before the first: the paper's schedule.

    >>> [iterative(i / 4, end=0.7, step=0.1) for i in range(5)]
    [1.0, 0.9, 0.8, 0.7, 0.7]
    """
    _check(progress, start, end)
    if not 0 < step <= 1:
        raise ConfigError(f"step is {step!r}, expected a share above 0 and at most 1")
    steps = -(-(start - end) // step) if (start - end) / step % 1 > 1e-9 else round((start - end) / step)
    done = min(int(progress * (steps + 1) + 1e-9), int(steps))
    return max(end, round(start - done * step, 12))


def agp(progress: float, *, end: float, start: float = 1.0) -> float:
    """Automated gradual pruning: a cubic, steep at first.

    >>> round(agp(0.5, end=0.1), 4)
    0.2125
    """
    _check(progress, start, end)
    return end + (start - end) * (1 - progress) ** 3


SCHEDULES: Mapping[str, Callable[..., float]] = {"one_shot": one_shot, "iterative": iterative, "agp": agp}


def _check(progress: float, start: float, end: float) -> None:
    if not isinstance(progress, int | float) or not 0 <= progress <= 1:
        raise ConfigError(f"progress is {progress!r}, expected a number from 0 to 1")
    if not 0 < end <= start <= 1:
        raise ConfigError(f"start is {start!r} and end is {end!r}, expected 0 < end <= start <= 1")


@dataclass
class Schedule:
    """Prunes a network step by step in anybody's training loop.

    Call ``schedule.step(net, progress)`` as often as you like, with progress from 0 to 1; whenever less should be left
    than there is, it scores, selects and prunes.

    Args:
        kind: "one_shot", "iterative" (the paper's), "agp", or a function of progress.
        end: what is left at the end, a share of the unpruned network.
        batches: what to score on, an iterable that can be gone through again and again, or a function that gives one.
        criterion: what to score by, as for `score`.
        loss: the loss, as for `score`.
        budget: what the share is of: channels, weights, macs or latency.
        steps: in how many steps a continuous schedule goes.
        step_size: how much the iterative schedule takes each time.
        optimizer: whose state is cut along.
        recover: whether to recover in closed form after each prune, on the same batches; or a `Recovery`.
        structure: what `trace` found; an adapted network may remember it.
        options: what else `select` takes: ranking, writers, rank, min_keep, round_to, protect...

    >>> schedule = Schedule("agp", end=0.1, criterion="weight", steps=4)
    >>> [round(schedule.density(p), 3) for p in (0, 0.2, 0.5, 1)]
    [1.0, 1.0, 0.213, 0.1]
    """

    kind: str | Callable[[float], float] = "iterative"
    end: float = 0.1
    batches: Iterable[Any] | Callable[[], Iterable[Any]] | None = None
    criterion: str | Criterion = "taylor"
    loss: Callable[..., Tensor] | None = None
    budget: Budget = "channels"
    steps: int = 20
    step_size: float = 0.05
    optimizer: Optimizer | list[Optimizer] | None = None
    recover: bool | Recovery = False
    structure: Structure | None = None
    options: dict[str, Any] = field(default_factory=dict)

    _reached: float = field(default=1.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.kind) and self.kind not in SCHEDULES:
            raise ConfigError(f"kind is {self.kind!r}, expected one of {', '.join(SCHEDULES)}, or a function")
        if self.budget not in ("channels", "weights", "macs", "latency"):
            raise ConfigError(f"budget is {self.budget!r}, expected channels, weights, macs or latency")
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ConfigError(f"steps is {self.steps!r}, expected an integer of at least 1")
        criterion_of(self.criterion)
        self.density(0.0)

    def density(self, progress: float) -> float:
        """What should be left at this moment: a pure function."""
        if callable(self.kind):
            return float(self.kind(progress))
        if self.kind == "iterative":
            return iterative(progress, end=self.end, step=self.step_size)
        _check(progress, 1.0, self.end)
        if self.kind == "agp":
            progress = int(progress * self.steps + 1e-9) / self.steps
        return SCHEDULES[self.kind](progress, end=self.end)

    def step(self, net: nn.Module, progress: float) -> Plan | None:
        """Prune ``net`` if less should be left now than there is; the plan that was carried out, or None."""
        wanted = self.density(progress)
        structure = structure_of(net, self.structure)
        if wanted >= self._left(net, structure):
            return None
        given = self.batches() if callable(self.batches) else self.batches
        batches = None if given is None else list(given)
        if self.recover is True and batches is None:
            raise ConfigError("recover=True needs batches; pass batches=, or recover=Recovery(batches)")
        scores = score(net, batches, self.criterion, loss=self.loss, structure=structure)
        shares: dict[str, Any] = {self.budget: wanted}
        plan = select(net, scores, structure=structure, **shares, **self.options)
        recover = batches if self.recover is True else self.recover or None
        prune_(net, plan, optimizer=self.optimizer, recover=recover)
        self._reached = wanted
        return plan

    def _left(self, net: nn.Module, structure: Structure) -> float:
        """What is left now; time is not measured each time, so there it is what was asked for last."""
        if self.budget == "latency":
            return self._reached
        meter = Meter(net, structure)
        size = {"channels": meter.channels, "weights": meter.parameters, "macs": meter.macs}[self.budget]
        return size(meter.kept) / size(meter.whole)
