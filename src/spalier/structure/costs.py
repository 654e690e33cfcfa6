"""What a network computes, as products of sizes: multiply-accumulates that shrink as channels go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spalier.structure.streams import Assembly, Placed, present
from spalier.structure.walk import Term

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Cost:
    """The multiply-accumulates of one contraction: ``times`` the product of what is left of some axes."""

    module: str
    times: int
    tensor: str
    """A parameter, and the axes of it that count; empty where none is contracted as it is."""
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    placed: tuple[Placed, ...]

    def left(self, keep: Sequence[Mask], sizes_of: dict[str, list[int]]) -> int:
        """What is left where these units stay; ``sizes_of`` are the sizes of each parameter's axes."""
        own = [sizes_of[self.tensor][axis] for axis in self.axes]
        others = [
            int(present(placed, size, keep).sum())
            for placed, size in zip(self.placed, self.sizes, strict=True)
        ]
        return self.times * math.prod(own) * math.prod(others)


def costs_of(terms: Sequence[Term], assembly: Assembly) -> list[Cost]:
    """The terms by units; axes that nothing can be taken from are in ``times``."""
    made: dict[tuple[object, ...], Cost] = {}
    for number, term in enumerate(terms):
        times, sizes, placed = term.times, [], []
        for fields in term.fields:
            on = assembly.placed(fields)
            if on:
                sizes.append(len(fields[0]))
                placed.append(on)
            else:
                times *= len(fields[0])
        key = (number,) if placed else (term.module, term.tensor, term.axes)
        if key in made:
            times += made[key].times
        made[key] = Cost(term.module, times, term.tensor, term.axes, tuple(sizes), tuple(placed))
    return list(made.values())
