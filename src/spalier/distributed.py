"""Several processes: scores of all samples on every rank, and plans that are the same everywhere."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spalier.errors import PlanError

Key = TypeVar("Key", bound=Hashable)


def is_distributed() -> bool:
    """True in a process group of more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def summed_over_ranks(means: dict[Key, Tensor], samples: int) -> tuple[dict[Key, Tensor], int]:
    """Means over each rank's samples as means over all samples."""
    if not is_distributed():
        return means, samples
    flat = torch.cat([value.detach().double().cpu().flatten() * samples for value in means.values()])
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    everything = torch.cat([flat, torch.tensor([float(samples)], dtype=torch.float64)]).to(device)
    dist.all_reduce(everything)
    everything = everything.cpu()
    total = int(everything[-1])
    parts = (everything[:-1] / total).split([value.numel() for value in means.values()])
    return {k: p.view_as(v) for (k, v), p in zip(means.items(), parts, strict=True)}, total


def assert_same_on_every_rank(what: str, value: Any) -> None:
    """Refuse to go on where ranks disagree."""
    if is_distributed():
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, value)
        different = [rank for rank, each in enumerate(gathered) if each != gathered[0]]
        if different:
            raise PlanError(
                f"{what} of rank {different[0]} differs from rank 0's; every rank needs the same network, scores and "
                "options, and the same seed for random scores"
            )


def from_first_rank(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on every rank; the others wait."""
    if not is_distributed():
        return make()
    held = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def wait_for_all() -> None:
    """Go on when every rank is here."""
    if is_distributed():
        dist.barrier()


def broadcast_(tensors: list[Tensor]) -> None:
    """Give every rank the values of rank 0."""
    if is_distributed():
        for tensor in tensors:
            dist.broadcast(tensor.data, src=0)
