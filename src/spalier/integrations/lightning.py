"""`PruningCallback`: a schedule in Lightning's training loop."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from spalier.integrations import Moment, Part, Stepper
from spalier.scheduling import Schedule

if not (find_spec("lightning") or find_spec("pytorch_lightning")):
    raise ModuleNotFoundError("Lightning is not installed; pip install lightning", name="lightning")
_lightning: Any = import_module("lightning.pytorch" if find_spec("lightning") else "pytorch_lightning")


class PruningCallback(_lightning.Callback):  # type: ignore[misc]
    """Steps a schedule as epochs or steps begin, and at the end; the state of the trainer's optimizers is cut along."""

    def __init__(self, schedule: Schedule, *, net: Part = None, every: Moment = "epoch") -> None:
        self._stepper = Stepper(schedule, net, every)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Prune as the checkpoint says before its weights are loaded; callbacks would be asked after that."""
        theirs = pl_module.on_load_checkpoint

        def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
            self._stepper.keep_(pl_module, checkpoint.get("spalier"))
            theirs(checkpoint)

        pl_module.on_load_checkpoint = on_load_checkpoint

    def teardown(self, trainer: Any, pl_module: Any, stage: Any = None) -> None:
        """Leave the module as it was."""
        vars(pl_module).pop("on_load_checkpoint", None)

    on_train_start = on_exception = teardown

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Remember what is left."""
        checkpoint["spalier"] = self._stepper.kept(pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Prune if it is time to."""
        if self._stepper.every == "epoch":
            pl_module.log("density", self._step_(trainer, pl_module), batch_size=1)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Prune if it is time to."""
        if self._stepper.every == "step":
            pl_module.log("density", self._step_(trainer, pl_module), batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Prune what is still to go."""
        self._step_(trainer, pl_module)

    def _step_(self, trainer: Any, pl_module: Any) -> float:
        total = trainer.estimated_stepping_batches
        return self._stepper.step_(pl_module, trainer.global_step, total, trainer.optimizers)
