"""Made: inputs other than one picture: waveforms, volumes, and two at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from zoo.entry import Entry, make_entry, noise
from zoo.parts import Head, conv


class OneDimensional(nn.Module):
    """Waveforms: dilated causal convolutions with gates, skips that are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv1d(2, 8, 1), nn.Linear(6, 5)
        self.filters = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**i) for i in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(8, 6, 1) for _ in range(3))
        self.norm, self.back = nn.BatchNorm1d(8), nn.ConvTranspose1d(8, 8, 3, padding=1)

    def forward(self, x):
        x, total = self.back(self.norm(self.stem(x))), 0
        for i, (filter_, skip) in enumerate(zip(self.filters, self.skips, strict=True)):
            value, gate = filter_(F.pad(x, (2**i, 0))).chunk(2, 1)
            x = x + value.tanh() * gate.sigmoid()
            total = total + skip(x)
        return self.head(total.relu().mean(-1))


class ThreeDimensional(nn.Sequential):
    """Volumes."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv3d(2, 8, 3, padding=1),
            nn.BatchNorm3d(8),
            nn.ReLU(),
            nn.MaxPool3d(2),
            nn.Conv3d(8, 12, 3, padding=1, groups=4),
            nn.InstanceNorm3d(12, affine=True),
            nn.ELU(),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
            nn.Linear(12, 5),
        )


class TwoInputs(nn.Module):
    """Two inputs, two outputs, and a condition that scales and shifts channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last, self.head = conv(3, 8), conv(8, 6), Head(6)
        self.condition, self.side = (
            nn.Sequential(nn.Linear(4, 10), nn.SiLU(), nn.Linear(10, 16)),
            nn.Linear(16, 2),
        )

    def forward(self, x, label):
        film = self.condition(label)
        scale, shift = film[:, :, None, None].chunk(2, 1)
        return self.head(self.last(torch.addcmul(shift, self.stem(x), 1 + scale))), self.side(film)


def entries() -> list[Entry]:
    rows: list[tuple[str, Callable[[], nn.Module], Callable[[], Any]]] = [
        ("conv1d", OneDimensional, noise(2, 2, 12)),
        ("conv3d", ThreeDimensional, noise(2, 2, 6, 6, 6)),
        ("two_inputs", TwoInputs, lambda: {"label": torch.randn(2, 4), "x": torch.randn(2, 3, 8, 8)}),
    ]
    return [make_entry(f"made/{name}", build, draw) for name, build, draw in rows]
