"""What came out of a run: one row for each density."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spalier.errors import RunError
from spalier.tasks.store import Store
from spalier.text import table

Row = dict[str, Any]

COLUMNS = {
    "task": "task",
    "channels": "channels",
    "weights": "weights",
    "macs": "MACs",
    "learned": "learned",
    "bytes": "bytes",
    "validation": "validation",
    "test": "test",
    "latency_ms": "ms",
    "seconds": "seconds",
}
"""The columns that are printed, with their titles. Times are measured, and differ from run to run."""


@dataclass(frozen=True)
class Results:
    """The rows of a run. Print them."""

    folder: Path
    rows: Sequence[Row]
    skipped: Sequence[str] = field(default=())
    """Files that were left out because they are bad, where that was asked for."""
    base: str = ""
    """Digests of the base's values and of the data."""
    data: str = ""

    def __str__(self) -> str:
        shown = [[_cell(name, row.get(name)) for name in COLUMNS] for row in self.rows]
        return table(list(COLUMNS.values()), shown)

    @property
    def tasks(self) -> Store:
        """The task files, as a store that a `Switcher` can use."""
        return Store(self.folder / "tasks")

    def to_csv(self) -> str:
        """The rows with all their columns, for a spreadsheet."""
        return rows_to_csv(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "format": 1,
            "rows": list(self.rows),
            "skipped": list(self.skipped),
            "base": self.base,
            "data": self.data,
        }

    @staticmethod
    def load(folder: Path) -> Results:
        """The results of a run that is done."""
        file = folder / "results.json"
        try:
            found = json.loads(file.read_text("utf-8"))
            return Results(folder, list(found["rows"]), list(found["skipped"]), found["base"], found["data"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                "folder",
                f"{str(file)!a} cannot be read ({type(error).__name__}); expected the results of a run",
            ) from error


def rows_to_csv(rows: Sequence[Row]) -> str:
    """Rows of plain values as text, with a column for every name that occurs."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in ("channels", "weights", "macs", "validation", "test"):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.2f}" if name == "latency_ms" else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
