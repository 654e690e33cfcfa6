"""Made: operations that leave channels apart, though they take them along with something else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from zoo.entry import Entry
from zoo.parts import Head, conv, pictures


class TransposedWeights(nn.Module):
    """Weights without layers, each transposed in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv(3, 8), nn.Linear(9, 5)
        self.one_weight, self.two_weight = nn.Parameter(torch.zeros(10, 8)), nn.Parameter(torch.zeros(12, 10))
        self.three_weight = nn.Parameter(torch.zeros(9, 12))

    def forward(self, x):
        x = self.stem(x).mean((2, 3))
        x = F.relu(x @ self.one_weight.T)
        return self.head(F.relu(x @ self.two_weight.mT) @ self.three_weight.adjoint())


class Zeros(nn.Module):
    """Zeros and ones beside channels, made like them or of their sizes; some of them are written into."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.mix, self.head = conv(3, 8), nn.Conv2d(8, 10, 1), nn.Linear(10, 6), nn.Linear(6, 5)

    def forward(self, x):
        x = self.stem(x)
        x = torch.where(x > 0.1, x, torch.zeros_like(x)) + torch.ones_like(x)
        x = self.inner(torch.cat([x, x.new_zeros(*x.shape[:3], 1)], 3))
        every_other = torch.zeros(x.shape, dtype=x.dtype)
        every_other[:, :, ::2] = x[:, :, ::2]
        return self.head(F.relu(self.mix(every_other.mean((2, 3)))))


class Largest(nn.Module):
    """The largest and smallest pixels, with and without their places; pixels in order; mean and variance at once."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.last = conv(3, 8), conv(8, 10), conv(10, 12)
        self.mix, self.head = nn.Linear(12, 6), nn.Linear(6, 5)

    def forward(self, x):
        x = self.inner(F.adaptive_max_pool2d(self.stem(x), 4))
        largest, _ = x.max(3, keepdim=True)
        x = self.last(torch.max(x, largest - x.min(2, keepdim=True).values))
        variance, mean = torch.var_mean(x, (2, 3))
        pixels = x.flatten(2)
        middle = pixels.topk(3, 2).values.mean(2) + pixels.sort(2).values[:, :, 4] + pixels.median(2).values
        return self.head(F.relu(self.mix(middle + mean - variance)))


class Lengths(nn.Module):
    """Pixels of unit length, channels of unit length, and a classifier of cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner = conv(3, 8), nn.Conv2d(8, 10, 3)
        self.head_weight, self.scale = nn.Parameter(torch.zeros(5, 10)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = self.inner(F.normalize(self.stem(x), dim=1))
        x = F.normalize(x.flatten(2), dim=2).mean(2)
        return self.scale * F.linear(F.normalize(x, dim=-1), F.normalize(self.head_weight, dim=-1))


class Sampled(nn.Module):
    """Pixels are taken from where a layer, a grid or an order says."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.where, self.head = conv(3, 8), conv(8, 10), nn.Linear(8, 6), Head(10)

    def forward(self, x):
        x = self.stem(x)
        theta = self.where(x.mean((2, 3))).tanh().view(-1, 2, 3)
        x = self.inner(F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False))
        pixels = x.flatten(2)
        fixed = torch.arange(0, 12, 2).view(1, 1, -1).expand(*pixels.shape[:2], -1)
        order = pixels.detach().argsort(2)[:, :, ::2]
        taken = torch.cat([pixels.gather(2, fixed), pixels.gather(2, order)], 2)
        return self.head(taken.unsqueeze(3))


class Chosen(nn.Module):
    """As many pixels as are marked, in a view of them, and a channel of which only the shape is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = conv(3, 8), nn.Linear(8, 10), nn.Linear(10, 5)

    def forward(self, x):
        features = self.stem(x).flatten(2).transpose(1, 2)
        marked = torch.ones(features[:, :, -1].shape).bool()
        chosen = features[marked, :]
        return self.head(F.relu(self.mix(chosen.view(features.size(0), -1, features.size(-1))[:, -1, :])))


def entries() -> list[Entry]:
    return pictures(TransposedWeights, Zeros, Largest, Lengths, Sampled, Chosen)
