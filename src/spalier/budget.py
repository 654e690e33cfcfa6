"""What a network will be where these units and components stay: counted by `Meter`, or measured by `Latency`.

`Meter` counts from shapes alone and runs nothing, so `select` can ask it again and again. Multiply-accumulates are
known by the costs that the walk over the graph noted at every contraction. Where these do not explain what `count`
finds now (recurrent layers, einsum), a copy is pruned and counted.

`Latency` times the layers. That table says where to look, and the pruned network itself is measured there.
"""

from __future__ import annotations

import copy
import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from spalier.adapters.attach import detach_, fuse
from spalier.adapters.attachment import attachment_of, is_marked, owners_of
from spalier.adapters.codes import packed_size
from spalier.adapters.geometry import is_norm
from spalier.adapters.kinds import LowRank, Update
from spalier.counting import Count, count
from spalier.distributed import from_first_rank
from spalier.errors import BudgetError, SpalierError
from spalier.pruning.plan import PRUNED_MARK, Indices, Kept, Plan, Prediction, cuts_of, kept_of, whole
from spalier.pruning.prune import cut_geometry, prune_
from spalier.structure.graph import arguments, copied, hooked
from spalier.structure.structure import Structure
from spalier.timing import quartiles, take_turns

Ranks = Mapping[str, int]
"""How many components of each adapter stay, by the path of its layer."""


