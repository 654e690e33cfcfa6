"""What criteria look at: fused weights by unit, and what passes through a network while batches run.

From top to bottom, as a batch goes: `Batch` is what a loader gave; `Watch` maps the channels at one site to units;
`Record` holds what the hooks of `watched` measure in one batch; `Probe` is what a criterion gets, runs all of it, and
adds batches up.

What runs is a fused copy in eval mode, never the network. Hooks on the network itself would cost no copy, but a
Ctrl-C in the middle would leave them there, its gradients would be written, and relevance needs a copy to fold
norms in. The copy's weights are frozen, so a backward pass costs what the gradients of activations cost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from spalier.adapters.attach import fuse
from spalier.adapters.attachment import attachment_of, fused_value, is_marked, owners_of
from spalier.adapters.geometry import fast_path_closed
from spalier.errors import ScoreError
from spalier.pruning.modules import base_scale, run_attention
from spalier.pruning.plan import Kept, kept_of
from spalier.structure.graph import hooked
from spalier.structure.sites import Side, Site, layer_name
from spalier.structure.streams import kept_indices
from spalier.structure.structure import Structure
from spalier.text import first_line

Batches = Iterable[Any]


class Batch:
    """One batch: ``(inputs, *targets)``, a dict of keyword arguments, or inputs alone."""

    def __init__(self, number: int, given: Any) -> None:
        inputs, *targets = given if isinstance(given, tuple | list) and given else (given,)
        if given is inputs and not isinstance(given, Mapping | Tensor):
            raise ScoreError(
                f"batch {number} is a {type(given).__name__}, expected (inputs, targets), a dict of keyword arguments, "
                "or a tensor"
            )
        self.number, self.targets = number, tuple(targets)
        self.kwargs: dict[str, Any] = dict(inputs) if isinstance(inputs, Mapping) else {}
        several = inputs if isinstance(inputs, tuple | list) else (inputs,)
        self.args: tuple[Any, ...] = () if isinstance(inputs, Mapping) else tuple(several)

    def to(self, net: nn.Module) -> Batch:
        """The batch where the network is, as tensors that can be differentiated through."""
        first = next((t for t in (*net.parameters(), *net.buffers())), torch.empty(0))

        def moved(tensor: Tensor) -> Tensor:
            tensor = tensor.clone() if tensor.is_inference() else tensor
            return tensor if first.device.type == "cpu" else tensor.to(first.device)

        given = (self.args, self.kwargs, self.targets)
        self.args, self.kwargs, self.targets = tree_map_only(Tensor, moved, given)
        return self

    @property
    def size(self) -> int:
        """How many samples it holds."""
        tensors = [t for t in tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor) and t.dim()]
        if not tensors or not len(tensors[0]):
            raise ScoreError(
                f"batch {self.number} holds no samples; expected them along the first axis of its first tensor"
            )
        return len(tensors[0])

    def run(self, net: nn.Module) -> Any:
        """What the network returns for it."""
        try:
            return net(*self.args, **self.kwargs)
        except (TypeError, RuntimeError, ValueError, IndexError) as error:
            raise ScoreError(
                f"the network does not run on batch {self.number}: {error}; expected (inputs, targets) or a dict of "
                "keyword arguments"
            ) from error


def batches_of(given: Batches | None, net: nn.Module, what: str) -> Iterator[Batch]:
    """Every batch of a loader; none at all is an error."""
    is_iterable = isinstance(given, Iterable) or hasattr(given, "__getitem__")
    if isinstance(given, Tensor | Mapping | str) or not is_iterable or given is None:
        found = "none were given" if given is None else f"a {type(given).__name__} was given"
        raise ScoreError(
            f"{what} needs batches, and {found}; expected an iterable of (inputs, targets), such as a DataLoader, or a "
            "list of one batch"
        )
    number = -1
    for number, each in enumerate(given):
        yield Batch(number, each).to(net)
    if number < 0:
        raise ScoreError(f"{what} needs batches, and there are none; expected at least one (inputs, targets)")


def loss_of(loss: Any, output: Any, batch: Batch, net: nn.Module) -> Tensor:
    """The loss of one batch, a finite number that depends on the network."""
    if loss is None:
        value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if value is None:
            raise ScoreError(
                f"the network returns a {type(output).__name__} without a loss; pass loss=, a function of the output "
                "and the batch's targets, such as torch.nn.functional.cross_entropy"
            )
    else:
        try:
            value = loss(output, *batch.targets)
        except (TypeError, RuntimeError, ValueError, IndexError) as error:
            raise ScoreError(
                f"the loss fails on batch {batch.number}: {error}; it is called with the network's output and the "
                f"{len(batch.targets)} target(s) of the batch"
            ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise ScoreError(f"the loss is a {type(value).__name__}{shape}, expected one number, the batch's mean")
    if not torch.isfinite(value):
        raise ScoreError(
            f"the loss of batch {batch.number} is {float(value.detach())}{_first_not_finite(net, batch)}; look at its "
            "inputs and targets, or go back to sound weights"
        )
    if not value.requires_grad:
        raise ScoreError(
            "the loss does not depend on the network: no channel of a stream has a part in it; compute it from the "
            "network's output, without detach() or torch.no_grad()"
        )
    return value


def _first_not_finite(net: nn.Module, batch: Batch) -> str:
    """Where NaN or infinity begins."""
    found: list[str] = []

    def is_broken(values: Any) -> bool:
        tensors = (t for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point())
        return any(not torch.isfinite(t).all() for t in tensors)

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if is_broken(output):
            found.append(name)

    if is_broken((batch.args, batch.kwargs)):
        return ", its inputs are not finite"
    handles = [m.register_forward_hook(partial(note, n)) for n, m in net.named_modules() if n]
    with hooked(handles):
        batch.run(net)
    return f", first not finite at {found[0]!r}" if found else ""


@dataclass(frozen=True)
class Watch:
    """A site in the network as it is now."""

    site: Site
    where: Tensor
    """For each channel, the number of its unit among those that are left; one past the last for none."""
    units: int

    def laid_out(self, value: Tensor, samples: int) -> Tensor:
        """A tensor as (samples, positions, channels), in single precision at least."""
        axis = self.site.axis % value.dim()
        wide = value.float() if value.dtype.itemsize < 4 else value
        first = sample_axis(tuple(value.shape), axis, samples)
        if first is None:  # nothing counts samples: all of it is one
            return wide.movedim(axis, -1).reshape(1, -1, value.shape[axis])
        return wide.movedim((first, axis), (0, -1)).reshape(samples, -1, value.shape[axis])

    def by_unit(self, value: Tensor) -> Tensor:
        """Channels of one unit, added up: (samples, units) of (samples, channels)."""
        if value.shape[-1] != len(self.where):
            raise ScoreError(
                f"{self.site.module!r} has {value.shape[-1]} channels here, expected {len(self.where)}; the network "
                "was changed since it was traced"
            )
        if self.units == len(self.where):
            return value
        folded = value.new_zeros(len(value), self.units + 1)
        folded.index_add_(1, self.where.to(value.device), value)
        return folded[:, : self.units]


def sample_axis(shape: tuple[int, ...], channel: int, samples: int) -> int | None:
    """The axis that counts samples: the first, perhaps with windows of each sample in it, or another of that length.

    >>> [sample_axis(shape, 2, samples=4) for shape in ((4, 7, 8), (7, 4, 8), (12, 7, 8), (5, 7, 8))]
    [0, 1, 0, None]
    """
    axes = [axis for axis in range(len(shape)) if axis != channel]
    exact = [axis for axis in axes if shape[axis] == samples]
    whole = [axis for axis in axes if axis == 0 and shape[axis] % samples == 0]
    return next(iter(exact + whole), None)


class Record:
    """What the sites have shown in the current batch."""

    def __init__(self, watches: list[Watch]) -> None:
        self.watches = watches
        self.samples = 0
        self._values: list[Tensor | None] = [None] * len(watches)
        self._returned: list[tuple[_Tap, Tensor, int]] = []
        self.taps: list[_Tap] = []

    def start(self, samples: int) -> None:
        """Forget the batch before."""
        self.samples = samples
        self._values = [None] * len(self.watches)
        self._returned.clear()
        for tap in self.taps:
            tap.calls = 0

    def add(self, number: int, value: Tensor) -> None:
        """Another call's numbers for one site, (samples, channels)."""
        value = self.watches[number].by_unit(value)
        before = self._values[number]
        self._values[number] = value if before is None else before + value

    def returned(self, tap: _Tap, tensor: Tensor) -> None:
        """Remember what a hook gave back, to see whether later code writes into it."""
        self._returned.append((tap, tensor, tensor._version))

    def take(self) -> list[Tensor | None]:
        """The batch's numbers, (samples, units) for each site."""
        for tap in {tap for tap, *_ in self._returned}:
            tap.copies = any(t._version != version for each, t, version in self._returned if each is tap)
        self._returned.clear()
        return self._values


