"""A short name for a network's architecture: its modules, their settings, the shapes of its tensors, the example."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from spalier.adapters.layers import Added

VERSION = 1
"""Rises whenever the same network would be given another structure."""


def fingerprint(net: nn.Module, example: Any, freeze: Any = None) -> str:
    """Equal for networks of the same architecture, whatever their weights and adapters.

    >>> a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    >>> x = torch.zeros(1, 4)
    >>> fingerprint(a, x) == fingerprint(b, x) != fingerprint(nn.Linear(4, 5), x)
    True
    """
    if callable(freeze):  # two predicates may have the same code and mean different modules
        freeze = [path for path, module in net.named_modules() if freeze(path, module)]
    digest = hashlib.sha256(f"{VERSION} {torch.__version__} {freeze!r}".encode())
    seen: set[type] = set()
    for path, module in net.named_modules():
        if isinstance(module, Added):
            continue
        kind = type(module)
        digest.update(f"{path}|{kind.__module__}.{kind.__qualname__}|{module.extra_repr()}".encode())
        if kind not in seen:
            seen.add(kind)
            digest.update(_code(kind))
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            digest.update(f"{key}{None if tensor is None else tuple(tensor.shape)}".encode())
    leaves, spec = tree_flatten(example)
    digest.update(str(spec).encode())
    for leaf in leaves:
        digest.update(
            f"{tuple(leaf.shape)}{leaf.dtype}".encode() if isinstance(leaf, Tensor) else repr(leaf).encode()
        )
    return digest.hexdigest()


def _code(kind: type) -> bytes:
    """What a class's forward says; a change of it is a change of the network."""
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    if code is None:
        return b""
    constants = [c for c in code.co_consts if isinstance(c, int | float | str | tuple | None)]
    return bytes(code.co_code) + repr((code.co_names, constants)).encode()
