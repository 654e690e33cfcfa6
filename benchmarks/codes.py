"""Learn wide, store narrow: what a fine-pruned network loses when its file becomes ten to fifty times smaller.

CIFAR-10 on a ResNet-20 of CIFAR-100, Flowers-102 and Cats & Dogs on a ResNet-50 of ImageNet at 64 pixels, and TREC on
MiniLM. Every figure is a JSON file of its own, so that a run that was stopped goes on where it was. Three stages:

- *wide*: fine-pruning, the expensive part that all codes share; its task files go to a work folder.
- *direct*: SPLoRA learned as low rank along the same schedule.
- *tails*: from the wide network of a density each contender learns the same extra epochs, with that network as its
  teacher (half of the loss, temperature 2), by AdamW with a rate of its own, cosine after a warm-up of a tenth.

    python benchmarks/codes.py run --data cifar10,flowers102 --seeds 0,1,2 --only wide
    python benchmarks/codes.py status
    python benchmarks/codes.py page

Data and weights are in ../shared, or where SPALIER_DATA and SPALIER_WEIGHTS say.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
import os
import sys
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
from codes_rivals import Rounding, TooFewBytes, coded, matrices_of  # noqa: E402
from experiments.paper.paper_data import open_set  # noqa: E402
from spalier.data import Loader  # noqa: E402
from spalier.networks import logits_of, open_network  # noqa: E402
from spalier.runs.narrow import held_  # noqa: E402

torchvision_ops.declare()  # transformers looks for torchvision as it is imported
DATA = Path(os.environ.get("SPALIER_DATA", ROOT.parent / "shared" / "data"))
WEIGHTS = Path(os.environ.get("SPALIER_WEIGHTS", ROOT.parent / "shared" / "weights"))
RESULTS = ROOT / "benchmarks" / "results" / "codes"
WORK = Path(__file__).parent / "work"
PAGE = ROOT / "docs" / "codes.md"
SCORED, TEMPERATURE, ROOM = 256, 2.0, 0.04


@dataclass(frozen=True)
class Spec:
    """A data set, its base network, and how long and how fast everything learns on it."""

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
    rates: Mapping[str, float]
    size: int = 32
    options: Mapping[str, Any] = field(default_factory=dict)
    budget: str = "channels"
    """What densities are a share of."""

    def rates_at(self, density: float) -> dict[str, float]:
        """Narrow networks take larger steps: below a half the rates grow with the root of what is gone."""
        return {role: rate * max(1.0, (0.5 / density) ** 0.5) for role, rate in self.rates.items()}


_RESNET50: dict[str, Any] = {
    "network": "resnet50",
    "weights": "resnet50-imagenet-caffe.fp16.safetensors",
    "head": "fc",
    "size": 64,
    "options": {"stem": "imagenet", "stride_on": "conv1"},
}
# fine-pruning; SPLoRA learned directly, and its norms and head; in a tail: low-rank factors, codes, their scales
# (which learn relative to what they are), and all else: whole weights, norms, head
_RATES = {"wide": 3e-4, "direct": 3e-3, "direct rest": 3e-3, "factors": 1e-3, "bits": 2e-4, "gains": 1e-3, "rest": 2e-4}
_SPECS = (
    Spec(
        "cifar10", "CIFAR-10, ResNet-20", "experiments.paper.networks:resnet20", "resnet20-cifar100.safetensors",
        "linear", classes=10, train=4000, test=5000, batch=64,
        epochs={1.0: 4, 0.7: 2, 0.5: 4, 0.3: 6, 0.2: 6, 0.1: 10}, extra={0.5: 3, 0.3: 4, 0.1: 6},
        rates={**_RATES, "wide": 2e-3, "factors": 3e-3, "bits": 1e-3, "rest": 1e-3},
    ),
    Spec(
        "flowers102", "Flowers-102, ResNet-50", **_RESNET50, classes=102, train=2040, test=2000, batch=16,
        epochs={1.0: 3, 0.7: 1, 0.5: 2, 0.3: 4, 0.2: 4, 0.1: 8}, extra={0.5: 1, 0.3: 2, 0.1: 4}, rates=_RATES,
    ),
    Spec(
        "catsanddogs", "Cats & Dogs, ResNet-50", **_RESNET50, classes=2, train=2000, test=1000, batch=32,
        epochs={1.0: 2, 0.7: 1, 0.5: 2, 0.3: 3, 0.2: 3, 0.1: 6}, extra={0.5: 1, 0.3: 2, 0.1: 4}, rates=_RATES,
    ),
    Spec(
        "trec", "TREC, MiniLM (shares of the MACs)", "minilm", "minilm-l6-v2", "classifier", classes=6,
        train=5452, test=500, batch=32, epochs={1.0: 1, 0.7: 1, 0.5: 1}, extra={0.5: 1}, budget="macs",
        rates={**_RATES, "wide": 1e-4, "direct": 2e-3, "direct rest": 2e-4, "bits": 5e-5, "rest": 5e-5},
    ),
)  # fmt: skip
SPECS = {spec.name: spec for spec in _SPECS}


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

    def fetch(self, indices: Any, epoch: int | None, seed: int = 0) -> Any:
        found = self.tokenizer([self.texts[i] for i in indices], padding=True, return_tensors="pt")
        return dict(found), torch.from_numpy(self.labels[indices])


@cache
def opened(name: str, seed: int) -> Any:
    spec = SPECS[name]
    if spec.network == "minilm":
        folder = DATA / "text" / name
        classes = sorted({row["label"] for row in csv.DictReader((folder / "train.csv").open(encoding="utf-8"))})
        train, test = (Questions(folder / f"{part}.csv", classes) for part in ("train", "test"))
        return types.SimpleNamespace(train=train, test=test)
    size = None if spec.size == 32 else spec.size
    return open_set(name, DATA, image_size=size, max_train_samples=spec.train, seed=seed)


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
    return Loader(opened(spec.name, seed).train, spec.batch, seed)


def calibration(spec: Spec, seed: int) -> list[Any]:
    """Training samples without augmentation."""
    batches = Loader(opened(spec.name, seed).train, 64, seed, augment=False).epoch(0)
    chosen: list[Any] = [next(batches) for _ in range(SCORED // 64)]
    return [{**x, "labels": y} if isinstance(x, Mapping) else (x, y) for x, y in chosen]


def example_of(spec: Spec, seed: int) -> Any:
    return opened(spec.name, seed).test.fetch(np.arange(2), None)[0]


@torch.inference_mode()
def accuracy(net: nn.Module, spec: Spec, seed: int) -> float:
    split = opened(spec.name, seed).test
    numbers = np.linspace(0, len(split) - 1, spec.test).round().astype(int)
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


def adamw(net: nn.Module, rates: Mapping[str, float], steps: int) -> tuple[Any, Any]:
    """A rate for each role, cosine after a warm-up of a tenth."""
    learned: dict[str, list[Tensor]] = {}
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            learned.setdefault(role_of(net, name), []).append(parameter)
    groups = [{"params": parameters, "lr": rates[role]} for role, parameters in learned.items()]
    optimizer = torch.optim.AdamW(groups, weight_decay=1e-4)
    warm = max(1, steps // 10)

    def share(step: int) -> float:
        return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, steps - warm))))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def learn_(
    net: nn.Module,
    spec: Spec,
    seed: int,
    epochs: range,
    rates: Mapping[str, float],
    teacher: Teacher | None = None,
    rounding: Rounding | None = None,
    budget: int | None = None,
) -> None:
    """Learn for these epochs; with ``rounding`` by rounded weights, whose gradients go to the weights themselves.

    With a budget codes are held to its bytes after every epoch, as in a run.
    """
    batches = loader(spec, seed)
    optimizer, schedule = adamw(net, rates, len(epochs) * len(batches))
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
            held_(net, budget, "int8-all")
    net.eval()


def shrink_(net: nn.Module, spec: Spec, seed: int, density: float) -> None:
    batches = calibration(spec, seed)
    is_text = isinstance(batches[0], Mapping)
    scores = sp.score(net, batches, "taylor", loss=None if is_text else F.cross_entropy)
    plan = sp.select(net, scores, aggregate="mean", **{spec.budget: density})  # type: ignore[arg-type]
    sp.prune_(net, plan, recover=None if is_text else sp.Recovery(batches, adapters=False, head=False))


def attach(spec: Spec, seed: int, adapter: Any) -> nn.Module:
    """The base with an adapter on it; embeddings stay the base's."""
    torch.manual_seed(seed)
    net = base_of(spec, seed)
    targets = (lambda name, module: not isinstance(module, nn.Embedding)) if spec.network == "minilm" else None
    sp.attach_(net, adapter, head=spec.head, example=example_of(spec, seed), targets=targets)
    return net


