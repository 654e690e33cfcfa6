"""The demo: one base, three tasks, falling densities, two forms of each; everything in it is measured while it runs.

A small ResNet learns the digits 0 to 3 and is frozen. Three further tasks are learned on it, all kept weights at once:
that is fine-pruning, stored in 8 bits. At each density what was learned is also written in two bits for each weight
(SPDelta), and learned on for an epoch. Then the one base serves all files in turns.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

import spalier
from spalier import files
from spalier.errors import RunError
from spalier.networks import open_network
from spalier.runs import Results
from spalier.text import table

NETWORK, WIDTH, BATCH_SIZE = "resnet8", 48, 64
LEARNED_FIRST = "0123"
TASKS = {"4to6": "456", "7to9": "789", "0to9": "0123456789"}
CODES = {"wide": "fine-pruning, 8 bits", "spdelta-2bit": "SPDelta, 2 bits"}
DENSITIES = (0.6, 0.3, 0.15)
Runs = dict[str, Results]


def run_demo(place: Path, seed: int, note: Callable[[str], None]) -> dict[str, Any]:
    """Pretrain, learn three tasks, prune, store in two forms, switch, measure, report; what was stopped goes on."""
    start = time.perf_counter()

    def say(text: str) -> None:
        note(f"[{time.perf_counter() - start:3.0f} s] {text}")

    _check_folder(place)
    before = (place / "runs").exists()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network gains nothing by more, and loses much where others work too
    try:
        say(f"a small ResNet learns the digits {_words(LEARNED_FIRST)}, and is frozen")
        base, first = _pretrain(place, seed)
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
    size = (place / "base.safetensors").stat().st_size
    return {
        "folder": str(place),
        "report": str(page),
        "seconds": round(time.perf_counter() - start, 1),
        "learned_before": before,
        "base": {
            "accuracy": first["test"],
            "parameters": first["parameters"],
            "bytes": size,
            "latency_ms": latency,
        },
        "rows": rows,
    }


def _check_folder(folder: Path) -> None:
    """The demo writes only where nothing else is."""
    ours = {"base", "base.safetensors", "runs", "tasks", "report.html"}
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    for name in names:
        if name not in ours and not name.startswith("."):
            found = f"{str(folder)!a} holds something else than a demo ({name!a}); pass another --folder"
            raise RunError("folder", found)


def _pretrain(folder: Path, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """The base, which is also written to a file, and what was measured of it. It is a run that never prunes."""
    net = open_network(NETWORK, classes=len(LEARNED_FIRST), seed=seed, width=WIDTH)
    config = spalier.TransferPruning(data="digits", classes=tuple(LEARNED_FIRST), epochs=6, densities=())
    config = config.replace(name="base", method="fine-pruning", seed=seed, trackers=())
    results = config.run(folder / "base", network=net, progress=False)
    built = results.tasks.load("base-100").build(net)
    state = {name: value.contiguous() for name, value in built.state_dict().items()}
    files.write(folder / "base.safetensors", save(state))
    return built, dict(results.rows[0])


def demo_base(folder: Path) -> nn.Module:
    """The base of a demo that was made."""
    weights = folder / "base.safetensors"
    return open_network(NETWORK, classes=len(LEARNED_FIRST), weights=weights, width=WIDTH)


def _learn(folder: Path, seed: int, say: Callable[[str], None]) -> Runs:
    """Every task, in both forms at each density."""
    found: Runs = {}
    weights = str((folder / "base.safetensors").absolute())
    shared = spalier.TransferPruning(network=NETWORK, network_options={"width": WIDTH}, weights=weights)
    shared = shared.replace(data="digits", max_train_samples=1000, seed=seed, trackers=(), densities=DENSITIES)
    # few images give few steps: small batches, a high rate and a recovery in closed form make up for that
    shared = shared.replace(epochs=4, epochs_per_prune=3, batch_size=32, lr=1e-3, recovery="all")
    for name, classes in TASKS.items():
        config = shared.replace(name=name, classes=tuple(classes), codes=tuple(CODES), refit_epochs=1)
        found[name] = config.run(folder / "runs" / name, progress=False)
        for code, title in CODES.items():
            rows = [row for row in found[name].rows if row["code"] == code]
            right = ", ".join(f"{row['test']:.1%} at {row['channels']:.0%}" for row in rows)
            say(f"digits {_words(classes)} by {title}: {right} of the channels")
    return found


def _words(classes: str) -> str:
    return f"{classes[0]} to {classes[-1]}"


def _collect(folder: Path, runs: Runs) -> spalier.Store:
    """All task files in one store."""
    store = spalier.Store(folder / "tasks")
    for results in runs.values():
        for row in results.rows:
            store.add(results.tasks.load(row["task"]), overwrite=True)
    return store


def _switch(base: nn.Module, store: spalier.Store, say: Callable[[str], None]) -> dict[str, float]:
    """Milliseconds from each file to a ready network. Then the same from memory, which is only said."""
    before = {name: value.clone() for name, value in base.state_dict().items()}
    switcher, from_file = spalier.Switcher(base, store), {}
    for name in store:
        start = time.perf_counter()
        switcher.activate(name)
        from_file[name] = 1e3 * (time.perf_counter() - start)
    start = time.perf_counter()
    for name in from_file:
        switcher.activate(name)
    from_memory = (time.perf_counter() - start) / len(from_file)
    if not all(torch.equal(value, before[name]) for name, value in base.state_dict().items()):
        found = "the base is not what it was before the switches; this is a defect of Spalier"
        raise RunError("changed", found)
    say(f"  again, from memory: {1e6 * from_memory:.0f} µs each; the base is the same to the bit")
    return from_file


def _measure(
    base: nn.Module, store: spalier.Store, runs: Runs, switches: dict[str, float]
) -> tuple[list[dict[str, Any]], float]:
    """A row for each task file, and the base's latency; latencies are medians of turns that all networks take."""
    tasks = {name: store.load(name) for name in store}
    timed = spalier.bench(base, tasks, batches=(BATCH_SIZE,), backends=("eager",), rounds=9, seconds=0.004)
    base_ms = 1e3 * timed.timing("base", "eager", BATCH_SIZE).latency
    rows = []
    for task, results in runs.items():
        for row in results.rows:
            latency = 1e3 * timed.timing(row["task"], "eager", BATCH_SIZE).latency
            known = {key: row[key] for key in ("code", "channels", "learned", "bytes", "macs")}
            times = {"latency_ms": latency, "speed_up": base_ms / latency, "switch_ms": switches[row["task"]]}
            rows.append({"task": _words(TASKS[task]), "accuracy": row["test"], **known, **times})
    return rows, base_ms


