"""A run's folder, and the checkpoint in it: all that a run needs to go on to the same bits. Nothing is a pickle.

run.yaml                   the settings
metrics.jsonl              one line for each epoch and block
checkpoint.safetensors     where the run is, and what it needs to go on
checkpoint-N.task.safetensors    what has been learned by then
wide.task.safetensors      all kept weights, while narrow forms of them learn
blocks/00.json ...         all that is known of each block, with .png, example images, and .scores.json
tasks/                     a store with one task for each density
results.json               the rows, once the run is done
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from spalier import files
from spalier.errors import RunError, SpalierError, TaskFileError
from spalier.runs.settings import Settings, differences
from spalier.tasks import Task

FORMAT = 1
Phase = Literal["train", "finish", "refit", "score", "prune", "done"]
WIDE = "wide.task.safetensors"
"""All weights that are learned, while narrow forms of them are."""


class RunFolder:
    """The files of one run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.settings = self.path / "run.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.results = self.path / "results.json"
        self.tasks = self.path / "tasks"
        self.is_writable = True
        """False in all processes of a run but the first: what they write is dropped."""

    def claim(self, config: Settings) -> None:
        """Make the folder a run's, or check that it is this run's."""
        if self.settings.exists() and (self.results.exists() or self.checkpoint.exists()):
            different = differences(Settings.load(self.settings).with_paths(), config)
            if different:
                raise RunError(
                    "changed",
                    f"the run in {str(self.path)!a} was begun with other settings: {', '.join(different.values())}; "
                    "resume it with those it was begun with (no settings on the command line, or "
                    "TransferPruning.load), or use another folder",
                )
            return
        if self.path.exists() and (not self.path.is_dir() or _is_foreign(self.path)):
            raise other_contents(self.path, "run")
        with write_errors(self.path):
            self.tasks.mkdir(parents=True, exist_ok=True)
            (self.path / "blocks").mkdir(exist_ok=True)
            self.write(self.settings, config.to_yaml().encode())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out for as long as the run goes."""
        with write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                lock = files.FolderLock(self.path, wait=False)
            except BlockingIOError:
                raise RunError(
                    "busy", f"another process is working in {str(self.path)!a}; wait for it, or use another folder"
                ) from None
        with lock:
            yield

    def write(self, path: Path, data: bytes) -> None:
        """Put a file in place, whole or not at all."""
        if self.is_writable:
            with write_errors(self.path):
                files.write(path, data)

    def write_json(self, path: Path, value: Any) -> None:
        """Write plain data for people and programs."""
        self.write(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())

    def log(self, line: Mapping[str, Any]) -> None:
        """Add a line to the metrics."""
        if self.is_writable:
            with write_errors(self.path), self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")

    def flush_metrics(self) -> int:
        """Bring the metrics to the disk; how many bytes there are."""
        with write_errors(self.path):
            if not self.metrics.exists():
                return 0
            with self.metrics.open("r+b") as file:
                os.fsync(file.fileno())
                return file.seek(0, os.SEEK_END)

    def truncate_metrics(self, size: int) -> None:
        """Drop the lines that were written after the checkpoint; the run will write them again."""
        found = self.metrics.stat().st_size if self.metrics.exists() else 0
        if found < size:
            raise RunError(
                "checkpoint", f"{str(self.metrics)!a} has {found} bytes, and the checkpoint knows of {size}; restore it"
            )
        if found > size and self.is_writable:
            with write_errors(self.path), self.metrics.open("r+b") as file:
                file.truncate(size)


def other_contents(folder: Path, wanted: str) -> RunError:
    """The error where a run or a sweep is to begin among files of others."""
    return RunError("folder", f"{str(folder)!a} holds no {wanted}, and is not empty; expected a new or empty folder")


def _is_foreign(folder: Path) -> bool:
    """Whether a folder holds what no run leaves that was killed at its beginning."""
    ours = {".lock", "tasks", "blocks", WIDE, "run.yaml", "metrics.jsonl", "tracking", "report.html"}
    begun = (".spalier-", "checkpoint-")
    return any(entry.name not in ours and not entry.name.startswith(begun) for entry in folder.iterdir())


@contextlib.contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Raise errors of the file system as a `RunError` that says what to do."""
    try:
        yield
    except TaskFileError as error:
        if error.code != "write":
            raise
        raise RunError("write", f"{error}; make room or set its permissions, and run again to resume") from error
    except OSError as error:
        raise RunError(
            "write",
            f"{str(folder)!a} cannot be written: {files.reason(error)}; what was written before is whole, so make room "
            "or set its permissions, and run again to resume",
        ) from error


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
    """Epochs that are done in the whole run, but for those of narrow forms."""
    form: int = 0
    """Which narrow form of the block is next or learns; 0 while all weights do."""
    refit_steps: int = 0
    """Steps of narrow forms that are done in the whole run: they are no part of the others' randomness."""

    def replace(self, **changes: Any) -> Position:
        """A copy with some of it changed."""
        return dataclasses.replace(self, **changes)


@dataclass
class Checkpoint:
    """All that a run needs to go on from a position. Randomness has no state: it follows from seed and position."""

    position: Position
    task: Task
    tensors: dict[str, Tensor]
    """The optimizer's state, averages and the best values so far, as kind:name."""
    base: str
    """The digest of the base's values."""
    data: str
    """The digest of the data."""
    teacher: str = ""
    """The digest of the teacher's file, where there is one."""
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


_PLAIN = [each.name for each in fields(Checkpoint) if each.name not in ("position", "task", "tensors")]


def save_checkpoint(folder: RunFolder, checkpoint: Checkpoint) -> None:
    """Write a checkpoint: first what was learned, then the file that names it, so that one of both is always whole."""
    at = checkpoint.position
    name = f"checkpoint-{at.block}-{at.form}-{at.phase}-{at.step + at.refit_steps}.task.safetensors"
    state = {key: getattr(checkpoint, key) for key in _PLAIN}
    state |= {"format": FORMAT, "position": asdict(at), "learned": name}
    tensors = {key: value.detach().cpu().contiguous() for key, value in checkpoint.tensors.items()}
    with write_errors(folder.path):
        checkpoint.task.save(folder.path / name)
    folder.write(folder.checkpoint, save(tensors, {"run": json.dumps(state, allow_nan=False)}))
    for old in folder.path.glob("checkpoint-*.task.safetensors"):
        if old.name != name:
            with contextlib.suppress(OSError):  # a leftover does no harm; the next checkpoint tries again
                old.unlink()


def load_checkpoint(folder: RunFolder) -> Checkpoint | None:
    """The last checkpoint of a run, or None where it has not begun."""
    file = folder.checkpoint
    if not file.exists():
        return None
    try:
        with safe_open(file, "pt") as opened:
            state = json.loads(opened.metadata()["run"])
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  # not a dict
        if state["format"] != FORMAT:
            raise ValueError(f"it has format {state['format']!r}, expected {FORMAT}")
        name = state["learned"]
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"it names {name!r}, expected a file beside it")
        return Checkpoint(
            position=Position(**state["position"]),
            task=Task.load(folder.path / name),
            tensors=tensors,
            **{key: state[key] for key in _PLAIN},
        )
    except (SafetensorError, SpalierError, OSError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            "checkpoint",
            f"{str(file)!a} cannot be read ({type(error).__name__}: {error}); restore it from a copy, or begin again "
            "in another folder",
        ) from error
