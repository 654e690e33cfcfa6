"""Batches as loaders give them: inputs for the network, and what a loss wants beside its output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from spalier.errors import ScoreError

Batches = Iterable[Any]


class Batch:
    """One batch: ``(inputs, *targets)``, a dict of keyword arguments, or inputs alone."""

    def __init__(self, number: int, given: Any) -> None:
        self.number = number
        self.targets: tuple[Any, ...] = ()
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(given, Mapping):
            self.kwargs = dict(given)
        elif isinstance(given, tuple | list) and given:
            inputs, self.targets = given[0], tuple(given[1:])
            if isinstance(inputs, Mapping):
                self.kwargs = dict(inputs)
            else:
                self.args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        elif isinstance(given, Tensor):
            self.args = (given,)
        else:
            raise ScoreError(
                f"batch {number} is a {type(given).__name__}, expected (inputs, targets), a dict of keyword arguments, "
                "or a tensor"
            )

    def to(self, net: nn.Module) -> Batch:
        """The batch where the network is, as tensors that can be differentiated through."""
        self.args, self.kwargs, self.targets = tree_map_only(
            Tensor, lambda t: t.clone() if t.is_inference() else t, (self.args, self.kwargs, self.targets)
        )
        first = next((t for t in (*net.parameters(), *net.buffers())), None)
        if first is not None and first.device.type != "cpu":
            device = first.device
            self.args, self.kwargs, self.targets = tree_map_only(
                Tensor, lambda t: t.to(device), (self.args, self.kwargs, self.targets)
            )
        return self

    @property
    def size(self) -> int:
        """How many samples it holds."""
        tensors = [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor) and t.dim()]
        if not tensors or not len(tensors[0]):
            raise ScoreError(
                f"batch {self.number} holds no samples; expected them along the first axis of its first tensor"
            )
        return len(tensors[0])

    def run(self, net: nn.Module) -> Any:
        """What the network returns for it."""
        try:
            return net(*self.args, **self.kwargs)
        except (TypeError, RuntimeError, ValueError, IndexError) as error:
            raise ScoreError(
                f"the network does not run on batch {self.number}: {error}; expected (inputs, targets) or a dict of "
                "keyword arguments"
            ) from error


def batches_of(given: Batches | None, net: nn.Module, what: str) -> Iterator[Batch]:
    """Every batch of a loader; none at all is an error."""
    if given is None or isinstance(given, Tensor | Mapping | str):
        found = "none were given" if given is None else f"a {type(given).__name__} was given"
        raise ScoreError(
            f"{what} needs batches, and {found}; expected an iterable of (inputs, targets), such as a DataLoader, or a "
            "list of one batch"
        )
    number = -1
    for number, each in enumerate(given):
        yield Batch(number, each).to(net)
    if number < 0:
        raise ScoreError(f"{what} needs batches, and there are none; expected at least one (inputs, targets)")


def loss_of(loss: Any, output: Any, batch: Batch, net: nn.Module) -> Tensor:
    """The loss of one batch, a finite number that depends on the network."""
    if loss is None:
        value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if value is None:
            raise ScoreError(
                f"the network returns a {type(output).__name__} without a loss; pass loss=, a function of the output "
                "and the batch's targets, such as torch.nn.functional.cross_entropy"
            )
    else:
        try:
            value = loss(output, *batch.targets)
        except (TypeError, RuntimeError, ValueError, IndexError) as error:
            raise ScoreError(
                f"the loss fails on batch {batch.number}: {error}; it is called with the network's output and the "
                f"{len(batch.targets)} target(s) of the batch"
            ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise ScoreError(
            f"the loss is a {type(value).__name__}{shape}, expected one number, the batch's mean"
        )
    if not torch.isfinite(value):
        raise ScoreError(
            f"the loss of batch {batch.number} is {float(value.detach())}{_first_not_finite(net, batch)}; look at its "
            "inputs and targets, or go back to sound weights"
        )
    if not value.requires_grad:
        raise ScoreError(
            "the loss does not depend on the network: no channel of a stream has a part in it; compute it from the "
            "network's output, without detach() or torch.no_grad()"
        )
    return value


def _first_not_finite(net: nn.Module, batch: Batch) -> str:
    """Where NaN or infinity begins."""
    found: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensors = (t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point())
            if any(not torch.isfinite(t).all() for t in tensors):
                found.append(name)

        return hook

    given = (t for t in tree_leaves((batch.args, batch.kwargs)) if isinstance(t, Tensor))
    if any(t.is_floating_point() and not torch.isfinite(t).all() for t in given):
        return ", its inputs are not finite"
    handles = [m.register_forward_hook(note(n)) for n, m in net.named_modules() if n]
    try:
        batch.run(net)
    finally:
        for handle in handles:
            handle.remove()
    return f", first not finite at {found[0]!r}" if found else ""
