"""Fuse the updates into the weights (Eq. 3): a plain network with none of our types inside."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from spalier.adapters.attachment import Attachment, Updated, attachment_of
from spalier.adapters.layers import is_finite
from spalier.errors import NonFiniteError


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
    _check_learned(net)
    memo: dict[int, object] = {}  # what deepcopy takes instead of copying
    for entry in attachment.updated:
        weight = entry.layer.get_parameter(entry.weight)
        if id(weight) not in memo:
            memo[id(weight)] = nn.Parameter(_fused(entry, weight), requires_grad=False)
        memo[id(entry.update)] = entry.update
    for replaced in attachment.replaced:
        memo[id(replaced.original)] = replaced.original
    plain = copy.deepcopy(net, memo)
    _clean_(plain)
    return plain


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


def _clean_(plain: nn.Module) -> None:
    """Turn a copy of an adapted network into an ordinary one."""
    attachment: Attachment = plain.__dict__.pop("_spalier")
    attachment.remove_()
    flags = {id(parameter): flag for parameter, flag in attachment.flags}
    for entry in attachment.replaced:
        current = getattr(entry.module, entry.key)
        flags[id(current)] = flags.get(id(entry.original), False)
    for parameter in plain.parameters():
        parameter.requires_grad_(flags[id(parameter)])


def _check_learned(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        if parameter.requires_grad and not is_finite(parameter):
            raise NonFiniteError(
                f"{name} holds NaN or infinite values: training has diverged; go back to an earlier state"
            )
