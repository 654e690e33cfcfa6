"""Made: what export refuses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from zoo.entry import Entry, make_entry, noise
from zoo.parts import snake


class Selected(nn.Module):
    """How many values there are depends on the values, and so does what is done with them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.one(x)
        chosen = x[x > 0]
        chosen = F.pad(chosen, (0, 8 - len(chosen))) if len(chosen) < 8 else chosen[:8]
        return self.two(chosen.view(1, 8))


class Branching(nn.Module):
    """Which layer runs depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x):
        x = self.one(x)
        return self.two(x) if x.mean().item() > 0 else self.three(x)


class Looping(nn.Module):
    """How often a layer runs depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.one(x)
        for _ in range(int(x.abs().sum().item()) % 3 + 1):
            x = torch.tanh(self.two(x))
        return x


class ThroughNumpy(nn.Module):
    """A part is computed outside of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.one(x)
        return self.two(torch.tensor(x.detach().numpy().clip(0), dtype=x.dtype))


def entries() -> list[Entry]:
    kinds = (Selected, Branching, Looping, ThroughNumpy)
    return [make_entry(f"untraceable/{snake(kind.__name__)}", kind, noise(3, 6)) for kind in kinds]