class _Tap:
    """The hook on one module."""

    def __init__(
        self, record: Record, numbers: list[int], measure: Callable[..., Tensor], gradients: bool, values: bool
    ) -> None:
        self.record, self.numbers, self.measure = record, numbers, measure
        self.gradients, self.values = gradients, values
        self.copies = values
        """Whether later code may write into what passes here (``out += x``), so that it has to be copied first."""
        self.buffers: list[Tensor] = []
        self.calls = 0
        """How many of them this batch has used."""

    def see(self, value: Tensor) -> Tensor:
        """What passes; the network goes on with what is returned."""
        if not self.gradients:
            for number in self.numbers:
                laid_out = self.record.watches[number].laid_out(value, self.record.samples)
                self.record.add(number, self.measure(laid_out, None))
            return value
        if not value.requires_grad:  # the first channels: nothing before them is asked for
            value = value.detach().requires_grad_().clone()
        if not self.values:
            value.register_hook(lambda gradient: self._measure(None, 0, gradient))
            return value
        kept = self._copied(value.detach()) if self.copies else value.detach()
        version = kept._version
        value.register_hook(lambda gradient: self._measure(kept, version, gradient))
        self.record.returned(self, value)
        return value

    def _copied(self, value: Tensor) -> Tensor:
        """A copy in memory that earlier batches had: fresh memory costs more than the copying."""
        self.calls += 1
        if len(self.buffers) < self.calls:
            self.buffers.append(torch.empty_like(value))
        if self.buffers[self.calls - 1].shape != value.shape:
            self.buffers[self.calls - 1] = torch.empty_like(value)
        return self.buffers[self.calls - 1].copy_(value)

    def _measure(self, kept: Tensor | None, version: int, gradient: Tensor) -> None:
        if kept is not None and kept._version != version:
            raise ScoreError(
                "the network writes into its activations in this batch and did not in the one before; "
                "set inplace=False where it does"
            )
        for number in self.numbers:
            watch = self.record.watches[number]
            values = None if kept is None else watch.laid_out(kept, self.record.samples)
            self.record.add(number, self.measure(values, watch.laid_out(gradient, self.record.samples)))


