"""Recipes: what a setting is when nobody says otherwise.

``paper`` is section 4 of *Structured Pruning Adapters*, as its text has it. ``fast`` is for small data and little time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RECIPES: dict[str, dict[str, Any]] = {
    "paper": {
        "epochs": 30,
        "epochs_per_prune": 20,
        "batch_size": 256,
        "optimizer": "sgd",
        "lr": 0.01,
        "scale_lr": True,
        "weight_decay": 5e-4,
        "weight_decay_norms": True,
        "lr_schedule": "step",
        "schedule": "iterative",
        "final_density": 0.05,
        "writers": "free",
        "recovery": "none",
    },
    "fast": {
        "epochs": 8,
        "epochs_per_prune": 4,
        "batch_size": 64,
        "optimizer": "adamw",
        "lr": 1e-2,
        "scale_lr": False,
        "weight_decay": 1e-4,
        "weight_decay_norms": False,
        "lr_schedule": "cosine",
        "densities": (0.7, 0.5, 0.3, 0.2, 0.1),
        "writers": "coupled",
        "recovery": "norms",
    },
}
"""Settings by recipe."""

_LONGER = {"epochs": 100, "epochs_per_prune": 50}  # the paper's, for its smaller sets of larger images


def settings(recipe: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe says for a data set and a method."""
    found = dict(RECIPES[recipe])
    listed = given["densities"] is not None or given["budget"] == "bytes"  # which no schedule knows of
    if listed or (recipe == "fast" and _has_schedule(given)):
        found = {
            name: value
            for name, value in found.items()
            if name not in ("schedule", "final_density", "densities")
        }
    if recipe == "fast" and _has_schedule(given):
        found |= {"schedule": "iterative", "final_density": 0.1}
    if recipe == "paper" and given["data"] == "torchvision:Flowers102":
        found |= _LONGER
    if recipe == "fast" and given["method"] == "fine-pruning":
        found["lr"] = 1e-3  # whole weights move further at the same rate than two thin factors do
    return found


def _has_schedule(given: Mapping[str, Any]) -> bool:
    return given["schedule"] is not None or given["final_density"] is not None
