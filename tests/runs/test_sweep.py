"""Many runs at once: names, retries, crashes, interrupts, one table; on this machine and on Ray."""

import csv
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import Small, outcome, quick

from spalier.errors import ConfigError, RunError
from spalier.runs import Sweep, TransferPruning
from spalier.runs.checkpoint import RunFolder
from spalier.runs.recipes import RATES
from spalier.runs.sweep import Summary, SweepResults, _on_ray

ROOT = Path(__file__).parents[2]
TINY = {"densities": (0.5,), "epochs": 1, "max_train_samples": 100}

# -- networks, for the processes of runs; markers lie in the working folder --------------------------------------------


class Fragile(Small):
    """Ends its process without a word, once, in the first step after the first block."""

    def forward(self, x):
        marker = Path("killed")
        if self.training and not marker.exists() and list(Path().glob("sweep/*/blocks/00.json")):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def fragile(classes):
    return Fragile(classes)


def reluctant(classes):
    if not Path("asked").exists():
        Path("asked").touch()
        raise RuntimeError("not\nthe first time")
    return Small(classes)


# -- which runs there are ----------------------------------------------------------------------------------------------


def test_one_run_for_each_combination():
    sweep = Sweep(quick(), over={"criterion": ["taylor", "weight"], "rank": [2, 0.5], "seed": range(2)})
    names = [name for name, _ in sweep.runs()]
    assert names[:3] == [
        "criterion=taylor,rank=2,seed=0",
        "criterion=taylor,rank=2,seed=1",
        "criterion=taylor,rank=0.5,seed=0",
    ]
    assert len(set(names)) == 8
    for name, config in sweep.runs():
        assert name == f"criterion={config.criterion},rank={config.rank},seed={config.seed}"
        assert config.replace(criterion="taylor", rank=8, seed=0) == quick()


def test_what_the_recipe_says_follows_the_settings_that_change():
    sweep = Sweep(TransferPruning(), over={"method": ["splora", "fine-pruning"]})
    assert [config.lr for _, config in sweep.runs()] == [RATES["splora"], RATES["fine-pruning"]]
    assert [config.lr for _, config in loaded(sweep).runs()] == [RATES["splora"], RATES["fine-pruning"]]


def loaded(sweep: Sweep) -> Sweep:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sweep.yaml").write_text(sweep.to_yaml())
        return Sweep.load(folder)


TEXTS = st.text(max_size=200) | st.sampled_from(["a,seed=0", "A", "a", "null", "4", "..", "/"])
VALUES = {
    "data": TEXTS.map("folder:{}".format),
    "head": st.none() | TEXTS,
    "rank": st.integers(1, 9) | st.sampled_from([1.0, 0.5]),
    "network_options": st.dictionaries(st.text(max_size=5), st.integers() | TEXTS, max_size=3),
    "classes": st.lists(TEXTS, max_size=3),
    "max_train_samples": st.none() | st.integers(1, 99),
}


