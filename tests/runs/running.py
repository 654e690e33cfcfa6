"""Runs that take a second or two: a small network on some of the digits."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from trained import Block

from spalier.runs import TransferPruning

NETWORK = "running:small"
QUICK = {
    "network": NETWORK,
    "method": "splora",
    "max_train_samples": 200,
    "epochs": 2,
    "epochs_per_prune": 1,
    "densities": (0.6, 0.3),
    "batch_size": 32,
    "score_samples": 64,
    "recovery_samples": 64,
    "trackers": (),
    "deterministic": True,
}
TIMES = ("seconds", "latency_ms")


class Small(nn.Module):
    """A residual network for images of three channels."""

    def __init__(self, classes: int = 10, width: int = 8, dropout: float = 0.0, noise: float = 0.0) -> None:
        super().__init__()
        self.noise = noise
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layers = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2))
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x):
        x = self.layers(F.relu(self.bn1(self.conv1(x))))
        x = self.dropout(x.mean((2, 3)))
        return self.fc(x + self.noise * torch.randn(x.shape[0], 1) if self.noise else x)


def small(classes: int = 10, width: int = 8, dropout: float = 0.0, noise: float = 0.0) -> nn.Module:
    """``noise`` is drawn in eval mode too."""
    return Small(classes, width, dropout, noise)


def quick(**changes) -> TransferPruning:
    return TransferPruning(**{**QUICK, **changes})


def outcome(folder: Path) -> dict:
    """All that a run leaves, but for how long it took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    files = sorted((folder / "blocks").iterdir())
    blocks = [json.loads(path.read_text()) for path in files if path.stem.isdigit() and path.suffix == ".json"]
    others = {path.name: path.read_bytes() for path in files if path.suffix == ".png" or ".scores" in path.name}
    return {
        "tasks": {path.name: path.read_bytes() for path in sorted((folder / "tasks").glob("*.safetensors"))},
        "metrics": [_timeless(line) for line in lines],
        "blocks": [{**block, "row": _timeless(block["row"]), "machine": None} for block in blocks],
        "looks": others,
        "rows": [_timeless(row) for row in json.loads((folder / "results.json").read_text())["rows"]],
    }


def _timeless(row: dict) -> dict:
    return {name: value for name, value in row.items() if name not in TIMES}
