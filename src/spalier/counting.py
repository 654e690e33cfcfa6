"""Count what a network holds, learns and computes: by module and in total, in our accounting and the paper's.

`count` runs the network once under PyTorch's operator-level counter, and books each operation to the innermost module
that computes it. An adapted network counts as its fused one: its base's shapes are what will run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spalier.adapters.forward import updates
from spalier.errors import ExampleError
from spalier.structure.graph import arguments, as_base, computes_weights, hooked
from spalier.text import InNotebooks, table

ByModule = dict[nn.Module, int]


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
class Count(InNotebooks):
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
        """Multiply-accumulates of one sample, attention's included; None without an example.

        What parametrizations compute of weights alone is no sample's, and is left out.
        """
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
        total = ModuleCount("total", "", self.parameters, self.learned, self.bytes, self.macs, self.flops_paper)
        return table(header, [_cells(m) for m in (*self.modules, total)])


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
    if example is None:
        return Count(_by_module(net, {}, {}, None), None)
    args, kwargs = arguments(example)
    samples = _samples(args, kwargs) if samples is None else samples
    if samples < 1:
        raise ExampleError(f"samples is {samples!r}, expected an integer of at least 1")
    macs, normed = _computed(net, args, kwargs)
    return Count(_by_module(net, macs, normed, samples), samples)


def print_trainable_parameters(net: nn.Module) -> None:
    """One line, in the words that users of PEFT know: what learns, and out of how much.

    >>> print_trainable_parameters(nn.Linear(4, 2).requires_grad_(False))
    trainable params: 0 || all params: 10 || trainable%: 0.00
    """
    found = count(net)
    share = 100 * found.learned / max(found.parameters, 1)
    print(f"trainable params: {found.learned:,} || all params: {found.parameters:,} || trainable%: {share:.2f}")


def _by_module(net: nn.Module, macs: ByModule, normed: ByModule, samples: int | None) -> tuple[ModuleCount, ...]:
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
        if own or learned or macs.get(module) or normed.get(module):  # containers are not listed
            spent = 0 if computes_weights(name) else macs.get(module, 0)
            ran = None if samples is None else _per_sample(spent, samples)
            paper = None if ran is None else ran + 2 * _per_sample(normed.get(module, 0), samples or 1)
            held, learning = (sum(p.numel() for p in some) for some in (parameters, learned))
            size = sum(t.numel() * t.element_size() for t in own)
            rows.append(ModuleCount(name, type(module).__name__, held, learning, size, ran, paper))
    return tuple(rows)


def _uncounted(counted: set[int], tensors: list[Tensor]) -> list[Tensor]:
    """Tied tensors count once."""
    fresh = [t for t in tensors if id(t) not in counted]
    counted.update(map(id, fresh))
    return fresh


def _computed(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ByModule, ByModule]:
    """MACs, and elements that leave a batch norm, by the innermost module that computes them."""
    from torch.utils.flop_counter import FlopCounterMode

    macs: ByModule = {}
    normed: ByModule = {}
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    narrow = _Narrow()
    with _countable(net), narrow, counter:
        # of each open call: the operations before it, and those that its inner calls have booked
        calls: list[tuple[int, int]] = [(0, 0)]

        def total() -> int:
            return counter.get_total_flops() + 2 * narrow.macs

        def enter(module: nn.Module, _: Any) -> None:
            calls.append((total(), 0))

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            before, inner = calls.pop()
            spent = total() - before
            macs[module] = macs.get(module, 0) + (spent - inner) // 2  # two operations for each
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                normed[module] = normed.get(module, 0) + output.numel()
            start, others = calls.pop()
            calls.append((start, others + spent))

        hooks = [m.register_forward_pre_hook(enter) for m in net.modules()]
        hooks += [m.register_forward_hook(leave) for m in net.modules()]
        try:
            with hooked(hooks):
                net(*args, **kwargs)
        except Exception as error:  # whatever the network raises, the example does not fit it
            raise ExampleError(
                f"the example does not run through the network ({type(error).__name__}: {error}); expected a tensor, "
                "a tuple of positional or a dict of keyword arguments that net(...) takes, on its device"
            ) from error
    return macs, normed


class _Narrow(TorchFunctionMode):
    """Counts products over axes of one entry, as of heads of size 1: `torch.einsum` multiplies there, unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.einsum and len(args) == 3 and "." not in args[0]:
            inputs, _, out = args[0].replace(" ", "").partition("->")
            axes = inputs.split(",")
            sizes: dict[str, int] = {}
            for letter, size in zip("".join(axes), (*args[1].shape, *args[2].shape), strict=True):
                sizes[letter] = max(size, sizes.get(letter, 1))
            shared = (set(axes[0]) & set(axes[1])) - set(out)
            if shared and all(sizes[letter] == 1 for letter in shared):
                self.macs += math.prod(sizes.values())
        return func(*args, **(kwargs or {}))


@contextmanager
def _countable(net: nn.Module) -> Iterator[None]:
    """The base in eval mode, where every operation can be seen; afterwards all is as before."""
    learning = [p for p in net.parameters() if p.requires_grad]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    for parameter in learning:  # PyTorch's counter stumbles over a module that is given one that learns
        parameter.requires_grad_(False)
    torch.backends.mha.set_fastpath_enabled(False)  # it computes a whole encoder layer as one operation
    try:
        with as_base(net), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for parameter in learning:
            parameter.requires_grad_(True)


def _formulas() -> dict[Any, Any]:
    """Operations that PyTorch's counter leaves out on CPUs, in its unit: two for each multiply-accumulate."""
    aten = torch.ops.aten
    # shapes of the arguments come in
    return {
        aten._trilinear: lambda x, w, y, *_, **__: 2 * x[0] * w[0 if len(w) == 3 else 1] * (x[-1] + 1) * y[-1],
        aten.addbmm: lambda _, a, b, *__, **___: 2 * math.prod(a) * b[-1],
        aten.mkldnn_rnn_layer: lambda x, w, h, *_, **__: 2 * math.prod(x[:2]) * (math.prod(w) + math.prod(h)),
        aten._scaled_dot_product_flash_attention_for_cpu: (
            lambda q, k, v, *_, **__: 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
        ),
        aten.mv: lambda matrix, *_, **__: 2 * math.prod(matrix),
        aten.dot: lambda vector, *_, **__: 2 * math.prod(vector),
        aten.addmv: lambda _, matrix, *__, **___: 2 * math.prod(matrix),
    }


def _samples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.dim()]
    if not tensors or not tensors[0].shape[0]:
        raise ExampleError("the example holds no tensor with samples along its first axis; pass samples=")
    return tensors[0].shape[0]


def _per_sample(total: int, samples: int) -> int:
    if total % samples:
        raise ExampleError(
            f"{total:,} operations do not divide by {samples} samples: the network mixes samples, or the first axis of "
            "the example's first tensor does not count them; pass samples="
        )
    return total // samples


def _cells(m: ModuleCount) -> list[str]:
    numbers = (m.parameters, m.learned, m.bytes, m.macs, m.flops_paper)
    return [m.name or "(itself)", m.kind, *("-" if value is None else f"{value:,}" for value in numbers)]
