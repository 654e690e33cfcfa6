"""What is known of a block: the row that it becomes, and the details beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spalier.adapters.kinds import ADAPTERS
from spalier.errors import ConfigError
from spalier.pruning.plan import Plan
from spalier.runs.checkpoint import Position
from spalier.runs.config import Settings
from spalier.runs.evaluating import Evaluation
from spalier.tasks.task import Task

_WARM_UP, _FEWEST, _MOST, _SECONDS = 3, 7, 40, 0.5


@dataclass(frozen=True)
class Block:
    """A block that is done."""

    at: Position
    target: float
    task: Task
    validation: Evaluation | None
    test: Evaluation | None
    plan: Plan | None

    def row(self) -> dict[str, Any]:
        """Numbers that are the same each time the run is made."""
        density = self.task.info.density
        return {
            "task": self.task.name,
            "block": self.at.block,
            "target": self.target,
            "channels": _share(density.channels),
            "weights": _share(density.weights),
            "macs": _share(density.macs),
            "parameters": None if density.weights is None else density.weights[0],
            "macs_left": None if density.macs is None else density.macs[0],
            "learned": self.task.info.learned,
            "validation": None if self.validation is None else self.validation.accuracy,
            "test": None if self.test is None else self.test.accuracy,
            "test_loss": None if self.test is None else self.test.loss,
            "epochs": self.at.epochs,
            "steps": self.at.step,
        }


def share_of(task: Task, budget: str) -> float:
    """How much of the base a task has left, by the measure of a budget; 1 where that is no share."""
    pair = getattr(task.info.density, budget, None)
    return 1.0 if pair is None else float(pair[0] / pair[1])


def check_start(config: Settings, task: Task) -> None:
    """Refuse to begin with a task that the settings do not describe."""
    found = task.info.adapter
    wanted = ADAPTERS[config.method].__name__
    if found["kind"] != wanted:
        names = {kind.__name__: name for name, kind in ADAPTERS.items()}
        raise ConfigError(
            f"method is {config.method!r}, and the task to start from was learned with {names[found['kind']]!r}; "
            "set that"
        )
    if found.get("rank", config.rank) != config.rank:
        raise ConfigError(
            f"rank is {config.rank}, and the task to start from has rank {found['rank']}; set that"
        )
    left = share_of(task, config.budget)
    above = [target for target in config.targets() if config.budget != "bytes" and target >= left]
    if above:
        raise ConfigError(
            f"the task to start from has {left:.1%} of the {config.budget} left, and {above[0]:g} is asked for; "
            "expected lower densities"
        )


def _share(pair: tuple[int, int] | None) -> float | None:
    return None if pair is None else pair[0] / pair[1]


def described(block: Block, row: dict[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Everything about a block, for whoever looks closer: confusions, and the units that are kept."""
    seen = {"validation": block.validation, "test": block.test}
    return {
        "row": row,
        "classes": list(classes),
        "confusion": {name: None if e is None else e.confusion for name, e in seen.items()},
        "kept": {} if block.plan is None else {n: list(units) for n, units in block.plan.keep.items()},
        "ranks": {} if block.plan is None else {n: len(units) for n, units in block.plan.ranks.items()},
    }


@torch.no_grad()
def latency_of(net: nn.Module, example: Tensor) -> float:
    """Milliseconds that one sample takes, here and now: the lower quartile, which other work moves least."""
    for _ in range(_WARM_UP):
        net(example)
    times: list[float] = []
    while len(times) < _FEWEST or (len(times) < _MOST and sum(times) < _SECONDS):
        _wait(example)
        start = time.perf_counter()
        net(example)
        _wait(example)
        times.append(time.perf_counter() - start)
    return round(1000 * sorted(times)[len(times) // 4], 4)


def _wait(example: Tensor) -> None:
    if example.device.type == "cuda":
        torch.cuda.synchronize(example.device)


def plain_plan(plan: Plan) -> dict[str, Any]:
    """A plan as JSON can hold it."""
    return {
        "keep": {name: list(units) for name, units in plan.keep.items()},
        "writers": plan.writers,
        "ranks": {name: list(units) for name, units in plan.ranks.items()},
    }


def block_line(row: dict[str, Any]) -> str:
    """A row in words, for whoever watches."""

    def share(name: str) -> str:
        return "-" if row[name] is None else f"{row[name]:.1%}"

    return (
        f"{row['task']}: {share('channels')} of channels, {share('macs')} of MACs, {row['learned']:,} learned, "
        f"validation {share('validation')}, test {share('test')}"
    )
