"""Learn wide, store narrow: what a fine-pruned network loses when its file becomes ten to fifty times smaller.

CIFAR-10 on a ResNet-20 of CIFAR-100, Flowers-102 and Cats & Dogs on a ResNet-50 of ImageNet at 64 pixels, and TREC on
MiniLM. Every figure is a JSON file of its own, so that a run that was stopped goes on where it was. Four stages:

- *rates*: optimiser and rate of each way to learn, chosen on samples that are neither learned from nor tested on.
- *wide*: fine-pruning, the expensive part that all codes share; its task files go to a work folder.
- *tails*: from the wide network of a density each contender learns the same extra epochs, with that network as its
  teacher (half of the loss, temperature 2), cosine after a warm-up of a tenth.
- *direct*: SPLoRA learned as low rank along the same schedule, and the same extra epochs.

    python benchmarks/codes.py rates --data cifar10
    python benchmarks/codes.py run --data cifar10,flowers102 --seeds 0,1,2
    python benchmarks/codes.py run --stages wide-free,wide-random,control    # what else the paper's page compares
    python benchmarks/codes.py latency --seeds 0
    python benchmarks/codes.py status
    python benchmarks/codes.py page

Data and weights are in ../shared, or where SPALIER_DATA and SPALIER_WEIGHTS say. Two processes share the work where
each takes its own data or seeds.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import spalier as sp
from codes_learning import (
    RESULTS,
    ROOT,
    SPECS,
    Learning,
    Spec,
    Teacher,
    accuracy,
    attach,
    base_of,
    calibration,
    chosen,
    example_of,
    learn_,
    run,
    shrink_,
)  # fmt: skip
from codes_rivals import Rounding, TooFewBytes, coded, matrices_of
from spalier.refitting import refit as refit_module
from spalier.refitting.measure import metrics_of
from spalier.refitting.spend import options_of
from spalier.runs.narrow import held_

WORK = Path.home() / ".cache" / "spalier" / "codes"
"""Networks that go on; no results, and too large for the tree."""
ROOM = 0.04


# cells


def cell(spec: Spec, density: float, method: str, seed: int) -> Path:
    return RESULTS / f"{spec.name}-{100 * density:g}-{method}-seed{seed}.json"


def write(spec: Spec, density: float, method: str, seed: int, found: dict[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    said = {"data": spec.name, "density": density, "method": method, "seed": seed, "test_images": spec.test}
    cell(spec, density, method, seed).write_text(json.dumps({**said, **found}, indent=1) + "\n")
    print(spec.name, density, method, seed, json.dumps(found), flush=True)


def task_file(spec: Spec, density: float, seed: int, what: str = "wide") -> Path:
    what += "-search" * spec.is_search
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


def way_at(spec: Spec, way: str, density: float, optimizer: str | None = None) -> Learning:
    """How a tail learns. Rates grow as far as to the density that they were tried at: beyond, SGD's were too large."""
    tried = min(SPECS[spec.rates_of or spec.name].searched, default=density)
    return chosen(spec, way, optimizer).at(max(density, tried))


def extra(spec: Spec, density: float) -> range:
    """The epochs of a tail: other orders and crops than before, the same for all contenders."""
    return range(1000, 1000 + spec.extra[density])


def along(
    net: nn.Module, spec: Spec, seed: int, learning: Callable[[float], Learning], skipped: int = 0
) -> Iterator[tuple[float, range, float]]:
    """Learn and prune in turns, but for the blocks that are skipped, whose network is given.

    After each block its density, the numbers of its epochs, and its processor seconds.
    """
    done = 0
    for number, (density, count) in enumerate(spec.epochs.items()):
        block = range(done, done := done + max(1, round(count * spec.length)))
        if number < skipped:
            continue
        start = time.process_time()
        if density < 1:
            shrink_(net, spec, seed, density)
        learn_(net, spec, seed, block, learning(density))
        yield density, block, time.process_time() - start


def widths_of(net: nn.Module) -> dict[str, int]:
    """How many units of each stream are left: what latency depends on."""
    kept = sp.kept_units(net)
    return {} if kept is None else {name: len(units) for name, units in kept["streams"].items()}


