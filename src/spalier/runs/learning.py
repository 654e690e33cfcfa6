"""What learns: its optimizer, the optimizer's state as plain tensors, and averages of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from spalier.adapters.geometry import is_norm
from spalier.errors import RunError
from spalier.runs.config import Settings

Tensors = dict[str, Tensor]


def learned(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by name."""
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def make_optimizer(config: Settings, net: nn.Module) -> Optimizer:
    """SGD or AdamW over what learns, in two groups: what decays, and norms and biases where these do not."""
    lr, weight_decay = config.initial_lr, config.weight_decay
    assert weight_decay is not None
    spared = set() if config.weight_decay_norms else _norms_and_biases(net)
    parameters = learned(net)
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in parameters.items() if n not in spared], "weight_decay": weight_decay},
        {"params": [p for n, p in parameters.items() if n in spared], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return SGD(groups, lr=lr, momentum=config.momentum)
    return AdamW(groups, lr=lr)


def _norms_and_biases(net: nn.Module) -> set[str]:
    norms = {
        f"{path}.{name}" if path else name
        for path, module in net.named_modules()
        if is_norm(module)
        for name, _ in module.named_parameters(recurse=False)
    }
    return norms | {name for name in learned(net) if name.endswith("bias")}


def set_lr_(optimizer: Optimizer, lr: float) -> None:
    """Give all groups a learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_state(optimizer: Optimizer, net: nn.Module) -> Tensors:
    """All that an optimizer remembers, by the names of parameters. Both of ours remember tensors alone."""
    found: Tensors = {}
    for name, parameter in learned(net).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                found[f"{key}/{name}"] = torch.as_tensor(value).detach()
    return found


def restore_optimizer_(optimizer: Optimizer, net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put back what an optimizer remembered."""
    parameters = learned(net)
    for place, value in state.items():
        key, _, name = place.partition("/")
        if name not in parameters:
            raise RunError(
                "checkpoint", f"the checkpoint has a state of {name!r}, which the network does not learn"
            )
        parameter = parameters[name]
        device = "cpu" if key == "step" else parameter.device
        optimizer.state[parameter][key] = value.to(device).clone()


def values_of(net: nn.Module) -> Tensors:
    """A copy of what the task has of its own: what learns, and buffers."""
    found = {name: p.detach().clone() for name, p in learned(net).items()}
    return found | {name: b.detach().clone() for name, b in net.named_buffers()}


@torch.no_grad()
def set_values_(net: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put such a copy back."""
    own = dict(net.named_parameters()) | dict(net.named_buffers())
    for name, value in values.items():
        if name not in own or own[name].shape != value.shape:
            raise RunError("checkpoint", f"the checkpoint's {name!r} does not fit the network")
        own[name].copy_(value)


class Average:
    """An exponential moving average of what learns, norms' statistics included."""

    def __init__(self, net: nn.Module, decay: float, values: Mapping[str, Tensor] | None = None) -> None:
        self.decay = decay
        self.values = dict(values) if values else values_of(net)

    @torch.no_grad()
    def update_(self, net: nn.Module) -> None:
        """Move a little towards what is now; counts are taken as they are."""
        own: dict[str, Tensor] = dict(learned(net)) | dict(net.named_buffers())
        moving = [name for name, value in self.values.items() if value.is_floating_point()]
        torch._foreach_lerp_(
            [self.values[n] for n in moving], [own[n].detach() for n in moving], 1 - self.decay
        )
        for name in self.values.keys() - set(moving):
            self.values[name].copy_(own[name])


def is_safe(net: nn.Module, method: str) -> bool:
    """Whether a network may learn in channels-last layout.

    In PyTorch's CPU build the weight gradient of a 1x1 convolution with a stride writes past its memory there when it
    has 2 to 6 inputs (oneDNN; seen in 2.13), which pruning brings about. SPLoRA's backward pass does not use it.
    """
    return method == "splora" or not any(
        isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and max(module.stride) > 1
        and module.in_channels < 8
        for module in net.modules()
    )


@torch.no_grad()
def settle_(net: nn.Module, channels_last: bool) -> None:
    """Give every parameter and buffer memory of its own in one layout.

    Kernels choose their order of summation by strides and alignment. A network that was just pruned and the same one
    read from a checkpoint have equal values in different memory; after this they compute the same bits.
    """
    seen: set[int] = set()
    for tensor in _all_tensors(net):
        if id(tensor) in seen or tensor.is_meta or not _is_alone(tensor):
            continue
        seen.add(id(tensor))
        wide = channels_last and tensor.dim() == 4
        layout = torch.channels_last if wide else torch.contiguous_format
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=layout)
        tensor.data = fresh.copy_(tensor)


def _all_tensors(net: nn.Module) -> Iterable[Tensor]:
    yield from net.parameters()
    yield from net.buffers()


def _is_alone(tensor: Tensor) -> bool:
    """False for views and expanded tensors, which have to stay in the memory that they share."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
