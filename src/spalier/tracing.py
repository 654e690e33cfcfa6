"""`trace`: find what can be pruned in a network, and say what cannot, and why.

The graph says which channels are coupled (`structure`); a dry run with fewer of them says whether the network's own
code follows (`pruning.dry_run`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from torch import nn

from spalier.errors import TraceError
from spalier.pruning.dry_run import unfollowed
from spalier.pruning.plan import MARK
from spalier.structure.structure import Cache, Freeze, Structure, find, fingerprint, without


def trace(
    net: nn.Module, example: Any, *, freeze: Freeze = None, cache: str | os.PathLike[str] | None = None
) -> Structure:
    """Find the streams of ``net``: coupled channels, who writes and reads them, and what has to stay.

    The network is captured with `torch.export` in eval mode, frozen or not, adapted or not, and left as it was. Then a
    twin without values shows whether its own code runs with fewer channels. What is not understood, or does not follow,
    is frozen, with the operation and the line as the reason.

    Args:
        net: any network that `torch.export` can capture, on the CPU or on the meta device.
        example: an input for it: a tensor, a tuple of arguments, or a dict of keyword arguments.
        freeze: what else has to stay whole: names or patterns of modules, or a predicate of name and module.
        cache: a folder of structures by the networks' fingerprints. One that is found there is loaded in
            milliseconds; the graph is captured only once `prune_` wants to compare.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> print(trace(net, torch.randn(1, 4)))  # doctest: +ELLIPSIS
    stream  units  writers  readers  riders
         0      8        0        2       1
    <BLANKLINE>
         frozen  indices  why
    0.weight[1]   4 of 4  linear at linear.py:...: the other side carries no channels
    2.weight[0]   2 of 2  an output of the network
      2.bias[0]   2 of 2  an output of the network
    8 units in 1 streams; 96.6% of the weights can go
    """
    if MARK in net.__dict__:
        raise TraceError(
            "the network is pruned already, and units are counted in its base; use the structure that it was "
            "pruned with"
        )
    known = None if cache is None else Cache(cache).get(fingerprint(net, example, freeze))
    if known is not None:
        return replace(known, example=example, freeze=freeze)
    structure = find(net, example, freeze)
    refused = unfollowed(net, structure)
    if refused:
        structure = without(net, structure, refused)
    if cache is not None:
        Cache(cache).put(structure)
    return structure
