"""Plans: which units of each stream stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

import numpy as np
from torch import Tensor

from spalier._table import table
from spalier.errors import PlanError
from spalier.structure.structure import Structure

Writers = Literal["coupled", "free"]


@dataclass(frozen=True, eq=False)
class Plan:
    """Which units stay, counted as in the unpruned network; a stream that is not named keeps what it has.

    With ``writers="free"`` the layers that write into one stream may keep different units of it: name them by their
    path. A stream then keeps the units that any of its writers keeps.
    """

    structure: Structure
    keep: Mapping[str, tuple[int, ...]]
    writers: Writers = "coupled"

    def __init__(
        self, structure: Structure, keep: Mapping[str, Iterable[int]], *, writers: Writers = "coupled"
    ) -> None:
        if not isinstance(structure, Structure):
            raise PlanError(f"structure is a {type(structure).__name__}, expected what trace returns")
        if writers not in ("coupled", "free"):
            raise PlanError(f"writers is {writers!r}, expected 'coupled' or 'free'")
        if not isinstance(keep, Mapping):
            raise PlanError(
                f"keep is a {type(keep).__name__}, expected a dict of stream names and unit numbers"
            )
        chosen = {name: _units(name, units, _size(structure, name, writers)) for name, units in keep.items()}
        object.__setattr__(self, "structure", structure)
        object.__setattr__(self, "keep", chosen)
        object.__setattr__(self, "writers", writers)

    def __str__(self) -> str:
        rows = [
            [name, f"{len(units):,}", f"{_size(self.structure, name, self.writers):,}"]
            for name, units in self.keep.items()
        ]
        return table(["stream" if self.writers == "coupled" else "stream or writer", "kept", "of"], rows)


def _size(structure: Structure, name: str, writers: Writers) -> int:
    """How many units a stream or a free writer has."""
    if writers == "free":
        for writer in structure.writers:
            if writer.name == name:
                return structure.streams[writer.stream].size
    if name in structure.index:
        return structure[name].size
    free = [writer.name for writer in structure.writers]
    if name in free:
        raise PlanError(
            f"{name!r} writes into a stream with others; pass writers='free' to let it keep units of its own"
        )
    known = [*structure.index, *(free if writers == "free" else [])]
    close = get_close_matches(str(name), known, n=3) or known[:3] or ["none: it has no streams"]
    raise PlanError(
        f"{name!r} is no stream of this network; expected a name such as {', '.join(map(repr, close))}"
    )


def _units(name: str, units: Iterable[int], size: int) -> tuple[int, ...]:
    try:
        units = units.tolist() if isinstance(units, Tensor | np.ndarray) else list(units)
        given = [int(unit) for unit in units]
        exact = all(isinstance(u, int | np.integer) and not isinstance(u, bool) for u in units)
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact:
        raise PlanError(f"the units of {name!r} are {units!r}, expected whole numbers below {size}")
    if not given:
        raise PlanError(f"the plan empties {name!r}; at least one unit has to stay")
    if len(set(given)) < len(given):
        twice = next(u for u in given if given.count(u) > 1)
        raise PlanError(f"unit {twice} of {name!r} is named twice")
    outside = [u for u in given if not 0 <= u < size]
    if outside:
        raise PlanError(f"unit {outside[0]} of {name!r} does not exist; it has {size} units, 0 to {size - 1}")
    return tuple(sorted(given))
