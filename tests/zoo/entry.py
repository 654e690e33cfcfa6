"""What an entry of the zoo is, and the values that its network and its example are given."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Entry:
    """A network and what it is called with; both are the same at each call, whatever was drawn before."""

    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], Any]


def arguments(example: Any, dtype: torch.dtype = torch.float32) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that an example stands for, floating ones in ``dtype``."""

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    if isinstance(example, dict):
        return (), {key: cast(value) for key, value in example.items()}
    values = example if isinstance(example, tuple) else (example,)
    return tuple(cast(value) for value in values), {}


@torch.no_grad()
def randomise_(net: nn.Module, gain: float = 1.3) -> nn.Module:
    """Give every parameter and statistic a value that matters.

    Fresh networks are full of ones, zeros and layer scales of 1e-6, under which a channel that was cut wrongly
    changes nothing that a test could see.
    """
    for name, parameter in net.named_parameters():
        _refill_(name.rpartition(".")[2], parameter, gain)
    for name, buffer in net.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.1)
        elif name.endswith("running_var"):
            buffer.uniform_(0.6, 1.4)
    return net


@torch.no_grad()
def settle_(net: nn.Module, example: Any) -> nn.Module:
    """Give norms and biases values that suit the example, roughly, as training would.

    With any others, signals grow or fade from layer to layer, and rectifiers shut for good. What the forward pass
    left behind, such as LeViT's table of biases, is dropped by the switch between the modes.
    """
    hooks = []
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            hooks.append(module.register_forward_pre_hook(_observe_))
        elif isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and module.bias is not None:
            hooks.append(module.register_forward_hook(_centre_))
    args, kwargs = arguments(example)
    net(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return net.train().eval()


def _observe_(norm: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """A channel's own mean, and its variance, halfway to that of all: the channels stay unlike each other."""
    channels = inputs[0].transpose(0, 1).flatten(1)
    norm.running_mean.mul_(0.5).add_(channels.mean(1))
    variance = channels.var(1, correction=0)
    norm.running_var.mul_((variance + variance.mean()) / 2)


def _centre_(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """A channel's mean becomes the size its bias had: above zero, so that no rectifier stops all of it."""
    axis = output.ndim - 1 if isinstance(layer, nn.Linear) else 1
    shift = layer.bias.abs() - output.transpose(0, axis).flatten(1).mean(1)
    layer.bias.add_(shift)
    return output + shift.view(-1, *[1] * (output.ndim - 1 - axis))


def _refill_(name: str, parameter: torch.Tensor, gain: float) -> None:
    """Weights keep the scale of what passes through them; the rest depends on what it was set to."""
    first = parameter.flatten()[0].item()
    constant = bool((parameter == first).all())
    if parameter.ndim > 1 and "weight" in name:
        parameter.normal_(0, gain / math.sqrt(parameter[0].numel()))
    elif "bias" in name:
        parameter.uniform_(-0.2, 0.4)  # more often above zero: fewer rectifiers that never open
    elif constant and abs(first) > 0.1:  # the scale of a norm, a temperature
        parameter.uniform_(0.7, 1.3).mul_(first)
    elif constant and first != 0:  # a layer scale
        parameter.uniform_(0.3, 0.7)
    else:  # tokens, positions, gates that start shut
        parameter.normal_(0, 0.4)


def _made(build: Callable[[], nn.Module], draw: Callable[[], Any], gain: float = 1.3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return settle_(randomise_(build(), gain).eval(), _drawn(draw))


def _drawn(draw: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return draw()


def make_entry(name: str, build: Callable[[], nn.Module], draw: Callable[[], Any], gain: float = 1.3) -> Entry:
    return Entry(name, partial(_made, build, draw, gain), partial(_drawn, draw))


def noise(*shape: int) -> Callable[[], torch.Tensor]:
    return partial(torch.randn, *shape)


def image(size: int) -> Callable[[], torch.Tensor]:
    return noise(2, 3, size, size)