@contextmanager
def watched(
    net: nn.Module,
    watches: list[Watch],
    measure: Callable[..., Tensor],
    *,
    gradients: bool = True,
    values: bool = True,
    before_norm: bool = False,
) -> Iterator[Record]:
    """Watch all sites while the network runs: what passes there (``values``), and what comes back (``gradients``).

    ``before_norm`` is where the published code looked.
    """
    record = Record(watches)
    places: dict[tuple[str, Side], list[int]] = {}
    for number, watch in enumerate(watches):
        site = watch.site
        module = site.writer if before_norm and site.norm else site.module
        places.setdefault((module, site.side), []).append(number)
    taps = {place: _Tap(record, numbers, measure, gradients, values) for place, numbers in places.items()}
    record.taps = list(taps.values())
    with (
        seeing(net, [(module, side, tap.see) for (module, side), tap in taps.items()]),
        torch.enable_grad() if gradients else torch.no_grad(),
    ):
        yield record


See = Callable[[Tensor], Tensor | None]
"""Sees a tensor, and may give another one to go on with."""


@contextmanager
def seeing(net: nn.Module, places: Iterable[tuple[str, Side, See]]) -> Iterator[None]:
    """Let functions see what modules take or return, before a gather spreads it."""
    handles = []
    for path, side, see in places:
        module = net.get_submodule(path)
        if side == "output":
            handles.append(module.register_forward_hook(partial(_see_output, see), prepend=True))
        else:
            handles.append(module.register_forward_pre_hook(partial(_see_input, see)))
    with hooked(handles):
        yield


