"""What a switch costs, and what the switched-to network is worth: ResNet-50, rank 8.

    python3 dev.py bench-switching

*Cold* activation goes from a file (in the page cache) to a ready network. The contenders take turns in one run:

- Spalier: ``Switcher.activate`` of a task whose network is not there; tasks that were learned alike share their layer
  table, which is parsed once, so the first of its kind takes longer;
- the naive way: deepcopy the base, attach, prune (the plan is known, nothing is compared), load the tensors, fuse;
- PEFT: ``load_adapter`` of a LoRA of the same rank on the same layers, and ``merge_adapter``; it prunes nothing;
- copying 64 MiB between two places in memory that both were written before.

*Codes* compares the cold activation of tasks of few bits for each weight with that of SPLoRA, at 30% of the channels.
They take turns too: what else the machine does disturbs all of them alike, so the ratios are what counts.

*Inference* compares the built network with a network of the same shapes that was made by its constructors, and with the
unpruned base: eager, compiled, and in onnxruntime.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads wait by turning, which counts as work
import torch
import torchvision_ops
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import spalier as sp
from spalier.structure.structure import Structure
from spalier.tasks import StoreReport, TaskCost
from spalier.tasks import table as tables

torchvision_ops.declare()  # peft looks for torchvision as it is imported

RESULTS = Path(__file__).parent / "results" / "switching.json"
DENSITIES = (1.0, 0.3, 0.1)
SPEEDS = (0.5, 0.3, 0.1)
EXAMPLE = torch.zeros(2, 3, 32, 32)
CODED = {
    "SPLoRA r8": sp.SPLoRA(rank=8),
    "SPDelta 1 bit": sp.SPDelta(bits=1),
    "SPDelta 2 bits": sp.SPDelta(bits=2),
    "SPDelta 4 bits": sp.SPDelta(bits=4),
}
CODED_DENSITY = 0.3
Run = Callable[[], Any]


def make(
    density: float, base: nn.Module, structure: Structure, adapter: Any = CODED["SPLoRA r8"]
) -> tuple[nn.Module, sp.Plan]:
    """A network that has learned something, with this share of each stream's channels left."""
    net = copy.deepcopy(base)
    sp.attach_(net, adapter, head="fc")
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                # what is rounded stays near the middle levels, as it does where a network learns
                size = 3e-4 if name.endswith("adapter.delta") else 0.02
                parameter.add_(torch.randn_like(parameter) * size)
        for name, buffer in net.named_buffers():
            if name.endswith("num_batches_tracked"):
                buffer += 1234
    units = {s.name: torch.randperm(s.size)[: max(1, int(s.size * density))].tolist() for s in structure.streams}
    plan = sp.Plan(structure, units)
    sp.prune_(net, plan, check=False)
    return net.eval(), plan


def naive(base: nn.Module, plan: sp.Plan, path: Path) -> nn.Module:
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=8), head="fc")
    sp.prune_(net, plan, check=False)
    net.load_state_dict(load_file(path), strict=False)
    return sp.fuse(net)


class Peft:
    """A LoRA of rank 8 on every convolution, with the head in full, as a file."""

    def __init__(self, base: nn.Module, folder: Path) -> None:
        from peft import LoraConfig, get_peft_model

        names = [name for name, m in base.named_modules() if isinstance(m, nn.Conv2d)]
        config = LoraConfig(r=8, lora_alpha=8, target_modules=names, modules_to_save=["fc"])
        self.net = get_peft_model(copy.deepcopy(base), config)
        self.folder = str(folder / "peft")
        self.net.save_pretrained(self.folder)
        self.count = 0

    def load(self) -> None:
        self.count += 1
        self.net.load_adapter(self.folder, f"task{self.count}")

    def merge(self) -> None:
        self.net.set_adapter(f"task{self.count}")
        self.net.merge_adapter()

    def unmerge_(self) -> None:
        self.net.unmerge_adapter()
        self.net.set_adapter("default")
        self.net.delete_adapter(f"task{self.count}")


def timed(run: Run) -> tuple[float, Any]:
    start = time.process_time()
    made = run()
    return time.process_time() - start, made


