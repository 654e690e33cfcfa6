"""The parts of a training step: losses, learning rates, the optimizer, averages, and the memory that values lie in."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from spalier.adapters.geometry import is_norm
from spalier.data import Split
from spalier.errors import RunError
from spalier.networks import logits_of
from spalier.runs.settings import Settings

Tensors = dict[str, Tensor]


# losses


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The cross entropy, summed over the batch."""
    return F.cross_entropy(logits.float(), labels, label_smoothing=label_smoothing, reduction="sum")


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """How far a network is from its teacher: T² KL(teacher ‖ network) at temperature T, summed over the batch.

    >>> x = torch.tensor([[1.0, 2.0]])
    >>> distillation(x, x, 2.0).item()
    0.0
    """
    own = F.log_softmax(logits.float() / temperature, dim=1)
    wanted = F.log_softmax(teacher.float() / temperature, dim=1)
    return temperature**2 * F.kl_div(own, wanted, log_target=True, reduction="sum")


def training_loss(config: Settings, logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
    """The loss of the labels, of the teacher's logits, or both weighted; summed over the batch."""
    if teacher is None:
        return cross_entropy(logits, labels, config.label_smoothing)
    taught = distillation(logits, teacher, config.temperature)
    if not config.labels or config.distill_weight == 1:  # then labels may be missing
        return taught
    labelled = cross_entropy(logits, labels, config.label_smoothing)
    return (1 - config.distill_weight) * labelled + config.distill_weight * taught


def mean_loss(output: Any, labels: Tensor) -> Tensor:
    """The mean cross entropy of a batch, as criteria take it."""
    return cross_entropy(logits_of(output), labels) / len(labels)


# learning rates


def lr_factor(
    kind: Literal["step", "cosine", "constant"], step: int, steps: int, warmup: float = 0.0
) -> float:
    """What the learning rate is multiplied by at one step of a block; it rises to 1 over ``warmup`` steps first.

    >>> [round(lr_factor("step", i, 8), 3) for i in range(8)]
    [1.0, 1.0, 0.2, 0.2, 0.04, 0.04, 0.008, 0.008]
    >>> [round(lr_factor("cosine", i, 4, warmup=2), 3) for i in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup:
        return min(1.0, (step + 1) / warmup)
    progress = (step - warmup) / max(steps - warmup, 1)
    if kind == "step":
        return float(0.2 ** int(4 * progress + 1e-9))
    return 0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1.0


# the optimizer, and what it updates


def learned_parameters(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are learned, by name."""
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def make_optimizer(config: Settings, net: nn.Module) -> Optimizer:
    """SGD or AdamW in two groups: what decays, and norms and biases where these do not."""
    parameters = learned_parameters(net)
    spared = set() if config.weight_decay_norms else _norms_and_biases(net)
    groups: list[dict[str, Any]] = [
        {
            "params": [p for n, p in parameters.items() if n not in spared],
            "weight_decay": config.weight_decay,
        },
        {"params": [p for n, p in parameters.items() if n in spared], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return SGD(groups, lr=config.initial_lr, momentum=config.momentum)
    return AdamW(groups, lr=config.initial_lr)


def _norms_and_biases(net: nn.Module) -> set[str]:
    norms = {
        f"{path}.{name}" if path else name
        for path, module in net.named_modules()
        if is_norm(module)
        for name, _ in module.named_parameters(recurse=False)
    }
    return norms | {name for name in learned_parameters(net) if name.endswith("bias")}


def set_lr_(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_state(optimizer: Optimizer, net: nn.Module) -> Tensors:
    """An optimizer's state by the names of parameters. SGD and AdamW have nothing but tensors in it."""
    found: Tensors = {}
    for name, parameter in learned_parameters(net).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                found[f"{key}/{name}"] = torch.as_tensor(value).detach()
    return found


def restore_optimizer_(optimizer: Optimizer, net: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put an optimizer's state back."""
    parameters = learned_parameters(net)
    for place, value in state.items():
        key, _, name = place.partition("/")
        if name not in parameters:
            raise RunError(
                "checkpoint", f"the checkpoint has a state of {name!r}, which the network does not learn"
            )
        parameter = parameters[name]
        device = "cpu" if key == "step" else parameter.device  # where PyTorch keeps it
        optimizer.state[parameter][key] = value.to(device).clone()


def values_of(net: nn.Module) -> Tensors:
    """A copy of what the task has of its own: learned parameters and buffers."""
    found = {name: p.detach().clone() for name, p in learned_parameters(net).items()}
    return found | {name: b.detach().clone() for name, b in net.named_buffers()}


@torch.no_grad()
def set_values_(net: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put such a copy back."""
    own = dict(net.named_parameters()) | dict(net.named_buffers())
    for name, value in values.items():
        if name not in own or own[name].shape != value.shape:
            raise RunError("checkpoint", f"the checkpoint's {name!r} does not fit the network")
        own[name].copy_(value)


def digest(net: nn.Module) -> str:
    """One number for all values of the base."""
    found = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):  # extra state of a module's own
            found.update(f"{name} {tensor!r}\n".encode())
            continue
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Average:
    """An exponential moving average of what is learned, statistics of norms included."""

    def __init__(self, net: nn.Module, decay: float, values: Mapping[str, Tensor] | None = None) -> None:
        self.decay = decay
        self.values = dict(values) if values else values_of(net)

    @torch.no_grad()
    def update_(self, net: nn.Module) -> None:
        """Move a little towards the network's values; integers, which count batches, are taken as they are."""
        own: Tensors = dict(learned_parameters(net)) | dict(net.named_buffers())
        moving = [name for name, value in self.values.items() if value.is_floating_point()]
        torch._foreach_lerp_(
            [self.values[n] for n in moving], [own[n].detach() for n in moving], 1 - self.decay
        )
        for name in self.values.keys() - set(moving):
            self.values[name].copy_(own[name])


# memory


@torch.no_grad()
def set_memory_format_(net: nn.Module, channels_last: bool) -> None:
    """Give every parameter and buffer fresh memory of its own in one layout.

    Kernels choose their order of summation by strides and alignment. A network that was just pruned and the same one
    read from a checkpoint have equal values in different memory; after this they compute the same bits.
    """
    seen: set[int] = set()
    for tensor in (*net.parameters(), *net.buffers()):
        # views and expanded tensors have to stay in the memory that they share
        is_alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if id(tensor) in seen or tensor.is_meta or not is_alone:
            continue
        seen.add(id(tensor))
        wide = channels_last and tensor.dim() == 4
        layout = torch.channels_last if wide else torch.contiguous_format
        fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=layout)
        tensor.data = fresh.copy_(tensor)


# samples


class Samples:
    """Batches of some training samples, not augmented, to score and recover on.

    They are made anew each time, so that no more than one batch is in memory. Without labels the teacher's guesses are
    taken for them.
    """

    def __init__(
        self,
        split: Split,
        indices: np.ndarray[Any, Any],
        batch_size: int,
        to_device: Callable[[Tensor], Tensor],
        teacher: nn.Module | None,
    ) -> None:
        self.split, self.indices, self.batch_size = split, indices, batch_size
        self.to_device, self.teacher = to_device, teacher

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.indices), self.batch_size):
            images, labels = self.split.fetch(self.indices[start : start + self.batch_size], None)
            images = self.to_device(images)
            if self.teacher is not None:
                labels = logits_of(self.teacher(images)).argmax(1)
            yield images, labels.to(images.device)
