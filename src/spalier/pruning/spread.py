"""A gather that spreads a writer's channels over the stream that it writes into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spalier.adapters.changes import Changes
from spalier.adapters.layers import Added

if TYPE_CHECKING:  # a network that is built from a task file needs nothing that finds structure
    from spalier.structure.structure import Mask

NAME = "spread"


class Spread(Added):
    """Puts each channel where the stream has it, and zeros where this writer has none.

    >>> spread = Spread(np.array([True, False, True]), axis=1)
    >>> spread(torch.tensor([[5.0, 7.0]]))
    tensor([[5., 0., 7.]])
    """

    index: Tensor

    def __init__(self, own: Mask, axis: int) -> None:
        super().__init__()
        self.axis = axis
        place = np.where(own, np.cumsum(own) - 1, own.sum())  # the last channel is the zero that is padded
        self.register_buffer("index", torch.from_numpy(place))

    def forward(self, x: Tensor) -> Tensor:
        """The writer's channels at their places in the stream."""
        axis = self.axis % x.dim()
        padded = F.pad(x, [0, 0] * (x.dim() - 1 - axis) + [0, 1])
        return padded.index_select(axis, self.index)

    def extra_repr(self) -> str:
        """What ``print`` shows of it."""
        return f"{len(self.index)} channels on axis {self.axis}"


def spread_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """The hook on a module whose output is spread."""
    spread = module._modules[NAME]
    assert spread is not None
    made: Tensor = spread(output)
    return made


def set_spread_(changes: Changes, module: nn.Module, own: Mask | None, axis: int) -> None:
    """Let a module's output be spread, ``own`` saying which channels of the stream it has; or, if None, no longer."""
    hook = next((k for k, h in module._forward_hooks.items() if h is spread_output), None)
    if own is None:
        if hook is not None:
            changes.drop_(module, "_forward_hooks", hook)
            changes.drop_(module, "_modules", NAME)
        return
    device = next((t.device for t in (*module.parameters(), *module.buffers())), None)
    made = Spread(own, axis).to(device)
    if hook is not None:
        changes.set_(module.get_submodule(NAME), "_buffers", "index", made.index)
    else:
        changes.set_(module, "_modules", NAME, made)
        handle = module.register_forward_hook(spread_output)
        changes.note(module, "_forward_hooks", handle.id)
