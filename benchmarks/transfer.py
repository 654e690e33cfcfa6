"""Whole transfer-pruning runs: what physical pruning saves, and what distillation and recovery give.

- *masks*: ResNet-18 from 100% to 5% of the channels in 19 steps, once with a network that really shrinks and once with
  masks only, as the published code does it. The masked contender pays nothing for its masks: scale and shift of the
  norms behind what is gone are set to zero after every step. CPU time of the whole run on one thread, tracing, scoring,
  pruning and evaluation included. The base learned the digits 0 to 4, the task is 5 to 9, at 32x32; a few steps after
  each prune, since it is time that is measured.
- *accuracy*: the same two ways with a small network that is trained enough to compare what they have learned.
- *teaching*: a small residual network that learned the digits 0 to 4 learns 5 to 9 from 180 samples: from labels, from
  labels and itself before pruning, from labels and a fine-tuned network, from that network alone, without labels; and
  with other recoveries.

    python3 dev.py bench-transfer
    python3 dev.py bench-transfer --part accuracy --seeds 5
    python3 dev.py bench-transfer --part teaching --seeds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

import spalier as sp
from spalier.data import Loader, open_data
from spalier.networks import open_network
from spalier.runs import Engine

RESULTS = Path(__file__).parent / "results" / "transfer.json"
SEEDS = 3
SIZE = 32


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(out + self.shortcut(x))


def small(classes: int) -> nn.Module:
    """The network of *teaching*, for the name transfer:small."""
    blocks = [Block(3, 32, 1), Block(32, 64, 2), Block(64, 128, 2)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


class MaskedEngine(Engine):
    """The same run with a network that never shrinks."""

    gone: dict[str, torch.Tensor]

    def prune(self) -> None:
        assert self.plan is not None
        structure = self.plan.structure
        self.gone = {}
        for site in structure.sites:
            if site.norm:
                stream = structure.streams[site.stream]
                mask = torch.ones(stream.size, dtype=torch.bool)
                mask[list(self.plan.keep.get(stream.name, range(stream.size)))] = False
                self.gone[site.norm] = mask
        self._silence_()
        self.begin_block()
        self.position = self.position.replace(phase="train")
        self.save()

    def train_step(self, images: Any, labels: Any) -> None:
        super().train_step(images, labels)
        self._silence_()

    @torch.no_grad()
    def _silence_(self) -> None:
        for name, mask in getattr(self, "gone", {}).items():
            norm = self.net.get_submodule(name)
            norm.weight.masked_fill_(mask, 0.0)  # type: ignore[operator]
            norm.bias.masked_fill_(mask, 0.0)  # type: ignore[operator]


def pretrained(folder: Path, seed: int) -> Path:
    """A ResNet-18 that knows the digits 0 to 4."""
    torch.manual_seed(seed)
    data = open_data("digits", image_size=SIZE, classes=list("01234"), validation_split=0.0)
    net = sp.models.resnet18(classes=5, stem="cifar").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = Loader(data.train, batch_size=64, seed=seed)
    for epoch in range(4):
        for images, labels in loader.epoch(epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()
    file = folder / f"base-{seed}.safetensors"
    save_file({name: value.contiguous() for name, value in net.state_dict().items()}, file)
    return file


def masks(method: str, seed: int, folder: Path, weights: Path) -> dict[str, Any]:
    """One schedule both ways, one after the other."""
    config = sp.TransferPruning(
        recipe="paper",
        data="digits",
        network="resnet18",
        classes=tuple("56789"),
        image_size=SIZE,
        max_train_samples=240,
        weights=str(weights),
        method=method,  # type: ignore[arg-type]
        writers="coupled",
        epochs=1,
        epochs_per_prune=1,
        batch_size=32,
        optimizer="adamw",
        scale_lr=False,
        lr=3e-3 if method == "splora" else 3e-4,
        lr_schedule="cosine",
        score_samples=128,
        seed=seed,
        trackers=(),
        checkpoint_seconds=1e6,
    )
    return {"method": method, **both_ways(config, folder, f"{method}-{seed}")}


def both_ways(config: sp.TransferPruning, folder: Path, name: str) -> dict[str, Any]:
    """A run with a network that shrinks, and with masks, one after the other, each of them first in turn."""
    found: dict[str, Any] = {"seed": config.seed}
    order = [("physical", Engine), ("masked", MaskedEngine)]
    for way, engine in order if config.seed % 2 == 0 else order[::-1]:
        start = time.process_time()
        results = config.run(folder / f"{name}-{way}", progress=False, engine=engine)
        found[way] = {
            "seconds": time.process_time() - start,
            "test": {f"{row['target']:g}": row["test"] for row in results.rows},
        }
    found["ratio"] = found["physical"]["seconds"] / found["masked"]["seconds"]
    print(name, {k: round(v["seconds"], 1) for k, v in found.items() if isinstance(v, dict)}, flush=True)
    return found


def accuracy(seed: int, folder: Path) -> dict[str, Any]:
    """A small network both ways."""
    config = sp.TransferPruning(
        network="transfer:small",
        method="splora",
        classes=tuple("56789"),
        weights=str(small_base(seed, folder)),
        schedule="iterative",
        final_density=0.05,
        epochs=8,
        epochs_per_prune=3,
        batch_size=32,
        lr=3e-3,
        recovery="none",  # as masks have it
        seed=seed,
        trackers=(),
        checkpoint_seconds=1e6,
    )
    return both_ways(config, folder, f"small-{seed}")


def small_base(seed: int, folder: Path) -> Path:
    """The small network after it has learned the digits 0 to 4."""
    run = sp.TransferPruning(
        network="transfer:small",
        method="fine-pruning",
        classes=tuple("01234"),
        densities=(),
        epochs=10,
        batch_size=32,
        seed=seed,
        trackers=(),
    )
    learned = run.run(folder / f"base-{seed}", progress=False).tasks.load("digits-100")
    weights = folder / f"base-{seed}.safetensors"
    save_file(learned.build(open_network("transfer:small", classes=5, seed=seed)).state_dict(), weights)
    return weights


TAUGHT: dict[str, dict[str, Any]] = {
    "labels": {},
    "labels, norms not recalibrated": {"recovery": "none"},
    "labels, all recovered in closed form": {"recovery": "all"},
    "labels and itself": {"teacher": "self"},
    "labels and a fine-tuned teacher": {"teacher": "fine-tuned"},
    "a fine-tuned teacher alone": {"teacher": "fine-tuned", "labels": False},
}


def teaching(seed: int, folder: Path) -> dict[str, Any]:
    """Each way to learn, from the same base and the same samples."""
    common: dict[str, Any] = {
        "network": "transfer:small",
        "data": "digits",
        "densities": (0.5, 0.3, 0.2, 0.1, 0.05),
        "seed": seed,
        "trackers": (),
        "batch_size": 32,
    }
    weights = small_base(seed, folder)
    common |= {
        "classes": tuple("56789"),
        "weights": str(weights),
        "max_train_samples": 200,
        "epochs": 15,
        "epochs_per_prune": 6,
        "method": "splora",
    }
    fine = sp.TransferPruning(**{**common, "method": "fine-pruning"})
    rows = {"fine-pruning, labels": fine.run(folder / f"fine-{seed}", progress=False).rows}
    teacher = folder / f"fine-{seed}" / "tasks" / "digits-100.task.safetensors"
    for name, changes in TAUGHT.items():
        settings = {**common, **changes}
        if settings.get("teacher") == "fine-tuned":
            settings["teacher"] = str(teacher)
        run = sp.TransferPruning(**settings).run(folder / f"{name.replace(' ', '-')}-{seed}", progress=False)
        rows[f"SPLoRA, {name}"] = run.rows
        print(seed, name, [round(100 * row["test"], 1) for row in run.rows], flush=True)
    return {name: {f"{row['target']:g}": row["test"] for row in found} for name, found in rows.items()}


def markdown(results: dict[str, Any], part: str) -> str:
    """A table for the docs."""
    if part == "masks":
        return _masks_table(results["masks"])
    if part == "accuracy":
        ways = {"shrinking": "physical", "masked": "masked"}
        return _table([{way: run[key]["test"] for way, key in ways.items()} for run in results["accuracy"]], "network")
    return _table(results["teaching"], "learned from")


def _masks_table(runs: list[dict[str, Any]]) -> str:
    lines = ["| method | runs | shrinking, s | masked, s | shrinking : masked |", "|---|---|---|---|---|"]
    for method in dict.fromkeys(run["method"] for run in runs):
        own = [run for run in runs if run["method"] == method]
        seconds = [statistics.median(run[way]["seconds"] for run in own) for way in ("physical", "masked")]
        ratio = statistics.median(run["ratio"] for run in own)
        lines.append(f"| {method} | {len(own)} | {seconds[0]:.0f} | {seconds[1]:.0f} | {ratio:.2f} |")
    return "\n".join(lines)


def _table(seeds: list[dict[str, Any]], title: str) -> str:
    densities = [d for d in next(iter(seeds[0].values())) if d in _SHOWN]
    head = " | ".join(f"{100 * float(d):g}%" for d in densities)
    lines = [f"| {title} | {head} |", f"|---|{'---|' * len(densities)}"]
    for name in seeds[0]:
        cells = [_mean([found[name][density] for found in seeds]) for density in densities]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


_SHOWN = ("1", "0.7", "0.5", "0.3", "0.2", "0.1", "0.05")


def _mean(values: list[float]) -> str:
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.1f}{spread}"


def save(found: dict[str, Any]) -> None:
    found["machine"] = {"torch": torch.__version__.partition("+")[0], "threads": 1}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("masks", "accuracy", "teaching"), default="masks")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    np.random.seed(0)
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if options.part == "masks":
            base, found["masks"] = pretrained(folder, seed=0), []
            for method, seed in [*(("splora", seed) for seed in range(options.seeds)), ("fine-pruning", 0)]:
                found["masks"].append(masks(method, seed, folder, base))
                save(found)
        elif options.part == "accuracy":
            found["accuracy"] = [accuracy(seed, folder) for seed in range(options.seeds)]
        else:
            found["teaching"] = [teaching(seed, folder) for seed in range(options.seeds)]
    save(found)
    print(markdown(found, options.part))


if __name__ == "__main__":
    main()