def _see_output(see: See, module: nn.Module, args: Any, output: Any) -> Any:
    return see(output) if isinstance(output, Tensor) else None


def _see_input(see: See, module: nn.Module, args: Any) -> Any:
    found = see(args[0]) if args and isinstance(args[0], Tensor) else None
    return None if found is None else (found, *args[1:])


def mean_product(values: Tensor, gradients: Tensor) -> Tensor:
    """The mean over positions of two tensors' product, (samples, channels), without a product of all samples at once.

    >>> mean_product(torch.ones(2, 3, 4), torch.full((2, 3, 4), 5.0))
    tensor([[5., 5., 5., 5.],
            [5., 5., 5., 5.]])
    """
    if values[0].numel() < _LARGE:
        return (values * gradients).mean(1)
    one = torch.empty_like(values[0])
    means = [torch.mul(a, b, out=one).mean(0) for a, b in zip(values, gradients, strict=True)]
    return torch.stack(means)


_LARGE = 1 << 17
"""From so many numbers of one sample on, fresh memory for all of them costs more than a loop."""


Place = tuple[int, str]
"""A stream's number, and the layer whose channels are looked at."""
Values = dict[Place, Tensor]


class Probe:
    """What a criterion may look at; a new one is made for every `score`."""

    def __init__(self, net: nn.Module, structure: Structure) -> None:
        self.net, self.structure = net, structure
        self.kept: Kept = kept_of(net, structure)
        self.samples = 0
        """How many samples were looked at."""

    # weights

    def weights(self, *, fused: bool, folded: bool) -> Iterator[tuple[Place, Tensor]]:
        """The weights that write each unit, as (units, entries), for every layer that writes a stream."""
        owners = owners_of(self.net, self.structure.names)
        norms = {(s.stream, s.writer): s.norm for s in self.structure.sites if s.norm}
        for number, stream in enumerate(self.structure.streams):
            for member in (m for m in stream.members if m.role == "writer"):
                place = number, layer_name(member.tensor)
                owner = owners[member.tensor][0]
                plain = owner.tensor.detach()
                weight = fused_value(owners, member.tensor) if fused else plain
                rows = weight.detach().movedim(member.axis, 0).flatten(1)
                if folded and place in norms:
                    rows = _folded(rows, self.net.get_submodule(norms[place]))
                left = self.kept.of(self.structure, member.tensor)[member.axis]
                yield place, _by_unit(rows, member.units[left])

    # activations

    def twin(self, *, fused: bool = True) -> nn.Module:
        """A plain copy in eval mode, all frozen, with attention that calls its output projection."""
        try:
            made = self._copied(fused)
        except RuntimeError as error:  # a module has kept a tensor of an earlier forward, with its graph
            raise ScoreError(
                f"the network cannot be copied: {first_line(error)}; run it once under torch.no_grad(), so that what "
                "its modules keep can be"
            ) from error
        for parameter in made.parameters():
            parameter.requires_grad_(False)
        for module in made.modules():
            _open_(module)
        return made

    def _copied(self, fused: bool) -> nn.Module:
        if not is_marked(self.net):
            return copy.deepcopy(self.net)
        return fuse(self.net) if fused else _without_updates(self.net)

    def sites(self) -> list[Site]:
        """One or more for every stream; a stream that cannot be seen is an error."""
        seen = {site.stream for site in self.structure.sites}
        for number, stream in enumerate(self.structure.streams):
            if number not in seen:
                raise ScoreError(
                    f"the channels of {stream.name!r} pass through no module's input or output, so nothing can be "
                    "measured there; use criterion 'weight', 'magnitude' or 'random', or keep it whole "
                    "(trace(..., freeze=...))"
                )
        return list(self.structure.sites)

    def watches(self) -> list[Watch]:
        """How every site is watched in the network as it is now."""
        return [self._watch(site) for site in self.sites()]

    def _watch(self, site: Site) -> Watch:
        size = len(site.units[0][1])
        left = kept_indices(site.units, size, self.kept.streams)
        if site.writer in self.kept.writers and site.side == "output":
            left = left & self.kept.writers[site.writer]
        units = dict(site.units)[site.stream][left]
        alive = np.unique(units[units >= 0])
        where = np.where(units >= 0, np.searchsorted(alive, units), len(alive))
        return Watch(site, torch.from_numpy(where), len(alive))

    def means(
        self,
        watches: list[Watch],
        batches: Any,
        one: Callable[[Batch], list[Tensor | None]],
        *,
        what: str,
        signed: bool = False,
        literal: bool = False,
    ) -> Values:
        """The means over all samples of what ``one`` gives for each batch: (samples, units) for every site."""
        sums, self.samples = [torch.zeros(watch.units, dtype=torch.float64) for watch in watches], 0
        for batch in batches_of(batches, self.net, what):
            with torch.inference_mode(False):
                values = one(batch)
            for watch, total, value in zip(watches, sums, values, strict=True):
                seen = _checked(value, watch.site, batch)
                # the literal definition sums before it takes absolute values
                total += (seen if literal or signed else seen.abs()).sum(0).to(total)
            self.samples += batch.size
        found: Values = {}
        for watch, total in zip(watches, sums, strict=True):  # layers that are seen at several places are added up
            place = watch.site.stream, watch.site.writer
            found[place] = (total if signed else total.abs()) / max(self.samples, 1) + found.get(place, 0)
        return found


