"""`trace`: find what can be pruned in a network, and say what cannot, and why.

The graph says which channels are coupled (`spalier.structure`). It does not show whether the code that made it would
run with fewer: a view may be written with a constant, or with the width of another tensor. So there is a dry run. A
twin of fake tensors, which computes shapes alone, loses a unit of every stream and runs. If it fails, or if its views
have other shapes than the structure says, the streams that are to blame are frozen, with the reason.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from spalier.adapters.attachment import MARK, Changes, owners_of
from spalier.adapters.geometry import plain_tensors
from spalier.errors import TraceError
from spalier.pruning.plan import PRUNED_MARK, Indices, Kept, Reduction, whole
from spalier.pruning.prune import Cutter, apply_
from spalier.pruning.verify import follow_calls
from spalier.structure.graph import Value, arguments, as_base, on_device_of, operation, quiet
from spalier.structure.streams import Extent
from spalier.structure.structure import UNUSED, Cache, Freeze, Structure, find, fingerprint, without
from spalier.text import first_line


def trace(
    net: nn.Module, example: Any, *, freeze: Freeze = None, cache: str | os.PathLike[str] | None = None
) -> Structure:
    """Find the streams of ``net``: coupled channels, who writes and reads them, and what has to stay.

    The network is captured with `torch.export` in eval mode, frozen or not, adapted or not, and left as it was. Then a
    twin without values shows whether its own code runs with fewer channels. What is not understood, or does not follow,
    is frozen, with the operation and the line as the reason.

    Args:
        net: any network that `torch.export` can capture, on the CPU or on the meta device.
        example: an input for it: a tensor, a tuple of arguments, or a dict of keyword arguments.
        freeze: what else has to stay whole: names or patterns of modules, or a predicate of name and module.
        cache: a folder of structures by the networks' fingerprints. One that is found there is loaded in
            milliseconds; the graph is captured only once `prune_` wants to compare.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> print(trace(net, torch.randn(1, 4)))  # doctest: +ELLIPSIS
    stream  units  writers  readers  riders
         0      8        0        2       1
    <BLANKLINE>
         frozen  indices  why
    0.weight[1]   4 of 4  linear at linear.py:...: the other side carries no channels
    2.weight[0]   2 of 2  an output of the network
      2.bias[0]   2 of 2  an output of the network
    8 units in 1 streams; 96.6% of the weights can go
    """
    if PRUNED_MARK in net.__dict__:
        raise TraceError(
            "the network is pruned already, and units are counted in its base; use the structure that it was "
            "pruned with"
        )
    known = None if cache is None else Cache(cache).get(fingerprint(net, example, freeze))
    if known is not None:
        return replace(known, example=example, freeze=freeze)
    structure = find(net, example, freeze)
    refused = unfollowed(net, structure)
    if refused:
        structure = without(net, structure, refused)
    if cache is not None:
        Cache(cache).put(structure)
    return structure


# the dry run

Failure = tuple[str, str]
"""The path of the module that fails, and the reason."""


def unfollowed(net: nn.Module, structure: Structure) -> dict[int, str]:
    """The streams that the network's code cannot lose channels of, and why."""
    refused: dict[int, str] = {}
    with quiet():
        twin = _Twin(net, structure)
        # a layer that the example passes by may read a stream where the network trains
        modes = (False, True) if any(f.reason == UNUSED for f in structure.frozen) else (False,)
        for twin.training in modes:
            left = [number for number in range(len(structure.streams)) if number not in refused]
            refused |= _refused(twin, structure, left)
    return refused


def _refused(twin: _Twin, structure: Structure, left: list[int]) -> dict[int, str]:
    """Take streams out until the twin runs with a unit less in each of those that are left."""
    refused: dict[int, str] = {}
    alone: dict[int, Failure | None] = {}
    while (failure := twin.fails(left)) is not None:
        if not refused and twin.fails(()) is not None:  # it needs values to run: nothing can be said here
            return {}
        place, reason = failure
        # trying each stream alone takes a run for each, so only those that touch the failing module are tried
        suspects = _suspects(structure, left, place)
        for number in suspects:
            if number not in alone:
                alone[number] = twin.fails([number])
        guilty = {number: found[1] for number in suspects if (found := alone[number]) is not None}
        refused |= guilty or dict.fromkeys(_too_many(twin, structure, suspects), reason)
        left = [number for number in left if number not in refused]
    return refused


