"""`report`: a folder becomes a page, and figures for papers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from spalier import files
from spalier.errors import ConfigError
from spalier.reporting.figure import Figure
from spalier.reporting.gather import gather
from spalier.reporting.page import FULL, HALF, NARROW, WALL, page, resource
from spalier.reporting.plates import plates
from spalier.reporting.svg import draw
from spalier.runs.folder import writing

SCALE = 3
"""Pixels of a PNG for each of the page."""


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
    findings = gather(source)
    target = Path(source).expanduser() / "report.html" if out is None else Path(out).expanduser()
    if target.is_dir():
        target = target / "report.html"
    found = plates(findings)
    text = page(findings, found)
    with writing(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        files.write(target, text.encode("utf-8"))
    if figures is not None:
        export(found.all(), Path(figures).expanduser())
    return target


def export(found: list[Figure], folder: Path) -> None:
    """Every figure as NAME.csv and NAME.svg, and, once these are there, as NAME.png."""
    drawings = {figure.name: standalone(figure) for figure in found}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for figure in found:
            files.write(folder / f"{figure.name}.csv", figure.to_csv().encode("utf-8", "replace"))
            files.write(folder / f"{figure.name}.svg", drawings[figure.name].encode("utf-8"))
        render = _renderer()
        for name, drawing in drawings.items():
            files.write(folder / f"{name}.png", render(drawing))


def standalone(figure: Figure) -> str:
    """The figure as a file of its own, on white paper."""
    width = NARROW if figure.place == "task" else FULL if figure.wide else HALF
    width = WALL if figure.name.startswith("wall") else width
    return draw(figure, width, style=_plain_style())


def _plain_style() -> str:
    """The page's style in the colours of its light side, without variables: not every program knows them."""
    colours = dict(re.findall(r"(--\w+):(#\w+)", resource("page.css").partition("@media")[0]))
    colours["--paper"] = "#ffffff"
    return re.sub(r"var\((--\w+)\)", lambda found: colours[found[1]], resource("figure.css"))


def _renderer() -> Any:
    """What makes a PNG of an SVG; an error where that, or every font, is missing."""
    try:
        import resvg_py
    except ImportError:
        raise ConfigError(
            "PNG figures need resvg-py, which is not installed; the SVG and CSV files are written: "
            "pip install spalier[report]"
        ) from None

    def render(drawing: str) -> bytes:
        return bytes(
            resvg_py.svg_to_bytes(
                svg_string=drawing, zoom=SCALE, font_family=_FAMILY, sans_serif_family=_FAMILY
            )
        )

    with_words, without = (
        render(f'<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20">{inside}</svg>')
        for inside in ('<text x="2" y="15" font-family="sans-serif">word</text>', "")
    )
    if with_words == without:
        raise ConfigError(
            "there is no font for the words of PNG figures; the SVG and CSV files are written: install one, such as "
            "DejaVu Sans (apt-get install fonts-dejavu-core)"
        )
    return render


_FAMILY = "DejaVu Sans"
