"""The report: one HTML page that loads nothing, and its figures as files for papers."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from spalier import files
from spalier.errors import ConfigError
from spalier.reporting.comparisons import Point, comparison_figures, method_name, missing, points
from spalier.reporting.draw import Cell, Figure, density, to_svg
from spalier.reporting.figures import learning_figure, network_figure, steps, task_figures
from spalier.reporting.load import MEASURES, ReportData, Run, TaskResult, load
from spalier.runs.checkpoint import write_errors
from spalier.text import byte_size, clean, first_few, import_optional, percent

TASK_WIDTH, HALF_WIDTH, NETWORK_WIDTH, MIDDLE_WIDTH, FULL_WIDTH = 344, 544, 640, 700, 1120
MOST_ROWS, MOST_TASK_ROWS = 1000, 200
"""How many rows of a table the page has; there are many tables of tasks. The CSV file has all."""
PNG_SCALE = 3
ORIGINS = ("machine", "versions")
"""Facts of tasks that the page's head names too."""
FACTS = {
    "test": ("test accuracy", "{:.2%}"),
    "test_f1": ("F1 (macro), test", "{:.2%}"),
    "validation": ("validation accuracy", "{:.2%}"),
    "validation_f1": ("F1 (macro), validation", "{:.2%}"),
    "latency_ms": ("latency", "{:.3g} ms for one sample"),
    "bytes": ("file", "{:,.0f} bytes"),
    "network": ("network of its own", "{:,.0f} bytes in float32"),
}
"""Of a task, beside what its file says."""
_FONT = "DejaVu Sans"


def report(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    figures: str | os.PathLike[str] | None = None,
) -> Path:
    """Write one page about a run, a sweep, a store or a folder of runs; where it is.

    Args:
        source: its folder.
        out: the file to write, report.html in the folder by default; what was there before is replaced.
        figures: a folder for every figure as SVG, PNG and CSV. PNG needs ``spalier[report]``.
    """
    data = load(source)
    path = Path(source if out is None else out).expanduser()
    if out is None or path.is_dir():
        path = path / "report.html"
    found = all_figures(data)
    text = page(data, found)
    with write_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text.encode("utf-8"))
    if figures is not None:
        export(found, Path(figures).expanduser())
    return path


def all_figures(data: ReportData) -> list[Figure]:
    """Every figure that there are numbers for, in the order of the page."""
    runs, taken = _shown_runs(data), set[str]()
    found: list[Figure | None] = [*comparison_figures(data)]
    endings = ["" if len(runs) == 1 else f"-{_file_name(run.name, taken)}" for run in runs]
    for run, ending in zip(runs, endings, strict=True):
        found += [network_figure(run, f"network{ending}"), learning_figure(run, f"learning{ending}")]
    for task in data.tasks:
        found += task_figures(task, _file_name(task.name if len(runs) == 1 else task.key, taken))
    return [figure for figure in found if figure is not None]


def _shown_runs(data: ReportData) -> list[Run]:
    return [run for run in data.runs if run.tasks or run.epochs]


def _file_name(text: str, taken: set[str]) -> str:
    """A name that is safe in files and addresses, and not taken yet."""
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:80] or "x"
    found, count = plain, 1
    while found.lower() in taken:
        count += 1
        found = f"{plain}-{count}"
    taken.add(found.lower())
    return found


# -- the page ---------------------------------------------------------------------------------------------------------


@cache
def resource(name: str) -> str:
    """A file of the templates."""
    return (package_files("spalier.reporting") / "templates" / name).read_text("utf-8")


def page(data: ReportData, figures: Sequence[Figure]) -> str:
    """The report as HTML."""
    from spalier import __version__

    jinja2 = import_optional("jinja2", "a report")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: clean(value) if type(value) is str else value,  # escaping comes after
    )
    css, js = (resource("figure.css") + resource("page.css")).replace("\n", ""), resource("page.js")
    # the browser may load and run this style, this script and images in the page, and nothing else
    style, script = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (css, js))
    policy = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{style}'; script-src 'sha256-{script}'; "
        "base-uri 'none'; form-action 'none'"
    )
    placed = defaultdict[tuple[str, str], list[Figure]](list)
    for figure in figures:
        placed[figure.place, figure.of].append(figure)
    overview = placed["overview", ""]  # two in a row; where one would be alone, the first has a row of its own
    halves = [i for i, figure in enumerate(overview) if not figure.wide]
    if len(halves) % 2:
        overview[halves[0]] = replace(overview[halves[0]], full=True)
    origins = {w: list(dict.fromkeys(t.facts[w] for t in data.tasks if w in t.facts)) for w in ORIGINS}
    head = {"policy": policy, "css": css, "js": js, "script_data": _script_data(data), "version": __version__}
    words = {"title": _title(data), "lede": _lede(data), "summary": summary(data), "missing": missing(data)}
    found = {"data": data, "origins": origins, "runs": _shown_runs(data), "figures": placed}
    used = {"first_few": first_few, "drawn": _drawn, "facts": _facts}
    text: str = environment.from_string(resource("page.html")).render(**head, **words, **found, **used)
    return text


