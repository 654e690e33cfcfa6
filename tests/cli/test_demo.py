"""The demo, once, as it is: what it prints is what lies in its folder."""

import contextlib
import io
import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
import report_pictures
from PIL import Image

from spalier.cli.demo import BATCH_SIZE, CODES, DENSITIES, TASKS, _verdict
from spalier.cli.main import main
from spalier.networks import OWN_WEIGHTS, open_network
from spalier.tasks import Store

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder, and what was said, as a program hears it."""
    place, out = tmp_path_factory.mktemp("demo"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(place)
        assert main(["-q", "demo", "--json"]) == 0
    return place / "spalier-demo", json.loads(out.getvalue())


@pytest.fixture
def folder(made):
    return made[0]


@pytest.fixture
def said(made):
    return made[1]


@pytest.mark.slow
def test_every_figure_is_one_that_was_measured(folder, said):
    assert len(said["rows"]) == len(TASKS) * len(CODES) * (1 + len(DENSITIES))
    places = [folder / "runs" / task / "results.json" for task in TASKS]
    measured = [row for place in places for row in json.loads(place.read_text())["rows"]]
    for row, wanted in zip(said["rows"], measured, strict=True):
        assert (row["learned"], row["bytes"]) == (wanted["learned"], wanted["bytes"])
        assert row["accuracy"] == wanted["test"]
        assert row["macs"] == wanted["macs"]
        assert row["channels"] == wanted["channels"]
        assert min(row["latency_ms"], row["switch_ms"], row["speed_up"]) > 0
    for files in ("runs/*/tasks", "tasks"):
        sizes = sorted(path.stat().st_size for path in folder.glob(f"{files}/*.safetensors"))
        assert sorted(row["bytes"] for row in said["rows"]) == sizes
    assert said["base"]["bytes"] == OWN_WEIGHTS["resnet20"].stat().st_size


@pytest.mark.slow
def test_what_was_learned_is_worth_something(said):
    assert min(row["accuracy"] for row in said["rows"]) > 0.7
    assert min(row["accuracy"] for row in said["rows"] if row["channels"] == 1) > 0.85
    wide, narrow = ([row["bytes"] for row in said["rows"] if row["code"] == code] for code in CODES)
    assert all(2 * few < many for few, many in zip(narrow, wide, strict=True))


@pytest.mark.slow
def test_the_ways_are_sums_of_what_was_measured(folder, said):
    """A network for each task, fine-pruning alone, and one base with narrow files: nothing is left out of the bytes."""
    tuned, pruned, narrow = said["ways"]
    last = [row for row in said["rows"] if abs(row["channels"] - DENSITIES[-1]) < 0.05]
    for way, code, base in ((pruned, "wide", 0), (narrow, "spdelta-2bit", said["base"]["bytes"])):
        rows = [row for row in last if row["code"] == code]
        assert len(rows) == len(TASKS)
        assert way["bytes"] == base + sum(row["bytes"] for row in rows)
        assert way["accuracy"] == pytest.approx(sum(row["accuracy"] for row in rows) / len(rows))
    assert tuned["bytes"] == len(TASKS) * sum(v.nbytes for v in open_network("resnet20").state_dict().values())
    assert narrow["bytes"] < tuned["bytes"]


def test_the_verdict_says_who_is_ahead():
    """Its words follow from the figures, in both directions."""
    ways = [
        {"accuracy": 0.95, "bytes": 3_000_000, "bytes_of_a_task": 60_000, "speed_up": 1.0},
        {"accuracy": 0.94, "bytes": 90_000, "bytes_of_a_task": 30_000, "speed_up": 2.0},
        {"accuracy": 0.93, "bytes": 630_000, "bytes_of_a_task": 10_000, "speed_up": 2.0},
    ]
    text = _verdict({"ways": ways, "base": {"bytes": 600_000}})
    assert "3 tasks and the base in 630 kB instead of 3 MB, 2.0 x as fast, 2.0 points lower" in text
    assert "for fewer than 30 such tasks" in text
    assert "1.0 points ahead" in text
    ways[2] |= {"accuracy": 0.96, "bytes_of_a_task": 30_000}
    text = _verdict({"ways": ways, "base": {"bytes": 600_000}})
    assert "1.0 points higher" in text
    assert "in bytes" in text
    assert "2.0 points behind" in text


@pytest.mark.slow
def test_all_tasks_are_for_the_one_base(folder):
    base = open_network("resnet20", pretrained=True)
    assert all(entry.is_sound for entry in Store(folder / "tasks").verify(base))


@pytest.mark.slow
def test_the_report_is_there_and_the_next_commands_work(folder, spalier, monkeypatch):
    monkeypatch.chdir(folder.parent)
    called = spalier("demo")  # all is learned, so it only measures
    assert "report: spalier-demo/report.html" in called.out
    assert Path("spalier-demo/report.html").read_text().startswith("<!doctype html>")
    assert f"ms for {BATCH_SIZE}" in called.out
    following = re.findall(r"^  (\S*spalier .*)$", called.out, re.MULTILINE)
    assert len(following) == 4
    for line in following[:2]:
        assert spalier(*shlex.split(line)[1:]).code == 0, line
    assert spalier(*shlex.split(following[2])[1:], "--rounds", "6", "--batch", "1").code == 0
    assert " train --data digits" in following[3]


@pytest.mark.slow
def test_the_pictures_of_the_docs_are_made_of_it(folder, tmp_path, fonts):
    report_pictures.make_pictures(folder / "runs", tmp_path)
    page = (ROOT / "docs" / "report.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == set(re.findall(r"\(assets/(\S+\.png)\)", page))
    for path in tmp_path.iterdir():
        with Image.open(path) as picture:
            assert picture.width > 1000


def test_a_folder_of_something_else_is_left_alone(tmp_path, spalier):
    (tmp_path / "thesis.tex").write_text("x")
    called = spalier("demo", "--folder", tmp_path)
    assert called.code == 1
    assert "something else" in called.err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_dev_py_runs_the_same():
    assert '[["-m", "spalier", "demo"]]' in (ROOT / "dev.py").read_text()


@pytest.mark.slow
def test_its_store_can_be_served(folder):
    command = [sys.executable, "-m", "spalier", "demo", "--folder", str(folder), "--serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            address = next(
                found[1] for line in process.stderr if (found := re.search(r"served at (\S+) \(page\)", line))
            )
            with urlopen(f"{address}v1/tasks", timeout=60) as answer:
                listed = json.load(answer)
            with urlopen(address, timeout=60) as answer:
                page = answer.read().decode()
        finally:
            process.send_signal(signal.SIGTERM)
    assert {task["name"] for task in listed["tasks"]} == set(Store(folder / "tasks"))
    assert "<title>" in page
