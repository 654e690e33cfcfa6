"""The demo: one pretrained base, several tasks on it, and what they cost; everything is measured while it runs.

The base is the ResNet-20 that comes with Spalier, which knows photographs and no digit. Each task learns all kept
weights at falling densities: that is fine-pruning, stored in 8 bits. What was learned is also written in two bits for
each weight beside the base's (SPDelta), and learned on. Then the one base serves all files in turns.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import spalier
from spalier.errors import RunError
from spalier.networks import OWN_WEIGHTS, open_network
from spalier.runs import Results
from spalier.text import byte_size, table

NETWORK, BATCH_SIZE = "resnet20", 64
TASKS = {"0to4": "01234", "5to9": "56789", "0to9": "0123456789"}
CODES = {"wide": "fine-pruning, 8 bits", "spdelta-2bit": "SPDelta, 2 bits"}
DENSITIES = (0.5, 0.3)
Runs = dict[str, Results]


def run_demo(place: Path, seed: int, note: Callable[[str], None]) -> dict[str, Any]:
    """Learn the tasks, prune, store in two forms, switch, measure, report; what was stopped goes on."""
    start = time.perf_counter()

    def say(text: str) -> None:
        note(f"[{time.perf_counter() - start:3.0f} s] {text}")

    _check_folder(place)
    before = (place / "runs").exists()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network gains nothing by more, and loses much where others work too
    try:
        base, size = open_network(NETWORK, pretrained=True), OWN_WEIGHTS[NETWORK].stat().st_size
        parameters = sum(parameter.numel() for parameter in base.parameters())
        say(f"the base: a ResNet-20 that knows photographs; {parameters:,} parameters, {size:,} bytes; frozen")
        runs = _learn(place, seed, say)
        store = _collect(place, runs)
        say(f"one base, {len(store)} task files: switch between them")
        switches = _switch(base, store, say)
        say("latency of all of them, in turns")
        rows, latency = _measure(base, store, runs, switches)
        page = spalier.report(place / "runs", place / "report.html")
    finally:
        torch.set_num_threads(threads)
    seconds, whole = round(time.perf_counter() - start, 1), spalier.count(base).bytes
    found: dict[str, Any] = {"folder": str(place), "report": str(page), "seconds": seconds, "learned_before": before}
    found["base"] = {"parameters": parameters, "bytes": size, "bytes_float32": whole, "latency_ms": latency}
    found["rows"] = rows
    return found | {"ways": _ways(found)}


def _check_folder(folder: Path) -> None:
    """The demo writes only where nothing else is."""
    ours = {"runs", "tasks", "report.html"}
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    for name in names:
        if name not in ours and not name.startswith("."):
            found = f"{str(folder)!a} holds something else than a demo ({name!a}); pass another --folder"
            raise RunError("folder", found)


def _learn(folder: Path, seed: int, say: Callable[[str], None]) -> Runs:
    """Every task, in both forms at each density."""
    found: Runs = {}
    shared = spalier.TransferPruning(data="digits", network=NETWORK, codes=tuple(CODES), densities=DENSITIES)
    shared = shared.replace(seed=seed, trackers=(), max_train_samples=500, batch_size=32)
    # shorter than by default; a recovery in closed form makes up for some of it
    shared = shared.replace(epochs=6, epochs_per_prune=5, refit_epochs=4, recovery="all")
    for name, classes in TASKS.items():
        config = shared.replace(name=name, classes=tuple(classes))
        found[name] = config.run(folder / "runs" / name, progress=False)
        for code, title in CODES.items():
            rows = [row for row in found[name].rows if row["code"] == code]
            right = ", ".join(f"{row['test']:.1%} at {row['channels']:.0%}" for row in rows)
            say(f"{_words(name)} by {title}: {right} of the channels")
    return found


def _words(task: str) -> str:
    return f"digits {' to '.join(task.split('to'))}"


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
            rows.append({"task": _words(task), "accuracy": row["test"], **known, **times})
    return rows, base_ms


def _ways(found: dict[str, Any]) -> list[dict[str, Any]]:
    """What a user would choose between: a network for each task, fine-pruning alone, or one base and narrow files."""
    base, tasks = found["base"], len(TASKS)
    last = [row for row in found["rows"] if abs(row["channels"] - DENSITIES[-1]) < 0.05]
    whole = [row for row in found["rows"] if row["code"] == "wide" and row["channels"] == 1]
    wide, narrow = ([row for row in last if row["code"] == code] for code in CODES)
    density = f"{DENSITIES[-1]:.0%} of the channels"
    chosen = {
        "a fine-tuned network for each task, 32 bits": (whole, tasks * base["bytes_float32"]),
        f"fine-pruning to {density}, 8 bits, no base": (wide, sum(row["bytes"] for row in wide)),
        f"one base, and tasks with {density} in 2 bits": (narrow, base["bytes"] + sum(r["bytes"] for r in narrow)),
    }
    return [
        {
            "way": way,
            "accuracy": sum(row["accuracy"] for row in rows) / len(rows),
            "bytes": size,
            "bytes_of_a_task": sum(row["bytes"] for row in rows) / len(rows),
            "speed_up": math.prod(row["speed_up"] for row in rows) ** (1 / len(rows)) if rows is not whole else 1.0,
        }
        for way, (rows, size) in chosen.items()
    ]


# for people


def shown(found: dict[str, Any]) -> str:
    """Two tables, what the figures come to in words, and what to do next; each sentence is from this run alone."""
    titles = ["task", "stored as", "channels", "right", "bytes", "MACs", f"ms for {BATCH_SIZE}", "x base", "switch ms"]
    place = shlex.quote(found["folder"])
    run = f"{place}/runs/0to4"
    how = "learned before, in this folder; measured again in" if found["learned_before"] else "made in"
    ways = [
        [way["way"], f"{way['accuracy']:.1%}", byte_size(way["bytes"]), f"{way['speed_up']:.1f}"]
        for way in found["ways"]
    ]
    parts = [
        table(titles, [_cells(row) for row in found["rows"]]),
        table([f"{len(TASKS)} tasks", "right", "bytes", "x as fast"], ways),
        _verdict(found),
        f"report: {found['report']}   (open it in a browser; {how} {found['seconds']:.0f} s)\nnext:",
    ]
    following = [f"task list {place}/tasks", f"eval {run}", f"bench {run} {run} --backends eager"]
    following = [f"  {_program()} {command}" for command in (*following, "train --data digits --folder runs/digits")]
    return "\n".join(["", "\n\n".join(parts), *following])


def _verdict(found: dict[str, Any]) -> str:
    """What one base and narrow files are worth, and when something else is."""
    tuned, pruned, narrow = found["ways"]
    behind = 100 * (tuned["accuracy"] - narrow["accuracy"])
    against = f"{abs(behind):.1f} points {'lower' if behind > 0 else 'higher'}"
    saved = pruned["bytes_of_a_task"] - narrow["bytes_of_a_task"]
    pays = math.ceil(found["base"]["bytes"] / saved) if saved > 0 else None
    ahead = 100 * (pruned["accuracy"] - narrow["accuracy"])
    until = f"for fewer than {pays} such tasks" if pays else "in bytes"
    return (
        f"{len(TASKS)} tasks and the base in {byte_size(narrow['bytes'])} instead of {byte_size(tuned['bytes'])}, "
        f"{narrow['speed_up']:.1f} x as fast, {against}; each further task takes "
        f"{byte_size(narrow['bytes_of_a_task'])}.\n"
        f"Fine-pruning alone is the better choice {until}, as it needs no base; here it is {abs(ahead):.1f} points "
        f"{'ahead' if ahead >= 0 else 'behind'}.\n"
        "One seed and small images: methods differ by chance too. `spalier sweep` compares them over seeds."
    )


def _cells(row: dict[str, Any]) -> list[str]:
    shares = [f"{row[key]:.1%}" for key in ("channels", "accuracy")]
    times = [f"{row['latency_ms']:.2f}", f"{row['speed_up']:.1f}", f"{row['switch_ms']:.2f}"]
    return [row["task"], CODES[row["code"]], *shares, f"{row['bytes']:,}", f"{row['macs']:.1%}", *times]


def _program() -> str:
    """How the command line is called from here: by its name, or by its path where that is not looked up."""
    beside = Path(sys.executable).parent / "spalier"
    return "spalier" if shutil.which("spalier") or not beside.exists() else os.path.relpath(beside)
