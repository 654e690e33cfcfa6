"""Fold batch norms into the layers before them: the same function with fewer operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from spalier.errors import TaskFileError
from spalier.pruning.folding import fold_into_

_LAYERS = {
    nn.Linear: 0,
    nn.Conv1d: 0,
    nn.Conv2d: 0,
    nn.Conv3d: 0,
    nn.ConvTranspose1d: 1,
    nn.ConvTranspose2d: 1,
    nn.ConvTranspose3d: 1,
}
"""The axis of each kind's weight that is its output."""
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@torch.no_grad()
def fold_(net: nn.Module, modules: dict[str, nn.Module], pairs: Sequence[tuple[str, str]]) -> None:
    """Fold every batch norm of a network that is in eval mode for good; refuse if one cannot be folded exactly."""
    folded = {modules[norm]: modules[layer] for layer, norm in pairs}
    times = Counter(id(t) for m in net.modules() for t in m._parameters.values() if t is not None)
    for path, module in modules.items():
        if isinstance(module, _BatchNorm) or module in folded:
            reason = _obstacle(module, folded.get(module), times)
            if reason:
                raise TaskFileError(
                    "fold", f"{path} cannot be folded exactly: {reason}; build without fold=True"
                )
    for norm, layer in folded.items():
        fold_into_(layer, norm, _LAYERS[type(layer)])
        _become_identity_(norm)


def _obstacle(norm: Any, layer: Any, times: Counter[int]) -> str:
    """Why a norm cannot be folded; empty if it can."""
    if layer is None:
        return "it is not known that it alone takes the output of one layer (was the network traced with an example?)"
    if type(norm) not in _NORMS or type(layer) not in _LAYERS:
        return f"a {type(norm).__name__} behind a {type(layer).__name__} may do more than the two"
    if norm.running_mean is None or norm.running_var is None:
        return "it has no running statistics"
    if (
        "forward" in layer.__dict__
        or "forward" in norm.__dict__
        or layer._forward_hooks
        or layer._forward_pre_hooks
    ):
        return "calls of its layer are diverted"
    if times[id(layer.weight)] > 1:
        return "its layer shares the weight with another"
    if _LAYERS[type(layer)] and layer.groups > 1:
        return "its layer is a transposed convolution with groups"
    held = (norm.running_mean, norm.running_var, norm.weight, norm.bias, layer.bias)
    if {t.numel() for t in held if t is not None} != {layer.weight.shape[_LAYERS[type(layer)]]}:
        return "it is not for the channels of its layer"
    return ""


def _become_identity_(norm: nn.Module) -> None:
    """Let a norm pass on what it gets, wherever else the network holds it; its hooks and a gather behind it stay."""
    hooks = {
        key: value for key, value in norm.__dict__.items() if key.endswith("_hooks") or key == "_modules"
    }
    norm.__class__ = nn.Identity
    norm.__dict__ = {**nn.Identity().__dict__, **hooks, "training": False}
