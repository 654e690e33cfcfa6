"""`Figure`: what is drawn on the page, written as SVG and PNG, and said by the table beside it: one source for all."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spalier.reporting.scales import Axis

Cell = str | int | float | None
Place = Literal["overview", "run", "task", "files"]


@dataclass(frozen=True)
class Line:
    """Points that are joined, with a label at the end."""

    points: Sequence[tuple[float, float]]
    css: str
    label: str = ""
    joined: bool = True
    """Whether it is drawn; otherwise there is just the label."""


@dataclass(frozen=True)
class Dot:
    """A point; what it says when it is hovered over, and the task that it stands for."""

    x: float
    y: float
    css: str
    tip: str = ""
    task: str = ""
    shape: int = 0
    small: bool = False


@dataclass(frozen=True)
class Whisker:
    """An error bar."""

    x: float
    low: float
    high: float
    css: str


@dataclass(frozen=True)
class Box:
    """A rectangle: a bar, a cell."""

    x0: float
    y0: float
    x1: float
    y1: float
    css: str
    tip: str = ""
    task: str = ""
    strength: float = 1.0
    text: str = ""
    """Shown inside, in the middle."""


@dataclass(frozen=True)
class Rule:
    """A thin vertical line over the whole height, with a label at its top."""

    x: float
    label: str = ""


@dataclass(frozen=True)
class Text:
    """Words at a place."""

    x: float
    y: float
    text: str
    css: str = "label"
    anchor: Literal["start", "middle", "end"] = "start"
    dx: float = 0
    dy: float = 0


@dataclass(frozen=True)
class Branch:
    """A layer of the wall: for each channel, the step from which on it is gone (`never`: it is still there)."""

    y: float
    lives: Sequence[int]
    never: int
    name: str
    tip: str
    reach: float
    """How much of half the width the layer takes."""


@dataclass(frozen=True)
class Tile:
    """An image."""

    x0: float
    y0: float
    x1: float
    y1: float
    png: bytes
    css: str
    tip: str = ""


Mark = Line | Dot | Whisker | Box | Rule | Text | Branch | Tile


@dataclass(frozen=True)
class Panel:
    """One pair of axes, and what lies between them."""

    x: Axis
    y: Axis
    marks: Sequence[Mark]
    title: str = ""
    height: float = 230
    """Of what lies between the axes, in pixels; 0 for a square."""
    right: str = ""
    """The longest text that stands to the right."""
    upright: bool = False
    """Whether the ticks of the x axis are turned."""
    span: bool = False
    """Whether it takes the whole width."""
    left_size: float = 11
    """The size of the letters at the y axis."""
    ends: bool = False
    """Whether names that are too long there are known by their ends."""


@dataclass(frozen=True)
class Figure:
    """A figure and its table."""

    name: str
    """Its file's name, and its address on the page."""
    title: str
    caption: str
    panels: Sequence[Panel]
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    place: Place = "overview"
    of: str = ""
    """The run or task that it belongs to."""
    wide: bool = False
    least: float = 300
    """How wide a panel has to be."""
    key: Sequence[tuple[str, str]] = ()
    """What colours mean, where no label stands beside them: classes and words."""

    def to_csv(self) -> str:
        """The table, for a spreadsheet."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([[_plain(cell) for cell in row] for row in (self.columns, *self.rows)])
        return out.getvalue()


def _plain(cell: Cell) -> str | int | float:
    """A cell that no spreadsheet takes for a formula: names are strangers' text."""
    if not isinstance(cell, str):
        return "" if cell is None else cell
    risky = cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    return ("'" if risky else "") + cell.replace("\r", "\ufffd")  # a carriage return would begin a row
