"""What docs/data.md shows runs as it stands, and its figures are the measured ones."""

import importlib.util
import json
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text()


def test_the_code_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "data.md", "exec"), names)
    assert "digits: 10 classes" in capsys.readouterr().out


def test_the_costs_are_the_committed_ones():
    specification = importlib.util.spec_from_file_location("loading", ROOT / "benchmarks/loading.py")
    module = sys.modules["loading"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    report = json.loads((ROOT / "benchmarks/results/loading.json").read_text())
    assert module.markdown(report) in PAGE
    assert f"take {statistics.median(report['epoch_start_ms']):.0f} ms" in PAGE
    assert all(row["loader : step"] < 0.1 for row in report["rows"])


def test_every_named_set_is_in_the_table():
    from spalier.data.sources import NAMES

    assert all(f"| `{name}` |" in PAGE for name in NAMES)