class Meter:
    """Counts a network as it would be."""

    def __init__(self, net: nn.Module, structure: Structure) -> None:
        self.net, self.structure = net, structure
        self.kept, self.whole = kept_of(net, structure), whole(structure)
        self.owners = owners_of(net, structure.names)
        self.writers = sorted({(m.tensor, m.axis) for s in structure.streams for m in s.members if m.role == "writer"})
        self._uncounted = ""
        """Why multiply-accumulates cannot be counted, if so."""

    # the sizes that budgets are about

    def channels(self, kept: Kept) -> int:
        """Output channels of the layers that write streams."""
        return sum(int(kept.of(self.structure, tensor)[axis].sum()) for tensor, axis in self.writers)

    def parameters(self, kept: Kept) -> int:
        """Parameters of the fused network."""
        return sum(self._numel(kept, name) for name in self.structure.parameters)

    def macs(self, kept: Kept) -> int:
        """Multiply-accumulates of one sample of the example; what the structure does not know of stays as it is."""
        if self._counted is None:
            raise BudgetError(
                f"the multiply-accumulates of this network cannot be counted ({self._uncounted}); use another budget, "
                "or trace it with an example that says how many samples it holds"
            )
        return (self._terms(kept) + self._unknown) // self._samples  # the costs are of the whole example

    def task_bytes(self, kept: Kept, ranks: Ranks) -> int:
        """What a task file holds in float32: learned parameters, statistics of norms, and a bit for each unit.

        Codes count by the bytes that they are packed into.
        """
        streams = self.structure.streams
        bits = [stream.size for stream in streams]
        bits += [streams[self.structure.free_writers[name]].size for name in kept.writers]
        masks = sum(math.ceil(size / 8) for size in bits)
        adapters = sum(_bytes_of(update, sizes) for update, sizes in self._updates(kept, ranks))
        return 4 * (self._in_full(kept) + self._statistics(kept)) + adapters + masks

    def learned(self, kept: Kept, ranks: Ranks) -> int:
        """Parameters that learn: adapters, norms, head."""
        adapters = sum(math.prod(size) for _, sizes in self._updates(kept, ranks) for size in sizes.values())
        return self._in_full(kept) + adapters

    def _in_full(self, kept: Kept) -> int:
        """Parameters of the network itself that learn."""
        tensors = {name: owners[0].tensor for name, owners in self.owners.items()}
        learning = [n for n, t in tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad]
        return sum(self._numel(kept, name) for name in learning)

    def _updates(self, kept: Kept, ranks: Ranks) -> Iterator[tuple[Update, Sizes]]:
        """Every update, once, with the sizes that its parameters would have."""
        cuts = cuts_of(self.structure, self.kept, kept)
        seen = set()
        for name, owners in self.owners.items():
            for update in (owner.update for owner in owners):
                if update is not None and update not in seen:  # tied weights share theirs
                    seen.add(update)
                    rank = ranks.get(self._paths[update])
                    yield update, _left_of(update, owners[0].tensor, cuts.get(name), rank)

    def densities(self) -> dict[str, tuple[int, int] | None]:
        """What is left of the base, and of how much: channels, weights, and MACs where they can be counted."""
        known = self._counted is not None and not self._unknown
        return {
            "channels": (self.channels(self.kept), self.channels(self.whole)) if self.writers else None,
            "weights": (self.parameters(self.kept), self.parameters(self.whole)),
            "macs": (self.macs(self.kept), self.macs(self.whole)) if known else None,
        }

    def predict(self, plan: Plan, kept: Kept) -> Prediction:
        """All of it, for a plan and what it leaves."""
        ranks = {name: len(components) for name, components in plan.ranks.items()}
        macs = base = None
        if self._counted is not None and not self._unknown:
            macs, base = self.macs(kept), self.macs(self.whole)
        elif self._counted is not None:
            twin = copy.deepcopy(self.net)
            prune_(twin, plan, check=False)
            macs = count(twin, self.structure.example).macs
        return Prediction(
            channels=self.channels(kept),
            channels_base=self.channels(self.whole),
            parameters=self.parameters(kept),
            parameters_base=self.parameters(self.whole),
            learned=self.learned(kept, ranks),
            bytes=self._bytes(kept),
            macs=macs,
            macs_base=base,
            task_bytes=self.task_bytes(kept, ranks) if is_marked(self.net) else None,
        )

    # details

    def _sizes(self, kept: Kept, tensor: str) -> list[int]:
        return [int(mask.sum()) for mask in kept.of(self.structure, tensor)]

    def _numel(self, kept: Kept, tensor: str) -> int:
        return math.prod(self._sizes(kept, tensor))

    def _terms(self, kept: Kept) -> int:
        tensors = {cost.tensor for cost in self.structure.costs if cost.tensor}
        sizes = {name: self._sizes(kept, name) for name in tensors}
        return sum(cost.left(kept.streams, sizes) for cost in self.structure.costs)

    @cached_property
    def _counted(self) -> Count | None:
        """What the network computes now; None where the example is gone or does not say."""
        if self.structure.example is None:
            self._uncounted = "it was traced elsewhere, and there is no example"
            return None
        try:
            return count(self.net, self.structure.example)
        except SpalierError as error:  # a plan then says nothing of MACs, and a budget of them is refused
            self._uncounted = str(error)
            return None

    @cached_property
    def _samples(self) -> int:
        return (self._counted.samples if self._counted else None) or 1

    @cached_property
    def _unknown(self) -> int:
        """What `count` finds now beside what the structure knows of: recurrent layers, say."""
        macs = self._counted.macs if self._counted else None
        return 0 if macs is None else macs * self._samples - self._terms(self.kept)

    @cached_property
    def _paths(self) -> dict[Update, str]:
        found: dict[Update, str] = {}
        for entry in attachment_of(self.net).updated if is_marked(self.net) else ():
            found.setdefault(entry.update, entry.path)
        return found

    def _statistics(self, kept: Kept) -> int:
        """Running means and variances of norms."""
        norms = [
            name
            for name, (owner, *_) in self.owners.items()
            if owner.place == "_buffers" and is_norm(owner.module) and owner.tensor.is_floating_point()
        ]
        return sum(self._numel(kept, name) for name in norms)

    def _bytes(self, kept: Kept) -> int:
        sizes = {name: owners[0].tensor.element_size() for name, owners in self.owners.items()}
        total = sum(self._numel(kept, name) * size for name, size in sizes.items())
        for name in kept.writers:  # a gather holds the place of each channel of the stream, as an int64
            total += 8 * int(kept.streams[self.structure.free_writers[name]].sum())
        return total


