"""Try on a twin without values whether a network's own code follows when channels go.

The graph shows which channels belong together. It does not show whether the code that made it would run with fewer: a
view may be written with a constant, or with the width of another tensor. A twin of fake tensors, which computes shapes
alone, tells.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from spalier.adapters.attachment import MARK, Changes, owners_of
from spalier.pruning.cuts import Cutter, Indices, cuts_of
from spalier.pruning.plan import Kept, kept_of
from spalier.pruning.prune import apply_
from spalier.structure.capture import arguments, as_base, on_device_of, operation, quiet
from spalier.structure.labels import Mask
from spalier.structure.streams import Extent
from spalier.structure.structure import UNUSED, Structure
from spalier.structure.walk import Value
from spalier.text import first_line


def unfollowed(net: nn.Module, structure: Structure) -> dict[int, str]:
    """The streams that the network's code cannot lose channels of, and why."""
    assert structure.captured is not None
    with quiet():
        return _unfollowed(_Probe(net, structure), structure)


def _unfollowed(probe: _Probe, structure: Structure) -> dict[int, str]:
    refused: dict[int, str] = {}
    left = list(range(len(structure.streams)))
    # a layer that the example passes by may read a stream where the network trains
    modes = (False, True) if any(f.reason == UNUSED for f in structure.frozen) else (False,)
    for training in modes:
        refused |= _refused(probe, structure, left, training)
        left = [number for number in left if number not in refused]
    return refused


def _refused(probe: _Probe, structure: Structure, left: list[int], training: bool) -> dict[int, str]:
    probe.training = training
    refused: dict[int, str] = {}
    alone: dict[int, str | None] = {}
    while (failure := probe.fails(left)) is not None:
        if not refused and probe.fails(()) is not None:  # it needs values to run; `prune_` will compare them
            return {}
        place, reason = failure
        suspects = _suspects(structure, left, place)
        for number in suspects:
            if number not in alone:
                found = probe.fails([number])
                alone[number] = None if found is None else found[1]
        bad = {number: why for number in suspects if (why := alone[number]) is not None}
        refused |= bad or dict.fromkeys(_too_many(probe, structure, suspects), reason)
        left = [number for number in left if number not in refused]
    return refused


def _too_many(probe: _Probe, structure: Structure, suspects: list[int]) -> list[int]:
    """Of streams that fail together though none fails alone, those that are left over once the largest are taken."""
    taken: list[int] = []
    for number in sorted(suspects, key=lambda n: -structure.streams[n].size):
        if probe.fails([*taken, number]) is None:
            taken.append(number)
    return [n for n in suspects if n not in taken] or suspects


def _suspects(structure: Structure, left: Iterable[int], place: str) -> list[int]:
    """The streams that have to do with a module; if none has, all."""
    inside = f"{place}." if place else ""
    chosen = [
        number
        for number in left
        if any(member.tensor.startswith(inside) for member in structure.streams[number].members)
        or any(
            extent.module == place and any(number == stream for units in extent.units for stream, _ in units)
            for extent in structure.extents
        )
    ]
    return chosen or list(left)


