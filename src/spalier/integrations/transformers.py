"""`PruningCallback`: a schedule in the training loop of transformers' `Trainer`."""

from __future__ import annotations

from typing import Any

from spalier.errors import ConfigError
from spalier.integrations import Moment, Part, Stepper
from spalier.scheduling import Schedule

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    text = "transformers is not installed; pip install transformers"
    raise ModuleNotFoundError(text, name="transformers") from error


class PruningCallback(TrainerCallback):  # type: ignore[misc]
    """Steps a schedule as steps or epochs begin, and at the end; the state of the trainer's optimizer is cut along."""

    def __init__(self, schedule: Schedule, *, net: Part = None, every: Moment = "step") -> None:
        self._stepper = Stepper(schedule, net, every)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what cannot work with a network that changes its shapes."""
        if args.load_best_model_at_end:
            raise ConfigError(
                "load_best_model_at_end loads weights of another shape than the pruned network's; leave it out"
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prune if it is time to."""
        if self._stepper.every == "step":
            self._step_(state, **kwargs)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prune if it is time to."""
        if self._stepper.every == "epoch":
            self._step_(state, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prune what is still to go."""
        self._step_(state, **kwargs)

    def _step_(self, state: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        self._stepper.step_(model, state.global_step, state.max_steps, [inner])