@settings(max_examples=60, deadline=None)
@given(
    st.sets(st.sampled_from(sorted(VALUES)), min_size=1, max_size=3).flatmap(
        lambda names: st.fixed_dictionaries(
            {n: st.lists(VALUES[n], min_size=1, max_size=3, unique_by=lambda v: json.dumps(v)) for n in names}
        )
    )
)
def test_names_are_safe_and_unique(over):
    sweep = Sweep(TransferPruning(name="task"), over=over)
    names = [name for name, _ in sweep.runs()]
    product = 1
    for values in over.values():
        product *= len(values)
    assert len({name.lower() for name in names}) == product  # file systems may not tell A from a
    for name in names:
        assert re.fullmatch(r"[a-z][A-Za-z0-9_.=,-]*", name)
        assert len(name) < 200
    assert loaded(sweep) == sweep
    assert [name for name, _ in loaded(sweep).runs()] == names


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({}, "expected lists of values by setting"),
        (["seed"], "expected lists of values by setting"),
        ({"sead": [0]}, "did you mean 'seed'"),
        ({"seed": 3}, "expected a list of values"),
        ({"criterion": "taylor"}, "expected a list of values"),
        ({"seed": []}, "expected a list of values"),
        ({"seed": [0, 1, 0]}, "each value once"),
        ({"seed": [0, "one"]}, "seed is 'one', expected a whole number"),
        ({"criterion": ["taylor", "best"]}, "criterion='best' cannot be.*expected one of"),
        (
            {"rank": [4], "keep_best": [False, True], "validation_split": [0.0]},
            "rank=4, keep_best=True, validation_split=0.0",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(over, words):
    with pytest.raises(ConfigError, match=words):
        Sweep(TransferPruning(), over=over)


def test_files_that_are_no_sweep_are_refused(tmp_path):
    file = tmp_path / "sweep.yaml"
    for text, words in (
        ("{base: {}}", "expected tables"),
        ("{base: {ranks: 1}, over: {}}", "did you mean 'rank'"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            Sweep.load(tmp_path)
    (tmp_path / "sweep.toml").write_text('[base]\ndata = "digits"\n[over]\nlr = ["1e-3", 0.01]')
    assert [c.lr for _, c in Sweep.load(tmp_path / "sweep.toml").runs()] == [0.001, 0.01]


def test_numbers_and_places_are_checked(tmp_path):
    sweep = Sweep(quick(), over={"seed": [0]})
    for options, words in (
        ({"jobs": 0}, "jobs is 0"),
        ({"threads": 1.5}, "threads is 1.5"),
        ({"place": "moon"}, 'expected "local" or "ray"'),
        ({"gpus": 1}, "CUDA_VISIBLE_DEVICES"),
    ):
        with pytest.raises(ConfigError, match=words):
            sweep.run(tmp_path / "sweep", progress=False, **options)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="holds no sweep") as caught:
        Sweep(quick(), over={"seed": [0]}).run(tmp_path, progress=False)
    assert caught.value.code == "folder"


def test_a_sweep_that_is_going_on_is_left_alone(tmp_path):
    with (
        RunFolder(tmp_path / "sweep").locked(),
        pytest.raises(RunError, match="another process is working") as caught,
    ):
        Sweep(quick(), over={"seed": [0]}).run(tmp_path / "sweep", progress=False)
    assert caught.value.code == "busy"


def test_ray_that_is_missing_gives_the_line_that_helps(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'spalier\[ray\]'"):
        Sweep(quick(), over={"seed": [0]}).run(tmp_path / "sweep", place="ray", progress=False)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- for real ----------------------------------------------------------------------------------------------------------


def check_alone(config, folder):
    """A run in a sweep leaves the same bits as the same run alone."""
    config.run("alone", progress=False)
    assert outcome(folder) == outcome(Path("alone"))


@pytest.mark.slow
def test_a_crash_a_refusal_and_a_success(here, capfd):
    ray = pytest.importorskip("ray")
    base = quick(**TINY, network="test_sweep:fragile", checkpoint_seconds=0)
    sweep = Sweep(base, over={"trackers": [[], ["nobody-knows"]], "epochs": [1]})
    folder = here / "sweep"
    (fragile, config), (refused, _) = sweep.runs()

    results = sweep.run("sweep", jobs=2, threads=1)
    assert list(results.failed) == [refused]
    assert re.match("ConfigError: .*nobody-knows", results.failed[refused])
    said = capfd.readouterr().err
    assert "2 of 2 runs to do" in said
    assert f"{fragile}: done" in said
    assert "Traceback" in (folder / "logs" / f"{refused}.txt").read_text()
    assert Path("killed").exists()  # its first process was, and another went on
    assert [(row["run"], row["target"], row["epochs_setting"]) for row in results.rows] == [
        (fragile, 1.0, 1),
        (fragile, 0.5, 1),
    ]
    assert not ray.is_initialized()  # what was started for it is gone
    log = (folder / "logs" / f"{fragile}.txt").read_text()
    assert log.count("block 0/1, epoch 1/1") == 1  # the second attempt went on from the checkpoint
    check_alone(config, folder / fragile)

    assert (folder / "sweep.csv").read_text() == results.to_csv()
    rows = list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))
    assert [float(row["test"]) for row in rows] == [row["test"] for row in results.rows]
    kept = json.loads((folder / "sweep.json").read_text())
    assert kept == json.loads(json.dumps(results.to_dict()))
    shown = str(results)
    assert shown.splitlines()[0].split()[:4] == ["trackers", "epochs", "task", "channels"]
    assert "1 failed" in shown
    assert shown.endswith(f"{refused}: {results.failed[refused]} (logs/{refused}.txt)")

    before = (folder / fragile / "results.json").stat().st_mtime_ns
    capfd.readouterr()
    again = Sweep.load(folder).run(folder)
    assert list(again.failed) == [refused]
    assert again.rows == results.rows
    assert "1 of 2 runs to do" in capfd.readouterr().err  # what is done is not begun again
    assert (folder / fragile / "results.json").stat().st_mtime_ns == before
    for other, words in (
        (Sweep(sweep.base, over={**sweep.over, "epochs": [1, 2]}), "over was .*epochs"),
        (Sweep(sweep.base.replace(rank=3), over=sweep.over), "rank was 8 and is 3"),
    ):
        with pytest.raises(RunError, match=words) as caught:
            other.run(folder)
        assert caught.value.code == "changed"


SCRIPT = """
import signal, sys
sys.path[:0] = {path!r}
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have ignored it
from running import quick
from spalier import Sweep
base = quick(epochs=1000, checkpoint_seconds={seconds})
Sweep(base, over={{"seed": [0, 1, 2]}}).run("sweep", jobs={jobs}, threads=1)
"""


def start(jobs: int, seconds: int = 1000) -> subprocess.Popen:
    path = [str(ROOT / "tests"), str(ROOT / "tests/runs"), str(ROOT / "tools")]
    Path("script.py").write_text(SCRIPT.format(path=path, jobs=jobs, seconds=seconds))
    return subprocess.Popen([sys.executable, "script.py"], stderr=subprocess.PIPE, text=True)


def wait_for(condition, seconds=600):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def is_free(folder: Path) -> bool:
    """True when no process is working in a run's folder."""
    try:
        with RunFolder(folder).locked():
            return True
    except RunError as error:
        if error.code != "busy":
            raise
        return False


def epochs_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def stopped_at(run: Path) -> int:
    return int(next(run.glob("checkpoint-*")).name.split("-")[-1].split(".")[0])


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.slow
def test_runs_end_with_a_checkpoint_when_the_sweep_is_interrupted(here, jobs):
    if jobs > 1:
        pytest.importorskip("ray")
    runs = [Path(f"sweep/seed={seed}") for seed in range(jobs)]
    process = start(jobs)
    wait_for(lambda: all(epochs_of(run) >= 2 for run in runs))
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=600)
    assert process.returncode in (1, -signal.SIGINT)  # as Python ends; the words say why
    assert words.rstrip().endswith("KeyboardInterrupt")
    for run in runs:
        assert is_free(run)  # no process is left behind
        assert stopped_at(run) >= 10
    assert not Path("sweep/seed=2").exists()  # and none was begun