# cells


def cell(spec: Spec, density: float, method: str, seed: int) -> Path:
    return RESULTS / f"{spec.name}-{100 * density:g}-{method}-seed{seed}.json"


def write(spec: Spec, density: float, method: str, seed: int, found: dict[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    said = {"data": spec.name, "density": density, "method": method, "seed": seed, "test_images": spec.test}
    cell(spec, density, method, seed).write_text(json.dumps({**said, **found}, indent=1) + "\n")
    print(spec.name, density, method, seed, json.dumps(found), flush=True)


def task_file(spec: Spec, density: float, seed: int, what: str = "wide") -> Path:
    return WORK / f"{spec.name}-{100 * density:g}-{what}-seed{seed}.task.safetensors"


def learned_in(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters() if p.requires_grad)


def restored(spec: Spec, density: float, seed: int, what: str = "wide") -> nn.Module:
    """The adapted network of a task file, to go on learning."""
    net = base_of(spec, seed)
    sp.Task.load(task_file(spec, density, seed, what)).apply_(net, example=example_of(spec, seed))
    return net


def teacher_of(spec: Spec, density: float, seed: int) -> Teacher:
    return Teacher(sp.Task.load(task_file(spec, density, seed)).build(base_of(spec, seed)).requires_grad_(False))


def blocks(spec: Spec) -> list[tuple[float, range]]:
    """Densities and the numbers of their epochs."""
    ends = np.cumsum(list(spec.epochs.values())).tolist()
    return [(d, range(end - n, end)) for (d, n), end in zip(spec.epochs.items(), ends, strict=True)]


def extra(spec: Spec, density: float) -> range:
    """The epochs of a tail: other orders and crops than before, the same for all contenders."""
    return range(1000, 1000 + spec.extra[density])


def wide(spec: Spec, seed: int) -> None:
    """Fine-pruning; it goes on from the last density that is there."""
    done = [d for d in spec.extra if task_file(spec, d, seed).exists() and cell(spec, d, "wide", seed).exists()]
    if len(done) == len(spec.extra):
        return
    net = restored(spec, min(done), seed) if done else attach(spec, seed, sp.FineTune())
    seconds = json.loads(cell(spec, min(done), "wide", seed).read_text())["seconds"] if done else 0.0
    for density, epochs in blocks(spec):
        if done and density >= min(done):
            continue
        start = time.process_time()
        if density < 1:
            shrink_(net, spec, seed, density)
        rate = spec.rates_at(density)["wide"]
        learn_(net, spec, seed, epochs, {"rest": rate})
        seconds += time.process_time() - start
        right = accuracy(net, spec, seed)
        print(f"{spec.name} seed {seed} at {density:.0%}: {right}, {seconds:.0f} s", flush=True)
        if density in spec.extra:
            WORK.mkdir(parents=True, exist_ok=True)
            task = sp.Task.of(net, spec.name)
            size = task.save(task_file(spec, density, seed))
            known: dict[str, Any] = {"learned": learned_in(net), "bytes": size, "macs": task.info.density.macs}
            known |= {"rate": rate, "epochs": epochs.stop}
            write(spec, density, "wide", seed, {"accuracy": right, **known, "seconds": round(seconds, 1)})


def direct(spec: Spec, seed: int, rank: int) -> None:
    """SPLoRA learned as low rank, with the tails' epochs and teacher on a copy at each density that is shown."""
    method = f"direct-r{rank}"
    if all(cell(spec, d, method, seed).exists() for d in spec.extra):
        return
    rates = {"factors": spec.rates["direct"], "rest": spec.rates["direct rest"]}
    net = attach(spec, seed, sp.SPLoRA(rank=rank))
    seconds = 0.0
    for density, epochs in blocks(spec):
        start = time.process_time()
        if density < 1:
            shrink_(net, spec, seed, density)
        learn_(net, spec, seed, epochs, rates)
        seconds += time.process_time() - start
        if density in spec.extra:
            start, before = time.process_time(), accuracy(net, spec, seed)
            longer = copy.deepcopy(net)
            learn_(longer, spec, seed, extra(spec, density), spec.rates_at(density), teacher_of(spec, density, seed))
            found = {"untrained": before, **stored(longer, spec, seed), "rate": rates["factors"]}
            spent = round(seconds + time.process_time() - start, 1)
            write(spec, density, method, seed, {**found, "epochs": epochs.stop + spec.extra[density], "seconds": spent})


def stored(net: nn.Module, spec: Spec, seed: int, storage: Any = "int8-all") -> dict[str, Any]:
    """The task file of a network, and how well the network that is built from it does."""
    data = sp.Task.of(net, spec.name).to_bytes(storage=storage)
    built = sp.Task.from_bytes(data).build(base_of(spec, seed))
    right = accuracy(built, spec, seed)
    return {"accuracy": right, "learned": learned_in(net), "bytes": len(data), "storage": storage}


# what is stored beside weights


def rest_bytes(net: nn.Module, spec: Spec) -> int:
    """Norms with statistics, biases and head in 8 bits, as our files have them, and the masks; no table, no header."""
    chosen = {id(weight) for weight in matrices_of(net, spec.head).values()}
    tensors: list[Any] = [p for p in net.parameters() if p.requires_grad and id(p) not in chosen]
    tensors += [b for m in net.modules() if isinstance(m, nn.BatchNorm2d) for b in (m.running_mean, m.running_var)]
    task = sp.Task.of(net, spec.name)
    return int(sum(t.numel() for t in tensors) + task.table.pack(task.masks).nbytes)


# tails

REFITS: dict[str, Callable[[], Any]] = {
    "r8-centre": lambda: sp.SPLoRA(rank=8, cap=True),  # narrow layers take as much as they can use
    "r8-kernel": lambda: sp.SPLoRA(rank=8, kernel="full", cap=True),
    "delta-1": lambda: sp.SPDelta(bits=1),
    "delta-2": lambda: sp.SPDelta(bits=2),
    "delta-4": lambda: sp.SPDelta(bits=4),
}


def contenders(spec: Spec, density: float) -> list[str]:
    """The methods of a row; those that start from wide+ come after it."""
    shares = ("10", "12", "20", "50") if density == 0.1 else ("10", "20", "50")
    coders = ("12", "20") if density == 0.1 else ("20",)
    budgets = [f"bytes-{share}" for share in shares]
    return ["wide+", "free-8", "free-4", "free-2", *REFITS, *budgets, *(f"nncodec-{share}" for share in coders)]


def tail(spec: Spec, density: float, method: str, seed: int, teacher: Teacher) -> dict[str, Any]:
    """One contender's figures, without what all cells have."""
    kind, _, number = method.partition("-")
    if kind == "wide+":
        net = restored(spec, density, seed)
        learn_(net, spec, seed, extra(spec, density), spec.rates_at(density), teacher)
        sp.Task.of(net, spec.name).save(task_file(spec, density, seed, "longer"))
        return stored(net, spec, seed, "exact")
    if kind == "free":
        return without_base(spec, density, seed, teacher, int(number))
    if kind == "nncodec":
        return by_nncodec(spec, density, seed, budget_of(spec, density, seed, number))
    net, batches = restored(spec, density, seed), calibration(spec, seed)
    budget = None
    if kind == "bytes":
        # a task is called after its data, which may take a few bytes more than what held_ calls it
        budget = budget_of(spec, density, seed, number) - 8
        refitted = sp.refit_(net, bytes=budget, batches=batches, room=ROOM)
    else:
        refitted = sp.refit_(net, REFITS[method](), batches=batches)
    chosen: dict[str, int] = {}
    for row in refitted.rows:
        chosen[row.code] = chosen.get(row.code, 0) + 1
    untrained = accuracy(net, spec, seed)
    learn_(net, spec, seed, extra(spec, density), spec.rates_at(density), teacher, budget=budget)
    found = stored(net, spec, seed)
    assert kind != "bytes" or found["bytes"] <= budget_of(spec, density, seed, number)
    return {"untrained": untrained, **found, "layers by code": chosen}


def budget_of(spec: Spec, density: float, seed: int, share: str) -> int:
    return int(json.loads(cell(spec, density, "wide+", seed).read_text())["bytes"]) // int(share)


def without_base(spec: Spec, density: float, seed: int, teacher: Teacher, bits: int) -> dict[str, Any]:
    """Quantisation alone; 8 bits are rounded from wide+, which is enough."""
    net = restored(spec, density, seed, "longer" if bits == 8 else "wide")
    rounding = Rounding(net, bits, spec.head)
    found = {}
    if bits < 8:
        rounding.round_()
        recalibrate_(net, spec, seed)
        found["untrained"] = accuracy(net, spec, seed)
        rounding.restore_()
        learn_(net, spec, seed, extra(spec, density), spec.rates_at(density), teacher, rounding)
    rounding.round_(fresh=True)
    size = rounding.bytes() + rest_bytes(net, spec)
    return {**found, "accuracy": accuracy(net, spec, seed), "learned": learned_in(net), "bytes": size}


def by_nncodec(spec: Spec, density: float, seed: int, limit: int) -> dict[str, Any]:
    """The deltas of wide+ in a bitstream of the standard, nothing learned afterwards.

    Norms as they were or recalibrated, whichever does better: a rival gets its best.
    """
    net, plain = restored(spec, density, seed, "longer"), base_of(spec, seed)
    structure = sp.trace(plain, example_of(spec, seed))
    kept = sp.kept_units(net)
    assert kept is not None
    sp.prune_(plain, sp.Plan(structure, kept["streams"]), check=False)
    ours, base = matrices_of(net, spec.head), matrices_of(plain, spec.head)
    deltas = {name: (ours[name] - base[name]).detach().contiguous().numpy() for name in ours}
    rest = rest_bytes(net, spec)
    size, decoded, qp = coded(deltas, limit - rest)
    with torch.no_grad():
        for name, weight in ours.items():
            weight.copy_(base[name] + torch.from_numpy(decoded[name]).view_as(weight))
    untrained = accuracy(net, spec, seed)
    recalibrate_(net, spec, seed)
    right = max(untrained, accuracy(net, spec, seed))
    found = {"untrained": untrained, "accuracy": right, "learned": learned_in(net)}
    return {**found, "bytes": size + rest, "limit": limit, "qp": qp}


@torch.no_grad()
def recalibrate_(net: nn.Module, spec: Spec, seed: int) -> None:
    """Let batch norms take the statistics of the calibration samples."""
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    for batch in calibration(spec, seed) if norms else []:
        net.train()
        run(net, batch[0])
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    net.eval()


def tails(spec: Spec, seed: int, chosen: set[str]) -> None:
    for density in spec.extra:
        methods = [m for m in contenders(spec, density) if m in chosen or not chosen]
        missing = [m for m in methods if not cell(spec, density, m, seed).exists()]
        teacher = teacher_of(spec, density, seed) if missing else None
        for method in missing:
            assert teacher is not None
            start = time.process_time()
            try:
                found = tail(spec, density, method, seed, teacher)
            except (sp.errors.BudgetError, TooFewBytes) as error:  # it is a result that nothing fits
                found = {"failed": str(error)}
            spent = round(time.process_time() - start, 1)
            rates = {role: spec.rates_at(density)[role] for role in ("factors", "bits", "gains", "rest")}
            known = {"epochs": spec.extra[density], "rates": rates, "seconds": spent}
            write(spec, density, method, seed, {**found, **known})


def run_all(chosen: list[Spec], seeds: list[int], only: str | None, methods: set[str]) -> None:
    """Seed by seed, so that one is whole before the next begins; text has one seed."""
    for seed in seeds:
        for spec in chosen:
            if spec.network == "minilm" and seed:
                continue
            if only in (None, "wide"):
                wide(spec, seed)
            if only in (None, "tails"):
                tails(spec, seed, methods)
            for rank in (8, 32) if only in (None, "direct") else ():
                direct(spec, seed, rank)


def main() -> None:
    global WORK
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "status", "page"))
    parser.add_argument("--data", default=",".join(SPECS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", choices=("wide", "direct", "tails"))
    parser.add_argument("--methods", default="", help="of the tails, by name; by default all")
    parser.add_argument("--work", type=Path, default=WORK)
    options = parser.parse_args()
    import codes_page  # it needs what is above

    WORK = options.work
    torch.set_num_threads(1)
    if options.command == "run":
        seeds = [int(seed) for seed in options.seeds.split(",")]
        methods = set(filter(None, options.methods.split(",")))
        run_all([SPECS[name] for name in options.data.split(",")], seeds, options.only, methods)
    elif options.command == "status":
        print("\n".join(codes_page.status()))
    else:
        PAGE.write_text(codes_page.page(), encoding="utf-8")
        codes_page.draw(codes_page.against_bytes(codes_page.collected()), PAGE.parent / "assets" / "codes")


if __name__ == "__main__":
    main()
