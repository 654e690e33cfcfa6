"""A budget of bytes over the weights of a network: for each the code that its bytes are best spent on.

For each weight a few dozen codes are tried: nothing, low rank of several ranks with factors of 4 or 8 bits, and few
bits for each entry with several steps. Each has a size, as deflate will make it, and an error, weighted by what the
loss feels of it. With a price for a byte, the best code of each weight is the cheapest sum of both; the price is what
spends the budget (a Lagrangian). What is left over goes to whatever still fits and saves most for its bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spalier.adapters.codes import per_byte
from spalier.adapters.kinds import Coded, LowRank, Update
from spalier.errors import BudgetError
from spalier.refitting.approximate import Delta, added, low_rank_of, round_factors_, set_codes_

_SCALE = 2
"""Bytes of a scale."""
_RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_STEPS = {
    2: (1.0,),
    3: (0.7, 0.9, 1.1, 1.4, 1.8, 2.4, 3.2),
    7: (0.35, 0.5, 0.7, 0.9),
    15: (0.2, 0.3, 0.42),
    255: (0.03,),
}
"""For each number of levels, the steps between them to try, in units of a row's root mean square."""


@dataclass(frozen=True)
class Code:
    """One way to write a weight's delta."""

    kind: Literal["nothing", "low-rank", "bits"]
    levels: int = 0
    rank: int = 0
    whole: bool = False
    """Every tap of a kernel, or its centre."""
    step: float = 0.0
    by_row: bool = True

    def __str__(self) -> str:
        if self.kind == "nothing":
            return "nothing"
        bits = f"{math.log2(self.levels + (self.levels > 2)):.0f} bit" + ("s" if self.levels > 2 else "")
        if self.kind == "bits":
            return bits
        return f"rank {self.rank}{', whole kernel' if self.whole else ''}, {bits}"


@dataclass(frozen=True)
class Option:
    """A code with what it costs and leaves."""

    code: Code
    bytes: float
    error: float


NOTHING = Code("nothing")


def options_of(delta: Delta) -> list[Option]:
    """The codes of one weight that no other beats in both size and error, from the smallest on."""
    found = [Option(NOTHING, 0.0, delta.error())]
    if not delta.is_nothing:
        found += list(_bits(delta))
        found += list(_low_ranks(delta))
    return _hull(found)


def _bits(delta: Delta) -> Iterator[Option]:
    for levels, steps in _STEPS.items():
        for by_row in (True, False) if delta.geometry.padding_idx is None else (True,):
            for step in steps:
                code = Code("bits", levels, step=step, by_row=by_row)
                update = written(delta, code)
                yield Option(code, size_of(update), delta.error(added(update, delta)))


