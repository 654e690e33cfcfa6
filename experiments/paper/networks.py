"""The pretrained networks of the mini scale that Spalier has no name for."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions and a shortcut, without a nonlinearity behind their sum."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """What the block is given, and what it adds to that."""
        out: Tensor = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + self.shortcut(x)
        return out


class CifarResNet(nn.Module):
    """The network of the weights `resnet20-cifar100.safetensors`: a stem of 64 channels and three stages."""

    def __init__(self, classes: int, blocks: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.layer1 = _stage(64, 16, blocks, 1)
        self.layer2 = _stage(16, 32, blocks, 2)
        self.layer3 = _stage(32, 64, blocks, 2)
        self.pool = nn.AvgPool2d(4)
        self.linear = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, 32, 32) to (batch, classes)."""
        x = self.relu(self.bn1(self.conv1(x)))
        for stage in (self.layer1, self.layer2, self.layer3):
            x = self.relu(stage(x))
        out: Tensor = self.linear(self.pool(x).flatten(1))
        return out


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    first = Block(inputs, outputs, stride)
    return nn.Sequential(first, *(Block(outputs, outputs, 1) for _ in range(blocks - 1)))


def resnet20(classes: int = 100) -> CifarResNet:
    """The ResNet-20 that has learned CIFAR-100."""
    return CifarResNet(classes, 3)
