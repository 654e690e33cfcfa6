"""What needs no training: counts of the paper's own network, and latency of networks that have been learned."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

import spalier as sp
from experiments.paper.carry_out import COMMIT, Place, config_of, machine
from experiments.paper.cells import METHODS, Cell, experiments
from experiments.paper.protocol import weights_of
from spalier.adapters import ADAPTERS
from spalier.networks import head_of, open_network

CLASSES = {"cifar10": 10, "flowers102": 102, "catsanddogs": 2}


# -- counts -----------------------------------------------------------------------------------------------------------


def counts(place: Place) -> dict[str, Any]:
    """Learned parameters and FLOPs of the paper's network, ResNet-50 for CIFAR-10, pruned by weight and untrained."""
    weights = str(weights_of(place.protocol, place.weights, place.protocol.sets["flowers102"]["weights"]))
    example = torch.zeros(1, 3, 32, 32)
    rows = []
    for learning, method in METHODS.items():
        for density in (1.0, 0.3, 0.1):
            net = open_network("resnet50", classes=10, weights=weights, stem="cifar")
            given = {name: value for name, value in method.items() if name != "method"}
            sp.attach_(net, ADAPTERS[method["method"]](**given), head=head_of(net, classes=10), example=example)
            whole = sp.count(net, example)
            kept: dict[str, float] = {}
            if density < 1:
                plan = sp.select(net, sp.score(net, criterion="weight"), channels=density, writers="free")
                kept = kept_filters(plan)
                sp.prune_(net, plan)
            found = sp.count(net, example)
            rows.append(
                {
                    "learning": learning,
                    "density": density,
                    "learned": found.learned,
                    "learned_as_published": found.learned - _beside(found) + _beside(whole),
                    "macs": found.macs,
                    "flops_as_published": flops_as_published(whole, kept),
                }
            )
    return {"weights": Path(weights).name, "rows": rows, "commit": COMMIT, "machine": machine()}


def _beside(counted: sp.Count) -> int:
    """What is learned in norms and head, which the published code never shrinks."""
    return sum(m.learned for m in counted.modules if m.kind in ("BatchNorm2d", "Linear"))


def kept_filters(plan: sp.Plan) -> dict[str, float]:
    """By layer: the share of its filters that a plan keeps."""
    structure = plan.structure
    found = {}
    for site in structure.sites:
        stream = structure.streams[site.stream]
        kept = plan.keep.get(site.writer, plan.keep.get(stream.name, range(stream.size)))
        found[site.writer] = len(kept) / stream.size
    return found


def flops_as_published(whole: Any, kept: dict[str, float]) -> int:
    """FLOPs as the published code counts them: filters that are gone cost nothing, all else is as before."""
    total: float = sum(kept.get(m.name, 1.0) * m.macs + m.flops_paper - m.macs for m in whole.modules)
    return round(total)


# -- speed ------------------------------------------------------------------------------------------------------------


def speeds(place: Place, *, steps: int = 8) -> dict[str, Any]:
    """Images that one thread learns from in a second, unpruned: what the mini scale was chosen by."""
    found = []
    for data in place.protocol.data:
        for learning in METHODS:
            cell = next(
                c
                for c in experiments(place.protocol)["table"]
                if (c.data, c.labels["learning"], c.seed) == (data, learning, 0)
            )
            config = config_of(cell, place)
            net = open_network(config.network, classes=CLASSES[data], weights=config.weights, **config.network_options)
            side, batch = cell.before.get("image_size", 32), int(config.batch_size or 1)
            found.append(
                {
                    "data": data,
                    "learning": learning,
                    "images_a_second": _speed(net, config, side, batch, steps),
                }
            )
    return {"rows": found, "commit": COMMIT, "machine": machine()}


def _speed(net: nn.Module, config: sp.TransferPruning, side: int, batch: int, steps: int) -> float:
    """The median over steps, the first one left out."""
    channels_last = torch.channels_last
    images = torch.randn(batch, 3, side, side).contiguous(memory_format=channels_last)
    labels = torch.zeros(batch, dtype=torch.long)
    net = net.to(memory_format=channels_last)  # type: ignore[call-overload]
    sp.attach_(net, config.make_adapter(), head=head_of(net))
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1e-3)
    net.train()
    times = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return round(batch / statistics.median(times[1:]), 1)


# -- networks that have been learned ----------------------------------------------------------------------------------


def latency(place: Place, *, rounds: int = 15) -> dict[str, Any]:
    """The networks of the table, SPLoRA r8 by Taylor, in turns with their bases, on one thread."""
    found: dict[str, Any] = {"commit": COMMIT, "machine": machine()}
    for cell in _learned(place, ["r8"]):
        tasks = _tasks(place, cell)
        named = {f"{100 * density:g}": task for density, task in tasks.items()}
        base = _base(place, cell, tasks[1.0])
        benched = sp.bench(base, named, batches=(1, 32), backends=("eager",), rounds=rounds, threads=1)
        found[cell.data] = [
            {
                "density": float(c.network) / 100,
                "batch": c.batch,
                "verdict": c.verdict,
                "speedup": c.speedup,
                "low": c.low,
                "high": c.high,
                "macs_share": c.macs_share,
            }
            for c in benched.comparisons
        ]
    return found


def storage(place: Place) -> dict[str, Any]:
    """Bytes on disk: the base, task files, and the networks that they make of it, as safetensors."""
    rows = []
    for cell in _learned(place, ["r32", "r8"]):
        tasks = _tasks(place, cell)
        base = _base(place, cell, tasks[1.0])
        for density, task in tasks.items():
            file = place.work / cell.name / "tasks" / f"{task.name}.task.safetensors"
            rows.append(
                {
                    "data": cell.data,
                    "learning": cell.labels["learning"],
                    "density": density,
                    "base": _bytes(base),
                    "file": file.stat().st_size,
                    "network": _bytes(task.build(base)),
                }
            )
    return {"rows": rows, "commit": COMMIT, "machine": machine()}


def _bytes(net: nn.Module) -> int:
    return len(save({name: tensor.contiguous() for name, tensor in net.state_dict().items()}))


def _learned(place: Place, learnings: Sequence[str]) -> Iterator[Cell]:
    """Cells of the table by Taylor, of the first seed, that have been carried out here."""
    for cell in experiments(place.protocol)["table"]:
        told = cell.labels
        wanted = told["criterion"] == "taylor" and cell.seed == 0 and told["learning"] in learnings
        if wanted and (place.work / cell.name / "results.json").exists():
            yield cell


def _tasks(place: Place, cell: Cell) -> dict[float, sp.Task]:
    store = sp.Store(place.work / cell.name / "tasks")
    return {density: store.load(f"{cell.data}-{100 * density:g}") for density in place.protocol.shown}


def _base(place: Place, cell: Cell, task: sp.Task) -> nn.Module:
    config = config_of(cell, place)
    return open_network(
        config.network,
        classes=len(task.info.classes),
        weights=config.weights,
        seed=cell.seed,
        **config.network_options,
    )