WIDE: dict[str, dict[str, Any]] = {
    "wide": {},
    "wide-free": {"writers": "free"},
    **{f"wide-{criterion}": {"criterion": criterion} for criterion in ("weight", "gradient", "lrp", "random")},
    "wide-half": {"length": 0.5},
    "wide-double": {"length": 2.0},
}
"""Fine-pruning, and what of it is other where something else than codes is compared."""


def wide(spec: Spec, seed: int, method: str = "wide") -> None:
    """Fine-pruning, with task files at the densities that are shown. Runs of one length share the unpruned block."""
    varied = replace(spec, **WIDE[method])
    is_shared = method != "wide" and varied.length == 1
    shown = [density for density in spec.extra if density < 1 or not is_shared]
    if all(task_file(spec, d, seed, method).exists() and cell(spec, d, method, seed).exists() for d in shown):
        return
    way = chosen(spec, "wide")
    net, seconds = attach(spec, seed, sp.FineTune()), 0.0
    if is_shared:
        net, seconds = restored(spec, 1.0, seed), json.loads(cell(spec, 1.0, "wide", seed).read_text())["seconds"]
    for density, epochs, spent in along(net, varied, seed, way.at, skipped=int(is_shared)):
        seconds += spent
        right = accuracy(net, spec, seed)
        print(f"{spec.name} {method} seed {seed} at {density:.0%}: {right}, {seconds:.0f} s", flush=True)
        if density in shown:
            WORK.mkdir(parents=True, exist_ok=True)
            task = sp.Task.of(net, spec.name)
            size = task.save(task_file(spec, density, seed, method))
            known: dict[str, Any] = {"learned": learned_in(net), "bytes": size, **shape_of(task, net)}
            known |= {**told(way.at(density)), "epochs": epochs.stop}
            write(spec, density, method, seed, {"accuracy": right, **known, "seconds": round(seconds, 1)})


STAGES = (*WIDE, "tails", "direct", "control", "ablation")


def control(spec: Spec, seed: int) -> None:
    """The unpruned network, learned for as many epochs as one with 30% of the channels, extra ones included."""
    if cell(spec, 1.0, "control", seed).exists():
        return
    last = 0.3 if 0.3 in spec.extra else min(spec.extra)
    epochs = sum(count for density, count in spec.epochs.items() if density >= last) + spec.extra[last]
    way, start = chosen(spec, "wide"), time.process_time()
    net = attach(spec, seed, sp.FineTune())
    learn_(net, spec, seed, range(epochs), way)
    known = {"accuracy": accuracy(net, spec, seed), "learned": learned_in(net), "epochs": epochs, **told(way)}
    write(spec, 1.0, "control", seed, {**known, "seconds": round(time.process_time() - start, 1)})


def shape_of(task: sp.Task, net: nn.Module) -> dict[str, Any]:
    return {"macs": task.info.density.macs if task.info.density else None, "widths": widths_of(net)}


def told(way: Learning) -> dict[str, Any]:
    return {"optimizer": way.optimizer, "rates": dict(way.rates)}


RANKED = {8: "direct", 32: "direct32"}
"""Ranks that are learned directly, and the way that rates are chosen for."""


def direct(spec: Spec, seed: int, rank: int) -> None:
    """SPLoRA learned as low rank, with the tails' epochs and teacher on a copy at each density that is shown."""
    method = f"direct-r{rank}"
    if all(cell(spec, d, method, seed).exists() for d in spec.extra):
        return
    way = chosen(spec, RANKED[rank])
    net, seconds = attach(spec, seed, sp.SPLoRA(rank=rank)), 0.0
    for density, epochs, spent in along(net, spec, seed, lambda _: way):
        seconds += spent
        if density in spec.extra:
            start, before = time.process_time(), accuracy(net, spec, seed)
            longer = copy.deepcopy(net)
            later = way_at(spec, "low-rank", density, way.optimizer)  # another one undoes what it has learned
            learn_(longer, spec, seed, extra(spec, density), later, teacher_of(spec, density, seed))
            known = {
                "epochs": epochs.stop + spec.extra[density],
                **told(way),
                **shape_of(sp.Task.of(net, spec.name), net),
            }
            sp.Task.of(longer, spec.name).save(task_file(spec, density, seed, method), storage="int8-all")
            found = {"untrained": before, **stored(longer, spec, seed), **known}
            write(spec, density, method, seed, found | {"seconds": round(seconds + time.process_time() - start, 1)})


