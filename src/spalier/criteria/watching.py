"""Hooks that see what passes through a network's sites, and the gradient that comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spalier.errors import ScoreError
from spalier.structure.sites import Side, Site


@dataclass(frozen=True)
class Watch:
    """A site in the network as it is now."""

    site: Site
    where: Tensor
    """For each channel, the number of its unit among those that are left; one past the last for none."""
    units: int

    def laid_out(self, value: Tensor, samples: int) -> Tensor:
        """A tensor as (samples, positions, channels), in single precision at least."""
        axis = self.site.axis % value.dim()
        wide = value.float() if value.dtype.itemsize < 4 else value
        first = sample_axis(tuple(value.shape), axis, samples)
        if first is None:  # nothing counts samples: all of it is one
            return wide.movedim(axis, -1).reshape(1, -1, value.shape[axis])
        return wide.movedim((first, axis), (0, -1)).reshape(samples, -1, value.shape[axis])

    def by_unit(self, value: Tensor) -> Tensor:
        """Channels of one unit, added up: (samples, units) of (samples, channels)."""
        if value.shape[-1] != len(self.where):
            raise ScoreError(
                f"{self.site.module!r} has {value.shape[-1]} channels here, expected {len(self.where)}; the network "
                "was changed since it was traced"
            )
        if self.units == len(self.where):
            return value
        folded = value.new_zeros(len(value), self.units + 1)
        folded.index_add_(1, self.where.to(value.device), value)
        return folded[:, : self.units]


def sample_axis(shape: tuple[int, ...], channel: int, samples: int) -> int | None:
    """The axis that counts samples: the first, perhaps with windows of each sample in it, or another of that length.

    >>> [sample_axis(shape, 2, samples=4) for shape in ((4, 7, 8), (7, 4, 8), (12, 7, 8), (5, 7, 8))]
    [0, 1, 0, None]
    """
    axes = [axis for axis in range(len(shape)) if axis != channel]
    exact = [axis for axis in axes if shape[axis] == samples]
    whole = [axis for axis in axes if axis == 0 and shape[axis] % samples == 0]
    return next(iter(exact + whole), None)


class Record:
    """What the sites have shown in the current batch."""

    def __init__(self, watches: list[Watch]) -> None:
        self.watches = watches
        self.samples = 0
        self._values: list[Tensor | None] = [None] * len(watches)
        self._returned: list[tuple[_Tap, Tensor, int]] = []
        self.taps: list[_Tap] = []

    def start(self, samples: int) -> None:
        """Forget the batch before."""
        self.samples = samples
        self._values = [None] * len(self.watches)
        self._returned.clear()
        for tap in self.taps:
            tap.calls = 0

    def add(self, number: int, value: Tensor) -> None:
        """Another call's numbers for one site, (samples, channels)."""
        value = self.watches[number].by_unit(value)
        before = self._values[number]
        self._values[number] = value if before is None else before + value

    def returned(self, tap: _Tap, tensor: Tensor) -> None:
        """Remember what a hook gave back, to see whether later code writes into it."""
        self._returned.append((tap, tensor, tensor._version))

    def take(self) -> list[Tensor | None]:
        """The batch's numbers, (samples, units) for each site."""
        for tap in {tap for tap, *_ in self._returned}:
            tap.copies = any(t._version != version for each, t, version in self._returned if each is tap)
        self._returned.clear()
        return self._values