def switching(repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    base = sp.models.resnet50(classes=10, stem="cifar").eval()
    structure = sp.trace(base, EXAMPLE)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peft = Peft(base, folder)
        for density in DENSITIES:
            net, plan = make(density, base, structure)
            rows.append(switch_row(base, net, plan, density, folder / f"{density:g}", peft, repeats))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def switch_row(
    base: nn.Module, net: nn.Module, plan: sp.Plan, density: float, folder: Path, peft: Peft, repeats: int
) -> dict[str, Any]:
    store = sp.Store(folder)
    task = sp.Task.of(net, "a")
    for each in ("a", "b"):
        store.add(task, each)
    learned = {key: value for key, value in net.state_dict().items() if _is_learned(net, key)}
    save_file(learned, folder / "naive.safetensors")
    switcher = sp.Switcher(base, store, limit=0)  # keeps the active network only, so each activation is a cold one
    warm = sp.Switcher(base, store)
    source, target = torch.ones(1 << 24), torch.ones(1 << 24)
    turn = iter(range(10**9))
    runs: dict[str, Run] = {
        "Spalier": lambda: switcher.activate("ab"[next(turn) % 2]),
        "Spalier, first of its kind": lambda: first_of_its_kind(lambda: switcher.activate("ab"[next(turn) % 2])),
        "Task.load and build": lambda: sp.Task.load(store.path("a")).build(base),
        "naive": lambda: naive(base, plan, folder / "naive.safetensors"),
        "PEFT, load_adapter": peft.load,
        "PEFT, set and merge": peft.merge,
        "copy 64 MiB": lambda: target.copy_(source),
    }
    check(runs["Spalier"](), runs["naive"]())
    times: dict[str, list[float]] = {each: [] for each in runs}
    gc.collect()
    gc.freeze()  # what the peers have imported is not to be looked through on everyone's account
    for _ in range(repeats):
        for each, run in runs.items():
            seconds, made = timed(run)
            times[each].append(seconds)
            del made
        peft.unmerge_()
    warm.activate("a"), warm.activate("b")
    start = time.perf_counter()
    for number in range(2000):
        warm.activate("ab"[number % 2])
    microseconds = (time.perf_counter() - start) / 2000 * 1e6
    ratio = [a / b for a, b in zip(times["naive"], times["Spalier"], strict=True)]
    copies = [a / b for a, b in zip(times["Spalier"], times["copy 64 MiB"], strict=True)]
    return {
        "channels": density,
        "milliseconds": {each: round(statistics.median(t) * 1e3, 2) for each, t in times.items()},
        "naive : spalier": round(statistics.median(ratio), 1),
        "spalier : copy 64 MiB": round(statistics.median(copies), 2),
        "warm microseconds": round(microseconds, 1),
        "bytes": {s: len(task.to_bytes(storage=s)) for s in ("exact", "fp16", "bf16", "int8")},
        "weights": task.info.density.weights,
    }


def alternating(switcher: sp.Switcher) -> Run:
    """Activates one of two tasks, which is never the active one."""
    turn = iter(range(10**9))
    return lambda: switcher.activate("ab"[next(turn) % 2])


def codes(repeats: int) -> list[dict[str, Any]]:
    """The cold activation of tasks with other adapters, by turns."""
    torch.manual_seed(0)
    base = sp.models.resnet50(classes=10, stem="cifar").eval()
    structure = sp.trace(base, EXAMPLE)
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, Run] = {}
        sizes = {}
        for number, (name, adapter) in enumerate(CODED.items()):
            net, _ = make(CODED_DENSITY, base, structure, adapter)
            task = sp.Task.of(net, "a", structure=structure)
            for storage in ("exact", "int8-all"):
                title = f"{name}, {storage}"
                store = sp.Store(Path(folder) / f"{number}-{storage}")
                for each in ("a", "b"):
                    store.add(task, each, storage=storage)
                runs[title] = alternating(sp.Switcher(base, store, limit=0))
                sizes[title] = store.path("a").stat().st_size
                if storage == "exact":
                    check(runs[title](), sp.fuse(net))
                else:
                    runs[title]()
        title = "SPDelta 1 bit, exact, first of its table"
        sizes[title] = sizes["SPDelta 1 bit, exact"]
        rare = {
            "parse what was forgotten": runs["SPLoRA r8, exact"],
            "SPLoRA r8, exact": runs["SPLoRA r8, exact"],
            title: lambda: first_of_its_kind(runs["SPDelta 1 bit, exact"]),
        }
        gc.collect()
        gc.freeze()
        often, seldom = by_turns(runs, repeats), by_turns(rare, repeats)
    compared = {name: (measured, often["SPLoRA r8, exact"]) for name, measured in often.items()}
    compared[title] = seldom[title], seldom["SPLoRA r8, exact"]
    return [
        {
            "adapter": name,
            "channels": CODED_DENSITY,
            "milliseconds": round(statistics.median(measured) * 1e3, 2),
            "to SPLoRA r8": round(statistics.median(a / b for a, b in zip(measured, first, strict=True)), 3),
            "bytes": sizes[name],
        }
        for name, (measured, first) in compared.items()
    ]