STARTS = (1e-6, 1e-5, 1e-3, 1e-2)
"""Ranges of the first values, beside the paper's 1e-4."""
RANKS = (1, 2, 4, 8, 16, 32, 64)


def ablation(spec: Spec, seed: int) -> None:
    """The paper's figure 4: ranks, and ranges of the first values for rank 8, along the short schedule."""
    way, short = chosen(spec, "direct"), replace(spec, epochs=spec.searched)
    for rank, start in [*((rank, 1e-4) for rank in RANKS), *((8, start) for start in STARTS)]:
        method = f"ablation-r{rank}-{start:g}"
        if all(cell(spec, density, method, seed).exists() for density in spec.searched):
            continue
        net, seconds = attach(spec, seed, sp.SPLoRA(rank=rank, init_range=start)), 0.0
        for density, epochs, spent in along(net, short, seed, lambda _: way):
            seconds += spent
            found = {
                "accuracy": accuracy(net, spec, seed),
                "learned": learned_in(net),
                "epochs": epochs.stop,
                **told(way),
            }
            write(spec, density, method, seed, {**found, "seconds": round(seconds, 1)})


def stored(net: nn.Module, spec: Spec, seed: int, storage: Any = "int8-all") -> dict[str, Any]:
    """The task file of a network, and how well the network that is built from it does."""
    data = sp.Task.of(net, spec.name).to_bytes(storage=storage)
    built = sp.Task.from_bytes(data).build(base_of(spec, seed))
    right = accuracy(built, spec, seed)
    return {"accuracy": right, "learned": learned_in(net), "bytes": len(data), "storage": storage}


# what is stored beside weights


def rest_bytes(net: nn.Module, spec: Spec) -> int:
    """Norms with statistics, biases and head in 8 bits, as our files have them, and the masks; no table, no header."""
    matrices = {id(weight) for weight in matrices_of(net, spec.head).values()}
    tensors: list[Any] = [p for p in net.parameters() if p.requires_grad and id(p) not in matrices]
    tensors += [b for m in net.modules() if isinstance(m, nn.BatchNorm2d) for b in (m.running_mean, m.running_var)]
    task = sp.Task.of(net, spec.name)
    return int(sum(t.numel() for t in tensors) + task.table.pack(task.masks).nbytes)


# tails

REFITS: dict[str, Callable[[], Any]] = {
    "r8-centre": lambda: sp.SPLoRA(rank=8, cap=True),  # narrow layers take as much as they can use
    "r32-centre": lambda: sp.SPLoRA(rank=32, cap=True),
    "r8-kernel": lambda: sp.SPLoRA(rank=8, kernel="full", cap=True),
    "delta-1": lambda: sp.SPDelta(bits=1),
    "delta-2": lambda: sp.SPDelta(bits=2),
    "delta-4": lambda: sp.SPDelta(bits=4),
}


def contenders(spec: Spec, density: float) -> list[str]:
    """The methods of a row; those that start from wide+ come after it. Unpruned networks have fewer."""
    if density == 1:
        return ["wide+", "free-4", "free-2", "r8-centre", "r32-centre", "delta-1", "bytes-20"]
    shares = ("10", "12", "20", "50") if density == 0.1 else ("10", "20", "50")
    coders = ("12", "20") if density == 0.1 else ("20",)
    budgets = [f"bytes-{share}" for share in shares]
    return ["wide+", "free-8", "free-4", "free-2", *REFITS, *budgets, *(f"nncodec-{share}" for share in coders)]


