"""The demo: one base, three tasks, two methods, falling densities; everything in it is measured while it runs.

A small ResNet learns the digits 0 to 3 and is frozen. SPLoRA learns three further tasks on it as task files;
fine-pruning, which changes all weights, learns the same ones beside it. Then the one base serves all of them in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import nn

import spalier
from spalier import files
from spalier.errors import RunError
from spalier.networks import open_network
from spalier.runs.results import Results
from spalier.text import table

Say = Callable[[str], None]

NETWORK, WIDTH, BATCH_SIZE = "resnet8", 48, 64
LEARNED_FIRST = "0123"
TASKS = {"4to6": "456", "7to9": "789", "0to9": "0123456789"}
Method = Literal["splora", "fine-pruning"]
METHODS: dict[Method, str] = {"splora": "SPLoRA", "fine-pruning": "fine-pruning"}
DENSITIES = (0.6, 0.3, 0.15)


@dataclass(frozen=True)
class Row:
    """One task file: what it is, and what was measured."""

    task: str
    method: Method
    channels: float
    accuracy: float
    learned: int
    bytes: int
    macs: float
    latency_ms: float
    speed_up: float
    switch_ms: float


@dataclass(frozen=True)
class Demo:
    """What came out. Print it."""

    folder: Path
    rows: Sequence[Row]
    base: dict[str, Any]
    """Accuracy on the digits that it learned, parameters, bytes and latency of the base."""
    report: Path
    seconds: float
    notes: Sequence[str]

    def __str__(self) -> str:
        sizes = ["digits", "method", "channels", "accuracy", "learned", "bytes", "MACs"]
        times = [f"ms for {BATCH_SIZE}", "x base", "switch ms"]
        return "\n".join([table([*sizes, *times], [_cells(row) for row in self.rows]), *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**asdict(self), "folder": str(self.folder), "report": str(self.report)}


def _cells(row: Row) -> list[str]:
    shares = [f"{share:.1%}" for share in (row.channels, row.accuracy)]
    sizes = [f"{row.learned:,}", f"{row.bytes:,}", f"{row.macs:.1%}"]
    times = [f"{row.latency_ms:.2f}", f"{row.speed_up:.1f}", f"{row.switch_ms:.2f}"]
    return [row.task, METHODS[row.method], *shares, *sizes, *times]


def run_demo(folder: str, seed: int, say: Say) -> Demo:
    """Pretrain, learn three tasks two ways, prune, switch, measure, report; what was stopped goes on."""
    start, place = time.perf_counter(), Path(folder)
    _check_folder(place)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network gains nothing by more, and loses much where others work too
    try:
        say(f"a small ResNet learns the digits {_words(LEARNED_FIRST)}, and is frozen")
        base, pretraining = _pretrain(place, seed)
        first = pretraining.rows[0]
        say(f"  {first['test']:.1%} right, {first['parameters']:,} parameters, {first['bytes']:,} bytes")
        runs = _learn(place, seed, say)
        store = _collect(place, runs)
        say(f"one base, {len(store)} task files: switch between them")
        switches = _switch(base, store, say)
        say("latency of all of them, in turns")
        rows, latency = _measure(base, store, runs, switches)
        page = spalier.report(place / "runs", place / "report.html")
    finally:
        torch.set_num_threads(threads)
    own = {"accuracy": first["test"], "parameters": first["parameters"]}
    own |= {"bytes": (place / "base.safetensors").stat().st_size, "latency_ms": latency}
    return Demo(place, rows, own, page, round(time.perf_counter() - start, 1), _notes(rows, own))


def _check_folder(folder: Path) -> None:
    """The demo writes only where nothing else is."""
    ours = {"base", "base.safetensors", "runs", "tasks", "report.html"}
    if not folder.exists():
        return
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else [folder.name]
    others = [name for name in names if name not in ours and not name.startswith(".")]
    if others or not folder.is_dir():
        raise RunError(
            "folder",
            f"{str(folder)!a} holds something else than a demo ({others[0]!a}); pass another --folder",
        )


def _pretrain(folder: Path, seed: int) -> tuple[nn.Module, Results]:
    """The base, as a file; learned as a run that never prunes."""
    net = open_network(NETWORK, classes=len(LEARNED_FIRST), seed=seed, width=WIDTH)
    config = spalier.TransferPruning(
        name="base",
        method="fine-pruning",
        data="digits",
        classes=tuple(LEARNED_FIRST),
        densities=(),
        epochs=6,
        seed=seed,
        trackers=(),
    )
    results = config.run(folder / "base", network=net, progress=False)
    built = results.tasks.load("base-100").build(net)
    state = {name: value.contiguous() for name, value in built.state_dict().items()}
    files.write(folder / "base.safetensors", save(state))
    return built, results


def _learn(folder: Path, seed: int, say: Say) -> dict[tuple[str, Method], Results]:
    """Every task with both methods."""
    found = {}
    for name, classes in TASKS.items():
        for method, title in METHODS.items():
            config = spalier.TransferPruning(
                name=name,
                method=method,
                network=NETWORK,
                network_options={"width": WIDTH},
                weights=str((folder / "base.safetensors").absolute()),
                data="digits",
                classes=tuple(classes),
                max_train_samples=1000,
                densities=DENSITIES,
                epochs=5,
                epochs_per_prune=3,
                seed=seed,
                trackers=(),
            )
            results = config.run(folder / "runs" / f"{name}-{method}", progress=False)
            found[name, method] = results
            right = ", ".join(f"{row['test']:.1%} at {row['channels']:.0%}" for row in results.rows)
            say(f"digits {_words(classes)} by {title}: {right} of the channels")
    return found


def _words(classes: str) -> str:
    return f"{classes[0]} to {classes[-1]}"


def _collect(folder: Path, runs: dict[tuple[str, Method], Results]) -> spalier.Store:
    """All task files in one store, by task, method and density."""
    store = spalier.Store(folder / "tasks")
    for (_, method), results in runs.items():
        for row in results.rows:
            store.add(results.tasks.load(row["task"]), _name(row["task"], method), overwrite=True)
    return store


def _name(task: str, method: str) -> str:
    data, _, density = task.rpartition("-")
    return f"{data}-{method}-{density}"


def _switch(base: nn.Module, store: spalier.Store, say: Say) -> dict[str, float]:
    """Milliseconds from each file to a ready network. Then the same from memory, which is only said."""
    before = {name: value.clone() for name, value in base.state_dict().items()}
    switcher, cold = spalier.Switcher(base, store), {}
    for name in store:
        start = time.perf_counter()
        switcher.activate(name)
        cold[name] = 1e3 * (time.perf_counter() - start)
    names, start = list(store), time.perf_counter()
    for name in names:
        switcher.activate(name)
    warm = (time.perf_counter() - start) / len(names)
    if not all(torch.equal(value, before[name]) for name, value in base.state_dict().items()):
        raise RunError(
            "changed", "the base is not what it was before the switches; this is a defect of Spalier"
        )
    say(f"  again, from memory: {1e6 * warm:.0f} µs each; the base is the same to the bit")
    return cold


def _measure(
    base: nn.Module, store: spalier.Store, runs: dict[tuple[str, Method], Results], switches: dict[str, float]
) -> tuple[list[Row], float]:
    """A row for each task file; latencies are medians of turns that all networks take."""
    tasks = {name: store.load(name) for name in store}
    timed = spalier.bench(base, tasks, batches=(BATCH_SIZE,), backends=("eager",), rounds=9, seconds=0.004)
    base_ms = 1e3 * timed.timing("base", "eager", BATCH_SIZE).latency
    rows = []
    for (data, method), results in runs.items():
        for row in results.rows:
            name = _name(row["task"], method)
            latency = 1e3 * timed.timing(name, "eager", BATCH_SIZE).latency
            measured = (row["learned"], row["bytes"], row["macs"], latency, base_ms / latency, switches[name])
            rows.append(Row(_words(TASKS[data]), method, row["channels"], row["test"], *measured))
    return rows, base_ms


def _notes(rows: Sequence[Row], base: dict[str, Any]) -> list[str]:
    """What the figures come to, in words; each sentence from this run alone."""
    own = [row for row in rows if row.method == "splora"]
    smallest = min(own, key=lambda row: row.bytes)
    others = [row for row in rows if row.method != "splora" and row.task == smallest.task]
    same = min(others, key=lambda row: abs(row.channels - smallest.channels))
    return [
        f"Base: {base['accuracy']:.1%} right on its own digits, {base['latency_ms']:.2f} ms for {BATCH_SIZE} images.",
        f"The smallest SPLoRA task has {smallest.bytes:,} bytes and {smallest.learned:,} learned numbers "
        f"(fine-pruning there: {same.bytes:,} and {same.learned:,}).",
        "One seed, small images: methods differ by chance too. `spalier sweep` compares them over seeds.",
    ]