def _suspects(structure: Structure, left: Sequence[int], place: str) -> Sequence[int]:
    """The streams that have to do with a module; if none has, all."""
    inside = f"{place}." if place else ""
    used = {stream for e in structure.extents if e.module == place for units in e.units for stream, _ in units}
    chosen = [
        number
        for number in left
        if number in used or any(m.tensor.startswith(inside) for m in structure.streams[number].members)
    ]
    return chosen or left


def _too_many(twin: _Twin, structure: Structure, suspects: Sequence[int]) -> Sequence[int]:
    """Of streams that fail together though none fails alone, those that are left over once the largest are taken."""
    taken: list[int] = []
    # two streams may need to shrink in step, a view of their product say: the larger is worth more
    for number in sorted(suspects, key=lambda n: -structure.streams[n].size):
        if twin.fails([*taken, number]) is None:
            taken.append(number)
    return [n for n in suspects if n not in taken] or suspects


class _Twin:
    """A copy of a network that computes shapes alone; it is cut and mended again and again."""

    def __init__(self, net: nn.Module, structure: Structure) -> None:
        assert structure.captured is not None
        self.structure, self.captured = structure, structure.captured
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.net = _copied(net, self.mode)
        self.example = tree_map_only(Tensor, self.mode.from_tensor, on_device_of(net, self.captured.example))
        self.owners = owners_of(self.net, structure.names)
        self.whole = whole(structure)
        self.training = False
        self.running: list[str] = []
        follow_calls(self.net, self.running)
        kind = nn.MultiheadAttention  # runs another forward once it is cut, with views of its own
        self.skipped = {path for path, module in self.net.named_modules() if isinstance(module, kind)}
        self._uncut: _Shapes | None = None
        nodes = list(self.captured.program.graph.nodes)
        calls = [node for node in nodes if node.op == "call_function"]
        # numbers of the graph's arithmetic: one that is new with fewer channels was computed from their number
        self.numbers = {(operation(node), number) for node in calls for number in _numbers(node.args)}
        made = (node.meta["val"] for node in nodes[-1].args[0] if isinstance(node, Node))
        self.outputs = [tuple(value.shape) for value in made if isinstance(value, Tensor)]

    def fails(self, streams: Iterable[int]) -> Failure | None:
        """Take a unit out of each of these; where the twin fails, and how, or None."""
        masks = [mask.copy() for mask in self.whole.streams]
        for number in streams:
            masks[number][-1] = False  # any unit will do: only sizes matter
        left = Kept(tuple(masks), {})
        changes = Changes()
        try:
            with self.mode:
                reduction = Reduction(self.net, self.structure, self.owners, self.whole, left)
                apply_(reduction, _FakeCutter(None, changes))
            found = self._run()
        finally:
            changes.undo_()
        if isinstance(found, tuple):
            return found
        if self.training:  # another graph: that it runs is all that can be said
            return None
        if found.outputs != self.outputs:
            return "", "the network's output changes its shape where channels go"
        return None if self._fits(found, left) else self._misfit(found, left)

    def _run(self) -> _Shapes | Failure:
        """The shapes that the twin makes; or where it fails, and how."""
        args, kwargs = arguments(self.example)
        self.running.clear()
        shapes = _Shapes(self.running, self.skipped)
        try:
            self.net.train()  # what modules cache until they train is made anew
            self.net.train(self.training)
            with self.mode, torch.no_grad(), shapes:
                out = tree_leaves(self.net(*args, **kwargs))
        except Exception as error:  # whatever the network's own code raises is the reason that is listed
            place = self.running[-1] if self.running else ""
            return place, f"{_code_of(place)} does not follow: {first_line(error)}"
        shapes.outputs = [tuple(x.shape) for x in out if isinstance(x, Tensor)]
        return shapes

    def _fits(self, cut: _Shapes, left: Kept) -> bool:
        """Each module has made the very views of the graph, in order and of the sizes that the structure says."""
        made: dict[str, list[tuple[int, ...]]] = {}
        for place, shape in cut.views:
            made.setdefault(place, []).append(shape)
        if any((name, number) not in self.numbers for _, name, number in cut.numbers):
            return False
        return all(
            made.get(place) == [self._left(value, left) for value in values]
            for place, values in self.captured.walk.views.items()
            if place not in self.skipped
        )

    def _misfit(self, cut: _Shapes, left: Kept) -> Failure | None:
        """Where a view has not become what the structure says: a fixed number of heads or groups.

        Operations may make views of their own, which the graph does not have: the uncut twin shows which.
        """
        if self._uncut is None:
            found = self._run()
            if isinstance(found, tuple):
                return found
            self._uncut = found
        uncut = self._uncut
        if len(cut.views) != len(uncut.views):
            return "", "the network computes something else where channels go"
        if len(cut.numbers) == len(uncut.numbers):
            for one, other in zip(uncut.numbers, cut.numbers, strict=True):
                if one != other:
                    return one[0], f"{_code_of(one[0])} computes with a number of channels"
        for (place, was), (_, now) in zip(uncut.views, cut.views, strict=True):
            made = [value for value in self.captured.walk.views.get(place, ()) if value.shape == was]
            if made and now not in [self._left(value, left) for value in made]:
                return place, f"{_code_of(place)} splits channels by a fixed number"
        return None

    def _left(self, value: Value, left: Kept) -> tuple[int, ...]:
        units = [self.captured.assembly.units_on(value.on(axis)) for axis in range(len(value.shape))]
        return Extent("", value.shape, tuple(units)).left(left.streams)