def way_of(method: str) -> str:
    """How a contender learns: as one of those that rates are chosen for."""
    kind = method.partition("-")[0]
    ways = {"wide+": "wide+", "free": "free", "r8": "low-rank", "r32": "low-rank", "bytes": "budget"}
    return ways.get(kind, "bits")


def tail(
    spec: Spec, density: float, method: str, seed: int, teacher: Teacher, way: Learning, shared: Remembered
) -> dict[str, Any]:
    """One contender's figures, without what all cells have."""
    kind, _, number = method.partition("-")
    if kind == "wide+":
        net = restored(spec, density, seed)
        learn_(net, spec, seed, extra(spec, density), way, teacher)
        sp.Task.of(net, spec.name).save(task_file(spec, density, seed, "longer"))
        return stored(net, spec, seed, "exact")
    if kind == "free":
        return without_base(spec, density, seed, teacher, int(number), way)
    if kind == "nncodec":
        return by_nncodec(spec, density, seed, budget_of(spec, density, seed, number))
    net, batches = restored(spec, density, seed), calibration(spec, seed)
    budget = None
    if kind == "bytes":
        # a task is called after its data, which may take a few bytes more than what held_ calls it
        budget = budget_of(spec, density, seed, number) - 8
        with patch.multiple(refit_module, metrics_of=shared.metrics_of, options_of=shared.options_of):
            refitted = sp.refit_(net, bytes=budget, batches=batches, storage=spec.storage, room=ROOM)
    else:
        refitted = sp.refit_(net, REFITS[method](), batches=batches)
    by_code = dict(Counter(row.code for row in refitted.rows))
    untrained = accuracy(net, spec, seed)
    learn_(net, spec, seed, extra(spec, density), way, teacher, budget=budget)
    if budget is not None and not held_(net, budget, spec.storage):  # as a run does
        if set(by_code) == {"nothing"}:
            raise sp.errors.BudgetError(f"with no code at all, norms, head and masks take more than {budget} bytes")
        sp.refit_(net, bytes=budget, batches=batches, storage=spec.storage)
    found = stored(net, spec, seed, spec.storage if kind == "bytes" else "int8-all")
    assert kind != "bytes" or found["bytes"] <= budget_of(spec, density, seed, number)
    return {"untrained": untrained, **found, "layers by code": by_code}


class Remembered:
    """What budgets of one network share: what its layers see, and the codes of each weight with their errors."""

    def __init__(self) -> None:
        self.metrics: Any = None
        self.options: dict[str, Any] = {}

    def metrics_of(self, *given: Any) -> Any:
        self.metrics = self.metrics or metrics_of(*given)
        return self.metrics

    def options_of(self, delta: Any) -> Any:
        if delta.name not in self.options:
            self.options[delta.name] = options_of(delta)
        return self.options[delta.name]


def budget_of(spec: Spec, density: float, seed: int, share: str) -> int:
    """A share of fine-pruning's file, which its extra epochs leave as large as it is."""
    return task_file(spec, density, seed).stat().st_size // int(share)


def without_base(spec: Spec, density: float, seed: int, teacher: Teacher, bits: int, way: Learning) -> dict[str, Any]:
    """Quantisation alone; 8 bits are rounded from wide+, which is enough."""
    net = restored(spec, density, seed, "longer" if bits == 8 else "wide")
    rounding = Rounding(net, bits, spec.head)
    found = {}
    if bits < 8:
        rounding.round_()
        recalibrate_(net, spec, seed)
        found["untrained"] = accuracy(net, spec, seed)
        rounding.restore_()
        learn_(net, spec, seed, extra(spec, density), way, teacher, rounding)
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


