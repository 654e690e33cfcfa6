"""How a run has learned: the loss and the validation accuracy over its steps, with a rule at each prune."""

from __future__ import annotations

from collections.abc import Sequence

from spalier.reporting.figure import Cell, Dot, Figure, Line, Mark, Panel, Rule
from spalier.reporting.model import Run
from spalier.reporting.naming import density
from spalier.reporting.scales import Axis, linear


def learning(run: Run, name: str) -> Figure | None:
    """The curves of a run; None where nothing was logged."""
    lines = [e for e in run.epochs if e.loss is not None]
    if not lines:
        return None
    rules = _prunes(run)
    x = linear("steps", [0, *(e.step for e in run.epochs)], least=0)
    loss = [(e.step, e.loss, e.block) for e in lines if e.loss is not None]
    panels = [
        _curve(
            x, linear("training loss", [0, *(v for _, v, _ in loss)], least=0), loss, rules, "s0", "{:.4f}"
        )
    ]
    seen = [(e.step, e.validation, e.block) for e in run.epochs if e.validation is not None]
    if seen:
        y = linear(
            "validation accuracy", [v for _, v, _ in seen], least=0, most=1, text=lambda v: f"{100 * v:.4g}%"
        )
        panels.append(_curve(x, y, seen, rules, "s1", "{:.2%}"))
    caption = "Rules are prunes, with the density that they led to; each block learns with what is left."
    caption += "" if seen else " Validation accuracy was looked at only at the ends of blocks."
    rows: list[list[Cell]] = [[e.block, e.step, e.loss, e.validation] for e in run.epochs]
    columns = ["block", "step", "loss", "validation"]
    return Figure(name, "Learning", caption, panels, columns, rows, "run", run.name, wide=len(panels) > 1)


def _prunes(run: Run) -> list[Rule]:
    """The steps after which the network was pruned."""
    ends: dict[int, int] = {}
    for epoch in run.epochs:
        ends[epoch.block] = max(epoch.step, ends.get(epoch.block, 0))
    said = {block: density(target) for block, target in run.targets.items()}
    return [
        Rule(end, said.get(block + 1, ""))
        for block, end in sorted(ends.items())
        if block + 1 in ends or block + 1 in said
    ]


def _curve(
    x: Axis, y: Axis, points: Sequence[tuple[int, float, int]], rules: Sequence[Rule], css: str, form: str
) -> Panel:
    marks: list[Mark] = list(rules)
    for block in sorted({b for _, _, b in points}):
        marks.append(Line([(step, value) for step, value, b in points if b == block], css))
    marks += [
        Dot(step, value, css, f"step {step}, block {block}\n{y.label} {form.format(value)}", small=True)
        for step, value, block in points
    ]
    return Panel(x, y, marks, height=200)
