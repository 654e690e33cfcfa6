"""Learning rates: pure functions of how far a block is."""

from __future__ import annotations

import math
from typing import Literal

Kind = Literal["step", "cosine", "constant"]


def factor(kind: Kind, step: int, steps: int, warmup: float = 0.0) -> float:
    """What the learning rate is multiplied by at one step of a block; ``warmup`` steps rise to 1 first.

    >>> [round(factor("step", i, 8), 3) for i in range(8)]
    [1.0, 1.0, 0.2, 0.2, 0.04, 0.04, 0.008, 0.008]
    >>> [round(factor("cosine", i, 4, warmup=2), 3) for i in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup:
        return min(1.0, (step + 1) / warmup)
    progress = (step - warmup) / max(steps - warmup, 1)
    if kind == "step":
        return float(0.2 ** int(4 * progress + 1e-9))
    return 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1.0
