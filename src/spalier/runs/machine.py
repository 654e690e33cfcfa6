"""Where a run runs: device, precision, processes and trackers, as Accelerate has them."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from spalier.errors import ConfigError
from spalier.runs.config import Settings
from spalier.runs.folder import RunFolder
from spalier.runs.syncing import SyncedNorms


class Machine:
    """One process of a run. `torchrun` and `accelerate launch` start several; alone it is the only one."""

    def __init__(self, config: Settings, folder: RunFolder) -> None:
        try:
            from accelerate import Accelerator
            from accelerate.state import AcceleratorState
        except ModuleNotFoundError as error:
            raise ConfigError(f"runs need {error.name}; pip install spalier[train]") from error
        if config.mixed_precision == "fp16" and not _has_accelerator():
            raise ConfigError(
                'mixed_precision is "fp16", which needs a GPU to scale gradients; expected "bf16" or "no" on a CPU'
            )
        trackers = _trackers(config)
        # one state for the whole process, which cannot change its precision; the caller's own comes back with close
        self._before = dict(AcceleratorState._shared_state)
        AcceleratorState._shared_state.clear()
        try:
            self.accelerator: Any = Accelerator(
                mixed_precision=config.mixed_precision,
                cpu=not _has_accelerator(),
                log_with=trackers or None,
                project_dir=str(folder.path),
            )
        except ValueError as error:
            self._give_back()
            raise ConfigError(
                f"mixed_precision {config.mixed_precision!r} or a tracker cannot be had here: {error}"
            ) from error
        self.device: torch.device = self.accelerator.device
        self.rank: int = self.accelerator.process_index
        self.world: int = self.accelerator.num_processes
        wide = config.channels_last
        self.channels_last = self.device.type == "cpu" if wide is None else wide

    def track(self) -> None:
        """Open the trackers; their files lie in the run's folder."""
        if self.accelerator.log_with:
            self.accelerator.init_trackers("tracking")

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that networks run in."""
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    def synced_norms(self) -> AbstractContextManager[Any]:
        """Batch norms over all processes' samples."""
        return SyncedNorms() if self.world > 1 else nullcontext()

    @property
    def scaler(self) -> Any:
        """What scales the loss in fp16, or None."""
        return self.accelerator.scaler

    def step_(self, optimizer: Optimizer, clip: float | None) -> None:
        """Update what learns, with the gradient's norm bounded where that is asked for."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        if clip is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """Numbers for the trackers."""
        if self.accelerator.trackers:
            self.accelerator.log({k: v for k, v in values.items() if v is not None}, step=step)

    def close(self) -> None:
        """End the trackers; the next run in this process may ask for another precision."""
        if self.accelerator.trackers:
            for tracker in self.accelerator.trackers:
                tracker.finish()
        self._give_back()

    def _give_back(self) -> None:
        from accelerate.state import AcceleratorState

        AcceleratorState._shared_state.clear()
        AcceleratorState._shared_state.update(self._before)


def _has_accelerator() -> bool:
    """Whether there is anything but the CPU; without a word Accelerate takes several CPU processes for one."""
    return bool(torch.accelerator.is_available())


def _trackers(config: Settings) -> list[str]:
    named = [name for name in config.trackers if name != "auto"]
    if "auto" in config.trackers and importlib.util.find_spec("tensorboard") is not None:
        named.append("tensorboard")
    return named
