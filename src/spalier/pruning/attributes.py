"""Sizes that modules hold as attributes: a table of module kinds says how they follow a cut; users extend it.

An entry takes a module whose tensors have been cut and a `Resize`, and returns the attributes to set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from spalier.adapters.forward import OWN_FORWARD, is_diverted
from spalier.adapters.geometry import is_transformers_conv1d
from spalier.pruning.modules import base_scale, run_attention

if TYPE_CHECKING:  # a network that is built from a task file needs nothing that finds structure
    from spalier.structure.labels import Ints


@dataclass(frozen=True)
class Resize:
    """What happened to a module."""

    kept: dict[str, tuple[Ints | None, ...]]
    """For each of its own tensors that was cut, the indices that stayed along each axis; None where all did."""
    extents: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Sizes that its code uses (a view as heads and head size, what a norm averages), in the base and as they are."""
    base: Mapping[str, Any]
    """Attributes as they were in the base, where they have changed since."""

    def groups(self, key: str, axis: int, groups: int, size: int) -> int:
        """How many of a layer's groups are left, of an axis that had ``size`` indices."""
        index = self.kept[key][axis] if key in self.kept else None
        if index is None or groups == 1:
            return groups
        return len(np.unique(index // (size // groups)))

    def heads(self, value: int) -> int:
        """A number of heads, as it is now: one axis of a view has it, or a multiple of it (heads of a whole batch)."""
        for old, new in self.extents:
            if len(old) > 1 and old[-2] % value == 0 and (new[-2] * value) % old[-2] == 0:
                return new[-2] * value // old[-2]
        return self.width(value)

    def width(self, value: int) -> int:
        """The size of an axis, as it is now; as it was, where axes of that size have become unlike."""
        sizes = {now for old, new in self.extents for was, now in zip(old, new, strict=True) if was == value}
        return sizes.pop() if len(sizes) == 1 else value


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
    found = (_entry_of(module) or by_name)(module, resize)
    return {key: value for key, value in found.items() if getattr(module, key, None) != value}


def resized_by_shape(module: nn.Module, shape: tuple[int, ...]) -> dict[str, Any] | None:
    """What `resized` finds for the most common layers, from the shape of their weight alone; None for all others."""
    names = _BY_SHAPE.get(type(module))
    if names is None or getattr(module, "groups", 1) != 1:
        return None
    return dict(zip(names, shape, strict=False))


_BY_SHAPE = {
    nn.Linear: ("out_features", "in_features"),
    nn.Conv1d: ("out_channels", "in_channels"),
    nn.Conv2d: ("out_channels", "in_channels"),
    nn.Conv3d: ("out_channels", "in_channels"),
    nn.BatchNorm1d: ("num_features",),
    nn.BatchNorm2d: ("num_features",),
    nn.BatchNorm3d: ("num_features",),
}


def resized_by_tensors(module: nn.Module, kept: dict[str, tuple[Ints | None, ...]]) -> dict[str, Any] | None:
    """The same where the tensors of a module say all that there is to know; None where they do not."""
    entry = _entry_of(module)
    if entry not in _BY_TENSORS or (isinstance(module, _MAY_LACK_WEIGHTS) and module.weight is None):
        return None
    return entry(module, Resize(kept, (), {}))


def _entry_of(module: nn.Module) -> Entry | None:
    entry = next((_TABLE[kind] for kind in type(module).__mro__ if kind in _TABLE), None)
    return _conv1d if entry is None and is_transformers_conv1d(module) else entry


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
    return {
        "normalized_shape": tuple(
            resize.width(n) for n in resize.base.get("normalized_shape", module.normalized_shape)
        )
    }


@resizes(nn.GroupNorm)
def _group_norm(module: Any, resize: Resize) -> dict[str, Any]:
    if module.weight is None:
        return {}
    groups = resize.groups("weight", 0, module.num_groups, module.num_channels)
    return {"num_groups": groups, "num_channels": len(module.weight)}


@resizes(nn.Embedding, nn.EmbeddingBag)
def _embedding(module: Any, resize: Resize) -> dict[str, Any]:
    return {"num_embeddings": module.weight.shape[0], "embedding_dim": module.weight.shape[1]}


@resizes(nn.PReLU)
def _prelu(module: Any, resize: Resize) -> dict[str, Any]:
    return {"num_parameters": len(module.weight)}


def _conv1d(module: Any, resize: Resize) -> dict[str, Any]:
    return {"nx": module.weight.shape[0], "nf": module.weight.shape[1]}


_BY_TENSORS = (
    _linear,
    _bilinear,
    _convolution,
    _channel_norm,
    _layer_norm,
    _group_norm,
    _embedding,
    _prelu,
    _conv1d,
)
_MAY_LACK_WEIGHTS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


@resizes(nn.MultiheadAttention)
def _attention(module: Any, resize: Resize) -> dict[str, Any]:
    return attention_with(module, resize.heads(resize.base.get("num_heads", module.num_heads)))


def attention_with(module: Any, heads: int) -> dict[str, Any]:
    """The attributes of attention that has this many heads left."""
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


@resizes(nn.TransformerEncoder)
def _encoder(module: Any, resize: Resize) -> dict[str, Any]:
    return {"use_nested_tensor": False}


_HEADS = re.compile(r"heads?$|_heads?_|^nhead")
_WIDTHS = re.compile(r"dim|chan|chs|feature|width|hidden|plane|d_model|embed|head_size|split_size|proj")
_OTHERS = re.compile(r"patch|image|img|window|kernel|class|vocab|seq|pos|max|min|axis|num_dim|ndim|^dim_?$")


def by_name(module: Any, resize: Resize) -> dict[str, Any]:
    """Modules of other libraries: numbers that go by the name of a width, or of heads, and equal the size of an axis.

    Whether that was right, the twin and the comparison with the masked network tell.
    """
    found: dict[str, Any] = {}
    for key, current in vars(module).items():
        value = resize.base.get(key, current)
        if key.startswith("_") or _OTHERS.search(key):
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            if _HEADS.search(key):
                found[key] = resize.heads(value)
            elif _WIDTHS.search(key):
                found[key] = resize.width(value)
        elif isinstance(value, tuple) and "shape" in key and all(isinstance(n, int) for n in value):
            found[key] = tuple(resize.width(n) for n in value)
    return found
