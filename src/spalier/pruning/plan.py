"""Plans: which units of each stream stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

import numpy as np
from torch import Tensor

from spalier._table import table
from spalier.errors import PlanError
from spalier.pruning.prediction import Prediction
from spalier.structure.structure import Structure

Writers = Literal["coupled", "free"]


@dataclass(frozen=True, eq=False)
class Plan:
    """Which units stay, counted as in the unpruned network; a stream that is not named keeps what it has.

    With ``writers="free"`` the layers that write into one stream may keep different units of it: name them by their
    path. A stream then keeps the units that any of its writers keeps.

    ``ranks`` are the components that stay of adapters' bottlenecks, by the paths of their layers; an adapter that is
    not named keeps all.
    """

    structure: Structure
    keep: Mapping[str, tuple[int, ...]]
    writers: Writers = "coupled"
    ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    prediction: Prediction | None = None
    """What the network will be, where `select` has made the plan."""

    def __init__(
        self,
        structure: Structure,
        keep: Mapping[str, Iterable[int]],
        *,
        writers: Writers = "coupled",
        ranks: Mapping[str, Iterable[int]] | None = None,
        prediction: Prediction | None = None,
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
        components = {name: _units(name, kept, None) for name, kept in (ranks or {}).items()}
        object.__setattr__(self, "ranks", components)
        object.__setattr__(self, "prediction", prediction)

    def __str__(self) -> str:
        sizes = {name: _size(self.structure, name, self.writers) for name in self.keep}
        rows = [[name, f"{len(units):,}", f"{sizes[name]:,}"] for name, units in self.keep.items()]
        parts = []
        if rows or not self.ranks:
            head = "stream" if self.writers == "coupled" else "stream or writer"
            parts.append(table([head, "kept", "of"], rows))
        if self.ranks:
            parts.append(table(["adapter", "rank"], [[name, str(len(r))] for name, r in self.ranks.items()]))
        if self.prediction is not None:
            parts.append(str(self.prediction))
        return "\n\n".join(parts)


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


def _units(name: str, units: Iterable[int], size: int | None) -> tuple[int, ...]:
    """Sorted numbers below ``size``, each once; how many components an adapter has, only the network knows."""
    try:
        units = units.tolist() if isinstance(units, Tensor | np.ndarray) else list(units)
        given = [int(unit) for unit in units]
        exact = all(isinstance(u, int | np.integer) and not isinstance(u, bool) for u in units)
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact:
        below = "" if size is None else f" below {size}"
        raise PlanError(f"the units of {name!r} are {units!r}, expected whole numbers{below}")
    if not given:
        raise PlanError(f"the plan empties {name!r}; at least one unit has to stay")
    if len(set(given)) < len(given):
        twice = next(u for u in given if given.count(u) > 1)
        raise PlanError(f"unit {twice} of {name!r} is named twice")
    outside = [u for u in given if u < 0 or (size is not None and u >= size)]
    if outside and size is None:
        raise PlanError(f"component {outside[0]} of {name!r} does not exist; they are counted from 0")
    if outside and size is not None:
        raise PlanError(f"unit {outside[0]} of {name!r} does not exist; it has {size} units, 0 to {size - 1}")
    return tuple(sorted(given))
