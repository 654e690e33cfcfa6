"""The page: every figure and its table in one file that loads nothing, under a policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from spalier.errors import ConfigError
from spalier.reporting import accuracy as accuracies
from spalier.reporting.figure import Cell, Figure, Line
from spalier.reporting.model import MEASURES, Entry, Findings, Run
from spalier.reporting.naming import clean, density, percent
from spalier.reporting.plates import Plates
from spalier.reporting.svg import draw
from spalier.reporting.wall import steps
from spalier.reporting.words import facts, lede, settings, start, title, totals

NARROW, HALF, WALL, MIDDLE, FULL = 344, 544, 640, 700, 1120
_FEW = 6
MOST_ROWS = {"overview": 1000, "run": 1000, "task": 200, "files": 1000}
"""How many rows of a table the page has, by where the figure is; the CSV file has all."""


@cache
def resource(name: str) -> str:
    """A file that lies beside this one."""
    return (files("spalier.reporting") / "templates" / name).read_text("utf-8")


@dataclass(frozen=True)
class Drawn:
    """A figure as the page shows it."""

    figure: Figure
    css: str
    svgs: Sequence[Any]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int]
    cut: str


def page(findings: Findings, plates: Plates) -> str:
    """The report as HTML."""
    from spalier import __version__

    jinja2 = _jinja2()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_final)
    css, js = _minified(resource("figure.css") + resource("page.css")), resource("page.js")
    trio = _is_trio(plates.overview)
    return str(
        environment.from_string(resource("page.html")).render(
            policy=policy(css, js),
            css=_safe(css),
            js=_safe(js),
            data=_safe(_data(findings)),
            version=__version__,
            findings=findings,
            title=title(findings),
            lede=lede(findings),
            totals=totals(findings),
            settings=settings(findings),
            overview=[_drawn(f, trio) for f in plates.overview],
            trio=trio,
            missing=accuracies.missing(findings),
            repeats=list(findings.repeats.items()),
            runs=[
                _run(findings, run, plates, i)
                for i, run in enumerate(findings.runs)
                if run.entries or run.epochs
            ],
            files=[_drawn(f) for f in plates.files],
            failed=list(findings.failed.items()),
        )
    )


def _jinja2() -> Any:
    try:
        import jinja2
    except ImportError:
        raise ConfigError("a report needs Jinja2, which is not installed: pip install spalier[cli]") from None
    return jinja2


def _safe(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)


def _final(value: Any) -> Any:
    """Text of strangers, made visible; escaping comes after."""
    return clean(value) if type(value) is str else value


def _minified(css: str) -> str:
    return re.sub(r"\n+", "", css)


def policy(css: str, js: str) -> str:
    """What the browser may load and run: this style, this script, images in the page, nothing else."""
    style, script = (
        "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (css, js)
    )
    return (
        f"default-src 'none'; img-src data:; style-src '{style}'; script-src '{script}'; "
        "base-uri 'none'; form-action 'none'"
    )


def escaped_json(value: Any) -> str:
    """JSON that nothing in it can break out of a script element with."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(findings: Findings) -> str:
    """What the script needs: the tasks in order, and how many channels are left of each layer."""
    tasks, walls, names = [], [], []
    shown = [run for run in findings.runs if run.entries or run.epochs]
    for place, run in enumerate(shown):
        found = steps(run)
        names.append(clean(run.name))
        for entry in run.entries:
            tasks.append(
                {
                    "key": clean(entry.key),
                    "run": place,
                    "step": found.index(entry) if entry in found else None,
                    "density": density(entry.target),
                    "said": _said(findings, entry),
                }
            )
        layers = found[0].layers if found else ()
        walls.append(
            [[clean(x.name), x.channels, [e.layers[i].left for e in found]] for i, x in enumerate(layers)]
        )
    return escaped_json({"tasks": tasks, "walls": walls, "runs": names, "start": start(findings)})


def _said(findings: Findings, entry: Entry) -> str:
    seen = entry.number(findings.measure)
    return density(entry.target) + ("" if seen is None else f", {MEASURES[findings.measure]} {percent(seen)}")


def _run(findings: Findings, run: Run, plates: Plates, place: int) -> dict[str, Any]:
    wall, curves = plates.walls[place], plates.curves[place]
    return {
        "name": run.name,
        "note": "" if run.state == "done" else f"({run.state})",
        "wall": _drawn(wall) if wall else None,
        "learning": _drawn(curves) if curves else None,
        "tasks": [
            {
                "key": clean(entry.key),
                "name": entry.name,
                "facts": facts(entry),
                "figures": [_drawn(f) for f in plates.details[entry.key]],
            }
            for entry in run.entries
        ],
    }


def _is_trio(overview: Sequence[Figure]) -> bool:
    """Whether figures are small enough to stand three in a row."""
    labels = [m for f in overview for p in f.panels for m in p.marks if isinstance(m, Line) and m.label]
    return len(overview) == 3 and not any(f.wide for f in overview) and len(labels) <= 3 * _FEW


def _drawn(figure: Figure, small: bool = False) -> Drawn:
    """A figure in the sizes that the page needs."""
    is_wall, most = figure.name.startswith("wall"), MOST_ROWS[figure.place]
    if figure.place == "task" or small:
        svgs = [draw(figure, NARROW, suffix="-t")]
    else:
        wide = FULL if figure.wide else WALL if is_wall else HALF
        svgs = [draw(figure, wide, suffix="-w"), draw(figure, NARROW, suffix="-n")]
        svgs += [draw(figure, MIDDLE, suffix="-m")] if figure.wide else []
    rows = [[_cell(c) for c in row] for row in figure.rows[:most]]
    numeric = frozenset(
        i
        for i in range(len(figure.columns))
        if figure.rows and all(row[i] is None or isinstance(row[i], int | float) for row in figure.rows)
    )
    css = "wide" if figure.wide else "wall" if is_wall else "plate"
    more = len(figure.rows) - most
    cut = (
        f"The first {most:,} of {len(figure.rows):,} rows; the CSV file of the figure has all."
        if more > 0
        else ""
    )
    return Drawn(figure, css, [_safe(svg) for svg in svgs], rows, numeric, cut)


def _cell(cell: Cell) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.6g}"
