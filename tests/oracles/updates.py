"""Eq. 3 entry by entry: what an update adds to a weight, in loops and float64."""

import itertools

import torch
from torch import nn


def low_rank_delta(layer: nn.Module, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The sum over r of up[r, out] * down[r, in] wherever in and out share a group; at the centre or at every tap."""
    whole_kernel = down.dim() > 2
    delta = torch.zeros(layer.weight.shape, dtype=torch.float64)
    for o, i, tap, is_centre, position in _entries(layer):
        if whole_kernel:
            delta[position] = sum(up[r, o] * down[(r, i, *tap)] for r in range(len(up)))
        elif is_centre:
            delta[position] = sum(up[r, o] * down[r, i] for r in range(len(up)))
    return delta


def pointwise_delta(layer: nn.Module, residual: torch.Tensor) -> torch.Tensor:
    """The residual's entries at the centre tap."""
    delta = torch.zeros(layer.weight.shape, dtype=torch.float64)
    for o, i, _, is_centre, position in _entries(layer):
        if is_centre:
            delta[position] = residual[o, i % residual.shape[1]]
    return delta


def _entries(layer):
    """Each (output, input, tap) that the layer connects, and where its weight lies in the parameter."""
    inputs, outputs, groups, kernel = _shape(layer)
    per_in, per_out = inputs // groups, outputs // groups
    centre = tuple(k // 2 for k in kernel)
    for o, i in itertools.product(range(outputs), range(inputs)):
        if o // per_out == i // per_in:
            for tap in itertools.product(*(range(k) for k in kernel)):
                yield o, i, tap, tap == centre, _position(layer, o, i, tap, per_in, per_out)


def _position(layer, o, i, tap, per_in, per_out):
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        return (i, o % per_out, *tap)
    if isinstance(layer, nn.modules.conv._ConvNd):
        return (o, i % per_in, *tap)
    return (o, i) if isinstance(layer, nn.Linear) else (i, o)


def _shape(layer):
    if isinstance(layer, nn.modules.conv._ConvNd):
        return layer.in_channels, layer.out_channels, layer.groups, tuple(layer.kernel_size)
    first, second = layer.weight.shape
    return (second, first, 1, ()) if isinstance(layer, nn.Linear) else (first, second, 1, ())
