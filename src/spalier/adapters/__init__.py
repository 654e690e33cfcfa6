"""Fusible adapters on frozen weights (Eq. 1-4 of the paper): attach them, train, fuse them away."""

from spalier.adapters.attach import attach_, detach_
from spalier.adapters.config import Adapter
from spalier.adapters.finetune import FineTune
from spalier.adapters.fuse import fuse
from spalier.adapters.splora import LoRA, SPLoRA
from spalier.adapters.sppara import SPPaRA
from spalier.adapters.summary import Summary

__all__ = ["Adapter", "FineTune", "LoRA", "SPLoRA", "SPPaRA", "Summary", "attach_", "detach_", "fuse"]