Sizes = dict[nn.Parameter, list[int]]


def _bytes_of(update: Update, sizes: Sizes) -> int:
    """What a task file holds of an update: codes packed, all else in float32."""
    levels = getattr(update, "levels", 0)
    coded = {id(getattr(update, key, None)) for key in ("delta", "down", "up")} if levels else set()
    counts = {parameter: math.prod(size) for parameter, size in sizes.items()}
    packed = sum(packed_size(count, levels) for parameter, count in counts.items() if id(parameter) in coded)
    scales = 2 * update.rank if levels and isinstance(update, LowRank) else 0
    return packed + 4 * (scales + sum(count for parameter, count in counts.items() if id(parameter) not in coded))


def _left_of(update: Update, weight: Tensor, indices: Indices | None, rank: int | None) -> Sizes:
    """The sizes that an update's parameters would have."""
    sizes = {parameter: list(parameter.shape) for parameter in update.parameters()}
    if indices is not None:
        _, outputs, inputs = cut_geometry(update, weight.shape, indices)
        for parameter, left in update.cuts(outputs, inputs):
            for axis, index in enumerate(left):
                sizes[parameter][axis] = parameter.shape[axis] if index is None else len(index)
    if rank is not None and isinstance(update, LowRank):
        for factor in (update.down, update.up):
            sizes[factor][0] = rank
    return sizes


# budgets of time

ROUNDS = 4
"""How often a network is timed, in turns with the unpruned one."""
CLOSE = 0.95
"""How much of its budget a plan has to use; or so many steps of all are as fine as it gets."""
FINEST = 100


