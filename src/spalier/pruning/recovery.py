"""Recovery in closed form: right after a prune, without labels and without gradient steps.

(a) Batch norms take the statistics of what they now see. (b) Each adapter, layer by layer in order, becomes the
low-rank update that best restores what its layer returned before, given what is left of its input (`regression`). A
layer that learns in full, the head, gets the least-squares solution itself.

All calibration samples go through the network at once, in step with the unpruned one, which runs in a thread that waits
at each layer (`Lockstep`). When a layer is reached, its input is what the layers before it, recovered already, make of
the samples. So one forward pass of each network does it. Storing the unpruned network's outputs instead would take the
memory of all activations; a pass for each layer would take as many passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from spalier.adapters.attachment import Changes, attachment_of, is_marked
from spalier.adapters.kinds import Coded, LowRank, Pointwise, Update
from spalier.distributed import broadcast_
from spalier.errors import RecoveryError
from spalier.pruning.plan import Reduction
from spalier.pruning.regression import Moments, as_features, features, matrix_of, set_best_
from spalier.structure.graph import hooked, in_eval_mode
from spalier.structure.labels import Ints
from spalier.structure.structure import Structure
from spalier.text import first_line, table


@dataclass(frozen=True)
class Recovery:
    """How to recover a network after a prune.

    Args:
        batches: calibration samples, as a loader gives them; targets are not looked at.
        norms: whether batch norms take new statistics.
        adapters: whether adapters are set by reduced-rank regression.
        head: whether layers that learn in full are set by least squares.
        ridge: how strongly the regression is held to the adapter as it was, as a share of the inputs' mean power.
        rows: how many positions a whole-kernel regression looks at, at most; they are taken evenly.
    """

    batches: Iterable[Any]
    norms: bool = True
    adapters: bool = True
    head: bool = True
    ridge: float = 1e-2
    rows: int = 65536

    def __post_init__(self) -> None:
        if not self.ridge > 0:
            raise RecoveryError(f"ridge is {self.ridge!r}, expected a positive number such as 0.01")
        if self.rows < 1:
            raise RecoveryError(f"rows is {self.rows!r}, expected an integer of at least 1")
        if not (self.norms or self.adapters or self.head):
            raise RecoveryError(
                "nothing is to be recovered: norms, adapters and head are off; leave recover= out instead"
            )


@dataclass(frozen=True)
class Recovered:
    """What was done, by layer. Print it."""

    samples: int
    norms: int
    """How many batch norms took new statistics."""
    layers: dict[str, tuple[float, float]]
    """For each layer that was set, how much of its output's variance was missing after the cut, and is now."""
    skipped: dict[str, str]
    """Layers that learn and were left as they were, and why."""
    parameters: tuple[nn.Parameter, ...] = field(default=(), repr=False)
    """What was set: an optimizer begins anew with these."""

    def __str__(self) -> str:
        rows = [[name, f"{a:.3f}", f"{b:.3f}"] for name, (a, b) in self.layers.items()]
        parts = [table(["layer", "missing after the cut", "and now"], rows)] if rows else []
        if self.skipped:
            parts.append(table(["left as it was", "why"], [[n, why] for n, why in self.skipped.items()]))
        parts.append(f"{self.norms} norms recalibrated, {len(rows)} layers set, on {self.samples:,} samples")
        return "\n\n".join(parts)


# calibration samples


def calibration_of(given: Any) -> tuple[Recovery, Any]:
    """The options, and all calibration inputs as one batch: positional and keyword arguments."""
    recovery = given if isinstance(given, Recovery) else Recovery(given)
    batches = recovery.batches
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise RecoveryError(
            f"the calibration batches are {'none' if batches is None else f'a {type(batches).__name__}'}, expected an "
            "iterable of batches, such as a DataLoader or a list of one batch"
        )
    inputs = [_inputs(number, batch) for number, batch in enumerate(batches)]
    if not inputs:
        raise RecoveryError("recovery needs calibration batches, and there are none; expected at least one")
    order = list(inputs[0][1])  # by name, whatever order a batch has them in
    inputs = [(args, {**{k: kw[k] for k in order if k in kw}, **kw}) for args, kw in inputs]
    flat = [tree_flatten(each) for each in inputs]
    if any(tree != flat[0][1] for _, tree in flat):
        raise RecoveryError("the calibration batches cannot be put together; expected the same inputs in each")
    sizes = [_samples(values) for values, _ in flat]
    if 0 in sizes:
        raise RecoveryError(
            f"calibration batch {sizes.index(0)} holds no samples; expected them along the first axis of its first "
            "tensor"
        )
    try:
        joined = [_joined(each, sizes) for each in zip(*(values for values, _ in flat), strict=True)]
    except (RuntimeError, ValueError) as error:
        raise RecoveryError(
            f"the calibration batches cannot be put together ({first_line(error)}); expected inputs of one shape, "
            "samples along the first axis"
        ) from error
    return recovery, tree_unflatten(joined, flat[0][1])


