"""A budget of bytes over the weights of a network: for each the code that its bytes are best spent on.

For each weight a few dozen codes are tried: nothing, low rank of several ranks with factors of 4 or 8 bits, and few
bits for each entry with several steps. Each has a size, as deflate will make it, and an error, weighted by what the
loss feels of it. With a price for a byte, the best code of each weight is the cheapest sum of both; the price is what
spends the budget (a Lagrangian). What is left over goes to whatever still fits and saves most for its bytes.

Signs come first. Where those of all weights fit, no weight gets a code that is farther from it than its signs; where
they do not, none gets more bits. Codes of three levels that are mostly zero have less error for their bytes, but they
learn on worse than signs do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from spalier.adapters.codes import codes_of, per_byte, scale_of, top
from spalier.adapters.kinds import Coded, LowRank, Update
from spalier.errors import BudgetError
from spalier.refitting.approximate import Delta, added, low_rank_of, rooted, round_factors_, set_codes_

_SCALE = 1
"""Bytes of a scale, in the smallest storage."""
_SHORT = 128
"""Rows of fewer entries may share a scale."""
_RANKS = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, 129, 16))
_LEARNS = 8
"""The lowest rank that learns on as well as signs do; lower ones are for deltas that have no more."""
_STEPS = {
    2: (1.0,),
    3: (0.7, 0.9, 1.1, 1.4, 1.8, 2.3, 3.0),
    7: (0.35, 0.43, 0.52, 0.63, 0.76, 0.92),
    15: (0.18, 0.24, 0.32, 0.42),
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
    signs: float = math.inf
    """The error that signs leave."""


NOTHING = Code("nothing")


def options_of(delta: Delta) -> list[Option]:
    """The codes of one weight that no other beats in both size and error, from the smallest on."""
    found = [Option(NOTHING, 0.0, delta.error())]
    if not delta.is_nothing:
        bits, ranks = list(_bits(delta)), list(_low_ranks(delta))
        signs = min((option for option in bits if option.code.levels == 2), key=lambda option: option.error)
        found += [option for option in bits if option.code.levels == 2 or option.bytes >= signs.bytes]
        found += [option for option in ranks if option.code.rank >= _LEARNS or option.error <= signs.error]
        found = [replace(option, signs=signs.error) for option in found]
    return _undominated(found)


def _bits(delta: Delta) -> Iterator[Option]:
    if delta.geometry.inputs_first:  # rows are inputs, and errors are felt by output
        for levels, steps in _STEPS.items():
            for step in steps:
                code = Code("bits", levels, step=step)
                update = written(delta, code)
                yield Option(code, size_of(update), delta.error(added(update, delta)))
        return
    matrix, gram = delta.values.flatten(1).float(), delta.metric.gram
    felt = _felt(delta)
    own = (matrix if gram is None else matrix @ gram).mul(matrix).sum(1)  # (rows,)
    for levels, steps in _STEPS.items():
        for step, by_row in itertools.product(steps, _scales(delta)):
            code = Code("bits", levels, step=step, by_row=by_row)
            codes = codes_of(matrix, step_of(matrix, code)[:, None], levels)
            scale, saved = scale_of(codes, matrix, gram, by_row=by_row)
            if not by_row:  # rows are felt differently: what each of them saves
                _, saved = scale_of(codes, matrix, gram, by_row=True, given=scale)
            missing = own - saved
            size = _deflated_size(codes, levels) + _SCALE * (len(matrix) if by_row else 1)
            yield Option(code, size, max(float((missing * felt).sum()), 0.0))


def _felt(delta: Delta) -> Tensor:
    """What the loss feels of each row of the weight, for inputs of the metric."""
    metric = delta.metric
    found = torch.full((len(delta.base),), 1.0 if metric.gram is not None else metric.power, device=delta.base.device)
    return found if metric.outputs is None else found * metric.outputs


def _scales(delta: Delta) -> tuple[bool, ...]:
    """Whether rows have scales of their own, to try: where rows are short, one for all may pay."""
    is_short = delta.base[0].numel() < _SHORT and delta.geometry.padding_idx is None
    return (True, False) if is_short else (True,)


def step_of(matrix: Tensor, code: Code) -> Tensor:
    """The steps between the levels of a code, for each row or for all."""
    return code.step * (matrix if code.by_row else matrix.view(1, -1)).square().mean(1).sqrt()


def _low_ranks(delta: Delta) -> Iterator[Option]:
    geometry, kernel = delta.geometry, math.prod(delta.geometry.kernel)
    error = _low_rank_error(delta)
    for whole in {False, kernel > 1}:
        taps = kernel if whole else 1
        usable, cost = geometry.largest_rank(taps), geometry.inputs * taps + geometry.outputs
        # past two bits for each number of the weight, few bits for each entry are always better
        ranks = [rank for rank in _RANKS if rank <= usable and 2 * rank * cost <= geometry.numel]
        factors = low_rank_of(delta, ranks[-1], whole=whole) if ranks else None
        for rank, levels in itertools.product(ranks, (15, 255)):
            code = Code("low-rank", levels, rank, whole)
            update = written(delta, code, factors)
            assert isinstance(update, LowRank)
            yield Option(code, size_of(update), error(update))


def _low_rank_error(delta: Delta) -> Callable[[LowRank], float]:
    """What is missing with a low-rank update.

    Between a root of the metric and the factors, products are thin: that is much less than the metric itself takes.
    """
    gram, geometry = delta.metric.gram, delta.geometry
    if gram is None or geometry.groups > 1:
        return lambda update: delta.error(added(update, delta))
    root = rooted(gram)[1].float()
    wanted, felt = delta.values.flatten(1).float() @ root, _felt(delta)
    centre = root.view(geometry.inputs, -1, len(root))[:, math.prod(geometry.kernel) // 2]

    def error(update: LowRank) -> float:
        down, up = update.factors(inputs_first=geometry.inputs_first)
        seen = down.flatten(1).float() @ (root if down.dim() > 2 or len(centre) == len(root) else centre)
        missing = wanted - up.T.float() @ seen  # (out, r) @ (r, features)
        return float((missing.square().sum(1) * felt).sum())

    return torch.no_grad()(error)


@torch.no_grad()
def written(delta: Delta, code: Code, factors: tuple[Tensor, Tensor] | None = None) -> Update:
    """A delta in a code; ``factors`` of a larger rank save finding them again."""
    if code.kind == "bits":
        coded = Coded(delta.geometry, delta.base, code.levels, by_row=code.by_row, start=0.0)
        step = step_of(delta.values.flatten(1).float(), code)
        set_codes_(coded, delta.values, delta.metric.gram, step)
        return coded
    down, up = factors or low_rank_of(delta, code.rank, whole=code.whole)
    update = LowRank(delta.geometry, code.rank, delta.base, whole=code.whole, init_range=0.0)
    update.down.copy_(down[: code.rank].reshape(update.down.shape))
    update.up.copy_(up[: code.rank])
    round_factors_(update, code.levels)
    return update


def size_of(update: Update) -> float:
    """Bytes of an update's codes once they are deflated, and of its scales."""
    total = 0.0
    for values, scale, levels in update.stored():
        assert scale is not None
        total += _deflated_size(values, levels) + _SCALE * scale.numel()
    return total


