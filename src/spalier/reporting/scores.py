"""How units were scored before a prune: those that stayed, and those that went."""

from __future__ import annotations

from collections.abc import Sequence

from spalier.reporting.figure import Box, Cell, Figure, Mark, Panel
from spalier.reporting.model import Entry, Scores
from spalier.reporting.naming import clean
from spalier.reporting.scales import Axis, linear_ticks, logarithmic

MOST_STREAMS = 11


def scores(entry: Entry, found: Scores, name: str) -> Figure:
    """How the units that were kept and removed before this task's block were scored."""
    total = (
        [sum(c) for c in zip(*(k for k, _ in found.streams.values()), strict=True)],
        [sum(c) for c in zip(*(r for _, r in found.streams.values()), strict=True)],
    )
    streams = sorted(found.streams.items(), key=lambda s: -sum(map(sum, s[1])))
    shown = streams[:MOST_STREAMS]
    panels = [_histogram("all streams", found.edges, *total, height=140)] if len(streams) != 1 else []
    panels += [_histogram(clean(stream), found.edges, *counts, height=64) for stream, counts in shown]
    caption = f"Units by normalised score ({found.criterion}, {found.samples} samples), before the prune to this task."
    if len(shown) < len(streams):
        caption += f" The {len(shown)} largest of {len(streams)} streams; the table has more."
    bounds = [0.0, *found.edges]
    rows: list[list[Cell]] = [
        [stream, low if i else None, found.edges[i] if i < len(found.edges) else None, kept[i], removed[i]]
        for stream, (kept, removed) in found.streams.items()
        for i, low in enumerate(bounds)
        if kept[i] or removed[i]
    ]
    columns = ["stream", "score from", "score to", "kept", "removed"]
    key = (("kept", "kept"), ("removed", "removed"))
    return Figure(
        f"scores-{name}", "Scores", caption, panels, columns, rows, "task", entry.key, least=150, key=key
    )


def _histogram(
    title: str, edges: Sequence[float], kept: Sequence[int], removed: Sequence[int], height: float
) -> Panel:
    factor = edges[-1] / edges[-2]
    bounds = [edges[0] / factor, *edges, edges[-1] * factor]
    marks: list[Mark] = []
    for i, (stay, go) in enumerate(zip(kept, removed, strict=True)):
        low, high = bounds[i], bounds[i + 1]
        span = "below" if i == 0 else "above" if i == len(edges) else f"{low:.3g} to {high:.3g}"
        tip = f"score {span}\n{stay} kept, {go} removed"
        if go:
            marks.append(Box(low, 0, high, go, "removed", tip))
        if stay:
            marks.append(Box(low, go, high, go + stay, "kept", tip))
    most = max((a + b for a, b in zip(kept, removed, strict=True)), default=1)
    x = logarithmic("", [bounds[0], bounds[-1]], count=4, text=lambda v: f"{v:.3g}")
    x = Axis("normalised score" if height > 100 else "", bounds[0], bounds[-1], x.ticks, log=True)
    y = Axis(
        "",
        0,
        max(most, 1) * 1.05,
        tuple((t, f"{t:.0f}") for t in linear_ticks(0, max(most, 1), 3) if t == int(t)),
        grid=True,
    )
    return Panel(x, y, marks, title, height=height, span=height > 100)
