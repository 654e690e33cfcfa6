"""Count what a network holds, learns and computes: by module and in total, in our accounting and the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spalier._table import table
from spalier.adapters.forward import divert_, undivert_, updates
from spalier.errors import ConfigError, ExampleError


@dataclass(frozen=True)
class ModuleCount:
    """The counts of one module, without those of the modules inside of it."""

    name: str
    kind: str
    parameters: int
    learned: int
    bytes: int
    macs: int | None
    flops_paper: int | None


@dataclass(frozen=True)
class Count:
    """What a network holds, learns and computes; prints as a table.

    For an adapted network ``parameters``, ``bytes`` and ``macs`` are those of the fused network, which is what will
    be stored and run; ``learned`` is what a task adds.
    """

    modules: tuple[ModuleCount, ...]
    samples: int | None
    """How many samples the example held; ``macs`` and ``flops_paper`` are for one."""

    @property
    def parameters(self) -> int:
        """Parameters of the network with its adapters fused away."""
        return sum(m.parameters for m in self.modules)

    @property
    def learned(self) -> int:
        """Parameters that require gradients: adapters, norms and head in an adapted network."""
        return sum(m.learned for m in self.modules)

    @property
    def bytes(self) -> int:
        """Bytes of parameters and buffers of the network with its adapters fused away."""
        return sum(m.bytes for m in self.modules)

    @property
    def macs(self) -> int | None:
        """Multiply-accumulates of one sample, attention's included; None without an example."""
        return None if self.samples is None else sum(m.macs or 0 for m in self.modules)

    @property
    def flops_paper(self) -> int | None:
        """The paper's "FLOPs" of one sample: MACs plus two for each element that leaves a batch norm."""
        return None if self.samples is None else sum(m.flops_paper or 0 for m in self.modules)

    def by_module(self) -> dict[str, ModuleCount]:
        """The counts by module name; ``""`` is the network itself."""
        return {m.name: m for m in self.modules}

    def __str__(self) -> str:
        header = ["module", "kind", "parameters", "learned", "bytes", "MACs", "FLOPs (paper's)"]
        rows = [_cells(m) for m in self.modules]
        total = [f"{self.parameters:,}", f"{self.learned:,}", f"{self.bytes:,}"]
        computed = [_number(self.macs), _number(self.flops_paper)]
        return table(header, [*rows, ["total", "", *total, *computed]])


def count(net: nn.Module, example: Any = None, *, samples: int | None = None) -> Count:
    """Count a network; with an example input, what it computes too.

    Args:
        net: a network, adapted or not; it is run once in eval mode, without gradients, and left as it was.
        example: a tensor, a tuple of positional or a dict of keyword arguments. On the meta device, if the network is.
        samples: how many samples the example holds, by default the first axis of its first tensor.

    >>> from spalier import models
    >>> found = count(models.resnet18(classes=10, stem="cifar"), torch.randn(1, 3, 32, 32))
    >>> found.parameters, found.macs, found.flops_paper
    (11173962, 555422720, 556651520)
    """
    if not isinstance(net, nn.Module):
        raise ConfigError(f"net is a {type(net).__name__}, expected a torch.nn.Module")
    if example is None:
        return Count(_static(net, {}, {}, None), None)
    args, kwargs = _arguments(example)
    samples = _samples(args, kwargs) if samples is None else samples
    if not isinstance(samples, int) or samples < 1:
        raise ExampleError(f"samples is {samples!r}, expected an integer of at least 1")
    macs, normed = _computed(net, args, kwargs)
    return Count(_static(net, macs, normed, samples), samples)


def _static(
    net: nn.Module, macs: dict[nn.Module, int], normed: dict[nn.Module, int], samples: int | None
) -> tuple[ModuleCount, ...]:
    counted: set[int] = set()
    inside = {m for layer in net.modules() for u in updates(layer).values() for m in u.modules()}
    rows = []
    for name, module in net.named_modules():
        if module in inside:
            continue
        own = _uncounted(counted, [*module.parameters(recurse=False), *module.buffers(recurse=False)])
        parameters = [t for t in own if isinstance(t, nn.Parameter)]
        learned = [p for u in updates(module).values() for p in _uncounted(counted, list(u.parameters()))]
        learned = [p for p in (*learned, *parameters) if p.requires_grad]
        if own or learned or module in macs or module in normed:
            ran = None if samples is None else _per_sample(macs.get(module, 0), samples)
            paper = None if ran is None else ran + 2 * _per_sample(normed.get(module, 0), samples or 1)
            rows.append(
                ModuleCount(
                    name,
                    type(module).__name__,
                    sum(p.numel() for p in parameters),
                    sum(p.numel() for p in learned),
                    sum(t.numel() * t.element_size() for t in own),
                    ran,
                    paper,
                )
            )
    return tuple(rows)


def _uncounted(counted: set[int], tensors: list[Tensor]) -> list[Tensor]:
    """Tied tensors count once."""
    fresh = [t for t in tensors if id(t) not in counted]
    counted.update(map(id, fresh))
    return fresh


def _computed(
    net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[nn.Module, int], dict[nn.Module, int]]:
    """MACs, and elements that leave a batch norm, by the innermost module that computes them."""
    from torch.utils.flop_counter import FlopCounterMode

    macs: dict[nn.Module, int] = {}
    normed: dict[nn.Module, int] = {}
    with _as_plain(net), FlopCounterMode(display=False, custom_mapping=_attention()) as counter:
        stack = [0]  # operations counted inside of each open call's children

        def enter(module: nn.Module, _: Any) -> None:
            stack.append(counter.get_total_flops())

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            total = counter.get_total_flops() - stack.pop()
            inner = spent.pop(module, 0)
            macs[module] = macs.get(module, 0) + (total - inner) // 2
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                normed[module] = normed.get(module, 0) + output.numel()
            _ = inner

        spent: dict[nn.Module, int] = {}
        hooks = [h for m in net.modules() for h in (m.register_forward_pre_hook(enter), m.register_forward_hook(leave))]
        try:
            net(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
    return macs, normed
