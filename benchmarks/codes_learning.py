"""Data, networks and learning of the codes benchmark: what its cells and its search of rates share."""

from __future__ import annotations

import copy
import csv
import json
import math
import os
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(os.environ.get("SPALIER_ROOT", Path(__file__).resolve().parents[1]))
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torchvision_ops  # noqa: E402

import spalier as sp  # noqa: E402
from codes_rivals import Rounding  # noqa: E402
from experiments.paper.paper_data import open_set  # noqa: E402
from spalier.data import Loader  # noqa: E402
from spalier.data.data import ArraySplit, limited  # noqa: E402
from spalier.networks import logits_of, open_network  # noqa: E402
from spalier.runs.narrow import FAST, held_  # noqa: E402

torchvision_ops.declare()  # transformers looks for torchvision as it is imported
DATA = Path(os.environ.get("SPALIER_DATA", ROOT.parent / "shared" / "data"))
WEIGHTS = Path(os.environ.get("SPALIER_WEIGHTS", ROOT.parent / "shared" / "weights"))
RESULTS = ROOT / "benchmarks" / "results" / "codes"
RATES = RESULTS / "rates"
SCORED, TEMPERATURE = 256, 2.0


@dataclass(frozen=True)
class Spec:
    """A data set, its base network, and how long everything learns on it."""

    name: str
    title: str
    network: str
    weights: str
    head: str
    classes: int
    train: int
    test: int
    batch: int
    epochs: Mapping[float, int]
    """By density, in the order of the schedule."""
    extra: Mapping[float, int]
    """The densities that are shown, and the epochs of a tail."""
    searched: Mapping[float, int]
    """The shorter schedule that most rates are tried on."""
    tried: Mapping[str, Mapping[str, float]]
    """For each way to learn and optimiser the middle one of the rates to try first."""
    data: str = ""
    """The data set, where that is not the name."""
    rates_of: str = ""
    """Whose rates are taken, where there is no search of its own."""
    known: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Rates of AdamW for each way to learn, where another search has found them."""
    size: int = 32
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: str = "channels"
    """What densities are a share of."""
    round_to: int = 1
    storage: Any = "int8-all"
    """Of files within a budget of bytes."""
    criterion: str = "taylor"
    writers: Any = "coupled"
    length: float = 1.0
    """By which all epochs are multiplied."""
    search_seeds: tuple[int, ...] = (0,)
    """The networks and splits that rates of tails are tried on."""
    is_search: bool = False
    """Whether it learns and is tested on training images alone, for a choice of rates."""


_RESNET50: dict[str, Any] = {
    "network": "resnet50",
    "weights": "resnet50-imagenet-caffe.fp16.safetensors",
    "head": "fc",
    "size": 64,
    "options": {"stem": "imagenet", "stride_on": "conv1"},
    "round_to": 8,  # such widths learn and run a quarter faster
    "tried": {
        "wide": {"adamw": 3e-4, "sgd": 0.01},
        "direct": {"adamw": 3e-3, "sgd": 0.03},
        "direct32": {"adamw": 1e-3, "sgd": 0.01},
        "wide+": {"adamw": 2e-4, "sgd": 3e-3},
        "free": {"adamw": 2e-4, "sgd": 3e-3},
        "low-rank": {"adamw": 1e-3, "sgd": 0.03},
        "bits": {"adamw": 2e-4, "sgd": 3e-3},
        "budget": {"adamw": 2e-4, "sgd": 3e-3},
    },
}
_ON_TEXTS = {"rest": 1.5e-4, "bits": 1.5e-4, "factors": FAST * 1.5e-4, "gains": FAST * 1.5e-4}
_DIRECT_ON_TEXTS = {"rest": 2e-3, "factors": 2e-3}
_SPECS = (
    Spec(
        "cifar10", "CIFAR-10, ResNet-20", "experiments.paper.networks:resnet20", "resnet20-cifar100.safetensors",
        "linear", classes=10, train=4000, test=5000, batch=64,
        epochs={1.0: 12, 0.7: 4, 0.5: 10, 0.3: 16, 0.2: 12, 0.1: 28}, extra={1.0: 2, 0.5: 3, 0.3: 6, 0.1: 8},
        searched={1.0: 2, 0.6: 2, 0.3: 3}, storage="int4-head",  # at 30% the head would be a sixth of the file
        tried={
            "wide": {"adamw": 2e-3, "sgd": 0.02}, "direct": {"adamw": 3e-3, "sgd": 0.1},
            "direct32": {"adamw": 9e-3, "sgd": 0.03},
            "wide+": {"adamw": 1e-3, "sgd": 0.01}, "free": {"adamw": 1e-3, "sgd": 0.01},
            "low-rank": {"adamw": 3e-3, "sgd": 0.03}, "bits": {"adamw": 1e-3, "sgd": 0.01},
            "budget": {"adamw": 1e-3, "sgd": 0.01},
        },
    ),
    Spec(
        "flowers102", "Flowers-102, ResNet-50", **_RESNET50, classes=102, train=2040, test=2000, batch=16,
        epochs={1.0: 8, 0.7: 2, 0.5: 6, 0.3: 10, 0.2: 8, 0.1: 16}, extra={1.0: 2, 0.5: 2, 0.3: 4, 0.1: 6},
        searched={1.0: 2, 0.6: 1, 0.3: 3},
    ),
    Spec(
        "catsanddogs", "Cats & Dogs, ResNet-50", **_RESNET50, classes=2, train=2000, test=1000, batch=32,
        epochs={1.0: 3, 0.7: 1, 0.5: 3, 0.3: 4, 0.2: 3, 0.1: 8}, extra={1.0: 1, 0.5: 1, 0.3: 2, 0.1: 4},
        searched={1.0: 1, 0.6: 1, 0.3: 2}, search_seeds=(0, 1),
    ),
    Spec(  # the network of the paper's ablation; an epoch of it takes two minutes
        "resnet18", "CIFAR-10, ResNet-18", "resnet18", "resnet18-imagenet.fp16.safetensors", "fc", data="cifar10",
        classes=10, train=2000, test=2500, batch=32, options={"stem": "cifar"}, round_to=8, rates_of="catsanddogs",
        epochs={1.0: 3, 0.7: 1, 0.5: 2, 0.3: 3, 0.2: 2, 0.1: 6}, extra={0.5: 1, 0.3: 2, 0.1: 4},
        searched={1.0: 2, 0.5: 1, 0.3: 1, 0.1: 2}, tried={},
    ),
    Spec(
        "trec", "TREC, MiniLM (shares of the MACs)", "minilm", "minilm-l6-v2", "classifier", classes=6,
        train=5452, test=500, batch=32, epochs={1.0: 1, 0.7: 1, 0.5: 1}, extra={0.5: 1}, budget="macs",
        searched={}, tried={},
        known={  # those of benchmarks/text.py; what is written narrow learns on as in a run
            "wide": {"rest": 3e-4},
            **dict.fromkeys(("direct", "direct32"), _DIRECT_ON_TEXTS),
            **dict.fromkeys(("wide+", "free", "low-rank", "bits", "budget"), _ON_TEXTS),
        },
    ),
)  # fmt: skip
SPECS = {spec.name: spec for spec in _SPECS}


@dataclass(frozen=True)
class Learning:
    """An optimiser, and a rate for each role that a parameter can have."""

    optimizer: str
    rates: Mapping[str, float]

    def at(self, density: float) -> Learning:
        """Narrow networks take larger steps: below a half the rates grow with the root of what is gone."""
        return replace(self, rates={role: rate * max(1.0, (0.5 / density) ** 0.5) for role, rate in self.rates.items()})


# what the search of rates has found


def tries_of(spec: Spec, way: str) -> list[dict[str, Any]]:
    """What was tried; where it was tried on several networks, with the mean of their accuracies."""
    name = spec.rates_of or spec.name
    read = [json.loads(file.read_text()) for file in sorted(RATES.glob(f"{name}-{way}-*.json"))]
    tries = [found for found in read if "seed" not in found]
    for found in tries:
        same = [t for t in read if (t["optimizer"], t["rate"]) == (found["optimizer"], found["rate"])]
        if len(same) > 1:
            found["accuracy"] = float(np.mean([each["accuracy"] for each in same]))
    return tries


def best_of(spec: Spec, way: str, optimizer: str | None = None) -> dict[str, Any]:
    """The try that was right most often: at the end of the short schedule, or in all rows of the whole one.

    Of equals the one of the smallest rate.
    """
    found = [t for t in tries_of(spec, way) if "accuracy" in t and optimizer in (None, t["optimizer"])]
    if not found:
        raise SystemExit(f"no rates for {way} on {spec.name} yet: python benchmarks/codes.py rates --data {spec.name}")
    return max(found, key=lambda each: (in_rows(spec, each), each["accuracy"], -each["rate"]))


def in_rows(spec: Spec, found: dict[str, Any]) -> float:
    """The mean over the densities that are shown, of a try that went the whole schedule; 0 of others."""
    by_density = {float(density): right for density, right in found.get("by density", {}).items()}
    return float(np.mean([by_density[density] for density in spec.extra if density in by_density] or [0.0]))


def chosen(spec: Spec, way: str, optimizer: str | None = None) -> Learning:
    """The best way that was tried, of one optimiser or of all."""
    if spec.known:
        return Learning("adamw", spec.known[way])
    best = best_of(spec, way, optimizer)
    return Learning(best["optimizer"], best["rates"])


# data and networks


class Questions:
    """TREC as a split of Spalier's loader: what it fetches are keyword arguments of the network."""

    def __init__(self, file: Path, classes: list[str]) -> None:
        from transformers import AutoTokenizer

        rows = list(csv.DictReader(file.open(encoding="utf-8")))
        self.labels = np.array([classes.index(row["label"]) for row in rows])
        self.texts = [row["text"] for row in rows]
        self.tokenizer = AutoTokenizer.from_pretrained(WEIGHTS / "minilm-l6-v2")

    def __len__(self) -> int:
        return len(self.texts)

    def part(self, chosen: Any) -> Questions:
        """Some of the questions."""
        made = copy.copy(self)
        made.labels, made.texts = self.labels[chosen], [self.texts[i] for i in np.flatnonzero(chosen)]
        return made

    def fetch(self, indices: Any, epoch: int | None, seed: int = 0) -> Any:
        found = self.tokenizer([self.texts[i] for i in indices], padding=True, return_tensors="pt")
        return dict(found), torch.from_numpy(self.labels[indices])


