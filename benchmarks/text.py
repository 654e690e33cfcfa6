"""Texts on a frozen MiniLM: fine-tuning, fine-pruning, PEFT's LoRA, SPLoRA, and fine-pruning within a budget of bytes.

SST-2, TREC and Banking77 at 100, 50 and 30% of the MACs. What is measured: test accuracy, bytes of the task's file,
processor seconds of training, and the latency of one text of 32 and of 128 tokens, eager and in onnxruntime. Every
figure is a JSON file of its own, so that a run that was stopped goes on where it was. Runs are Spalier's own; LoRA is
PEFT's, on the same batches.

    python benchmarks/text.py rates
    python benchmarks/text.py run --data trec --seeds 0
    python benchmarks/text.py status
    python benchmarks/text.py page

Data and weights are in ../shared, or where SPALIER_DATA and SPALIER_WEIGHTS say.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(os.environ.get("SPALIER_ROOT", Path(__file__).resolve().parents[1]))
sys.path[:0] = [str(ROOT / "tools")]

import torchvision_ops  # noqa: E402

import spalier as sp  # noqa: E402
from spalier.benching import Benchmark  # noqa: E402
from spalier.data import Data, Loader, open_data  # noqa: E402
from spalier.inputs import call, tokens  # noqa: E402
from spalier.networks import logits_of, open_network  # noqa: E402
from spalier.runs.learning import SHARED, lr_factor  # noqa: E402

torchvision_ops.declare()  # transformers and peft look for torchvision as they are imported
DATA = Path(os.environ.get("SPALIER_DATA", ROOT.parent / "shared" / "data"))
WEIGHTS = Path(os.environ.get("SPALIER_WEIGHTS", ROOT.parent / "shared" / "weights"))
RESULTS = ROOT / "benchmarks" / "results" / "text"
WORK = Path(__file__).parent / "work"
PAGE, NOTEBOOK = ROOT / "docs" / "text.md", ROOT / "notebooks" / "trec.ipynb"
DENSITIES = (1.0, 0.5, 0.3)
BUDGET = 900_000
"""Bytes of a task file: a hundredth of the base in float32, a fiftieth of its published file in 16 bits."""
LENGTHS = (32, 128)
RANK, ROUND_TO = 8, 32
"""The rank of adapters, and what widths are multiples of: 381 channels take onnxruntime as long as 384."""
TRIED = {
    ("trec", "fine-pruning"): (1e-4, 3e-4, 6e-4),
    ("trec", "splora"): (1e-3, 2e-3, 4e-3),
    ("trec", "lora"): (1e-3, 2e-3, 4e-3),
    ("sst2", "fine-pruning"): (5e-5, 1e-4, 3e-4),
    ("banking77", "fine-pruning"): (3e-4, 6e-4),
}
RATES = {"fine-pruning": 3e-4, "splora": 2e-3, "lora": 2e-3}
"""Those of the tried ones that are best on TREC's validation questions."""


@dataclass(frozen=True)
class Spec:
    """A data set, and for how many epochs everything learns on it."""

    name: str
    title: str
    epochs: int = 2
    """Before the first prune."""
    per_prune: int = 1
    refit: int = 1
    samples: int | None = None
    """How many of the training samples are used, validation included; all, if None."""
    faster: float = 1.0
    """What rates are multiplied by: many classes need larger steps, two classes smaller ones."""
    learning_on: float = 0.5
    """What the rate is multiplied by once a network is written within bytes: it begins near a good place."""

    @property
    def all_epochs(self) -> int:
        """What the network with half of the MACs has learned for, once it is written within a budget of bytes."""
        return self.epochs + self.per_prune + self.refit

    def rate(self, method: str) -> float:
        return self.faster * RATES[method]


SPECS = {
    spec.name: spec
    for spec in (
        Spec("trec", "TREC, 6 kinds of questions"),
        Spec("sst2", "SST-2, 2 sentiments", samples=4000, faster=1 / 3, learning_on=1.0),
        Spec("banking77", "Banking77, 77 intents", epochs=3, samples=5000, faster=2.0),
    )
}
TITLES = {
    "fine-pruning": "fine-tuning, fine-pruning",
    "longer": "fine-tuning, as many epochs as all that led to 50% within bytes",
    "bytes": f"the same, written within {BUDGET:,} bytes",
    "splora": f"SPLoRA, rank {RANK}",
    "lora": f"LoRA by PEFT, rank {RANK}",
}
"""At 100% nothing is pruned: fine-pruning is fine-tuning there; LoRA and fine-tuning for longer are there alone."""
SEEDS = {"longer": 1}
"""How many seeds are asked for, where that is not three."""


