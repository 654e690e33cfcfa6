"""Three choices of defaults, measured on five networks: how scores of coupled writers are brought together, the floor
under every layer, and rates.

- *aggregate*: a network is fine-tuned once and pruned in one go to a share of its channels or of its MACs, by the sum,
  the mean or the largest of coupled writers' scores. Norms are recalibrated, then it learns on for a little.
- *floor*: pruned step by step and learned on after each, as the fast recipe does it, with `select`'s own floor under
  every layer and without one.
- *learning*: SGD and AdamW at several rates, several starts, rates for each factor; whole, then pruned to 30%.

    SPALIER_DATA=folder/with/data SPALIER_WEIGHTS=folder/with/weights python3 benchmarks/choices.py

The folders are as in experiments/paper, with ``text/trec`` beside the images and ``minilm-l6-v2`` beside the weights.
What the results have already is not measured again. Trainings are short, so only clear differences count.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import numpy as np
import torch
import torch.nn.functional as F
import torchvision_ops
from safetensors.torch import load_file
from torch import Tensor, nn

import spalier as sp
from experiments.paper.networks import resnet20
from experiments.paper.paper_data import open_set
from spalier import files
from spalier.adapters.kinds import LowRank
from spalier.data import open_data
from spalier.networks import open_network
from spalier.runs.learning import lr_factor
from spalier.text import table

torchvision_ops.declare()  # transformers looks for torchvision as it is imported

RESULTS = Path(__file__).parent / "results" / "choices.json"
BATCH, EVALUATED = 32, 250
AGGREGATES = ("sum", "mean", "max")
FLOORS: dict[str, dict[str, Any]] = {"half": {}, "none": {"min_keep": 1}}
STEPS, FLOOR_SEEDS = (0.7, 0.5, 0.3, 0.2, 0.1), 2
KEYS = ("whole", "pruned", "learned", "channels", "macs")
SCORED, SCORED_AT_ONCE = 256, 64
Batch = tuple[Tensor, Tensor]
Found = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A pretrained network, data that are new to it, and how long it learns."""

    name: str
    net: nn.Module
    head: str
    train: Any
    test: Any
    epochs: tuple[float, float]
    """Before the prune and after it."""
    lr: float
    """Of fine-tuning by AdamW, where aggregates are compared."""
    tested: int
    budgets: tuple[str, ...] = ("channels", "macs")
    seeds: tuple[int, int] = (1, 1)
    """How many there are of each question."""
    contenders: float = 1.0
    """The share of the epochs that contenders learn for."""

    def batches(self, count: int = SCORED, size: int = SCORED_AT_ONCE) -> list[Batch]:
        """Some training samples, always the same, not augmented."""
        rows = np.random.default_rng(7).permutation(len(self.train))[:count]
        return [self.train.fetch(part, None) for part in np.split(rows, range(size, len(rows), size))]

    def augmented(self, steps: int, seed: int) -> Iterator[Batch]:
        """So many batches to learn from."""
        whole = len(self.train) // BATCH
        for step in range(steps):
            order = np.random.default_rng((seed, step // whole)).permutation(len(self.train))
            yield self.train.fetch(order[step % whole * BATCH :][:BATCH], step // whole, seed)


class Questions:
    """Sentences as rows of token ids, 0 where there is none; a batch is as wide as its longest sentence."""

    def __init__(self, file: Path, tokenizer: Any) -> None:
        texts, labels = zip(*list(csv.reader(file.open(encoding="utf-8", newline="")))[1:], strict=True)
        self.labels = torch.from_numpy(np.unique(labels, return_inverse=True)[1])
        self.ids = tokenizer(list(texts), padding=True, truncation=True, max_length=24, return_tensors="pt")[
            "input_ids"
        ]

    def __len__(self) -> int:
        return len(self.ids)

    def fetch(self, indices: Any, epoch: int | None, seed: int = 0) -> Batch:
        ids = self.ids[indices]
        return ids[:, : int((ids != 0).sum(1).max())], self.labels[indices]


class Sentences(nn.Module):
    """A classifier of Hugging Face's as a function of token ids alone."""

    def __init__(self, folder: Path, classes: int) -> None:
        super().__init__()
        from transformers import AutoModelForSequenceClassification, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        make = AutoModelForSequenceClassification.from_pretrained
        self.bert = make(folder, num_labels=classes, dtype=torch.float32)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.bert(input_ids=ids, attention_mask=(ids != 0).long()).logits
        return logits


def resnet50(data: Path, weights: Path) -> Case:
    file = weights / "resnet50-imagenet-caffe.fp16.safetensors"
    net = open_network("resnet50", classes=2, weights=file, stem="imagenet", stride_on="conv1")
    found = open_set("catsanddogs", data, image_size=64, max_train_samples=1440)
    return Case("resnet50", net, "fc", found.train, found.test, (1, 1), 3e-4, 1000)


def resnet18(data: Path, weights: Path) -> Case:
    net = open_network("resnet18", classes=102, stem="imagenet")
    net.load_state_dict(load_file(weights / "resnet18-imagenet.fp16.safetensors"), strict=False)  # it has no head
    found = open_set("flowers102", data, image_size=64)
    return Case("resnet18", net, "fc", found.train, found.test, (3, 1), 5e-4, 1000, seeds=(1, 0))


def cifar(data: Path, weights: Path) -> Case:
    net = resnet20()
    net.load_state_dict(load_file(weights / "resnet20-cifar100.safetensors"))
    net.linear = nn.Linear(256, 10)
    found = open_set("cifar10", data, max_train_samples=2048)
    return Case("resnet20", net, "linear", found.train, found.test, (3, 2), 1e-3, 2500, seeds=(2, 2), contenders=0.5)


def minilm(data: Path, weights: Path) -> Case:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights / "minilm-l6-v2")
    train, test = (Questions(data / "text" / "trec" / f"{name}.csv", tokenizer) for name in ("train", "test"))
    net = Sentences(weights / "minilm-l6-v2", 6)
    times = {"budgets": ("macs",), "seeds": (2, 1), "contenders": 0.8}
    return Case("minilm", net, "bert.classifier", train, test, (0.5, 0.25), 1e-4, 500, **times)  # type: ignore[arg-type]


def digits(data: Path, weights: Path) -> Case:
    """The demo's network, which has learned the digits 0 to 3."""
    first, whole = (open_data("digits", classes=tuple(c)) for c in ("0123", "0123456789"))
    case = Case("", open_network("resnet8", classes=4, width=48), "fc", first.train, first.test, (6, 0), 3e-3, 0)
    net: Any = attached(case, sp.FineTune())
    learn_(case, Contender(sp.FineTune(), "adamw", case.lr), net, case.epochs[0], 0)
    net = sp.fuse(net)
    net.fc = nn.Linear(net.fc.in_features, 10)
    return Case("digits", net, "fc", whole.train, whole.test, (4, 2), 3e-3, 500, seeds=(2, 2))


CASES = {"digits": digits, "resnet20": cifar, "minilm": minilm, "resnet18": resnet18, "resnet50": resnet50}


@dataclass(frozen=True)
class Contender:
    """An adapter, its start, and the rates that it learns with."""

    adapter: Any
    optimizer: str
    lr: float
    apart: float = 1.0
    """How much faster ``up`` learns than ``down``; ``lr`` lies between their rates."""
    head: float = 1.0
    """How much faster the head learns."""
    warmup: float = 0.0
    """The share of the steps over which the rate rises."""
    start: Callable[[Case, nn.Module], None] | None = None


def contenders() -> dict[str, Contender]:
    low = sp.SPLoRA(rank=8)
    found = {f"splora, sgd {lr:g}": Contender(low, "sgd", lr) for lr in (0.01, 0.03, 0.1)}
    methods = {
        "splora": (low, (1e-3, 3e-3, 6e-3, 1e-2)),
        "lora": (sp.LoRA(rank=8), (1e-3, 3e-3)),
        "sppara": (sp.SPPaRA(), (3e-4, 1e-3, 3e-3)),
        "fine-pruning": (sp.FineTune(), (1e-4, 3e-4, 1e-3, 3e-3)),
    }
    for name, (adapter, rates) in methods.items():
        found |= {f"{name}, {lr:g}": Contender(adapter, "adamw", lr) for lr in rates}
    variants: dict[str, dict[str, Any]] = {
        "0.003, up x4": {"apart": 4},
        "0.003, up x16": {"apart": 16},
        "0.01, up x16": {"apart": 16},
        "0.003, start 1e-3": {"adapter": sp.SPLoRA(rank=8, init_range=1e-3)},
        "0.003, start 1e-2": {"adapter": sp.SPLoRA(rank=8, init_range=1e-2)},
        "0.003, orthogonal": {"start": orthogonal_},
        "0.003, gradient": {"start": from_gradient_},
        "0.01, gradient": {"start": from_gradient_},
        "0.003, warm-up": {"warmup": 0.1},
        "0.003, head x4": {"head": 4},
    }
    for name, changes in variants.items():
        found[f"splora, {name}"] = replace(found[f"splora, {name.partition(',')[0]}"], **changes)
    found["fine-pruning, 0.0003, head x4"] = replace(found["fine-pruning, 0.0003"], head=4)
    return found


def orthogonal_(case: Case, net: nn.Module) -> None:
    """``down`` with orthogonal rows, as large as it was."""
    for _, update in low_ranks(net):
        new = nn.init.orthogonal_(torch.empty_like(update.down))
        update.down.data = new * (update.down.data.norm() / new.norm())


def from_gradient_(case: Case, net: nn.Module) -> None:
    """Factors along the leading singular vectors of the first gradient, downhill, each as large as it was."""
    base = copy.deepcopy(case.net).eval().requires_grad_(True)
    for x, y in case.batches(4 * BATCH, BATCH):
        F.cross_entropy(base(x), y).backward()
    for name, update in low_ranks(net):
        weight = base.get_parameter(name.removesuffix("_adapter"))
        assert weight.grad is not None
        gradient = update.geometry.grouped(weight.grad)
        for tap in update.geometry.centre:
            gradient = gradient.select(3, tap)
        u, s, v = torch.svd_lowrank(gradient, q=min(update.rank + 4, *gradient.shape[1:]))
        rank = min(update.rank, s.shape[1])  # a layer of few inputs has no more
        set_vectors_(update.up, -u[:, :, :rank])
        set_vectors_(update.down, v[:, :, :rank])


def set_vectors_(factor: nn.Parameter, vectors: Tensor) -> None:
    """Write (groups, channels, rank) into the first rows of a factor."""
    rank = vectors.shape[2]
    rows = vectors.permute(2, 0, 1).reshape(rank, -1)
    factor.data[:rank] = rows * (factor.data[:rank].norm() / rows.norm().clamp(min=1e-12))


def low_ranks(net: nn.Module) -> list[tuple[str, LowRank]]:
    return [(name, module) for name, module in net.named_modules() if isinstance(module, LowRank)]


def attached(case: Case, adapter: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = copy.deepcopy(case.net).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sp.attach_(net, adapter, head=case.head, example=case.batches(2, 2)[0][0])
    return net  # type: ignore[no-any-return]


def optimizer_of(case: Case, contender: Contender, net: nn.Module) -> torch.optim.Optimizer:
    """Parameters in groups; ``rate`` is what the rate is multiplied by in each."""
    rates = {id(p): contender.head for p in net.get_submodule(case.head).parameters()}
    for _, update in low_ranks(net):
        rates |= {id(update.up): math.sqrt(contender.apart), id(update.down): 1 / math.sqrt(contender.apart)}
    by_rate: dict[float, list[nn.Parameter]] = {}
    for parameter in net.parameters():
        if parameter.requires_grad:
            by_rate.setdefault(rates.get(id(parameter), 1.0), []).append(parameter)
    groups = [{"params": several, "rate": rate} for rate, several in by_rate.items()]
    if contender.optimizer == "sgd":
        return torch.optim.SGD(groups, contender.lr, momentum=0.9, weight_decay=1e-4)
    return torch.optim.AdamW(groups, contender.lr, weight_decay=1e-4, fused=True)


def learn_(case: Case, contender: Contender, net: nn.Module, epochs: float, seed: int) -> None:
    """By the schedule of the fast recipe."""
    optimizer = optimizer_of(case, contender, net)
    steps = int(epochs * len(case.train) / BATCH)
    net.train()
    for step, (x, y) in enumerate(case.augmented(steps, seed)):
        lr = contender.lr * lr_factor("cosine", step, steps, contender.warmup * steps)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["rate"]
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    net.eval()


@torch.no_grad()
def accuracy(case: Case, net: nn.Module) -> float:
    """Percent right of test samples, taken evenly."""
    count = min(case.tested, len(case.test))
    rows = np.linspace(0, len(case.test) - 1, count).astype(int)
    right = 0
    for part in np.split(rows, range(EVALUATED, count, EVALUATED)):
        x, y = case.test.fetch(part, None)
        right += int((net.eval()(x).argmax(1) == y).sum())
    return round(100 * right / count, 2)


Note = Callable[[str, Callable[[], dict[str, Any]]], None]
"""Measures an entry, unless the results have it."""


def prune_(case: Case, net: nn.Module, scores: Any, options: dict[str, Any], aggregate: Any) -> dict[str, float]:
    """Prune in one go; what is left, in percent."""
    plan = sp.select(net, scores, aggregate=aggregate, **options)
    has_norms = any(isinstance(module, nn.BatchNorm2d) for module in net.modules())
    recover = sp.Recovery(case.batches(), adapters=False, head=False) if has_norms else None
    sp.prune_(net, plan, recover=recover, check=False)
    assert plan.prediction is not None
    return {name: round(100 * value, 1) for name, value in plan.prediction.density.items()}


def aggregates(case: Case, note: Note) -> None:
    """All from one fine-tuned network."""
    tune = Contender(sp.FineTune(), "adamw", case.lr)

    @cache
    def tuned(seed: int) -> tuple[nn.Module, Any, float]:
        net = attached(case, tune.adapter, seed)
        learn_(case, tune, net, case.epochs[0], seed)
        return net, sp.score(net, case.batches(), loss=F.cross_entropy), accuracy(case, net)

    def one(budget: str, share: float, aggregate: str, seed: int) -> dict[str, Any]:
        net, scores, whole = tuned(seed)
        small = copy.deepcopy(net)
        left = prune_(case, small, scores, {budget: share}, aggregate)
        pruned = accuracy(case, small)
        learn_(case, tune, small, case.epochs[1], seed + 100)
        return {"whole": whole, "pruned": pruned, "learned": accuracy(case, small), "left": left}

    for seed, budget, share, how in product(range(case.seeds[0]), case.budgets, (0.5, 0.3), AGGREGATES):
        note(f"aggregate/{case.name}/{budget} {share:.0%}/{how}/{seed}", partial(one, budget, share, how, seed))


def floors(case: Case, note: Note) -> None:
    """Each from the same fine-tuned network, by the same steps and batches."""
    tune = Contender(sp.FineTune(), "adamw", case.lr)

    @cache
    def walk(budget: str, floor: str, seed: int) -> dict[float, dict[str, Any]]:
        net = attached(case, tune.adapter, seed)
        learn_(case, tune, net, case.epochs[0], seed)
        whole, found = accuracy(case, net), {}
        for number, share in enumerate(STEPS):
            scores = sp.score(net, case.batches(), loss=F.cross_entropy)
            left = prune_(case, net, scores, {budget: share, **FLOORS[floor]}, "mean")
            pruned = accuracy(case, net)
            learn_(case, tune, net, case.epochs[1], seed + 100 + number)
            found[share] = {"whole": whole, "pruned": pruned, "learned": accuracy(case, net), "left": left}
        return found

    def one(budget: str, floor: str, seed: int, share: float) -> dict[str, Any]:
        return walk(budget, floor, seed)[share]

    for seed, budget, floor, share in product(range(FLOOR_SEEDS), case.budgets, FLOORS, (0.3, 0.1)):
        note(f"floor/{case.name}/{budget} {share:.0%}/{floor}/{seed}", partial(one, budget, floor, seed, share))


def learning(case: Case, note: Note) -> None:
    """Every contender: whole, then at 30%."""

    def one(contender: Contender, seed: int) -> dict[str, Any]:
        net = attached(case, contender.adapter, seed)
        if contender.start is not None:
            contender.start(case, net)
        learn_(case, contender, net, case.contenders * case.epochs[0], seed)
        whole = accuracy(case, net)
        scores = sp.score(net, case.batches(), loss=F.cross_entropy)
        left = prune_(case, net, scores, {case.budgets[0]: 0.3}, "mean")
        learn_(case, contender, net, case.contenders * case.epochs[1], seed + 100)
        return {"whole": whole, "learned": accuracy(case, net), "left": left}

    for seed, (name, contender) in product(range(case.seeds[1]), contenders().items()):
        note(f"learning/{case.name}/{name}/{seed}", partial(one, contender, seed))


def mean_of(found: Found, entry: str, key: str) -> str:
    """The mean over seeds, and behind it how many there are."""
    values = [each[key] for name, each in found.items() if name.rpartition("/")[0] == entry]
    return f"{statistics.mean(values):.1f} ({len(values)})" if values else "-"


def shown(found: Found) -> str:
    """A table for each question."""
    flat = {name: {**entry, **entry["left"]} for name, entry in found.items()}
    first = [
        [net, budget, question, how, *(mean_of(flat, f"{question}/{net}/{budget}/{how}", key) for key in KEYS)]
        for question, answers in (("aggregate", AGGREGATES), ("floor", tuple(FLOORS)))
        for net, budget in sorted({tuple(name.split("/")[1:3]) for name in flat if name.startswith(f"{question}/")})
        for how in answers
    ]
    nets = [name for name in CASES if any(key.startswith(f"learning/{name}/") for key in flat)]
    second = [
        [name, *(mean_of(flat, f"learning/{net}/{name}", key) for net in nets for key in ("whole", "learned"))]
        for name in contenders()
    ]
    titles = ["", *(title for net in nets for title in (net, "at 30%"))]
    return f"{table(['network', 'left', 'choice', '', *KEYS], first)}\n\n{table(titles, second)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SPALIER_DATA"))
    parser.add_argument("--weights", type=Path, default=os.environ.get("SPALIER_WEIGHTS"))
    parser.add_argument("--networks", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of entries, such as 'learning/*, sgd*'")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.data is None or options.weights is None:
        parser.error("pass --data and --weights, or set SPALIER_DATA and SPALIER_WEIGHTS; see above for what is there")
    torch.set_num_threads(1)
    found: Found = json.loads(options.output.read_text()) if options.output.exists() else {}

    def note(name: str, measure: Callable[[], dict[str, Any]]) -> None:
        if name in found or not any(fnmatchcase(name, pattern) for pattern in options.only):
            return
        start = time.perf_counter()
        found[name] = {**measure(), "seconds": round(time.perf_counter() - start, 1)}
        print(name, json.dumps(found[name]), flush=True)
        files.write(options.output, (json.dumps(found, indent=1, sort_keys=True) + "\n").encode())

    for name in options.networks:
        torch.manual_seed(0)  # for new heads
        case = CASES[name](options.data, options.weights)
        aggregates(case, note)
        floors(case, note)
        learning(case, note)
    print(shown(found))


if __name__ == "__main__":
    main()
