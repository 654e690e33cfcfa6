"""Made: weights that are computed or shared, norms, and maps that are resized, unfolded and added."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from zoo.entry import Entry
from zoo.parts import Head, conv, pictures


class FunctionalWeights(nn.Module):
    """Weights without a module of their own, and one that is standardised before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 3, 3, 3)), nn.Parameter(torch.zeros(8))
        self.second_weight, self.head = nn.Parameter(torch.randn(6, 8, 3, 3)), Head(6)

    def forward(self, x):
        x = F.relu(F.conv2d(x, self.weight, self.bias, padding=1))
        mean = self.second_weight.mean((1, 2, 3), keepdim=True)
        std = self.second_weight.std((1, 2, 3), keepdim=True)
        return self.head(F.conv2d(x, (self.second_weight - mean) / std, stride=2))


class LowRankUpdate(nn.Module):
    """A weight plus the product of two others, as merged on the fly."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 10), nn.Linear(10, 5)
        self.a_weight, self.b_weight = nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(10, 2))

    def forward(self, x):
        x = F.relu(self.one(x)).mean((2, 3))
        weight = self.two.weight + 0.5 * self.b_weight @ self.a_weight
        return self.head(F.gelu(F.linear(x, weight, self.two.bias)))


class DynamicWeights(nn.Module):
    """Each sample has a mixture of kernels of its own; samples become groups for it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router, self.head = conv(3, 8), nn.Linear(8, 3), Head(6)
        self.weight = nn.Parameter(torch.zeros(3, 6, 8, 3, 3))

    def forward(self, x):
        x = self.stem(x)
        batch, channels, height, width = x.shape
        mixture = self.router(x.mean((2, 3))).softmax(-1)
        kernels = (mixture @ self.weight.flatten(1)).view(-1, channels, 3, 3)
        y = F.conv2d(x.view(1, -1, height, width), kernels, padding=1, groups=batch)
        return self.head(y.view(batch, -1, height, width).relu())


class Fourier(nn.Module):
    """Complex numbers: a filter for each channel and frequency."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv(3, 8), Head(8)
        self.filters = nn.Parameter(torch.zeros(8, 8, 5, 2))

    def forward(self, x):
        spectrum = torch.fft.rfft2(self.stem(x), norm="ortho")
        return self.head(torch.fft.irfft2(spectrum * torch.view_as_complex(self.filters), norm="ortho").relu())


class PoolAndUnpool(nn.Module):
    """What is pooled leaves its places behind, for channels elsewhere to be put back to."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner, self.head = conv(3, 8), conv(8, 8), Head(8)

    def forward(self, x):
        x, places = F.max_pool2d(self.down(x), 2, return_indices=True)
        return self.head(F.max_unpool2d(self.inner(x), places, 2))


class StandardisedConv(nn.Conv2d):
    """Its weight has mean zero and one spread for each output, over its inputs."""

    def forward(self, x):
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias)


class Standardised(nn.Module):
    """A layer of one tap that is left with one input would have no spread to divide by."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = conv(3, 8), StandardisedConv(8, 10, 1), StandardisedConv(10, 6, 3)
        self.head = Head(6)

    def forward(self, x):
        return self.head(self.two(self.one(self.stem(x)).relu()).relu())


class SharedNorm(nn.Module):
    """Two convolutions are followed by the same norm, and thereby tied."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3, padding=1)
        self.norm, self.heads = nn.BatchNorm2d(8), nn.ModuleDict({"one": Head(8), "two": Head(8)})

    def forward(self, x):
        one, two = self.norm(self.one(x)).relu(), self.norm(self.two(x)).relu()
        return self.heads["one"](one), self.heads["two"](two)


