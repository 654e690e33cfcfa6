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


def test_the_readmes_claim_is_measured(monkeypatch):
    """Points against fine-pruning with the same epochs, and the bytes of the file, of every cell that it shows."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import codes_page

    readme, found = (ROOT / "README.md").read_text(), codes_page.collected()
    for density in (0.5, 0.3):
        shown = []
        for data in ("flowers102", "catsanddogs", "cifar10"):
            code, wide = (found[data, density, method][0] for method in ("bytes-20", "wide+"))
            assert code["bytes"] <= wide["bytes"] / 19.5
            size = code["bytes"]
            shown.append(
                f"{code['accuracy'] - wide['accuracy']:+.1f}, "
                + (f"{size / 1e6:.1f} MB" if size > 1e5 else f"{size / 1e3:.0f} KB")
            )
        assert f"| {density:.0%} of the channels | {' | '.join(shown)} |" in readme


def test_the_page_of_codes_and_its_figure_are_made_of_the_cells(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import codes_page

    assert (ROOT / "docs/codes.md").read_text("utf-8") == codes_page.page()
    codes_page.draw(codes_page.against_bytes(codes_page.collected()), tmp_path)
    for name in ("bytes.svg", "bytes.csv"):
        assert (ROOT / "docs/assets/codes" / name).read_text("utf-8") == (tmp_path / name).read_text("utf-8")
