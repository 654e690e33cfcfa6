"""Let torchvision be imported where its compiled operators cannot be loaded.

torchvision's wheel is built against one build of PyTorch; beside another, its library of operators stays unloaded and
the import fails with ``operator torchvision::nms does not exist``, and so do the imports of timm, peft and others
that look for it. Declaring the two operators' signatures is enough for everything that never calls them.
"""

from __future__ import annotations

import torch

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_LIBRARIES: list[torch.library.Library] = []  # a declaration lives as long as its library


def declare() -> None:
    """Declare ``nms`` and ``qnms`` once."""
    if _LIBRARIES:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    _LIBRARIES.append(library)
    for name in ("nms", "qnms"):
        library.define(name + _SIGNATURE)
