"""A run that is killed goes on to the same bits as one that never was."""

import json
import os
import pickletools
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from running import Small, outcome, quick
from torch.utils.data import TensorDataset

from spalier import files
from spalier.data import Data
from spalier.errors import NetworkError, RunError
from spalier.runs import Engine, TransferPruning
from spalier.runs.checkpoint import RunFolder

ROOT = Path(__file__).parents[2]


class Killed(BaseException):
    """Nothing catches it, as nothing catches a kill."""


def killed_at(monkeypatch, moment: int, owner, name: str, *, after: bool) -> None:
    """Let the ``moment``-th call of a function be the last thing that happens."""
    real, calls = getattr(owner, name), [0]

    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == moment and not after:
            raise Killed
        found = real(*args, **kwargs)
        if calls[0] == moment:
            raise Killed
        return found

    monkeypatch.setattr(owner, name, call)


VARIANTS = {
    "splora": {},
    "fine-pruning with momentum that goes on": {
        "method": "fine-pruning",
        "optimizer": "sgd",
        "lr": 0.01,
        "keep_optimizer": True,
    },
    "free writers, taught by itself, with dropout": {
        "writers": "free",
        "teacher": "self",
        "network_options": {"dropout": 0.3},
        "recovery": "all",
    },
    "average and best": {"ema_decay": 0.9, "keep_best": True, "validate_every": 1, "epochs_per_prune": 2},
    "learned wide, written narrow": {"learn": "wide", "codes": ["spdelta-2bit", "splora-r2"], "refit_epochs": 1},
    "sppara, random, weights": {"method": "sppara", "criterion": "random", "budget": "weights"},
}


FIRST, OTHERS = list(VARIANTS)[:2], list(VARIANTS)[2:]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What each variant comes to when nothing happens to it."""
    found = {}

    def of(variant: str):
        if variant not in found:
            folder = tmp_path_factory.mktemp("whole") / "run"
            quick(**VARIANTS[variant], checkpoint_seconds=0).run(folder, progress=False)
            found[variant] = outcome(folder)
        return found[variant]

    return of


@pytest.mark.parametrize("variant", [*FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_killed_in_the_middle_of_everything(tmp_path, monkeypatch, whole, variant):
    config = quick(**VARIANTS[variant], checkpoint_seconds=0)
    folder = tmp_path / "run"
    kills = 0
    for name, moment, after in (
        ("train_step", 3, False),
        ("_end_epoch", 1, True),
        ("finish", 1, False),
        ("make_row", 1, True),
        ("score", 1, False),
        ("prune", 1, False),
        ("prune", 1, True),
        ("train_step", 2, True),
        ("finish", 1, True),
        ("refit", 1, False),
        ("refit", 2, True),
        ("train_step", 1, True),
        ("_restore_wide", 1, True),
        ("make_row", 1, False),
    ):
        with monkeypatch.context() as patch:
            killed_at(patch, moment, Engine, name, after=after)
            try:
                config.run(folder, progress=False)
            except Killed:
                kills += 1
    config.run(folder, progress=False)
    assert kills >= 8
    assert outcome(folder) == whole(variant)


def test_networks_that_draw_numbers_in_eval_mode(tmp_path, monkeypatch):
    config = quick(network_options={"noise": 1.0}, densities=(), validate_every=1, checkpoint_seconds=0)
    config.run(tmp_path / "never", progress=False)
    with monkeypatch.context() as patch:
        killed_at(patch, 8, Engine, "train_step", after=True)
        with pytest.raises(Killed):
            config.run(tmp_path / "run", progress=False)
    config.run(tmp_path / "run", progress=False)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "never")


@pytest.mark.slow
def test_killed_at_every_write(tmp_path, monkeypatch, whole):
    """Before and after each file is put in place, one after the other: the folder is never half of something."""
    config = quick(checkpoint_seconds=1000)
    folder = tmp_path / "run"
    kills = 0
    while kills < 60:
        with monkeypatch.context() as patch:
            killed_at(patch, kills % 5 + 1, files, "write", after=kills // 5 % 2 == 1)
            try:
                config.run(folder, progress=False)
            except Killed:
                kills += 1
                continue
        break
    assert 6 < kills < 60
    assert outcome(folder) == whole("splora")


SCRIPT = """
import signal, sys
sys.path[:0] = {path!r}
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have ignored it
import torch
torch.set_num_threads(1)
from running import quick
{before}
quick(epochs=3, checkpoint_seconds={seconds}, num_workers={workers}).run(sys.argv[1], progress=False)
"""
ENDED = """
import os
from spalier.runs import Engine
end = Engine._end_epoch
def end_and_signal(engine):
    end(engine)
    os.killpg(0, {number})