def _deflated_size(codes: Tensor, levels: int) -> float:
    """Bytes that codes take once they are deflated: by their entropy."""
    counts = torch.bincount((codes + top(levels)).to(torch.int64).flatten()).double()
    share = counts[counts > 0] / codes.numel()
    bits = float(-(share * share.log2()).sum())
    # deflate gives each byte at least a bit, and no byte more than its eight
    return codes.numel() * min(max(bits, 1 / per_byte(levels)), 8 / per_byte(levels)) / 8


def _undominated(options: Sequence[Option]) -> list[Option]:
    """The options that no other beats in both size and error, from the smallest on."""
    found: list[Option] = []
    for option in sorted(options, key=lambda o: (o.bytes, o.error)):
        if not found or option.error < found[-1].error:
            found.append(option)
    return found


def _hull(options: Sequence[Option]) -> list[Option]:
    """The options that some price of a byte makes the best: the lower convex hull."""
    hull: list[Option] = []
    for option in _undominated(options):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(a: Option, b: Option) -> float:
    """The error that a byte saves between two options."""
    return (a.error - b.error) / max(b.bytes - a.bytes, 1e-9)


Options = Mapping[str, list[Option]]
FileSize = Callable[[Mapping[str, Code]], int]
"""The bytes of a file with these codes."""