class _Probe:
    """A twin that computes shapes alone, cut and mended again and again."""

    def __init__(self, net: nn.Module, structure: Structure) -> None:
        assert structure.captured is not None
        self.structure = structure
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.twin = _twin(net, self.mode)
        self.example = tree_map_only(
            Tensor, self.mode.from_tensor, on_device_of(net, structure.captured.example)
        )
        self.owners = owners_of(self.twin, structure.names)
        self.running: list[str] = []
        for path, module in self.twin.named_modules():
            module.register_forward_pre_hook(partial(_enter, self.running, path))
            module.register_forward_hook(partial(_leave, self.running))
        kind = nn.MultiheadAttention  # runs another forward once it is cut, with views of its own
        self.replaced = {path for path, module in self.twin.named_modules() if isinstance(module, kind)}
        self.captured = structure.captured
        self.whole: _Shapes | None = None
        self.training = False
        self.numbers = {
            (operation(node), number)
            for node in structure.captured.program.graph.nodes
            if node.op == "call_function"
            for number in _numbers(node.args)
        }
        last = next(iter(reversed(structure.captured.program.graph.nodes)))
        made = (node.meta["val"] for node in last.args[0] if isinstance(node, Node))
        self.outputs = [tuple(value.shape) for value in made if isinstance(value, Tensor)]

    def fails(self, streams: Iterable[int]) -> tuple[str, str] | None:
        """Take a unit out of each of these; where the twin fails, and how, or None."""
        before = kept_of(self.twin, self.structure)
        masks = [mask.copy() for mask in before.streams]
        for number in streams:
            masks[number][-1] = False
        changes = Changes()
        try:
            with self.mode:
                left = Kept(tuple(masks), {})
                cuts = cuts_of(self.structure, before, left)
                cutter = _FakeCutter(None, changes)
                apply_(self.twin, self.structure, cutter, cuts, self.owners, before, left)
            found = self._run()
        finally:
            changes.undo_()
        if isinstance(found, tuple):
            return found
        if self.training:  # another graph: that it runs is all that can be said
            return None
        if found.outputs != self.outputs:
            return "", "the network's output changes its shape where channels go"
        return None if self._fits(found, masks) else self._misfit(found, masks)

    def _run(self) -> _Shapes | tuple[str, str]:
        """The shapes that the twin makes; or where it fails, and how."""
        args, kwargs = arguments(self.example)
        self.running.clear()
        shapes = _Shapes(self.running, self.replaced)
        try:
            self.twin.train()
            self.twin.train(self.training)
            with self.mode, torch.no_grad(), shapes:
                out = tree_leaves(self.twin(*args, **kwargs))
        except Exception as error:  # whatever the network's own code raises is the reason that is listed
            place = self.running[-1] if self.running else ""
            return place, f"the code of {place or 'the network itself'} does not follow: {first_line(error)}"
        shapes.outputs = [tuple(x.shape) for x in out if isinstance(x, Tensor)]
        return shapes

    def _fits(self, cut: _Shapes, masks: list[Mask]) -> bool:
        """Each module has made the very views of the graph, in order and of the sizes that the structure says."""
        made: dict[str, list[tuple[int, ...]]] = {}
        for place, shape in cut.views:
            made.setdefault(place, []).append(shape)
        known = self.captured.walk.views
        if any((name, number) not in self.numbers for _, name, number in cut.numbers):
            return False
        return all(
            made.get(place) == [self._left(value, masks) for value in values]
            for place, values in known.items()
            if place not in self.replaced
        )

    def _misfit(self, cut: _Shapes, masks: list[Mask]) -> tuple[str, str] | None:
        """Where a view has not become what the structure says: a fixed number of heads or groups.

        Operations may make views of their own, which the graph does not have: the whole twin shows which.
        """
        if self.whole is None:
            found = self._run()
            if isinstance(found, tuple):
                return found
            self.whole = found
        if len(cut.views) != len(self.whole.views):
            return "", "the network computes something else where channels go"
        if len(cut.numbers) == len(self.whole.numbers):
            for one, other in zip(self.whole.numbers, cut.numbers, strict=True):
                if one != other:
                    place = one[0]
                    return (
                        place,
                        f"the code of {place or 'the network itself'} computes with a number of channels",
                    )
        for (place, was), (_, now) in zip(self.whole.views, cut.views, strict=True):
            made = [value for value in self.captured.walk.views.get(place, ()) if value.shape == was]
            if made and now not in [self._left(value, masks) for value in made]:
                return place, f"the code of {place or 'the network itself'} splits channels by a fixed number"
        return None

    def _left(self, value: Value, masks: list[Mask]) -> tuple[int, ...]:
        units = [self.captured.assembly.units_on(value.on(axis)) for axis in range(len(value.shape))]
        return Extent("", value.shape, tuple(units)).left(masks)


class _FakeCutter(Cutter):
    """Where there are no values, only sizes change."""

    def _cut(self, tensor: Tensor, indices: Indices) -> Tensor:
        sizes = [n if index is None else len(index) for n, index in zip(tensor.shape, indices, strict=False)]
        return tensor.new_empty([*sizes, *tensor.shape[len(sizes) :]])


class _Shapes(TorchDispatchMode):
    """Notes the shape that every view makes, and the module that asks for it."""

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
        if torch.Tag.pointwise in func.tags:
            name = func.overloadpacket.__name__.rstrip("_")
            self.numbers += [(self.running[-1], name, number) for number in _numbers(args)]
        return out


_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def _numbers(args: Iterable[Any]) -> list[float]:
    """The plain numbers that an operation takes."""
    return [a for a in args if isinstance(a, int | float) and not isinstance(a, bool)]


def _enter(running: list[str], path: str, module: nn.Module, args: Any) -> None:
    running.append(path)


def _leave(running: list[str], module: nn.Module, args: Any, output: Any) -> None:
    running.pop()


def _twin(net: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The same modules with tensors that have shapes alone."""
    memo: dict[int, Any] = {}
    for tensor in (*net.parameters(), *net.buffers()):
        with mode:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        memo[id(tensor)] = nn.Parameter(fake, False) if isinstance(tensor, nn.Parameter) else fake
    if MARK in net.__dict__:
        memo[id(net.__dict__[MARK])] = "not copied"
    with as_base(net):
        twin = copy.deepcopy(net, memo)
    for module in twin.modules():
        module.__dict__.pop(MARK, None)
        module._forward_hooks.clear()  # the user's are for the network itself
        module._forward_pre_hooks.clear()
        for key, value in module.__dict__.items():
            if isinstance(value, Tensor):
                module.__dict__[key] = mode.from_tensor(value)
    return twin
