"""What several of the made networks share: layers that they begin or end with, and how they become entries."""

from __future__ import annotations

from typing import Any

from torch import nn
from zoo.entry import Entry, image, make_entry


def conv(inputs: int, outputs: int, **options: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False, **options), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Head(nn.Sequential):
    """Average over the positions and classify."""

    def __init__(self, inputs: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 5))


def pictures(*kinds: type[nn.Module]) -> list[Entry]:
    """Entries of networks that read small pictures, named after their classes."""
    return [make_entry(f"made/{snake(kind.__name__)}", kind, image(8)) for kind in kinds]


def snake(name: str) -> str:
    """``ConstantView`` becomes ``constant_view``."""
    return "".join(
        f"_{c.lower()}" if c.isupper() and i and not name[i - 1].isupper() else c.lower() for i, c in enumerate(name)
    )
