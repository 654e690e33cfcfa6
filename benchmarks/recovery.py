"""Criteria and closed-form recovery on a real task: a ResNet-20 trained on CIFAR-100, adapted to CIFAR-10.

Three questions, three seeds each, 5,000 training and 2,000 test images, SPLoRA of rank 8:
- *criteria*: what is left of the accuracy after one prune, norms recalibrated, nothing trained;
- *one_shot*: what each part of recovery restores after one prune;
- *gradual*: recovery as the first move of every step down to 10% of the channels, with and without training after it.

    SPALIER_DATA=folder/with/cifar10 SPALIER_WEIGHTS=folder/with/weights python3 dev.py bench-recovery

The data is the official training batch 1 and test batch as lossless grids of images (``data_batch_1.webp``,
``test_batch.webp``, ``labels.json``), the weights ``resnet20-cifar100.safetensors``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spalier as sp
from spalier.criteria import CRITERIA, Random

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments.paper.networks import resnet20
from experiments.paper.paper_data import grid

RESULTS = Path(__file__).parent / "results" / "recovery.json"
TRAIN, TEST, CALIBRATION, BATCH = 5000, 2000, 500, 100
SEEDS = 3
Images = tuple[Tensor, Tensor]


def images(folder: Path, name: str, count: int) -> Images:
    pixels, labels = grid(folder, name)
    mean, deviation = torch.tensor([0.507, 0.487, 0.441]), torch.tensor([0.267, 0.256, 0.276])
    x = (torch.from_numpy(pixels[:count].copy()).float() / 255 - mean) / deviation
    return x.movedim(-1, 1).contiguous(memory_format=torch.channels_last), torch.from_numpy(labels[:count])


def base(weights: Path) -> nn.Module:
    """The pretrained network with a fresh head for ten classes."""
    from safetensors.torch import load_file

    net = resnet20()
    net.load_state_dict(load_file(weights / "resnet20-cifar100.safetensors"))
    net.linear = nn.Linear(256, 10)
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def train_(net: nn.Module, data: Images, epochs: float, lr: float, seed: int) -> None:
    """One-cycle SGD with flips and shifts of up to four pixels."""
    x, y = data
    learned = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learned, lr, momentum=0.9, weight_decay=5e-4)
    steps = int(epochs * len(x) / BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=max(steps, 2))
    generator = torch.Generator().manual_seed(seed)
    net.train()
    for _ in range(steps):
        chosen = torch.randint(0, len(x), (BATCH,), generator=generator)
        batch = F.pad(x[chosen], (4, 4, 4, 4), mode="reflect")
        dy, dx = torch.randint(0, 9, (2,), generator=generator).tolist()
        batch = batch[:, :, dy : dy + 32, dx : dx + 32]
        if torch.rand((), generator=generator) < 0.5:
            batch = batch.flip(3)
        optimizer.zero_grad()
        F.cross_entropy(net(batch.contiguous(memory_format=torch.channels_last)), y[chosen]).backward()
        optimizer.step()
        schedule.step()
    net.eval()


@torch.no_grad()
def accuracy(net: nn.Module, data: Images) -> float:
    net.eval()
    right: int = sum(
        (net(x).argmax(1) == y).sum().item() for x, y in zip(data[0].split(500), data[1].split(500), strict=True)
    )
    return round(100 * right / len(data[1]), 2)


def recoveries(batches: list[Any]) -> dict[str, sp.Recovery | None]:
    return {
        "nothing": None,
        "norms": sp.Recovery(batches, adapters=False, head=False),
        "norms, adapters": sp.Recovery(batches, head=False),
        "norms, adapters, head": sp.Recovery(batches),
    }


def criteria(net: nn.Module, batches: list[Any], test: Images) -> dict[str, Any]:
    found: dict[str, Any] = {}
    chosen: dict[str, list[Any]] = {name: [name] for name in CRITERIA}
    chosen["random"] = [Random(seed=s) for s in range(3)]
    for name, several in chosen.items():
        rows = []
        for each in several:
            scores = sp.score(net, batches, each, loss=F.cross_entropy)
            for channels in ("0.5", "0.3"):
                small = copy.deepcopy(net)
                plan = sp.select(small, scores, channels=float(channels), writers="free")
                sp.prune_(small, plan, recover=recoveries(batches)["norms"], check=False)
                rows.append((channels, accuracy(small, test)))
        for channels in ("0.5", "0.3"):
            mean = statistics.mean(right for share, right in rows if share == channels)
            found.setdefault(name, {})[channels] = round(mean, 2)
    return found


def one_shot(net: nn.Module, batches: list[Any], test: Images) -> dict[str, Any]:
    scores = sp.score(net, batches, "taylor", loss=F.cross_entropy)
    found: dict[str, Any] = {}
    for channels in (0.7, 0.5, 0.3, 0.1):
        plan = sp.select(net, scores, channels=channels, writers="free")
        for name, recovery in recoveries(batches).items():
            small = copy.deepcopy(net)
            start = time.perf_counter()
            sp.prune_(small, plan, recover=recovery, check=False)
            spent = time.perf_counter() - start
            found.setdefault(name, {})[str(channels)] = accuracy(small, test)
            found.setdefault("seconds", {})[f"{name}, {channels}"] = round(spent, 3)
    return found


def gradual(net: nn.Module, batches: list[Any], data: Images, test: Images, seed: int, epochs: float) -> dict[str, Any]:
    """Nine steps of ten percent; accuracy at some of them."""
    found: dict[str, Any] = {}
    for name in ("nothing", "norms, adapters, head") if epochs else ("nothing", "norms", "norms, adapters, head"):
        small = copy.deepcopy(net)
        schedule = sp.Schedule(
            "iterative", end=0.1, step_size=0.1, batches=batches, loss=F.cross_entropy,
            recover=recoveries(batches)[name] or False, options={"writers": "free"},
        )  # fmt: skip
        for step in range(1, 10):
            schedule.step(small, step / 10)
            if epochs:
                train_(small, data, epochs, 0.05, seed)
            if step in (3, 5, 7, 8, 9):
                found.setdefault(name, {})[f"{1 - step / 10:.1f}"] = accuracy(small, test)
    return found


PARTS: tuple[str, ...] = ("criteria", "one_shot", "gradual", "gradual_trained")


def run(folder: Path, weights: Path, seed: int, parts: list[str], log: Callable[[str], None]) -> dict[str, Any]:
    torch.manual_seed(seed)
    data, test = images(folder, "data_batch_1", TRAIN), images(folder, "test_batch", TEST)
    net = base(weights)
    sp.attach_(net, sp.SPLoRA(rank=8), head="linear", example=data[0][:2])
    train_(net, data, 5, 0.1, seed)
    batches = list(zip(data[0][:CALIBRATION].split(BATCH), data[1][:CALIBRATION].split(BATCH), strict=True))
    found: dict[str, Any] = {"unpruned": accuracy(net, test)}
    log(f"seed {seed}: {found['unpruned']}")
    work: dict[str, Callable[[], Any]] = {
        "criteria": lambda: criteria(net, batches, test),
        "one_shot": lambda: one_shot(net, batches, test),
        "gradual": lambda: gradual(net, batches, data, test, seed, 0),
        "gradual_trained": lambda: gradual(net, batches, data, test, seed, 0.5),
    }
    for part in parts:
        found[part] = work[part]()
        log(f"{part}: {json.dumps(found[part])}")
    return found


def markdown(report: dict[str, Any], part: str) -> str:
    """One part's table: mean and standard deviation over seeds."""
    rows = [seed[part] for seed in report["seeds"] if part in seed]
    names = [name for name in rows[0] if name != "seconds"]
    columns = list(rows[0][names[0]])
    lines = [
        "| | " + " | ".join(f"{float(c):.0%}" for c in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name in names:
        cells = []
        for column in columns:
            values = [row[name][column] for row in rows]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.1f} ± {spread:.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def save(output: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Put one seed's results among those of earlier runs."""
    seeds = json.loads(output.read_text())["seeds"] if output.exists() else []
    before: dict[str, Any] = next((s for s in seeds if s["seed"] == found["seed"]), {})
    seeds = [s for s in seeds if s["seed"] != found["seed"]] + [{**before, **found}]
    seeds.sort(key=lambda s: int(s["seed"]))
    sizes = {"train": TRAIN, "test": TEST, "calibration": CALIBRATION}
    report = {**sizes, "torch": torch.__version__, "seeds": seeds}
    output.write_text(json.dumps(report, indent=1) + "\n")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SPALIER_DATA"))
    parser.add_argument("--weights", type=Path, default=os.environ.get("SPALIER_WEIGHTS"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(SEEDS)))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.data is None or options.weights is None:
        parser.error(
            "pass --data and --weights, or set SPALIER_DATA and SPALIER_WEIGHTS; see above for what is needed there"
        )
    for seed in options.seeds:
        found = run(options.data, options.weights, seed, options.parts, lambda text: print(text, flush=True))
        report = save(options.output, {"seed": seed, **found})
    for part in options.parts:
        print(f"\n{part}\n{markdown(report, part)}")


if __name__ == "__main__":
    main()
