"""The rows of a layer table: tensors that are alike, the masks on their axes, and where their numbers come from.

With masks, each row says what is left of its tensors, and how long the numbers are that a task file has for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from spalier.adapters.codes import packed_size
from spalier.text import pattern_of

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Run = tuple[int, int, int, int]
"""Where it starts on an axis, its first unit, how many units, and for how many indices each."""


class Matrix(NamedTuple):
    """A matrix of numbers or codes, which lie behind one another in a file."""

    rows: int
    length: int
    levels: int = 0
    """Of codes; 0 for numbers."""
    scales: int = 0
    """How many scales its codes have: one for each row, or one."""

    @property
    def numel(self) -> int:
        """How many numbers or codes it has."""
        return self.rows * self.length

    @property
    def bytes(self) -> int:
        """How many bytes its codes take; none for numbers."""
        return packed_size(self.numel, self.levels) if self.levels else 0


Matrices = tuple[Matrix, ...]


@dataclass(eq=False)  # not frozen: a third of the time to make
class Placement:
    """A mask on an axis: index i goes with unit i, with unit ``units[i]``, or with the unit that a run gives it."""

    mask: int
    units: Ints | None = None
    """-1 for an index that belongs to no unit of this mask."""
    runs: tuple[Run, ...] | None = None
    """Of indices that belong to units of this mask; the others do not."""

    @staticmethod
    def of(mask: int, units: Ints) -> Placement:
        """The shortest way to say which units the indices of an axis go with."""
        if pattern_of(units) is not None:
            return Placement(mask, units)
        runs = _runs_of(units)
        is_shorter = 4 * len(runs) < len(units)  # a run is written with four numbers
        return Placement(mask, runs=runs) if runs and is_shorter else Placement(mask, units)

    def keep_(self, kept: Mask, masks: Sequence[Mask]) -> None:
        """Take out of the indices of an axis those whose unit is gone."""
        mask = masks[self.mask]
        if self.runs is None:
            kept &= mask if self.units is None else (self.units < 0) | mask[self.units]
            return
        for start, unit, count, repeat in self.runs:
            part = mask[unit : unit + count]
            kept[start : start + count * repeat] &= part if repeat == 1 else np.repeat(part, repeat)


def _runs_of(units: Ints) -> tuple[Run, ...]:
    """Units that follow each other, each for equally many indices, as runs."""
    edges = np.flatnonzero(np.diff(units)) + 1
    starts = np.concatenate([[0], edges])
    sizes = np.diff(np.concatenate([starts, [len(units)]]))
    runs: list[Run] = []
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        unit = int(units[start])
        if unit < 0:
            continue
        if runs:
            first, begun, count, repeat = runs[-1]
            if repeat == size and unit == begun + count and start == first + count * repeat:
                runs[-1] = (first, begun, count + 1, repeat)
                continue
        runs.append((start, unit, 1, size))
    return tuple(runs)


@dataclass(frozen=True)
class LowRank:
    """A frozen weight plus ``up^T down``: down has (rank, inputs, taps) numbers, then up (rank, outputs)."""

    rank: int
    taps: int
    groups: int
    """Of the layer in the base."""
    inputs_first: bool
    """Whether the weight's first axis is the input's."""
    whole: bool = False
    """True where the factors are for all channels of the base (plain LoRA)."""
    levels: int = 0
    """Of coded factors."""

    def matrices(self, shape: tuple[int, ...], inputs: int, outputs: int, groups: int) -> Matrices:
        """The factors, for so many channels that are left; a row is a component."""
        scales = self.rank if self.levels else 0
        lengths = inputs * self.taps, outputs
        return tuple(Matrix(self.rank, length, self.levels, scales) for length in lengths)


@dataclass(frozen=True)
class Pointwise:
    """A frozen weight plus a matrix of (outputs, inputs / groups), at the centre tap of a kernel."""

    groups: int
    inputs_first: bool
    levels: int = 0
    taps = 1
    whole = False

    def matrices(self, shape: tuple[int, ...], inputs: int, outputs: int, groups: int) -> Matrices:
        """The matrix, for so many channels that are left."""
        return (Matrix(outputs, inputs // groups, self.levels, outputs if self.levels else 0),)


@dataclass(frozen=True)
class Delta:
    """A frozen weight plus a code for each of its entries; a row is an index of its first axis."""

    levels: int
    by_row: bool
    groups: int
    inputs_first: bool
    taps = 0
    whole = False

    def matrices(self, shape: tuple[int, ...], inputs: int, outputs: int, groups: int) -> Matrices:
        """The codes of what is left of the weight."""
        return (Matrix(shape[0], math.prod(shape[1:]), self.levels, shape[0] if self.by_row else 1),)


Adapted = LowRank | Pointwise | Delta
Source = Literal["base", "values", "integers"] | Adapted
"""Where numbers come from: the base alone, the task's own ``values`` or integers, or the base plus an adapter."""


