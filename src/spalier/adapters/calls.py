"""Set right what a module's code gets wrong once channels are gone, while it runs.

Much attention is written as ``B, N, C = x.shape; q = self.q(x).reshape(B, N, self.num_heads, C // self.num_heads)``:
the width of the input is used as that of the queries. As long as nothing is pruned the two are one number. Pruned,
each has its own, and no value of ``C`` would be right for every line.

So the module runs under a mode that looks at its calls. A view is given the sizes that are left, and a scale the number
that it had. Which views, by how many axes they have before and after, `spalier.trace` finds out. Nothing else changes:
the module keeps its class, its code and its tensors, takes batches and pictures of any size, and can be compiled,
exported, copied and pickled.

Two other designs were weighed. A graph of the module has its example's sizes, and no dropout. An input that lies
about its width would have to tell each line another lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spalier.adapters.forward import OWN_FORWARD, is_diverted
from spalier.errors import PruneError

CALLS = "_spalier_calls"
"""The attribute of a module that holds what is set right in it."""


class Calls(NamedTuple):
    """What calls of a module's code are given instead of what it asks for."""

    views: tuple[tuple[int, int, int, int, int], ...] = ()
    """Views with so many axes before and after, that leave an axis open or none (0): an axis, and its size.

    Axes are counted from the end, from 1.
    """
    scales: tuple[tuple[int, float], ...] = ()
    """Tensors with so many axes: what they are multiplied with, or divided by."""


RESHAPES = frozenset[Any]((Tensor.reshape, Tensor.view, torch.reshape))
_NAMES = "mul mul_ multiply div div_ divide true_divide __mul__ __rmul__ __imul__ __truediv__ __itruediv__"
_FUNCTIONS = (torch.mul, torch.multiply, torch.div, torch.divide, torch.true_divide)
SCALINGS = frozenset[Any]((*_FUNCTIONS, *(getattr(Tensor, name) for name in _NAMES.split())))


class Corrected(TorchFunctionMode):
    """Gives views and scales the numbers that are right.

    >>> with Corrected(Calls(views=((2, 3, 0, 1, 3),))):  # views of two axes as three: the last one has 3 entries
    ...     torch.zeros(2, 6).view(2, 2, 4).shape
    torch.Size([2, 2, 3])
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one call."""
        if func in RESHAPES and (sizes := asked_sizes(args, kwargs)):
            return func(args[0], self.view(args[0], sizes))
        if func in SCALINGS and len(args) == 2 and isinstance(args[0], Tensor) and isinstance(args[1], float):
            args = (args[0], self.scale(args[0].dim(), args[1]))
        if func is torch._grouped_mm:
            return _grouped(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def view(self, x: Tensor, sizes: list[int]) -> tuple[int, ...]:
        """The sizes that a view gets which asks for these."""
        kind = x.dim(), len(sizes), left_open(sizes)
        asked = tuple(sizes)
        for *meant, axis, size in self.calls.views:
            if kind == tuple(meant):
                sizes[-axis] = size
        # the rule goes first, as a wrong size may fit by chance; what it does not fit is another view of that kind
        if not kind[2] and not fits(x, sizes) and fits(x, asked):
            return asked
        if not kind[2] and not torch.compiler.is_compiling() and not fits(x, sizes):
            raise PruneError(
                f"the code of a pruned module asks for a view of {tuple(x.shape)} as {tuple(sizes)}, which does not "
                "fit: on this input it takes another way than on the example; trace the network with an input like it"
            )
        return tuple(sizes)

    def scale(self, axes: int, number: float) -> float:
        """The number that a tensor with so many axes is scaled with."""
        return next((right for count, right in self.calls.scales if count == axes), number)


def _grouped(x: Tensor, weights: Tensor, **options: Any) -> Tensor:
    """A grouped product: its kernel takes rows of 16 bytes, so narrower ones are filled up with zeros."""
    step = 16 // x.element_size()
    inputs, outputs = (-n % step for n in weights.shape[-2:])
    if not inputs and not outputs:
        return torch._grouped_mm(x, weights, **options)
    wide = F.pad(weights, (0, outputs, 0, inputs))
    return torch._grouped_mm(F.pad(x, (0, inputs)), wide, **options)[..., : weights.shape[-1]].contiguous()


def asked_sizes(args: Any, kwargs: Any) -> list[int]:
    """The sizes that a view is called with; none where it asks for a dtype."""
    sizes = list(args[1:]) or list((kwargs or {}).values())
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = list(sizes[0])
    return [] if sizes and isinstance(sizes[0], torch.dtype) else sizes


def fits(x: Tensor, sizes: Sequence[int]) -> bool:
    """Whether a view of these sizes has as many entries."""
    return bool(math.prod(sizes) == x.numel())


def left_open(sizes: Sequence[Any]) -> int:
    """The axis, counted from the end, that a view leaves open by a size of -1; 0 for none.

    >>> left_open([2, -1, 8])
    2
    """
    return next((len(sizes) - place for place, n in enumerate(sizes) if isinstance(n, int) and n == -1), 0)


def run_corrected(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A module's own forward, with its calls set right."""
    with Corrected(module.__dict__[CALLS]):
        return type(module).forward(module, *args, **kwargs)


def corrected_with(module: nn.Module, calls: Calls) -> dict[str, Any]:
    """The attributes of a module whose calls are set right."""
    # with adapters on it the layer is diverted already, to a run that asks for OWN_FORWARD
    forward = {} if is_diverted(module) else {"forward": partial(run_corrected, module)}
    return {CALLS: calls, OWN_FORWARD: run_corrected, **forward}


class _Noted(Corrected):
    """Notes the views that a module makes: their kind, an axis, and its size."""

    def __init__(self, made: set[tuple[int, ...]]) -> None:
        super().__init__(Calls())
        self.made = made

    def view(self, x: Tensor, sizes: list[int]) -> tuple[int, ...]:
        shape = x.reshape(sizes).shape
        kind = x.dim(), len(sizes), left_open(sizes)
        self.made |= {(*kind, axis, shape[-axis]) for axis in range(1, len(shape) + 1)}
        return tuple(sizes)


def noting(module: nn.Module, made: set[tuple[int, ...]]) -> Callable[..., Any]:
    """A forward of a module that notes the views that it makes."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Noted(made):
            return type(module).forward(module, *args, **kwargs)

    return forward
