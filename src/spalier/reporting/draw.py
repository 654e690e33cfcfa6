"""Figures as plain data, and their drawing as SVG.

A drawing holds positions and class names only. The style sheet decides how it looks, so that the page's content policy
needs no exception for inline styles.
"""

from __future__ import annotations

import base64
import math
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape

from spalier.text import byte_size, clean, short_number

Cell = str | int | float | None
Rows = list[list[Cell]]
Format = Callable[[float], str]
Ticks = tuple[tuple[float, str], ...]
COLOURS = 8
"""How many colours the style sheet has for series."""
_GAP = 28.0  # between panels
_MARGIN = 12  # around a figure that is a file of its own
_LABEL = 13.0  # between the baselines of two labels
_TALLEST_STROKE = 16.0
_FINEST = 2.0  # between two leaves of a branch; below that, leaves cannot be told apart

# -- text -------------------------------------------------------------------------------------------------------------


def density(target: float) -> str:
    """A density as it was asked for: a share, or a number of bytes.

    >>> density(0.3), density(0.425), density(300000.0)
    ('30%', '42.5%', '300 kB')
    """
    return byte_size(target) if target > 1 else f"{100 * target:.4g}%"


def text_width(text: str, points: float = 11) -> float:
    """About how many pixels a text takes, rather too many: no font is at hand here.

    >>> text_width("iii") < text_width("MMM")
    True
    """
    return points * sum(_character_width(character) for character in text)


def _character_width(character: str) -> float:
    if unicodedata.combining(character):
        return 0.0
    if not character.isascii():
        narrow = unicodedata.east_asian_width(character) in ("N", "Na", "H")
        return 0.7 if narrow and character.isalnum() else 1.25
    if character in "iIjl.,:;|!'()[]{}ftr1 ":
        return 0.45
    return 0.92 if character in "MW@%mw" else 0.66


def fitted(text: str, room: float, points: float = 11, *, end: int = 2) -> str:
    """A text that takes at most so many pixels; where it is too long, ``end`` fifths of what is left are its end."""
    shown = text = clean(text)
    for kept in range(len(text) - 1, 0, -1):
        if text_width(shown, points) <= room:
            break
        last = kept * end // 5
        shown = f"{text[: kept - last].rstrip()}…{text[len(text) - last :].lstrip()}"
    return shown


