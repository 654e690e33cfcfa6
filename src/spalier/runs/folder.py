"""A run's folder: settings, metrics, the checkpoint, task files. Nothing in it is a pickle.

run.yaml                   all settings
metrics.jsonl              one line for each epoch and block
checkpoint.safetensors     where the run is, and what it needs to go on
checkpoint-N.task.safetensors    what has been learned by then
blocks/00.json ...         all that is known of each block, with .png, samples to look at, and .scores.json
tasks/                     a store with one task for each density
results.json               the rows, once the run is done
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spalier import files
from spalier.errors import RunError, TaskFileError
from spalier.runs.config import FREE, Settings
from spalier.runs.fields import differences, in_words


class RunFolder:
    """The files of one run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.settings = self.path / "run.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.results = self.path / "results.json"
        self.tasks = self.path / "tasks"

    def open_(self, config: Settings) -> None:
        """Make the folder a run's, or see that it is this run's."""
        if self.settings.exists() and (
            self.results.exists() or (self.path / "checkpoint.safetensors").exists()
        ):
            self._check_same(config)
            return
        if self.path.exists() and (not self.path.is_dir() or _foreign(self.path)):
            raise RunError(
                "folder", f"{str(self.path)!a} holds no run, and is not empty; expected a new or empty folder"
            )
        with writing(self.path):
            self.tasks.mkdir(parents=True, exist_ok=True)
            (self.path / "blocks").mkdir(exist_ok=True)
            self.write(self.settings, config.to_yaml().encode())

    def _check_same(self, config: Settings) -> None:
        begun = Settings.load(self.settings)
        different = differences(begun, config, FREE)
        if different:
            raise RunError(
                "changed",
                f"the run in {str(self.path)!a} was begun with other settings: {in_words(different)}; go on with those "
                "it was begun with (no settings on the command line, or TransferPruning.load), or use another folder",
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out for as long as the run goes."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                lock = files.FolderLock(self.path, wait=False)
            except BlockingIOError:
                raise RunError(
                    "busy",
                    f"another process is working in {str(self.path)!a}; wait for it, or use another folder",
                ) from None
        with lock:
            yield

    def write(self, path: Path, data: bytes) -> None:
        """Put a file in place, whole or not at all."""
        with writing(self.path):
            files.write(path, data)

    def write_json(self, path: Path, value: Any) -> None:
        """Plain data as a file for people and programs."""
        self.write(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())

    def log(self, line: Mapping[str, Any]) -> None:
        """Add a line to the metrics."""
        with writing(self.path), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def logged(self) -> int:
        """How many bytes of metrics there are, all on disk now."""
        with writing(self.path):
            if not self.metrics.exists():
                return 0
            with self.metrics.open("r+b") as file:
                os.fsync(file.fileno())
                return file.seek(0, os.SEEK_END)

    def rewind_(self, size: int) -> None:
        """Take back the lines that were written after the checkpoint; the run will write them again."""
        found = self.metrics.stat().st_size if self.metrics.exists() else 0
        if found < size:
            raise RunError(
                "checkpoint",
                f"{str(self.metrics)!a} has {found} bytes, and the checkpoint knows of {size}; restore it",
            )
        if found > size:
            with writing(self.path), self.metrics.open("r+b") as file:
                file.truncate(size)


def _foreign(folder: Path) -> bool:
    """True where a folder holds what no run that was killed at its beginning leaves."""
    ours = {".lock", "tasks", "blocks", "run.yaml", "metrics.jsonl", "tracking", "report.html"}
    begun = (".spalier-", "checkpoint-")
    return any(entry.name not in ours and not entry.name.startswith(begun) for entry in folder.iterdir())


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Errors of the file system as one that says what is left."""
    try:
        yield
    except TaskFileError as error:
        if error.code != "write":
            raise
        raise RunError(
            "write", f"{error}; make room or set its permissions, and run again to go on"
        ) from error
    except OSError as error:
        raise RunError(
            "write",
            f"{str(folder)!a} cannot be written: {files.reason(error)}; what was written before is whole, so make room "
            "or set its permissions, and run again to go on",
        ) from error