# for people


def shown(found: dict[str, Any]) -> str:
    """A table, what the figures come to in words, and what to do next; each sentence is from this run alone."""
    titles = [
        "digits",
        "method",
        "channels",
        "accuracy",
        "bytes",
        "MACs",
        f"ms for {BATCH_SIZE}",
        "x base",
        "switch ms",
    ]
    base, place = found["base"], shlex.quote(found["folder"])
    of_base = f"{base['accuracy']:.1%} right on its own digits, {base['latency_ms']:.2f} ms for {BATCH_SIZE} images"
    run = f"{place}/runs/4to6"
    how = "learned before, in this folder; measured again in" if found["learned_before"] else "made in"
    following = [
        f"task list {place}/tasks",
        f"eval {run}",
        f"bench {run} {run} --backends eager",
        "train --data digits --network resnet8 --folder runs/digits",
    ]
    return "\n".join(
        [
            "",
            table(titles, [_cells(row) for row in found["rows"]]),
            f"Base: {of_base}.",
            _verdict(found),
            "One seed, small images: methods differ by chance too. `spalier sweep` compares them over seeds.",
            "",
            f"report: {found['report']}   (open it in a browser; {how} {found['seconds']:.0f} s)",
            "next:",
            *(f"  {_program()} {command}" for command in following),
        ]
    )


def _verdict(found: dict[str, Any]) -> str:
    """What two bits for a weight are worth at the middle density, over all tasks."""
    middle = [row for row in found["rows"] if abs(row["channels"] - DENSITIES[1]) < 0.05]
    narrow, wide = ([row for row in middle if row["code"] == code] for code in ("spdelta-2bit", "wide"))
    bytes_of = [sum(row["bytes"] for row in rows) for rows in (narrow, wide)]
    right = [sum(row["accuracy"] for row in rows) / len(rows) for rows in (narrow, wide)]
    whole = found["base"]["bytes"]
    faster = min(row["speed_up"] for row in narrow)
    return (
        f"At {DENSITIES[1]:.0%} of the channels {len(narrow)} tasks in two bits have {bytes_of[0]:,} bytes together; "
        f"by fine-pruning in 8 bits {bytes_of[1]:,}, as whole networks {len(narrow) * whole:,}.\n"
        f"They are {right[0]:.1%} right, fine-pruning {right[1]:.1%}, and at least {faster:.1f} x as fast as the base."
    )


def _cells(row: dict[str, Any]) -> list[str]:
    shares = [f"{row[key]:.1%}" for key in ("channels", "accuracy")]
    times = [f"{row['latency_ms']:.2f}", f"{row['speed_up']:.1f}", f"{row['switch_ms']:.2f}"]
    return [row["task"], CODES[row["code"]], *shares, f"{row['bytes']:,}", f"{row['macs']:.1%}", *times]


def _program() -> str:
    """How the command line is called from here: by its name, or by its path where that is not looked up."""
    beside = Path(sys.executable).parent / "spalier"
    return "spalier" if shutil.which("spalier") or not beside.exists() else os.path.relpath(beside)
