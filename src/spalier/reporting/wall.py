"""The wall: the network as an espalier, a branch for each layer, a leaf for each channel, cut back step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spalier.reporting.figure import Branch, Cell, Figure, Line, Mark, Panel, Text
from spalier.reporting.model import Entry, Run
from spalier.reporting.naming import density, percent
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
    layers, last = found[0].layers, found[-1]
    count = len(layers)
    most = max(layer.channels for layer in layers)
    marks: list[Mark] = []
    lives = [life(found, i) for i in range(count)]
    for place, layer in enumerate(layers):
        left = last.layers[place].left
        tip = f"{layer.name}\n{left} of {layer.channels} channels at density {density(last.target)}"
        reach = math.sqrt(layer.channels / most)
        marks.append(Branch(place, lives[place], len(found), layer.name, tip, reach))
    marks.append(Line([(0, -0.7), (0, count - 0.5)], "trunk"))
    for place, layer in enumerate(layers):
        marks.append(
            Text(1, place, f"{last.layers[place].left} / {layer.channels}", "count", "start", dx=8, dy=3.5)
        )
    pitch = min(max(440 / count, 13.0), 34.0)
    names = tuple((float(i), layer.name) for i, layer in enumerate(layers))
    longest = max((f"{layer.channels} / {layer.channels}" for layer in layers), key=len)
    panel = Panel(
        Axis("input at the foot, head at the top", -1, 1),
        Axis("", -0.7, count - 0.4, names, grid=True),
        marks,
        f"density {density(last.target)}",
        height=pitch * (count + 0.3),
        right=longest,
        left_size=10,
        ends=True,
    )
    caption = (
        "Each branch is a layer, each leaf an output channel; where there is no room for leaves a stroke stands "
        "for a few. Pale ones are cut, the palest first. Branches are as long as the square root of a layer's width. "
        "Numbers are channels left."
    )
    columns = ["layer", "channels", *(f"left at {density(e.target)}" for e in found)]
    rows: list[list[Cell]] = [
        [layer.name, layer.channels, *(e.layers[i].left for e in found)] for i, layer in enumerate(layers)
    ]
    return Figure(name, "The wall", caption, [panel], columns, rows, "run", run.name, wide=False)


def life(found: Sequence[Entry], layer: int) -> list[int]:
    """For each channel of a layer, the step from which on it is gone; the number of steps where it never is."""
    kept = np.stack([e.layers[layer].kept for e in found])  # (steps, channels)
    ever = kept.any(axis=0)
    last = len(found) - 1 - np.argmax(kept[::-1], axis=0)
    lives: list[int] = np.where(ever, last + 1, 0).tolist()
    return lives


def left(entry: Entry) -> str:
    """How much of the network is there, in words."""
    return f"{percent(entry.number('channels'))} of channels"
