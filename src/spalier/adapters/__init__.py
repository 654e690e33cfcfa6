"""Fusible adapters on frozen weights (Eq. 1-4 of the paper): attach them, train, fuse them away."""

from spalier.adapters.attach import attach_, detach_, fuse
from spalier.adapters.attachment import Summary
from spalier.adapters.kinds import ADAPTERS, Adapter, ByLayer, FineTune, LoRA, SPDelta, SPLoRA, SPPaRA

__all__ = ["ADAPTERS", "Adapter", "ByLayer", "FineTune", "LoRA", "SPDelta", "SPLoRA", "SPPaRA", "Summary"]
__all__ += ["attach_", "detach_", "fuse"]
