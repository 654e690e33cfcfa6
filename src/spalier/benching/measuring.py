"""`bench`: a base and its tasks measured side by side."""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spalier.benching.backends import BACKENDS, Backend, compiling, difference, obstacle, runner, tensors_of
from spalier.benching.results import BASE, Benchmark, Comparison, Timing, compare
from spalier.counting import count
from spalier.errors import ConfigError, ExampleError
from spalier.tasks.task import Task
from spalier.text import first_line
from spalier.timing import MIN_ROUNDS, Call, Clock, describe_machine, take_turns

Progress = Callable[[str], None]
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""How far outputs may be from eager ones in float32, as a share of the largest."""
_LOOSE = 10
"""Times that, on devices that multiply in fewer bits than they store."""


def bench(
    base: nn.Module,
    tasks: Mapping[str, Task] | Sequence[Task],
    example: Tensor | None = None,
    *,
    batches: Sequence[int] = (1, 64),
    backends: Sequence[str] = BACKENDS,
    rounds: int = 15,
    seconds: float = 0.02,
    threads: int | None = None,
    fold: bool = False,
    progress: Progress | None = None,
    clock: Clock = time.perf_counter,
) -> Benchmark:
    """Latency and throughput of a base and of the networks that tasks make of it, in turns. Print what comes back.

    Outputs are compared with eager ones in float32 before anything is timed. A backend that is not installed, fails
    or computes something else is a row that says so, and the others go on. The base is measured as it is, in eval mode
    and in its own memory layout; it and PyTorch's settings are left as they were.

    Args:
        base: the network that the tasks were learned on.
        tasks: by name, or with names of their own.
        example: one sample or more, along the first axis; repeated to make a batch. By default noise of the size
            that the tasks were learned with.
        batches: how many samples a batch has.
        backends: of "eager", "compiled" and "onnxruntime".
        rounds: how many turns each network has; at least 6, so that there is an interval.
        seconds: how long a turn takes at least.
        threads: for PyTorch and onnxruntime, by default what PyTorch has.
        fold: fold the tasks' batch norms, as in `Task.build`; the base keeps its own.
        progress: is told what is done next.
        clock: seconds that never go back.
    """
    _check(base, batches, backends, rounds, seconds, threads)
    named = _named(tasks)
    example = _example(base, named, example)
    say = progress or (lambda _: None)
    with _settled(base, threads):
        nets = {BASE: base} | {name: task.build(base, fold=fold) for name, task in named.items()}
        first, macs, notes = _looked_at(nets, example, fold)
        timings: list[Timing] = []
        for backend in (known for known in BACKENDS if known in backends):
            reason = obstacle(backend, first.device)
            for batch in sorted(set(batches)):
                if reason:
                    timings += [_failed(n, backend, batch, macs[n], reason) for n in nets]
                else:
                    x = _batch(first, batch)
                    timings += _measured(nets, backend, x, macs, rounds, seconds, clock, say)
        where = describe_machine(first.device, torch.get_num_threads())
    return Benchmark(
        timings=tuple(timings),
        comparisons=tuple(_comparisons(timings)),
        machine=where,
        rounds=rounds,
        notes=tuple(notes),
    )


# one backend, one size of batch


def _measured(
    nets: Mapping[str, nn.Module],
    backend: Backend,
    x: Tensor,
    macs: Mapping[str, int | None],
    rounds: int,
    seconds: float,
    clock: Clock,
    say: Progress,
) -> list[Timing]:
    """All networks in turns; nothing of it stays in memory."""
    batch, runs, problems = len(x), {}, {}
    ready: dict[str, float] = {}
    around: AbstractContextManager[Any] = compiling() if backend == "compiled" else nullcontext()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), around:
        for number, (name, net) in enumerate(nets.items()):
            say(f"{backend}, batch {batch}: {name} is made ready")
            place = Path(folder) / str(number)
            place.mkdir()
            try:
                runs[name], ready[name] = _made_ready(backend, net, x, place, clock)
            except Exception as error:  # whatever a compiler, an exporter or a network raises
                problems[name] = _told(error)
        say(f"{backend}, batch {batch}: {rounds} rounds")
        turns = take_turns(runs, rounds=rounds, seconds=seconds, clock=clock)
    rows = []
    for name in nets:
        if name in problems:
            rows.append(_failed(name, backend, batch, macs[name], problems[name]))
        else:
            calls, times = turns[name]
            rows.append(
                Timing(
                    network=name,
                    backend=backend,
                    batch=batch,
                    seconds=tuple(times),
                    calls=calls,
                    ready_seconds=ready[name],
                    macs=macs[name],
                )
            )
    return rows


class _Mismatch(Exception):
    """A backend computes something else."""


def _made_ready(
    backend: Backend, net: nn.Module, x: Tensor, folder: Path, clock: Clock
) -> tuple[Call, float]:
    """A checked call, and the seconds until its first output."""
    wanted = _reference(net, x)
    given = x.clone()  # networks may write into what they get
    start = clock()
    run = runner(backend, net, given, torch.get_num_threads(), folder)
    found = run()
    took = clock() - start
    if not torch.equal(given, x):
        given.copy_(x)
        found = run()
    tolerance = _TOLERANCES.get(_dtype(net), 1e-3) * (1 if x.device.type == "cpu" else _LOOSE)
    problem = difference(found, wanted, tolerance)
    if problem:
        raise _Mismatch(problem)
    return run, took


def _reference(net: nn.Module, x: Tensor) -> Any:
    """What the network computes, eager and in float32 or better."""
    if _dtype(net) in (torch.float16, torch.bfloat16):
        net = copy.deepcopy(net).float()
        x = x.float() if x.is_floating_point() else x
    return net(x.clone())


def _dtype(net: nn.Module) -> torch.dtype:
    return next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)


def _told(error: Exception) -> str:
    if isinstance(error, _Mismatch):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"


def _failed(network: str, backend: str, batch: int, macs: int | None, problem: str) -> Timing:
    return Timing(network=network, backend=backend, batch=batch, macs=macs, problem=problem)


def _comparisons(timings: Sequence[Timing]) -> Iterator[Comparison]:
    known = {(t.network, t.backend, t.batch): t for t in timings}
    for timing in timings:
        if timing.network == BASE:
            continue
        larger = [t for t in timings if (t.network, t.backend) == (timing.network, timing.backend)]
        yield compare(
            known[BASE, timing.backend, timing.batch],
            timing,
            max(larger, key=lambda t: t.batch, default=None),
        )


# what is measured


def _named(tasks: Mapping[str, Task] | Sequence[Task]) -> dict[str, Task]:
    pairs = list(tasks.items()) if isinstance(tasks, Mapping) else [(task.name, task) for task in tasks]
    named = dict(pairs)
    if len(named) < len(pairs):
        raise ConfigError(
            "two tasks have the same name, expected other ones; pass a mapping from names to tasks"
        )
    if BASE in named:
        raise ConfigError(
            f'a task is called "{BASE}", as the base is here; pass a mapping with another name for it'
        )
    return named


def _example(base: nn.Module, tasks: Mapping[str, Task], example: Tensor | None) -> Tensor:
    if example is None:
        return _noise(base, tasks)
    if not isinstance(example, Tensor) or not example.dim() or not len(example):
        what = f"of shape {tuple(example.shape)}" if isinstance(example, Tensor) else type(example).__name__
        raise ExampleError(
            f"the example is a {what}, expected a tensor with at least one sample along its first axis"
        )
    return example


def _noise(base: nn.Module, tasks: Mapping[str, Task]) -> Tensor:
    """An image as the tasks were learned with, if they say so."""
    sizes = {task.info().preprocessing.get("size") for task in tasks.values()}
    size = sizes.pop() if len(sizes) == 1 else None
    channels = next((m.in_channels for m in base.modules() if isinstance(m, nn.Conv2d)), None)
    if not isinstance(size, int) or channels is None:
        raise ExampleError(
            "there is no example, and the tasks do not tell one size of images; pass example=, "
            "a tensor with one sample or more (on the command line, --shape)"
        )
    noise = torch.randn(1, channels, size, size, generator=torch.Generator().manual_seed(0))
    return noise.to(_dtype(base))


def _batch(first: Tensor, batch: int) -> Tensor:
    """As many samples, in the layout that the example has."""
    taken = first[torch.arange(batch, device=first.device) % len(first)]
    last = first.dim() == 4 and not first.is_contiguous()
    return taken.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def _looked_at(
    nets: Mapping[str, nn.Module], example: Tensor, fold: bool
) -> tuple[Tensor, dict[str, int | None], list[str]]:
    """The example where and as the base takes it, what networks compute, and what is worth knowing of them."""
    device = next((t.device for t in nets[BASE].parameters()), example.device)
    laid = (
        torch.channels_last
        if example.dim() == 4 and _is_channels_last(nets[BASE])
        else torch.contiguous_format
    )
    first = example.detach().to(device).contiguous(memory_format=laid)
    notes, macs = [], {name: _macs(net, first) for name, net in nets.items()}
    shapes = {name: _shapes(net, first) for name, net in nets.items()}
    for name, shape in shapes.items():
        if shape != shapes[BASE]:
            notes.append(
                f"{name} has outputs of {shape}, the base of {shapes[BASE]}: heads are measured as they are"
            )
    unknown = [name for name, found in macs.items() if found is None]
    if unknown:
        notes.append(f"the MACs of {', '.join(unknown)} cannot be counted for one sample")
    if fold and len(nets) > 1:
        notes.append("the tasks' batch norms are folded, the base's are not")
    return first, macs, notes


def _is_channels_last(net: nn.Module) -> bool:
    """Whether some weight can only be read so; a 1x1 one lies both ways."""
    return any(
        p.dim() == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last)
        for p in net.parameters()
    )


@torch.inference_mode()
def _shapes(net: nn.Module, x: Tensor) -> str:
    try:
        outputs = tensors_of(net(x.clone()))
    except Exception as error:  # whatever the network raises
        raise ExampleError(
            f"the example of shape {tuple(x.shape)} does not run through the network ({_told(error)}); "
            "expected a batch that net(example) takes"
        ) from error
    return ", ".join("x".join(map(str, t.shape[1:])) for t in outputs)


def _macs(net: nn.Module, x: Tensor) -> int | None:
    try:
        return count(net, x.clone()).macs
    except ExampleError:  # it mixes samples; that it runs at all is seen elsewhere
        return None


# boundaries


@contextmanager
def _settled(base: nn.Module, threads: int | None) -> Iterator[None]:
    """The base in eval mode and so many threads; afterwards all is as before."""
    before = torch.get_num_threads()
    training = [(module, module.training) for module in base.modules()]
    try:
        base.eval()
        torch.set_num_threads(threads or before)
        yield
    finally:
        torch.set_num_threads(before)
        for module, mode in training:
            module.training = mode


def _check(
    base: object,
    batches: Sequence[int],
    backends: Sequence[str],
    rounds: int,
    seconds: float,
    threads: int | None,
) -> None:
    if not isinstance(base, nn.Module):
        raise ConfigError(f"base is a {type(base).__name__}, expected a torch.nn.Module")
    if isinstance(backends, str) or not backends or not set(backends) <= set(BACKENDS):
        raise ConfigError(f"backends is {backends!r}, expected some of {', '.join(BACKENDS)}")
    if not batches or not all(_is_count(batch, 1) for batch in batches):
        raise ConfigError(f"batches is {batches!r}, expected integers of at least 1")
    if not _is_count(rounds, MIN_ROUNDS):
        raise ConfigError(
            f"rounds is {rounds!r}, expected at least {MIN_ROUNDS}: fewer give no interval of the speed-up"
        )
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ConfigError(f"seconds is {seconds!r}, expected a number of at least 0")
    if threads is not None and not _is_count(threads, 1):
        raise ConfigError(f"threads is {threads!r}, expected an integer of at least 1 or None")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
