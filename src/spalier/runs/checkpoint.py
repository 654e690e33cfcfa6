"""Where a run is, and all that it needs to go on from there to the same bits.

Randomness has no state here: what is drawn is a function of the seed and the step, so a position is enough.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from spalier.errors import RunError, SpalierError
from spalier.runs.folder import RunFolder, writing
from spalier.tasks.task import Task

FORMAT = 1
Phase = Literal["train", "finish", "score", "prune", "done"]


@dataclass(frozen=True)
class Position:
    """Where a run is: what comes next."""

    block: int = 0
    phase: Phase = "train"
    epoch: int = 0
    """Epochs that are done in this block."""
    batch: int = 0
    """Batches that are done in this epoch."""
    step: int = 0
    """Steps that are done in the whole run."""
    epochs: int = 0
    """Epochs that are done in the whole run."""

    def to(self, **changes: Any) -> Position:
        """The same but for some of it."""
        return replace(self, **changes)


@dataclass
class Checkpoint:
    """A moment of a run."""

    at: Position
    task: Task
    tensors: dict[str, Tensor]
    """The optimizer's state, averages and the best values so far, by kind and name."""
    base: str
    """The digest of the base's values, and of the data."""
    data: str
    teacher: str = ""
    """Of the teacher's file, where there is one."""
    metrics: int = 0
    """How many bytes of metrics.jsonl belong to it."""
    loss: float = 0.0
    """Summed over the batches of this epoch."""
    best: float | None = None
    plan: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    scaler: dict[str, Any] | None = None

    def part(self, kind: str) -> dict[str, Tensor]:
        """The tensors of one kind, by name."""
        return {n.removeprefix(f"{kind}:"): t for n, t in self.tensors.items() if n.startswith(f"{kind}:")}


_PLAIN = ("base", "data", "teacher", "metrics", "loss", "best", "plan", "rows", "seconds", "scaler")


def save_checkpoint(folder: RunFolder, checkpoint: Checkpoint) -> None:
    """Write it: first what was learned, then the file that names it, then nothing else is needed."""
    name = f"checkpoint-{checkpoint.at.block}-{checkpoint.at.phase}-{checkpoint.at.step}.task.safetensors"
    state = {key: getattr(checkpoint, key) for key in _PLAIN}
    state |= {"format": FORMAT, "at": asdict(checkpoint.at), "learned": name}
    tensors = {key: value.detach().cpu().contiguous() for key, value in checkpoint.tensors.items()}
    with writing(folder.path):
        checkpoint.task.save(folder.path / name)
    folder.write(_file(folder), save(tensors, {"run": json.dumps(state, allow_nan=False)}))
    for old in folder.path.glob("checkpoint-*.task.safetensors"):
        if old.name != name:
            with contextlib.suppress(OSError):  # a leftover does no harm; the next one tries again
                old.unlink()


def load_checkpoint(folder: RunFolder) -> Checkpoint | None:
    """The moment that a run has come to, or None where it has not begun."""
    file = _file(folder)
    if not file.exists():
        return None
    try:
        with safe_open(file, "pt") as opened:
            state = json.loads(opened.metadata()["run"])
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  # not a dict
        return _made(folder, state, tensors)
    except (SafetensorError, SpalierError, OSError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            "checkpoint",
            f"{str(file)!a} cannot be read ({type(error).__name__}: {error}); restore it from a copy, or begin again "
            "in another folder",
        ) from error


def _made(folder: RunFolder, state: Mapping[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    if state["format"] != FORMAT:
        raise ValueError(f"it has format {state['format']!r}, expected {FORMAT}")
    known = {f.name for f in fields(Position)}
    at = Position(**{key: value for key, value in state["at"].items() if key in known})
    name = state["learned"]
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"it names {name!r}, expected a file beside it")
    task = Task.load(folder.path / name)
    return Checkpoint(at=at, task=task, tensors=tensors, **{key: state[key] for key in _PLAIN})


def _file(folder: RunFolder) -> Path:
    return folder.path / "checkpoint.safetensors"
