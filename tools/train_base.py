#!/usr/bin/env python3
"""Train the small base that comes with the package: a ResNet-20 on 10,000 images of CIFAR-10.

    python tools/train_base.py --data DATA             # the file that is committed: fifteen minutes of one core
    python tools/train_base.py --data DATA --check     # measure the committed file again

DATA has ``cifar10/`` as grids with ``labels.json``, or what torchvision keeps of CIFAR10; only the first training batch
is learned from. Augmentation is strong, since the base is for other images than these: crops, flips, brightness,
contrast, grey, a hole, and whole batches of 24 or 16 pixels, as digits and icons have them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from experiments.paper.paper_data import open_set  # noqa: E402
from spalier.data.data import IMAGENET_MEAN, IMAGENET_STD  # noqa: E402
from spalier.models import load_weights_, resnet20  # noqa: E402

OUT = ROOT / "src" / "spalier" / "weights" / "resnet20.safetensors"
IMAGES, BATCH_SIZE, LR, WEIGHT_DECAY, SMOOTHING = 10_000, 128, 0.1, 5e-4, 0.1
SIDES, OFTEN = (32, 24, 16), (0.5, 0.25, 0.25)


def read(folder: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images (n, 3, 32, 32) in 0..1 and their classes: the first training batch, and the whole test set."""
    data = open_set("cifar10", folder)
    found = []
    for split, most in ((data.train, IMAGES), (data.test, None)):
        images, labels = split.images[split.rows[:most]], split.labels[:most]  # type: ignore[union-attr]
        found.append((torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255, torch.from_numpy(labels)))
    return found[0], found[1]


def normalised(images: Tensor) -> Tensor:
    """As all of Spalier's data by name have photographs."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (images - mean) / std


def augmented(images: Tensor, numbers: np.random.Generator) -> Tensor:
    """A batch as training sees it."""
    count = len(images)
    padded = F.pad(images, (4, 4, 4, 4), mode="reflect")
    tops, lefts = numbers.integers(0, 9, (2, count))
    images = torch.stack([padded[i, :, t : t + 32, x : x + 32] for i, (t, x) in enumerate(zip(tops, lefts))])  # noqa: B905
    flips = torch.from_numpy(numbers.random(count) < 0.5)
    images[flips] = images[flips].flip(-1)
    grey = torch.from_numpy(numbers.random(count) < 0.15)
    images[grey] = images[grey].mean(1, keepdim=True).expand(-1, 3, -1, -1)
    contrast, light = (torch.from_numpy(numbers.uniform(0.6, 1.4, (count, 1, 1, 1))).float() for _ in range(2))
    middle = images.mean((1, 2, 3), keepdim=True)
    images = ((images - middle) * contrast + middle * light).clamp(0, 1)
    side = int(numbers.choice(SIDES, p=OFTEN))
    if side < 32:
        images = F.interpolate(images, size=side, mode="area")
    images, hole = normalised(images), side // 4
    for i, (top, left) in enumerate(numbers.integers(0, side - hole + 1, (count, 2))):
        images[i, :, top : top + hole, left : left + hole] = 0
    return images.contiguous(memory_format=torch.channels_last)


def train(images: Tensor, labels: Tensor, epochs: int, stop: int, seed: int) -> nn.Module:
    """SGD, with one cosine to nothing after an epoch of warm-up."""
    torch.manual_seed(seed)
    numbers = np.random.default_rng(seed)
    net: nn.Module = resnet20(classes=10)
    net.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=WEIGHT_DECAY, nesterov=True)
    per_epoch = len(images) // BATCH_SIZE
    steps = torch.arange(epochs * per_epoch)
    rates = LR * torch.minimum((steps + 1) / per_epoch, 0.5 + 0.5 * torch.cos(torch.pi * steps / len(steps)))
    start = time.process_time()
    for epoch in range(min(stop, epochs)):
        order, total = torch.from_numpy(numbers.permutation(len(images))), 0.0
        for number in range(per_epoch):
            chosen = order[number * BATCH_SIZE : (number + 1) * BATCH_SIZE]
            optimizer.param_groups[0]["lr"] = float(rates[epoch * per_epoch + number])
            logits = net(augmented(images[chosen], numbers))
            loss = F.cross_entropy(logits, labels[chosen], label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        seconds = time.process_time() - start
        print(f"epoch {epoch + 1}/{epochs}: loss {total / per_epoch:.3f}, {seconds:.0f} s of CPU", flush=True)
    return net.eval()


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor, side: int = 32) -> float:
    """The share that is right at one size of images."""
    if side < 32:
        images = F.interpolate(images, size=side, mode="area")
    right = [(net(normalised(i)).argmax(1) == c).sum() for i, c in zip(images.split(500), labels.split(500))]  # noqa: B905
    return float(torch.stack(right).sum()) / len(labels)


def stored(net: nn.Module) -> dict[str, Tensor]:
    """Weights as halves, norms and head as they are: a variance may be too small for a half."""
    state = net.state_dict()
    return {k: v.half().contiguous() if v.dim() == 4 else v.contiguous() for k, v in state.items() if v.dim()}


def main() -> None:
    """Train and write, or check."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--out", type=Path, default=OUT)
    options.add_argument("--epochs", type=int, default=30, help="of the schedule")
    options.add_argument("--stop", type=int, help="end after so many of them")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--check", action="store_true")
    given = options.parse_args()
    torch.set_num_threads(1)
    learned, held_out = read(given.data)
    if not given.check:
        net = train(*learned, given.epochs, given.stop or given.epochs, given.seed)
        given.out.parent.mkdir(exist_ok=True)
        save_file(stored(net), given.out, {"format": "pt", "data": "CIFAR-10, training batch 1"})
    net = resnet20(classes=10).eval()
    load_weights_(net, given.out)
    shown = ", ".join(f"{accuracy(net, *held_out, side):.1%} at {side} pixels" for side in SIDES)
    print(f"{given.out.name}: {given.out.stat().st_size:,} bytes; CIFAR-10's test set: {shown}")


if __name__ == "__main__":
    main()
