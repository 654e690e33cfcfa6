"""What docs/paper.md and README.md say of learning wide, from the cells of codes.py: a claim, tables, three figures.

Texts have marks, ``<!-- codes: NAME -->`` to ``<!-- end -->``, and what is between them is made here.
"""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from codes import RANKS, STARTS, WIDE
from codes_learning import RESULTS, SPECS
from codes_page import IMAGES, TITLES, Found, against_wide, draw, mean, over_sets
from spalier.reporting.draw import Cell, Dot, Figure, Line, Mark, Panel, linear, logarithmic

TEXTS = ("README.md", "docs/paper.md", "docs/paper-tables.md")
MARK = re.compile(r"(<!-- codes: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DENSITIES = (1.0, 0.5, 0.3, 0.1)
SHOWN = {
    "fine-pruning": ("wide+",),
    "with free writers": ("wide-free",),
    "SPLoRA r8, directly": ("direct-r8",),
    "SPLoRA r8, refit": ("r8-centre",),
    "one bit": ("delta-1",),
    "budgets": ("bytes-12", "bytes-20"),
    "2 bits, no base": ("free-2",),
}
"""What the figures of all axes join, from the whole network to 10% of its channels: the first that is there."""
TABLE = (
    "wide", "wide+", "direct-r32", "direct-r8", "r32-centre", "r8-centre", "delta-1", "delta-2", "bytes-20", "bytes-12",
    "free-4", "free-2",
)  # fmt: skip
CRITERIA = ("taylor", "lrp", "gradient", "weight", "random")


def short(name: str) -> str:
    return SPECS[name].title.partition(",")[0]


def good(found: Found, name: str, density: float, method: str) -> dict[int, dict[str, Any]]:
    """The cells that have an accuracy, by seed."""
    return {s: c for s, c in found.get((name, density, method), {}).items() if "accuracy" in c}


def rows(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    heads, lines = list(heads), list(lines)
    if not lines:
        return "*Not measured yet.*"
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *(f"| {' | '.join(r)} |" for r in lines)])


def seeds_of(found: Found, name: str, density: float, method: str) -> str:
    """Accuracy, and of how many seeds it is where that is not three."""
    cells = good(found, name, density, method)
    few = f" ({len(cells)})" if cells and len(cells) != 3 else ""
    return mean([c["accuracy"] for c in cells.values()]) + few if cells else ""


# the claim


def claim(found: Found) -> str:
    """The sentence that a reader can act on."""

    def points(density: float, method: str) -> str:
        leads = against_wide(found, density, method)
        absent = [name for name in IMAGES if name not in leads]
        is_impossible = absent and all(found.get((name, density, method)) for name in absent)
        sets = f"{len(leads)} data set" + "s" * (len(leads) > 1)
        few = f" ({sets} so far)" if absent else ""
        if is_impossible:
            few = f" ({sets}; on {', '.join(map(short, absent))} no file is that small)"
        lead = over_sets(leads) if leads else 0.0
        return f"{abs(lead):.1f} points {'behind' if lead < 0 else 'ahead'}{few}" if leads else "not measured"

    cells = [good(found, name, density, "bytes-20") for name in IMAGES for density in (0.5, 0.3)]
    seeds = {1: "one seed", 2: "two seeds", 3: "three seeds"}
    fewest, most = (seeds.get(of(map(len, cells)), "none") for of in (min, max))
    text = (
        "**A task that is learned wide and stored narrow takes a twentieth of fine-pruning's bytes, and its accuracy "
        f"is {points(0.5, 'bytes-20')} with 50% of the channels and {points(0.3, 'bytes-20')} with 30%.** In a twelfth "
        f"of the bytes, with 10% of the channels, it is {points(0.1, 'bytes-12')}. Means over three data sets, "
        f"{fewest if fewest == most else f'{fewest} to {most}'} each; all learn for as many epochs, each at its own "
        "best rate."
    )
    return "\n".join(textwrap.wrap(text, 100, break_on_hyphens=False))


