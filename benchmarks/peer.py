"""Torch-Pruning, as its documentation uses it, for any network: a program that knows no network by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

RATIO = 0.5
Call = tuple[tuple[Any, ...], dict[str, Any]]


def torch_pruner(net: nn.Module, call: Call, with_heads: bool = True) -> Any:
    import torch_pruning as tp

    return tp.pruner.BasePruner(
        net,
        example_inputs=call[1] or call[0],
        importance=tp.importance.RandomImportance(),  # the quickest, and every layer has one
        pruning_ratio=RATIO,
        ignored_layers=output_layers(net, call),
        num_heads=numbers_of_heads(net) if with_heads else {},
        in_channel_groups={},  # the defaults are shared between calls
        out_channel_groups={},
        output_transform=differentiable,
    )


def differentiable(result: Any) -> list[Tensor]:
    """Outputs that its tracer can walk back from."""
    return [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.grad_fn is not None]


def output_layers(net: nn.Module, call: Call) -> list[nn.Module]:
    """The layers whose channels are the output's: what stands last on each way back from it."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in net.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    waiting = [x.grad_fn for x in differentiable(net.eval()(*call[0], **call[1]))]
    found: list[nn.Module] = []
    seen = set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        is_embedding = "Embedding" in node.name()
        layers = [
            module
            for weight in weights_of(node)
            for module in owners.get(weight, [])
            if isinstance(module, nn.Embedding) == is_embedding
        ]
        if layers:
            found += layers
        else:
            waiting += [after for after, _ in node.next_functions]
    attention = [m for m in net.modules() if isinstance(m, nn.MultiheadAttention) and m.out_proj in found]
    return found + attention


def weights_of(node: Any) -> list[nn.Parameter]:
    """The weights that an operation multiplies with."""
    if not any(kind in node.name() for kind in ("Convolution", "Addmm", "Mm", "Linear", "Embedding")):
        return []
    found = []
    for after, _ in node.next_functions:
        for _ in range(3):  # a weight may be transposed or viewed on its way
            if after is not None and not hasattr(after, "variable") and len(after.next_functions) == 1:
                if not any(kind in after.name() for kind in ("TBackward", "Transpose", "View", "Permute")):
                    break
                after = after.next_functions[0][0]
        if hasattr(after, "variable") and after.variable.dim() > 1:
            found.append(after.variable)
    return found


QUERIES = ("qkv", "q", "query", "q_proj", "q_lin")
KEYS_AND_VALUES = ("k", "v", "key", "value", "k_proj", "v_proj", "k_lin", "v_lin", "kv")


def numbers_of_heads(net: nn.Module) -> dict[nn.Module, int]:
    """The layers that make heads, by the names that most networks use."""
    found: dict[nn.Module, int] = {}
    for module in net.modules():
        config = getattr(module, "config", None)
        attributes = ("num_heads", "num_attention_heads", "n_heads")
        heads = next((h for h in (getattr(module, a, None) for a in attributes) if isinstance(h, int)), None)
        heads = heads or getattr(config, "num_attention_heads", None)
        for name, child in module.named_children():
            if not isinstance(child, nn.Linear) or heads is None:
                continue
            if name in QUERIES:
                found[child] = heads
            elif name in KEYS_AND_VALUES:
                found[child] = getattr(config, "num_key_value_heads", None) or heads
    return found


def set_head_sizes(net: nn.Module) -> None:
    """What its examples do after pruning: tell attention how wide heads are now."""
    heads = numbers_of_heads(net)
    for module in net.modules():
        layer = next((c for n, c in module.named_children() if n in QUERIES and c in heads), None)
        if not isinstance(layer, nn.Linear):
            continue
        width = layer.out_features // (3 if getattr(module, "qkv", None) is layer else 1)
        for name in ("head_dim", "attention_head_size", "key_value_proj_dim", "key_dim"):
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, width // heads[layer])
        for name in ("all_head_size", "inner_dim", "attn_dim"):
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, width)
