"""How modules follow once their tensors have been cut.

- Sizes that a module holds as attributes follow by a table of module kinds, which users extend (`resizes`). Modules of
  other libraries follow by the names of their attributes (`by_name`). Whether that was right, the dry run and the
  comparison with the masked network tell.
- `nn.MultiheadAttention` takes it that all heads side by side are as wide as its input; once heads are gone, it runs
  `run_attention`.
- A free writer's channels are put at their places in the stream by a gather behind it (`Spread`).
- A batch norm can be folded into the layer before it (`fold_into_`).

Networks that are built from task files need these too, and nothing else of pruning: nothing here imports what finds
structures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import is_parametrized

from spalier.adapters.attachment import Changes
from spalier.adapters.forward import OWN_FORWARD, is_diverted
from spalier.adapters.geometry import Added, fast_path_closed, is_transformers_conv1d

if TYPE_CHECKING:
    from spalier.structure.labels import Ints, Mask

# attributes


@dataclass(frozen=True)
class Resize:
    """What happened to a module."""

    kept: Mapping[str, tuple[Ints | None, ...]]
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
    """Say for a kind of module which attributes to set once its tensors have been cut.

    The function takes the module, whose tensors are small already, and a `Resize`, and returns the attributes. The one
    of the nearest class counts.

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
    # only what changes is logged, so that as little as possible has to be taken back
    return {key: value for key, value in found.items() if getattr(module, key, None) != value}


def resized_by_shape(module: nn.Module, shape: tuple[int, ...]) -> dict[str, Any] | None:
    """What `resized` finds for the most common layers, from the shape of their weight alone; None for all others."""
    names = _BY_SHAPE.get(type(module))
    if names is None or getattr(module, "groups", 1) != 1:
        return None
    return dict(zip(names, shape, strict=False))


_BY_SHAPE: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("out_features", "in_features"),
    nn.Bilinear: ("out_features", "in1_features", "in2_features"),
    **dict.fromkeys((nn.Embedding, nn.EmbeddingBag), ("num_embeddings", "embedding_dim")),
    nn.PReLU: ("num_parameters",),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), ("out_channels", "in_channels")),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), ("num_features",)),
}


def resized_by_tensors(module: nn.Module, kept: Mapping[str, tuple[Ints | None, ...]]) -> dict[str, Any] | None:
    """The same where the tensors of a module say all that there is to know; None where they do not."""
    entry = _entry_of(module)
    lacks_weights = isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm) and module.weight is None
    if entry not in _BY_TENSORS or lacks_weights or is_parametrized(module):
        return None
    return entry(module, Resize(kept, (), {}))


def _entry_of(module: nn.Module) -> Entry | None:
    entry = next((_TABLE[kind] for kind in type(module).__mro__ if kind in _TABLE), None)
    return _conv1d if entry is None and is_transformers_conv1d(module) else entry


@resizes(nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.PReLU)
def _shaped(module: Any, resize: Resize) -> dict[str, Any]:
    names = next(_BY_SHAPE[kind] for kind in type(module).__mro__ if kind in _BY_SHAPE)
    return dict(zip(names, module.weight.shape, strict=True))


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
    base = resize.base.get("normalized_shape", module.normalized_shape)
    return {"normalized_shape": tuple(resize.width(n) for n in base)}


@resizes(nn.GroupNorm)
def _group_norm(module: Any, resize: Resize) -> dict[str, Any]:
    if module.weight is None:
        return {}
    groups = resize.groups("weight", 0, module.num_groups, module.num_channels)
    return {"num_groups": groups, "num_channels": len(module.weight)}


def _conv1d(module: Any, resize: Resize) -> dict[str, Any]:
    return {"nx": module.weight.shape[0], "nf": module.weight.shape[1]}


_BY_TENSORS = (_shaped, _convolution, _conv1d, _channel_norm, _layer_norm, _group_norm)


@resizes(nn.MultiheadAttention)
def _attention(module: Any, resize: Resize) -> dict[str, Any]:
    if resize.base.get("head_dim", module.head_dim) == 1:  # a view as heads of one entry tells nothing
        return attention_with(module, module.out_proj.weight.shape[1])
    return attention_with(module, resize.heads(resize.base.get("num_heads", module.num_heads)))


def attention_with(module: Any, heads: int) -> dict[str, Any]:
    """The attributes of attention that has this many heads left."""
    width = module.out_proj.weight.shape[1]
    # with adapters on it the layer is diverted already, to a run that asks for OWN_FORWARD
    forward = {} if is_diverted(module) else {"forward": partial(run_attention, module)}
    return {
        "scale": base_scale(module),  # heads that are narrower now are scaled as before
        "num_heads": heads,
        "head_dim": width // heads,
        "embed_dim": module.out_proj.weight.shape[0],
        OWN_FORWARD: run_attention,
        **forward,
    }


