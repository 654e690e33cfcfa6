"""Folders for reports, written by hand: real task files of a tiny network, made-up rows beside them."""

import copy
import functools
import io
import json
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from support import awaken_, tiny_cnn

import spalier as sp
from spalier.runs import TransferPruning

IMAGE = torch.zeros(2, 3, 8, 8)
DENSITIES = (1.0, 0.5, 0.25)
HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<svg onload=alert(2)>\"'&amp;",
    "\u202egnp.exe\u2066 \u200fright to left",
    "a" * 300,
    "🌿 emoji 👩‍🌾 leaves",
    "back`tick${alert(3)} {{ 7*7 }} {% raw %}",
    "nul\x00 tab\t line\n separator\u2028\u2029 lone \ud800",
    "]]>--><!-- &lt;b&gt;",
    "日本語のとても長いクラスの名前です",
    "",
)


@functools.cache
def tasks():
    """One task for each density, cut from one another."""
    torch.manual_seed(0)
    net = copy.deepcopy(tiny_cnn(len(HOSTILE)))
    sp.attach_(net, sp.SPLoRA(rank=2), head="8", example=IMAGE)
    awaken_(net)
    found = [sp.Task.of(net, "x")]
    for density in DENSITIES[1:]:
        sp.prune_(net, sp.select(net, sp.score(net, None, "weight"), channels=density))
        found.append(sp.Task.of(net, "x"))
    return tuple(found)


def task(place, name, **changes):
    """A task of the right shape under another name."""
    found = tasks()[min(place, len(DENSITIES) - 1)]
    return replace(found, info=replace(found.info, name=name, **changes))


def write_run(
    folder,
    *,
    classes=("cat", "dog", "owl"),
    densities=DENSITIES,
    seed=0,
    done=True,
    extras=True,
    accuracies=None,
    latency=True,
    **settings,
):
    """A run's folder; the rows that are in it."""
    config = TransferPruning(
        **{
            "network": "tiny:net",
            "method": "splora",
            "name": "birds",
            "data": "digits",
            "densities": tuple(densities[1:]),
            "seed": seed,
            **settings,
        }
    )
    (folder / "blocks").mkdir(parents=True)
    (folder / "run.yaml").write_text(config.to_yaml(), "utf-8")
    rng = np.random.default_rng(seed)
    store, rows, lines = sp.Store(folder / "tasks"), [], []
    for block, density in enumerate(densities):
        name = f"birds-{100 * density:g}"
        store.add(task(block, name))
        row = _row(store, name, block, density, rng, accuracies)
        if not latency:
            row["latency_ms"] = None
        rows.append(row)
        for epoch in range(3):
            step = 10 * (3 * block + epoch + 1)
            seen = round(0.9 - 0.04 * block + 0.01 * epoch, 4)
            lines.append(
                {
                    "kind": "epoch",
                    "block": block,
                    "step": step,
                    "loss": 2 / (epoch + 1),
                    "lr": 0.1,
                    "validation": seen,
                }
            )
        lines.append({"kind": "block", **row})
        _write_block(folder, block, row, classes, rng, extras)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done:
        results = {"format": 1, "rows": rows, "skipped": [], "base": "b", "data": "d"}
        (folder / "results.json").write_text(json.dumps(results))
    return rows


def _row(store, name, block, density, rng, accuracies):
    said = store.load(name).info
    accuracy = 0.95 - 0.3 * (1 - density) ** 2 + 0.02 * rng.standard_normal()
    accuracy = float(np.clip(accuracy, 0, 1)) if accuracies is None else accuracies[block]
    shrunk = {n: max(1, int(p[1] * density)) for n, p in vars(said.density).items()}
    return {
        "task": name,
        "block": block,
        "target": density,
        "channels": shrunk["channels"] / said.density.channels[1],
        "weights": shrunk["weights"] / said.density.weights[1],
        "macs": shrunk["macs"] / said.density.macs[1],
        "macs_left": shrunk["macs"],
        "learned": 100 + int(900 * density),
        "test": accuracy,
        "validation": None if accuracy is None else accuracy / 2,
        "bytes": store.path(name).stat().st_size,
        "latency_ms": round(0.2 + density, 4),
        "seconds": 1.5 * block,
    }


def _write_block(folder, block, row, classes, rng, extras):
    size = len(classes)
    wrong = rng.integers(0, 4, (size, size)) * (rng.random((size, size)) < 9 / size)
    counts = wrong.astype(int) + 20 * np.eye(size, dtype=int)
    said = {"row": row, "classes": list(classes), "confusion": {"validation": None, "test": counts.tolist()}}
    said |= {"kept": {}, "ranks": {}}
    if extras:
        items = [{"label": i % size, "guess": (i + (i < 3)) % size, "confidence": 0.9 - 0.01 * i} for i in range(11)]
        said["examples"] = {"side": 8, "columns": 4, "items": items}
        sheet = Image.fromarray(rng.integers(0, 255, (24, 32, 3)).astype(np.uint8))
        sheet.save(folder / "blocks" / f"{block:02}.png")
        if block:
            _write_scores(folder, block, rng)
    (folder / "blocks" / f"{block:02}.json").write_text(json.dumps(said))


def _write_scores(folder, block, rng):
    edges = np.geomspace(0.01, 2.0, 13).tolist()
    counts = lambda: rng.integers(0, 9, 14).tolist()  # noqa: E731
    streams = {name: {"kept": counts(), "removed": counts()} for name in ("0", "3", HOSTILE[0])}
    said = {"criterion": "taylor", "samples": 64, "edges": edges, "streams": streams}
    (folder / "blocks" / f"{block:02}.scores.json").write_text(json.dumps(said))


def png():
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "PNG")
    return out.getvalue()
