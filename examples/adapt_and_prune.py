"""Adapt a frozen network to new digits, prune it, save the task, get the base back, and switch: a few seconds.

The base learns the digits 0 to 4. Then it is frozen, and SPLoRA learns the digits 5 to 9 beside it. Most of its
channels go, what is left is recovered without labels, and trained a little. The task becomes a file; the one base
serves it and the file of the unpruned task. Every number that is printed is measured in this run.
"""

from __future__ import annotations

import copy
import tempfile
import time

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import spalier as sp

Split = tuple[Tensor, Tensor, Tensor, Tensor]


def digits(*classes: int) -> Split:
    """Training and test images (n, 1, 8, 8) of some digits, labelled from 0."""
    data = load_digits()
    chosen = [label in classes for label in data.target]
    images = torch.tensor(data.images[chosen], dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor([classes.index(label) for label in data.target[chosen]])
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.3, random_state=0)
    return train_x, train_y, test_x, test_y


def network() -> nn.Sequential:
    """A small convolutional network."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    features = [*block(1, 32, 1), *block(32, 64, 2), *block(64, 64, 1), *block(64, 128, 2)]
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 5))


def train(net: nn.Module, split: Split, epochs: int, rate: float) -> None:
    """An ordinary training loop: nothing in it knows of adapters."""
    images, labels, _, _ = split
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=rate)
    net.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimizer.step()
    net.eval()


@torch.no_grad()
def accuracy(net: nn.Module, split: Split) -> str:
    """Share of test images that the network gets right."""
    _, _, images, labels = split
    return f"{(net(images).argmax(1) == labels).float().mean():.1%}"


def switch(base: nn.Module, store: sp.Store, split: Split, wanted: Tensor) -> None:
    """Make the one base each of its tasks in turn."""
    switcher = sp.Switcher(base, store)
    for name in ("whole", "pruned", "whole", "pruned"):
        start = time.perf_counter()
        net = switcher.activate(name)
        seconds = time.perf_counter() - start
        print(f"switcher.activate({name!r}): {seconds * 1e3:.2f} ms, {accuracy(net, split)} right")
    difference = (switcher(split[2]) - wanted).abs().max().item()
    print(f"From its file the pruned network is plain and small; outputs differ by {difference:.1g}.")


def main() -> None:
    """Pretrain, adapt, prune, save, detach, switch."""
    start = time.perf_counter()
    torch.manual_seed(0)
    old, new = digits(0, 1, 2, 3, 4), digits(5, 6, 7, 8, 9)

    base = network()
    train(base, old, epochs=12, rate=3e-3)
    print(f"The base learned the digits 0-4: {accuracy(base, old)} of the test images are right.")
    print(f"It guesses at the digits 5-9: {accuracy(base, new)}.\n")
    frozen = {key: value.clone() for key, value in base.state_dict().items()}

    print("sp.attach_(net, sp.SPLoRA(rank=4), head='14', example=images)")
    print(sp.attach_(base, sp.SPLoRA(rank=4), head="14", example=new[0][:2]))
    train(base, new, epochs=12, rate=1e-2)
    print(f"\nAdapted to the digits 5-9: {accuracy(base, new)} are right.\n")
    folder = tempfile.TemporaryDirectory()
    store = sp.Store(folder.name)
    store.add(sp.Task.of(base, "whole"))

    batches = list(zip(new[0].split(64), new[1].split(64), strict=True))
    scores = sp.score(base, batches, "taylor", loss=nn.functional.cross_entropy)
    plan = sp.select(base, scores, channels=0.3)
    print(f"sp.select(net, sp.score(net, batches, 'taylor', ...), channels=0.3)\n{plan}\n")
    cut = copy.deepcopy(base)
    sp.prune_(cut, plan)
    print(f"sp.prune_(net, plan): {accuracy(cut, new)} are right;", end=" ")
    sp.prune_(base, plan, recover=batches)
    print(f"with recover=batches, no labels and no training: {accuracy(base, new)};", end=" ")
    train(base, new, epochs=3, rate=3e-3)
    print(f"after three epochs: {accuracy(base, new)}.\n")

    task = sp.Task.of(base, "pruned", classes=list("56789"))
    store.add(task)
    wanted = base(new[2])
    sp.detach_(base)
    same = all(torch.equal(value, frozen[key]) for key, value in base.state_dict().items())
    print(
        f"sp.detach_(net): the base is bit-identical to before: {same}; digits 0-4: {accuracy(base, old)}.\n"
    )

    print(f"sp.Store(folder).list()\n{store.list()}\n")
    print(f"task.storage_costs(base, batches)\n{task.storage_costs(base, [(new[2], new[3])])}\n")
    switch(base, store, new, wanted)
    print(sp.count(store.load("pruned").build(base), new[2][:1]))
    folder.cleanup()
    print(f"Done in {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
