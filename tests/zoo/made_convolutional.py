"""Made: convolutions whose channels are tied, joined, parted and moved."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from zoo.entry import Entry
from zoo.parts import Head, conv, pictures


class UNet(nn.Module):
    """What went down is concatenated to what comes up, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = conv(3, 8), conv(8, 12), conv(12, 16)
        self.up2, self.join2 = nn.ConvTranspose2d(16, 12, 2, stride=2), conv(24, 12)
        self.up1, self.join1 = nn.ConvTranspose2d(12, 8, 2, stride=2), conv(16, 8)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        up = self.up2(self.bottom(F.max_pool2d(two, 2)))
        up = self.up1(self.join2(torch.cat([two, up], dim=1)))
        return self.last(self.join1(torch.cat((up, one), dim=-3)))


class SharedModule(nn.Module):
    """One convolution is called twice, so its inputs and outputs are the same channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shared, self.head = conv(3, 8), conv(8, 8), Head(8)

    def forward(self, x):
        return self.head(self.shared(self.shared(self.stem(x))))


class SharedOnTwoInputs(nn.Module):
    """One convolution reads two others, whose channels are thereby the same; the halves are then compared."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.shared, self.head = conv(3, 8), conv(3, 8), conv(8, 12), Head(24)

    def forward(self, x):
        return self.head(torch.cat([self.shared(self.left(x)), self.shared(self.right(x))], 1))


class InPlace(nn.Module):
    """Additions and activations that write into what they read, also through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.three, self.act, self.head = nn.Conv2d(8, 8, 1), nn.ReLU(inplace=True), Head(8)

    def forward(self, x):
        x = self.one(x).relu_()
        y = self.two(x)
        y += x
        y.flatten(2).mul_(0.5)
        self.act(y)
        return self.head(self.three(y).add_(y, alpha=2))


class ConstantView(nn.Module):
    """The number of channels is written into the code: a smaller network would not run."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = conv(3, 8), nn.Linear(8 * 64, 5)

    def forward(self, x):
        return self.linear(self.conv(x).view(-1, 8 * 8 * 8))


class ConstantGroups(nn.Module):
    """Channels are summed in groups of a number that is written into the code."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = conv(3, 12), Head(4)

    def forward(self, x):
        x = self.conv(x)
        return self.head(x.reshape(x.shape[0], 4, 3, *x.shape[2:]).sum(2))


class SingleChannel(nn.Module):
    """A map of one channel is broadcast over many: there is nothing to cut in it, nor does it tie the many."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.conv, self.head = conv(3, 8), nn.Conv2d(8, 1, 1), conv(8, 12), Head(12)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.conv(x * torch.sigmoid(self.gate(x))))


class UsedTwice(nn.Module):
    """One output is read by two layers, once more by a sum, and returned as well."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right, self.head = conv(3, 8), conv(8, 6), conv(8, 8), Head(14)

    def forward(self, x):
        x = self.stem(x)
        both = torch.cat([self.left(x), self.right(x) + x], 1)
        return {"classes": self.head(both), "features": x.mean((2, 3))}


class ChannelShuffle(nn.Module):
    """Channels of two groups are interleaved, by the operator's name and by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = conv(3, 12), conv(12, 12, groups=2), conv(12, 8, groups=2)
        self.shuffle, self.head = nn.ChannelShuffle(2), Head(8)

    def forward(self, x):
        x = self.two(self.shuffle(self.one(x)))
        batch, channels, height, width = x.shape
        x = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous()
        return self.head(self.three(x.view(batch, -1, height, width)))


class SuperResolution(nn.Module):
    """Each channel that leaves the pixel shuffle was four before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide, self.shuffle = conv(3, 8), nn.Conv2d(8, 24, 3, padding=1), nn.PixelShuffle(2)
        self.mix, self.fold, self.last = conv(6, 4), nn.PixelUnshuffle(2), nn.Conv2d(16, 12, 1)

    def forward(self, x):
        x = self.fold(self.mix(self.shuffle(self.wide(self.stem(x)))))
        return F.pixel_shuffle(self.last(x), 2)


class GatedUnits(nn.Module):
    """Halves of the channels are multiplied: by ``GLU``, by ``chunk``, by ``split`` and by slices."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(8, 12, 1)
        self.three, self.four, self.head = nn.Conv2d(6, 12, 1), nn.Conv2d(6, 12, 1), Head(6)

    def forward(self, x):
        value, gate = self.two(F.glu(self.one(x), dim=1)).chunk(2, dim=1)
        value, gate = self.three(value * gate.sigmoid()).split(6, dim=1)
        x = self.four(value * F.gelu(gate))
        return self.head(x[:, :6] * torch.tanh(x[:, 6:]))


