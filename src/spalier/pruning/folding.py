"""Fold a batch norm into the layer before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def fold_into_(layer: Any, norm: Any, axis: int) -> None:
    """Let a layer do what it does together with the norm behind it."""
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean * scale if layer.bias is None else (layer.bias - norm.running_mean) * scale
    if norm.bias is not None:
        shift = shift + norm.bias
    shape = [-1 if a == axis else 1 for a in range(layer.weight.dim())]
    layer.weight = nn.Parameter(layer.weight * scale.view(shape), requires_grad=False)
    layer.bias = nn.Parameter(shift, requires_grad=False)