def _inputs(number: int, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a batch as positional and keyword arguments; targets are left out."""
    if isinstance(batch, tuple | list) and batch:
        batch = batch[0]
        if isinstance(batch, tuple | list):
            return tuple(batch), {}
    if isinstance(batch, Mapping):
        return (), {key: value for key, value in batch.items() if key != "labels"}
    if isinstance(batch, Tensor):
        return (batch,), {}
    raise RecoveryError(
        f"calibration batch {number} is a {type(batch).__name__}, expected (inputs, targets), a dict or a tensor"
    )


def _samples(leaves: Sequence[Any]) -> int:
    """How many samples a batch has: the length of its first tensor."""
    return next((len(t) for t in leaves if isinstance(t, Tensor) and t.dim()), 0)


def _joined(each: Sequence[Any], sizes: list[int]) -> Any:
    """Samples of all batches; what is no sample, a mask say, has to be the same in all."""
    first = each[0]
    if not isinstance(first, Tensor):
        return first
    if all(t.dim() and len(t) == n for t, n in zip(each, sizes, strict=True)):
        return torch.cat(list(each))
    if all(torch.equal(t, first) for t in each):
        return first
    raise ValueError("an input that does not count samples differs from batch to batch")


# recovering


@torch.no_grad()
def recover_(
    net: nn.Module, teacher: nn.Module, recovery: Recovery, inputs: Any, changes: Changes, wishes: Wishes
) -> Recovered:
    """Let a network return what ``teacher`` does, layer by layer: what it was before it was cut, or written anew."""
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    args, kwargs = tree_map_only(Tensor, lambda t: t.to(device), inputs)
    samples = _samples([*args, *kwargs.values()])
    with ExitStack() as stack:  # some of it is optional, and all of it is undone in reverse order
        stack.enter_context(in_eval_mode(net))
        stack.enter_context(in_eval_mode(teacher))
        norms = _recalibrating(net, changes) if recovery.norms else []
        solver = _Solver(net, recovery, wishes, changes)
        if (recovery.adapters or recovery.head) and is_marked(net):
            solver.choose(args, kwargs)
            stack.enter_context(solver.in_step_with(teacher, args, kwargs))
        stack.enter_context(_taking_statistics(norms))
        _run(net, args, kwargs)
    made = [*solver.tensors, *_buffers(norms)]
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if any(tensor is each for each in made) and not torch.isfinite(tensor).all():
            raise RecoveryError(
                f"recovery gives {name} NaN or infinite values; look at the calibration batches, or raise ridge"
            )
    # ranks have seen other samples; the first one's solution counts
    broadcast_(made)
    return Recovered(samples, len(norms), solver.layers, solver.skipped, tuple(solver.parameters))


@dataclass(frozen=True)
class Wishes:
    """What is wanted of the layers, by name."""

    outputs: Mapping[str, Ints] = field(default_factory=dict)
    """For each layer that has fewer outputs than the teacher's, which of them it has."""
    centred: frozenset[str] = frozenset()
    """Layers whose mean does not matter, because a norm that takes new statistics takes it away."""
    deltas: Mapping[str, Tensor] = field(default_factory=dict)
    """What an update should stay near to, as a delta of the weight; by default what it is."""


def wishes_of(reduction: Reduction, recovery: Recovery) -> Wishes:
    """After a prune: what the layers returned, as far as their outputs stayed."""
    paths = {module: path for path, module in reduction.net.named_modules()}
    outputs = {
        paths[owner.module]: indices[0]
        for name, indices in reduction.cuts.items()
        for owner in reduction.owners[name]
        if owner.key == "weight" and indices[0] is not None
    }
    return Wishes(outputs, centred_layers(reduction.structure) if recovery.norms else frozenset())


def centred_layers(structure: Structure | None) -> frozenset[str]:
    """The layers with a batch norm behind them."""
    sites = () if structure is None else structure.sites
    return frozenset(site.writer for site in sites if site.norm)


@dataclass(frozen=True)
class _Target:
    """A layer to set: by its update, or in full where it has none."""

    layer: Any
    update: Update | None

    @property
    def key(self) -> object:
        """What tied layers have in common."""
        return self.layer.weight if self.update is None else self.update

    @property
    def learned(self) -> list[nn.Parameter]:
        """What is set."""
        if self.update is not None:
            return list(self.update.parameters())
        return [p for p in (self.layer.weight, self.layer.bias) if p is not None]


@dataclass
class _Solver:
    """The layers to set, and what has come of it."""

    net: nn.Module
    recovery: Recovery
    wishes: Wishes
    changes: Changes
    chosen: dict[str, _Target] = field(default_factory=dict)
    layers: dict[str, tuple[float, float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that were set."""
        return [p for target in self.chosen.values() for p in target.learned]

    @property
    def tensors(self) -> list[Tensor]:
        """All that was set: the scales of codes too."""
        updates = (target.update for target in self.chosen.values())
        return [*self.parameters, *(u.scale for u in updates if isinstance(u, Coded))]

    def choose(self, args: Any, kwargs: Any) -> None:
        """The layers that can be solved: plain ones, called once."""
        total = _samples([*args, *kwargs.values()])
        # two samples show how often each layer runs, and whether the network runs at all
        few = tree_map_only(Tensor, lambda t: t[:2] if t.dim() and len(t) == total else t, (args, kwargs))
        calls = _calls(self.net, *few)
        learning = self._learning()
        sharing = Counter(target.key for target in learning.values())
        for name, target in learning.items():
            if self.recovery.head if target.update is None else self.recovery.adapters:
                reason = _refusal(target, sharing[target.key], calls[target.layer])
                if reason:
                    self.skipped[name] = reason
                else:
                    self.chosen[name] = target

    def _learning(self) -> dict[str, _Target]:
        attachment = attachment_of(self.net)
        found = {entry.name: _Target(entry.layer, entry.update) for entry in attachment.updated}
        copies = {id(entry.copy) for entry in attachment.replaced}
        for name, module in self.net.named_modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() > 1 and weight.requires_grad and id(weight) in copies:
                found[name] = _Target(module, None)
        return found

    @contextmanager
    def in_step_with(self, teacher: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        """Set each layer when it is about to run."""
        with Lockstep(teacher, list(self.chosen), args, kwargs) as before:
            handles = []
            for name, target in self.chosen.items():

                def hook(layer: Any, given: Any, named: Any, name: str = name) -> None:
                    x = given[0] if given else next(iter(named.values()))
                    self._set_(name, self.chosen[name], x, before.output(name))

                handles.append(target.layer.register_forward_pre_hook(hook, with_kwargs=True))
            with hooked(handles):
                yield

    def _set_(self, name: str, target: _Target, x: Tensor, wanted: Tensor) -> None:
        layer, update = target.layer, target.update
        axis = -1 if isinstance(layer, nn.Linear) else 1 - layer.weight.dim()  # of the output's channels
        kept = self.wishes.outputs.get(name)
        if kept is not None:
            wanted = _channels(wanted, axis, torch.from_numpy(kept).to(wanted.device))
        # whether every tap of a kernel is fitted, or the centre tap alone
        whole = update is None or isinstance(update, Coded) or (isinstance(update, LowRank) and update.down.dim() > 2)
        is_centred = name in self.wishes.centred
        shifts = update is None and layer.bias is not None and not is_centred
        moments = Moments(centred=shifts or is_centred)
        # what the frozen weight does not make already; all of it, where nothing is frozen
        missing = wanted if update is None else wanted - type(layer).forward(layer, x)
        for inputs, part in features(layer, x, missing, whole, self.recovery.rows):
            moments.add(inputs, part)
        moments.power = _power(wanted, axis, centred=moments.centred)
        near = self.wishes.deltas.get(name)
        before = matrix_of(layer, update) if near is None else as_features(near, layer, whole)
        self.layers[name] = set_best_(moments, layer, update, before, self.recovery.ridge, self.changes, shifts=shifts)


def _channels(values: Tensor, axis: int, index: Tensor) -> Tensor:
    """Some channels, in the layout that the others were in."""
    if values.stride(axis) == 1:  # channels last: index_select would copy it to channels first
        return values.movedim(axis, -1).index_select(-1, index).movedim(-1, axis)
    return values.index_select(axis, index)


def _power(values: Tensor, axis: int, *, centred: bool) -> float:
    """The mean square of all channels together, without their means if these do not matter."""
    # (samples, channels, positions)
    rows = values.movedim(axis, 1).reshape(len(values), values.shape[axis], -1)
    count = len(rows) * rows.shape[2]
    total = rows.square().sum(2).double().sum(0) / count
    mean = rows.sum(2).double().sum(0) / count
    return float((total - mean**2 if centred else total).sum())


def _refusal(target: _Target, sharing: int, calls: int) -> str:
    """Why a layer cannot be solved; empty if it can."""
    layer, update = target.layer, target.update
    plain = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    own = next((kind for kind in plain if isinstance(layer, kind)), None)
    if sharing > 1:
        return "it shares its weight"
    if own is None or type(layer).forward is not own.forward:
        return f"no regression for a {type(layer).__name__}"
    if getattr(layer, "groups", 1) > 1:
        return "its channels are in groups"
    if getattr(update, "stays_whole", False):
        return "LoRA keeps all channels of the base"
    if update is not None and not isinstance(update, LowRank | Pointwise | Coded):
        return f"no regression for {type(update).__name__}"
    if isinstance(update, LowRank) and update.levels:
        return "its factors are codes"
    if calls != 1:
        return f"it runs {calls} times in one forward"
    return ""


def _calls(net: nn.Module, args: Any, kwargs: Any) -> Counter[nn.Module]:
    """How often each module runs in one forward."""
    counted: Counter[nn.Module] = Counter()
    handles = [m.register_forward_pre_hook(lambda module, _: counted.update([module])) for m in net.modules()]
    with hooked(handles):
        _run(net, args, kwargs)
    return counted


def _run(net: nn.Module, args: Any, kwargs: Any) -> None:
    try:
        net(*args, **kwargs)
    except RecoveryError:  # of a hook
        raise
    except Exception as error:  # whatever the network's own code raises
        raise RecoveryError(f"the network does not run on the calibration batches: {first_line(error)}") from error


class Lockstep:
    """Runs a network in a thread of its own that hands over what its layers return, one at a time.

    The thread waits with each output until the one before it has been asked for, so at most two are held.
    """

    def __init__(self, net: nn.Module, layers: list[str], args: Any, kwargs: Any) -> None:
        self._net, self._layers, self._args, self._kwargs = net, layers, args, kwargs
        self._handed: Queue[tuple[str, Any]] = Queue(maxsize=1)
        self._stopped = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Lockstep:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        with suppress(Empty):
            self._handed.get_nowait()  # frees the thread if it waits; the next output finds that nobody wants it
        self._thread.join()

    def output(self, layer: str) -> Tensor:
        """What a layer returned; the layers have to be asked for in the order in which they run."""
        name, value = self._handed.get()
        if isinstance(value, BaseException):
            raise RecoveryError(f"the unpruned network does not run on the calibration batches: {value}") from value
        if not name:
            raise RecoveryError(f"{layer} does not run in the unpruned network")
        if name != layer:
            raise RecoveryError(f"the layers run in another order than before the prune: {layer} instead of {name}")
        assert isinstance(value, Tensor)
        return value

    def _run(self) -> None:
        handles = []
        for name in self._layers:

            def hook(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                self._hand(name, output)

            layer = self._net.get_submodule(name)  # what it returns itself, before a gather spreads it
            handles.append(layer.register_forward_hook(hook, prepend=True))
        with suppress(_Stopped), hooked(handles):
            try:
                with torch.no_grad():
                    self._net(*self._args, **self._kwargs)
                self._hand("", None)
            except Exception as error:  # for whoever waits
                self._hand("", error)

    def _hand(self, name: str, value: Any) -> None:
        if self._stopped.is_set():
            raise _Stopped
        self._handed.put((name, value))


class _Stopped(BaseException):
    """Nobody waits any more; no error, so that no forward can catch it."""


_BatchNorm = nn.modules.batchnorm._BatchNorm


def _recalibrating(net: nn.Module, changes: Changes) -> list[_BatchNorm]:
    """The batch norms that keep statistics, on buffers whose old values can be put back."""
    norms = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    for buffer in _buffers(norms):  # norms write into the clone; the log keeps the old values
        changes.set_values_(buffer, buffer.detach().clone())
    return norms


def _buffers(norms: list[_BatchNorm]) -> list[Tensor]:
    return [b for norm in norms for b in (norm.running_mean, norm.running_var) if b is not None]


@contextmanager
def _taking_statistics(norms: list[_BatchNorm]) -> Iterator[None]:
    """Let norms take the statistics of the next batch, and no others."""
    before = [(norm.training, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.training, norm.momentum = True, 1.0  # the running statistics become those of this one batch
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked = norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (training, momentum, tracked) in zip(norms, before, strict=True):
            norm.training, norm.momentum, norm.num_batches_tracked = training, momentum, tracked