# -- axes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """What an axis shows, from where to where, and its ticks."""

    label: str
    low: float
    high: float
    ticks: Ticks = ()
    log: bool = False
    grid: bool = False

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one.

        >>> Axis("", 1, 100, log=True).share(10)
        0.5
        """
        if self.log:
            return math.log10(value / self.low) / math.log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear(label: str, values: Iterable[float], most: float = math.inf, text: Format = short_number) -> Axis:
    """An axis for these values with some room at its ends, but not below zero or beyond the most that is possible."""
    found = list(values) or [0.0, 1.0]
    low, high = min(found), max(found)
    room = 0.07 * (high - low) or 0.1 * abs(high) or 0.5
    low, high = max(low - room, min(low, 0.0)), min(high + room, max(high, most))
    return Axis(label, low, high, _labelled(linear_ticks(low, high), text), grid=True)


def logarithmic(label: str, values: Iterable[float], text: Format = short_number, grid: bool = False) -> Axis:
    """A logarithmic axis for these positive values, with some room at its ends."""
    found = [v for v in values if v > 0] or [1.0, 10.0]
    room = 10 ** max(0.06 * math.log10(max(found) / min(found)), 0.03)
    low, high = min(found) / room, max(found) * room
    return Axis(label, low, high, _labelled(log_ticks(low, high), text), log=True, grid=grid)


def _labelled(ticks: Sequence[float], text: Format) -> Ticks:
    """Ticks with their labels; of those that round to the same label, the first."""
    first = {text(tick): tick for tick in reversed(ticks)}
    return tuple(sorted((tick, label) for label, tick in first.items()))


def linear_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two ends, about so many.

    >>> linear_ticks(0, 1), linear_ticks(0.93, 0.97, 4)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.93, 0.94, 0.95, 0.96, 0.97])
    """
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1.0, 2.0, 2.5, 5.0, 10.0) if s * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(i * step, digits) + 0.0 for i in range(first, last + 1)]  # + 0.0 makes -0.0 plain


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between two ends of a logarithmic axis: the finest set of digits that is not too many.

    >>> log_ticks(1, 1000), log_ticks(90, 700)
    ([1.0, 10.0, 100.0, 1000.0], [100.0, 150.0, 200.0, 300.0, 500.0, 700.0])
    """
    best: list[float] = []
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ("1", "1 3", "1 2 5", "1 1.5 2 3 5 7", "1 1.2 1.5 2 2.5 3 4 5 6 7 8 9"):
        found = [float(f"{digit}e{power}") for power in powers for digit in digits.split()]
        found = [t for t in found if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]
        if len(found) > count + 1 and len(best) >= 2:
            break
        best = found
    while len(best) > count + 2:
        best = best[::2]
    return best if len(best) >= 2 else linear_ticks(low, high, count)


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, each at least a gap from the next; in order, and inside where there is room.

    >>> spread_out([10, 11, 30], 5, 0, 100)
    [8.0, 13.0, 30]
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # Less a gap for each one before it, a place must not fall: isotonic regression, by pooling adjacent violators.
    pools: list[tuple[float, int]] = []  # mean and number of members
    for k, i in enumerate(order):
        mean, count = wanted[i] - k * gap, 1
        while pools and pools[-1][0] > mean:
            before, members = pools.pop()
            mean, count = (before * members + mean * count) / (members + count), members + count
        pools.append((mean, count))
    starts = [mean for mean, count in pools for _ in range(count)]
    highest = max(low, high - (len(order) - 1) * gap)
    found = [0.0] * len(wanted)
    for k, i in enumerate(order):
        found[i] = min(max(starts[k], low), highest) + k * gap
    return found


# -- figures ----------------------------------------------------------------------------------------------------------


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
    """A point, its tooltip, and the key of the task that it stands for."""

    x: float
    y: float
    css: str
    tip: str = ""
    task: str = ""
    shape: int = 0
    small: bool = False


@dataclass(frozen=True)
class ErrorBar:
    """From where to where a mean varies."""

    x: float
    low: float
    high: float
    css: str


@dataclass(frozen=True)
class Box:
    """A rectangle: a bar, a cell of a matrix, an image."""

    x0: float
    y0: float
    x1: float
    y1: float
    css: str
    tip: str = ""
    opacity: float = 1.0
    text: str = ""
    """Shown in the middle, where it fits."""
    png: bytes = b""


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
    css: str


@dataclass(frozen=True)
class Branch:
    """A layer of the espalier, with a leaf for each channel."""

    y: float
    name: str
    removed_at: Sequence[int]
    """For each channel, the step from which on it is gone; ``steps`` where it stays."""
    steps: int
    reach: float
    """How much of half the width the layer takes."""


Mark = Line | Dot | ErrorBar | Box | Rule | Text | Branch


@dataclass(frozen=True)
class Panel:
    """One pair of axes, and what lies between them."""

    x: Axis
    y: Axis
    marks: Sequence[Mark]
    title: str = ""
    height: float = 230
    """Of what lies between the axes, in pixels; 0 for a square."""
    upright: bool = False
    """Whether the ticks of the x axis are turned."""
    font_size: float = 11
    """Of the ticks."""
    layers: bool = False
    """Whether ticks are names of layers, which only their ends tell apart."""


@dataclass(frozen=True)
class Figure:
    """A figure and its table. The page, the drawings and the CSV file are all made of it."""

    name: str
    """Its file's name, and its address on the page."""
    title: str
    caption: str
    panels: Sequence[Panel]
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    place: Literal["overview", "run", "task"] = "overview"
    of: str = ""
    """The name of its run, or the key of its task."""
    panel_width: float = 300
    """How wide a panel has to be at least."""
    key: Sequence[str] = ()
    """What colours mean, where no label stands beside them: words that are class names too."""
    full: bool = False
    """Whether it takes the whole width of the page even with one panel."""

    @property
    def wide(self) -> bool:
        """Whether it takes the whole width of the page."""
        return (self.full or len(self.panels) != 1) and self.place != "task"


# -- SVG --------------------------------------------------------------------------------------------------------------