def _low_ranks(delta: Delta) -> Iterator[Option]:
    geometry = delta.geometry
    for whole in {False, math.prod(geometry.kernel) > 1}:
        taps = math.prod(geometry.kernel) if whole else 1
        usable = min(geometry.inputs // geometry.groups * taps, geometry.outputs // geometry.groups)
        cost = geometry.inputs * taps + geometry.outputs
        # past four bits for each number of the weight, few bits for each entry are always better
        ranks = [rank for rank in _RANKS if rank <= usable and rank * cost <= geometry.numel]
        if not ranks:
            continue
        factors = low_rank_of(delta, ranks[-1], whole=whole)
        for rank in ranks:
            for levels in (15, 255):
                code = Code("low-rank", levels, rank, whole)
                update = written(delta, code, factors)
                yield Option(code, size_of(update), delta.error(added(update, delta)))


@torch.no_grad()
def written(delta: Delta, code: Code, factors: tuple[Tensor, Tensor] | None = None) -> Update:
    """A delta in a code; ``factors`` of a larger rank save finding them again."""
    if code.kind == "bits":
        coded = Coded(delta.geometry, delta.base, code.levels, by_row=code.by_row, start=0.0)
        matrix = delta.values.flatten(1).float()
        size = (matrix if code.by_row else matrix.view(1, -1)).square().mean(1).sqrt()
        set_codes_(coded, delta.values, delta.metric.gram, code.step * size)
        return coded
    down, up = factors or low_rank_of(delta, code.rank, whole=code.whole)
    update = LowRank(delta.geometry, code.rank, delta.base, whole_kernel=code.whole, init_range=0.0)
    best = _largest(down, up, code.rank)
    update.down.copy_(down[best].reshape(update.down.shape))
    update.up.copy_(up[best])
    round_factors_(update, code.levels)
    return update


def _largest(down: Tensor, up: Tensor, rank: int) -> Tensor:
    """The components that add most, in their order."""
    sizes = down.flatten(1).norm(dim=1) * up.norm(dim=1)
    indices: Tensor = sizes.topk(rank).indices.sort().values
    return indices


def size_of(update: Update) -> float:
    """Bytes of an update's codes once they are deflated, and of its scales."""
    total = 0.0
    for values, scale, levels in update.stored():
        assert scale is not None
        counts = torch.unique(values, return_counts=True)[1].double()
        share = counts / counts.sum()
        bits = float(-(share * share.log2()).sum())
        # deflate gives each byte at least a bit, and no byte more than its eight
        bits = min(max(bits, 1 / per_byte(levels)), 8 / per_byte(levels))
        total += values.numel() * bits / 8 + _SCALE * scale.numel()
    return total


def _hull(options: Sequence[Option]) -> list[Option]:
    """The options that some price of a byte makes the best: the lower convex hull."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.bytes, o.error)):
        if hull and option.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(a: Option, b: Option) -> float:
    """The error that a byte saves between two options."""
    return (a.error - b.error) / max(b.bytes - a.bytes, 1e-9)


def spent(options: Mapping[str, list[Option]], budget: float) -> dict[str, Option]:
    """For each weight the option that a budget of bytes is best spent on."""
    # on convex hulls, the cheapest sums at a price are reached by the steps that save more than the price
    steps = [
        (_slope(a, b), name, number)
        for name, hull in options.items()
        for number, (a, b) in enumerate(itertools.pairwise(hull))
    ]
    chosen = dict.fromkeys(options, 0)
    left = budget - sum(hull[0].bytes for hull in options.values())
    for _, name, number in sorted(steps, key=lambda step: -step[0]):
        hull = options[name]
        cost = hull[number + 1].bytes - hull[chosen[name]].bytes
        if cost <= left:  # past the price, whatever still fits
            left -= cost
            chosen[name] = number + 1
    return {name: options[name][number] for name, number in chosen.items()}


def within(
    options: Mapping[str, list[Option]], budget: int, file_size: Callable[[Mapping[str, Code]], int]
) -> dict[str, Code]:
    """Codes whose file has at most ``budget`` bytes, and at least 99% of that where there is more to say.

    The sizes of options are estimates; the file itself is written, and what it is off by corrects the next try.
    """
    least = file_size(dict.fromkeys(options, NOTHING))
    if least > budget:
        raise BudgetError(
            f"bytes={budget:,} cannot be reached: without any delta, norms, head, masks and the layer table take "
            f"{least:,} bytes; ask for more than that, or prune further"
        )
    best: tuple[int, dict[str, Code]] = least, dict.fromkeys(options, NOTHING)
    target, low, high = float(budget - least), 0.0, math.inf
    for _ in range(_TRIES):
        codes = {name: option.code for name, option in spent(options, target).items()}
        found = file_size(codes)
        if found <= budget:
            best, low = max(best, (found, codes), key=lambda pair: pair[0]), target
            if found >= (1 - _TOLERANCE) * budget or all(codes[n] == hull[-1].code for n, hull in options.items()):
                break
        else:
            high = target
        guess = target * (budget * (1 - _TOLERANCE / 2) - least) / max(found - least, 1)
        target = guess if low < guess < high else (low + min(high, 2 * low + 1)) / 2
    return best[1]


_TRIES = 14
_TOLERANCE = 0.01