def readme(found: Found) -> str:
    """Budgets against fine-pruning with the same epochs."""
    lines = []
    for density, method, share in ((0.5, "bytes-20", "1/20"), (0.3, "bytes-20", "1/20"), (0.1, "bytes-12", "1/12")):
        row = [f"{density:.0%} of the channels, {share} of the bytes"]
        for name in IMAGES:
            leads, cells = against_wide(found, density, method).get(name), good(found, name, density, method)
            if leads:
                size = statistics.mean(c["bytes"] for c in cells.values())
                row.append(
                    f"{mean(leads, '+')}, {size / 1e6:.2f} MB"
                    if size > 1e5
                    else f"{mean(leads, '+')}, {size / 1e3:.0f} KB"
                )
            else:
                row.append("does not fit" if found.get((name, density, method)) else "not measured")
        lines.append(row)
    return rows(["", *(SPECS[name].title for name in IMAGES)], lines)


# tables


def table(found: Found) -> str:
    """Every contender at every share of channels."""
    lines = []
    for name in IMAGES:
        for method in TABLE:
            row = [seeds_of(found, name, d, method) for d in DENSITIES]
            if any(row):
                sizes = [
                    statistics.mean(c["bytes"] for c in cells.values()) / 1000
                    for d in (0.3, 0.1)
                    if (cells := good(found, name, d, method))
                ]
                said = " / ".join(f"{size:,.0f}" if size >= 10 else f"{size:.1f}" for size in sizes)
                lines.append([short(name), TITLES[method].strip("*"), *row, said])
    return rows(["data", "", *(f"{d:.0%}" for d in DENSITIES), "KB at 30 / 10%"], lines)


def summary(found: Found) -> str:
    """Points against fine-pruning with as many epochs, as means over the data sets, and how much smaller files are."""
    lines = []
    for method in [m for m in TABLE if m not in ("wide", "wide+")]:
        row = []
        for density in DENSITIES:
            leads = against_wide(found, density, method)
            if not leads:
                row.append("")
                continue
            shares = [
                whole[s]["bytes"] / c["bytes"]
                for name in leads
                if (whole := good(found, name, density, "wide+"))
                for s, c in good(found, name, density, method).items()
                if s in whole
            ]
            few = "" if len(leads) == len(IMAGES) else f" ({len(leads)} of {len(IMAGES)})"
            row.append(f"{over_sets(leads):+z.1f}, 1/{statistics.median(shares):.0f}{few}")
        if any(row):
            lines.append([TITLES[method], *row])
    return rows(["", *(f"{d:.0%}" for d in DENSITIES)], lines)


def papers_claims(found: Found) -> str:
    """The paper's two claims, by its own count of learned numbers, beside what was measured."""
    lines = []
    for method in ("direct-r32", "direct-r8", "r32-centre", "r8-centre", "r8-kernel"):
        row = [TITLES[method]]
        for density in (0.3, 0.1):
            leads = against_wide(found, density, method)
            fewer = [
                statistics.mean(c["learned"] for c in good(found, name, density, "wide+").values())
                / statistics.mean(c["learned"] for c in good(found, name, density, method).values())
                for name in leads
            ]
            row += [f"{over_sets(leads):+z.1f}", " / ".join(f"{f:.1f}" for f in fewer)] if leads else ["", ""]
        if any(row[1:]):
            lines.append(row)
    heads = ["", "points at 30%", "times fewer numbers", "points at 10%", "times fewer numbers"]
    return rows(heads, lines)


def criteria(found: Found) -> str:
    """Fine-pruning by each criterion; all share the unpruned network."""
    lines = []
    for name in IMAGES:
        for criterion in CRITERIA:
            method = "wide" if criterion == "taylor" else f"wide-{criterion}"
            row = [seeds_of(found, name, d, method) for d in DENSITIES[1:]]
            if any(row) and any(good(found, name, 0.3, f"wide-{c}") for c in CRITERIA[1:]):
                lines.append([short(name), criterion, *row])
    return rows(["data", "criterion", "50%", "30%", "10%"], lines)