class Latency:
    """Times layers, and whole networks."""

    def __init__(self, net: nn.Module, meter: Meter, example: Any) -> None:
        self.net, self.meter = net, meter
        self.example = copied(meter.structure.example if example is None else example)
        if self.example is None:
            raise BudgetError("a budget of latency needs an example batch; pass example=")
        self.plain = (fuse(net) if is_marked(net) else copy.deepcopy(net)).eval()
        """The network as it is, fused: it has no adapters, so ranks say nothing; it knows what is left of its base."""
        self.base = _base_of(net, self.plain)
        found: tuple[dict[str, float], float] = from_first_rank(self._measured_layers)
        self.layers, self.rest = found

    def search(
        self, most: int, plan_at: Callable[[int], Plan], kept_at: Callable[[int], Kept], share: float
    ) -> tuple[int, float, float]:
        """How many steps bring the measured time within its share, that time, and the unpruned network's."""
        total = self._looked_up(self.meter.whole)
        guess = first_step(most, lambda n: self._looked_up(kept_at(n)) <= share * total)
        tried: dict[int, tuple[float, float]] = {}
        low, high, steps = 0, most, most if guess is None else guess
        while low <= high:  # a bisection that begins where the table says
            # times differ from rank to rank, and plans must not
            small, base = tried[steps] = from_first_rank(partial(self._timed, plan_at(steps), total))
            is_within = small <= share * base
            low, high = (low, steps - 1) if is_within else (steps + 1, high)
            if is_within and (small >= CLOSE * share * base or high - low < most // FINEST):
                break
            steps = (low + high + 1) // 2
        reached = [steps for steps, (small, base) in tried.items() if small <= share * base]
        if not reached:
            least = min(small / base for small, base in tried.values())
            raise BudgetError(
                f"latency={share} cannot be reached: with all that may go gone, {least:.3f} was measured; "
                "ask for that or more"
            )
        small, base = tried[min(reached)]
        if small >= 0.98 * base:
            warnings.warn(
                f"the plan will not be faster: {1e3 * small:.2f} ms were measured, and {1e3 * base:.2f} ms without it; "
                "on this machine something other than the number of channels takes the time",
                stacklevel=4,
            )
        return min(reached), small, base

    def _timed(self, plan: Plan, total: float) -> tuple[float, float]:
        """Seconds of the pruned and of the unpruned network, in turns."""
        small = copy.deepcopy(self.plain)
        prune_(small, Plan(plan.structure, plan.keep, writers=plan.writers), check=False)
        if self.base is None:
            return seconds([small], self.example)[0], total
        fast, slow = seconds([small, self.base], self.example)
        return fast, slow

    def _measured_layers(self) -> tuple[dict[str, float], float]:
        """Seconds of each layer as it is; and what is left of the whole network's time."""
        inputs = _layer_inputs(self.plain, self.example)
        alike = {name: f"{layer} on {shape}" for name, (layer, shape) in inputs.items()}  # these are timed once
        calls = {}
        for name, (layer, shape) in inputs.items():
            x = torch.ones(shape, dtype=layer.weight.dtype, device=layer.weight.device)
            calls[alike[name]] = partial(layer.forward, x)  # past hooks: a gather behind it, say
        with torch.no_grad():
            taken = {key: quartiles(times)[0] for key, times in take_turns(calls, rounds=3).items()}
        layers = {name: taken[key] for name, key in alike.items()}
        (total,) = seconds([self.plain], self.example)
        return layers, max(total - sum(layers.values()), 0.0)

    def _looked_up(self, kept: Kept) -> float:
        """What the table says of a network with these units."""
        structure, now = self.meter.structure, self.meter.kept
        found = 0.0
        for name, taken in self.layers.items():
            tensor = structure.names[f"{name}.weight"]
            left, had = (k.of(structure, tensor) for k in (kept, now))
            # what a layer takes is nearly linear in both widths, and the whole network is measured anyway
            found += taken * math.prod(float(left[axis].sum() / had[axis].sum()) for axis in (0, 1))
        share = self.meter.channels(kept) / max(self.meter.channels(now), 1)  # norms, activations, sums
        return found + self.rest * share


def first_step(most: int, holds: Callable[[int], bool]) -> int | None:
    """The smallest number of steps at which something holds that goes on to hold; None if it never does."""
    found = bisect_left(range(most + 1), True, key=holds)
    return None if found > most else found


def _base_of(net: nn.Module, plain: nn.Module) -> nn.Module | None:
    """The unpruned network, if it can be had."""
    if PRUNED_MARK not in net.__dict__:
        return plain
    if not is_marked(net):
        return None
    twin = copy.deepcopy(net)
    detach_(twin)
    return twin.eval()


@torch.no_grad()
def seconds(nets: list[nn.Module], example: Any, rounds: int = ROUNDS) -> list[float]:
    """The time of one forward of each network, measured in turns; the lower quartile, as other work only adds time."""
    args, kwargs = arguments(example)
    calls = {str(number): partial(net, *args, **kwargs) for number, net in enumerate(nets)}
    return [quartiles(times)[0] for times in take_turns(calls, rounds=rounds).values()]


def _layer_inputs(net: nn.Module, example: Any) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """The plain convolutions and linear layers that run, and the shapes of what they take."""
    found: dict[str, tuple[Any, tuple[int, ...]]] = {}
    handles = []
    for name, module in net.named_modules():
        is_layer = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear)
        if is_layer and getattr(module, "groups", 1) == 1:

            def note(layer: nn.Module, args: Any, name: str = name) -> None:
                if args and isinstance(args[0], Tensor):
                    found.setdefault(name, (layer, tuple(args[0].shape)))

            handles.append(module.register_forward_pre_hook(note))
    args, kwargs = arguments(example)
    with hooked(handles), torch.no_grad():
        net(*args, **kwargs)
    return found