def tails(spec: Spec, seed: int, asked: set[str], most: float) -> None:
    for density in sorted(spec.extra, key=lambda d: d == 1):  # unpruned networks cost most and are asked for least
        if density > most:
            continue
        methods = [m for m in contenders(spec, density) if m in asked or not asked]
        missing = [m for m in methods if not cell(spec, density, m, seed).exists()]
        teacher = teacher_of(spec, density, seed) if missing else None
        shared = Remembered()
        for method in missing:
            assert teacher is not None
            start, way = time.process_time(), way_at(spec, way_of(method), density)
            try:
                found = tail(spec, density, method, seed, teacher, way, shared)
            except (sp.errors.BudgetError, TooFewBytes) as error:  # it is a result that nothing fits
                found = {"failed": str(error)}
            spent = round(time.process_time() - start, 1)
            write(spec, density, method, seed, {**found, "epochs": spec.extra[density], **told(way), "seconds": spent})


def latency(spec: Spec, seed: int) -> None:
    """How fast networks of a seed are whose task files are there, in turns with the base, nothing beside it."""
    methods = ("wide", "wide-free", "direct-r8", "direct-r32")
    files = {(m, d): task_file(spec, d, seed, m) for m in methods for d in spec.extra if d < 1}
    tasks = {f"{m} {100 * d:g}": sp.Task.load(file) for (m, d), file in files.items() if file.exists()}
    measured = sp.bench(
        base_of(spec, seed),
        tasks,
        example_of(spec, seed)[:1],
        batches=(1, 32),
        backends=("eager", "onnxruntime"),
        fold=True,
    )
    print(measured)
    folder = RESULTS / "latency"
    folder.mkdir(parents=True, exist_ok=True)
    speedups = {(c.network, c.backend, c.batch): c.speedup for c in measured.comparisons}
    rows = [
        {"network": t.network, "backend": t.backend, "batch": t.batch, "ms": 1000 * t.latency if t.seconds else None}
        | {"speedup": speedups.get((t.network, t.backend, t.batch)), "macs": t.macs, "problem": t.problem}
        for t in measured.timings
    ]
    told = {"data": spec.name, "seed": seed, "machine": dict(measured.machine), "rounds": measured.rounds, "rows": rows}
    (folder / f"{spec.name}.json").write_text(json.dumps(told, indent=1) + "\n")


def run_all(specs: list[Spec], seeds: list[int], stages: list[str], methods: set[str], most: float) -> None:
    """Seed by seed, so that one is whole before the next begins; text has one seed."""
    for seed in seeds:
        for spec in specs:
            if spec.network == "minilm" and seed:
                continue
            for stage in stages:
                if stage in WIDE:
                    wide(spec, seed, stage)
                elif stage == "tails":
                    tails(spec, seed, methods, most)
                elif stage == "direct":
                    for rank in RANKED:
                        if not methods or f"direct-r{rank}" in methods:
                            direct(spec, seed, rank)
                elif stage == "ablation":
                    ablation(spec, seed)
                else:
                    control(spec, seed)


def main() -> None:
    global WORK
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("rates", "run", "latency", "status", "page"))
    parser.add_argument("--data", default=",".join(SPECS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--stages", default="wide,tails,direct", help=f"of {', '.join(STAGES)}; all others need wide")
    parser.add_argument("--methods", default="", help="of tails and direct learning, by name; by default all")
    parser.add_argument("--most", type=float, default=1.0, help="the largest density of the tails")
    parser.add_argument("--work", type=Path, default=WORK)
    options = parser.parse_args()
    import codes_page  # they need what is above
    import codes_paper
    import codes_rates

    WORK = options.work
    torch.set_num_threads(1)
    specs = [SPECS[name] for name in options.data.split(",")]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if options.command == "rates":
        for spec in specs:
            codes_rates.search(spec)
    elif options.command == "run":
        methods = set(filter(None, options.methods.split(",")))
        stages = options.stages.split(",")
        if unknown := set(stages) - set(STAGES):
            parser.error(f"no stages: {', '.join(sorted(unknown))}; expected some of {', '.join(STAGES)}")
        run_all(specs, seeds, stages, methods, options.most)
    elif options.command == "latency":
        for spec in specs:
            latency(spec, seeds[0])
    elif options.command == "status":
        print("\n".join(codes_page.status()))
    else:
        codes_page.write(ROOT / "docs")
        codes_paper.write(ROOT, codes_page.collected())


if __name__ == "__main__":
    import codes  # one module for all that import it

    codes.main()