def writers(found: Found) -> str:
    """Free against coupled writers: accuracy, MACs and latency at equal channels."""
    lines = []
    for name in IMAGES:
        fast = latencies(name)
        for density in DENSITIES[1:]:
            row = [short(name), f"{density:.0%}"]
            for method in ("wide", "wide-free"):
                cells = good(found, name, density, method)
                if not cells:
                    break
                macs = statistics.mean(c["macs"][0] for c in cells.values()) / 1e6
                row += [seeds_of(found, name, density, method), f"{macs:,.1f}", fast.get((method, density), "")]
            else:
                lines.append(row)
    heads = ["data", "channels", "coupled", "M MACs", "ms", "free", "M MACs", "ms"]
    return rows(heads, lines)


def latencies(name: str, backend: str = "onnxruntime", batch: int = 1) -> dict[tuple[str, float], str]:
    """Milliseconds by method and density, where they were measured."""
    return {key: f"{ms:.2f}" for key, ms in milliseconds(name, backend, batch).items()}


def milliseconds(name: str, backend: str = "onnxruntime", batch: int = 1) -> dict[tuple[str, float], float]:
    file = RESULTS / "latency" / f"{name}.json"
    if not file.is_file():
        return {}
    read = json.loads(file.read_text())["rows"]
    chosen = [r for r in read if (r["backend"], r["batch"]) == (backend, batch) and r["ms"] is not None]
    named = [("wide 100" if r["network"] == "base" else r["network"], r["ms"]) for r in chosen]
    return {(name.rsplit(" ", 1)[0], float(name.rsplit(" ", 1)[1]) / 100): ms for name, ms in named}


def convergence(found: Found) -> str:
    """Whether more epochs would change the picture: half as many, and twice as many, for fine-pruning."""
    lines = []
    for name in IMAGES:
        for method, times in (("wide-half", "0.5"), ("wide", "1"), ("wide-double", "2")):
            same = set(good(found, name, 0.3, "wide-double")) or {0}
            cells = [{s: c for s, c in good(found, name, d, method).items() if s in same} for d in DENSITIES]
            if any(cells):
                row = [mean([c["accuracy"] for c in each.values()]) if each else "" for each in cells]
                hours = [c["seconds"] / 3600 for c in cells[-1].values()]
                lines.append([short(name), times, *row, f"{statistics.mean(hours):.2f}" if hours else ""])
        unpruned = good(found, name, 1.0, "control")
        if unpruned:
            count = next(iter(unpruned.values()))
            lines.append(
                [
                    short(name),
                    f"unpruned, {count['epochs']} epochs",
                    seeds_of(found, name, 1.0, "control"),
                    "",
                    "",
                    "",
                    f"{count['seconds'] / 3600:.2f}",
                ]
            )
    return rows(["data", "epochs", *(f"{d:.0%}" for d in DENSITIES), "processor hours"], lines)


def ablation(found: Found) -> str:
    """The paper's figure 4: ranks at its own start, and starts at rank 8."""
    spec, lines = SPECS["resnet18"], []
    for rank, start in [*((rank, 1e-4) for rank in RANKS), *((8, start) for start in STARTS)]:
        method = f"ablation-r{rank}-{start:g}"
        row = [seeds_of(found, spec.name, d, method) for d in spec.searched]
        if any(row):
            learned = {d: good(found, spec.name, d, method) for d in spec.searched}
            counts = [statistics.mean(c["learned"] for c in cells.values()) for cells in learned.values() if cells]
            lines.append([str(rank), f"{start:g}", *row, f"{counts[0] / 1000:,.0f} / {counts[-1] / 1000:,.1f}"])
    heads = ["rank", "start", *(f"{d:.0%}" for d in spec.searched), "learned, K, first / last"]
    return rows(heads, lines)


PARTS: Mapping[str, Callable[[Found], str]] = {
    "claim": claim,
    "readme": readme,
    "summary": summary,
    "papers-claims": papers_claims,
    "table": table,
    "criteria": criteria,
    "writers": writers,
    "convergence": convergence,
    "ablation": ablation,
}