@pytest.mark.slow
def test_runs_end_with_a_sweep_that_is_killed(here):
    pytest.importorskip("ray")
    run = Path("sweep/seed=0")
    process = start(2, seconds=0)
    wait_for(lambda: epochs_of(run) >= 2)
    process.kill()
    process.communicate()
    wait_for(lambda: is_free(run))
    assert stopped_at(run) >= 10


@pytest.mark.slow
def test_on_ray(here, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    sweep = Sweep(quick(**TINY, network="test_sweep:reluctant"), over={"seed": [0, 1]})
    folder = here / "sweep"
    folder.mkdir()
    (folder / "sweep.yaml").write_text(sweep.to_yaml())
    (folder / "seed=1").write_text("in the way")
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 1024 * 1024, log_to_driver=False)
    try:
        first = sweep.run("sweep", place="ray")
        assert first.failed["seed=0"] == "RuntimeError: not the first time"
        assert not first.rows
        results = sweep.run("sweep", place="ray")
        assert ray.is_initialized()  # as it was before
    finally:
        ray.shutdown()
    assert list(results.failed) == ["seed=1"]
    assert results.failed["seed=1"].startswith("RunError: ")
    assert [row["run"] for row in results.rows] == ["seed=0", "seed=0"]
    check_alone(sweep.runs()[0][1], folder / "seed=0")


