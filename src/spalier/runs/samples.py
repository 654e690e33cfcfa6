"""Samples to score and recover on: some of the training samples, as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spalier.data import Split
from spalier.networks import logits_of
from spalier.runs import losses


class Samples:
    """Batches of some samples, made each time anew so that no more than one is in memory."""

    def __init__(
        self,
        part: Split,
        indices: np.ndarray[Any, Any],
        batch: int,
        placed: Callable[[Tensor], Tensor],
        teacher: nn.Module | None,
    ) -> None:
        self.part, self.indices, self.batch, self.placed, self.teacher = part, indices, batch, placed, teacher

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.indices), self.batch):
            images, labels = self.part.fetch(self.indices[start : start + self.batch], None)
            images = self.placed(images)
            if self.teacher is not None:
                labels = losses.guesses(logits_of(self.teacher(images)))
            yield images, labels.to(images.device)


def mean_loss(output: Any, labels: Tensor) -> Tensor:
    """The cross entropy of a batch, as criteria take it."""
    return losses.cross_entropy(logits_of(output), labels) / len(labels)
