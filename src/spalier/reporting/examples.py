"""Images that were classified wrongly and correctly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from spalier.reporting.figure import Cell, Figure, Mark, Panel, Text, Tile
from spalier.reporting.model import Entry, Example
from spalier.reporting.naming import fitted, percent
from spalier.reporting.scales import Axis

_ACROSS = 4
_HEAD, _ROW = 0.3, 1.42
"""What a heading and a row of images take, in widths of an image."""


def examples(entry: Entry, name: str) -> Figure:
    """Images with what they are, what they were predicted as, and with what confidence."""
    groups = {
        "classified wrongly": [e for e in entry.examples if e.label != e.guess],
        "classified correctly": [e for e in entry.examples if e.label == e.guess],
    }
    marks: list[Mark] = []
    top = y = sum(map(_tall, groups.values()))
    for word, group in groups.items():
        marks += _group(entry, word, group, y)
        y -= _tall(group)
    panel = Panel(Axis("", 0, _ACROSS), Axis("", 0, top), marks, height=top * 336 / _ACROSS)
    rows: list[list[Cell]] = [
        [n, entry.classes[e.label], entry.classes[e.guess], e.confidence]
        for n, e in enumerate(entry.examples, 1)
    ]
    caption = (
        "Test images that the network is most confident of, with its confidence; each is stretched over the "
        "whole range of brightness."
    )
    columns = ["image", "class", "predicted as", "confidence"]
    return Figure(f"examples-{name}", "Right and wrong", caption, [panel], columns, rows, "task", entry.key)


def _tall(group: Sequence[Example]) -> float:
    return _HEAD + _ROW * math.ceil(len(group) / _ACROSS) if group else 0.0


def _group(entry: Entry, word: str, group: Sequence[Example], y: float) -> Iterator[Mark]:
    if group:
        yield Text(0, y - 0.18, f"{word}, most confident first", "name")
    for place, example in enumerate(group):
        row, column = divmod(place, _ACROSS)
        yield from _image(entry, example, column, y - _HEAD - _ROW * (row + 1))


def _image(entry: Entry, example: Example, x: float, y: float) -> Iterator[Mark]:
    label, guess, sure = entry.classes[example.label], entry.classes[example.guess], example.confidence
    is_right = example.label == example.guess
    tip = f"{label}{'' if is_right else f' predicted as {guess}'}\nconfidence {percent(sure)}"
    yield Tile(x, y + 0.43, x + 0.92, y + 1.35, example.png, "right" if is_right else "wrong", tip)
    said = fitted(label, 76, 10) if is_right else f"{fitted(label, 31, 10)} → {fitted(guess, 31, 10)}"
    yield Text(x, y + 0.26, said, "small")
    yield Text(x, y + 0.1, percent(sure, 0), "small quiet")
