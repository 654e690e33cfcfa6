"""What a network learns from: labels, and a teacher."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The sum over the batch."""
    return F.cross_entropy(logits.float(), labels, label_smoothing=smoothing, reduction="sum")


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """How far a network is from its teacher at a temperature: T² KL(teacher ‖ network), summed over the batch.

    >>> x = torch.tensor([[1.0, 2.0]])
    >>> distillation(x, x, 2.0).item()
    0.0
    """
    own = F.log_softmax(logits.float() / temperature, dim=1)
    wanted = F.log_softmax(teacher.float() / temperature, dim=1)
    return temperature**2 * F.kl_div(own, wanted, log_target=True, reduction="sum")


def together(
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor | None,
    *,
    smoothing: float,
    weight: float,
    temperature: float,
) -> Tensor:
    """Labels and teacher, weighted; without a teacher the labels alone, and with a weight of 1 the teacher alone."""
    if teacher is None:
        return cross_entropy(logits, labels, smoothing)
    taught = distillation(logits, teacher, temperature)
    if weight == 1:
        return taught
    return (1 - weight) * cross_entropy(logits, labels, smoothing) + weight * taught


@torch.no_grad()
def guesses(logits: Tensor) -> Tensor:
    """The classes that a teacher would say, for criteria that need labels where there are none."""
    return logits.argmax(1)