def network() -> str:
    return f"hf:{WEIGHTS / 'minilm-l6-v2'}"


def settings(spec: Spec, seed: int, **more: Any) -> sp.TransferPruning:
    shared = {"data": f"text:{DATA / 'text' / spec.name}", "network": network(), "seed": seed, "trackers": ()}
    shared |= {"checkpoint_seconds": 600.0}  # each takes as long as many steps
    shared |= {"select_options": {"round_to": ROUND_TO}}
    shared |= {"max_train_samples": spec.samples} if spec.samples else {}
    epochs = {"epochs": spec.epochs, "epochs_per_prune": spec.per_prune, "refit_epochs": spec.refit}
    return sp.TransferPruning(**{**shared, **epochs, "densities": DENSITIES[1:], "score_samples": 256, **more})


# cells


def cell(spec: Spec, density: float, method: str, seed: int) -> Path:
    return RESULTS / f"{spec.name}-{100 * density:g}-{method}-seed{seed}.json"


def write(spec: Spec, density: float, method: str, seed: int, found: dict[str, Any]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    said = {"data": spec.name, "density": density, "method": method, "seed": seed}
    cell(spec, density, method, seed).write_text(json.dumps({**said, **found}, indent=1) + "\n")
    print(spec.name, density, method, seed, json.dumps(found), flush=True)


class Timed(sp.runs.Engine):
    """An engine whose rows say how many processor seconds the run has taken; wall clocks lie on a busy machine.

    A run that was stopped counts on from its last row: what it had done since then is not in the figures.
    """

    def run(self, progress: bool) -> list[dict[str, Any]]:
        self.began = time.process_time()
        self.earlier: float | None = None
        return super().run(progress)

    def make_row(self) -> dict[str, Any]:
        if self.earlier is None:  # rows that another process has made
            self.earlier = self.rows[-1]["cpu_seconds"] if self.rows else 0.0
        return {**super().make_row(), "cpu_seconds": round(self.earlier + time.process_time() - self.began, 2)}


def folder_of(spec: Spec, method: str, seed: int) -> Path:
    return WORK / "text" / f"{spec.name}-{method}-seed{seed}"


def pruned(spec: Spec, method: str, seed: int) -> None:
    """A run at all densities: fine-pruning, whose first block is fine-tuning, or SPLoRA."""
    carry_out(spec, method, seed, DENSITIES, method=method, rank=RANK, lr=spec.rate(method))


def longer(spec: Spec, seed: int) -> None:
    """The control: nothing is pruned, and what is fine-tuned has as many epochs as what is pruned and refit."""
    more: dict[str, Any] = {"epochs": spec.all_epochs, "densities": (), "lr": spec.rate("fine-pruning")}
    carry_out(spec, "longer", seed, DENSITIES[:1], method="fine-pruning", **more)


def carry_out(spec: Spec, row: str, seed: int, shown: tuple[float, ...], **more: Any) -> None:
    if all(cell(spec, density, row, seed).exists() for density in shown):
        return
    run = settings(spec, seed, **more)
    try:
        run.run(folder_of(spec, row, seed), engine=Timed, progress=False)
    finally:  # what is done is done, also where the rest was stopped
        write_rows(spec, row, seed, run.lr)


def write_rows(spec: Spec, method: str, seed: int, lr: float) -> None:
    """A cell for each density that a run has come to."""
    lines = (folder_of(spec, method, seed) / "metrics.jsonl").read_text().splitlines()
    for row in (found for found in map(json.loads, lines) if found["kind"] == "block"):
        keep = ("test", "validation", "bytes", "learned", "macs", "weights", "epochs")
        found = {name: row[name] for name in keep} | {"seconds": row["cpu_seconds"], "lr": lr}
        write(spec, DENSITIES[row["block"]], method, seed, found)


def task_file(spec: Spec, method: str, seed: int, density: float) -> Path:
    name = f"{spec.name}-{100 * density:g}" if method != "bytes" else f"{spec.name}-start"
    folder = folder_of(spec, method if method != "bytes" else f"bytes-{100 * density:g}", seed)
    return folder / "tasks" / f"{name}.task.safetensors"


def within_bytes(spec: Spec, seed: int, density: float) -> None:
    """What fine-pruning has learned, written within a budget of bytes; it learns on with that as its teacher."""
    if cell(spec, density, "bytes", seed).exists():
        return
    start = task_file(spec, "fine-pruning", seed, density)
    rate = spec.learning_on * spec.rate("fine-pruning")
    run = settings(spec, seed, codes=(f"bytes-{BUDGET}",), start_task=str(start), densities=(), refit_lr=rate)
    row = run.run(folder_of(spec, f"bytes-{100 * density:g}", seed), engine=Timed, progress=False).rows[-1]
    keep = ("test", "validation", "bytes", "learned", "macs", "weights")
    spent = {"seconds": row["cpu_seconds"], "lr": run.refit_lr, "epochs": spec.refit}
    write(spec, density, "bytes", seed, {**{name: row[name] for name in keep}, **spent})


def lora(spec: Spec, seed: int) -> None:
    """PEFT's LoRA on all linear layers, unpruned: the same batches, warm-up and number of epochs."""
    if not cell(spec, 1.0, "lora", seed).exists():
        write(spec, 1.0, "lora", seed, lora_at(spec, seed, spec.rate("lora")))


def lora_at(spec: Spec, seed: int, rate: float) -> dict[str, Any]:
    import peft

    data = opened(spec, seed)
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=RANK, lora_alpha=RANK, target_modules="all-linear", modules_to_save=["classifier"]
    )
    torch.manual_seed(seed)
    net = peft.get_peft_model(open_network(network(), classes=len(data.classes), seed=seed), config)
    start = time.process_time()
    # what remains after the last whole batch is seen too, as in a run
    learn_(net, Loader(data.train, 32, seed, drop_last=False, round_last=SHARED), spec.epochs, rate)
    with tempfile.TemporaryDirectory() as folder:
        net.save_pretrained(folder)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    learned = sum(p.numel() for p in net.parameters() if p.requires_grad)
    found = {"test": accuracy(net, data.test), "validation": accuracy(net, data.validation), "bytes": size}
    spent = {"seconds": round(time.process_time() - start, 2), "lr": rate, "epochs": spec.epochs}
    return {**found, "learned": learned, "macs": 1.0, "weights": 1.0, **spent}