class _Tap:
    """The hook on one module."""

    def __init__(
        self,
        record: Record,
        numbers: list[int],
        measure: Callable[..., Tensor],
        gradients: bool,
        values: bool,
    ) -> None:
        self.record, self.numbers, self.measure = record, numbers, measure
        self.gradients, self.values = gradients, values
        self.copies = values
        """Whether later code may write into what passes here (``out += x``), so that it has to be copied first."""
        self.buffers: list[Tensor] = []
        self.calls = 0
        """How many of them this batch has used."""

    def see(self, value: Tensor) -> Tensor:
        """What passes; the network goes on with what is returned."""
        if not self.gradients:
            for number in self.numbers:
                laid_out = self.record.watches[number].laid_out(value, self.record.samples)
                self.record.add(number, self.measure(laid_out, None))
            return value
        if not value.requires_grad:  # the first channels: nothing before them is asked for
            value = value.detach().requires_grad_().clone()
        if not self.values:
            value.register_hook(lambda gradient: self._measure(None, 0, gradient))
            return value
        kept = self._copied(value.detach()) if self.copies else value.detach()
        version = kept._version
        value.register_hook(lambda gradient: self._measure(kept, version, gradient))
        self.record.returned(self, value)
        return value

    def _copied(self, value: Tensor) -> Tensor:
        """A copy in memory that earlier batches had: fresh memory costs more than the copying."""
        self.calls += 1
        if len(self.buffers) < self.calls:
            self.buffers.append(torch.empty_like(value))
        if self.buffers[self.calls - 1].shape != value.shape:
            self.buffers[self.calls - 1] = torch.empty_like(value)
        return self.buffers[self.calls - 1].copy_(value)

    def _measure(self, kept: Tensor | None, version: int, gradient: Tensor) -> None:
        if kept is not None and kept._version != version:
            raise ScoreError(
                "the network writes into its activations in this batch and did not in the one before; "
                "set inplace=False where it does"
            )
        for number in self.numbers:
            watch = self.record.watches[number]
            values = None if kept is None else watch.laid_out(kept, self.record.samples)
            self.record.add(number, self.measure(values, watch.laid_out(gradient, self.record.samples)))


@contextmanager
def watched(
    net: nn.Module,
    watches: list[Watch],
    measure: Callable[..., Tensor],
    *,
    gradients: bool = True,
    values: bool = True,
    before_norm: bool = False,
) -> Iterator[Record]:
    """Watch all sites while the network runs: what passes there (``values``), and what comes back (``gradients``).

    ``before_norm`` is where the published code looked.
    """
    record = Record(watches)
    places: dict[tuple[str, Side], list[int]] = {}
    for number, watch in enumerate(watches):
        site = watch.site
        module = site.writer if before_norm and site.norm else site.module
        places.setdefault((module, site.side), []).append(number)
    taps = {place: _Tap(record, numbers, measure, gradients, values) for place, numbers in places.items()}
    record.taps = list(taps.values())
    with (
        seeing(net, [(module, side, tap.see) for (module, side), tap in taps.items()]),
        torch.enable_grad() if gradients else torch.no_grad(),
    ):
        yield record


See = Callable[[Tensor], Tensor | None]
"""Sees a tensor, and may give another one to go on with."""


@contextmanager
def seeing(net: nn.Module, places: Iterable[tuple[str, Side, See]]) -> Iterator[None]:
    """Let functions see what modules take or return, before a gather spreads it."""
    handles = []
    for path, side, see in places:
        module = net.get_submodule(path)
        if side == "output":
            handles.append(module.register_forward_hook(_of_output(see), prepend=True))
        else:
            handles.append(module.register_forward_pre_hook(_of_input(see)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _of_output(see: See) -> Callable[..., Any]:
    return lambda module, args, output: see(output) if isinstance(output, Tensor) else None


def _of_input(see: See) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any) -> Any:
        found = see(args[0]) if args and isinstance(args[0], Tensor) else None
        return None if found is None else (found, *args[1:])

    return hook


def mean_product(values: Tensor, gradients: Tensor) -> Tensor:
    """The mean over positions of two tensors' product, (samples, channels), without a product of all samples at once.

    >>> mean_product(torch.ones(2, 3, 4), torch.full((2, 3, 4), 5.0))
    tensor([[5., 5., 5., 5.],
            [5., 5., 5., 5.]])
    """
    if values[0].numel() < _LARGE:
        return (values * gradients).mean(1)
    one = torch.empty_like(values[0])
    means = [torch.mul(a, b, out=one).mean(0) for a, b in zip(values, gradients, strict=True)]
    return torch.stack(means)


_LARGE = 1 << 17
"""From so many numbers of one sample on, fresh memory for all of them costs more than a loop."""
