"""The tensors of a network by name, and the names that they share."""

from __future__ import annotations

from torch import Tensor, nn

from spalier.adapters.layers import Added


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under all its names, Spalier's own left out."""
    found: dict[str, Tensor] = {}
    for path, module in net.named_modules(remove_duplicate=False):
        if not isinstance(module, Added):
            prefix = f"{path}." if path else ""
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    found[prefix + key] = tensor
    return found


def first_names(tensors: dict[str, Tensor]) -> dict[str, str]:
    """For each name of a tensor, the first name that it goes by."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
