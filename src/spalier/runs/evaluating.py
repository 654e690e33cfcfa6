"""How good a network is, on every sample of a part, none twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spalier.networks import logits_of
from spalier.runs.losses import cross_entropy
from spalier.runs.syncing import summed


@dataclass(frozen=True)
class Evaluation:
    """What came out."""

    loss: float
    confusion: list[list[int]]
    """How many samples of each class (row) were taken for each (column)."""

    @property
    def samples(self) -> int:
        """How many there were."""
        return sum(map(sum, self.confusion))

    @property
    def accuracy(self) -> float:
        """The share that is right."""
        return sum(row[i] for i, row in enumerate(self.confusion)) / max(self.samples, 1)


@torch.no_grad()
def evaluate(
    net: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    classes: int,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
    teacher: nn.Module | None = None,
) -> Evaluation:
    """Run a network in eval mode. With a teacher, its guesses are what is right: for data without labels."""
    confusion = torch.zeros(classes * classes + 1, dtype=torch.float64, device=device)
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        with autocast():
            logits = logits_of(net(images))
            if teacher is not None:
                labels = logits_of(teacher(images)).argmax(1)
        confusion[-1] += cross_entropy(logits, labels).double()
        pairs = labels * classes + logits.argmax(1)
        confusion[:-1] += torch.bincount(pairs, minlength=classes * classes)
    confusion = summed(confusion)
    counts = confusion[:-1].view(classes, classes).long()
    return Evaluation(float(confusion[-1]) / max(int(counts.sum()), 1), counts.tolist())
