"""Spalier: one frozen network, many tasks, each a tiny file of kept channels and low-rank corrections."""

from spalier import errors, models
from spalier.adapters import FineTune, LoRA, SPLoRA, SPPaRA, attach_, detach_, fuse
from spalier.counting import count

__version__ = "0.1.0"

__all__ = ["FineTune", "LoRA", "SPLoRA", "SPPaRA", "attach_", "count", "detach_", "errors", "fuse", "models"]
