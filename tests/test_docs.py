"""The tables of README and docs are the measured ones."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def benchmark(name):
    specification = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module, json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def test_the_costs_of_scoring_are_the_committed_ones():
    module, report = benchmark("scoring")
    assert module.markdown(report) in (ROOT / "docs/criteria.md").read_text()


@pytest.mark.parametrize("part", ["criteria", "one_shot", "gradual", "gradual_trained"])
def test_the_figures_of_recovery_are_the_committed_ones(part):
    module, report = benchmark("recovery")
    assert module.markdown(report, part) in (ROOT / "docs/criteria.md").read_text()


@pytest.mark.parametrize("part", ["switching", "costs", "codes", "inference"])
def test_the_figures_of_switching_are_the_committed_ones(part):
    module, report = benchmark("switching")
    assert module.markdown(report, part) in (ROOT / "docs/tasks.md").read_text()


@pytest.mark.parametrize("part", ["masks", "accuracy", "teaching"])
def test_the_figures_of_runs_are_the_committed_ones(part):
    module, report = benchmark("transfer")
    assert module.markdown(report, part) in (ROOT / "docs/runs.md").read_text()


@pytest.fixture
def cells(monkeypatch):
    """The pages that are made of the cells of benchmarks/codes.py, and the cells."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import codes_page
    import codes_paper

    return codes_page, codes_paper, codes_page.collected()


def test_the_readme_and_the_papers_page_say_what_the_cells_say(cells):
    _, paper, found = cells
    for name in paper.TEXTS:
        text = (ROOT / name).read_text("utf-8")
        assert paper.MARK.search(text), name
        assert paper.written(text, found) == text, f"{name}: run benchmarks/codes.py page"


def test_what_the_readme_claims_is_as_small_as_it_says(cells):
    """The budget of every cell that has one, against the file of fine-pruning with the same epochs."""
    _, _, found = cells
    held = 0
    for (data, density, method), by_seed in found.items():
        share = method.removeprefix("bytes-")
        for seed, cell in by_seed.items() if share != method else ():
            if "accuracy" in cell:
                held += 1
                assert cell["bytes"] <= found[data, density, "wide+"][seed]["bytes"] / int(share)
    assert held


def test_the_page_of_codes_and_the_figures_are_made_of_the_cells(cells, tmp_path):
    page, paper, found = cells
    assert (ROOT / "docs/codes.md").read_text("utf-8") == page.page()
    for figure in (page.against_bytes(found), *paper.figures(found)):
        page.draw(figure, tmp_path)
    made, folder = sorted(path.name for path in tmp_path.iterdir()), ROOT / "docs/assets/codes"
    assert made == sorted(path.name for path in folder.iterdir())
    for name in made:
        assert (folder / name).read_text("utf-8") == (tmp_path / name).read_text("utf-8"), name


def test_a_front_has_what_nothing_else_is_better_than_in_both(cells):
    _, paper, found = cells
    for figure in paper.figures(found):
        for panel in figure.panels:
            dots = [mark for mark in panel.marks if hasattr(mark, "tip")]
            for dot in dots:
                beaten = [d for d in dots if d.x <= dot.x and d.y >= dot.y and (d.x, d.y) != (dot.x, dot.y)]
                assert ("faint" in dot.css) is bool(beaten)