Engine._end_epoch = end_and_signal
"""


def start(folder: Path, seconds: float = 0.05, workers: int = 0, before: str = "") -> subprocess.Popen:
    path = [str(ROOT / "tests"), str(ROOT / "tests/runs"), str(ROOT / "tools")]
    code = SCRIPT.format(path=path, seconds=seconds, workers=workers, before=before)
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.slow
def test_killed_for_real(tmp_path):
    """kill -9 at random moments of a process."""
    moments = random.Random(5)
    never = tmp_path / "never"
    quick(epochs=3).run(never, progress=False)
    folder = tmp_path / "killed"
    kills = 0
    for _ in range(12):
        process = start(folder)
        begun = folder / "checkpoint.safetensors"
        while not begun.exists() and process.poll() is None:
            time.sleep(0.02)
        if kills:  # the first at once: a fast machine is done soon
            time.sleep(moments.uniform(0.0, 1.5))
        process.kill()
        _, words = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, words
        kills += 1
    quick(epochs=3).run(folder, progress=False)
    assert kills
    assert outcome(folder) == outcome(never)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 0), (signal.SIGTERM, 1)])
def test_asked_to_stop(tmp_path, number, workers):
    """Ctrl-C and SIGTERM end a run after a step, with a checkpoint of it; both come to processes that load data too."""
    folder = tmp_path / "run"
    before = ENDED.format(number=int(number))  # by itself, at the end of an epoch: no earlier, and no later
    process = start(folder, seconds=1000, workers=workers, before=before)
    _, words = process.communicate(timeout=600)
    if number == signal.SIGTERM:
        assert process.returncode == 128 + 15, words
    else:
        assert process.returncode in (1, -signal.SIGINT), words  # as Python ends; the words say why
        assert words.rstrip().endswith("KeyboardInterrupt")
    assert not (folder / "results.json").exists()
    steps = int(next(folder.glob("checkpoint-*")).name.split("-")[-1].split(".")[0])
    assert steps >= 5  # nothing of the epochs that were done is lost
    quick(epochs=3).run(folder, progress=False)
    never = tmp_path / "never"
    quick(epochs=3).run(never, progress=False)
    assert outcome(folder) == outcome(never)


def test_done_is_done(tmp_path):
    folder = tmp_path / "run"
    config = quick(densities=(0.5,), epochs=1)
    first = config.run(folder, progress=False)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in _files(folder)}
    again = config.run(folder, progress=False)
    assert again.rows == first.rows
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in _files(folder)} == before


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def test_other_settings_are_refused_with_the_difference(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        killed_at(patch, 1, Engine, "score", after=False)
        with pytest.raises(Killed):
            quick().run(folder, progress=False)
    before = {path: path.read_bytes() for path in _files(folder)}
    with pytest.raises(RunError, match="rank") as caught:
        quick(rank=4, seed=1).run(folder, progress=False)
    assert caught.value.code == "changed"
    assert "other settings: rank was 8 and is 4, seed was 0 and is 1; resume" in str(caught.value)
    assert {path: path.read_bytes() for path in _files(folder)} == before
    free = {"checkpoint_seconds": 7, "num_workers": 0, "channels_last": False}
    quick(**free).run(folder, progress=False)
    assert TransferPruning.load(folder).given == quick().given
    assert (folder / "run.yaml").read_bytes() == before[folder / "run.yaml"]  # with what the recipe came to then


def test_done_with_something_else_is_refused(tmp_path):
    torch.manual_seed(0)
    net, other = Small(), Small()
    data = Data.of(TensorDataset(torch.rand(40, 3, 8, 8), torch.arange(40) % 10))
    rest = Data.of(TensorDataset(torch.rand(40, 3, 8, 8), torch.arange(40) % 10))
    config = quick(epochs=1, densities=(), max_train_samples=None)
    first = config.run(tmp_path / "run", network=net, data=data, progress=False)
    assert config.run(tmp_path / "run", network=net, data=data, progress=False).rows == first.rows
    for given in ({"network": other, "data": data}, {"network": net, "data": rest}):
        with pytest.raises(RunError, match="the run is done, with") as caught:
            config.run(tmp_path / "run", **given, progress=False)
        assert caught.value.code == "changed"


def test_a_run_that_never_began_claims_nothing(tmp_path):
    with pytest.raises(NetworkError):
        quick(network="resnet99").run(tmp_path / "run", progress=False)
    quick(epochs=0, densities=()).run(tmp_path / "run", progress=False)
    assert TransferPruning.load(tmp_path / "run").network == "running:small"


def test_another_teacher_is_refused(tmp_path, monkeypatch):
    quick(epochs=1, densities=()).run(tmp_path / "teacher", progress=False)
    teacher = tmp_path / "teacher/tasks/digits-100.task.safetensors"
    config = quick(teacher=teacher)
    with monkeypatch.context() as patch:
        killed_at(patch, 1, Engine, "score", after=False)
        with pytest.raises(Killed):
            config.run(tmp_path / "run", progress=False)
    quick(epochs=2, densities=()).run(tmp_path / "other", progress=False)
    kept = teacher.read_bytes()
    teacher.write_bytes((tmp_path / "other/tasks/digits-100.task.safetensors").read_bytes())
    with pytest.raises(RunError, match="the teacher is another") as caught:
        config.run(tmp_path / "run", progress=False)
    assert caught.value.code == "changed"
    teacher.write_bytes(kept)
    config.run(tmp_path / "run", progress=False)
    assert (tmp_path / "run/results.json").exists()


def test_children_do_not_keep_the_lock(tmp_path):
    """A process that was forked in a run and outlives it leaves the folder free."""
    begun, tell = os.pipe()
    with RunFolder(tmp_path / "run").locked():
        child = os.fork()
        if child == 0:
            os.write(tell, b"!")
            time.sleep(60)
            os._exit(0)
        os.read(begun, 1)
    try:
        with RunFolder(tmp_path / "run").locked():
            assert os.waitpid(child, os.WNOHANG) == (0, 0)  # it is still there
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_nothing_in_the_folder_is_a_pickle(tmp_path):
    folder = tmp_path / "run"
    quick(epochs=1, densities=(0.5,), trackers=("tensorboard",)).run(folder, progress=False)
    kinds = {"".join(path.suffixes[-2:]) or path.name for path in _files(folder)}
    for path in _files(folder):
        data = path.read_bytes()
        assert not data.startswith(b"PK"), path  # as torch.save begins
        if path.suffix == ".json":
            json.loads(data)
        elif path.suffix == ".safetensors":
            safetensors.torch.load(data)
        elif data[:1] == b"\x80":
            with pytest.raises(ValueError, match=r"\w"):
                list(pickletools.genops(data))
    assert {".yaml", ".jsonl", ".task.safetensors", ".safetensors", ".json"} <= kinds