@resizes(nn.TransformerEncoderLayer, nn.TransformerEncoder)
def _encoder(module: Any, resize: Resize) -> dict[str, Any]:
    return fast_path_closed(module)


_HELD: dict[Entry, frozenset[str]] = {
    **dict.fromkeys((*_BY_TENSORS, _encoder), frozenset()),
    _layer_norm: frozenset({"normalized_shape"}),  # of norms without weights
    _attention: frozenset({"num_heads"}),
}
"""What tensors do not tell of PyTorch's own modules."""
_OF_WEIGHTS = frozenset({"in_features", "out_features", "in_channels", "out_channels", "groups"})


def may_resize(module: nn.Module, key: str) -> bool:
    """Whether pruning can change this attribute of a module though its tensors do not tell; task files may then."""
    entry = _entry_of(module)
    if entry is None:
        return _is_heads(key) or _is_width(key) or _is_shape(key)
    if is_parametrized(module) and key in _OF_WEIGHTS:  # the weight is computed, and tells nothing
        return True
    known = _HELD.get(entry)  # what `resizes` was given, its users answer for
    return key in known if known is not None else not key.startswith("_")


def misfit(module: Any) -> str:
    """Why the tensors of one of PyTorch's layers do not fit together; empty where they do, and for other modules."""
    own = {k: t for k, t in (*module._parameters.items(), *module._buffers.items()) if t is not None and t.dim()}
    if isinstance(module, _NormBase | nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
        if len({t.shape for t in own.values()}) > 1:
            return "its tensors have unlike shapes"
        if isinstance(module, nn.GroupNorm) and module.num_channels % module.num_groups:
            return f"{module.num_channels} channels have no {module.num_groups} equal groups"
    elif isinstance(module, nn.Linear | _ConvNd):
        outputs = module.out_features if isinstance(module, nn.Linear) else module.out_channels
        if module.bias is not None and module.bias.shape != (outputs,):
            return f"it has {outputs} outputs, and a bias for {len(module.bias)}"
        if len(module.weight) % getattr(module, "groups", 1):
            return f"{len(module.weight)} channels have no {module.groups} equal groups"
    elif isinstance(module, nn.MultiheadAttention):
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        parts = own["in_proj_weight"].chunk(3) if "in_proj_weight" in own else [own[name] for name in names]
        queries, keys, values = map(len, parts)
        width = module.out_proj.weight.shape[1]
        if queries != keys or values != width or queries % module.num_heads or width % module.num_heads:
            return f"{queries} queries, {keys} keys and {values} values are not for {module.num_heads} heads of {width}"
        if "in_proj_bias" in own and len(own["in_proj_bias"]) != queries + keys + values:
            return "its bias is for another number of channels"
    return ""


# names of sizes in torchvision, timm and transformers; a false match is found by the dry run, or by the comparison
_HEADS = re.compile(r"heads?$|_heads?_|^nhead")
_WIDTHS = re.compile(r"dim|chan|chs|feature|width|hidden|plane|d_model|embed|head_size|split_size|proj")
_OTHERS = re.compile(r"patch|image|img|window|kernel|class|vocab|seq|pos|max|min|axis|num_dim|ndim|^dim_?$")


def by_name(module: Any, resize: Resize) -> dict[str, Any]:
    """Modules of other libraries: numbers with the name of a width, or of heads, that equal the size of an axis."""
    found: dict[str, Any] = {}
    for key, current in vars(module).items():
        value = resize.base.get(key, current)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            if _is_heads(key):
                found[key] = resize.heads(value)
            elif _is_width(key):
                found[key] = resize.width(value)
        elif isinstance(value, tuple) and _is_shape(key) and all(isinstance(n, int) for n in value):
            found[key] = tuple(resize.width(n) for n in value)
    return found


def _is_size(key: str) -> bool:
    return not key.startswith("_") and not _OTHERS.search(key)


def _is_heads(key: str) -> bool:
    return _is_size(key) and bool(_HEADS.search(key))


def _is_width(key: str) -> bool:
    return _is_size(key) and bool(_WIDTHS.search(key))


def _is_shape(key: str) -> bool:
    return _is_size(key) and "shape" in key


# attention


def run_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    project: Callable[[Any, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`nn.MultiheadAttention` whose heads may be fewer and narrower than the input is wide."""
    if attn_mask is None and is_causal:
        raise RuntimeError("is_causal needs attn_mask, as in torch.nn.MultiheadAttention")
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(0 if module.batch_first else 1) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    if not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    q, k, v = _projected(module, query, key, value)
    mask = _additive_mask(module, q, k, key_padding_mask, attn_mask)
    out, weights = _attend(module, q, k, v, mask, need_weights)
    out = (project or _project)(module.out_proj, out.transpose(1, 2).flatten(2))
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    if not batched:
        return out.squeeze(0), None if weights is None else weights.squeeze(0)
    return (out if module.batch_first else out.transpose(0, 1)), weights


def _project(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def _projected(module: Any, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Queries, keys and values as (batch, heads, length, head size)."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    made = [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]
    for index, extra in ((1, module.bias_k), (2, module.bias_v)):  # one more key, and its value
        if extra is not None:
            made[index] = torch.cat([made[index], extra.transpose(0, 1).expand(len(key), -1, -1)], 1)
    heads = [x.unflatten(2, (module.num_heads, -1)).transpose(1, 2) for x in made]
    if module.add_zero_attn:
        heads[1:] = [F.pad(x, (0, 0, 0, 1)) for x in heads[1:]]
    return heads


def _additive_mask(
    module: Any, q: Tensor, k: Tensor, padding: Tensor | None, attention: Tensor | None
) -> Tensor | None:
    """Both masks as one that is added to the scores; entries that were added to the keys are never masked."""
    batch, length = q.shape[0], k.shape[2]
    total = None
    for mask in (padding, attention):
        if mask is None:
            continue
        extra = mask if mask.is_floating_point() else q.new_zeros(mask.shape).masked_fill(mask, float("-inf"))
        if mask is padding:
            extra = extra.view(batch, 1, 1, -1)
        elif extra.dim() == 3:
            extra = extra.view(batch, -1, *extra.shape[1:])  # (batch, heads, queries, keys)
            if extra.shape[1] != module.num_heads:
                raise RuntimeError(
                    f"attn_mask is for {extra.shape[1]} heads, and {module.num_heads} are left; pass masks for these, "
                    "or one for all"
                )
        extra = F.pad(extra, (0, length - extra.shape[-1]))
        total = extra if total is None else total + extra
    return total


def _attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    dropout = module.dropout if module.training else 0.0
    if not need_weights:  # one fused kernel, which never forms the weights
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=module.scale), None
    scores = q * module.scale @ k.transpose(-2, -1)  # (batch, heads, queries, keys)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights @ v, weights


def base_scale(module: nn.MultiheadAttention) -> float:
    """What scores are scaled by in the unpruned layer."""
    return float(module.__dict__.get("scale", module.head_dim**-0.5))


# free writers

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
        axis = self.axis % x.dim()  # counted from the end: inputs may have more axes than the example
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
    if hook is not None:  # the gather is there: it only gets other places
        changes.set_(module.get_submodule(NAME), "_buffers", "index", made.index)
    else:
        changes.set_(module, "_modules", NAME, made)
        handle = module.register_forward_hook(spread_output)
        changes.note(module, "_forward_hooks", handle.id)


# folding


def fold_into_(layer: Any, norm: Any, axis: int) -> None:
    """Let a layer, whose outputs are on this axis of its weight, do what the norm behind it does too.

    The norm passes on what it gets from then on.
    """
    # w (W x + b - mean) / sqrt(var + eps) + c  =  (s W) x + (s (b - mean) + c),  s = w / sqrt(var + eps)
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean * scale if layer.bias is None else (layer.bias - norm.running_mean) * scale
    if norm.bias is not None:
        shift = shift + norm.bias
    shape = [-1 if a == axis else 1 for a in range(layer.weight.dim())]
    layer.weight = nn.Parameter(layer.weight * scale.view(shape), requires_grad=False)
    layer.bias = nn.Parameter(shift, requires_grad=False)
    if type(norm).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        # the same object, wherever else the network holds it; its hooks and a gather behind it stay
        kept = {key: value for key, value in vars(norm).items() if key.endswith("_hooks") or key == "_modules"}
        norm.__class__ = nn.Identity
        norm.__dict__ = {**nn.Identity().__dict__, **kept, "training": False}
    else:  # of another library, perhaps with an activation in it
        norm.running_mean = torch.zeros_like(norm.running_mean)
        norm.running_var = torch.ones_like(norm.running_var)
        norm.eps, norm.weight, norm.bias = 0.0, None, None
