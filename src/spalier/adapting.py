"""`adapt` and `load`: the whole way in one call, and the way back. They add nothing that the parts cannot do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from spalier.data import Data
from spalier.errors import ConfigError
from spalier.networks import head_of
from spalier.runs import TransferPruning
from spalier.tasks import Task

_STEPS = (0.7, 0.5, 0.3, 0.2, 0.1)
"""Densities on the way to a target: pruned little by little, a network loses less."""


def adapt(
    net: nn.Module | str,
    data: Data | Dataset[Any] | DataLoader[Any] | str,
    target: float = 0.3,
    *,
    test: Dataset[Any] | DataLoader[Any] | None = None,
    head: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = False,
    **settings: Any,
) -> Task:
    """Learn a task on a network and make it smaller: find the head, attach, train, prune, refit.

    It is a run (`TransferPruning`) with the settings of the fast recipe, which follow from the data and the network.
    The network comes back unchanged. What it returns is a task: ``task.info.metrics`` has what it gets right on
    held-out samples (``validation``) and on test samples (``accuracy``), ``task.build(net)`` is the small network,
    ``task.save(file)`` writes it, and ``print(task.info)`` shows everything.

    Args:
        net: any network whose outputs are the classes, or a network's name, as settings have it.
        data: a data set's name such as ``digits`` or ``folder:PATH``, `spalier.data.Data`, or a map-style dataset of
            (image, label). Of a loader only its dataset is used.
        target: the share of the channels that stays, or of what ``budget`` says: weights, macs, latency.
        test: samples to measure on at the end, where ``data`` is a dataset.
        head: the classifier's name; by default it is found, and where that is not sure, asked for.
        folder: keeps the whole run, which can be stopped and goes on there; by default nothing is kept.
        progress: show how far it is.
        settings: any setting of a run: epochs, lr, seed, budget, codes...

    >>> from spalier import models
    >>> short = {"max_train_samples": 60, "epochs": 1, "epochs_per_prune": 1, "refit_epochs": 1}
    >>> task = adapt(models.resnet8(classes=10), "digits", target=0.6, **short)
    >>> task.name, len(task.info.classes)
    ('digits-60', 10)
    """
    if not isinstance(target, int | float) or not 0 < target < 1:
        raise ConfigError(f"target is {target!r}, expected the share that stays, above 0 and below 1")
    given: dict[str, Any] = {} if isinstance(net, str) else {"network": net}
    named: dict[str, Any] = {"network": net} if isinstance(net, str) else {}
    if isinstance(data, str):
        named["data"] = data
    else:
        given["data"] = _data_of(data, test, settings.pop("validation_split", 0.1), settings.get("seed", 0))
    if isinstance(data, str) and test is not None:
        raise ConfigError(f"test was given, and {data!r} has samples for that; leave it out, or pass Data.of(...)")
    if head is None and isinstance(net, nn.Module):
        head = head_of(net)
    # a step just above the target would be work for nothing
    steps = (*(step for step in _STEPS if step > 1.2 * target), target)
    chosen = {"densities": steps, "head": head, "trackers": (), **named, **settings}
    config = TransferPruning.from_dict(chosen, "adapt")
    with tempfile.TemporaryDirectory(prefix="spalier-") as scratch:
        results = config.run(Path(scratch) / "run" if folder is None else folder, progress=progress, **given)
        return results.tasks.load(results.rows[-1]["task"])


def _data_of(data: Any, test: Any, share: float, seed: int) -> Data:
    if not isinstance(data, Data):
        return Data.of(data, test, share, seed=seed)
    if test is not None:
        raise ConfigError("test was given, and data is a Data, which has a test split; leave it out")
    return data


def load(base: nn.Module, file: str | os.PathLike[str]) -> nn.Module:
    """The small plain network that a task file makes of its base.

    >>> import tempfile
    >>> import spalier as sp
    >>> base = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> _ = sp.attach_(base, sp.SPLoRA(rank=1), head="2")
    >>> file = Path(tempfile.mkdtemp()) / "flowers.task.safetensors"
    >>> size = sp.Task.of(base, "flowers").save(file)
    >>> sp.detach_(base)
    >>> load(base, file)[2]
    Linear(in_features=4, out_features=2, bias=True)
    """
    return Task.load(file).build(base)
