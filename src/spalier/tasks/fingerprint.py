"""What a task was learned on: a digest of the base's architecture, and one of the values that the task takes from it.

Norms and heads that a task has of its own do not count, so networks for 10 and for 1,000 classes are the same base.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from spalier.adapters.geometry import Described


@dataclass(frozen=True)
class Fingerprint:
    """Of a base, as one task sees it."""

    architecture: str
    values: str


def architecture(modules: Iterable[Described], ties: Mapping[str, str], heads: Collection[str]) -> str:
    """Modules in their order, with class and settings, and the names of all tensors with those that are tied."""
    digest = hashlib.sha256()
    for module in modules:
        settings = "" if module.path in heads else module.settings
        digest.update(f"{module.path}\t{module.kind}\t{settings}\n".encode())
    for name, first in ties.items():
        if name.rpartition(".")[0] not in heads:
            digest.update(f"{name}\t{first}\n".encode())
    return digest.hexdigest()


def values(tensors: Mapping[str, Tensor]) -> str:
    """The tensors that a task takes from its base, by their first names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        kind = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name}\t{kind}\t{list(tensor.shape)}\t{known(tensor).digest}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Known:
    """What was found out about a tensor's values."""

    digest: str
    largest: float
    """The largest absolute value."""
    version: tuple[int, int]


_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()


def known(tensor: Tensor) -> Known:
    """The digest of a tensor's values, remembered until PyTorch counts a write to it."""
    now = version(tensor)
    found: Known | None = _KNOWN.get(tensor)
    if now is not None and found is not None and found.version == now:
        return found
    made = Known(_digest(tensor), largest(tensor), now or (0, 0))
    if now is not None:
        _KNOWN[tensor] = made
    return made


def forget() -> None:
    """Look at all values again: whoever writes through ``.data`` or numpy goes past PyTorch's count of writes."""
    _KNOWN.clear()


def version(tensor: Tensor) -> tuple[int, int] | None:
    """What changes with every write to a tensor that PyTorch counts; None where it counts none."""
    return None if tensor.is_inference() else (tensor._version, tensor.data_ptr())


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data if flat.numel() else b"").hexdigest()


def largest(tensor: Tensor) -> float:
    """The largest absolute value; no finite number where one is not."""
    if not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    low, high = (float(end) for end in torch.aminmax(tensor.detach()))
    return math.nan if math.isnan(low + high) else max(abs(low), abs(high))


def is_adapted_or_pruned(net: nn.Module) -> bool:
    """True for a network that is no base as it stands."""
    return "_spalier" in net.__dict__ or "_spalier_kept" in net.__dict__
