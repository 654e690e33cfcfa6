"""Pruning inside of other libraries' training loops; each module of this package needs its library.

`Stepper` is what their callbacks share: it steps a schedule on a part of a module, and prunes a fresh network to what a
checkpoint had kept.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from spalier.adapters.attachment import attachment_of, is_marked
from spalier.adapters.kinds import LowRank
from spalier.distributed import is_distributed
from spalier.errors import ConfigError
from spalier.pruning.plan import Plan, kept_units
from spalier.pruning.prune import prune_
from spalier.scheduling import Schedule
from spalier.structure.structure import structure_of

Part = str | Callable[[Any], nn.Module] | None
"""What to prune of a module: a submodule's name, a function that gives it, or None for all of it."""
Moment = Literal["epoch", "step"]

_LOG = logging.getLogger("spalier")


class Stepper:
    """Steps a schedule with whichever optimizers a loop has; the caller's schedule is left alone."""

    def __init__(self, schedule: Schedule, net: Part, every: Moment) -> None:
        if not isinstance(schedule, Schedule):
            raise ConfigError(f"schedule is a {type(schedule).__name__}, expected a spalier.Schedule")
        if not (net is None or isinstance(net, str) or callable(net)):
            raise ConfigError(f"net is a {type(net).__name__}, expected a submodule's name, a function, or None")
        if every not in ("epoch", "step"):
            raise ConfigError(f'every is {every!r}, expected "epoch" or "step"')
        self.schedule = copy.copy(schedule)
        self.every = every
        self._net = net

    def part(self, module: nn.Module) -> nn.Module:
        """The network that is pruned."""
        if self._net is None or isinstance(self._net, str):
            return module.get_submodule(self._net or "")
        return self._net(module)

    def step_(self, module: nn.Module, done: float, total: float, optimizers: Iterable[Optimizer]) -> float:
        """Prune if it is time to, after so many steps of so many; the share that should be left now."""
        if not 0 < total < math.inf:
            raise ConfigError(f"training takes {total} steps, expected a number; limit its epochs or its steps")
        if is_distributed():
            raise ConfigError(
                "training runs in several processes, whose wrapper expects shapes to stay; train in one, or prune in "
                "a loop of your own that averages gradients itself"
            )
        net, progress = self.part(module), min(1.0, done / total)
        own, density = set(net.parameters()), self.schedule.density(progress)
        trained = {each: {p for group in each.param_groups for p in group["params"]} for each in optimizers}
        self.schedule.optimizer = [each for each, parameters in trained.items() if own & parameters]
        try:
            plan = self.schedule.step(net, progress)
        finally:
            self.schedule.optimizer = None
        if plan is not None:
            _LOG.info("pruned to a density of %.4g at %.1f%% of the training", density, 100 * progress)
        return density

    def kept(self, module: nn.Module) -> dict[str, Any] | None:
        """What is left of the network, as plain numbers."""
        net = self.part(module)
        units = kept_units(net)
        return None if units is None else {**units, "ranks": {n: u.rank for n, u in _adapters(net).items()}}

    def keep_(self, module: nn.Module, kept: dict[str, Any] | None) -> None:
        """Prune a network to what was left of another, which had the same base and adapters."""
        if kept is None:
            return
        net = self.part(module)
        structure = structure_of(net, self.schedule.structure)
        ranks = {n: range(kept["ranks"].get(n, u.rank)) for n, u in _adapters(net).items()}
        prune_(net, Plan(structure, kept["streams"], ranks=ranks))
        if kept["writers"]:
            prune_(net, Plan(structure, kept["writers"], writers="free"))


def _adapters(net: nn.Module) -> dict[str, LowRank]:
    updated = attachment_of(net).updated if is_marked(net) else ()
    return {e.path: e.update for e in updated if isinstance(e.update, LowRank)}
