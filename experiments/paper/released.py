"""What the published code trained: masks that are applied once, at a prune, and then released.

The network never shrinks. At a prune the weights of the chosen filters are set to zero, adapters and norms are left as
they are, and training goes on for all of them, so filters that count as pruned are alive again after the first step.
Rows tell both accuracies: that of the network as it is, and that of the network once the filters that count as pruned
are really gone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from spalier.adapters.attach import fuse
from spalier.criteria.score import Scores
from spalier.pruning.plan import Plan
from spalier.runs import Engine


class Released(Engine):
    """A run whose masks do not hold. It goes on from the end of its first block whenever it was killed."""

    gone: dict[str, np.ndarray[Any, np.dtype[np.bool_]]]
    """By layer: the filters that count as pruned."""

    def select_plan(self, scores: Scores, target: float) -> Plan:
        """Filters that count as pruned stay so, however high they score now."""
        for parts in scores.layers.values():
            for layer, values in parts.items():
                if layer in self._gone():
                    values[self.gone[layer]] = 0.0
        return super().select_plan(scores, target)

    def _gone(self) -> dict[str, np.ndarray[Any, np.dtype[np.bool_]]]:
        if not hasattr(self, "gone"):
            self.gone = {}
        return self.gone

    @torch.no_grad()
    def prune(self) -> None:
        """Set the filters to zero, once."""
        assert self.plan is not None
        structure = self.plan.structure
        for site in structure.sites:
            stream = structure.streams[site.stream]
            kept = self.plan.keep.get(site.writer, self.plan.keep.get(stream.name))
            if kept is None:
                continue
            mask = np.ones(stream.size, bool)
            mask[list(kept)] = False
            self._gone()[site.writer] = mask
            weight = self.net.get_submodule(site.writer).weight
            assert isinstance(weight, torch.Tensor)
            weight[torch.from_numpy(mask)] = 0.0
        self.begin_block()
        self.position = self.position.replace(phase="train")

    def save(self) -> None:
        """Nothing: a task's file cannot tell which weights of the base were set to zero."""
        if self.position.block == 0:
            super().save()

    def make_row(self) -> dict[str, Any]:
        """A row with what is alive of what counts as pruned."""
        row = super().make_row()
        if not self._gone() or self.data.test is None:
            return row
        plain = fuse(self.net).eval()
        alive = sum(_is_alive(plain, layer, mask) for layer, mask in self.gone.items())
        self._remove_(plain)
        removed = self.evaluate(plain, self.data.test).accuracy
        pruned = sum(int(mask.sum()) for mask in self.gone.values())
        return {**row, "pruned": pruned, "alive": alive, "test_removed": removed}

    @torch.no_grad()
    def _remove_(self, plain: nn.Module) -> None:
        """Silence the norms behind the filters that count as pruned."""
        assert self.plan is not None
        for site in self.plan.structure.sites:
            if site.writer in self.gone:
                assert site.norm is not None
                mask = torch.from_numpy(self.gone[site.writer])
                norm = plain.get_submodule(site.norm)
                norm.weight[mask] = 0.0  # type: ignore[operator]
                norm.bias[mask] = 0.0  # type: ignore[operator]


def _is_alive(plain: nn.Module, layer: str, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
    """How many filters that count as pruned have weights."""
    weight = plain.get_submodule(layer).weight
    assert isinstance(weight, torch.Tensor)
    return int((weight.detach()[torch.from_numpy(mask)].flatten(1) != 0).any(1).sum())
