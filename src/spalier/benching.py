"""`bench`: a base and its tasks measured side by side, and whether a smaller network is a faster one."""

from __future__ import annotations

import copy
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spalier.counting import count
from spalier.errors import ConfigError, ExampleError, NetworkError, SpalierError
from spalier.inputs import Inputs, call, each, tensors_of, tokens
from spalier.networks import reads_texts
from spalier.structure.graph import in_eval_mode
from spalier.tasks import Task
from spalier.text import InNotebooks, check_integer, first_line, import_optional, table
from spalier.timing import CONFIDENCE, MIN_ROUNDS, Call, describe_machine, finished, interval, quartiles, take_turns

Backend = Literal["eager", "compiled", "onnxruntime"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
Verdict = Literal["faster", "no faster", "slower", "not settled", "not measured"]
Clock = Callable[[], float]
Say = Callable[[str], None]

BASE = "base"
NO_DIFFERENCE = 0.02
"""A smaller difference is none, as for a budget of latency: it may come from where memory happens to lie."""
SETTLED = 1.05
"""An interval that reaches beyond this does not say that a network is no faster."""
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""How far outputs may be from eager ones in float32, as a share of the largest."""
ACCELERATOR_SLACK = 10
"""Times that on other devices than CPUs: they multiply in fewer bits than they store, as TF32 does."""


# what a benchmark found


@dataclass(frozen=True)
class Timing:
    """One network, in one backend, with one size of batch."""

    network: str
    backend: str
    batch: int
    seconds: tuple[float, ...] = ()
    """For one batch: the median of each round; empty if there is a problem."""
    ready_seconds: float | None = None
    """Until the first output: compiled or exported, and run once; no part of ``seconds``."""
    macs: int | None = None
    """Of one sample."""
    problem: str = ""
    """Why there are no times."""

    @property
    def latency(self) -> float:
        """The median seconds for a batch."""
        return median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The seconds between which half of the rounds lie."""
        return quartiles(self.seconds)

    @property
    def throughput(self) -> float:
        """Samples in a second, at the median."""
        return self.batch / self.latency

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the rounds."""
        found = {**self.__dict__, "rounds": list(self.seconds)}
        del found["seconds"]
        if self.seconds:
            found |= {"latency": self.latency, "quartiles": list(self.spread)}
            found["samples_per_second"] = self.throughput
        return found


@dataclass(frozen=True)
class Comparison:
    """A task's network against the base, in the same rounds. Print it for the verdict."""

    network: str
    backend: str
    batch: int
    verdict: Verdict
    speedup: float | None = None
    """The base's time over the network's: the median of the rounds' ratios."""
    low: float | None = None
    high: float | None = None
    macs_share: float | None = None
    """Of the base's MACs."""
    reason: str = ""
    """Why nothing was measured."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**self.__dict__, "text": str(self)}

    def __str__(self) -> str:
        if self.speedup is None:
            return f"not measured: {self.reason}"
        span = f"{self.low:.2f}-{self.high:.2f}x"
        if self.macs_share is not None:
            although = self.verdict == "no faster" and self.macs_share < 1
            span += f" {'although it has' if although else 'with'} {self.macs_share:.0%} of the MACs"
        if self.verdict == "not settled":
            return f"not settled: {span}; measure with more rounds, or on a quieter machine"
        bound = f" than {max(self.high or 1, 1):.2f}x:" if self.verdict == "no faster" else ""
        return f"{self.verdict}{bound} {self.speedup:.2f}x ({span})"


def compare(base: Timing, task: Timing) -> Comparison:
    """What the rounds that both took part in say of a task's network; backend and batch are the same."""
    share = task.macs / base.macs if task.macs is not None and base.macs else None
    where = (task.network, task.backend, task.batch)
    if reason := task.problem or (base.problem and f"no base to compare with: {base.problem}"):
        return Comparison(*where, "not measured", macs_share=share, reason=reason)
    # Ratios of the same round: a machine that is slow for some rounds is slow for both.
    middle, low, high = interval([slow / fast for slow, fast in zip(base.seconds, task.seconds, strict=True)])
    return Comparison(*where, verdict_of(low, high), middle, low, high, share)


def verdict_of(low: float, high: float) -> Verdict:
    """What an interval of the speed-up allows to say: no faster is what may be faster by a twentieth at most.

    >>> verdict_of(2.9, 3.3), verdict_of(0.97, 1.04), verdict_of(0.8, 0.9), verdict_of(0.7, 3.0), verdict_of(1.01, 1.04)
    ('faster', 'no faster', 'slower', 'not settled', 'not settled')
    """
    if low > 1 + NO_DIFFERENCE:
        return "faster"
    if high < 1 - NO_DIFFERENCE:
        return "slower"
    return "no faster" if low <= 1 and high <= SETTLED else "not settled"


@dataclass(frozen=True, kw_only=True)
class Benchmark(InNotebooks):
    """A base and tasks, measured side by side. Print it."""

    timings: tuple[Timing, ...]
    machine: Mapping[str, str | int]
    rounds: int
    notes: tuple[str, ...] = ()

    def timing(self, network: str, backend: str, batch: int) -> Timing:
        """One network's times."""
        return {(t.network, t.backend, t.batch): t for t in self.timings}[network, backend, batch]

    def comparison(self, network: str, backend: str, batch: int) -> Comparison:
        """One task's network against the base."""
        return compare(self.timing(BASE, backend, batch), self.timing(network, backend, batch))

    @property
    def comparisons(self) -> list[Comparison]:
        """Every task's network against the base."""
        return [self.comparison(t.network, t.backend, t.batch) for t in self.timings if t.network != BASE]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data, every round included."""
        how = {"machine": dict(self.machine), "rounds": self.rounds, "confidence": CONFIDENCE}
        timings = [timing.to_dict() for timing in self.timings]
        comparisons = [comparison.to_dict() for comparison in self.comparisons]
        return {**how, "notes": list(self.notes), "timings": timings, "comparisons": comparisons}

    def __str__(self) -> str:
        machine = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        parts = [self._table(backend) for backend in dict.fromkeys(t.backend for t in self.timings)]
        foot = (
            f"{self.rounds} rounds in turns: medians, and between which values half of the rounds lie; speed-ups over "
            f"the base in the same rounds, with intervals of {CONFIDENCE:.0%}; less than {NO_DIFFERENCE:.0%} is no "
            "difference"
        )
        return "\n\n".join([*parts, "\n".join([*self.notes, foot, machine])])

    def _table(self, backend: str) -> str:
        own = [t for t in self.timings if t.backend == backend]
        problems = {t.problem for t in own}
        if len(problems) == 1 and "" not in problems:
            return f"{backend}\nnot measured: {problems.pop()}"
        header = ["network", "batch", "ms", "half within", "samples/s", "MACs", "ready, s", "verdict"]
        return f"{backend}\n" + table(header, [self._cells(t) for t in own])

    def _cells(self, timing: Timing) -> list[str]:
        times, verdict = ["-"] * 3, ""
        if timing.seconds:
            low, high = (f"{1e3 * value:.3f}" for value in timing.spread)
            times = [f"{1e3 * timing.latency:.3f}", f"{low}-{high}", f"{timing.throughput:,.0f}"]
        if timing.problem:
            verdict = f"not measured: {timing.problem}"
        elif timing.network != BASE:
            verdict = str(self.comparison(timing.network, timing.backend, timing.batch))
        macs = "-" if timing.macs is None else f"{timing.macs:,}"
        ready = "-" if timing.ready_seconds is None else f"{timing.ready_seconds:.2f}"
        return [timing.network, str(timing.batch), *times, macs, ready, verdict]


# measuring


def bench(
    base: nn.Module,
    tasks: Mapping[str, Task] | Sequence[Task],
    example: Inputs | None = None,
    *,
    batches: Sequence[int] = (1, 64),
    backends: Sequence[str] = BACKENDS,
    rounds: int = 15,
    seconds: float = 0.02,
    threads: int | None = None,
    fold: bool = False,
    progress: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Benchmark:
    """Latency and throughput of a base and of the networks that tasks make of it, in turns. Print what comes back.

    Outputs are compared with eager ones in float32 before anything is timed. A backend that is not installed, fails
    or computes something else is a row that says so, and the others go on. The base is measured as it is, in eval mode;
    it and PyTorch's settings are left as they were.

    Args:
        base: the network that the tasks were learned on.
        tasks: by name, or with names of their own.
        example: one sample or more, along the first axis, as a tensor or a dict of keyword arguments; repeated to
            make a batch. By default noise of the size, or the number of tokens, that the tasks were learned with.
        batches: how many samples a batch has.
        backends: of "eager", "compiled" and "onnxruntime".
        rounds: how many turns each network has; at least 6, so that there is an interval.
        seconds: how long a turn takes at least.
        threads: for PyTorch and onnxruntime, by default what PyTorch has.
        fold: fold the tasks' batch norms, as in `Task.build`; the base keeps its own.
        progress: is told what is done next.
        clock: seconds that never go back.
    """
    _check_options(batches, backends, rounds, seconds, threads)
    named = _by_name(tasks)
    example = noise(base, named.values()) if example is None else example
    if not tensors_of(example) or not all(isinstance(t, Tensor) and t.dim() and len(t) for t in tensors_of(example)):
        found = f"of shape {tuple(example.shape)}" if isinstance(example, Tensor) else f"a {type(example).__name__}"
        raise ExampleError(f"the example is {found}, expected a tensor of at least one sample (first axis)")
    say = progress or (lambda _: None)
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.enter_context(in_eval_mode(base))
        torch.set_num_threads(threads or torch.get_num_threads())
        nets = {BASE: base} | {name: task.build(base, fold=fold) for name, task in named.items()}
        device = next((p.device for p in base.parameters()), tensors_of(example)[0].device)
        first = each(lambda t: t.detach().to(device), example)
        macs = {name: _macs(net, first) for name, net in nets.items()}
        notes = _notes(nets, first, fold)
        timings: list[Timing] = []
        for backend in (known for known in BACKENDS if known in backends):
            problem = _obstacle(backend, device)
            for batch in sorted(set(batches)):
                if problem:
                    timings += [Timing(name, backend, batch, problem=problem) for name in nets]
                    continue
                rows = torch.arange(batch, device=device) % len(tensors_of(first)[0])
                x = each(lambda t, rows=rows: t[rows], first)  # type: ignore[misc]
                timings += _measure(nets, backend, x, rounds, seconds, clock, say)
        where = describe_machine(device, torch.get_num_threads())
    counted = tuple(replace(timing, macs=macs[timing.network]) for timing in timings)
    return Benchmark(timings=counted, machine=where, rounds=rounds, notes=tuple(notes))


def _measure(
    nets: Mapping[str, nn.Module], backend: Backend, x: Inputs, rounds: int, seconds: float, clock: Clock, say: Say
) -> list[Timing]:
    """All networks in turns, in one backend and with one batch; nothing of it stays in memory."""
    calls: dict[str, Call] = {}
    rows: dict[str, Timing] = {}
    batch = len(tensors_of(x)[0])
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), _compiler_settings(backend):
        for number, (name, net) in enumerate(nets.items()):
            say(f"{backend}, batch {batch}: {name} is made ready")
            row = Timing(name, backend, batch)
            try:
                calls[name], took = _ready(backend, net, x, Path(folder) / f"{number}.onnx", clock)
                rows[name] = replace(row, ready_seconds=took)
            except Exception as error:  # whatever a compiler, an exporter or a network raises
                rows[name] = replace(row, problem=_problem(error))
        say(f"{backend}, batch {batch}: {rounds} rounds")
        turns = take_turns(calls, rounds=rounds, seconds=seconds, clock=clock)
    for name, times in turns.items():
        rows[name] = replace(rows[name], seconds=tuple(times))
    return list(rows.values())


def _ready(backend: Backend, net: nn.Module, x: Inputs, file: Path, clock: Clock) -> tuple[Call, float]:
    """A call that computes what the network does, and the seconds until its first output."""
    wanted = _reference(net, x)
    given = each(torch.clone, x)  # networks may write into what they get
    start = clock()
    ready = prepare(backend, net, given, torch.get_num_threads(), file)
    found = ready()
    took = clock() - start
    slack = 1 if tensors_of(x)[0].device.type == "cpu" else ACCELERATOR_SLACK
    tolerance = TOLERANCES.get(_dtype(net), 1e-3) * slack
    if problem := difference(found, wanted, tolerance):
        raise NetworkError(problem)
    return ready, took


def _dtype(net: nn.Module) -> torch.dtype:
    return next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)


def _reference(net: nn.Module, x: Inputs) -> Any:
    """What the network computes, eager and in float32 or better."""
    if _dtype(net) in (torch.float16, torch.bfloat16):
        net = copy.deepcopy(net).float()
        x = each(lambda t: t.float() if t.is_floating_point() else t, x)
    return call(net, each(torch.clone, x))


def difference(found: Any, wanted: Any, tolerance: float) -> str:
    """How outputs differ from what they should be, by more than a share of the largest number; empty if they don't."""
    ours, theirs = _tensors_of(found), _tensors_of(wanted)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        shapes = [[tuple(t.shape) for t in side] for side in (ours, theirs)]
        return f"outputs of shapes {shapes[0]}, expected {shapes[1]} as eager in float32"
    pairs = ((a.double().cpu(), b.double().cpu()) for a, b in zip(ours, theirs, strict=True) if a.numel())
    for one, other in pairs:
        if not one.isfinite().all():
            return "outputs are not finite"
        off, most = float((one - other).abs().max()), float(other.abs().max())
        if off > tolerance * most:
            share = off / most if most else math.inf
            return f"outputs differ from eager float32 by {share:.1e} of the largest, expected {tolerance:.0e} or less"
    return ""


def _tensors_of(output: Any) -> list[Tensor]:
    """All tensors of what a network returns, in order."""
    return [torch.as_tensor(leaf) for leaf in tree_leaves(output) if hasattr(leaf, "shape")]


def _problem(error: Exception) -> str:
    return str(error) if isinstance(error, SpalierError) else f"{type(error).__name__}: {first_line(error)}"


# the backends


def _obstacle(backend: Backend, device: torch.device) -> str:
    """Why nothing can be measured with a backend here; empty if it can be tried.

    What the backend needs is imported now: else the first network would be charged for it.
    """
    needed = {"compiled": ["torch._dynamo", "torch._inductor.compile_fx"], "eager": []}
    if backend == "onnxruntime" and device.type != "cpu":
        return f"onnxruntime is measured on CPUs, and the base is on {device}"
    try:
        for name in needed.get(backend, ["onnx", "onnxscript", "onnxruntime"]):
            import_optional(name, "the onnxruntime backend")
    except Exception as error:  # whatever a broken installation raises
        return _problem(error)
    return ""


def prepare(backend: Backend, net: nn.Module, x: Inputs, threads: int, file: Path) -> Call:
    """A call of a plain network, in eval mode, on a batch; onnxruntime needs a number of threads and a file."""
    if backend == "eager":
        return finished(lambda: call(net, x), tensors_of(x)[0].device)
    if backend == "compiled":
        return _compiled(net, x)
    return _onnxruntime(net, x, threads, file)


def _compiled(net: nn.Module, x: Inputs) -> Call:
    """Compiled for this network and this shape alone."""

    def forward(x: Inputs) -> Any:
        return call(net, x)

    # Dynamo keeps what it compiled with the code object of the function. Networks of one class would share a cache,
    # look through each other's entries at every call and, from the ninth on, silently run eager. A code object of
    # their own keeps them apart; torch._dynamo.reset would throw away what others have compiled.
    forward.__code__ = forward.__code__.replace()
    graphs = _graph_count()
    compiled = torch.compile(forward, dynamic=False)
    run = finished(lambda: compiled(x), tensors_of(x)[0].device)
    run()
    if _graph_count() == graphs:
        raise RuntimeError("torch.compile left the network as it is; is TORCH_COMPILE_DISABLE set?")
    return run


def _graph_count() -> int:
    """How many graphs Dynamo has compiled so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextmanager
def _compiler_settings(backend: Backend) -> Iterator[None]:
    """Errors of the compiler are errors, whatever the caller has set, and so is a network that it gives up."""
    if backend != "compiled":
        yield
        return
    from torch._dynamo import config

    strict = config.patch(suppress_errors=False, fail_on_recompile_limit_hit=True)
    with strict, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own libraries
        yield


def _onnxruntime(net: nn.Module, x: Inputs, threads: int, file: Path) -> Call:
    x = each(lambda t: t.contiguous(), x)  # the only layout it takes; else every call would pay for a copy
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own libraries
        session = onnx_session(net, x, file, threads=threads)
    feed = {given.name: t.numpy() for given, t in zip(session.get_inputs(), tensors_of(x), strict=True)}
    return lambda: session.run(None, feed)


def onnx_session(
    net: nn.Module, x: Inputs, file: Path, *, said: Mapping[str, str] | None = None, free: Any = None, threads: int = 0
) -> Any:
    """A network as an ONNX file, with what is said of it and with these axes free, loaded by onnxruntime."""
    import onnxruntime

    args, kwargs = ((), x) if isinstance(x, dict) else ((x,), None)
    program: Any = torch.onnx.export(net, args, kwargs=kwargs, dynamic_shapes=free, dynamo=True, verbose=False)
    if "scaled_dot_product" in str(program.exported_program.graph):
        # Attention as one operator, not five: a MiniLM is 5% faster. Other networks still run in older runtimes.
        program = torch.onnx.export(program.exported_program, opset_version=23, dynamo=True, verbose=False)
    program.model.metadata_props.update(said or {})
    program.save(str(file), external_data=said is None)  # a file for others is one file
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    # Else the threads of one network go on spinning through the next one's turn.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


# networks and examples


def _by_name(tasks: Mapping[str, Task] | Sequence[Task]) -> dict[str, Task]:
    pairs = list(tasks.items()) if isinstance(tasks, Mapping) else [(task.name, task) for task in tasks]
    named = dict(pairs)
    if len(named) < len(pairs):
        raise ConfigError("two tasks have the same name; pass a mapping from other names to tasks")
    if BASE in named:
        raise ConfigError(f'a task has the name "{BASE}", as the base does; pass a mapping with another name')
    return named


def noise(net: nn.Module, tasks: Iterable[Task] = (), batch: int = 1, shape: Sequence[int] | None = None) -> Inputs:
    """Images of a shape, or texts of so many tokens, for a network; by default as its tasks were learned with."""
    reads = reads_texts(net)
    if shape is None:
        said = {task.info.preprocessing.get("tokens" if reads else "size") for task in tasks}
        size = said.pop() if len(said) == 1 else None
        channels = next((m.in_channels for m in net.modules() if isinstance(m, nn.Conv2d)), 3)
        shape = () if type(size) is not int else (size,) if reads else (channels, size, size)
    if not shape or (reads and len(shape) > 1):
        found = f"the shape is {tuple(shape)}" if shape else "there is no example, and the tasks do not tell one size"
        expected = "how many tokens a text has, such as 32" if reads else "the shape of one input, such as 3,224,224"
        raise ExampleError(f"{found}; pass example=, or on the command line --shape: {expected}")
    if reads:
        return tokens(batch, *shape)
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0)).to(_dtype(net))


def _macs(net: nn.Module, x: Inputs) -> int | None:
    try:
        return count(net, each(torch.clone, x)).macs
    except ExampleError:  # it mixes samples; that it runs at all is seen elsewhere
        return None


def _notes(nets: Mapping[str, nn.Module], x: Inputs, fold: bool) -> list[str]:
    """What is worth knowing of the networks before they are compared."""
    shapes = {name: _output_shapes(net, x) for name, net in nets.items()}
    notes = [
        f"{name} has outputs of {shape}, the base of {shapes[BASE]}: heads are measured as they are"
        for name, shape in shapes.items()
        if shape != shapes[BASE]
    ]
    if isinstance(x, dict):
        notes.append(f"texts of {tensors_of(x)[0].shape[1]} tokens")
    if fold and len(nets) > 1:
        notes.append("the tasks' batch norms are folded, the base's are not")
    return notes


@torch.inference_mode()
def _output_shapes(net: nn.Module, x: Inputs) -> str:
    try:
        outputs = _tensors_of(call(net, each(torch.clone, x)))
    except Exception as error:  # whatever the network raises
        raise ExampleError(
            f"the example of {tuple(tensors_of(x)[0].shape)} does not run through the network ({_problem(error)}); "
            "expected a batch that net(example) takes"
        ) from error
    return ", ".join("x".join(map(str, t.shape[1:])) for t in outputs)


def _check_options(
    batches: Sequence[int], backends: Sequence[str], rounds: int, seconds: float, threads: int | None
) -> None:
    if isinstance(backends, str) or not backends or not set(backends) <= set(BACKENDS):
        raise ConfigError(f"backends is {backends!r}, expected some of {', '.join(BACKENDS)}")
    if not batches:
        raise ConfigError("batches is empty, expected integers of at least 1")
    for batch in batches:
        check_integer("batches", batch, 1)
    check_integer("rounds", rounds, MIN_ROUNDS)
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"seconds is {seconds!r}, expected a number of at least 0")
    if threads is not None:
        check_integer("threads", threads, 1)