def to_svg(figure: Figure, width: float, *, style: str = "", suffix: str = "") -> str:
    """The figure as SVG, so many pixels wide; with a style sheet, as a file of its own."""
    columns = max(1, min(len(figure.panels), int((width + _GAP) // (figure.panel_width + _GAP))))
    each = (width - _GAP * (columns - 1)) / columns
    pieces, top = [_key(figure)], 22.0 if figure.key else 0.0
    for first in range(0, len(figure.panels), columns):
        row = figure.panels[first : first + columns]
        frames = [Frame(panel, i * (each + _GAP), top, each) for i, panel in enumerate(row)]
        pieces += [frame.draw() for frame in frames]
        top = max(frame.bottom + frame.below for frame in frames) + 10
    return _document(figure, width, top, "".join(pieces), style, suffix)


def _document(figure: Figure, width: float, height: float, body: str, style: str, suffix: str) -> str:
    begin = '<svg xmlns="http://www.w3.org/2000/svg"'
    if not style:
        label = _escaped(f"{figure.title}. {figure.caption}")
        view = f'viewBox="0 0 {width:.0f} {height:.0f}"'
        return f'{begin} class="drawn{suffix}" role="group" aria-label="{label}" {view}>{body}</svg>'
    sides = f'width="{width + 2 * _MARGIN:.0f}" height="{height + 2 * _MARGIN:.0f}"'
    view = f'viewBox="{-_MARGIN} {-_MARGIN} {width + 2 * _MARGIN:.0f} {height + 2 * _MARGIN:.0f}"'
    head = f"<title>{_escaped(figure.title)}</title><desc>{_escaped(figure.caption)}</desc>"
    paper = f'<rect class="paper" x="{-_MARGIN}" y="{-_MARGIN}" {sides}/>'
    return f"{begin} {sides} {view}>{head}<style>{style}</style>{paper}{body}</svg>"


def _key(figure: Figure) -> str:
    pieces, x = [], 1.0
    for word in figure.key:
        pieces.append(f'<rect class="box {word}" x="{x:.1f}" y="4" width="9" height="9"/>')
        pieces.append(_text(x + 14, 12.5, word, "label"))
        x += 14 + text_width(word) + 16
    return "".join(pieces)


def _escaped(text: str) -> str:
    """Text as an attribute or an element may hold it."""
    return escape(clean(text), {'"': "&quot;", "'": "&#39;"})


def _attributes(tip: str, task: str = "") -> str:
    """The tooltip, line by line, and the task that a mark stands for."""
    label = "&#10;".join(_escaped(line) for line in tip.split("\n"))
    return (f' aria-label="{label}"' if tip else "") + (f' data-task="{_escaped(task)}"' if task else "")


def _text(x: float, y: float, words: str, css: str, anchor: str = "start", more: str = "") -> str:
    return f'<text class="{css} {anchor}" x="{x:.1f}" y="{y:.1f}"{more}>{_escaped(words)}</text>'


def _path(css: str, d: str) -> str:
    return f'<path class="{css}" d="{d}"/>'


_SHAPES = (
    '<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}"/>',
    '<path d="M{x:.1f} {y:.1f}m-{r:.1f} -{r:.1f}h{w:.1f}v{w:.1f}h-{w:.1f}z"/>',
    '<path d="M{x:.1f} {y:.1f}m0 -{w:.1f}l{w:.1f} {w:.1f}l-{w:.1f} {w:.1f}l-{w:.1f} -{w:.1f}z"/>',
)


def _depth(mark: Mark) -> tuple[int, bool]:
    """What is drawn first: lines lie above error bars, means above single runs."""
    order = (Box, Rule, ErrorBar, Branch, Line, Dot, Text)
    return order.index(type(mark)), isinstance(mark, Dot) and not mark.small


class Frame:
    """A panel at its place; all numbers are pixels."""

    def __init__(self, panel: Panel, start: float, top: float, width: float) -> None:
        self.panel, self.start, self.edge = panel, start, start + width
        self.rules = sorted((m for m in panel.marks if isinstance(m, Rule) and m.label), key=lambda m: m.x)
        self.lines = [m for m in panel.marks if isinstance(m, Line) and m.label]
        widest = max((text_width(text, panel.font_size) for _, text in panel.y.ticks), default=0.0)
        counts = [f"{len(m.removed_at)} / {len(m.removed_at)}" for m in panel.marks if isinstance(m, Branch)]
        beside = max((text_width(text) for text in (*(m.label for m in self.lines), *counts)), default=0.0)
        self.left = start + min(widest + 9, 0.34 * width)
        self.right = self.edge - (min(beside + 16, 0.32 * width) if beside else 8)
        above = 8 + (20 if panel.title else 0) + (22 if panel.y.label else 0) + (13 if self.rules else 0)
        self.top = top + above
        self.bottom = self.top + (panel.height or self.right - self.left)
        self.below = 10.0 + (17 if panel.x.label else 0)
        if panel.x.ticks:
            longest = max(text_width(text) for _, text in panel.x.ticks)
            self.below += min(longest, 90) + 4 if panel.upright else 16

    def x(self, value: float) -> float:
        """Pixels from the left."""
        return self.left + self.panel.x.share(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return self.bottom - self.panel.y.share(value) * (self.bottom - self.top)

    def draw(self) -> str:
        """The panel as a group."""
        marks = [self._mark(mark) for mark in sorted(self.panel.marks, key=_depth)]
        pieces = [*self._axes(), *marks, *self._line_labels(), *self._rule_labels()]
        return f"<g>{''.join(pieces)}</g>"

    def _axes(self) -> Iterator[str]:
        panel, at = self.panel, self.top - (25 if self.rules else 12)
        if panel.y.label:
            yield _text(self.start, at, fitted(panel.y.label, self.edge - self.start), "name")
            at -= 18
        if panel.title:
            yield _text(self.start, at, fitted(panel.title, self.edge - self.start, 12), "heading")
        points = panel.font_size
        css = {10.0: "tick small", 9.0: "tick tiny"}.get(points, "tick")
        for value, word in panel.y.ticks:
            y = self.y(value)
            if panel.y.grid:
                yield _path("grid", f"M{self.left:.1f} {y:.1f}H{self.right:.1f}")
            shown = fitted(word, self.left - self.start - 8, points, end=5 if panel.layers else 2)
            yield _text(self.left - 7, y + 0.35 * points, shown, css, "end")
        if panel.x.ticks and not panel.upright:
            yield _path("axis", f"M{self.left:.1f} {self.bottom:.1f}H{self.right:.1f}")
        last = -math.inf
        for value, word in panel.x.ticks:
            x = self.x(value)
            if panel.upright:
                turned = f' transform="rotate(-90 {x + 4:.1f} {self.bottom + 6:.1f})"'
                yield _text(x + 4, self.bottom + 6, fitted(word, 90, points), css, "end", turned)
                continue
            yield _path("axis", f"M{x:.1f} {self.bottom:.1f}v4")
            half = text_width(word) / 2
            if x - half > last + 6:  # a label that would touch the one before is left out; its tick stays
                yield _text(x, self.bottom + 16, word, "tick", "middle")
                last = x + half
        if panel.x.label:
            middle = (self.left + self.right) / 2
            yield _text(middle, self.bottom + self.below - 8, panel.x.label, "name", "middle")

    def _line_labels(self) -> Iterator[str]:
        ends = [max(line.points) for line in self.lines]
        wanted = [self.y(y) for _, y in ends]
        places = spread_out(wanted, _LABEL, self.top + 4, self.bottom)
        for line, (x, _), y, place in zip(self.lines, ends, wanted, places, strict=True):
            begin = self.x(x) + 6
            if self.right + 3 - begin > 4 or abs(place - y) > 3:
                d = f"M{begin:.1f} {y:.1f}L{max(self.right + 1, begin):.1f} {place:.1f}h4"
                yield _path(f"leader {line.css}", d)
            shown = fitted(line.label, self.edge - self.right - 8)
            yield _text(self.right + 8, place + 4, shown, f"label {line.css}")

    def _rule_labels(self) -> Iterator[str]:
        """Those that have room; a rule whose label would touch the one before goes without."""
        last = -math.inf
        for rule in self.rules:
            x, half = self.x(rule.x), text_width(rule.label) / 2
            if x - half > last + 4 and x + half <= self.edge:
                yield _text(x, self.top - 5, rule.label, "tick", "middle")
                last = x + half

    def _mark(self, mark: Mark) -> str:
        match mark:
            case Line():
                points = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in mark.points)
                return f'<polyline class="line {mark.css}" points="{points}"/>' if mark.joined else ""
            case Dot():
                return self._dot(mark)
            case ErrorBar():
                x, low, high = self.x(mark.x), self.y(mark.low), self.y(mark.high)
                d = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"
                return _path(f"whisker {mark.css}", d)
            case Box():
                return self._box(mark)
            case Rule():
                return _path("rule", f"M{self.x(mark.x):.1f} {self.top:.1f}V{self.bottom:.1f}")
            case Text():
                return _text(self.x(mark.x), self.y(mark.y), mark.text, mark.css)
            case Branch():
                return self._branch(mark)

    def _dot(self, dot: Dot) -> str:
        x, y, r = self.x(dot.x), self.y(dot.y), 2.0 if dot.small else 3.4
        side = 1.9 * r if dot.shape == 1 else 1.3 * r  # of a square, or half a diamond's diagonal
        shape = _SHAPES[dot.shape % len(_SHAPES)].format(x=x, y=y, r=r, w=side)
        target = f'<circle class="target" cx="{x:.1f}" cy="{y:.1f}" r="9"/>'
        return f'<g class="dot point {dot.css}"{_attributes(dot.tip, dot.task)}>{shape}{target}</g>'

    def _box(self, box: Box) -> str:
        x0, x1 = sorted((self.x(box.x0), self.x(box.x1)))
        y0, y1 = sorted((self.y(box.y0), self.y(box.y1)))
        place = f'x="{x0:.2f}" y="{y0:.2f}" width="{x1 - x0:.2f}" height="{y1 - y0:.2f}"'
        more = _attributes(box.tip)
        if box.png:
            data = base64.b64encode(box.png).decode("ascii")
            image = f'<image {place} preserveAspectRatio="none" href="data:image/png;base64,{data}"/>'
            return f'<g class="tipped"{more}>{image}<rect class="tile {box.css}" {place}/></g>'
        opacity = "" if box.opacity >= 1 else f' fill-opacity="{box.opacity:.3f}"'
        css = f"box {box.css}{' tipped' if box.tip else ''}"
        drawn = f'<rect class="{css}" {place}{opacity}{more}/>'
        if box.text and text_width(box.text, 10) <= x1 - x0:
            on_dark = "cell on" if box.opacity > 0.55 else "cell"
            drawn += _text((x0 + x1) / 2, (y0 + y1) / 2 + 3.5, box.text, on_dark, "middle")
        return drawn

    def _branch(self, branch: Branch) -> str:
        count = len(branch.removed_at)
        middle, half = (self.left + self.right) / 2, branch.reach * (self.right - self.left) / 2
        half = min(half, 14.0 * count)
        y, room = self.y(branch.y), 0.46 * abs(self.y(1) - self.y(0))
        pieces = [_path("wire", f"M{middle - half:.1f} {y:.1f}H{middle + half:.1f}")]
        css = "leaf" if has_leaves(count, half) else "twig"
        for step, d in leaf_paths(branch.removed_at, middle, y, half, room).items():
            shade = math.ceil(4 * step / branch.steps)
            gone = "" if step == branch.steps else f' gone g{shade}" data-cut="{step}'
            pieces.append(_path(f"{css}{gone}", d))
        left = sum(step == branch.steps for step in branch.removed_at)
        tip = _attributes(f"{branch.name}\n{left} of {count} channels at {self.panel.title}")
        place = f'x="{self.left:.1f}" y="{y - room:.1f}" width="{self.right - self.left:.1f}"'
        pieces.append(f'<rect class="target tipped" {place} height="{2 * room:.1f}"{tip}/>')
        pieces.append(_text(self.right + 8, y + 3.5, f"{left} / {count}", "count"))
        return f'<g class="branch" data-layer="{_escaped(branch.name)}">{"".join(pieces)}</g>'


# -- leaves -----------------------------------------------------------------------------------------------------------


def has_leaves(count: int, half: float) -> bool:
    """Whether a branch has room for a leaf per channel; otherwise a stroke stands for a few channels."""
    return -(-count // 2) <= max(1, int(half / _FINEST))


def leaf_paths(removed_at: Sequence[int], x: float, y: float, half: float, room: float) -> dict[int, str]:
    """The leaves of a branch by the step that removes them, on both sides of a trunk at x.

    All that goes at one step is one path, so that the page prunes a branch by hiding paths.
    """
    longer = -(-len(removed_at) // 2)
    each = 1 if has_leaves(len(removed_at), half) else -(-longer // max(1, int(half / _FINEST)))
    pitch = half / -(-longer // each)
    found: dict[int, list[str]] = defaultdict(list)
    for side, sign in ((removed_at[0::2], -1), (removed_at[1::2], 1)):
        for place in range(-(-len(side) // each)):
            held = side[place * each : (place + 1) * each]
            at = x + sign * (place + 0.6) * pitch
            if each == 1:
                found[held[0]].append(_leaf(at, y, pitch, room, sign, -1 if place % 2 else 1))
                continue
            for step in sorted(set(held)):  # a stroke for all, and on it a shorter one for all that stay longer
                tall = min(1.6 * room, _TALLEST_STROKE) * sum(other >= step for other in held) / each
                found[step].append(f"M{at:.1f} {y - tall / 2:.1f}v{tall:.1f}")
    return {step: "".join(pieces) for step, pieces in sorted(found.items())}


def _leaf(x: float, y: float, pitch: float, room: float, sign: int, up: int) -> str:
    """A pointed leaf above or below the branch, leaning outwards."""
    wide = min(max(0.62 * pitch, 1.6), 0.42 * room)
    tall = up * min(0.86 * room, max(2.6 * pitch, 9.0))
    lean = sign * min(0.45 * pitch, 0.4 * room)
    a, b = f"{lean - wide:.1f} {tall * 0.45:.1f}", f"{wide:.1f} {-tall * 0.35:.1f}"
    return f"M{x:.1f} {y:.1f}q{a} {lean:.1f} {tall:.1f}q{b} {-lean:.1f} {-tall:.1f}"