class Depthwise(nn.Module):
    """Depthwise convolutions, one with two outputs per channel, between pointwise ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep, self.point = conv(3, 8), conv(8, 8, groups=8), nn.Conv2d(8, 6, 1)
        self.twice, self.last, self.head = conv(6, 12, groups=6), nn.Conv2d(12, 8, 1), Head(8)

    def forward(self, x):
        return self.head(self.last(self.twice(self.point(self.deep(self.stem(x))))))


class Grouped(nn.Module):
    """A grouped convolution reads an ordinary one, and one with other groups reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.two, self.three = conv(3, 12), conv(12, 12, groups=2), conv(12, 9, groups=3)
        self.head = Head(9)

    def forward(self, x):
        return self.head(self.three(self.two(self.stem(x))))


class TransposedGrouped(nn.Module):
    """A transposed convolution's weight holds the inputs first, and only a group's outputs second."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up = conv(3, 8), nn.ConvTranspose2d(8, 12, 4, stride=2, padding=1, groups=2)
        self.deep, self.head = nn.ConvTranspose2d(12, 12, 3, padding=1, groups=12), Head(12)

    def forward(self, x):
        return self.head(F.relu(self.deep(F.relu(self.up(self.stem(x))))))


class SqueezeExcite(nn.Module):
    """Channels gate themselves by way of a narrower layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.squeeze, self.excite = conv(3, 12), nn.Linear(12, 4), nn.Linear(4, 12)
        self.last, self.head = conv(12, 8), Head(8)

    def forward(self, x):
        x = self.stem(x)
        gate = self.excite(F.silu(self.squeeze(x.mean((2, 3))))).sigmoid()
        return self.head(self.last(x * gate[:, :, None, None]))


class FlattenToLinear(nn.Sequential):
    """Each channel becomes sixteen inputs of the linear layer, and thereafter one."""

    def __init__(self) -> None:
        super().__init__(conv(3, 8), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 12), nn.ReLU(), nn.Linear(12, 5))


class Multiplicities(nn.Module):
    """Features that stand for one, four and sixteen positions each, in one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = conv(3, 4), conv(4, 6), conv(6, 8)
        self.join, self.head = nn.Linear(4 * 16 + 6 * 4 + 8, 10), nn.Linear(10, 5)

    def forward(self, x):
        one = self.one(x)
        two = self.two(F.avg_pool2d(one, 2))
        three = self.three(two)
        parts = [
            F.adaptive_avg_pool2d(one, 4),
            F.adaptive_max_pool2d(two, 2),
            F.adaptive_avg_pool2d(three, 1),
        ]
        return self.head(F.relu(self.join(torch.cat([part.flatten(1) for part in parts], 1))))


class ChannelIndexing(nn.Module):
    """Every second channel, a range of them, a permutation, and one alone; four are read by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.even, self.first, self.head = conv(3, 12), conv(6, 8), conv(4, 8), Head(17)
        self.register_buffer("order", torch.tensor([7, 0, 3, 1, 6, 2, 5, 4]))

    def forward(self, x):
        x = self.stem(x)
        even = self.even(x[:, ::2])[:, self.order]
        return self.head(torch.cat([even, self.first(x[:, 2:6]), x[:, 3].unsqueeze(1)], 1))


