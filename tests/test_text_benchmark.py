"""The benchmark of texts runs from beginning to end, on a tiny BERT, and goes on where it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from language import text_folder, tiny_bert

ROOT = Path(__file__).resolve().parents[1]


def run(folder: Path, *arguments: str) -> str:
    variables = {f"SPALIER_{name}": str(folder / name.lower()) for name in ("DATA", "WEIGHTS")}
    paths = {"SPALIER_ROOT": str(folder), "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tools")])}
    command = [sys.executable, str(ROOT / "benchmarks" / "text.py"), *arguments, "--work", str(folder / "work")]
    command += ["--round-to", "1"]
    done = subprocess.run(command, env=os.environ | variables | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_method_is_measured_and_the_page_says_what_is_missing(tmp_path):
    tiny_bert(tmp_path / "weights" / "minilm-l6-v2", max_position_embeddings=160)
    text_folder(tmp_path / "data" / "text" / "trec", train=60)
    (tmp_path / "docs").mkdir()
    run(tmp_path, "run", "--data", "trec", "--seeds", "0")
    files = sorted((tmp_path / "benchmarks" / "results" / "text").glob("*.json"))
    cells = {(c["method"], c["density"]): c for c in map(json.loads, (f.read_text() for f in files)) if "method" in c}
    pruned = {(method, density) for method in ("fine-pruning", "splora", "bytes") for density in (1.0, 0.5, 0.3)}
    assert set(cells) == pruned | {("lora", 1.0), ("longer", 1.0)}
    assert all(0 <= cell["test"] <= 1 and cell["bytes"] > 0 and cell["seconds"] > 0 for cell in cells.values())
    assert cells["fine-pruning", 0.3]["macs"] <= 0.3
    assert cells["fine-pruning", 0.3]["seconds"] > cells["fine-pruning", 1.0]["seconds"]
    latency = json.loads(next(f for f in files if "latency" in f.name).read_text())["ms"]
    assert set(latency) == {"32", "128"}
    assert all("ms" in found for nets in latency.values() for net in nets.values() for found in net.values())
    before = {file: file.stat().st_mtime_ns for file in files}
    run(tmp_path, "run", "--data", "trec", "--seeds", "0")
    assert {file: file.stat().st_mtime_ns for file in files} == before, "nothing is measured twice"
    run(tmp_path, "page")
    page = (tmp_path / "docs" / "text.md").read_text()
    assert "| LoRA by PEFT, rank 8 | 100% |" in page
    assert "- trec 50% splora: 1 of 3" in page
    assert "sst2 30% bytes: 0 of 3" in run(tmp_path, "status")


def test_the_page_and_the_notebook_say_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import text

    assert (ROOT / "docs" / "text.md").read_text("utf-8") == text.page()
    notebook = json.loads((ROOT / "notebooks" / "trec.ipynb").read_text("utf-8"))
    assert "".join(notebook["cells"][-1]["source"]) == text.notebook_cell()