@dataclass(eq=False)
class Row:
    """Tensors of one module that are alike."""

    path: str
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    """Of the whole tensor."""
    axes: tuple[tuple[Placement, ...], ...]
    source: Source

    def __post_init__(self) -> None:
        self.names = tuple(f"{self.path}.{key}" if self.path else key for key in self.keys)
        """The full names of the tensors."""
        self.masks = tuple([_plain_masks(placed) for placed in self.axes])
        """For each axis, the numbers of its masks; None where one does not lie there unit by unit."""
        self.refs: tuple[int, ...] | None = None
        """The axes' numbers in the file's table, where it has them; equal ones are cut once."""
        self.uncut: Cut | None = None
        """What is left where no mask lies on the row, once it is known."""

    def recoded(self, levels: int) -> Row:
        """The row with an adapter whose numbers are codes of so many levels; 0 for numbers."""
        made = replace(self, source=replace(self.source, levels=levels))  # type: ignore[type-var]
        made.refs = self.refs
        return made


def _plain_masks(placed: Sequence[Placement]) -> tuple[int, ...] | None:
    is_plain = all(p.units is None and p.runs is None for p in placed)
    return tuple([p.mask for p in placed]) if is_plain else None


@dataclass(eq=False)
class Cut:
    """What is left of the tensors of a row."""

    indices: tuple[Ints | None, ...]
    """Along each axis; None where all of it is left."""
    shape: tuple[int, ...]
    is_whole: bool
    matrices: Matrices
    """Of the row's adapter; none without one."""


class Cutter:
    """What masks leave of the tensors of a table; axes with the same masks are looked at once."""

    def __init__(self, masks: Sequence[Mask]) -> None:
        self.masks = masks
        self._known: dict[tuple[int, ...] | None, Ints | None] = {(): None}
        self._cut_before: dict[tuple[int, int] | None, Ints | None] = {}

    def cut(self, row: Row) -> Cut:
        """What is left of a row's tensors."""
        if row.uncut is not None:
            return row.uncut
        known = self._known
        indices = tuple([known[m] if m in known else self._index(row, axis) for axis, m in enumerate(row.masks)])
        shape = tuple([n if i is None else len(i) for n, i in zip(row.shape, indices, strict=True)])
        matrices = () if isinstance(row.source, str) else _matrices(row, row.source, indices[0], shape)
        cut = Cut(indices, shape, shape == row.shape, matrices)
        if not any(row.axes):
            row.uncut = cut
        return cut

    def _index(self, row: Row, axis: int) -> Ints | None:
        """The indices of an axis that are left; None where all are."""
        key = None if row.refs is None else (row.refs[axis], row.shape[axis])
        if key in self._cut_before:
            return self._cut_before[key]
        if row.masks[axis] is not None and len(row.axes[axis]) == 1:
            kept = self.masks[row.axes[axis][0].mask]
        else:
            kept = np.ones(row.shape[axis], bool)
            for placement in row.axes[axis]:
                placement.keep_(kept, self.masks)
        index = np.flatnonzero(kept)
        found = None if len(index) == row.shape[axis] else index
        masks = row.masks[axis]
        if masks is not None:
            self._known[masks] = found
        elif key is not None:
            self._cut_before[key] = found
        return found


def _matrices(row: Row, source: Adapted, first: Ints | None, shape: tuple[int, ...]) -> Matrices:
    """The matrices of an adapter, where ``first`` are the indices left on the weight's first axis."""
    if source.whole:
        first, shape = None, row.shape
    groups = source.groups
    if groups > 1 and first is not None:  # groups that have nothing left are gone
        groups = len(np.unique(first // (row.shape[0] // groups)))
    outer, inner = shape[0], shape[1] * groups
    inputs, outputs = (outer, inner) if source.inputs_first else (inner, outer)
    return source.matrices(shape, inputs, outputs, groups)
