"""What nobody gives: the two recipes, and what follows from the data and the network once these are open.

Few samples get smaller batches and more epochs, so that there are enough steps; small networks learn faster than large
ones. docs/runs.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spalier.networks import OWN_WEIGHTS
from spalier.runs.narrow import default_codes

BY_RECIPES: dict[str, tuple[Any, Any, Any]] = {
    "method": ("splora", "spdelta", "splora"),
    "rank": (8, 8, 8),
    "epochs": (30, 8, 4),
    "epochs_per_prune": (20, 4, 2),
    "batch_size": (256, 64, 32),
    "optimizer": ("sgd", "adamw", "adamw"),
    "learn": ("direct", "direct", "direct"),
    "lr": (0.01, 0.01, 0.01),
    "refit_epochs": (2, 2, 1),
    "storage": ("exact", "exact", "exact"),
    "scale_lr": (True, False, False),
    "weight_decay": (5e-4, 1e-4, 0.01),
    "weight_decay_norms": (True, False, False),
    "lr_schedule": ("step", "cosine", "cosine"),
    "warmup_epochs": (0.0, 0.0, 0.2),
    "grad_clip": (None, None, 1.0),
    "schedule": ("iterative", None, None),
    "final_density": (0.05, None, None),
    "densities": (None, (0.7, 0.5, 0.3, 0.2, 0.1), (0.7, 0.5, 0.3)),
    "budget": ("channels", "channels", "macs"),
    "writers": ("free", "coupled", "coupled"),
    "recovery": ("none", "norms", "none"),
}
RECIPES = {
    recipe: {name: values[column] for name, values in BY_RECIPES.items() if values[column] is not None}
    for column, recipe in enumerate(("paper", "fast", "fast on texts"))
}
_ON_TEXTS = RECIPES.pop("fast on texts")
"""``paper`` is section 4 of *Structured Pruning Adapters*, as its text has it. ``fast`` is for small data; where these
are texts, it is what is usual for BERTs."""
RATES = {"splora": 3e-3, "spdelta": 5e-4, "sppara": 1e-3, "lora": 3e-3, "fine-pruning": 5e-4}
"""The learning rate of each method, by AdamW, on large networks; small networks get more."""
TEXT_RATES = {"splora": 7e-4, "spdelta": 1e-4, "sppara": 5e-4, "lora": 7e-4, "fine-pruning": 1e-4}
"""The same for language models; small ones get more."""
TEXT = "text:"
"""How data begin that are texts, whose defaults are others."""
BY_DATA = frozenset(
    {"epochs", "epochs_per_prune", "final_epochs", "refit_epochs", "batch_size", "lr", "refit_lr", "network_options"}
)
"""Settings that may be filled in anew when data and network are known."""

STEPS = {"epochs": 300, "epochs_per_prune": 150, "final_epochs": 150, "refit_epochs": 60}
"""How many steps a block has at least, unless that took more than so many epochs:"""
_MOST_EPOCHS = 50
_STEPS_OF_AN_EPOCH = 16
_LARGE = (10e6, 0.35)
"""Parameters of a network that learns at the rates above, and the power by which smaller ones learn faster."""
_LARGE_OF_TEXTS = (110e6, 0.7)
"""The same for language models: MiniLM learns best at three times the rates of a BERT-base (docs/text.md)."""
_SMALL_IMAGES = ("digits", "CIFAR10", "CIFAR100", "FashionMNIST", "KMNIST", "MNIST", "SVHN", "USPS")
_SMALL_NETWORKS = {"resnet8": 32, "resnet20": 32}
"""Networks for small images, and the size of images that have no small size of their own."""
_TWO_STEMS = ("resnet18", "resnet34", "resnet50")


def filled_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from the recipe and other settings, for those that were not given."""
    recipe, found, rates = given["recipe"], dict(_usual(given)), _rates(given)
    has_schedule = given["schedule"] is not None or given["final_density"] is not None
    if given["densities"] is not None or given["budget"] == "bytes":  # bytes have to be listed
        for name in ("schedule", "final_density", "densities"):
            found.pop(name, None)
    elif recipe == "fast" and has_schedule:
        del found["densities"]
        found |= {"schedule": "iterative", "final_density": 0.1}
    if recipe == "paper" and given["data"] == "torchvision:Flowers102":
        found |= {"epochs": 100, "epochs_per_prune": 50}  # a smaller set, of larger images
    if given["method"] is None and _asks_for_low_rank(given):
        found["method"] = "splora"
    given = {**given, "method": given["method"] or found["method"], "rank": given["rank"] or found["rank"]}
    if given["codes"] is not None or given["method"] == "spdelta":
        found["learn"] = "wide"  # few bits are hard to learn and easy to store
    learn = given["learn"] or found["learn"]
    if recipe == "fast":
        found["lr"] = rates["fine-pruning" if learn == "wide" else given["method"]]
    found["refit_lr"] = _refit_lr(given, found, rates["fine-pruning"])
    if learn == "wide":
        found["storage"] = "int8-all"  # few bits for a weight, and many for a norm, would be badly shared out
        found["codes"] = default_codes(given) if given["codes"] is None else given["codes"]
    per_prune = given["epochs_per_prune"]
    found["final_epochs"] = found["epochs_per_prune"] if per_prune is None else per_prune
    found["name"] = _name_of(given["data"])
    found |= _of_network(given)
    return found