def opened(spec: Spec, seed: int) -> Data:
    data = f"text:{DATA / 'text' / spec.name}"
    return open_data(data, tokenizer=network(), max_train_samples=spec.samples, seed=seed)


def learn_(net: nn.Module, loader: Loader, epochs: int, lr: float) -> None:
    parameters = [p for p in net.parameters() if p.requires_grad]
    spared = [p for n, p in net.named_parameters() if p.requires_grad and n.endswith("bias")]
    decaying = [p for p in parameters if all(p is not other for other in spared)]
    groups = [{"params": decaying, "weight_decay": 0.01}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    steps = epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor("cosine", step, steps, 0.2 * len(loader))
    )
    net.train()
    for epoch in range(epochs):
        for inputs, labels in loader.epoch(epoch):
            optimizer.zero_grad()
            F.cross_entropy(logits_of(call(net, inputs)), labels).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
    net.eval()


@torch.inference_mode()
def accuracy(net: nn.Module, split: Any) -> float:
    right = 0
    for inputs, labels in Loader(split, 64, shuffle=False, drop_last=False).epoch(0):
        right += int((logits_of(call(net, inputs)).argmax(1) == labels).sum())
    return right / len(split)


def search_rates() -> None:
    """Nothing is pruned, one seed: what each method learns best at, by its validation texts."""
    for (name, method), tried in TRIED.items():
        spec = SPECS[name]
        for rate in tried:
            file = RESULTS / f"rates-{name}-{method}-{rate:g}.json"
            if file.exists():
                continue
            if method == "lora":
                found = lora_at(spec, 0, rate)
            else:
                run = settings(spec, 0, method=method, rank=RANK, lr=rate, densities=())
                found = run.run(folder_of(spec, f"{method}-{rate:g}", 0), progress=False).rows[-1]
            known = {"data": name, "tried": method, "lr": rate, "epochs": spec.epochs}
            file.write_text(json.dumps(known | {k: found[k] for k in ("validation", "test")}, indent=1) + "\n")