def spent(options: Options, budget: float) -> dict[str, Option]:
    """For each weight the option that a budget of bytes is best spent on."""
    # on convex hulls, the cheapest sums at a price are reached by the steps that save more than the price
    hulls = {name: _hull(each) for name, each in options.items()}
    steps = [
        (_slope(a, b), name, number)
        for name, hull in hulls.items()
        for number, (a, b) in enumerate(itertools.pairwise(hull))
    ]
    chosen = dict.fromkeys(options, 0)
    left = budget - sum(hull[0].bytes for hull in hulls.values())
    for _, name, number in sorted(steps, key=lambda step: -step[0]):
        hull = hulls[name]
        cost = hull[number + 1].bytes - hull[chosen[name]].bytes
        if cost <= left:  # past the price, whatever still fits
            left -= cost
            chosen[name] = number + 1
    return {name: hulls[name][number] for name, number in chosen.items()}


def within(options: Options, budget: int, size_of_file: FileSize, room: float = 0.0) -> dict[str, Code]:
    """Codes whose file has at most ``budget`` bytes, and at least 99% of that where there is more to say.

    The sizes of options are estimates; the file itself is written, and what it is off by corrects the next try. All
    codes but signs count for more by ``room``, since they grow when they learn on.
    """

    def file_size(codes: Mapping[str, Code]) -> int:
        growing = (o.bytes for n, each in options.items() for o in each if o.code == codes[n] and o.code.levels > 2)
        return size_of_file(codes) + int(room * sum(growing))

    least = file_size(dict.fromkeys(options, NOTHING))
    if least > budget:
        raise BudgetError(
            f"bytes={budget:,} cannot be reached: without any delta, norms, head, masks and the layer table take "
            f"{least:,} bytes; ask for more than that, or prune further"
        )
    enough = {name: [option for option in each if option.error <= option.signs] for name, each in options.items()}
    if file_size({name: each[0].code for name, each in enough.items()}) <= budget:
        options = enough
    else:
        options = {n: [o for o in each if o.code.kind != "bits" or o.code.levels == 2] for n, each in options.items()}
    best: tuple[int, dict[str, Code]] = least, dict.fromkeys(options, NOTHING)
    target, low, high = float(budget - least), 0.0, math.inf
    for _ in range(_TRIES):
        codes = {name: option.code for name, option in spent(options, target).items()}
        found = file_size(codes)
        if found <= budget:
            best, low = max(best, (found, codes), key=lambda pair: pair[0]), target
            if found >= (1 - _TOLERANCE) * budget or all(codes[n] == each[-1].code for n, each in options.items()):
                break
        else:
            high = target
        guess = target * (budget * (1 - _TOLERANCE / 2) - least) / max(found - least, 1)
        target = guess if low < guess < high else (low + min(high, 2 * low + 1)) / 2
    return _filled(options, *best, budget, file_size)


def _filled(options: Options, size: int, codes: dict[str, Code], budget: int, file_size: FileSize) -> dict[str, Code]:
    """What room is left goes to one weight, or to one from another, the most that fits first."""
    tried: set[frozenset[tuple[str, Code]]] = set()
    for _ in range(_TRIES):
        if size >= (1 - _TOLERANCE) * budget:
            break
        moves = [("", NOTHING, 0.0, 0.0)]  # nothing, beside which another move stands alone
        for name, each in options.items():
            now = next(option for option in each if option.code == codes[name])
            moves += [(name, o.code, o.bytes - now.bytes, o.error - now.error) for o in each if o is not now]
        taken = _most(moves, budget - size, tried)
        if not taken:
            break
        tried.add(frozenset(taken.items()))
        found = file_size(codes | taken)
        if size < found <= budget:
            size, codes = found, codes | taken
    return codes


def _most(
    moves: Sequence[tuple[str, Code, float, float]], room: float, tried: set[frozenset[tuple[str, Code]]]
) -> dict[str, Code]:
    """The one or two moves of weights that take most of the room, and leave less error."""
    weights = {name: number for number, (name, *_) in enumerate(moves)}
    names = torch.tensor([weights[name] for name, *_ in moves])
    more, error = (torch.tensor([move[place] for move in moves], dtype=torch.float64) for place in (2, 3))
    total = more[:, None] + more
    fits = (total > 0) & (total <= room) & (error[:, None] + error < 0) & (names[:, None] != names)
    total = total.where(fits, -math.inf).triu()
    for place in total.flatten().topk(min(len(tried) + 1, total.numel())).indices.tolist():
        pair = [moves[number] for number in divmod(place, len(moves))]
        taken = {name: code for name, code, *_ in pair if name}
        if fits.flatten()[place] and frozenset(taken.items()) not in tried:
            return taken
    return {}


_TRIES = 14
_TOLERANCE = 0.01
