"""From settings and a folder to results: everything that is set up before the loop, and taken down after it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from spalier.adapters.attach import detach_
from spalier.adapters.attachment import is_marked
from spalier.data import Data, open_data
from spalier.distributed import from_first_rank
from spalier.errors import AttachmentError, ConfigError, RunError, SpalierError
from spalier.networks import head_of, logits_of, open_network
from spalier.runs.config import Settings
from spalier.runs.engine import Engine
from spalier.runs.folder import RunFolder
from spalier.runs.machine import Machine
from spalier.runs.results import Results
from spalier.tasks.task import Task

_LOG = logging.getLogger("spalier")
_GIVEN = "given:"


def run(
    config: Settings,
    folder: str | os.PathLike[str],
    *,
    network: nn.Module | None = None,
    data: Data | None = None,
    progress: bool = True,
) -> Results:
    """Carry a run out, or go on with it, or see that it is done."""
    config = _with_given(config, network, data)
    where = RunFolder(folder)
    if where.results.exists():
        where.open_(config)
        return _done(where, network, data)
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(_machine(config, where))
        stack.enter_context(_opened(where, config, machine))
        machine.track()
        stack.enter_context(_faults(config, where))
        stack.enter_context(_randomness(config))
        samples = _with_classes(config, data if data is not None else _data(config))
        net = network if network is not None else _network(config, samples)
        head = config.head or head_of(net, classes=len(samples.classes))
        stack.enter_context(_as_before(net, machine))
        if config.keep_best and samples.validation is None:
            raise ConfigError(
                "keep_best is true, and the data have no validation samples; give them some, or leave it out"
            )
        _check_outputs(net, samples, machine)
        engine = Engine(config, where, net, head, samples, machine, _digest(net))
        return engine.go(progress)


def _with_given(config: Settings, network: nn.Module | None, data: Data | None) -> Settings:
    """Settings that name what was given as an object, so that a run which goes on asks for it again."""
    if network is not None:
        if not isinstance(network, nn.Module):
            raise ConfigError(
                f"network is a {type(network).__name__}, expected a torch.nn.Module; names go in the settings"
            )
        if any(tensor.is_meta for tensor in (*network.parameters(), *network.buffers())):
            raise ConfigError(
                "the network is on the meta device, where nothing can be learned; load its weights first"
            )
        _refuse(config, "a network", ("weights", "network_options"))
        if is_marked(network):
            raise AttachmentError("the network is adapted already; call spalier.detach_(net) first")
        config = config.replace(network=f"{_GIVEN}{type(network).__name__}")
    if data is not None:
        if not isinstance(data, Data):
            raise ConfigError(
                f"data is a {type(data).__name__}, expected spalier.data.Data; Data.of(dataset) makes it"
            )
        _refuse(
            config,
            "data",
            (
                "max_train_samples",
                "classes",
                "image_size",
                "validation_split",
                "skip_bad",
                "cache_folder",
                "data_folder",
            ),
        )
        config = config.replace(data=f"{_GIVEN}{data.name}")
    for what, given in (("network", network), ("data", data)):
        if given is None and getattr(config, what).startswith(_GIVEN):
            raise ConfigError(f"the run was given its {what} as an object; pass {what}= again to go on")
    return config


def _refuse(config: Settings, what: str, names: tuple[str, ...]) -> None:
    """Settings that would have no effect are mistakes."""
    defaults = vars(Settings())["_given"]
    for name in names:
        if config.given[name] != defaults[name]:
            raise ConfigError(
                f"{name} is set, and {what} was given, which it does not apply to; leave one of them out"
            )


def _done(folder: RunFolder, network: nn.Module | None, data: Data | None) -> Results:
    """What came out, where nothing else was given than then."""
    results = Results.load(folder.path)
    if network is not None and _digest(network) != results.base:
        raise RunError("changed", "the run is done, with a network of other weights; use another folder")
    if data is not None and data.digest != results.data:
        raise RunError("changed", "the run is done, with other data; use another folder")
    return results


@contextlib.contextmanager
def _machine(config: Settings, folder: RunFolder) -> Iterator[Machine]:
    machine = Machine(config, folder)
    try:
        yield machine
    finally:
        machine.close()


@contextlib.contextmanager
def _opened(folder: RunFolder, config: Settings, machine: Machine) -> Iterator[None]:
    """The first process opens the folder and keeps it; what is wrong with it is wrong for all."""
    with contextlib.ExitStack() as stack:

        def attempt() -> SpalierError | None:
            try:
                stack.enter_context(folder.locked())
                folder.open_(config)
            except SpalierError as error:
                return error
            return None

        error = from_first_rank(attempt)
        if error is not None:
            raise error
        yield


@contextlib.contextmanager
def _faults(config: Settings, folder: RunFolder) -> Iterator[None]:
    """Out of memory, said in words."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        words = str(error)
        full = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in words
        if not full:
            raise
        raise RunError(
            "memory",
            f"memory ran out with batches of {config.batch_size} ({' '.join(words.split())[:200] or 'MemoryError'});"
            f" the last checkpoint in {str(folder.path)!a} is whole: free some memory and run again, or begin another "
            "run with a smaller batch_size, image_size or score_samples",
        ) from error


