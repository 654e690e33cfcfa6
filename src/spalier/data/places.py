"""Where named data sets lie, and what to say when they do not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from spalier.data.archives import zip_files
from spalier.data.samples import File
from spalier.data.text import shown, some
from spalier.errors import DataError

VARIABLE = "SPALIER_DATA"


def data_folder(folder: str | os.PathLike[str] | None) -> Path:
    """The folder given, else the one that SPALIER_DATA names, else ``data``."""
    return Path(folder or os.environ.get(VARIABLE) or "data").expanduser()


def roots(folder: Path, names: Sequence[str]) -> list[Path]:
    """Where a set may lie: in a folder of its name, or in the given one itself."""
    return [root for root in (*(folder / name for name in names), folder) if root.is_dir()]


def missing(name: str, folder: Path, looked_for: Sequence[str], origin: str) -> DataError:
    """What was looked for, where to get it, and where to put it."""
    return DataError(
        f"{name} is not in {shown(folder.absolute())}; get it from {origin}, and put it into "
        f"{shown((folder / name).absolute())}, or pass folder=, or set {VARIABLE}; looked for {', '.join(looked_for)} "
        "there and in its parent"
    )


def zip_with(root: Path, prefix: str) -> tuple[Path, list[File]] | None:
    """The one zip archive of a folder that has members below a prefix."""
    fitting = []
    for path in sorted(root.glob("*.zip")):
        files = zip_files(path)
        if any(file.name.startswith(prefix) for file in files):
            fitting.append((path, files))
    if len(fitting) > 1:
        raise DataError(
            f"{shown(root)} has several archives with {prefix}: {some([p.name for p, _ in fitting])}; leave one"
        )
    return fitting[0] if fitting else None
