"""`trace`: find what can be pruned in a network, and say what cannot, and why."""

from __future__ import annotations

from typing import Any

from torch import nn

from spalier.pruning.probe import unfollowed
from spalier.structure.find import Freeze, find, without
from spalier.structure.structure import Structure


def trace(net: nn.Module, example: Any, *, freeze: Freeze = None) -> Structure:
    """Find the streams of ``net``: channels that must go together, who writes and reads them, and what has to stay.

    The network is captured with `torch.export` in eval mode, frozen or not, adapted or not, and left as it was. Then a
    twin without values shows whether its own code runs with fewer channels. What is not understood, or does not follow,
    is frozen, with the operation and the line as the reason.

    Args:
        net: any network that `torch.export` can capture, on the CPU or on the meta device.
        example: an input for it: a tensor, a tuple of arguments, or a dict of keyword arguments.
        freeze: what else has to stay whole: names or patterns of modules, or a predicate of name and module.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
    >>> print(trace(net, torch.randn(1, 3, 3, 3)))
    """
    structure = find(net, example, freeze)
    refused = unfollowed(net, structure)
    return without(net, structure, refused) if refused else structure
