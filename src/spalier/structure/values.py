"""What a tensor of the graph carries: labels along its axes, and how these move, split and meet.

A *field* is one label for each index of one axis. An axis may have several: an entry of the tensor is gone as soon as
one of the labels at its indices is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from spalier.structure.labels import NONE, Ints, Labels

Fields = dict[int, list[Ints]]


@dataclass
class Value:
    """A tensor's shape and the fields on its axes."""

    shape: tuple[int, ...]
    fields: Fields = field(default_factory=dict)
    sources: frozenset[str] | None = None
    """The parameters and buffers that it is computed from alone; None where the network's input has a part in it."""

    @property
    def is_static(self) -> bool:
        """True for what does not depend on the network's input."""
        return self.sources is not None

    def on(self, axis: int) -> list[Ints]:
        """The fields of an axis."""
        return self.fields.get(axis % max(len(self.shape), 1), [])

    def all(self) -> Iterable[tuple[int, Ints]]:
        """Every field with its axis."""
        return [(axis, each) for axis, fields in self.fields.items() for each in fields]


class Meeting:
    """Records in `Labels` what operations say of fields."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.reason = ""
        """What is being looked at: the operation and its line."""
        self.splits: dict[tuple[str, tuple[int, ...]], list[Ints]] = {}
        """How a module's code splits axes: its path, the sizes, and the labels along each."""
        self.sized: dict[tuple[str, int], list[list[Ints]]] = {}
        """Axes whose sizes a module's code may hold: its path, the size, and the fields."""
        self.views: dict[str, list[Value]] = {}
        """What views make, in order, by the path of the module that asks for them."""

    def meet(self, sides: Sequence[list[Ints] | None]) -> list[Ints]:
        """Axes that run in parallel: their labels are one. None is an axis without any, where all others must stay."""
        labelled = [side for side in sides if side]
        if len(labelled) < len(sides):
            for each in (field for side in labelled for field in side):
                self.labels.freeze(each, f"{self.reason}: the other side carries no channels")
            return []
        kept = labelled[0]
        for side in labelled[1:]:
            kept = self._match(kept, side)
        return kept

    def _match(self, left: list[Ints], right: list[Ints]) -> list[Ints]:
        if len(left) == len(right):
            for a, b in zip(left, right, strict=True):
                if a is not b:
                    self._pair(a, b, left, right)
            return left
        if len(left) > len(right):
            left, right = right, left
        if len(left) == 1:
            self.labels.define(left[0], np.stack(right), self.reason)
        else:
            self.freeze(left + right)
        return right

    def _pair(self, a: Ints, b: Ints, left: list[Ints], right: list[Ints]) -> None:
        """Among several fields an entry without a label in one of them may have its label in another."""
        if len(left) == 1:
            self.labels.pair(a, b, self.reason)
            return
        both = (a != NONE) & (b != NONE)
        self.labels.pair(a[both], b[both], self.reason)
        self.labels.freeze(np.concatenate([a[~both], b[~both]]), self.reason)

    def freeze(self, fields: Iterable[Ints]) -> None:
        """All labels of these fields must stay."""
        for each in fields:
            self.labels.freeze(each, self.reason)

    def freeze_all(self, value: Value, axes: Iterable[int] | None = None) -> None:
        """All labels of a tensor, or of some of its axes, must stay."""
        for axis in list(value.fields) if axes is None else [a % len(value.shape) for a in axes]:
            self.freeze(value.on(axis))

    def split(self, fields: list[Ints], sizes: tuple[int, ...], where: str | None = None) -> list[list[Ints]]:
        """Each field seen as an array of these sizes; fields for each of its axes."""
        parts: list[list[Ints]] = [[] for _ in sizes]
        for each in fields:
            for axis, found in self._straight(torch.from_numpy(each).view(sizes), where):
                parts[axis].append(found)
        return parts

    def moved(
        self, value: Value, move: Callable[[Tensor], Tensor], shape: Sequence[int], where: str | None
    ) -> Value:
        """Run a data movement on the fields themselves."""
        out = Value(tuple(shape), {}, value.sources)
        for axis, each in value.all():
            dims = [len(each) if a == axis else 1 for a in range(len(value.shape))]
            result = move(torch.from_numpy(each).view(dims).expand(value.shape))
            for new, found in self._straight(result, where):
                out.fields.setdefault(new, []).append(found)
        return out

    def note_sizes(self, value: Value, where: str) -> None:
        """A module's code may hold the sizes of these axes."""
        for axis, fields in value.fields.items():
            if fields:
                self.sized.setdefault((where, value.shape[axis]), []).append(fields)

    def _straight(self, array: Tensor, where: str | None) -> list[tuple[int, Ints]]:
        """Fields along one axis each that say the same as an array of labels."""
        narrow, axes = _narrowed(array)
        if not axes:  # one channel of many, picked or spread
            self.labels.freeze(narrow.reshape(-1).numpy(), self.reason)
            return []
        if len(axes) == 1:
            return [(axes[0], narrow.reshape(-1).numpy())]
        sizes = tuple(narrow.shape[a] for a in axes)
        factors = [self.labels.new(n) for n in sizes]
        grid = np.meshgrid(*factors, indexing="ij")
        self.labels.define(narrow.reshape(-1).numpy(), np.stack([g.ravel() for g in grid]), self.reason)
        self._couple(where, sizes, factors)
        return list(zip(axes, factors, strict=True))

    def _couple(self, where: str | None, sizes: tuple[int, ...], factors: list[Ints]) -> None:
        """One module splits all its tensors by the same attributes: query, key and value have one head size."""
        if where is not None:
            known = self.splits.setdefault((where, sizes), factors)
            for a, b in zip(known, factors, strict=True):
                if a is not b:
                    self.labels.pair(a, b, self.reason)


def _narrowed(array: Tensor) -> tuple[Tensor, list[int]]:
    """One entry along every axis on which an array is constant, and the axes on which it is not."""
    axes = []
    for axis in range(array.dim()):
        if array.shape[axis] > 1:
            first = array.narrow(axis, 0, 1)
            if array.stride(axis) == 0 or torch.equal(first.expand_as(array), array):
                array = first
            else:
                axes.append(axis)
    return array, axes
