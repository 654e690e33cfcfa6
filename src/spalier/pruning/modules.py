"""A gather that spreads a writer's channels over the stream that it writes into.

`nn.MultiheadAttention` with fewer heads: its own forward takes it that the heads are as wide as the input.

Fold a batch norm into the layer before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spalier.adapters.attachment import Changes
from spalier.adapters.geometry import Added

if TYPE_CHECKING:
    from spalier.structure.labels import Mask

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
    """Multi-head attention whose heads may be fewer and narrower than the input is wide."""
    if attn_mask is None and is_causal:
        raise RuntimeError("is_causal needs attn_mask, as in torch.nn.MultiheadAttention")
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(0 if module.batch_first else 1) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    if not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    q, k, v = _projected(module, query, key, value)
    mask = _mask(module, q, k, key_padding_mask, attn_mask)
    out, weights = _attend(module, q, k, v, mask, need_weights)
    out = (project or _output)(module.out_proj, out.transpose(1, 2).flatten(2))
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    if not batched:
        return out.squeeze(0), None if weights is None else weights.squeeze(0)
    return (out if module.batch_first else out.transpose(0, 1)), weights


def _output(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def _projected(module: Any, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Queries, keys and values as (batch, heads, length, head size)."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    made = [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]
    for index, extra in ((1, module.bias_k), (2, module.bias_v)):
        if extra is not None:
            made[index] = torch.cat([made[index], extra.transpose(0, 1).expand(len(key), -1, -1)], 1)
    heads = [x.unflatten(2, (module.num_heads, -1)).transpose(1, 2) for x in made]
    if module.add_zero_attn:
        heads[1:] = [F.pad(x, (0, 0, 0, 1)) for x in heads[1:]]
    return heads


def _mask(
    module: Any, q: Tensor, k: Tensor, padding: Tensor | None, attention: Tensor | None
) -> Tensor | None:
    """One additive mask; entries that were added to the keys are never masked."""
    batch, length = q.shape[0], k.shape[2]
    total = None
    for mask in (padding, attention):
        if mask is None:
            continue
        extra = mask if mask.is_floating_point() else q.new_zeros(mask.shape).masked_fill(mask, float("-inf"))
        if mask is padding:
            extra = extra.view(batch, 1, 1, -1)
        elif extra.dim() == 3:  # heads that are gone have lost their masks
            extra = _of_kept_heads(module, extra.view(batch, -1, *extra.shape[1:]))
        extra = F.pad(extra, (0, length - extra.shape[-1]))
        total = extra if total is None else total + extra
    return total


def _of_kept_heads(module: Any, mask: Tensor) -> Tensor:
    if mask.shape[1] == module.num_heads:
        return mask
    raise RuntimeError(
        f"attn_mask is for {mask.shape[1]} heads, and {module.num_heads} are left; pass masks for these, or one for all"
    )


def _attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    dropout = module.dropout if module.training else 0.0
    if not need_weights:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=module.scale), None
    scores = q * module.scale @ k.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights @ v, weights


def base_scale(module: nn.MultiheadAttention) -> float:
    """What scores are scaled by in the unpruned layer."""
    return float(module.__dict__.get("scale", module.head_dim**-0.5))


def fold_into_(layer: Any, norm: Any, axis: int) -> None:
    """Let a layer do what it does together with the norm behind it."""
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean * scale if layer.bias is None else (layer.bias - norm.running_mean) * scale
    if norm.bias is not None:
        shift = shift + norm.bias
    shape = [-1 if a == axis else 1 for a in range(layer.weight.dim())]
    layer.weight = nn.Parameter(layer.weight * scale.view(shape), requires_grad=False)
    layer.bias = nn.Parameter(shift, requires_grad=False)
