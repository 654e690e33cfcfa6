"""What can go wrong in the middle of a run: it ends with words, and its folder is as good as before."""

import errno
import os
import signal

import pytest
import torch
from running import Small, outcome, quick
from torch import nn
from torch.utils.data import Dataset

from spalier import files
from spalier.data import Data
from spalier.errors import ConfigError, DataError, RunError, TaskFileError
from spalier.runs import Engine
from spalier.runs.checkpoint import RunFolder, load_checkpoint


@pytest.fixture(scope="module")
def never(tmp_path_factory):
    """What comes out when nothing goes wrong."""
    folder = tmp_path_factory.mktemp("never") / "run"
    quick().run(folder, progress=False)
    return outcome(folder)


def fail_at(monkeypatch, step: int, error: BaseException) -> None:
    real = Engine.loss

    def loss(engine, *args):
        if engine.position.step == step:
            raise error
        return real(engine, *args)

    monkeypatch.setattr(Engine, "loss", loss)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite(tmp_path, monkeypatch, never, value):
    real = Engine.loss
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "loss", lambda e, *a: real(e, *a) * (value if e.position.step == 7 else 1))
        with pytest.raises(RunError, match=r"the loss is (nan|inf) at step 7 \(block 0/2, epoch 2/2\)") as caught:
            quick(checkpoint_seconds=0).run(tmp_path / "run", progress=False)
    assert caught.value.code == "not-finite"
    kept = load_checkpoint(RunFolder(tmp_path / "run"))
    assert kept.position.step == 7
    assert all(bool(torch.isfinite(t).all()) for t in kept.tensors.values())
    quick().run(tmp_path / "run", progress=False)
    assert outcome(tmp_path / "run") == never


def test_weights_that_blow_up(tmp_path):
    """A rate that is far too high is found out at the latest before anything is written."""
    with pytest.raises(RunError) as caught:
        quick(optimizer="sgd", lr=1e30, epochs=1).run(tmp_path / "run", progress=False)
    assert caught.value.code == "not-finite"
    assert load_checkpoint(RunFolder(tmp_path / "run")).position.step == 0


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=["python", "cpu", "gpu"],
)
def test_out_of_memory(tmp_path, monkeypatch, never, error):
    with monkeypatch.context() as patch:
        fail_at(patch, 6, error)
        with pytest.raises(RunError, match=r"memory ran out with batches of 32.*smaller batch_size") as caught:
            quick().run(tmp_path / "run", progress=False)
    assert caught.value.code == "memory"
    quick().run(tmp_path / "run", progress=False)
    assert outcome(tmp_path / "run") == never


def test_errors_of_ones_own_stay_what_they_are(tmp_path, monkeypatch):
    fail_at(monkeypatch, 2, RuntimeError("mine"))
    with pytest.raises(RuntimeError, match="mine"):
        quick().run(tmp_path / "run", progress=False)


@pytest.mark.parametrize("moment", [0, 1, 2, 3, 5, 8])
def test_a_full_disk(tmp_path, monkeypatch, never, moment):
    """Whichever file cannot be written, the run goes on once there is room."""
    real, calls = files._write_new, [0]

    def full(path, data):
        calls[0] += 1
        if calls[0] > moment:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(files, "_write_new", full)
        with pytest.raises((RunError, TaskFileError), match="No space left on device") as caught:
            quick().run(tmp_path / "run", progress=False)
    assert caught.value.code == "write"
    quick().run(tmp_path / "run", progress=False)
    assert outcome(tmp_path / "run") == never
    assert not list((tmp_path / "run").rglob("*.tmp"))


class Deadly(Dataset):
    """Samples one of which kills the process that loads it, once."""

    def __init__(self, marker) -> None:
        self.marker = marker

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index):
        if index == 40 and torch.utils.data.get_worker_info() is not None and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((3, 8, 8), index / 64), index % 4


def test_a_dead_worker(tmp_path):
    marker = tmp_path / "died"
    marker.touch()
    torch.manual_seed(0)
    net = Small(4)
    config = quick(epochs=1, densities=(0.5,), num_workers=1, batch_size=16, max_train_samples=None)

    def run(folder):
        data = Data.of(Deadly(marker), classes=tuple("abcd"))
        return config.run(tmp_path / folder, network=net, data=data, progress=False)

    run("never")
    marker.unlink()
    with pytest.raises(DataError, match="worker"):
        run("run")
    run("run")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "never")


def test_two_at_once(tmp_path, monkeypatch):
    with RunFolder(tmp_path / "run").locked(), pytest.raises(RunError, match="another process") as caught:
        quick().run(tmp_path / "run", progress=False)
    assert caught.value.code == "busy"


def test_a_folder_of_something_else(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(RunError, match="holds no run, and is not empty") as caught:
        quick().run(tmp_path, progress=False)
    assert caught.value.code == "folder"
    assert (tmp_path / "thesis.tex").read_text() == "precious"
    with pytest.raises(RunError) as caught:
        quick().run(tmp_path / "thesis.tex", progress=False)
    assert caught.value.code in ("folder", "write")


def stopped_run(folder, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        fail_at(patch, 7, KeyboardInterrupt())  # an epoch has six batches
        with pytest.raises(KeyboardInterrupt):
            quick(checkpoint_seconds=0).run(folder, progress=False)


def test_a_damaged_checkpoint(tmp_path, monkeypatch, never):
    folder = tmp_path / "run"
    stopped_run(folder, monkeypatch)
    for file in (folder / "checkpoint.safetensors", next(folder.glob("checkpoint-*"))):
        data = file.read_bytes()
        for damaged in (b"", data[: len(data) // 2], b"\x00" * len(data), data[:-1]):
            file.write_bytes(damaged)
            with pytest.raises(RunError, match="cannot be read") as caught:
                quick().run(folder, progress=False)
            assert caught.value.code == "checkpoint"
        file.write_bytes(data)
    quick().run(folder, progress=False)
    assert outcome(folder) == never


def test_metrics_that_are_gone(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    stopped_run(folder, monkeypatch)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match=r"metrics.jsonl.* has 0 bytes") as caught:
        quick().run(folder, progress=False)
    assert caught.value.code == "checkpoint"


def test_precisions_that_cannot_be_had(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="fp16"):
        quick(mixed_precision="fp16").run(tmp_path / "run", progress=False)
    quick(epochs=0, densities=()).run(tmp_path / "run", progress=False)  # and nothing was left behind


def test_images_that_do_not_fit(tmp_path):
    with pytest.raises(RunError, match="does not run on float32 images of"):
        quick().run(tmp_path / "run", network=nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 10)))
