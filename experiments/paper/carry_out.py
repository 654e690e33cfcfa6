"""Carrying cells out: each once, by whichever process gets to it first, with its results in a file of its own."""

from __future__ import annotations

import contextlib
import functools
import json
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import spalier as sp
from experiments.paper.cells import Cell, teacher_of
from experiments.paper.paper_data import ORIGINS, open_set
from experiments.paper.protocol import Protocol, weights_of
from experiments.paper.released import Released
from spalier.data import Data, Split, open_data
from spalier.data.data import Ints
from spalier.inputs import Inputs
from spalier.runs import Engine
from spalier.runs.checkpoint import RunFolder
from spalier.timing import processor

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
"""What is committed."""
_OF_DATA = ("image_size", "max_train_samples", "validation_split")
"""Settings that are about data."""


def _commit() -> str:
    """The commit of this project that the code is of; marked where files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "../../src", ".")
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


COMMIT = _commit()
"""Read when the code is, since a checkout may change while a process runs."""


@dataclass(frozen=True)
class Place:
    """Where everything is."""

    protocol: Protocol
    data: Path
    weights: Path
    work: Path
    """Folders of runs: checkpoints and task files."""
    results: Path
    """One JSON file for each cell."""


class _FirstBlock(Engine):
    """A run that ends before its first prune, with a checkpoint to go on from."""

    def score(self) -> None:
        """Not yet."""
        raise _Reached


class _Reached(Exception):
    """The first block is done."""


def carry_out(cells: Sequence[Cell], place: Place) -> dict[str, str]:
    """Every cell that has no results yet; what went wrong, by the names of those that failed.

    Those that other processes work on are waited for: if such a process dies, they are carried out here.
    """
    failed: dict[str, str] = {}
    left = list(cells)
    while left:
        before, left = left, [cell for cell in left if not _is_settled(cell, place, failed)]
        if len(left) == len(before):
            time.sleep(5)
    return failed


def _is_settled(cell: Cell, place: Place, failed: dict[str, str]) -> bool:
    """Carry a cell out, unless it is done; False where another process is in the way."""
    file = place.results / f"{cell.name}.json"
    if file.exists():
        return True
    try:
        rows = rows_of(cell, place)
    except sp.errors.RunError as error:
        if error.code == "busy":
            return False
        failed[cell.name] = str(error)  # it may diverge; the others go on
        print(f"{cell.name} failed: {error}", flush=True)
        return True
    write(file, record(cell, place, rows))
    if cell.masks == "released":
        shutil.rmtree(place.work / cell.name / "tasks", ignore_errors=True)  # they cannot tell what was set to zero
    print(cell.name, ", ".join(f"{row['target']:g}: {row['test']:.1%}" for row in rows), flush=True)
    return True


def rows_of(cell: Cell, place: Place) -> list[dict[str, Any]]:
    """Run a cell, or go on with it: what came out, a row for each density."""
    data, first = samples_of(cell, place), config_of(cell, place)
    folder = place.work / cell.name
    if not first.targets():
        return list(first.run(folder, data=data, progress=False).rows)
    trunk = first_block(first, place.work / cell.trunk_name, data)
    config = first.replace(**cell.after)
    if cell.teacher:
        config = config.replace(**_teaching(cell, place, trunk))
    if config.start_task is None:
        _branch(trunk, folder, config.replace(data=f"given:{data.name}"))
    engine = Released if cell.masks == "released" else Engine
    return list(config.run(folder, data=data, progress=False, engine=engine).rows)


def samples_of(cell: Cell, place: Place) -> Data:
    """The cell's data, opened once in a process; of the test images as many as the scale looks at."""
    asked = {name: cell.before[name] for name in _OF_DATA if name in cell.before}
    data = _opened(cell.data, str(place.data), json.dumps(asked), cell.seed)
    count = place.protocol.tested.get(cell.data)
    if count is None or data.test is None:
        return data
    return replace(data, test=Evenly(data.test, count), digest=f"{data.digest}, {count} to test")


@functools.lru_cache(maxsize=1)
def _opened(name: str, folder: str, asked: str, seed: int) -> Data:
    if name in ORIGINS:
        return open_set(name, Path(folder), seed=seed, **json.loads(asked))
    return open_data(name, folder=folder, seed=seed, **json.loads(asked))


class Evenly:
    """Some of the samples of a split, evenly spread over it."""

    def __init__(self, split: Split, count: int) -> None:
        self.split, self.rows = split, np.linspace(0, len(split), count, endpoint=False).astype(np.int64)
        self.labels = split.labels[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, indices: Ints, epoch: int | None, seed: int = 0) -> tuple[Inputs, Tensor]:
        """Images and labels of these samples."""
        return self.split.fetch(self.rows[indices], epoch, seed)


def config_of(cell: Cell, place: Place) -> sp.TransferPruning:
    """The settings of a cell's first block."""
    own = {name: value for name, value in cell.before.items() if name not in _OF_DATA}
    return sp.TransferPruning(
        **{**own, "weights": str(weights_of(place.protocol, place.weights, cell.before["weights"]))}
    )


def first_block(config: sp.TransferPruning, folder: Path, data: Data) -> Path:
    """The folder of a run that has ended its first block and pruned nothing yet."""
    done = folder / "blocks" / "00.json"
    if not done.exists():
        with contextlib.suppress(_Reached):
            config.run(folder, data=data, progress=False, engine=_FirstBlock)
    return folder


def _teaching(cell: Cell, place: Place, trunk: Path) -> dict[str, Any]:
    """Settings of a run with a teacher. One whose teacher is another network begins with its own first block's task."""
    if cell.teacher == cell.trunk:
        return {"teacher": "self"}
    other = teacher_of(place.protocol, cell)
    teacher = first_block(config_of(other, place), place.work / other.trunk_name, samples_of(other, place))
    name = f"{cell.data}-100.task.safetensors"
    return {"start_task": str(trunk / "tasks" / name), "teacher": str(teacher / "tasks" / name)}


def _branch(trunk: Path, folder: Path, config: sp.TransferPruning) -> None:
    """A run's folder as it is when its first block is done, from that of a run that began alike.

    Up to there a run depends on nothing that tells the two apart, and its checkpoint holds all that it goes on from.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = tempfile.TemporaryDirectory(dir=folder.parent, prefix=".branch-")
    with RunFolder(trunk).locked(), making as made:
        copy = Path(made) / folder.name
        shutil.copytree(trunk, copy, ignore=shutil.ignore_patterns(".lock"))
        RunFolder(copy).write(copy / "run.yaml", config.to_yaml().encode())
        with contextlib.suppress(OSError):  # another process was first
            copy.rename(folder)


# -- what is written down ---------------------------------------------------------------------------------------------


def record(cell: Cell, place: Place, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A cell's results, with all that is needed to make them again; no paths of this machine."""
    settings = {**cell.before, **cell.after}
    return {
        "cell": cell.name,
        "scale": place.protocol.scale,
        "labels": dict(cell.labels),
        "masks": cell.masks,
        "teacher": cell.teacher,
        "settings": json.loads(json.dumps(settings)),
        "tested": len(samples_of(cell, place).test or ()),
        "rows": list(rows),
        "commit": COMMIT,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def write(path: Path, value: dict[str, Any]) -> None:
    """Put a file of results in place, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")
    partial.replace(path)