def by_turns(runs: dict[str, Run], repeats: int) -> dict[str, list[float]]:
    """Seconds of each, in turns."""
    times: dict[str, list[float]] = {each: [] for each in runs}
    for _ in range(repeats):
        for each, run in runs.items():
            seconds, made = timed(run)
            times[each].append(seconds)
            del made
    return times


def first_of_its_kind(activate: Run) -> Any:
    """With a layer table that was not seen before."""
    tables._remembered.cache_clear()
    return activate()


def _is_learned(net: nn.Module, key: str) -> bool:
    path, _, name = key.rpartition(".")
    module = net.get_submodule(path)
    tensor = getattr(module, name)
    return bool(tensor.requires_grad) or not isinstance(tensor, nn.Parameter)


@torch.no_grad()
def check(one: nn.Module, other: nn.Module) -> None:
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(one(x), other(x), rtol=1e-3, atol=1e-3)


# inference


def fresh_like(net: nn.Module) -> nn.Module:
    """A network of the same shapes, every layer of which was made by its constructor."""
    made = sp.models.resnet50(classes=10, stem="cifar")
    for path, module in net.named_modules():
        layer: nn.Module
        if isinstance(module, nn.Conv2d):
            layer = nn.Conv2d(
                module.in_channels,
                module.out_channels,
                module.kernel_size,  # type: ignore[arg-type]
                module.stride,  # type: ignore[arg-type]
                module.padding,  # type: ignore[arg-type]
                bias=module.bias is not None,
            )
        elif isinstance(module, nn.BatchNorm2d):
            layer = nn.BatchNorm2d(module.num_features)
        elif isinstance(module, nn.Linear):
            layer = nn.Linear(module.in_features, module.out_features)
        else:
            continue
        parent, _, name = path.rpartition(".")
        setattr(made.get_submodule(parent), name, layer)
    return made.eval()


def onnx_run(net: nn.Module, x: Tensor, folder: Path) -> Run:
    import onnxruntime

    path = folder / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (x,), str(path), dynamo=True, verbose=False, external_data=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)


def backend(kind: str, net: nn.Module, x: Tensor, folder: Path) -> Run:
    if kind == "onnxruntime":
        return onnx_run(net, x, folder)
    if kind == "compiled":
        torch._dynamo.reset()
        net = torch.compile(net)  # type: ignore[assignment]
    return lambda: net(x)