# -- tables ------------------------------------------------------------------------------------------------------------


def row(run, **values):
    return {"run": run, "task": "t", "target": 0.5, "validation": None, "test": 0.5, **values}


def test_summaries_have_means_and_deviations():
    tests = {("a", 0): 0.5, ("a", 1): 0.7, ("a", 2): 0.9, ("b", 0): 0.25}
    rows = [
        row(f"{c}{s}", criterion=c, seed=s, test=test - (0.1 if target < 1 else 0), target=target)
        for (c, s), test in tests.items()
        for target in (1.0, 0.5)
    ]
    found = SweepResults(Path(), ("criterion", "seed"), rows).summary(over="seed")
    assert [(r["criterion"], r["target"]) for r in found.rows] == [("a", 1), ("a", 0.5), ("b", 1), ("b", 0.5)]
    first = found.rows[0]
    assert first["test_mean"] == statistics.fmean([0.5, 0.7, 0.9])
    assert first["test_deviation"] == pytest.approx(0.2)  # sqrt((0.04 + 0 + 0.04) / 2)
    assert (first["test_count"], first["validation_count"], first["validation_mean"]) == (3, 0, None)
    assert found.rows[2]["test_deviation"] is None  # one run has none
    lines = [line.split() for line in str(found).splitlines()]
    assert lines[1] == ["a", "1", "-", "-", "0", "70.0%", "20.0%", "3"]
    assert len(list(csv.DictReader(found.to_csv().splitlines()))) == 4


def test_summaries_over_several_settings_and_lists():
    rows = [
        row(f"{e}{s}", epochs_setting=e, epochs=9, seed=s, classes=["x"], test=e / 10) for e in (1, 3) for s in (0, 1)
    ]
    results = SweepResults(Path(), ("epochs", "seed", "classes"), rows)
    found = results.summary(over=("epochs", "seed"))
    assert isinstance(found, Summary)
    assert [(r["classes"], r["test_mean"], r["test_count"]) for r in found.rows] == [(["x"], 0.2, 4)]
    assert [r["epochs"] for r in results.summary().rows] == [1, 3]
    with pytest.raises(ConfigError, match="expected some of epochs, seed, classes"):
        results.summary(over="rank")


def test_a_sweep_without_rows_can_be_printed():
    shown = str(SweepResults(Path("there"), ("seed",), [], {"seed=0": "it is gone"}))
    assert shown.splitlines()[0].split()[:2] == ["seed", "task"]
    assert shown.endswith("seed=0: it is gone (logs/seed=0.txt)")
    assert SweepResults(Path(), ("seed",), []).summary().rows == []


class PretendedRay:
    """As much of Ray as is needed to begin and to end."""

    def __init__(self, joined):
        self.up = joined

    def is_initialized(self):
        return self.up

    def init(self, **options):
        assert options["include_dashboard"] is False
        self.up = True

    def shutdown(self):
        self.up = False

    def remote(self, **options):
        self.asked = options
        return lambda function: function

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 64.0}}]


@pytest.mark.parametrize("joined", [True, False])
def test_only_a_ray_that_was_started_here_is_shut_down(monkeypatch, joined):
    ray = PretendedRay(joined)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert list(_on_ray([], 2, 0)) == []
    assert (ray.asked["num_cpus"], ray.asked["num_gpus"]) == (2, 0)
    assert ray.up == joined


def test_ray_warns_of_what_no_node_has(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "ray", PretendedRay(True))
    list(_on_ray([], 2, 0))
    assert not caplog.records
    list(_on_ray([], 3, 0))
    list(_on_ray([], 1, 0.5))
    assert "no node of the Ray cluster has 3 CPUs and 0 GPUs" in caplog.text
    assert "1 CPUs and 0.5 GPUs" in caplog.text