class Parametrised(nn.Module):
    """Weight norm and spectral norm: the weight is computed from other parameters."""

    def __init__(self) -> None:
        super().__init__()
        norms = nn.utils.parametrizations
        self.one, self.two = norms.weight_norm(nn.Conv2d(3, 8, 3)), norms.spectral_norm(nn.Linear(8, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        return self.head(F.relu(self.two(F.relu(self.one(x)).mean((2, 3)))))


class WeightNormed(nn.Module):
    """A length for each output, for each tap of a grouped convolution, for each input, and one for all."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), norm(nn.Conv2d(8, 12, 3, padding=1))
        self.position = norm(nn.Conv1d(12, 12, 3, padding=1, groups=3), dim=2)
        self.three, self.head = norm(nn.Linear(12, 10), dim=1), norm(nn.Linear(10, 5), dim=None)

    def forward(self, x):
        x = F.relu(self.two(F.relu(self.one(x)))).flatten(2)
        x = (x + F.gelu(self.position(x))).mean(2)
        return self.head(F.relu(self.three(x)))


class HookedWeights(nn.Module):
    """Weights that hooks compute, as before there were parametrizations; other layers are free."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch's own, of old-style norms
            self.three = nn.utils.weight_norm(nn.Conv2d(10, 6, 3))
        self.one, self.two, self.four = conv(3, 8), conv(8, 10), nn.utils.spectral_norm(nn.Linear(6, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        return self.head(F.relu(self.four(F.relu(self.three(self.two(self.one(x)))).mean((2, 3)))))


class Norms(nn.Module):
    """Every norm over channels in a row; group norms keep groups of equal size."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.group = nn.Conv2d(3, 12, 3), nn.GroupNorm(3, 12)
        self.two, self.instance = nn.Conv2d(12, 8, 3), nn.InstanceNorm2d(8, affine=True)
        self.three, self.rms = nn.Conv2d(8, 8, 1), nn.RMSNorm(8)
        self.four, self.whole, self.head = nn.Conv2d(8, 6, 1), nn.GroupNorm(1, 6), Head(6)

    def forward(self, x):
        x = F.relu(self.group(self.one(x)))
        x = F.relu(self.instance(self.two(x)))
        x = self.rms(self.three(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(self.whole(self.four(x)).tanh())


class BareNorms(nn.Module):
    """Norms without parameters, prelu with a slope for each channel, local response norm."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)
        self.slope, self.two = nn.PReLU(8), nn.Conv2d(8, 6, 3)
        self.instance, self.local, self.head = nn.InstanceNorm2d(6), nn.LocalResponseNorm(3), Head(6)

    def forward(self, x):
        x = self.instance(self.two(self.slope(self.norm(self.one(x)))))
        return self.head(self.local(F.layer_norm(x, x.shape[2:]).abs()))


class Resized(nn.Module):
    """A feature pyramid: maps of several sizes are resized and added, padded and cropped."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = conv(3, 8), conv(8, 12, stride=2), conv(12, 16, stride=2)
        self.lateral = nn.ModuleList(nn.Conv2d(width, 10, 1) for width in (8, 12, 16))
        self.smooth = nn.Conv2d(10, 6, 3, padding=1, padding_mode="reflect")

    def forward(self, x):
        one = self.one(x)
        two = self.two(one)
        three = self.lateral[2](self.three(two))
        two = self.lateral[1](two) + F.interpolate(three, scale_factor=2.0, mode="nearest")
        one = self.lateral[0](one) + F.interpolate(two, size=one.shape[-2:], mode="bilinear")
        return [self.smooth(F.pad(level, (1, 1, 1, 1))[..., 1:-1, 1:-1]) for level in (one, two, three)]


class Unfolded(nn.Module):
    """Patches by ``unfold``: each channel becomes nine."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.head = conv(3, 4), nn.Linear(36, 10), nn.Linear(10, 5)

    def forward(self, x):
        patches = F.unfold(self.stem(x), 3, padding=1)
        return self.head(self.mix(patches.transpose(1, 2)).relu().mean(1))


class RawInputAdded(nn.Module):
    """The input and the output are tied to inner channels, which therefore cannot be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = conv(3, 8), nn.Conv2d(8, 3, 1)
        self.second, self.out = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        x = self.second(x + self.last(self.inner(x)))
        return x + self.out(x)


class WholeNumbers(nn.Module):
    """Buffers of whole numbers and of truth values that go with the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = conv(3, 8), conv(8, 6), nn.Linear(6, 4)
        self.register_buffer("steps", torch.arange(1, 9).view(8, 1, 1))
        self.register_buffer("gates", torch.tensor([True, False, True] * 2))

    def forward(self, x):
        x = self.first(x) * self.steps
        x = torch.where(self.gates[:, None, None], self.second(x), 0.5)
        return self.fc(x.mean((2, 3)))


def entries() -> list[Entry]:
    return pictures(
        FunctionalWeights,
        LowRankUpdate,
        DynamicWeights,
        Fourier,
        PoolAndUnpool,
        SharedNorm,
        Standardised,
        Parametrised,
        WeightNormed,
        HookedWeights,
        Norms,
        BareNorms,
        Resized,
        Unfolded,
        RawInputAdded,
        WholeNumbers,
    )