def _script_data(data: ReportData) -> dict[str, Any]:
    """What the script needs: the tasks in order, and how many channels are left of each layer."""
    tasks, networks = [], []
    for place, run in enumerate(_shown_runs(data)):
        found = steps(run)
        for task in run.tasks:
            accuracy, words = task.numbers.get(data.measure), density(task.target)
            seen = "" if accuracy is None else f", {MEASURES[data.measure]} {percent(accuracy)}"
            step = found.index(task) if task in found else None
            known = {"key": clean(task.key), "run": place, "step": step, "density": words, "said": words + seen}
            tasks.append(known)
        layers = found[0].layers if found else {}
        left = {x: [int(task.layers[x].sum()) for task in found] for x in layers}
        networks.append([[clean(x), len(kept), left[x]] for x, kept in layers.items()])
    names = [clean(run.name) for run in _shown_runs(data)]
    return {"tasks": tasks, "networks": networks, "runs": names, "start": _first_shown(data)}


def _first_shown(data: ReportData) -> int:
    """The last density of the first series: nothing is chosen by its accuracy."""
    found = points(data)
    first = [p.tasks[0] for p in found if (p.panel, p.series) == (found[0].panel, found[0].series)]
    return data.tasks.index(first[-1]) if first else 0


def _drawn(figure: Figure) -> dict[str, Any]:
    """A figure in the sizes that the page needs, and its table."""
    if figure.place == "task":
        widths = {"-t": TASK_WIDTH}
    else:
        widths = {"-w": _width(figure), "-n": TASK_WIDTH} | ({"-m": MIDDLE_WIDTH} if figure.wide else {})
    most = MOST_TASK_ROWS if figure.place == "task" else MOST_ROWS
    cut = f"The first {most:,} of {len(figure.rows):,} rows; the CSV file of the figure has all."
    columns = list(zip(*figure.rows, strict=True))
    return {
        "figure": figure,
        "css": "wide" if figure.wide else "network" if _is_network(figure) else "plate",
        "svgs": [to_svg(figure, width, suffix=suffix) for suffix, width in widths.items()],
        "rows": [[_cell(cell) for cell in row] for row in figure.rows[:most]],
        "numeric": [i for i, column in enumerate(columns) if not any(isinstance(c, str) for c in column)],
        "cut": cut if len(figure.rows) > most else "",
    }


def _is_network(figure: Figure) -> bool:
    return figure.name.startswith("network")


def _width(figure: Figure) -> int:
    return FULL_WIDTH if figure.wide else NETWORK_WIDTH if _is_network(figure) else HALF_WIDTH


def _cell(cell: Cell) -> str:
    if cell is None or isinstance(cell, str):
        return "–" if cell is None else cell
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.6g}"


# -- words ------------------------------------------------------------------------------------------------------------


def _title(data: ReportData) -> str:
    names = list(dict.fromkeys(str(task.settings["name"]) for task in data.tasks))
    if data.kind == "store" or not 0 < len(names) <= 3:
        return data.name
    network = data.settings.get("network")
    return ", ".join(names) + (f" on {network}" if network else "")


def _lede(data: ReportData) -> str:
    """The whole in a sentence."""
    methods = list(dict.fromkeys(method_name(task) for task in data.tasks))
    going, targets = sum(not run.done for run in data.runs), sorted(task.target for task in data.tasks)
    words = f"{_count(len(data.tasks), 'task')} by {first_few(methods)}" if methods else "No task is done yet"
    words += "" if data.kind == "store" else f", from {_count(len(data.runs), 'run')}"
    if going:
        words += f"; {'it is' if len(data.runs) == 1 else f'{going} are'} not finished"
    if targets and targets[-1] > targets[0]:
        words += f", from {density(targets[-1])} down to {density(targets[0])}"
    return words + "."


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def summary(data: ReportData) -> list[list[str]]:
    """The table at the top of the page: a head, the base, and a row for each task, or each mean over seeds.

    Before its cells, each row has the key of its task. Columns that say nothing, or the same of all, are left out.
    """
    head = ["", "task", "method", "density", MEASURES[data.measure], "F1 (macro)", "file"]
    rows = [[*head, "of the base's bytes", "of its MACs", "latency, ms"]]
    bases = {task.numbers["base"] for task in data.tasks if "base" in task.numbers}
    if len(bases) == 1:  # in float32, as networks are counted
        rows.append(["", "the base, in float32", *[""] * 4, byte_size(*bases), percent(1), percent(1), ""])
    rows += [_summary_row(data, point) for point in points(data)]
    said = [{row[i] for row in rows[1:]} - {"", "–"} for i in range(len(rows[0]))]
    shown = [i for i, words in enumerate(said) if i < 2 or len(words) > (i == 2)]
    return [[row[i] for i in shown] for row in rows]


