"""What every adapter configuration shares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from spalier.adapters.layers import Geometry
from spalier.adapters.updates import Update
from spalier.errors import ConfigError


@dataclass(frozen=True)
class Fit:
    """What an adapter comes to on one weight."""

    rank: int | None
    learned: int


class Adapter(Protocol):
    """How to update frozen weights: one small frozen object that fits any geometry."""

    def fit(self, geometry: Geometry) -> Fit:
        """What the update of such a weight costs; ``learned`` 0 leaves the weight frozen."""
        ...

    def build(self, geometry: Geometry, fit: Fit, weight: Tensor) -> Update:
        """The update: a module that maps the frozen weight to the fused one, differentiably."""
        ...


def check_init_range(value: object) -> None:
    """Refuse what is not a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"init_range is {value!r}, expected a number")
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"init_range is {value}, expected a finite number of at least 0")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse what is not one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, expected one of {', '.join(map(repr, choices))}")
