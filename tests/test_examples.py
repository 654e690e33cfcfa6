"""Every script in examples/ runs as it is, in an empty folder, and ends well above chance."""

import re
import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


def test_there_are_five_and_the_readme_has_them():
    assert [script.stem for script in SCRIPTS] == ["bert", "own_images", "own_loop", "serve", "timm_network"]
    readme = (SCRIPTS[0].parents[1] / "README.md").read_text()
    assert re.findall(r"\(examples/(\w+)\.py\)", readme) == ["own_images", "timm_network", "bert", "own_loop", "serve"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_ends_well(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    found = re.search(r"([\d.]+)% right, chance ([\d.]+)%", last)
    assert found, f"{script.name} ends with {last!r}; expected what is right, and what chance would be"
    right, chance = map(float, found.groups())
    assert right > (chance + 100) / 2, last
