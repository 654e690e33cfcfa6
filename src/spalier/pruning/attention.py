"""`nn.MultiheadAttention` with fewer heads: its own forward takes it that the heads are as wide as the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
