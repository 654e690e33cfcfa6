"""The wall: the network as an espalier, a branch for each layer, a leaf for each channel, cut back step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from spalier.reporting.figure import Branch, Cell, Figure, Line, Mark, Panel, Text
from spalier.reporting.model import Entry, Run
from spalier.reporting.naming import density
from spalier.reporting.scales import Axis


def steps(run: Run) -> list[Entry]:
    """The tasks of a run whose layers are those of the first one."""
    if not run.entries:
        return []
    shape = [(layer.name, layer.channels) for layer in run.entries[0].layers]
    return [e for e in run.entries if [(layer.name, layer.channels) for layer in e.layers] == shape and shape]


def wall(run: Run, name: str) -> Figure | None:
    """The picture of a run; None where nothing is known of its layers."""
    found = steps(run)
    if not found:
        return None
    layers, count = found[0].layers, len(found[0].layers)
    names = tuple((float(i), layer.name) for i, layer in enumerate(layers))
    panel = Panel(
        Axis("input at the foot, head at the top", -1, 1),
        Axis("", -0.7, count - 0.4, names, grid=True),
        [*_branches(found), Line([(0, -0.7), (0, count - 0.5)], "trunk"), *_counts(found[-1])],
        f"density {density(found[-1].target)}",
        height=min(max(440 / count, 13.0), 34.0) * (count + 0.3),
        right=max((f"{layer.channels} / {layer.channels}" for layer in layers), key=len),
        left_size=10,
        ends=True,
    )
    columns = ["layer", "channels", *(f"left at {density(e.target)}" for e in found)]
    rows: list[list[Cell]] = [
        [layer.name, layer.channels, *(e.layers[i].left for e in found)] for i, layer in enumerate(layers)
    ]
    return Figure(name, "The wall", _CAPTION, [panel], columns, rows, "run", run.name)


_CAPTION = (
    "Each branch is a layer, each leaf an output channel; where there is no room for leaves a stroke stands for a few. "
    "Pale ones are cut, the palest first. Branches are as long as the square root of a layer's width. "
    "Numbers are channels left."
)


def _branches(found: Sequence[Entry]) -> Iterator[Mark]:
    last = found[-1]
    most = max(layer.channels for layer in last.layers)
    for place, layer in enumerate(last.layers):
        tip = f"{layer.name}\n{layer.left} of {layer.channels} channels at density {density(last.target)}"
        reach = math.sqrt(layer.channels / most)
        yield Branch(place, life(found, place), len(found), layer.name, tip, reach)


def _counts(entry: Entry) -> Iterator[Mark]:
    for place, layer in enumerate(entry.layers):
        yield Text(1, place, f"{layer.left} / {layer.channels}", "count", "start", dx=8, dy=3.5)


def life(found: Sequence[Entry], layer: int) -> list[int]:
    """For each channel of a layer, the step from which on it is gone; the number of steps where it never is."""
    kept = np.stack([e.layers[layer].kept for e in found])  # (steps, channels)
    ever = kept.any(axis=0)
    last = len(found) - 1 - np.argmax(kept[::-1], axis=0)
    lives: list[int] = np.where(ever, last + 1, 0).tolist()
    return lives