def latency(spec: Spec, seed: int) -> None:
    """One text in the base, and in the fine-pruned network of each density; in turns, processor seconds, one thread."""
    file = RESULTS / f"{spec.name}-latency-seed{seed}.json"
    if file.exists():
        return
    tasks = {f"{100 * d:g}": sp.Task.load(task_file(spec, "fine-pruning", seed, d)) for d in DENSITIES[1:]}
    net = open_network(network(), seed=seed)
    found = {}
    for length in LENGTHS:
        options: dict[str, Any] = {"batches": (1,), "backends": ("eager", "onnxruntime"), "rounds": 15, "threads": 1}
        seen = sp.bench(net, tasks, tokens(1, length), clock=time.process_time, **options)
        found[str(length)] = {name: latencies(seen, name) for name in ("base", *tasks)}
    file.write_text(json.dumps({"data": spec.name, "seed": seed, "ms": found}, indent=1) + "\n")


def latencies(seen: Benchmark, name: str) -> dict[str, Any]:
    """Milliseconds by backend, and the speed-up over the base with its interval."""
    said: dict[str, Any] = {}
    for backend in ("eager", "onnxruntime"):
        timing = seen.timing(name, backend, 1)
        said[backend] = {"ms": round(1e3 * timing.latency, 3)} if timing.seconds else {"failed": timing.problem}
        if name != "base" and timing.seconds:
            against = seen.comparison(name, backend, 1)
            said[backend] |= {"faster": against.speedup, "low": against.low, "high": against.high}
    return said


def jobs(spec: Spec, seed: int) -> dict[str, Callable[[], None]]:
    """The half comes first: what is to be reached is said of it."""
    budgets = {f"bytes-{100 * d:g}": partial(within_bytes, spec, seed, d) for d in (0.3, 1.0)}
    return {
        "fine-pruning": lambda: pruned(spec, "fine-pruning", seed),
        "latency": lambda: latency(spec, seed),
        "bytes-50": lambda: within_bytes(spec, seed, 0.5),
        "splora": lambda: pruned(spec, "splora", seed),
        "lora": lambda: lora(spec, seed),
        **budgets,
        **({"longer": lambda: longer(spec, seed)} if seed < SEEDS["longer"] else {}),
    }


# the page


def collected() -> dict[tuple[str, float, str], list[dict[str, Any]]]:
    found: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for file in sorted(RESULTS.glob("*-seed*.json")):
        read = json.loads(file.read_text())
        if "method" in read:
            found.setdefault((read["data"], read["density"], read["method"]), []).append(read)
    return found


def wanted() -> Iterator[tuple[str, float, str]]:
    for name in SPECS:
        for density in DENSITIES:
            yield from ((name, density, m) for m in TITLES if m not in ("lora", "longer") or density == 1)


def status() -> list[str]:
    found = collected()
    return [
        f"{name} {density:.0%} {m}: {len(found.get((name, density, m), []))} of {SEEDS.get(m, 3)}"
        for name, density, m in wanted()
    ]


def mean(values: list[float], digits: int = 1) -> str:
    spread = f" ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def table_of(spec: Spec) -> list[str]:
    """Accuracy, MACs, bytes and seconds of every method."""
    lines = ["| method | MACs, at most | left, % | accuracy, % | bytes | seconds | seeds |", "|---" * 7 + "|"]
    found = collected()
    for name, density, method in wanted():
        cells = found.get((name, density, method), [])
        if name != spec.name or not cells:
            continue
        right = mean([100 * each["test"] for each in cells])
        size = f"{round(statistics.mean(each['bytes'] for each in cells)):,}"
        spent = mean([each["seconds"] for each in cells], 0)
        left = f"{100 * statistics.mean(each['macs'] for each in cells):.1f}"
        lines.append(f"| {TITLES[method]} | {density:.0%} | {left} | {right} | {size} | {spent} | {len(cells)} |")
    return lines if len(lines) > 2 else ["Nothing has been measured yet."]


