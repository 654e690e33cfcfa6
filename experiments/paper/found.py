"""What came out: the cells' results, found by what tells them apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spalier.text import Mean, mean

_PLAIN: dict[str, Any] = {"variant": "", "kernel": "center", "init_range": 1e-4, "network": ""}


_RENAMED = {
    "adapter": "adapter_options",
    "batch": "batch_size",
    "decay": "weight_decay",
    "epochs_each": "epochs_per_prune",
    "epochs_last": "final_epochs",
    "limit": "max_train_samples",
    "rate": "lr",
    "rates": "lr_schedule",
    "scale_rate": "scale_lr",
    "select": "select_options",
    "size": "image_size",
    "validation": "validation_split",
}


def settings_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record's settings by their current names; the committed ones were written under earlier names."""
    found = {_RENAMED.get(name, name): value for name, value in record["settings"].items()}
    if found["network"] == "networks:resnet20":
        found["network"] = "experiments.paper.networks:resnet20"
    return found


class Found:
    """The results of all cells in a folder."""

    def __init__(self, cells: Sequence[dict[str, Any]]) -> None:
        self.cells = sorted(cells, key=lambda cell: str(cell["cell"]))

    @classmethod
    def load(cls, folder: Path) -> Found:
        """Those of a folder; files that are no cells' are left aside."""
        read = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        return cls([each for each in read if "cell" in each])

    def pick(self, **labels: Any) -> Iterator[dict[str, Any]]:
        """Cells with these labels; what is not named is as in the table."""
        wanted = {**_PLAIN, **labels}
        for cell in self.cells:
            told = {**_PLAIN, **cell["labels"]}
            if all(told[name] == value for name, value in wanted.items()):
                yield cell

    def alike(self, **labels: Sequence[Any]) -> Found:
        """Only the seeds that every cell with one of these labels has, so that variants are compared seed by seed."""
        seeds: dict[str, set[int]] = {}
        for cell in self.cells:
            told = {**_PLAIN, **cell["labels"]}
            if all(told[name] in values for name, values in labels.items()):
                kind = json.dumps({name: value for name, value in told.items() if name != "seed"}, sort_keys=True)
                seeds.setdefault(kind, set()).add(told["seed"])
        common = set.intersection(*seeds.values()) if seeds else set()
        return Found([cell for cell in self.cells if cell["labels"]["seed"] in common])

    def rows(self, target: float, **labels: Any) -> list[dict[str, Any]]:
        """Their rows at a density, one for each seed."""
        return [row for cell in self.pick(**labels) for row in cell["rows"] if row["target"] == target]

    def mean(self, target: float, number: str = "test", *, scale: float = 100, **labels: Any) -> Mean | None:
        """A number at a density, over seeds; accuracies in per cent. None where there is no such cell."""
        values = [scale * row[number] for row in self.rows(target, **labels) if row.get(number) is not None]
        return mean(values)