@cache
def _opened(name: str, seed: int, is_search: bool) -> Any:
    spec = SPECS[name]
    if spec.network == "minilm":
        folder = DATA / "text" / (spec.data or name)
        classes = sorted({row["label"] for row in csv.DictReader((folder / "train.csv").open(encoding="utf-8"))})
        train, test = (Questions(folder / f"{part}.csv", classes) for part in ("train", "test"))
        if is_search:
            test = train.part(~limited(train.labels, len(train) * 4 // 5, seed))
            train = train.part(limited(train.labels, len(train) * 4 // 5, seed))
        return types.SimpleNamespace(train=train, test=test)
    size = None if spec.size == 32 else spec.size
    data = open_set(spec.data or name, DATA, image_size=size, max_train_samples=spec.train, seed=seed)
    if not is_search:
        return data
    split: Any = data.train
    every: Any = open_set(spec.data or name, DATA, image_size=size).train
    others = np.setdiff1d(every.rows, split.rows)[:2000]
    rows = split.rows
    if not len(others):  # all are learned from; a fifth is left out
        is_kept = limited(split.labels, len(split) * 4 // 5, seed)
        rows, others = rows[is_kept], rows[~is_kept]
    parts = [ArraySplit(every.images, chosen, every.labels[chosen], every.preprocessing) for chosen in (rows, others)]
    return types.SimpleNamespace(train=parts[0], test=parts[1])


def opened(spec: Spec, seed: int) -> Any:
    """Samples to learn from and to test on; for a choice of rates none of the test samples are among them."""
    return _opened(spec.name, seed, spec.is_search)


def base_of(spec: Spec, seed: int) -> nn.Module:
    """The pretrained network with a fresh head."""
    if spec.network == "minilm":
        from transformers import AutoModelForSequenceClassification as Model

        torch.manual_seed(seed)
        text: nn.Module = Model.from_pretrained(WEIGHTS / spec.weights, num_labels=spec.classes, dtype=torch.float32)
        return text.eval()
    net = open_network(spec.network, classes=spec.classes, weights=WEIGHTS / spec.weights, seed=seed, **spec.options)
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def run(net: nn.Module, inputs: Any) -> Tensor:
    return logits_of(net(**inputs) if isinstance(inputs, Mapping) else net(inputs))


def loader(spec: Spec, seed: int) -> Loader:
    return Loader(opened(spec, seed).train, spec.batch, seed)


def calibration(spec: Spec, seed: int) -> list[Any]:
    """Training samples without augmentation."""
    batches = Loader(opened(spec, seed).train, 64, seed, augment=False).epoch(0)
    chosen: list[Any] = [next(batches) for _ in range(SCORED // 64)]
    return [{**x, "labels": y} if isinstance(x, Mapping) else (x, y) for x, y in chosen]


def example_of(spec: Spec, seed: int) -> Any:
    return opened(spec, seed).test.fetch(np.arange(2), None)[0]


@torch.inference_mode()
def accuracy(net: nn.Module, spec: Spec, seed: int) -> float:
    split = opened(spec, seed).test
    numbers = np.linspace(0, len(split) - 1, min(spec.test, len(split))).round().astype(int)
    net.eval()
    right = 0
    for i in range(0, len(numbers), 250):
        inputs, labels = split.fetch(numbers[i : i + 250], None)
        right += int((run(net, inputs).argmax(1) == labels).sum())
    return round(100 * right / len(numbers), 3)


# learning


@dataclass
class Teacher:
    """What the wide network says of the batches that all contenders of a row see; it is asked once for each."""

    net: nn.Module
    said: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def __call__(self, key: tuple[int, int], inputs: Any) -> Tensor:
        if key not in self.said:
            with torch.inference_mode():
                self.said[key] = run(self.net.eval(), inputs)
        return self.said[key].clone()


def loss_of(logits: Tensor, labels: Tensor, taught: Tensor | None) -> Tensor:
    loss = F.cross_entropy(logits, labels)
    if taught is None:
        return loss
    ours, theirs = (F.log_softmax(each / TEMPERATURE, 1) for each in (logits, taught))
    return 0.5 * loss + 0.5 * TEMPERATURE**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)


def role_of(net: nn.Module, name: str) -> str:
    """What a learned parameter is, which decides its rate; factors that are codes learn as codes do."""
    if "_adapter." not in name:
        return "rest"
    owner, _, key = name.rpartition(".")
    if key == "gain":
        return "gains"
    is_coded: Any = getattr(net.get_submodule(owner), "levels", 0)
    return "bits" if key == "delta" or is_coded else "factors"


def optimizer_of(net: nn.Module, learning: Learning, steps: int) -> tuple[Any, Any]:
    """A rate for each role, cosine after a warm-up of a tenth; the rest is the paper's, or AdamW's own."""
    learned: dict[str, list[Tensor]] = {}
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            learned.setdefault(role_of(net, name), []).append(parameter)
    groups = [{"params": parameters, "lr": learning.rates[role]} for role, parameters in learned.items()]
    optimizer: Any
    if learning.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=5e-4, fused=True)
    else:
        optimizer = torch.optim.AdamW(groups, weight_decay=1e-4, fused=True)
    warm = max(1, steps // 10)

    def share(step: int) -> float:
        return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, steps - warm))))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def learn_(
    net: nn.Module,
    spec: Spec,
    seed: int,
    epochs: range,
    learning: Learning,
    teacher: Teacher | None = None,
    rounding: Rounding | None = None,
    budget: int | None = None,
) -> None:
    """Learn for these epochs; with ``rounding`` by rounded weights, whose gradients go to the weights themselves.

    With a budget codes are held to its bytes after every epoch, as in a run.
    """
    batches = loader(spec, seed)
    optimizer, schedule = optimizer_of(net, learning, len(epochs) * len(batches))
    for epoch in epochs:
        for number, (inputs, labels) in enumerate(batches.epoch(epoch)):
            taught = None if teacher is None else teacher((epoch, number), inputs)
            net.train()
            optimizer.zero_grad()
            if rounding is not None:
                rounding.round_()
            loss_of(run(net, inputs), labels, taught).backward()
            if rounding is not None:
                rounding.restore_()
            optimizer.step()
            schedule.step()
        if budget is not None:
            held_(net, budget, spec.storage)
    net.eval()


def shrink_(net: nn.Module, spec: Spec, seed: int, density: float) -> None:
    batches = calibration(spec, seed)
    is_text = isinstance(batches[0], Mapping)
    scores = sp.score(net, batches, spec.criterion, loss=None if is_text else F.cross_entropy)
    ways: dict[str, Any] = {spec.budget: density, "writers": spec.writers, "round_to": spec.round_to}
    plan = sp.select(net, scores, aggregate="mean", **ways)
    sp.prune_(net, plan, recover=None if is_text else sp.Recovery(batches, adapters=False, head=False))


def attach(spec: Spec, seed: int, adapter: Any) -> nn.Module:
    """The base with an adapter on it; embeddings stay the base's."""
    torch.manual_seed(seed)
    net = base_of(spec, seed)
    targets = (lambda name, module: not isinstance(module, nn.Embedding)) if spec.network == "minilm" else None
    sp.attach_(net, adapter, head=spec.head, example=example_of(spec, seed), targets=targets)
    return net
