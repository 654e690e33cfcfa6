"""Movement: whether training drives a unit away from zero or towards it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spalier.criteria.criterion import ActivationCriterion
from spalier.criteria.probe import Probe, Values, structure_of
from spalier.criteria.watching import Watch, mean_product, seeing
from spalier.errors import ScoreError
from spalier.structure.structure import Structure


class Recording:
    """Minus value times gradient at every site, summed over all backward passes so far."""

    def __init__(self, watches: list[Watch]) -> None:
        self.watches = watches
        self.sums = [torch.zeros(watch.units, dtype=torch.float64) for watch in watches]
        self.seen = [0] * len(watches)
        """How often gradients have come to each site."""

    def add(self, number: int, value: Tensor, gradient: Tensor) -> None:
        """One call's part of one backward pass."""
        watch = self.watches[number]
        moved = -(watch.laid_out(value, 1) * watch.laid_out(gradient, 1)).sum((0, 1), keepdim=True)[0]
        self.sums[number] += watch.by_unit(moved)[0].to(self.sums[number])
        self.seen[number] += 1

    def values(self) -> Values:
        """The sums, by stream and layer."""
        if not any(self.seen):
            raise ScoreError("nothing was recorded; train the network inside of record_movement first")
        for number, watch in enumerate(self.watches):
            if not self.seen[number]:
                raise ScoreError(
                    f"nothing was recorded at {watch.site.module!r}, which the network does not call by itself; use "
                    "score(net, batches, 'movement') instead"
                )
        found: Values = {}
        for watch, total in zip(self.watches, self.sums, strict=True):
            place = watch.site.stream, watch.site.writer
            found[place] = found[place] + total if place in found else total
        return found


@dataclass(frozen=True)
class Movement(ActivationCriterion):
    """How much the loss would grow, to first order, without the unit, with its sign.

    That is minus weight times gradient: positive where training drives the unit away from zero. `record_movement` adds
    it up while the network trains, as movement pruning does; over batches alone it says what a next step would do.
    """

    signed: ClassVar[bool] = True
    recording: Recording | None = None

    def of_activations(self, values: Any, gradients: Any) -> Tensor:
        """Minus value times gradient, the sum over positions."""
        return mean_product(values, gradients) * -float(values.shape[1])

    def measure(self, probe: Probe, batches: Any, loss: Any) -> Values:
        """A score for every unit that is left, by stream and layer."""
        if self.recording is None:
            return super().measure(probe, batches, loss)
        probe.samples = max(self.recording.seen)
        return self.recording.values()


@contextmanager
def record_movement(net: nn.Module, structure: Structure | None = None) -> Iterator[Movement]:
    """Add up movement while ``net`` trains inside of the block; then ``score(net, criterion=movement)``."""
    probe = Probe(net, structure_of(net, structure))
    recording = Recording([probe.watch(site) for site in probe.sites()])
    places = [
        (watch.site.module, watch.site.side, partial(_note, recording, number))
        for number, watch in enumerate(recording.watches)
    ]
    with seeing(net, places):
        yield Movement(recording=recording)


def _note(recording: Recording, number: int, value: Tensor) -> None:
    if value.requires_grad:
        kept = value.detach().clone()  # later code may write into it
        value.register_hook(lambda gradient: recording.add(number, kept, gradient))
