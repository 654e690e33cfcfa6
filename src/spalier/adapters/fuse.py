"""Fuse the updates into the weights (Eq. 3): a plain network with none of our types inside."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from spalier.adapters.attachment import MARK, Attachment, Updated, attachment_of
from spalier.adapters.geometry import is_finite, is_norm
from spalier.errors import AttachmentError, NonFiniteError


@torch.no_grad()
def fuse(net: nn.Module) -> nn.Module:
    """A new, plain network that computes what the adapted ``net`` computes; ``net`` is not changed.

    Shapes, classes and keys are the original network's. The result shares no tensor with the base.

    >>> from spalier import SPLoRA, attach_
    >>> net = nn.Sequential(nn.Linear(4, 4)).double()
    >>> _ = attach_(net, SPLoRA(rank=1))
    >>> x = torch.randn(2, 4, dtype=torch.float64)
    >>> plain = fuse(net)
    >>> torch.allclose(plain(x), net(x)), plain
    (True, Sequential(
      (0): Linear(in_features=4, out_features=4, bias=True)
    ))
    """
    attachment = attachment_of(net)
    attachment.check_present(whole=False)
    check_finite(net)
    memo: dict[int, object] = {}  # what deepcopy takes instead of copying
    for entry in attachment.updated:
        weight = entry.layer._parameters.get(entry.weight)
        if weight is None:
            raise AttachmentError(
                f"{entry.name}.{entry.weight} is no longer a parameter (pruned or parametrized since attach_?); "
                "undo that first"
            )
        if id(weight) not in memo:
            memo[id(weight)] = nn.Parameter(_fused(entry, weight), requires_grad=False)
        memo[id(entry.update)] = entry.update
    for replaced in attachment.replaced:
        memo[id(replaced.original)] = replaced.original
    memo |= {id(tensor): tensor for tensor in attachment.pruned.tensors()}
    plain = copy.deepcopy(net, memo)
    twin: Attachment = plain.__dict__[MARK]
    _check_arrived(net, plain, attachment, memo)
    twin.remove_()
    twin.reset_flags_()
    return plain


def _check_arrived(net: nn.Module, plain: nn.Module, attachment: Attachment, memo: dict[int, object]) -> None:
    """Whether modules that say themselves how they are copied have taken the fused weights."""
    paths = {module: path for path, module in net.named_modules()}
    for entry in attachment.updated:
        wanted = memo[id(entry.layer._parameters[entry.weight])]
        if plain.get_submodule(paths[entry.layer])._parameters.get(entry.weight) is not wanted:
            raise AttachmentError(
                f"{entry.name} lies in a module that copies itself in its own way, and would lose its adapter"
            )


def _fused(entry: Updated, weight: Tensor) -> Tensor:
    update = entry.update
    if weight.dtype.itemsize < 4:  # half precision is the storage's, not the sum's
        fused: Tensor = copy.deepcopy(update).float()(weight.float()).to(weight.dtype)
    else:
        fused = update(weight)
    if not is_finite(fused):
        raise NonFiniteError(
            f"fusing {entry.name}.{entry.weight} gives NaN or values beyond {weight.dtype}; "
            "the adapter has diverged: go back to an earlier state, or fuse in a wider dtype with net.float()"
        )
    return fused


def check_finite(net: nn.Module) -> None:
    """Refuse a network whose training has diverged; masks that are infinite on purpose are no matter."""
    learned = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    statistics = [
        (f"{path}.{key}", buffer)
        for path, module in net.named_modules()
        if is_norm(module)
        for key, buffer in module.named_buffers(recurse=False)
    ]
    for name, tensor in (*learned, *statistics):
        if tensor.is_floating_point() and not is_finite(tensor):
            raise NonFiniteError(
                f"{name} holds NaN or infinite values: training has diverged; go back to an earlier state"
            )
