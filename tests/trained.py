"""Three real networks, trained on real data: digits, the base on five classes, the task on all ten.

What they learned is committed, since other processors come to other weights: ``python tests/trained.py`` trains anew.
"""

import copy
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import spalier as sp

EXAMPLE = torch.zeros(2, 1, 8, 8)
ADAPTER = sp.SPLoRA(rank=8, kernel="center")
FILE = Path(__file__).parent / "golden" / "digits.safetensors"


class Block(nn.Module):
    """Two convolutions around a residual stream."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        return F.relu(out)


class DigitNet(nn.Module):
    """A ResNet of eight convolutions and three shortcuts for 8x8 images."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layers = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x):
        x = self.layers(F.relu(self.bn1(self.conv1(x))))
        return self.fc(x.mean((2, 3)))


@cache
def digits():
    """Training and test images and labels, 1,200 and 597."""
    from sklearn.datasets import load_digits  # here, as others want the networks alone

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:1200], order[1200:]
    return images[train], labels[train], images[test], labels[test]


def batches(count=4, size=64):
    """A few batches of training images."""
    images, labels, *_ = digits()
    return [(images[i : i + size], labels[i : i + size]) for i in range(0, count * size, size)]


def train_(net, epochs, lr=0.1, seed=0, classes=None):
    """Train whatever requires gradients."""
    images, labels, *_ = digits()
    if classes is not None:
        chosen = labels < classes
        images, labels = images[chosen], labels[chosen]
    learned = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learned, lr, momentum=0.9, weight_decay=5e-3, nesterov=True)
    steps = epochs * (len(labels) // 50)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    net.train()
    for _ in range(epochs):
        order = torch.randperm(len(labels), generator=generator)
        for i in range(0, len(order) - 49, 50):
            chosen = order[i : i + 50]
            optimizer.zero_grad()
            F.cross_entropy(net(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


@torch.no_grad()
def accuracy(net):
    """Percent of the test images."""
    *_, images, labels = digits()
    net.eval()
    return 100 * float((net(images).argmax(1) == labels).float().mean())


def learn(seed: int) -> nn.Module:
    """The base on five classes, the adapters on all ten: what was learned once and lies in ``FILE``."""
    torch.manual_seed(seed)
    net = train_(DigitNet(), 15, seed=seed, classes=5)
    sp.attach_(net, ADAPTER, head="fc", example=EXAMPLE)
    return train_(net, 12, lr=0.05, seed=seed)


@cache
def _read(seed: int) -> nn.Module:
    net = DigitNet()
    sp.attach_(net, ADAPTER, head="fc", example=EXAMPLE)
    state = load_file(FILE)
    net.load_state_dict({name: state[f"{seed}.{name}"].to(value) for name, value in net.state_dict().items()})
    return net.eval()


def trained(seed: int = 0) -> nn.Module:
    """One of three adapted networks that know their structure, the same on every machine; a copy of its own."""
    return copy.deepcopy(_read(seed))


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {f"{seed}.{name}": value for seed in range(3) for name, value in learn(seed).state_dict().items()}
    halves = {name: value.half() if value.is_floating_point() else value for name, value in found.items()}
    save_file(halves, FILE)
