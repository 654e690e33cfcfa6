"""Several processes as one: gradients of the whole batch, and batch norms over the whole batch.

The network changes its shapes at every prune, so it is not wrapped in `DistributedDataParallel`, which fixes them: what
learns is small, and one sum of all gradients in one piece does the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from spalier.distributed import is_distributed


def sum_gradients_(parameters: Iterable[Tensor], numbers: list[float]) -> list[float]:
    """Sum gradients over all ranks, and with them a few numbers, which are returned."""
    if not is_distributed():
        return numbers
    held = [p for p in parameters if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in held]
    extra = torch.tensor(numbers, dtype=torch.float32, device=held[0].device)
    flat = torch.cat([extra, *(g.reshape(-1).float() for g in grads)])
    dist.all_reduce(flat)
    parts = flat[len(numbers) :].split([g.numel() for g in grads])
    for parameter, part in zip(held, parts, strict=True):
        parameter.grad = (
            part.view(parameter.shape).to(parameter.dtype).clone(memory_format=torch.preserve_format)
        )
    return [float(x) for x in flat[: len(numbers)]]


def summed(values: Tensor) -> Tensor:
    """The sum over all ranks."""
    if is_distributed():
        values = values.clone()
        dist.all_reduce(values)
    return values


class SyncedNorms(TorchFunctionMode):
    """Lets every batch norm in training mode see the samples of all ranks, on any device and in any module.

    `nn.SyncBatchNorm` needs a GPU, and other modules in the network.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS:
            given = dict(zip(_NORMS[func], args, strict=False)) | kwargs
            if given.get("training", False):
                return _batch_norm(**{name: given.get(name) for name in _NEEDED})
        return func(*args, **kwargs)


_NORMS = {  # modules call the one, some functions the other, and they take the same things in another order
    F.batch_norm: (
        "input",
        "running_mean",
        "running_var",
        "weight",
        "bias",
        "training",
        "momentum",
        "eps",
    ),
    torch.batch_norm: (
        "input",
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "training",
        "momentum",
        "eps",
    ),
}
_NEEDED = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | None,
    eps: float | None,
) -> Tensor:
    x, momentum, eps = input, 0.1 if momentum is None else momentum, 1e-5 if eps is None else eps
    axes = [0, *range(2, x.dim())]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    wide = x.float()
    size = torch.full((1,), x.numel() / x.shape[1], device=x.device)
    count = summed(size)
    mean = _Sum.apply(wide.sum(axes)) / count  # type: ignore[no-untyped-call]
    centred = wide - mean.view(shape)
    var = _Sum.apply(centred.square().sum(axes)) / count  # type: ignore[no-untyped-call]
    with torch.no_grad():
        if running_mean is not None and running_var is not None:
            unbiased = var * (count / (count - 1).clamp(min=1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    out = centred * torch.rsqrt(var + eps).view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    result: Tensor = out.to(x.dtype)
    return result


class _Sum(torch.autograd.Function):
    """A sum over ranks whose gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return summed(grads[0])
