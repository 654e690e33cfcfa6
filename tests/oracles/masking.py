"""The masked network, made the slow and obvious way: the network's own code on parameters with zeros for what is gone.

Nothing of the library's graph runner is used. Where a norm's mean runs over pruned channels a zero would still count,
so these norms are replaced by ones that count what is left alone.
"""

import copy
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList


def masked_copy(plain, structure, kept):
    """A copy of an unpruned, plain network in which all that is gone is zero; None if a norm has no oracle here."""
    net = copy.deepcopy(plain)
    left = what_is_left(structure, kept)
    tensors = dict([*net.named_parameters(), *net.named_buffers()])
    with torch.no_grad():
        for name, masks in left.items():
            for axis, mask in enumerate(masks) if name in tensors else ():
                tensors[name].index_fill_(axis, torch.from_numpy(np.flatnonzero(~mask)), 0)
        for module in net.modules():
            if isinstance(module, ParametrizationList) and hasattr(module, "original1"):
                _give_lengths_(module)
    paths = dict(net.named_modules(remove_duplicate=False))
    for path in {extent.module for extent in structure.extents if len(extent.sizes) == 1}:
        if isinstance(paths[path], nn.modules.conv._ConvNd):  # a standardised weight
            return None
        (mask, *others) = left.get(f"{path}.weight", [None])
        is_norm = mask is not None and not others
        if is_norm and not mask.all() and not _replace_norm_(paths[path], torch.from_numpy(mask)):
            return None
    return net


def _give_lengths_(norm):
    """What is gone has no length to be divided by; with any other direction it is still zero, by its own length."""
    (weight_norm,) = norm
    norm.original1 += torch.norm_except_dim(norm.original1, 2, weight_norm.dim) == 0


def what_is_left(structure, kept):
    """Which indices of each axis of each tensor are left, entry by entry."""
    masks = {name: [np.ones(n, bool) for n in shape] for name, shape in structure.shapes.items()}
    for stream in structure.streams:
        stays = set(kept["streams"][stream.name])
        for member in stream.members:
            for index, unit in enumerate(member.units.tolist()):
                if unit >= 0 and unit not in stays:
                    masks[member.tensor][member.axis][index] = False
    for writer in structure.writers:
        stays = set(kept["writers"].get(writer.name, range(structure.streams[writer.stream].size)))
        for tensor, axis in writer.members:
            for index in range(len(masks[tensor][axis])):
                if index not in stays:
                    masks[tensor][axis][index] = False
    return masks


def _replace_norm_(module, mask):
    name = type(module).__name__
    if isinstance(module, nn.LayerNorm) and "2d" not in name:
        module.forward = partial(_layer_norm, module, mask)
    elif isinstance(module, nn.GroupNorm):
        module.forward = partial(_group_norm, module, mask)
    elif "RMSNorm" in name or name == "T5LayerNorm":
        module.forward = partial(_rms_norm, module, mask)
    else:
        return type(module) in (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.Embedding)
    return True


def _layer_norm(module, mask, x):
    count = mask.sum()
    mean = x[..., mask].sum(-1, keepdim=True) / count
    variance = ((x[..., mask] - mean) ** 2).sum(-1, keepdim=True) / count
    out = (x - mean) / torch.sqrt(variance + module.eps)
    out = out if module.weight is None else out * module.weight
    return out if module.bias is None else out + module.bias


def _group_norm(module, mask, x):
    out = x.clone()
    size = x.shape[1] // module.num_groups
    for group in range(module.num_groups):
        channels = [c for c in range(group * size, (group + 1) * size) if mask[c]]
        if channels:
            part = x[:, channels]
            axes = list(range(1, x.dim()))
            mean, variance = part.mean(axes, keepdim=True), part.var(axes, keepdim=True, unbiased=False)
            out[:, channels] = (part - mean) / torch.sqrt(variance + module.eps)
    shape = [1, -1] + [1] * (x.dim() - 2)
    return out * module.weight.view(shape) + module.bias.view(shape)


def _rms_norm(module, mask, x):
    epsilon = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or torch.finfo(x.dtype).eps
    mean = (x[..., mask].float() ** 2 if hasattr(module, "variance_epsilon") else x[..., mask] ** 2).mean(
        -1, keepdim=True
    )
    scale = 1 + module.weight if "Gemma" in type(module).__name__ else module.weight
    return scale * (x * torch.rsqrt(mean + epsilon)).to(x.dtype)
