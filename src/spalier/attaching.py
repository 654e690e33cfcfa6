"""`attach_` as users call it: with an example it finds the structure too, and the network remembers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from spalier.adapters.attach import attach_ as attach_adapter_
from spalier.adapters.attachment import attachment_of
from spalier.adapters.config import Adapter
from spalier.adapters.finetune import FineTune
from spalier.adapters.selection import Targets
from spalier.adapters.summary import Summary


def attach_(
    net: nn.Module,
    adapter: Adapter | FineTune,
    *,
    example: Any = None,
    targets: Targets = None,
    head: str | Sequence[str] | None = None,
    norms: bool = True,
) -> Summary:
    """Freeze ``net`` and put an adapter on its layers, in place.

    Module names, classes and the keys of the base weights stay. The adapters, the norms and the head learn,
    nothing else; the returned summary prints what learns. The base tensors are neither copied nor changed,
    however long the network trains: norms and head learn in copies, and `detach_` gives the very network back.
    Make the optimizer after this call, from the parameters that require gradients.

    Args:
        net: any network; a layer of an unsupported kind stays frozen and is listed in the summary.
        adapter: `SPLoRA`, `SPPaRA`, `LoRA` or `FineTune`.
        example: an input for it, as for `trace`. The network then remembers its structure, and `score` and `select`
            need nothing but the network.
        targets: what to adapt; by default all that can be. A name or glob pattern of module names, or several,
            each meaning all inside of it too; or a predicate of name and module.
        head: the classifier, learned in full instead of adapted; a name or pattern like ``targets``.
        norms: whether normalisation layers learn (their running statistics are the task's own).

    >>> from spalier import SPLoRA
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
    >>> print(attach_(net, SPLoRA(rank=2), head="3"))
    layer  kind         parameters  rank  learned  learns
    0      Conv2d              224     2       22  adapter
    1      BatchNorm2d          16     -       16  norm
    3      Linear               18     -       18  head
    learned: 56 of 258 parameters (21.7%)
    """
    structure = None
    if example is not None and isinstance(net, nn.Module):
        from spalier.tracing import trace  # what only pruning needs is imported when it is asked for

        structure = trace(net, example)
    summary = attach_adapter_(net, adapter, targets=targets, head=head, norms=norms)
    attachment_of(net).structure = structure
    return summary