@contextlib.contextmanager
def _randomness(config: Settings) -> Iterator[None]:
    """Leave the caller's random state and choice of algorithms as they were."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    with torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad():
        if config.deterministic:
            torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def _as_before(net: nn.Module, machine: Machine) -> Iterator[None]:
    """Use a network, and give it back without adapters, where and how it was."""
    first = next(net.parameters(), None)
    device = first.device if first is not None else machine.device
    modes = [(module, module.training) for module in net.modules()]
    grads = [(parameter, parameter.grad) for parameter in net.parameters()]
    net.to(machine.device)
    try:
        yield
    finally:
        if is_marked(net):
            detach_(net)
        net.to(device)
        for module, training in modes:
            module.training = training
        for parameter, grad in grads:
            parameter.grad = grad


def _data(config: Settings) -> Data:
    return open_data(
        config.data,
        folder=config.data_folder,
        image_size=config.image_size,
        validation_split=config.validation_split,
        seed=config.seed,
        skip_bad=config.skip_bad,
        labels=config.labels
        or not config.data.startswith(("folder:", "hf:")),  # others have some to be judged by
        cache_folder=config.cache_folder,
        max_train_samples=config.max_train_samples,
        classes=config.classes,
    )


def _with_classes(config: Settings, data: Data) -> Data:
    """Samples without labels have the classes of the task that the network has learned, or is taught by."""
    unlabelled = bool((data.train.labels < 0).all())
    if config.labels and unlabelled:
        raise ConfigError(
            "the samples have no labels; set labels: false, and a teacher to learn from (teacher, start_task)"
        )
    if data.classes:
        return data
    known = next(path for path in (config.start_task, config.teacher) if path not in (None, "self"))
    classes = tuple(Task.load(known).info.classes)
    if not classes:
        raise RunError(
            "classes", f"the samples have no classes, and {known!a} names none; expected a task with classes"
        )
    return replace(data, classes=classes)


def _network(config: Settings, data: Data) -> nn.Module:
    if (
        config.weights is None
        and not config.network.startswith(("hf:", "timm:", "torchvision:"))
        and ":" not in config.network
    ):
        _LOG.warning(
            "%s starts from random weights; set weights to a file of pretrained ones", config.network
        )
    return open_network(
        config.network,
        classes=len(data.classes),
        weights=config.weights,
        seed=config.seed,
        **config.network_options,
    )


@torch.no_grad()
def _check_outputs(net: nn.Module, data: Data, machine: Machine) -> None:
    example = torch.zeros(2, *data.shape, device=machine.device)
    net.eval()
    try:
        logits = logits_of(net(example))
    except (RuntimeError, ValueError, TypeError) as error:
        raise RunError(
            "classes",
            f"the network does not run on float32 images of {data.shape}: {error}; set image_size, convert the network "
            "(net.float()), or use another",
        ) from error
    if logits.dim() != 2 or logits.shape[1] != len(data.classes):
        raise RunError(
            "classes",
            f"the network returns {tuple(logits.shape[1:])} numbers for a sample, and {data.name} has "
            f"{len(data.classes)} classes; give the network a head with that many outputs",
        )


def _digest(net: nn.Module) -> str:
    """One number for all values of the base."""
    found = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        if not isinstance(tensor, torch.Tensor):  # extra state of a module's own
            found.update(f"{name} {tensor!r}\n".encode())
            continue
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