def _code_of(place: str) -> str:
    return f"the code of {place or 'the network itself'}"


def _copied(net: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The same modules with tensors that have shapes alone."""
    memo: dict[int, Any] = plain_tensors(net)
    for tensor in (*net.parameters(), *net.buffers()):
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        memo[id(tensor)] = nn.Parameter(fake, False) if isinstance(tensor, nn.Parameter) else fake
    if MARK in net.__dict__:  # it holds the whole base
        memo[id(net.__dict__[MARK])] = "not copied"
    with as_base(net):
        twin = copy.deepcopy(net, memo)
    for module in twin.modules():
        module.__dict__.pop(MARK, None)
        module._forward_hooks.clear()  # the user's are for the network itself
        module._forward_pre_hooks.clear()
        for key, value in module.__dict__.items():  # tensors that are neither parameters nor buffers
            if isinstance(value, Tensor):
                module.__dict__[key] = mode.from_tensor(value)
    return twin


class _FakeCutter(Cutter):
    """Where there are no values, only sizes change."""

    def _cut(self, tensor: Tensor, indices: Indices) -> Tensor:
        sizes = [n if index is None else len(index) for n, index in zip(tensor.shape, indices, strict=False)]
        return tensor.new_empty([*sizes, *tensor.shape[len(sizes) :]])


class _Shapes(TorchDispatchMode):
    """Notes the shape that every view makes, the numbers in arithmetic, and the module that asks for them."""

    def __init__(self, running: list[str], skipped: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running, self.skipped = running, skipped
        self.views: list[tuple[str, tuple[int, ...]]] = []
        self.numbers: list[tuple[str, str, float]] = []
        self.outputs: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _VIEWS and self.running[-1] not in self.skipped:
            self.views.append((self.running[-1], tuple(out.shape)))
        name = func.overloadpacket.__name__.rstrip("_")
        if torch.Tag.pointwise in func.tags or name == "full":
            self.numbers += [(self.running[-1], name, number) for number in _numbers(args)]
        return out


_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def _numbers(args: Iterable[Any]) -> list[float]:
    """The plain numbers that an operation takes."""
    return [a for a in args if isinstance(a, int | float) and not isinstance(a, bool)]
