"""docs/paper.md and paper-tables.md: tables between marks, figures in docs/assets/paper, all made of results alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import spalier as sp
from experiments.paper import papers
from experiments.paper.figures import figures
from experiments.paper.found import Found, settings_of
from experiments.paper.protocol import Protocol
from experiments.paper.tables import DATA, NAMES, TABLES, markdown, pays_from
from spalier.reporting.page import standalone, to_csv

_BASES = {
    "cifar10": "ResNet-20",
    "flowers102": "ResNet-50, 102 classes",
    "catsanddogs": "ResNet-50, 2 classes",
}
_TABLE = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


PAGES = ("paper.md", "paper-tables.md")


def written(texts: Mapping[str, str], results: Path, protocol: Protocol) -> dict[str, str]:
    """The pages with their tables made anew; every table is on one of them."""
    found = Found.load(results)

    def table(match: re.Match[str]) -> str:
        name = match[2]
        made = _MEASURED[name](results) if name in _MEASURED else TABLES[name](found, protocol)
        return f"{match[1]}\n{made}\n\n{match[3]}"

    there = sorted(match[2] for text in texts.values() for match in _TABLE.finditer(text))
    if there != sorted({*TABLES, *_MEASURED}):
        wrong = sorted({*TABLES, *_MEASURED} ^ set(there)) or "one of them twice"
        raise sp.errors.RunError("folder", f"the pages have tables {there}; unknown, missing or double: {wrong}")
    return {name: _TABLE.sub(table, text) for name, text in texts.items()}


def drawings(results: Path, protocol: Protocol) -> dict[str, str]:
    """Every figure as SVG and as CSV, by the name of its file."""
    made = figures(Found.load(results), protocol)
    files = {f"{figure.name}.svg": standalone(figure) for figure in made}
    return files | {f"{figure.name}.csv": to_csv(figure) for figure in made}


def write_page(docs: Path, results: Path, protocol: Protocol) -> None:
    """The pages and their figures, from the results that are there."""
    assets = docs / "assets" / "paper"
    for name, text in written({name: (docs / name).read_text() for name in PAGES}, results, protocol).items():
        (docs / name).write_text(text)
    assets.mkdir(parents=True, exist_ok=True)
    for name, content in drawings(results, protocol).items():
        (assets / name).write_text(content)


# -- what needs no cells ----------------------------------------------------------------------------------------------


def _read(results: Path, name: str) -> Any:
    path = results / f"{name}.json"
    if not path.is_file():
        raise sp.errors.RunError("folder", f"{path} is not there; make it by: python3 dev.py paper {name}")
    return json.loads(path.read_text())


def counts_table(results: Path) -> str:
    """Learned parameters and operations of the paper's network."""
    titles = [
        "learning",
        "channels",
        "learned",
        "with norms and head whole",
        "paper",
        "MACs that run",
        "FLOPs as published",
        "paper",
    ]
    rows = []
    for row in _read(results, "counts")["rows"]:
        at = ("none" if row["density"] == 1 else "weight", row["learning"], row["density"])
        learned, flops, _ = papers.TABLE[at]
        rows.append(
            [
                NAMES[row["learning"]],
                f"{100 * row['density']:g}%",
                f"{row['learned']:,}",
                f"{row['learned_as_published']:,}",
                f"{learned:,.1f} K",
                f"{row['macs'] / 1e6:,.1f} M",
                f"{row['flops_as_published'] / 1e6:,.1f} M",
                f"{flops:,.1f} M",
            ]
        )
    return markdown(titles, rows)


def speeds_table(results: Path) -> str:
    """What one thread can do."""
    rows = [
        [DATA[row["data"]], NAMES[row["learning"]], f"{row['images_a_second']:.0f}"]
        for row in _read(results, "speeds")["rows"]
    ]
    return markdown(["data", "learning", "images a second, unpruned"], rows)


def rates_table(results: Path) -> str:
    """Trials of learning rates, on validation images: what the rates of the mini scale were chosen by."""
    rows = []
    for trial in _read(results, "rates")["trials"]:
        shown = [f"{100 * row['target']:g}%: {100 * row['validation']:.1f}" for row in trial["rows"]]
        settings = settings_of(trial)
        name = "SPLoRA r8" if settings["method"] == "splora" else "fine-pruning"
        rows.append([DATA[settings["data"]], name, f"{settings['lr']:g}", ", ".join(shown)])
    return markdown(["data", "learning", "rate", "validation accuracy by channels"], rows)


def tasks_table(results: Path) -> str:
    """From how many tasks on the base and its task files take fewer bytes than networks of their own."""
    titles = [
        "base",
        "learning",
        "channels",
        "base, bytes",
        "task file, bytes",
        "network, bytes",
        "pays from so many tasks on",
    ]
    rows = []
    for row in _read(results, "storage")["rows"]:
        even = pays_from(row["base"], row["file"], row["network"])
        sizes = [f"{row[name]:,}" for name in ("base", "file", "network")]
        named = [_BASES[row["data"]], NAMES[row["learning"]], f"{100 * row['density']:g}%"]
        rows.append([*named, *sizes, "never" if even is None else f"{even:,}"])
    return markdown(titles, rows)


def latency_table(results: Path) -> str:
    """How much faster than their base networks are, measured in turns."""
    titles = ["data", "channels", "MACs", "times as fast, one image", "times as fast, 32 images"]
    read, rows = _read(results, "latency"), []
    for data in (name for name in DATA if name in read):
        for density in sorted({row["density"] for row in read[data]}, reverse=True):
            both = {row["batch"]: row for row in read[data] if row["density"] == density}
            share = f"{100 * both[1]['macs_share']:.1f}%"
            rows.append([DATA[data], f"{100 * density:g}%", share, *(_speedup(both[b]) for b in (1, 32))])
    return markdown(titles, rows)


def _speedup(row: dict[str, Any]) -> str:
    return f"{row['speedup']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


_MEASURED = {
    "counts": counts_table,
    "speeds": speeds_table,
    "rates": rates_table,
    "tasks": tasks_table,
    "latency": latency_table,
}