class ChannelStatistics(nn.Module):
    """Mean, largest, norm and softmax over the channels, which change when channels leave."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.soft, self.attend, self.head = conv(3, 8), conv(8, 8), conv(3, 1), Head(8)

    def forward(self, x):
        x = self.stem(x)
        maps = [x.mean(1, keepdim=True), x.amax(1, keepdim=True), x.norm(dim=1, keepdim=True)]
        x = x * self.attend(torch.cat(maps, 1))
        return self.head(F.normalize(self.soft(x).softmax(1), dim=1))


class ChannelMoves(nn.Module):
    """Channels turned round, rolled, repeated, and one spread over many."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.map = conv(3, 8), conv(8, 6), conv(12, 4), conv(8, 1)
        self.last, self.head = conv(4, 8), Head(8)

    def forward(self, x):
        x = self.one(x)
        y = self.two(x.flip(1) + x.roll(3, dims=1)).repeat(1, 2, 1, 1)
        return self.head(self.last(self.three(y) * self.map(x).expand(-1, 4, -1, -1)))


class ChannelOrder(nn.Module):
    """Channels are sorted and summed up: each depends on all that come before it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.head = conv(3, 8), conv(8, 8), conv(8, 6), Head(6)

    def forward(self, x):
        return self.head(self.three(self.two(self.one(x).cumsum(1) / 8).sort(dim=1).values))


class ChannelPadding(nn.Module):
    """Shortcuts whose missing channels are zeros, as in the first residual networks for small pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide, self.head = conv(3, 8), conv(8, 16, stride=2), Head(16)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.wide(x) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4)))


class Dense(nn.Module):
    """Concatenations of concatenations, and one feature twice in the same."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two, self.last = conv(3, 4), conv(4, 5), conv(9, 6), conv(24, 7)
        self.head = Head(7)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([x, self.one(x)], 1)
        x = torch.cat([x, self.two(x)], 1)
        return self.head(self.last(torch.cat([x, x[:, 9:], x[:, 6:9]], 1)))


class Concatenations(nn.Module):
    """Each layer reads all before it, side by side; flattened at the end, so that a channel has several indices."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = conv(3, 8), conv(8, 6), conv(14, 10)
        self.norm, self.pool, self.fc = nn.BatchNorm2d(24), nn.AdaptiveAvgPool2d(2), nn.Linear(24 * 4, 5)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([x, self.one(x)], 1)
        x = torch.cat([self.two(x), x], 1)
        return self.fc(self.pool(self.norm(x)).flatten(1))


class ManyBranches(nn.Module):
    """Branches are stacked on a new axis and weighed, or left out when they are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branches = conv(3, 8), nn.ModuleList(conv(8, 8) for _ in range(3))
        self.weights, self.unused, self.head = nn.Parameter(torch.zeros(3)), conv(8, 8), Head(8)

    def forward(self, x):
        x = self.stem(x)
        stack = torch.stack([branch(x) for branch in self.branches], dim=1)
        return self.head((stack * self.weights.softmax(0).view(1, 3, 1, 1, 1)).sum(1))


class ActivatingNorm(nn.BatchNorm2d):
    """A norm with its activation inside, as a module of its own."""

    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__(width)
        self.activation = activation

    def forward(self, x):
        mean, variance = self.running_mean, self.running_var
        x = F.batch_norm(x, mean, variance, self.weight, self.bias, self.training, self.momentum, self.eps)
        return self.activation(x)


class ActivatingNorms(nn.Module):
    """Several layers write one stream through norms that activate; after one of them nothing is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 3, padding=1), ActivatingNorm(8, nn.SiLU())
        self.two, self.second = nn.Conv2d(8, 8, 3, padding=1), ActivatingNorm(8, nn.Identity())
        self.three, self.third = nn.Conv2d(8, 8, 1), ActivatingNorm(8, nn.Sigmoid())
        self.head = Head(8)

    def forward(self, x):
        x = self.first(self.stem(x))
        x = x + self.second(self.two(x))
        return self.head(x + self.third(self.three(x)))


def entries() -> list[Entry]:
    return pictures(
        UNet,
        SharedModule,
        SharedOnTwoInputs,
        InPlace,
        ConstantView,
        ConstantGroups,
        SingleChannel,
        UsedTwice,
        ChannelShuffle,
        SuperResolution,
        GatedUnits,
        Depthwise,
        Grouped,
        TransposedGrouped,
        SqueezeExcite,
        FlattenToLinear,
        Multiplicities,
        ChannelIndexing,
        ChannelStatistics,
        ChannelMoves,
        ChannelOrder,
        ChannelPadding,
        Dense,
        Concatenations,
        ManyBranches,
        ActivatingNorms,
    )
