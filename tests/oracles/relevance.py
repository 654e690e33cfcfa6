"""Relevance looked at from outside: slow shares, and what arrives where."""

from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from zennit.types import Convolution

from spalier.criteria.relevance import EPSILON, Relevance


def real(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def leaf(values):
    return torch.as_tensor(values, dtype=torch.float64).clone().requires_grad_()


def shared_out(run, *leaves, relevance=None):
    """What was sent, and the relevance of each leaf; the values have to be those of a plain run."""
    plain = run(*[x.detach().clone() for x in leaves])
    with Relevance():
        out = run(*leaves)
    torch.testing.assert_close(out.detach(), plain, rtol=1e-12, atol=1e-12)
    sent = torch.rand(out.shape, dtype=torch.float64) if relevance is None else leaf(relevance).detach()
    out.backward(sent)
    return sent, *[x.grad for x in leaves]


def assert_conserved(run, *leaves, rtol=1e-4):
    sent, *got = shared_out(run, *leaves)
    torch.testing.assert_close(sum(r.sum() for r in got if r is not None), sent.sum(), rtol=rtol, atol=0)
    return got


def relevance_at(net, x, sent=None, context=None, names=None):
    """The relevance at the outputs of modules, all convolutions unless named, and at the input."""
    seen = {}

    def tap(name):
        def hook(module, args, output):
            output.register_hook(lambda r: seen.__setitem__(name, r.clone()))

        return hook

    chosen = {n: m for n, m in net.named_modules() if (n in names if names else isinstance(m, Convolution))}
    handles = [module.register_forward_hook(tap(name)) for name, module in chosen.items()]
    x = x.detach().clone().requires_grad_()
    with context or nullcontext():  # zennit's rules are gone when its context is
        with nullcontext() if context else Relevance():
            out = net(x)
        logits = out.detach()
        out.backward(F.one_hot(logits.argmax(1), logits.shape[1]).to(x) if sent is None else sent)
    for handle in handles:
        handle.remove()
    return {**seen, "input": x.grad}, logits


def stable(z):
    return torch.where(z < 0, z - EPSILON, z + EPSILON)


def by_contribution(contributions, z, relevance):
    """Each input's share of each output, added up: contributions are (inputs, outputs)."""
    return (contributions * (relevance / stable(z))).sum(1)


def matrix_of(linear, shape):
    """What a linear map does to each unit vector, one at a time: (inputs, outputs)."""
    size = int(np.prod(shape))
    return torch.stack([linear(unit.view(1, *shape)).flatten() for unit in torch.eye(size).double()])


def slow_convolution(linear, x, relevance):
    """Alpha 1, beta 0, from the full matrix, sample by sample."""
    matrix = matrix_of(linear, x.shape[1:])
    rows = []
    for sample, above in zip(x, relevance, strict=True):
        positive = (sample.flatten()[:, None] * matrix).clamp(min=0)
        rows.append(by_contribution(positive, positive.sum(0), above.flatten()).view(sample.shape))
    return torch.stack(rows)
