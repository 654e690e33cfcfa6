"""A `Figure` as SVG: places and classes only, so that a style sheet says how it looks and no policy is in the way."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from spalier.reporting import leaves
from spalier.reporting.figure import Box, Branch, Dot, Figure, Line, Mark, Panel, Rule, Text, Tile, Whisker
from spalier.reporting.naming import breadth, clean, fitted, fitted_end
from spalier.reporting.scales import spread_out

GAP = 28.0
MARGIN = 12
"""Around a figure that is a file of its own."""
_LABEL = 13.0  # pixels between two labels, one above the other


def esc(text: str) -> str:
    """Text as an attribute or an element may hold it."""
    return escape(clean(text), {'"': "&quot;", "'": "&#39;"})


def _tip(words: str) -> str:
    """What a mark says when it is hovered over, line by line."""
    return "&#10;".join(esc(line) for line in words.split("\n"))


@dataclass(frozen=True)
class Frame:
    """Where a panel's axes lie, in pixels."""

    panel: Panel
    left: float
    top: float
    right: float
    bottom: float
    start: float
    edge: float
    """The left and right ends of all that belongs to the panel."""

    def x(self, value: float) -> float:
        """Pixels from the left."""
        return self.left + self.panel.x.share(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return self.bottom - self.panel.y.share(value) * (self.bottom - self.top)


def draw(figure: Figure, width: float, *, style: str = "", suffix: str = "") -> str:
    """The figure, so many pixels wide; with a style sheet, as a file of its own."""
    columns = max(1, min(len(figure.panels), int((width + GAP) // (figure.least + GAP))))
    each = (width - GAP * (columns - 1)) / columns
    pieces, top = [_key(figure)], 22.0 if figure.key else 0.0
    for row in _rows(figure.panels, columns):
        wide = width if row[0].span else each
        frames = [_frame(panel, i * (each + GAP), top, wide) for i, panel in enumerate(row)]
        pieces += [_panel(frame) for frame in frames]
        top = max(frame.bottom + _below(frame.panel) for frame in frames) + 10
    return _document(figure, width, top, "".join(pieces), style, suffix)


def _rows(panels: Sequence[Panel], columns: int) -> list[list[Panel]]:
    """Panels side by side; one that spans the width has a row of its own."""
    rows: list[list[Panel]] = []
    for panel in panels:
        if not rows or len(rows[-1]) == columns or panel.span or rows[-1][0].span:
            rows.append([])
        rows[-1].append(panel)
    return rows


def _document(figure: Figure, width: float, height: float, body: str, style: str, suffix: str) -> str:
    begin = '<svg xmlns="http://www.w3.org/2000/svg"'
    if not style:
        label = esc(f"{figure.title}. {figure.caption}")
        own = (
            f'class="drawn{suffix}" role="group" aria-label="{label}" viewBox="0 0 {width:.0f} {height:.0f}"'
        )
        return f"{begin} {own}>{body}</svg>"
    wide, tall = width + 2 * MARGIN, height + 2 * MARGIN
    own = f'width="{wide:.0f}" height="{tall:.0f}" viewBox="{-MARGIN} {-MARGIN} {wide:.0f} {tall:.0f}"'
    said = f"<title>{esc(figure.title)}</title><desc>{esc(figure.caption)}</desc><style>{style}</style>"
    paper = f'<rect class="paper" x="{-MARGIN}" y="{-MARGIN}" width="{wide:.0f}" height="{tall:.0f}"/>'
    return f"{begin} {own}>{said}{paper}{body}</svg>"


def _key(figure: Figure) -> str:
    """What the colours mean."""
    pieces, x = [], 1.0
    for css, words in figure.key:
        pieces.append(f'<rect class="box {css}" x="{x:.1f}" y="4" width="9" height="9"/>')
        pieces.append(text(x + 14, 12.5, words, "label"))
        x += 14 + breadth(words) + 16
    return "".join(pieces)


def _below(panel: Panel) -> float:
    room = 10.0
    if panel.x.ticks:
        longest = max(breadth(text) for _, text in panel.x.ticks)
        room += min(longest, 90) + 4 if panel.upright else 16
    return room + (17 if panel.x.label else 0)


def _frame(panel: Panel, left: float, top: float, width: float) -> Frame:
    size = panel.left_size
    widest = max((breadth(text, size) for _, text in panel.y.ticks), default=0.0)
    begin = left + min(widest + 9, 0.34 * width)
    labels = [m.label for m in panel.marks if isinstance(m, Line) and m.label] + [panel.right]
    beside = max(breadth(text) for text in labels)
    end = left + width - (min(beside + 16, 0.32 * width) if beside else 8)
    over = 8.0 + (20 if panel.title else 0) + (22 if panel.y.label else 0)
    over += 13 if any(isinstance(m, Rule) and m.label for m in panel.marks) else 0
    height = panel.height or end - begin
    return Frame(panel, begin, top + over, end, top + over + height, left, left + width)


def _panel(frame: Frame) -> str:
    marks = [_mark(frame, mark) for mark in frame.panel.marks]
    head = "".join(_heading(frame))
    labels = "".join([*_line_labels(frame), *_rule_labels(frame)])
    return f"<g>{head}{''.join(_axes(frame))}{''.join(marks)}{labels}</g>"


def _heading(frame: Frame) -> Iterator[str]:
    panel, at = frame.panel, frame.top - 12
    start = frame.start
    if any(isinstance(m, Rule) and m.label for m in panel.marks):
        at -= 13
    if panel.y.label:
        yield text(start, at, fitted(panel.y.label, frame.edge - start), "name")
        at -= 18
    if panel.title:
        yield text(start, at, fitted(panel.title, frame.edge - start, 12), "heading")


def _axes(frame: Frame) -> Iterator[str]:
    panel, size = frame.panel, frame.panel.left_size
    for value, word in panel.y.ticks:
        y = frame.y(value)
        if panel.y.grid:
            yield f'<path class="grid" d="M{frame.left:.1f} {y:.1f}H{frame.right:.1f}"/>'
        shown = (fitted_end if panel.ends else fitted)(word, frame.left - frame.start - 8, size)
        css = _SIZES.get(size, "tick")
        yield text(frame.left - 7, y + 0.35 * size, shown, css, "end")
    if panel.x.ticks:
        yield from _x_axis(frame)
    if panel.x.label:
        below = frame.bottom + _below(panel) - 8
        yield text((frame.left + frame.right) / 2, below, panel.x.label, "name", "middle")


_SIZES = {10.0: "tick small", 9.0: "tick tiny"}


def _x_axis(frame: Frame) -> Iterator[str]:
    panel, last = frame.panel, -math.inf
    if panel.x.grid or panel.x.log or not panel.upright:
        yield f'<path class="axis" d="M{frame.left:.1f} {frame.bottom:.1f}H{frame.right:.1f}"/>'
    for value, word in panel.x.ticks:
        x = frame.x(value)
        if panel.upright:
            turned = f' transform="rotate(-90 {x + 4:.1f} {frame.bottom + 6:.1f})"'
            size = panel.left_size
            yield text(
                x + 4, frame.bottom + 6, fitted(word, 90, size), _SIZES.get(size, "tick"), "end", turned
            )
            continue
        yield f'<path class="axis" d="M{x:.1f} {frame.bottom:.1f}v4"/>'
        half = breadth(word) / 2
        if x - half > last + 6:  # a label that would touch the one before is left out; its tick stays
            yield text(x, frame.bottom + 16, word, "tick", "middle")
            last = x + half


def text(x: float, y: float, words: str, css: str, anchor: str = "start", more: str = "") -> str:
    """A text element."""
    return f'<text class="{css} {anchor}" x="{x:.1f}" y="{y:.1f}"{more}>{esc(words)}</text>'


def _line_labels(frame: Frame) -> Iterator[str]:
    lines = [m for m in frame.panel.marks if isinstance(m, Line) and m.label and m.points]
    ends = [max(line.points) for line in lines]
    at = [frame.y(y) for _, y in ends]
    places = spread_out(at, _LABEL, frame.top + 4, frame.bottom)
    for line, (x, _), y, place in zip(lines, ends, at, places, strict=True):
        begin = frame.x(x) + 6
        if frame.right + 3 - begin > 4 or abs(place - y) > 3:
            d = f"M{begin:.1f} {y:.1f}L{max(frame.right + 1, begin):.1f} {place:.1f}h4"
            yield f'<path class="leader {line.css}" d="{d}"/>'
        yield text(
            frame.right + 8, place + 4, fitted(line.label, frame.edge - frame.right - 8), f"label {line.css}"
        )


def _rule_labels(frame: Frame) -> Iterator[str]:
    """Those that have room; a rule whose label would touch the one before goes without."""
    last = -math.inf
    for rule in sorted((m for m in frame.panel.marks if isinstance(m, Rule) and m.label), key=lambda m: m.x):
        x, half = frame.x(rule.x), breadth(rule.label) / 2
        if x - half > last + 4 and x + half <= frame.edge:
            yield text(x, frame.top - 5, rule.label, "tick", "middle")
            last = x + half


def _mark(frame: Frame, mark: Mark) -> str:
    match mark:
        case Line():
            if not mark.joined:
                return ""
            points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in mark.points)
            return f'<polyline class="line {mark.css}" points="{points}"/>'
        case Dot():
            return _dot(frame, mark)
        case Whisker():
            x, low, high = frame.x(mark.x), frame.y(mark.low), frame.y(mark.high)
            d = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"
            return f'<path class="whisker {mark.css}" d="{d}"/>'
        case Box():
            return _box(frame, mark)
        case Rule():
            x = frame.x(mark.x)
            return f'<path class="rule" d="M{x:.1f} {frame.top:.1f}V{frame.bottom:.1f}"/>'
        case Text():
            x, y = frame.x(mark.x) + mark.dx, frame.y(mark.y) + mark.dy
            return text(x, y, mark.text, mark.css, mark.anchor)
        case Branch():
            return _branch(frame, mark)
        case Tile():
            return _tile(frame, mark)


_SHAPES = (
    '<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}"/>',
    '<path d="M{x:.1f} {y:.1f}m-{r:.1f} -{r:.1f}h{w:.1f}v{w:.1f}h-{w:.1f}z"/>',
    '<path d="M{x:.1f} {y:.1f}m0 -{w:.1f}l{w:.1f} {w:.1f}l-{w:.1f} {w:.1f}l-{w:.1f} -{w:.1f}z"/>',
)


def _dot(frame: Frame, dot: Dot) -> str:
    x, y, r = frame.x(dot.x), frame.y(dot.y), 2.0 if dot.small else 3.4
    shape = _SHAPES[dot.shape % len(_SHAPES)].format(x=x, y=y, r=r, w=1.9 * r if dot.shape == 1 else 1.3 * r)
    if not dot.tip:
        return f'<g class="dot {dot.css}">{shape}</g>'
    task = f' data-task="{esc(dot.task)}"' if dot.task else ""
    target = f'<circle class="target" cx="{x:.1f}" cy="{y:.1f}" r="9"/>'
    return f'<g class="dot point {dot.css}" aria-label="{_tip(dot.tip)}"{task}>{shape}{target}</g>'


def _box(frame: Frame, box: Box) -> str:
    x0, x1 = sorted((frame.x(box.x0), frame.x(box.x1)))
    y0, y1 = sorted((frame.y(box.y0), frame.y(box.y1)))
    strength = "" if box.strength >= 1 else f' fill-opacity="{box.strength:.3f}"'
    tip = f' aria-label="{_tip(box.tip)}"' if box.tip else ""
    task = f' data-task="{esc(box.task)}"' if box.task else ""
    css = f"box {box.css}{' tipped' if box.tip else ''}{' point' if box.task else ''}"
    sides = f'x="{x0:.2f}" y="{y0:.2f}" width="{x1 - x0:.2f}" height="{y1 - y0:.2f}"'
    found = f'<rect class="{css}" {sides}{strength}{tip}{task}/>'
    if box.text:
        inked = "cell on" if box.strength > 0.55 else "cell"
        if breadth(box.text, 10) <= x1 - x0:
            found += text((x0 + x1) / 2, (y0 + y1) / 2 + 3.5, box.text, inked, "middle")
    return found


def _branch(frame: Frame, branch: Branch) -> str:
    middle, half = (frame.left + frame.right) / 2, branch.reach * (frame.right - frame.left) / 2
    half = min(half, 14.0 * len(branch.lives))
    y, room = frame.y(branch.y), 0.46 * abs(frame.y(1) - frame.y(0))
    pieces = [f'<path class="wire" d="M{middle - half:.1f} {y:.1f}H{middle + half:.1f}"/>']
    css = "twig" if leaves.is_twigs(len(branch.lives), half) else "leaf"
    for step, d in leaves.paths(branch.lives, middle, y, half, room).items():
        age = math.ceil(4 * step / branch.never)
        gone = "" if step == branch.never else f' gone g{age}" data-cut="{step}'
        pieces.append(f'<path class="{css}{gone}" d="{d}"/>')
    top, tall = y - room, 2 * room
    hover = f'x="{frame.left:.1f}" y="{top:.1f}" width="{frame.right - frame.left:.1f}" height="{tall:.1f}"'
    pieces.append(f'<rect class="target tipped" {hover} aria-label="{_tip(branch.tip)}"/>')
    return f'<g class="branch" data-layer="{esc(branch.name)}">{"".join(pieces)}</g>'


def _tile(frame: Frame, tile: Tile) -> str:
    x0, x1 = sorted((frame.x(tile.x0), frame.x(tile.x1)))
    y0, y1 = sorted((frame.y(tile.y0), frame.y(tile.y1)))
    place = f'x="{x0:.1f}" y="{y0:.1f}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}"'
    data = base64.b64encode(tile.png).decode("ascii")
    return (
        f'<g class="tipped" aria-label="{_tip(tile.tip)}">'
        f'<image {place} preserveAspectRatio="none" href="data:image/png;base64,{data}"/>'
        f'<rect class="tile {tile.css}" {place}/></g>'
    )