def _checked(value: Tensor | None, site: Site, batch: Batch) -> Tensor:
    """One batch's numbers for a site, (samples, units)."""
    if value is None:
        raise ScoreError(
            f"nothing came through {site.module!r} in batch {batch.number}: no output of the network that the loss "
            "takes depends on it; use the inputs and the loss that the network was traced for"
        )
    if not torch.isfinite(value).all():
        raise ScoreError(
            f"{site.writer!r} has scores that are NaN or infinite in batch {batch.number}; look at that batch's "
            "inputs, or go back to sound weights"
        )
    return value


def _open_(module: nn.Module) -> None:
    """Let hooks see what PyTorch's attention and encoders compute past their own modules."""
    if isinstance(module, nn.MultiheadAttention):
        module.__dict__.setdefault("scale", base_scale(module))
        # the output projection is called as a module, so that hooks see what it takes
        module.__dict__["forward"] = partial(run_attention, module, project=lambda out_proj, x: out_proj(x))
    module.__dict__.update(fast_path_closed(module))


def _without_updates(net: nn.Module) -> nn.Module:
    """A copy as if nothing had been learned but norms and head: what the published code scored."""
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for entry in attachment_of(twin).updated:
            for parameter in entry.update.parameters():
                parameter.zero_()
    return fuse(twin)


def _folded(rows: Tensor, norm: Any) -> Tensor:
    """Weights by output with a batch norm in them; those of a grouped, transposed layer lie group by group."""
    if norm.running_var is None:
        return rows  # it divides by the statistics of each batch
    scale = torch.rsqrt(norm.running_var + norm.eps)  # what the norm multiplies each channel by in eval mode
    if norm.weight is not None:
        scale = scale * norm.weight.detach()
    groups = len(scale) // len(rows)
    return (rows.view(len(rows), groups, -1) * scale.view(groups, -1).T[:, :, None]).flatten(1)


def _by_unit(rows: Tensor, units: Any) -> Tensor:
    """Rows of one unit side by side: every unit has equally many."""
    alive = np.unique(units[units >= 0])
    if len(alive) == len(units) and np.array_equal(alive, units):
        return rows
    order = np.argsort(np.where(units >= 0, units, len(alive) + units.max() + 1), kind="stable")
    order = order[: int((units >= 0).sum())]
    return rows[torch.from_numpy(order).to(rows.device)].reshape(len(alive), -1)
