"""Scores sample by sample and channel by channel, by plain autograd on the fused network."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


def seen_at(net: nn.Module, module: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The network's output, and what a module returned on the way, as part of the graph."""
    kept = []

    def hook(layer, args, output):
        kept.append(output.clone().requires_grad_() if not output.requires_grad else output.clone())
        return kept[-1].clone()  # later code may write into it

    handle = net.get_submodule(module).register_forward_hook(hook, prepend=True)  # a gather comes later
    out = net(x)
    handle.remove()
    return out, kept[0]


def _mean_over_samples(net, module, images, labels, worth):
    """The mean of what one sample's activation and gradient, (channels, height, width), are worth."""
    total = 0
    for x, y in zip(images, labels, strict=True):
        out, value = seen_at(net, module, x[None])
        (slope,) = torch.autograd.grad(F.cross_entropy(out, y[None]), value)
        total = total + worth(value.detach()[0], slope[0])
    return total / len(images)


def taylor(net, module, images, labels):
    """|mean over positions of activation times gradient|."""
    return _mean_over_samples(net, module, images, labels, lambda a, g: (a * g).mean((1, 2)).abs())


def gradient(net, module, images, labels):
    """|mean over positions of the gradient|."""
    return _mean_over_samples(net, module, images, labels, lambda a, g: g.mean((1, 2)).abs())


def movement(net, module, images, labels):
    """What the loss gains, to first order, when a channel is taken away."""
    return _mean_over_samples(net, module, images, labels, lambda a, g: -(a * g).sum((1, 2)))


def literal_taylor(net, module, batches):
    """|sum over everything of output times gradient| at a convolution, norms in train mode, adapters at work."""
    twin = copy.deepcopy(net)
    total = samples = 0
    for x, y in batches:
        out, value = seen_at(twin.train(), module, x)
        (slope,) = torch.autograd.grad(len(x) * F.cross_entropy(out, y), value)
        total = total + (value * slope).detach().mean((2, 3)).sum(0)
        samples += len(x)
    return total.abs() / samples


def second_order(net, modules, module, images, labels):
    """|g| + |H 1| / 2 in gates of all these modules' channels, with the whole Hessian formed."""
    sizes = [net.get_submodule(m).num_features for m in modules]
    total = 0
    for x, y in zip(images, labels, strict=True):

        def loss(gates, x=x, y=y):
            parts = dict(zip(modules, gates.split(sizes), strict=True))
            handles = [
                net.get_submodule(m).register_forward_hook(
                    lambda layer, args, out, gate=gate: out * gate[None, :, None, None]
                )
                for m, gate in parts.items()
            ]
            value = F.cross_entropy(net(x[None]), y[None])
            for handle in handles:
                handle.remove()
            return value

        ones = torch.ones(sum(sizes), dtype=x.dtype)
        g = torch.autograd.functional.jacobian(loss, ones)
        h = torch.autograd.functional.hessian(loss, ones).sum(1)
        total = total + (g.abs() + h.abs() / 2)
    start = sum(sizes[: modules.index(module)])
    return (total / len(images))[start : start + sizes[modules.index(module)]]
