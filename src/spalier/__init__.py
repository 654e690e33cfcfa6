"""Spalier: one frozen network, many tasks, each a tiny file of kept channels and low-rank corrections."""

from spalier import errors, models
from spalier.adapters import FineTune, LoRA, SPLoRA, SPPaRA, attach_, detach_, fuse
from spalier.counting import count
from spalier.pruning import Plan, kept_units, prune_, resizes
from spalier.structure import Structure
from spalier.tracing import trace

__version__ = "0.1.0"

__all__ = [
    "FineTune",
    "LoRA",
    "Plan",
    "SPLoRA",
    "SPPaRA",
    "Structure",
    "attach_",
    "count",
    "detach_",
    "errors",
    "fuse",
    "kept_units",
    "models",
    "prune_",
    "resizes",
    "trace",
]
