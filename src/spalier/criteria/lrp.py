"""Layer-wise relevance propagation as a criterion: how much of the target's output each unit explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spalier.criteria.criterion import Criterion, Normalise
from spalier.criteria.probe import Batch, Probe, Record, Values, watched
from spalier.criteria.relevance import Relevance, latest
from spalier.errors import ScoreError
from spalier.pruning.modules import fold_into_
from spalier.structure.graph import in_eval_mode


@dataclass(frozen=True)
class LRP(Criterion):
    """The absolute relevance at a unit, summed over positions, where each sample's target has relevance 1.

    Without targets the largest output is explained. ``literal=True`` leaves adapters out, as the published code mostly
    did.
    """

    normalise: ClassVar[Normalise] = "sum"
    literal: bool = False

    def measure(self, probe: Probe, batches: Any, loss: Any) -> Values:
        """A score for every unit that is left, by stream and layer."""
        twin = probe.twin(fused=not self.literal)
        fold_norms_(twin, probe)
        watches = probe.watches()
        with in_eval_mode(twin), watched(twin, watches, lambda _, r: r.abs().sum(1), values=False) as record:
            return probe.means(watches, batches, lambda batch: explain(twin, batch, record), what=self.name)


def explain(twin: nn.Module, batch: Batch, record: Record) -> list[Tensor | None]:
    """Send relevance 1 back from each sample's target; what came to each site."""
    labels = batch.kwargs.pop("labels", None)  # they are explained; the network's own loss is not asked for
    batch.targets = batch.targets or (() if labels is None else (labels,))
    record.start(batch.size)
    with Relevance():
        output = batch.run(twin)
    logits = latest(output if isinstance(output, Tensor) else _logits(output))
    if logits.dim() != 2:
        raise ScoreError(
            f"lrp explains one output of each sample; the network returns shape {tuple(logits.shape)}, expected "
            "(samples, classes)"
        )
    if not logits.requires_grad:
        raise ScoreError(
            "no relevance comes back: no channel of a stream has a part in the network's output, or it ends in a "
            "softmax; let it return logits"
        )
    logits.backward(_one_hot(logits, batch))
    values = record.take()
    if all(value is None for value in values):
        raise ScoreError(
            f"no relevance came back in batch {batch.number}: no channel of a stream has a part in the network's output"
        )
    return [torch.zeros(1, 1) if value is None else value for value in values]  # of queries, keys and gates: none


def _logits(output: Any) -> Tensor:
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise ScoreError(f"the network returns a {type(output).__name__}, expected a tensor or something with logits")
    return found


def _one_hot(logits: Tensor, batch: Batch) -> Tensor:
    targets = batch.targets[0] if batch.targets else logits.detach().argmax(1)
    ok = isinstance(targets, Tensor) and targets.shape == logits.shape[:1] and not targets.is_floating_point()
    if not ok or targets.min() < 0 or targets.max() >= logits.shape[1]:
        raise ScoreError(
            f"the targets of batch {batch.number} are not class numbers below {logits.shape[1]}, one for each sample; "
            "lrp explains the output of each sample's class"
        )
    return torch.zeros_like(logits).scatter_(1, targets[:, None].long(), 1.0)


@torch.no_grad()
def fold_norms_(twin: nn.Module, probe: Probe) -> None:
    """Fold each batch norm into the layer before it, where that layer has no other; others pass relevance on."""
    axes = {m.tensor: m.axis for stream in probe.structure.streams for m in stream.members if m.role == "writer"}
    norms: dict[str, set[str | None]] = {}
    for site in probe.structure.sites:
        norms.setdefault(site.writer, set()).add(site.norm)
    for writer, found in norms.items():
        norm = next(iter(found))
        if len(found) == 1 and norm is not None and f"{writer}.weight" in axes:
            layer, module = twin.get_submodule(writer), twin.get_submodule(norm)
            axis = axes[f"{writer}.weight"]
            variance = module.running_var if isinstance(module, nn.modules.batchnorm._BatchNorm) else None
            if variance is not None and len(variance) == layer.get_parameter("weight").shape[axis]:
                fold_into_(layer, module, axis)