def _summary_row(data: ReportData, point: Point) -> list[str]:
    tasks, numbers = point.tasks, [t.numbers["bytes"] / t.numbers["base"] for t in point.tasks if "base" in t.numbers]
    name = tasks[0].name if len(tasks) == 1 else f"{tasks[0].name}, mean of {len(tasks)} seeds"
    method = ", ".join(filter(None, [point.panel, point.series]))

    def cell(number: str, text: Callable[[float], str], scale: float = 0) -> str:
        if not point.values(number):
            return "–"
        mean = point.mean(number)
        spread = f"\u00a0±\u00a0{scale * mean.deviation:.1f}" if scale and mean.deviation is not None else ""
        return f"{text(mean.value)}{spread}"

    shares = [cell(data.measure, percent, 100), cell(f"{data.measure}_f1", percent, 100), cell("bytes", byte_size)]
    of_base = percent(sum(numbers) / len(numbers)) if numbers else "–"
    work = [cell("macs", percent), cell("latency_ms", "{:.3g}".format)]
    return [tasks[0].key, name, method, point.density, *shares, of_base, *work]


def _facts(task: TaskResult) -> dict[str, str]:
    """All that is known of a task."""
    found = {words: form.format(task.numbers[name]) for name, (words, form) in FACTS.items() if name in task.numbers}
    if "latency" in found and "tokens" in task.facts:
        found["latency"] += f" of {task.facts['tokens']} tokens"
    return {"density asked for": density(task.target), **found, **task.facts}


# -- files for papers -------------------------------------------------------------------------------------------------


def export(figures: Sequence[Figure], folder: Path) -> None:
    """Every figure as NAME.csv and NAME.svg, and, once these are there, as NAME.png."""
    drawings = {figure.name: standalone(figure) for figure in figures}
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for figure in figures:
            files.write(folder / f"{figure.name}.csv", to_csv(figure).encode("utf-8", "replace"))
            files.write(folder / f"{figure.name}.svg", drawings[figure.name].encode("utf-8"))
        render = _png_renderer()
        for name, drawing in drawings.items():
            files.write(folder / f"{name}.png", render(drawing))


def standalone(figure: Figure) -> str:
    """The figure as an SVG file of its own, in the colours of the page's light side."""
    colours = dict(re.findall(r"(--\w+):(#\w+)", resource("page.css").partition("@media")[0]))
    colours["--paper"] = "#ffffff"
    # not every program that reads SVG knows variables
    style = re.sub(r"var\((--\w+)\)", lambda found: colours[found[1]], resource("figure.css"))
    return to_svg(figure, TASK_WIDTH if figure.place == "task" else _width(figure), style=style)


def to_csv(figure: Figure) -> str:
    """The table of a figure, for a spreadsheet."""
    out = io.StringIO()
    rows = [[_csv_cell(cell) for cell in row] for row in (figure.columns, *figure.rows)]
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _csv_cell(cell: Cell) -> str | int | float:
    """A cell that no spreadsheet takes for a formula: names may be anybody's text."""
    if not isinstance(cell, str):
        return "" if cell is None else cell
    risky = cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    return ("'" if risky else "") + cell.replace("\r", "\ufffd")  # a carriage return would begin a row


def _png_renderer() -> Callable[[str], bytes]:
    """What makes a PNG of an SVG; an error where that, or every font, is missing."""
    resvg = import_optional("resvg_py", "PNG figures (the SVG and CSV files are written)")

    def render(drawing: str) -> bytes:
        fonts = {"font_family": _FONT, "sans_serif_family": _FONT}
        return bytes(resvg.svg_to_bytes(svg_string=drawing, zoom=PNG_SCALE, **fonts))

    empty = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20">{}</svg>'
    word = '<text x="2" y="15" font-family="sans-serif">word</text>'
    if render(empty.format(word)) == render(empty.format("")):
        raise ConfigError(
            "there is no font for the words of PNG figures; the SVG and CSV files are written: install one, such as "
            "DejaVu Sans (apt-get install fonts-dejavu-core)"
        )
    return render