def latency_table() -> list[str]:
    lines = ["| data | network | tokens | eager, ms | onnxruntime, ms |", "|---|---|---|---|---|"]
    for file in sorted(RESULTS.glob("*-latency-*.json")):
        read = json.loads(file.read_text())
        for length, nets in read["ms"].items():
            for name, by_backend in nets.items():
                shown = [timing_words(by_backend[backend]) for backend in ("eager", "onnxruntime")]
                title = "the base" if name == "base" else f"{name}% of the MACs"
                lines.append(f"| {SPECS[read['data']].title} | {title} | {length} | {' | '.join(shown)} |")
    return lines if len(lines) > 2 else ["Nothing has been measured yet."]


def timing_words(said: dict[str, Any]) -> str:
    if "ms" not in said:
        return "failed"
    faster = f" ({said['faster']:.2f}x; {said['low']:.2f} to {said['high']:.2f})" if "faster" in said else ""
    return f"{said['ms']:.2f}{faster}"


BASE_BYTES = 4 * 22_713_216
"""Of the base in float32; as it is published, in 16 bits, it has half of them."""


def goals() -> list[str]:
    """What half of the MACs was to reach, and what came of it; all figures from the cells."""
    heads = ["points against fine-tuning", "and for as many epochs", "of the base's bytes", "faster, 32 and 128 tokens"]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    found = collected()
    for spec in SPECS.values():
        ours = {cell["seed"]: cell for cell in found.get((spec.name, 0.5, "bytes"), [])}
        against = [points(ours, found.get((spec.name, 1.0, method), [])) for method in ("fine-pruning", "longer")]
        size = max((cell["bytes"] for cell in ours.values()), default=0)
        share = f"1/{BASE_BYTES / size:.0f}" if size else "-"
        lines.append(f"| {spec.title.partition(',')[0]} | {' | '.join([*against, share, speedups(spec)])} |")
    return [*lines, "| to reach | -1.0 | | 1/50 | 1.80x |"]


