"""The figures of a run and of a task: which channels are kept, how it learned, what it recognises."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from spalier.reporting import draw
from spalier.reporting.load import Example, Run, ScoreCounts, TaskResult
from spalier.text import percent

MOST_CLASSES = 40
"""How many classes are shown one by one."""
MOST_CELLS = 60
"""Up to how many classes the matrix has all of them; beyond that, those that are confused most."""
MOST_COUNTS = 20
"""Up to how many classes the cells of the matrix hold numbers."""
MOST_STREAMS = 11
_ACROSS = 4  # images in a row
_TEXT_ROW = 0.6
_HEAD, _ROW = 0.3, 1.42  # what a heading and a row of images take, in widths of an image


# -- a run ------------------------------------------------------------------------------------------------------------


def steps(run: Run) -> list[TaskResult]:
    """The tasks of a run whose layers are those of the first one."""
    shapes = [[(name, len(kept)) for name, kept in task.layers.items()] for task in run.tasks]
    return [task for task, shape in zip(run.tasks, shapes, strict=True) if shape and shape == shapes[0]]


def network_figure(run: Run, name: str) -> draw.Figure | None:
    """The network as an espalier: a branch for each layer, a leaf for each channel, pruned step by step."""
    found = steps(run)
    if not found:
        return None
    layers = found[-1].layers
    widest, count = max(map(len, layers.values())), len(layers)
    marks: list[draw.Mark] = [draw.Line([(0, -0.7), (0, count - 0.5)], "trunk")]
    for i, (layer, kept) in enumerate(layers.items()):
        marks.append(draw.Branch(i, layer, removed_at(found, layer), len(found), math.sqrt(len(kept) / widest)))
    panel = draw.Panel(
        draw.Axis("input at the foot, head at the top", -1, 1),
        draw.Axis("", -0.7, count - 0.4, tuple((float(i), layer) for i, layer in enumerate(layers)), grid=True),
        marks,
        f"density {draw.density(found[-1].target)}",
        height=min(max(440 / count, 13.0), 34.0) * (count + 0.3),
        font_size=10,
        layers=True,
    )
    caption = (
        "Each branch is a layer, each leaf an output channel; where there is no room for leaves, a stroke stands for "
        "a few. Pale ones are removed, the palest first. Branches are as long as the square root of a layer's width. "
        "Numbers are channels that are left."
    )
    columns = ["layer", "channels", *(f"left at {draw.density(task.target)}" for task in found)]
    rows: draw.Rows = [[x, len(layers[x]), *(int(task.layers[x].sum()) for task in found)] for x in layers]
    return draw.Figure(name, "The network", caption, [panel], columns, rows, "run", run.name)


def removed_at(found: Sequence[TaskResult], layer: str) -> list[int]:
    """For each channel of a layer, the step from which on it is gone; the number of steps where it stays."""
    kept = np.stack([task.layers[layer] for task in found])  # (steps, channels)
    last = len(found) - np.argmax(kept[::-1], axis=0)
    removed: list[int] = np.where(kept.any(axis=0), last, 0).tolist()
    return removed


def learning_figure(run: Run, name: str) -> draw.Figure | None:
    """Loss and validation accuracy over the steps of a run, with a rule at each prune."""
    losses = [(e.step, e.loss, e.block) for e in run.epochs if e.loss is not None]
    seen = [(e.step, e.validation, e.block) for e in run.epochs if e.validation is not None]
    if not losses:
        return None
    ends = {epoch.block: epoch.step for epoch in run.epochs}  # the last step of each block
    rules = [
        draw.Rule(end, draw.density(run.targets[block + 1]) if block + 1 in run.targets else "")
        for block, end in sorted(ends.items())
        if block + 1 in ends or block + 1 in run.targets
    ]
    x = draw.linear("steps", [0, *(epoch.step for epoch in run.epochs)])

    def curve(y: draw.Axis, points: Sequence[tuple[int, float, int]], css: str, form: str) -> draw.Panel:
        marks: list[draw.Mark] = [*rules]
        for block in dict.fromkeys(block for _, _, block in points):
            line = [(float(step), value) for step, value, b in points if b == block]
            marks.append(draw.Line(line, css))
            tips = [f"step {step:.0f}, block {block}\n{y.label} {form.format(value)}" for step, value in line]
            marks += [draw.Dot(*at, css, tip, small=True) for at, tip in zip(line, tips, strict=True)]
        return draw.Panel(x, y, marks, height=200)

    caption = "Rules are prunes, with the density that they led to; each block learns with what is left."
    panels = [curve(draw.linear("training loss", [0, *(v for _, v, _ in losses)]), losses, "s0", "{:.4f}")]
    if seen:
        accuracies = [value for _, value, _ in seen]
        y = draw.linear("validation accuracy", accuracies, 1, lambda v: f"{100 * v:.4g}%")
        panels.append(curve(y, seen, "s1", "{:.2%}"))
    else:
        caption += " Validation accuracy was measured only at the ends of blocks."
    columns = ["block", "step", "loss", "validation"]
    rows = [[e.block, e.step, e.loss, e.validation] for e in run.epochs]
    return draw.Figure(name, "Learning", caption, panels, columns, rows, "run", run.name, full=True)


# -- a task -----------------------------------------------------------------------------------------------------------


def task_figures(task: TaskResult, name: str) -> Iterator[draw.Figure]:
    """All figures of a task that its files have something for."""
    part = next((p for p in ("test", "validation") if task.confusion.get(p)), None)
    if part is not None:
        yield _classes_figure(task, task.confusion[part], part, name)
    if task.scores is not None and task.scores.streams:
        yield _scores_figure(task, task.scores, name)
    if part is not None:
        yield _confusion_figure(task, task.confusion[part], part, name)
    if task.examples:
        yield _examples_figure(task, name)


def _classes_figure(task: TaskResult, counts: Sequence[Sequence[int]], part: str, name: str) -> draw.Figure:
    """How often each class is classified correctly."""
    rows = [(i, sum(row), row[i] / sum(row)) for i, row in enumerate(counts) if sum(row)]
    rows.sort(key=lambda row: (row[2], -row[0]))
    shown = rows[:MOST_CLASSES]
    marks: list[draw.Mark] = []
    for place, (i, total, share) in enumerate(shown):
        tip = f"{task.classes[i]}\n{percent(share)} of {total} classified correctly"
        marks += [draw.Line([(0, place), (share, place)], "stem"), draw.Dot(share, place, "s0", tip)]
    x = draw.linear("classified correctly", [0, 1], most=1, text=lambda v: f"{100 * v:.0f}%")
    names = tuple((float(place), draw.fitted(task.classes[i], 110)) for place, (i, _, _) in enumerate(shown))
    y = draw.Axis("", -0.7, max(len(shown), 1) - 0.3, names)
    caption = f"Shares of the {part} samples of each class."
    if len(rows) > len(shown):
        caption += f" The {len(shown)} worst of {len(rows)} classes; the table has more."
    cells: draw.Rows = [[task.classes[i], total, share] for i, total, share in rows]
    cells += [[task.classes[i], 0, None] for i, row in enumerate(counts) if not sum(row)]
    panel, columns = draw.Panel(x, y, marks, height=max(16 * len(shown), 40)), ["class", "samples", x.label]
    return draw.Figure(f"classes-{name}", "Classes", caption, [panel], columns, cells, "task", task.key)


def _confusion_figure(task: TaskResult, counts: Sequence[Sequence[int]], part: str, name: str) -> draw.Figure:
    """Which classes are predicted as which: a matrix of all, or of those that are confused most where they are many."""
    classes, table = task.classes, np.array(counts)
    errors = table.copy()
    np.fill_diagonal(errors, 0)
    wrong = sorted((-int(errors[i, j]), i, j) for i, j in np.argwhere(errors).tolist())
    columns = ["class", "predicted as", "samples", "share of the class"]
    rows: draw.Rows = [[classes[i], classes[j], -less, -less / sum(counts[i])] for less, i, j in wrong]
    caption = (
        f"{part.capitalize()} samples by what they are (rows) and what they are predicted as (columns); darker is "
        "a larger share of the row."
    )
    shown = list(range(len(counts)))
    if len(counts) > MOST_CELLS:
        shown = sorted(np.argsort(-errors.sum(0) - errors.sum(1), kind="stable")[:MOST_COUNTS].tolist())
        caption += f" The {len(shown)} of {len(counts)} classes that are confused most; the table has more."
    names = (f"confusion-{name}", "Confusion", caption)
    panel, key = _matrix(task, table, shown), ("right", "wrong")
    return draw.Figure(*names, [panel], columns, rows, "task", task.key, key=key)


def _matrix(task: TaskResult, counts: npt.NDArray[np.int64], shown: Sequence[int]) -> draw.Panel:
    size = len(shown)
    marks = [draw.Box(0, 0, size, size, "frame")]
    for y, i in zip(range(size - 1, -1, -1), shown, strict=True):
        total = int(counts[i].sum())
        for x, j in enumerate(shown):
            if count := int(counts[i, j]):
                share = count / total
                tip = f"{task.classes[i]} predicted as {task.classes[j]}\n{count} of {total} ({percent(share)})"
                css, text = "right" if i == j else "wrong", str(count) if size <= MOST_COUNTS else ""
                opacity = 0.12 + 0.8 * math.sqrt(share)
                marks.append(draw.Box(x, y, x + 1, y + 1, css, tip, opacity=opacity, text=text))
    every = math.ceil(size / 20)  # so many names at most
    names = [(i, draw.fitted(task.classes[shown[i]], 90)) for i in range(0, size, every)]
    return draw.Panel(
        draw.Axis("predicted as", 0, size, tuple((i + 0.5, name) for i, name in names)),
        draw.Axis("", 0, size, tuple((size - i - 0.5, name) for i, name in names)),
        marks,
        height=0,
        upright=max(draw.text_width(name) for _, name in names) > 230 * every / size - 4,
        font_size=11 if size <= 14 else 9,
    )


def _scores_figure(task: TaskResult, scores: ScoreCounts, name: str) -> draw.Figure:
    """How the units that the prune before this task kept and removed were scored."""
    streams = sorted(scores.streams.items(), key=lambda s: -sum(map(sum, s[1])))
    panels = [_histogram(stream, scores.edges, *counts) for stream, counts in streams[:MOST_STREAMS]]
    if len(streams) != 1:
        kept, removed = (np.sum([counts[i] for _, counts in streams], axis=0).tolist() for i in (0, 1))
        panels.insert(0, _histogram("all streams", scores.edges, kept, removed))
    measured = f"{scores.criterion}, {scores.samples} samples"
    caption = f"Units by normalised score ({measured}), before the prune to this task."
    if len(streams) > MOST_STREAMS:
        caption += f" The {MOST_STREAMS} largest of {len(streams)} streams; the table has more."
    bounds = [None, *scores.edges, None]
    rows: draw.Rows = [
        [stream, bounds[i], bounds[i + 1], kept[i], removed[i]]
        for stream, (kept, removed) in scores.streams.items()
        for i in range(len(kept))
        if kept[i] or removed[i]
    ]
    columns, key = ["stream", "score from", "score to", "kept", "removed"], ("kept", "removed")
    names = (f"scores-{name}", "Scores", caption)
    return draw.Figure(*names, panels, columns, rows, "task", task.key, panel_width=150, key=key)


def _histogram(title: str, edges: Sequence[float], kept: Sequence[int], removed: Sequence[int]) -> draw.Panel:
    factor = edges[-1] / edges[-2]
    bounds = [edges[0] / factor, *edges, edges[-1] * factor]
    marks: list[draw.Mark] = []
    for i, (stay, go) in enumerate(zip(kept, removed, strict=True)):
        low, high = bounds[i], bounds[i + 1]
        span = "below" if i == 0 else "above" if i == len(edges) else f"{low:.3g} to {high:.3g}"
        tip = f"score {span}\n{stay} kept, {go} removed"
        marks += [draw.Box(low, 0, high, go, "removed", tip)] if go else []
        marks += [draw.Box(low, go, high, go + stay, "kept", tip)] if stay else []
    most = max(1, *(stay + go for stay, go in zip(kept, removed, strict=True)))
    across = tuple((t, f"{t:.3g}") for t in draw.log_ticks(bounds[0], bounds[-1], 4))
    up = tuple((t, f"{t:.0f}") for t in draw.linear_ticks(0, most, 3) if t == int(t))
    x = draw.Axis("", bounds[0], bounds[-1], across, log=True)
    y = draw.Axis("", 0, most * 1.05, up, grid=True)
    return draw.Panel(x, y, marks, title, height=64)


def _examples_figure(task: TaskResult, name: str) -> draw.Figure:
    """Images or texts with what they are, what they were predicted as, and with what confidence."""
    is_text = not task.examples[0].png
    across, row, kind = (1, _TEXT_ROW, "text") if is_text else (_ACROSS, _ROW, "image")
    groups = {
        "classified wrongly": [e for e in task.examples if e.label != e.guess],
        "classified correctly": [e for e in task.examples if e.label == e.guess],
    }
    marks: list[draw.Mark] = []
    y = 0.0
    for words, group in groups.items():
        if group:
            marks.append(draw.Text(0, y - 0.18, f"{words}, most confident first", "name"))
            y -= _HEAD
        for place, example in enumerate(group):
            down, x = divmod(place, across)
            marks += _example(task, example, x, y - row * (down + 1))
        y -= row * math.ceil(len(group) / across)
    panel = draw.Panel(draw.Axis("", 0, _ACROSS), draw.Axis("", y, 0), marks, height=-y * 336 / _ACROSS)
    ending = "." if is_text else "; each is stretched over the whole range of brightness."
    caption = f"Test {kind}s that the network is most confident of, with its confidence{ending}"
    columns, rows = [kind, "class", "predicted as", "confidence"], draw.Rows()
    for number, each in enumerate(task.examples, 1):
        rows.append([each.text or number, task.classes[each.label], task.classes[each.guess], each.confidence])
    names = (f"examples-{name}", "Right and wrong", caption)
    return draw.Figure(*names, [panel], columns, rows, "task", task.key)


def _example(task: TaskResult, example: Example, x: float, y: float) -> list[draw.Mark]:
    """An image above what it is, or a sentence in at most two lines below that."""
    label, guess = task.classes[example.label], task.classes[example.guess]
    is_right, sure = example.label == example.guess, percent(example.confidence, 0)
    if not example.png:
        words = draw.fitted(label if is_right else f"{label} → {guess}", 280, 10)
        lines = textwrap.wrap(example.text, 62, max_lines=2, placeholder=" …")
        shown = [draw.Text(x, y + 0.28 - 0.15 * i, draw.fitted(line, 336, 10), "small") for i, line in enumerate(lines)]
        return [draw.Text(x, y + 0.44, f"{words}, {sure}", "small quiet"), *shown]
    names = [label] if is_right else [label, guess]
    words = " → ".join(draw.fitted(name, 76 if is_right else 31, 10) for name in names)
    tip = f"{label} predicted as {guess}\nconfidence {percent(example.confidence)}"
    css = "right" if is_right else "wrong"
    return [
        draw.Box(x, y + 0.43, x + 0.92, y + 1.35, css, tip, png=example.png),
        draw.Text(x, y + 0.26, words, "small"),
        draw.Text(x, y + 0.1, sure, "small quiet"),
    ]