def is_text(settings: Mapping[str, Any]) -> bool:
    """Whether data are texts: by their name, or by a setting that only texts have."""
    own = (settings["text_column"], settings["tokenizer"], settings["max_length"])
    return settings["data"].removeprefix("given:").startswith(TEXT) or any(each is not None for each in own)


def _usual(given: Mapping[str, Any]) -> dict[str, Any]:
    return _ON_TEXTS if given["recipe"] == "fast" and is_text(given) else RECIPES[given["recipe"]]


def _rates(given: Mapping[str, Any]) -> dict[str, float]:
    return TEXT_RATES if is_text(given) else RATES


def _refit_lr(given: Mapping[str, Any], found: Mapping[str, Any], usual: float) -> float:
    """Half of the rate that AdamW has: a narrow form begins near a good place."""
    is_adamw = (given["optimizer"] or found.get("optimizer", "adamw")) == "adamw"
    return (given["lr"] if is_adamw and given["lr"] is not None else usual) / 2


def _asks_for_low_rank(given: Mapping[str, Any]) -> bool:
    """Whether something was given that only learning the narrow form itself can have, or that names a rank."""
    direct = given["keep_optimizer"] or given["teacher"] == "self" or given["learn"] == "direct"
    return bool(direct or given["rank"] is not None or given["adapter_options"] or given["budget"] == "bytes")


def _of_network(given: Mapping[str, Any]) -> dict[str, Any]:
    """The weights that a network comes with, and the size of its images."""
    network, options, data = given["network"], given["network_options"], given["data"]
    found: dict[str, Any] = {}
    is_ours = network in OWN_WEIGHTS and given["weights"] is None and "width" not in options
    found["pretrained"] = is_ours and given["recipe"] == "fast"
    has_size = data.removeprefix("torchvision:") in _SMALL_IMAGES or data.startswith("given:")
    if network in _SMALL_NETWORKS and not has_size:
        found["image_size"] = _SMALL_NETWORKS[network]
    size = given["image_size"]
    is_small = size <= 64 if size is not None else data.removeprefix("torchvision:") in _SMALL_IMAGES
    if is_small:
        found |= _small_stem(given)
    return found


def _small_stem(given: Mapping[str, Any]) -> dict[str, Any]:
    if given["network"] not in _TWO_STEMS or "stem" in given["network_options"]:
        return {}
    return {"network_options": {**given["network_options"], "stem": "cifar"}}


def fitted(given: Mapping[str, Any], samples: int, side: int, parameters: int | None) -> dict[str, Any]:
    """What the fast recipe comes to with so many training samples, images of this side, and a network of this size."""
    found: dict[str, Any] = _small_stem(given) if side <= 64 else {}
    if given["recipe"] != "fast":
        return found
    fast, rates = _usual(given), _rates(given)
    # a power of two: few samples would be one step an epoch
    few = 2 ** int(math.log2(max(samples / _STEPS_OF_AN_EPOCH, 8)))
    found["batch_size"] = min(fast["batch_size"], few)
    steps = max(1, samples // (given["batch_size"] or found["batch_size"]))
    for name, least in STEPS.items():
        usual = fast["epochs_per_prune" if name == "final_epochs" else name]
        found[name] = max(usual, min(_MOST_EPOCHS, math.ceil(least / steps)))
    if given["epochs_per_prune"] is not None:
        found["final_epochs"] = given["epochs_per_prune"]
    if parameters is not None:
        large, power = _LARGE_OF_TEXTS if is_text(given) else _LARGE
        faster = min(4.0, max(1.0, (large / max(parameters, 1)) ** power))
        learn = "fine-pruning" if given["learn"] == "wide" else given["method"]
        found["lr"] = float(f"{faster * rates[learn]:.2g}")
        found["refit_lr"] = float(f"{_refit_lr(given, {}, faster * rates['fine-pruning']):.2g}")
    return found


def _name_of(data: str) -> str:
    """A task's name from the data's: letters, digits and dashes."""
    named = data.removeprefix("given:")
    path = Path(named.partition(":")[2] or named)
    last = path.stem if data.startswith(TEXT) else path.name
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in last).strip("-_")
    return kept[:60] or "task"