def points(ours: dict[int, dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """Points of accuracy above others with the same seeds."""
    leads = [100 * (ours[cell["seed"]]["test"] - cell["test"]) for cell in others if cell["seed"] in ours]
    return f"{'+' if statistics.mean(leads) > 0 else ''}{mean(leads)}" if leads else "-"


def speedups(spec: Spec) -> str:
    """How many times as fast as the base half of the MACs is in onnxruntime, the mean over seeds, by length."""
    read = [json.loads(file.read_text())["ms"] for file in sorted(RESULTS.glob(f"{spec.name}-latency-*.json"))]
    by_length = [[found[str(n)]["50"]["onnxruntime"].get("faster") for found in read] for n in LENGTHS]
    return ", ".join(f"{statistics.mean(each):.2f}x" if each and all(each) else "-" for each in by_length)


def notebook_cell() -> str:
    """The table of TREC, for the end of the notebook."""
    return "\n".join(
        [
            *("## The real one", ""),
            "all-MiniLM-L6-v2 on TREC, as `benchmarks/text.py` has measured it. [Texts,",
            "measured](../docs/text.md) has two more data sets, and how it was done.",
            "",
            *table_of(SPECS["trec"]),
        ]
    )


def write_pages() -> None:
    """The page, and the table at the end of the notebook where there is one."""
    PAGE.write_text(page(), encoding="utf-8")
    if NOTEBOOK.is_file():
        notebook = json.loads(NOTEBOOK.read_text("utf-8"))
        notebook["cells"][-1]["source"] = notebook_cell().splitlines(keepends=True)
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def rates_table() -> list[str]:
    lines = ["| data | method | rate: validation, test |", "|---|---|---|"]
    for (name, method), tried in TRIED.items():
        files = [RESULTS / f"rates-{name}-{method}-{rate:g}.json" for rate in tried]
        found = [json.loads(file.read_text()) for file in files if file.exists()]
        said = "; ".join(f"{c['lr']:g}: {100 * c['validation']:.1f}, {100 * c['test']:.1f}" for c in found)
        title = "fine-tuning" if method == "fine-pruning" else TITLES[method]
        lines.append(f"| {SPECS[name].title.partition(',')[0]} | {title} | {said or 'not measured yet'} |")
    return lines


INTRODUCTION = """
# Texts, measured

A frozen MiniLM (all-MiniLM-L6-v2: 6 layers, 22.7 M parameters, 90.9 MB in float32, 45.5 MB as it is
published) learns three data sets, and loses half and 70% of its MACs. `python benchmarks/text.py page`
writes this page from `benchmarks/results/text`.

## In short

What half of the MACs, written within 900,000 bytes, was to reach, and what came of it. The points are
those of the test texts against unpruned fine-tuning: the one that pruning starts from, and one that
has as many epochs as pruning, learning on and refitting took together (one seed). The speed is that of
one text in onnxruntime against the unpruned base.
"""
NOTES = """
## How it was done

- Embeddings stay frozen in all rows. LoRA and SPLoRA have rank 8 on all linear layers; SPLoRA learns the
  norms too.
- Accuracy is that of the test split, of the network that is built from the task file. ± is the standard
  error over seeds. The test texts alone give it one of 0.9 (TREC), 0.8 (SST-2) and 0.6 points (Banking77).
- Seconds are processor seconds of one thread from the start of the run to that row. Those within a budget
  of bytes come on top of fine-pruning's.
- All have the same batches of 32 texts, AdamW, a warm-up of a fifth of an epoch and a cosine. Two epochs
  before the first prune (Banking77: three), one after each prune, and one with the wide network as teacher
  for what is written within a budget of bytes.
- TREC is whole; of SST-2 4,000 training sentences are used, of Banking77 5,000 requests. Where a set has no
  validation texts, a tenth of its training texts is held out.
- Widths are multiples of 32 (`select_options: {round_to: 32}`), so fewer MACs are left than were asked for. With any
  width, half of the MACs is 381 channels wide, which onnxruntime takes as long for as for 384.
- What is written within a budget learns on at half of the rate that it had before; on SST-2 at all of it. Half of the
  MACs there, one seed, validation and test sentences: 84.4 and 85.9% at half of the rate, 84.7 and 86.2 at all of it,
  84.3 and 86.5 at twice as much. Also tried, at half: two epochs instead of one (85.1 and 85.6), and fine-pruning
  with two epochs after the prune (84.3 and 86.2), with a prune to 75% before it (85.1 and 86.1), or with the unpruned
  network as its teacher (84.1 and 85.7). A point here or there says nothing in these.
- Budgets of TREC and Banking77 were spent before signs came first ([codes](codes.md#small-budgets)); half of the MACs
  of SST-2, before it learns on, has 85.1% either way.
- In ONNX files attention is one operator. With the five that it was before, 128 tokens were 1.77 to 1.78 times as fast
  as in the base.
- MACs are counted for a text of typical length, in whole eights: 16 tokens on TREC and Banking77, 24 on SST-2.
"""


def page() -> str:
    missing = [line for line in status() if int(line.split()[-3]) < int(line.split()[-1])]
    lines = [
        *(*INTRODUCTION.strip().splitlines(), "", *goals(), ""),
        *(line for spec in SPECS.values() for line in (f"## {spec.title}", "", *table_of(spec), "")),
        *("## Latency of one text", ""),
        "Medians of fifteen rounds in turns, processor time of one thread; in brackets how many times as fast",
        "as the base in the same rounds, with an interval of 95%. The networks are those of fine-pruning.",
        "",
        *(*latency_table(), ""),
        *("## Rates", ""),
        "Nothing is pruned, seed 0. The best on validation texts is taken. SPLoRA and LoRA were tried on TREC alone:",
        "SST-2 has a third of their rates there, and Banking77 twice as much, as fine-tuning them showed.",
        "",
        *(*rates_table(), *NOTES.rstrip().splitlines()),
    ]
    if missing:
        lines += ["", "## What is missing", "", "Seeds that are still to be measured:", ""]
        lines += [f"- {line}" for line in missing]
    return "\n".join(lines) + "\n"


def main() -> None:
    global WORK, ROUND_TO
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("rates", "run", "status", "page"))
    parser.add_argument("--data", default=",".join(SPECS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default="", help="some of fine-pruning, latency, splora, lora, longer, bytes-50, ...")
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--round-to", type=int, default=ROUND_TO, help="widths are multiples of this; 1 for tiny ones")
    options = parser.parse_args()
    WORK, ROUND_TO = options.work, options.round_to
    torch.set_num_threads(1)
    if options.command == "status":
        print("\n".join(status()))
    elif options.command == "rates":
        search_rates()
    elif options.command == "page":
        write_pages()
    else:
        for seed in map(int, options.seeds.split(",")):
            for name in options.data.split(","):
                for job, start in jobs(SPECS[name], seed).items():
                    if not options.only or job in options.only.split(","):
                        start()


if __name__ == "__main__":
    main()
