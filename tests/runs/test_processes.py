"""Several processes are one: the same task from the same global batch, under both launchers."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from running import quick
from torch import nn

from spalier import Task
from spalier.networks import open_network
from spalier.runs.processes import SyncedNorms

ROOT = Path(__file__).parents[2]
TOLERANCE = 5e-5
"""Sums over two halves of a batch round otherwise than over the whole; SGD lets that grow slowly."""
SETTINGS = {
    "optimizer": "sgd",
    "lr": 0.05,
    "epochs": 3,
    "densities": (0.5,),
    "recovery": "all",
    "teacher": "self",
    "ema_decay": 0.8,
    "validate_every": 1,
}
ACCELERATE = ["--mixed_precision=no", "--dynamo_backend=no"]
LAUNCHERS = {"torch.distributed.run": "--master_port", "accelerate.commands.launch": "--main_process_port"}
SCRIPT = """
import os
import sys
sys.path[:0] = {path!r}
import torch
torch.set_num_threads(1)
from running import quick
results = quick(**{settings!r}).run(sys.argv[1], progress=False)
os.write(1, b"%d rows\\n" % len(results.rows))  # whole, whatever the other process writes
"""


WIDE = {
    "optimizer": "sgd",
    "lr": 0.02,
    "epochs": 2,
    "densities": (0.5,),
    "learn": "wide",
    "codes": ("spdelta-4bit", "splora-r2", "bytes-1/3"),
    "refit_epochs": 1,
}


def launched(tmp_path: Path, launcher: list[str], folder: str, settings=SETTINGS) -> str:
    path = [str(ROOT / "tests"), str(ROOT / "tests/runs"), str(ROOT / "tools")]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(path=path, settings=settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        *launcher,
        f"{LAUNCHERS[launcher[0]]}={port}",
        str(script),
        str(tmp_path / folder),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return quick(**SETTINGS).run(tmp_path_factory.mktemp("alone") / "run", progress=False)


@pytest.mark.slow
def test_two_processes_write_the_same_narrow_forms(tmp_path):
    """Rounding decides here and there which code is nearest; the networks are the same to a percent."""
    alone = quick(**WIDE).run(tmp_path / "alone", progress=False)
    launched(tmp_path, ["torch.distributed.run", "--nproc_per_node=2"], "run", WIDE)
    base = open_network("running:small", classes=10, seed=0)
    x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for row in alone.rows:
        one = alone.tasks.load(row["task"])
        two = Task.load(tmp_path / "run" / "tasks" / f"{row['task']}.task.safetensors")
        assert [mask.tolist() for mask in one.masks] == [mask.tolist() for mask in two.masks]
        assert one.table.rows[0].source == two.table.rows[0].source
        with torch.no_grad():
            wanted, found = one.build(base)(x), two.build(base)(x)
        assert float((found - wanted).norm() / wanted.norm()) < 0.05, row["task"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--nproc_per_node=2"],
        # which starts several processes on CPUs too, by that name alone
        ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", *ACCELERATE],
    ],
    ids=["torchrun", "accelerate"],
)
def test_two_processes_are_one(tmp_path, alone, launcher):
    shown = launched(tmp_path, launcher, "run")
    assert shown.count("2 rows") == 2
    for row in alone.rows:
        one = alone.tasks.load(row["task"])
        two = Task.load(tmp_path / "run" / "tasks" / f"{row['task']}.task.safetensors")
        assert [mask.tolist() for mask in one.masks] == [mask.tolist() for mask in two.masks]
        for kind in ("adapters", "values"):
            a, b = getattr(one, kind), getattr(two, kind)
            assert torch.allclose(a, b, rtol=0, atol=TOLERANCE), (row["task"], kind, (a - b).abs().max())


def _reference(x, norm):
    out = norm(x)
    return out, norm.running_mean, norm.running_var


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from([(6, 3), (4, 2, 5), (3, 4, 2, 3), (2, 2, 2, 2, 2)]),
    affine=st.booleans(),
    momentum=st.sampled_from([0.1, 0.7]),
    seed=st.integers(0, 1000),
)
def test_synced_norms_alone_are_the_norms(shape, affine, momentum, seed):
    """In one process the sums are over it alone: values, gradients and statistics are PyTorch's, in float64."""
    torch.manual_seed(seed)
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    norm = kinds[len(shape)](shape[1], affine=affine, momentum=momentum)
    other = kinds[len(shape)](shape[1], affine=affine, momentum=momentum)
    x = torch.randn(shape, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    wanted, mean, var = _reference(x, norm)
    with SyncedNorms():
        found, other_mean, other_var = _reference(y, other)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert torch.allclose(other_mean, mean, atol=1e-6)
    assert torch.allclose(other_var, var, atol=1e-5)
    weights = torch.randn(shape)
    (wanted * weights).sum().backward()
    (found * weights).sum().backward()
    assert torch.allclose(x.grad, y.grad, atol=1e-4)
    with SyncedNorms():
        assert torch.allclose(F.batch_norm(y, mean, var), F.batch_norm(x, mean, var))  # not in training: as ever
