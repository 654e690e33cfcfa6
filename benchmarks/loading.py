"""What the loader costs beside the training step that it feeds: CIFAR's size, random crops and flips, ResNet-18.

Step and batch take turns, and CPU time is what counts, so that a busy machine changes little; the table shows medians
of the rounds' ratios.
The loader runs in the same process, without workers: nothing of it is hidden behind the step. The images are random
bytes, as many as CIFAR-10 has for training.

    .venv/bin/python benchmarks/loading.py                 # some minutes on two cores
    .venv/bin/python benchmarks/loading.py --rounds 3      # quicker
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import spalier as sp
from spalier.data import Loader
from spalier.data.data import ArraySplit, Preprocessing
from spalier.text import table

RANK, SAMPLES = 8, 50_000
BATCHES, THREADS = (64, 128, 256), (1, 2)
RESULTS = Path(__file__).parent / "results" / "loading.json"


def images() -> ArraySplit:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (SAMPLES, 32, 32, 3), np.uint8)
    labels = generator.integers(0, 10, SAMPLES)
    preprocessing = Preprocessing.small(32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
    return ArraySplit(pixels, np.arange(SAMPLES), labels, preprocessing)


class Trainer:
    """ResNet-18 with SPLoRA, ready to step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        net = sp.models.resnet18(classes=10, stem="cifar").train()
        sp.attach_(net, sp.SPLoRA(RANK), head="fc")
        self.net: nn.Module = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        learned = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(learned, lr=1e-4, momentum=0.9)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.net(batch[0]), batch[1]).backward()
        self.optimizer.step()


def endless(loader: Loader) -> Iterator[tuple[Tensor, Tensor]]:
    epoch = 0
    while True:
        yield from loader.epoch(epoch)
        epoch += 1


def measure(split: ArraySplit, batch: int, threads: int, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    trainer, batches = Trainer(), endless(Loader(split, batch_size=batch))
    trainer.step(next(batches))  # the first step allocates
    loading, stepping = [], []
    for _ in range(rounds):
        start = time.process_time()
        found = next(batches)
        between = time.process_time()
        trainer.step(found)
        loading.append(between - start)
        stepping.append(time.process_time() - between)
    ratio = statistics.median(load / step for load, step in zip(loading, stepping, strict=True))
    return {
        "batch": batch,
        "threads": threads,
        "loader_cpu_milliseconds": [round(1000 * t, 3) for t in loading],
        "step_cpu_milliseconds": [round(1000 * t, 1) for t in stepping],
        "loader : step": round(ratio, 5),
    }


def epoch_start(split: ArraySplit, rounds: int) -> list[float]:
    """Milliseconds for the order and the crops of all samples, once an epoch."""
    found, loader = [], Loader(split)
    for epoch in range(rounds):
        start = time.perf_counter()
        next(loader.epoch(epoch))
        found.append(round(1000 * (time.perf_counter() - start), 2))
    return found


def show(report: dict[str, Any]) -> str:
    return table(["threads", "batch", "loader, CPU ms", "step, CPU ms", "loader : step"], _cells(report))


def markdown(report: dict[str, Any]) -> str:
    """The table as the docs show it."""
    lines = ["| threads | batch | loader, CPU ms | step, CPU ms | loader : step |", "|---" * 5 + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in _cells(report))])


def _cells(report: dict[str, Any]) -> list[list[str]]:
    return [
        [
            str(row["threads"]),
            str(row["batch"]),
            f"{statistics.median(row['loader_cpu_milliseconds']):.1f}",
            f"{statistics.median(row['step_cpu_milliseconds']):,.0f}",
            f"{row['loader : step']:.2%}",
        ]
        for row in report["rows"]
    ]


def machine() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved batches and steps")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    split, rows = images(), []
    for threads in THREADS:
        for batch in BATCHES:
            rows.append(measure(split, batch, threads, options.rounds))
            print(show({"rows": rows[-1:]}), flush=True)
    start = epoch_start(split, options.rounds)
    report = {
        "rank": RANK,
        "rounds": options.rounds,
        "machine": machine(),
        "rows": rows,
        "epoch_start_ms": start,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(show(report) + f"\nan epoch's start: {statistics.median(start):.1f} ms\nwritten to {options.output}")


if __name__ == "__main__":
    main()
