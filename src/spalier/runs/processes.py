"""The processes of a run: device and precision, gradients and batch norms over all ranks, signals, progress.

The network changes its shapes at every prune, so it is not wrapped in `DistributedDataParallel`, which fixes them. What
is learned is small, and one sum of all gradients in one piece does the same.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, Self, TextIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from spalier.distributed import is_distributed
from spalier.errors import ConfigError
from spalier.runs.checkpoint import RunFolder
from spalier.runs.settings import Settings
from spalier.text import import_optional


class Machine:
    """What one process of a run runs on. `torchrun` and `accelerate launch` start several; alone it is the only one."""

    def __init__(self, config: Settings, folder: RunFolder) -> None:
        accelerate = import_optional("accelerate", "runs")
        if config.mixed_precision == "fp16" and not torch.accelerator.is_available():
            raise ConfigError(
                'mixed_precision is "fp16", which needs a GPU to scale gradients; expected "bf16" or "no" on a CPU'
            )
        on_cpu = _is_on_cpu(config.device)
        has_board = importlib.util.find_spec("tensorboard") is not None
        named = ["tensorboard" if name == "auto" else name for name in config.trackers if name != "auto" or has_board]
        # Accelerate keeps one state for the whole process, whose precision cannot change. Each run gets a fresh one,
        # and `close` gives the caller's own back.
        self._shared: dict[str, Any] = accelerate.state.AcceleratorState._shared_state
        self._before = dict(self._shared)
        self._shared.clear()
        try:
            self.accelerator: Any = accelerate.Accelerator(
                mixed_precision=config.mixed_precision,
                cpu=on_cpu,  # without a word Accelerate takes several CPU processes for one
                log_with=list(dict.fromkeys(named)) or None,
                project_dir=str(folder.path),
            )
        except ValueError as error:
            self._give_back()
            raise ConfigError(
                f"mixed_precision {config.mixed_precision!r} or a tracker is not available here: {error}"
            ) from error
        self.device: torch.device = self.accelerator.device
        self.rank: int = self.accelerator.process_index
        self.world_size: int = self.accelerator.num_processes
        self.is_first = self.rank == 0
        """Whether this process writes files and shows progress."""
        chosen = config.channels_last
        self.channels_last = self.device.type == "cpu" if chosen is None else chosen
        self.scaler: Any = self.accelerator.scaler or torch.amp.GradScaler(enabled=False)
        """What scales the loss in fp16; in other precisions it does nothing."""

    def track(self) -> None:
        """Open the trackers; their files are in the run's folder."""
        if self.accelerator.log_with:
            self.accelerator.init_trackers("tracking")

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that networks run in."""
        return self.accelerator.autocast()  # type: ignore[no-any-return]

    def synced_norms(self) -> AbstractContextManager[Any]:
        """Batch norms over the samples of all processes."""
        return SyncedNorms() if self.world_size > 1 else nullcontext()

    def step_(self, optimizer: Optimizer, grad_clip: float | None) -> None:
        """Clip the gradient, where that is asked for, and update what is learned."""
        self.scaler.unscale_(optimizer)
        if grad_clip is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, grad_clip)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()

    def log(self, values: Mapping[str, float | None], step: int) -> None:
        """Give numbers to the trackers."""
        if self.accelerator.trackers:
            self.accelerator.log({k: v for k, v in values.items() if v is not None}, step=step)

    def close(self) -> None:
        """End the trackers. The next run in this process may ask for another precision."""
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self._give_back()

    def _give_back(self) -> None:
        self._shared.clear()
        self._shared.update(self._before)


def _is_on_cpu(device: str | None) -> bool:
    """Whether a run is on the CPU; a device that is not there is refused, a numbered one is made the current one."""
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    try:
        wanted = torch.device(device or there or "cpu")
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}, expected cpu, cuda, cuda:1 or mps") from error
    if wanted.type not in ("cpu", getattr(there, "type", "cpu")):
        raise ConfigError(f"device is {device!r}, and this machine has {there}; set that, or leave it out")
    if wanted.type != "cpu" and wanted.index is not None:
        torch.accelerator.set_device_index(wanted.index)
    return wanted.type == "cpu"


# sums over ranks


def sum_gradients_(parameters: Iterable[Tensor], numbers: list[float]) -> list[float]:
    """Sum gradients over all ranks, and with them a few numbers, which are returned."""
    if not is_distributed():
        return numbers
    held = [p for p in parameters if p.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in held]
    extra = torch.tensor(numbers, dtype=torch.float32, device=held[0].device)
    flat = torch.cat([extra, *(g.reshape(-1).float() for g in grads)])
    dist.all_reduce(flat)
    parts = flat[len(numbers) :].split([g.numel() for g in grads])
    for parameter, part in zip(held, parts, strict=True):
        # a view of `flat` would keep all of it alive
        parameter.grad = part.view(parameter.shape).to(parameter.dtype).clone()
    return [float(x) for x in flat[: len(numbers)]]


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum over all ranks."""
    if is_distributed():
        values = values.clone()
        dist.all_reduce(values)
    return values


