"""Sizes that modules hold as attributes: the table of module kinds that says how they follow a cut. Users can extend it.

An entry takes a module whose tensors have been cut and a `Resize`, and returns the attributes to set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from spalier.adapters.forward import OWN_FORWARD, is_diverted
from spalier.adapters.layers import is_transformers_conv1d
from spalier.pruning.attention import base_scale, run_attention
from spalier.structure.labels import Ints


@dataclass(frozen=True)
class Resize:
    """What happened to a module."""

    kept: dict[str, tuple[Ints | None, ...]]
    """For each of its own tensors that was cut, the indices that stayed along each axis; None where all did."""
    extents: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Sizes that its code uses (a view as heads and head size, what a norm averages), as they were and as they are."""

    def groups(self, key: str, axis: int, groups: int, size: int) -> int:
        """How many of a layer's groups are left, of an axis that had ``size`` indices."""
        index = self.kept[key][axis] if key in self.kept else None
        if index is None:
            return groups
        return len(np.unique(index // (size // groups)))

    def scaled(self, value: int, position: int) -> int:
        """An attribute that equals (or divides) a size at this position of an extent, as it is now."""
        for old, new in self.extents:
            if len(old) >= -position and old[position] % value == 0 and (new[position] * value) % old[position] == 0:
                return new[position] * value // old[position]
        return value


Entry = Callable[[Any, Resize], dict[str, Any]]
_TABLE: dict[type[nn.Module], Entry] = {}


def resizes(*kinds: type[nn.Module]) -> Callable[[Entry], Entry]:
    """Add an entry for a kind of module: which attributes to set once its tensors have been cut.

    The entry of the nearest class counts.

    >>> class Scale(nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.width, self.weight = width, nn.Parameter(torch.ones(width))
    >>> @resizes(Scale)
    ... def scale(module, resize):
    ...     return {"width": len(module.weight)}
    """

    def register(entry: Entry) -> Entry:
        _TABLE.update(dict.fromkeys(kinds, entry))
        return entry

    return register


def resized(module: nn.Module, resize: Resize) -> dict[str, Any]:
    """The attributes that a module needs after a cut."""
    entry = next((_TABLE[kind] for kind in type(module).__mro__ if kind in _TABLE), None)
    if entry is None and is_transformers_conv1d(module):
        entry = _conv1d
    found = (entry or by_name)(module, resize)
    return {key: value for key, value in found.items() if getattr(module, key, None) != value}


@resizes(nn.Linear)
def _linear(module: Any, resize: Resize) -> dict[str, Any]:
    return {"out_features": module.weight.shape[0], "in_features": module.weight.shape[1]}


@resizes(nn.Bilinear)
def _bilinear(module: Any, resize: Resize) -> dict[str, Any]:
    return dict(zip(("out_features", "in1_features", "in2_features"), module.weight.shape, strict=True))


@resizes(_ConvNd)
def _convolution(module: Any, resize: Resize) -> dict[str, Any]:
    transposed = isinstance(module, _ConvTransposeNd)
    size = module.in_channels if transposed else module.out_channels
    groups = resize.groups("weight", 0, module.groups, size)
    first, second = module.weight.shape[0], module.weight.shape[1] * groups
    inputs, outputs = (first, second) if transposed else (second, first)
    return {"groups": groups, "in_channels": inputs, "out_channels": outputs}


@resizes(_NormBase)
def _channel_norm(module: Any, resize: Resize) -> dict[str, Any]:
    own = module.weight if module.weight is not None else module.running_mean
    return {} if own is None else {"num_features": len(own)}


@resizes(nn.LayerNorm, nn.RMSNorm)
def _layer_norm(module: Any, resize: Resize) -> dict[str, Any]:
    if module.weight is not None:
        return {"normalized_shape": tuple(module.weight.shape)}
    shape = tuple(resize.scaled(n, i - len(module.normalized_shape)) for i, n in enumerate(module.normalized_shape))
    return {"normalized_shape": shape}


@resizes(nn.GroupNorm)
def _group_norm(module: Any, resize: Resize) -> dict[str, Any]:
    if module.weight is None:
        return {}
    groups = resize.groups("weight", 0, module.num_groups, module.num_channels)
    return {"num_groups": groups, "num_channels": len(module.weight)}


@resizes(nn.Embedding, nn.EmbeddingBag)
def _embedding(module: Any, resize: Resize) -> dict[str, Any]:
    return {"embedding_dim": module.weight.shape[1]}


@resizes(nn.PReLU)
def _prelu(module: Any, resize: Resize) -> dict[str, Any]:
    return {"num_parameters": len(module.weight)}


def _conv1d(module: Any, resize: Resize) -> dict[str, Any]:
    return {"nx": module.weight.shape[0], "nf": module.weight.shape[1]}


@resizes(nn.MultiheadAttention)
def _attention(module: Any, resize: Resize) -> dict[str, Any]:
    heads = resize.scaled(module.num_heads, -2)
    width = module.out_proj.weight.shape[1]
    forward = {} if is_diverted(module) else {"forward": partial(run_attention, module)}
    return {
        "scale": base_scale(module),
        "num_heads": heads,
        "head_dim": width // heads,
        "embed_dim": module.out_proj.weight.shape[0],
        OWN_FORWARD: run_attention,
        **forward,
    }


@resizes(nn.TransformerEncoderLayer)
def _encoder_layer(module: Any, resize: Resize) -> dict[str, Any]:
    """PyTorch's inference fast path knows nothing of fewer heads."""
    return {"activation_relu_or_gelu": 0}


HEADS = "num_heads n_heads num_attention_heads n_head nhead heads num_kv_heads num_key_value_heads".split()
HEAD_SIZES = "head_dim head_size attention_head_size dim_head d_head key_value_proj_dim d_kv dim_per_head key_dim".split()
WIDTHS = "attn_dim all_head_size inner_dim split_size val_attn_dim dim_attn".split()


def by_name(module: Any, resize: Resize) -> dict[str, Any]:
    """Attention of other libraries, by the names that attributes go by there."""
    found = {}
    for key, value in vars(module).items():
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            if key in HEADS:
                found[key] = resize.scaled(value, -2)
            elif key in HEAD_SIZES:
                found[key] = resize.scaled(value, -1)
            elif key in WIDTHS:
                found[key] = _width(value, resize)
    return found


def _width(value: int, resize: Resize) -> int:
    for old, new in resize.extents:
        if len(old) >= 2 and old[-2] * old[-1] == value:
            return new[-2] * new[-1]
    return resize.scaled(value, -1)
