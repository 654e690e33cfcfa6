"""Full fine-tuning behind the same interface: the baseline that learns every weight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FineTune:
    """Learn the weights themselves, in copies that `detach_` throws away; with pruning, the paper's fine-pruning.

    Without ``targets`` every parameter of the network learns, so that training is ordinary fine-tuning.

    >>> FineTune()
    FineTune()
    """
