"""A log of what was changed on modules, so that it can be taken back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_ABSENT = "(absent)"


@dataclass
class Changes:
    """Entries of modules and values of tensors as they were, oldest first."""

    entries: list[tuple[nn.Module, str, Any, Any]] = field(default_factory=list)
    """Module, the dictionary of it that was changed (empty for plain attributes), the key, and what was there."""
    values: list[tuple[Tensor, Tensor, Tensor | None]] = field(default_factory=list)
    """Tensors that were given other values, the values they had, and their gradients."""

    def set_(self, module: nn.Module, place: str, key: Any, value: Any) -> None:
        """Change an entry of a module's dictionary, or an attribute where ``place`` is empty."""
        where = getattr(module, place) if place else module.__dict__
        self.entries.append((module, place, key, where.get(key, _ABSENT)))
        where[key] = value

    def drop_(self, module: nn.Module, place: str, key: Any) -> None:
        """Take an entry out of a module's dictionary."""
        self.entries.append((module, place, key, getattr(module, place).pop(key)))

    def note(self, module: nn.Module, place: str, key: Any) -> None:
        """Remember an entry that was added."""
        self.entries.append((module, place, key, _ABSENT))

    def set_values_(self, tensor: Tensor, values: Tensor) -> None:
        """Let a tensor hold other values, of another shape perhaps, and no gradient; whoever holds it sees them."""
        self.values.append((tensor, tensor.data, tensor.grad))
        _put(tensor, values, None)

    def undo_(self) -> None:
        """Put everything back as it was."""
        for tensor, values, grad in reversed(self.values):
            _put(tensor, values, grad)
        for module, place, key, value in reversed(self.entries):
            where = getattr(module, place) if place else module.__dict__
            if isinstance(value, str) and value == _ABSENT:  # a copied log holds a copy of the word
                where.pop(key, None)
            else:
                where[key] = moved(value, where.get(key))
        self.values.clear()
        self.entries.clear()

    def keep_(self, later: Changes) -> None:
        """Take up later entries as far as needed to undo everything: of each place, what was there first."""
        known = {(id(module), place, key) for module, place, key, _ in self.entries}
        for module, place, key, value in later.entries:
            if (id(module), place, key) not in known:
                known.add((id(module), place, key))
                self.entries.append((module, place, key, value))

    def tensors(self) -> list[Tensor]:
        """The tensors that gave way to others."""
        return [value for *_, value in self.entries if isinstance(value, Tensor)]


def moved(before: Any, now: Any) -> Any:
    """What was there, or, where a network has been moved or cast since, that moved alike."""
    if not isinstance(before, Tensor) or not isinstance(now, Tensor) or before.is_meta:
        return before
    if (before.dtype, before.device) == (now.dtype, now.device):
        return before
    other = before.detach().to(now.device, now.dtype)
    return nn.Parameter(other, before.requires_grad) if isinstance(before, nn.Parameter) else other


def _put(tensor: Tensor, values: Tensor, grad: Tensor | None) -> None:
    """Other values in the same tensor object.

    A loss that is still around keeps the node that accumulates gradients, with the old shape; PyTorch makes another
    one only where the dtype changes, so it changes there and back.
    """
    tensor.grad = None
    if type(values) is Tensor and not values.is_meta:
        other = torch.float16 if values.dtype != torch.float16 else torch.float32
        tensor.data = torch.empty(0, dtype=other, device=values.device)
    tensor.data = values
    tensor.grad = grad