class SyncedNorms(TorchFunctionMode):
    """Lets every batch norm in training mode see the samples of all ranks, on any device and in any module.

    `nn.SyncBatchNorm` needs a GPU, and other modules in the network.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS:
            given = dict(zip(_NORMS[func].split(), args, strict=False)) | kwargs
            if given.get("training", False):
                return _batch_norm(given["input"], given)
        return func(*args, **kwargs)


# modules call the one, some functions the other; they take the same arguments in another order
_NORMS = {
    F.batch_norm: "input running_mean running_var weight bias training momentum eps",
    torch.batch_norm: "input weight bias running_mean running_var training momentum eps",
}


def _summed(x: Tensor) -> Tensor:
    """A sum over ranks whose gradient is the sum of all ranks' gradients."""
    if not is_distributed():
        return x
    from torch.distributed.nn.functional import all_reduce  # which imports more than a run in one process needs

    return all_reduce(x)  # type: ignore[no-any-return]


def _batch_norm(x: Tensor, given: Mapping[str, Any]) -> Tensor:
    defaults = {"momentum": 0.1, "eps": 1e-5}  # PyTorch's
    momentum, eps = (default if given.get(name) is None else given[name] for name, default in defaults.items())
    running_mean, running_var = given.get("running_mean"), given.get("running_var")
    axes = [0, *range(2, x.dim())]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    wide = x.float()
    count = sum_over_ranks(torch.full((1,), x.numel() / x.shape[1], device=x.device))
    mean = _summed(wide.sum(axes)) / count
    centred = wide - mean.view(shape)
    var = _summed(centred.square().sum(axes)) / count
    with torch.no_grad():
        if running_mean is not None and running_var is not None:
            unbiased = var * (count / (count - 1).clamp(min=1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    out = centred * torch.rsqrt(var + eps).view(shape)
    if given.get("weight") is not None:
        out = out * given["weight"].view(shape)
    if given.get("bias") is not None:
        out = out + given["bias"].view(shape)
    result: Tensor = out.to(x.dtype)
    return result


# signals


class StopSignals:
    """While it is entered, the first Ctrl-C or SIGTERM asks to stop after the current step; a second stops at once.

    Signals can only be caught in the main thread; elsewhere, and where they are ignored, they are left alone.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number

    def leave(self) -> None:
        """Raise what the signal that came means."""
        if self.received == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt


# progress


class Progress:
    """Shows steps as they are done, on standard error: a bar on a terminal, lines elsewhere."""

    def __init__(self, total: int, done: int, shown: bool, stream: TextIO | None = None) -> None:
        self.total, self.done, self.shown, self.stream = total, done, shown, stream or sys.stderr
        self.bar: Any = None
        # asked for now: a run that shows nothing does without it
        tqdm = import_optional("tqdm", "showing progress").tqdm if shown else None
        if tqdm is not None and self.stream.isatty():
            self.bar = tqdm(total=total, initial=done, unit="step", file=self.stream, dynamic_ncols=True)

    def step(self, what: str, loss: float) -> None:
        """Count one more step."""
        self.done += 1
        if self.bar is not None:
            self.bar.update()
            self.bar.set_description(what, refresh=False)
            self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)

    def line(self, text: str) -> None:
        """Print a line that stays, with how far the run is."""
        if self.bar is not None:
            self.bar.write(text, file=self.stream)
        elif self.shown:
            print(f"[{self.done}/{self.total}] {text}", file=self.stream, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()