def inference(kinds: list[str], batches: list[int], repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    base = sp.models.resnet50(classes=10, stem="cifar").eval()
    structure = sp.trace(base, EXAMPLE)
    nets: dict[str, nn.Module] = {"base": base}
    for density in SPEEDS:
        net, _ = make(density, base, structure)
        task = sp.Task.of(net, "a")
        nets[f"{density:.0%}"], nets[f"{density:.0%}, fresh"] = task.build(base), fresh_like(task.build(base))
        nets[f"{density:.0%}, folded"] = task.build(base, fold=True)
    rows = []
    for kind in kinds:
        chosen = {n: net for n, net in nets.items() if kind == "eager" or "," not in n}  # each compiles for a minute
        for batch in batches:
            rows.append(speed_row(kind, batch, chosen, repeats))
            print(json.dumps(rows[-1]), flush=True)
    return rows


@torch.no_grad()
def speed_row(kind: str, batch: int, nets: dict[str, nn.Module], repeats: int) -> dict[str, Any]:
    x = torch.randn(batch, 3, 32, 32)
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for number, (name, net) in enumerate(nets.items()):
            place = Path(folder) / str(number)
            place.mkdir()
            runs[name] = backend(kind, net, x, place)
            runs[name]()
            runs[name]()
        times: dict[str, list[float]] = {name: [] for name in runs}
        names = list(runs)
        for _ in range(repeats):
            for name in names:
                inner = 1 if name == "base" or batch > 1 else 5
                start = time.process_time()
                for _ in range(inner):
                    runs[name]()
                times[name].append((time.process_time() - start) / inner)
            names = [*names[1:], names[0]]

    def median(name: str, by: str) -> float:
        return round(statistics.median(a / b for a, b in zip(times[name], times[by], strict=True)), 3)

    shares = [f"{density:.0%}" for density in SPEEDS]
    folded = [s for s in shares if f"{s}, folded" in times]
    return {
        "backend": kind,
        "batch": batch,
        "base milliseconds": round(statistics.median(times["base"]) * 1e3, 1),
        "speed-up": {s: round(1 / median(s, "base"), 2) for s in shares},
        "speed-up, norms folded": {s: round(1 / median(f"{s}, folded", "base"), 2) for s in folded},
        "built : fresh": {s: median(s, f"{s}, fresh") for s in folded},
    }


def markdown(results: dict[str, Any], part: str) -> str:
    """A table for docs/tasks.md."""
    rows: list[list[str]]
    if part == "switching":
        measured = results["switching"]
        names = list(measured[0]["milliseconds"])
        head = [
            "channels",
            *(f"{name}, ms" for name in names),
            "naive : Spalier",
            "Spalier : copy",
            "warm, µs",
        ]
        rows = [
            [
                f"{row['channels']:.0%}",
                *(f"{row['milliseconds'][name]:.1f}" for name in names),
                f"{row['naive : spalier']:.1f}",
                f"{row['spalier : copy 64 MiB']:.2f}",
                f"{row['warm microseconds']:.0f}",
            ]
            for row in measured
        ]
    elif part == "codes":
        head = ["adapter, storage", "cold activation, ms", "to SPLoRA r8", "file, bytes"]
        rows = [
            [
                row["adapter"],
                f"{row['milliseconds']:.1f}",
                f"{row['to SPLoRA r8']:.2f}",
                f"{row['bytes']:,}",
            ]
            for row in results["codes"]
        ]
    elif part == "costs":
        head = ["channels", "d", "file, bytes", "a", "pays on disk from", "fp16", "int8"]
        rows = [_cost(row) for row in results["switching"]]
    else:
        shares = [f"{density:.0%}" for density in SPEEDS]
        head = ["backend", "batch", "base, ms"]
        head += [*shares, *(f"{s}, norms folded" for s in shares), *(f"{s}, built : fresh" for s in shares)]
        rows = [
            [
                row["backend"],
                str(row["batch"]),
                f"{row['base milliseconds']:.0f}",
                *(f"{row['speed-up'][s]:.1f}" for s in shares),
                *(_or_dash(row["speed-up, norms folded"].get(s), ".1f") for s in shares),
                *(_or_dash(row["built : fresh"].get(s), ".2f") for s in shares),
            ]
            for row in results["inference"]
        ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cost(row: dict[str, Any]) -> list[str]:
    kept, total = row["weights"]
    size, base = row["bytes"]["exact"], 4 * total
    report = StoreReport(base, (TaskCost("a", size, 4 * kept),))
    return [
        f"{row['channels']:.0%}",
        f"{kept / total:.4f}",
        f"{size:,}",
        f"{size / base:.4f}",
        f"{report.break_even} tasks",
        *(f"{row['bytes'][storage]:,}" for storage in ("fp16", "int8")),
    ]


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--part", choices=["switching", "codes", "inference", "all"], default="all")
    parser.add_argument("--backends", nargs="*", default=["eager", "compiled", "onnxruntime"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 64])
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"switching": [], "inference": []}
    results["machine"] = f"{platform.machine()}, torch {torch.__version__}, one thread, CPU time"
    if options.part in ("switching", "all"):
        results["switching"] = switching(options.repeats)
    if options.part in ("codes", "all"):
        results["codes"] = codes(options.repeats)
    if options.part in ("inference", "all"):
        fresh = inference(options.backends, options.batches, options.repeats)
        measured = {(row["backend"], row["batch"]) for row in fresh}
        kept = [row for row in results["inference"] if (row["backend"], row["batch"]) not in measured]
        results["inference"] = kept + fresh
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for part in ("switching", "costs", "codes", "inference"):
        if results.get("switching" if part == "costs" else part):
            print(f"\n{markdown(results, part)}")


if __name__ == "__main__":
    main()
