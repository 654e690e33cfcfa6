"""Every script in examples/ runs as it is, in an empty folder, and ends well above chance."""

import re
import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


def test_there_are_some():
    assert {"own_images", "own_loop", "timm_network"} <= {script.stem for script in SCRIPTS}


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