def written(text: str, found: Found) -> str:
    """A text with what is between its marks made anew."""
    return MARK.sub(lambda match: f"{match[1]}\n{PARTS[match[2]](found)}\n\n{match[3]}", text)


# figures


def figures(found: Found) -> list[Figure]:
    """Accuracy against bytes, MACs and milliseconds; a panel for each data set, with the front of what is best."""

    def size(name: str, density: float, method: str, cells: list[dict[str, Any]]) -> float | None:
        return float(statistics.mean(c["bytes"] for c in cells)) / 1000

    def macs(name: str, density: float, method: str, cells: list[dict[str, Any]]) -> float | None:
        own = [c for c in cells if c.get("macs")] or list(good(found, name, density, "wide").values())
        known = [c["macs"][0] for c in own if c.get("macs")]
        return float(statistics.mean(known)) / 1e6 if known else None

    def latency(name: str, density: float, method: str, cells: list[dict[str, Any]]) -> float | None:
        fast = milliseconds(name)
        return fast.get((method if method in (*WIDE, "direct-r8", "direct-r32") else "wide", density))

    axes = (
        ("bytes", "Accuracy against the bytes of the file", "kilobytes of the file", size),
        ("macs", "Accuracy against MACs", "million MACs", macs),
        ("latency", "Accuracy against latency", "ms for one image, onnxruntime, one thread", latency),
    )
    return [_figure(found, *axis) for axis in axes]


def is_better(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether it costs no more and is right as often, and not both alike."""
    return one[0] <= other[0] and one[1] >= other[1] and one != other


def _figure(found: Found, key: str, title: str, unit: str, cost: Callable[..., float | None]) -> Figure:
    panels: list[Panel] = []
    told: list[list[Cell]] = []
    for name in IMAGES:
        lines: dict[str, list[tuple[float, float]]] = {}
        tips: list[tuple[tuple[float, float], str, str]] = []
        for (family, methods), density in product(SHOWN.items(), DENSITIES):
            method = next((m for m in methods if good(found, name, density, m)), methods[0])
            cells = list(good(found, name, density, method).values())
            at = cost(name, density, method, cells) if cells else None
            if at is None:
                continue
            point = (at, float(statistics.mean(c["accuracy"] for c in cells)))
            lines.setdefault(family, []).append(point)
            label = TITLES.get(method, family).strip("*")
            tip = f"{label}, {density:.0%} of the channels\n{point[1]:.1f}%, {at:,.2f} {unit}, seeds: {len(cells)}"
            tips.append((point, family, tip))
            told.append([SPECS[name].title, density, label, round(at, 3), round(point[1], 3), len(cells)])
        css = {family: f"s{number}" for number, family in enumerate(SHOWN)}
        front = [point for point, _, _ in tips if not any(is_better(other, point) for other, _, _ in tips)]
        marks: list[Mark] = [Line(points, css[family], family) for family, points in lines.items()]
        for point, family, tip in tips:
            marks.append(Dot(*point, css[family] if point in front else f"{css[family]} faint", tip))
        if tips:
            x = logarithmic(unit, [x for (x, _), _, _ in tips])
            y = linear("test accuracy", [y for (_, y), _, _ in tips], most=100, text=lambda v: f"{v:g}%")
            panels.append(Panel(x, y, marks, short(name)))
    caption = (
        "Further up and further left is better. Lines go from the whole network to 10% of its channels. Full dots: "
        "nothing else is better in both."
    )
    columns = ["data", "channels", "code", unit, "accuracy", "seeds"]
    return Figure(f"front-{key}", title, caption, panels, columns, told)


def write(root: Path, found: Found) -> None:
    """Both texts, between their marks, and the figures."""
    for name in TEXTS:
        file = root / name
        file.write_text(written(file.read_text("utf-8"), found), encoding="utf-8")
    for figure in figures(found):
        draw(figure, root / "docs" / "assets" / "codes")
