"""`TransferPruning`: a run, from its settings to its results."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch import nn

from spalier.data import Data
from spalier.runs.config import Settings
from spalier.runs.results import Results
from spalier.runs.run import run


@dataclass(frozen=True, kw_only=True)
class TransferPruning(Settings):
    """A run: learn a task on a frozen network, then score, select, prune and recover until the last density.

    Its settings are those of `spalier.runs.config.Settings`, all of them keywords; most have a value by recipe.

    >>> config = TransferPruning(recipe="paper", data="torchvision:CIFAR10", network="resnet50", rank=8)
    >>> config.epochs, config.epochs_per_prune, len(config.targets())
    (30, 20, 19)
    """

    def run(
        self,
        folder: str | os.PathLike[str],
        *,
        network: nn.Module | None = None,
        data: Data | None = None,
        progress: bool = True,
    ) -> Results:
        """Carry it out in a folder, or go on with what was begun there; what came out, one row per density.

        Args:
            folder: where the run keeps its settings, metrics, checkpoint and task files.
            network: a network of your own, instead of one by name; as it was afterwards.
            data: data of your own, as `Data.of` makes them, instead of some by name.
            progress: whether to show how far it is: a bar on a terminal, lines elsewhere.
        """
        return run(self, folder, network=network, data=data, progress=progress)
