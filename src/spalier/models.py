"""The paper's networks, ResNet-18, -34 and -50, two small ones, and weights from files.

Their keys are torchvision's, so that published weights load. The CIFAR stem (3x3, stride 1, no max-pool) takes its
weights from the 7x7 ImageNet stem, average-pooled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spalier.errors import ConfigError, WeightsError
from spalier.text import check_integer, first_few

Stem = Literal["imagenet", "cifar"]
StrideOn = Literal["conv1", "conv2"]


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a residual sum (ResNet-18 and -34)."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, stride_on: StrideOn) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        out: Tensor = self.relu(y)
        return out


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up and a residual sum (ResNet-50).

    ``stride_on`` says which convolution carries the stride: ``"conv2"`` in torchvision's weights,
    ``"conv1"`` in the original Caffe ones.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, stride_on: StrideOn) -> None:
        super().__init__()
        first, second = (stride, 1) if stride_on == "conv1" else (1, stride)
        self.conv1 = _conv(inputs, width, 1, first)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, second)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, 4 * width, 1)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) to (batch, outputs, h / stride, w / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        out: Tensor = self.relu(y)
        return out


class ResNet(nn.Module):
    """A residual network; module names and keys are torchvision's."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        depths: Sequence[int],
        *,
        classes: int,
        stem: Stem,
        stride_on: StrideOn = "conv2",
        width: int = 64,
    ) -> None:
        super().__init__()
        check_integer("classes", classes, 1)
        check_integer("width", width, 1)
        if stem not in ("imagenet", "cifar"):
            raise ConfigError(f'stem is {stem!r}, expected "imagenet" or "cifar"')
        if stride_on not in ("conv1", "conv2"):
            raise ConfigError(f'stride_on is {stride_on!r}, expected "conv1" or "conv2"')
        cifar = stem == "cifar"
        self.conv1 = _conv(3, width, 3) if cifar else _conv(3, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if cifar else nn.MaxPool2d(3, stride=2, padding=1)
        self.stages = tuple(f"layer{number}" for number in range(1, len(depths) + 1))
        inputs = width
        for number, (name, depth) in enumerate(zip(self.stages, depths, strict=True)):
            wide, stride = width * 2**number, 2 if number else 1
            first = block(inputs, wide, stride, stride_on)
            inputs = wide * block.expansion
            others = [block(inputs, wide, 1, stride_on) for _ in range(depth - 1)]
            setattr(self, name, nn.Sequential(first, *others))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, h, w) to (batch, classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for name in self.stages:
            x = getattr(self, name)(x)
        out: Tensor = self.fc(self.avgpool(x).flatten(1))
        return out


def resnet8(classes: int = 10, width: int = 16) -> ResNet:
    """A small network for small images and first tries: the CIFAR stem, three stages of one block, projected shortcuts.

    >>> sum(p.numel() for p in resnet8(classes=10).parameters())
    78042
    """
    return ResNet(BasicBlock, (1, 1, 1), classes=classes, stem="cifar", width=width)


def resnet20(classes: int = 10, width: int = 16) -> ResNet:
    """The same with three blocks a stage, as deep and wide as the ResNet-20 of the CIFAR literature.

    >>> sum(p.numel() for p in resnet20(classes=10).parameters())
    272474
    """
    return ResNet(BasicBlock, (3, 3, 3), classes=classes, stem="cifar", width=width)


def resnet18(classes: int = 1000, stem: Stem = "imagenet") -> ResNet:
    """ResNet-18.

    >>> sum(p.numel() for p in resnet18(classes=10, stem="cifar").parameters())
    11173962
    """
    return ResNet(BasicBlock, (2, 2, 2, 2), classes=classes, stem=stem)


def resnet34(classes: int = 1000, stem: Stem = "imagenet") -> ResNet:
    """ResNet-34.

    >>> resnet34(classes=10).fc
    Linear(in_features=512, out_features=10, bias=True)
    """
    return ResNet(BasicBlock, (3, 4, 6, 3), classes=classes, stem=stem)


def resnet50(classes: int = 1000, stem: Stem = "imagenet", stride_on: StrideOn = "conv2") -> ResNet:
    """ResNet-50; ``stride_on="conv1"`` for weights that descend from Caffe.

    >>> with torch.device("meta"):
    ...     net = resnet50(classes=10, stem="cifar")
    >>> sum(p.numel() for p in net.parameters())
    23520842
    """
    return ResNet(Bottleneck, (3, 4, 6, 3), classes=classes, stem=stem, stride_on=stride_on)


@dataclass(frozen=True)
class Loaded:
    """What `load_weights_` did besides copying tensors of equal shape."""

    pooled: tuple[str, ...]
    """Stems that were average-pooled to the network's smaller kernel."""
    skipped: tuple[str, ...]
    """Entries of a head with another number of classes: the network keeps its own."""


def load_weights_(
    net: nn.Module, weights: Mapping[str, Tensor] | str | PathLike[str], *, head: str | Sequence[str] | None = "fc"
) -> Loaded:
    """Load published weights into ``net``, in place, casting to its dtype; all or nothing.

    A 7x7 stem is average-pooled where the network has a 3x3 one. The head, or heads, named by ``head`` keep their
    own values where the number of classes differs. Everything else has to be there and to fit. A file is
    safetensors, or a PyTorch checkpoint of tensors alone (``weights_only=True``), as for `read_weights`.

    >>> pretrained = resnet18(classes=1000)
    >>> load_weights_(resnet18(classes=10, stem="cifar"), pretrained.state_dict())
    Loaded(pooled=('conv1.weight',), skipped=('fc.weight', 'fc.bias'))
    """
    source = read_weights(weights)
    own = net.state_dict()
    if any(tensor.is_meta for tensor in own.values()):
        raise WeightsError(
            "the network is on the meta device, where nothing can be loaded; net.to_empty(device=...) first"
        )
    heads = tuple(f"{name}." for name in ([head] if isinstance(head, str) else head or ()))
    # counters that old files lack, and that nothing here uses
    ignorable = {key for key in own if key.endswith("num_batches_tracked")}
    missing = sorted(own.keys() - source.keys() - ignorable)
    unexpected = sorted(source.keys() - own.keys())
    if missing or unexpected:
        raise WeightsError(
            f"the weights do not fit the network: missing {first_few(missing) or 'nothing'}, unexpected "
            f"{first_few(unexpected) or 'nothing'}; expected the same keys as net.state_dict()"
        )
    pooled, skipped, fitting = [], [], {}
    for key, tensor in source.items():
        wanted = own[key].shape
        # some files hold (1,) for a scalar
        if tensor.shape == wanted or tensor.numel() == wanted.numel() == 1:
            fitting[key] = tensor.reshape(wanted)
        elif tensor.shape[1:] == (3, 7, 7) and wanted == (len(tensor), 3, 3, 3):
            # the one resizing that the paper does: the same 3-input stem with a 3x3 kernel instead of 7x7
            fitting[key] = F.adaptive_avg_pool2d(tensor.float(), wanted[2:])
            pooled.append(key)
        elif key.startswith(heads):
            skipped.append(key)
        else:
            raise WeightsError(
                f"{key} has shape {tuple(tensor.shape)}, expected {tuple(wanted)}; "
                "build the network with the same widths as the weights"
            )
    with torch.no_grad():  # only now, when all of them fit
        for key, tensor in fitting.items():
            own[key].copy_(tensor)
    return Loaded(tuple(pooled), tuple(skipped))


def read_weights(path: str | PathLike[str] | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, by name: safetensors, or a PyTorch checkpoint of tensors alone; no code in it ever runs.

    A checkpoint may be a state_dict, or hold one under "state_dict" or "model"; names that all begin with "module."
    or "_orig_mod." lose it. A state_dict is taken as if it had been read. A folder is one that transformers has saved:
    model.safetensors, or several with an index.

    >>> read_weights("absent.pth")
    Traceback (most recent call last):
    spalier.errors.WeightsError: no weights file at absent.pth; expected a .safetensors or .pth file
    """
    if not isinstance(path, str | PathLike):
        return _tensors(_unwrapped(path))
    file = Path(path)
    if file.is_dir():
        return {name: tensor for part in _parts(file) for name, tensor in read_weights(part).items()}
    if not file.is_file():
        raise WeightsError(f"no weights file at {file}; expected a .safetensors or .pth file")
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return _tensors(_unwrapped(load_file(file)))
        except SafetensorError as error:
            raise WeightsError(f"{file} is not a readable safetensors file: {error}") from error
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises a dozen kinds; each means the same to the caller
        raise WeightsError(
            f"{file} is not a checkpoint of plain tensors ({type(error).__name__}); "
            "convert it to safetensors, or save its state_dict() alone"
        ) from error
    return _tensors(_unwrapped(state))


def _parts(folder: Path) -> list[Path]:
    """The files of weights in a folder; of those that an index names, all have to be there."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    try:
        named = {str(file) for file in json.loads(index.read_text("utf-8"))["weight_map"].values()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index} is no index of weights: {error!r}; expected a weight_map of files") from error
    outside = [name for name in sorted(named) if Path(name).name != name]
    if outside:
        raise WeightsError(f"{index} names {first_few(outside)}, expected files beside it")
    return [folder / name for name in sorted(named)]


def _unwrapped(state: object) -> object:
    """The tensors of a training run's checkpoint, by the names that they had before a wrapper's prefix."""
    for key in ("state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    for prefix in ("module.", "_orig_mod."):  # of DataParallel and DistributedDataParallel; of torch.compile
        if isinstance(state, Mapping) and state and all(str(key).startswith(prefix) for key in state):
            state = {str(key).removeprefix(prefix): value for key, value in state.items()}
    return state


def _tensors(weights: object) -> dict[str, Tensor]:
    if not isinstance(weights, Mapping) or not all(isinstance(v, Tensor) for v in weights.values()):
        raise WeightsError(f"the weights are a {type(weights).__name__}, expected a state_dict of tensors or its file")
    broken = [key for key, value in weights.items() if not torch.isfinite(value).all()]
    if broken:
        raise WeightsError(f"{first_few(broken)} holds NaN or infinite values; expected finite weights")
    return dict(weights)
