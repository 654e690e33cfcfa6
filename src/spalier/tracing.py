"""`trace`: find what can be pruned in a network, and say what cannot, and why.

The graph says which channels are coupled (`spalier.structure`). It does not show whether the code that made it would
run with fewer: a view may be written with a constant, or with the width of another tensor. So there is a dry run. A
twin of fake tensors, which computes shapes alone, loses some units of every stream and runs. If it fails, if its views
have other shapes than the structure says, or if it computes with other numbers than the whole twin, the streams that
are to blame are frozen, with the reason. Streams that meet lose different numbers of units: sizes that are equal by
chance would hide a failure.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from spalier.adapters.attachment import Changes, Owner, owners_of
from spalier.adapters.calls import Calls, Corrected, fits, left_open
from spalier.errors import TraceError
from spalier.noting import NO_SIZES, Memory, Noted, facts_of_graph, known_shape
from spalier.pruning.modules import Resize, resized
from spalier.pruning.plan import PRUNED_MARK, Indices, Kept, Reduction, whole
from spalier.pruning.prune import Cutter, apply_
from spalier.structure.graph import CAPTURING, Value, arguments, as_base, on_device_of, quiet
from spalier.structure.recording import follow_calls, twin_of, without_values
from spalier.structure.streams import Extent, scales_of, views_of
from spalier.structure.structure import UNUSED, Cache, Freeze, Structure, find, fingerprint, without
from spalier.text import first_line


def trace(
    net: nn.Module, example: Any, *, freeze: Freeze = None, cache: str | os.PathLike[str] | None = None
) -> Structure:
    """Find the streams of ``net``: coupled channels, who writes and reads them, and what has to stay.

    The graph of one forward in eval mode is recorded, frozen or not, adapted or not, and the network left as it was.
    Then a twin without values shows whether its own code runs with fewer channels. What is not understood, or does not
    follow, is frozen, with the operation and the line as the reason. Several threads take turns.

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
    example = _without_cache(net, example)
    with CAPTURING:
        known = None if cache is None else Cache(cache).get(fingerprint(net, example, freeze))
        if known is not None:
            return replace(known, example=example, freeze=freeze)
        structure = find(net, example, freeze)
        refused, untried, wrong = unfollowed(net, structure)
        if refused:
            structure = without(net, structure, refused)
        structure = replace(structure, untried=untried, **_corrections(structure, wrong))
        if cache is not None:
            Cache(cache).put(structure)
        return structure


def _without_cache(net: nn.Module, example: Any) -> Any:
    """Decoders of transformers return a cache too, unless they are told not to; no graph can return one."""
    if not getattr(getattr(net, "config", None), "use_cache", False):
        return example
    if "use_cache" not in inspect.signature(net.forward).parameters:
        return example
    if isinstance(example, Tensor):
        example = {getattr(net, "main_input_name", "input_ids"): example}
    return {"use_cache": False, **example} if isinstance(example, Mapping) else example


# the dry run

Failure = tuple[str, str]
"""The path of the module that fails, and the reason."""
Wrong = tuple[str, int, int, int, int, int]
"""A size that a module's code gets wrong: its path, axes as in `View`, and which of its views of that kind it is.

Of a `Scale` the path, the number of axes, and zeros.
"""


def unfollowed(net: nn.Module, structure: Structure) -> tuple[dict[int, str], str, set[Wrong]]:
    """The streams that the network's code cannot lose channels of, and why; why that could not be found out; and what
    the code gets wrong, so that it has to be set right."""
    refused: dict[int, str] = {}
    untried = ""
    wrong: set[Wrong] = set()
    with quiet():
        twin = _Twin(net, structure)
        # a layer that the example passes by may read a stream where the network trains
        modes = (False, True) if any(f.reason == UNUSED for f in structure.frozen) else (False,)
        for twin.training in modes:
            left = [number for number in range(len(structure.streams)) if number not in refused]
            found = _refused(twin, structure, left)
            if isinstance(found, str):
                untried = untried or found
            else:
                refused |= found
                wrong |= twin.wrong
    return refused, untried, wrong


def _corrections(structure: Structure, wrong: set[Wrong]) -> dict[str, Any]:
    """The right sizes and numbers for what modules' code gets wrong."""
    captured = structure.captured
    assert captured is not None
    views = views_of(captured.walk, captured.assembly, wrong)
    scales = [s for place in sorted({w[0] for w in wrong}) for s in scales_of(captured.program, place)]
    return {
        "views": tuple(views),
        "scales": tuple(s for s in scales if (s.module, s.axes, 0, 0, 0, 0) in wrong),
        "grouped": tuple(sorted(captured.walk.grouped)),
    }


def _refused(twin: _Twin, structure: Structure, left: list[int]) -> dict[int, str] | str:
    """Take streams out until the twin runs with fewer units in each of those that are left; or why it never runs."""
    refused: dict[int, str] = {}
    alone: dict[int, Failure | None] = {}
    runs = False
    while (failure := twin.fails_together(left)) is not None:
        if not runs and (uncut := twin.fails(())) is not None:
            if twin.hook_():  # the network's own, which hand states from layer to layer
                continue
            return f"in training, {uncut[1]}" if twin.training else uncut[1]  # it needs values to run
        runs = True
        place, reason = failure
        if twin.correct_(place):
            alone.clear()
            continue
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


def _cuts(structure: Structure) -> list[tuple[int, int]]:
    """How many units each stream loses, and a code; streams that meet in a module differ in one of the two."""
    met: dict[str, set[int]] = {}
    for number, stream in enumerate(structure.streams):
        for member in stream.members:
            layer = member.tensor.rpartition(".")[0]
            for place in (layer, layer.rpartition(".")[0]):
                met.setdefault(place, set()).add(number)
    for extent in structure.extents:
        met.setdefault(extent.module, set()).update(stream for units in extent.units for stream, _ in units)
    found: list[tuple[int, int]] = []
    for number, stream in enumerate(structure.streams):
        others = {other for each in met.values() if number in each for other in each if other < number}
        taken = {found[other] for other in others}
        # at least half of a stream stays: a size of 1 would broadcast, and hide a failure too
        choices = ((count, code) for code in itertools.count() for count in range(1, max(stream.size // 2, 1) + 1))
        found.append(next(choice for choice in choices if choice not in taken))
    return found


class _Twin:
    """A copy of a network that computes shapes alone; it is cut and mended again and again."""

    def __init__(self, net: nn.Module, structure: Structure) -> None:
        assert structure.captured is not None
        self.structure, self.captured = structure, structure.captured
        twin, self.captured.program.twin = self.captured.program.twin, None  # it is cut here
        if twin is None:
            with as_base(net):
                twin = twin_of(net)
        self.net, self.mode = twin.net, twin.mode
        self.hooks = _unhooked_(self.net)
        fake = partial(self.mode.from_tensor, static_shapes=True)
        self.example = tree_map_only(Tensor, fake, on_device_of(net, self.captured.example))
        self.owners = owners_of(self.net, structure.names)
        self.whole = whole(structure)
        self.cuts = _cuts(structure)
        self.training = False
        self.running: list[str] = []
        follow_calls(self.net, self.running)
        self.skipped = _prepared_(self.net)
        self.memory = Memory(self.net, structure, self.owners)
        self.small: dict[Hashable, Tensor] = {}
        self.noted = Noted(self.running)
        """What the run that is under way has noted."""
        self._uncut: Noted | None = None
        self.corrected: dict[str, tuple[tuple[int, float], ...]] = {}
        """The modules whose calls are set right, and what tensors are scaled with in them."""
        self.wrong: set[Wrong] = set()
        """What they got wrong, without some units of all streams."""
        self.facts = facts_of_graph(self.captured.program)
        made = tree_leaves(self.captured.program.graph.output_node().args[0])
        values = [node.meta["val"] for node in made if isinstance(node, Node)]
        self.outputs = [known_shape(value) for value in values if isinstance(value, Tensor)]

    def hook_(self) -> bool:
        """Give the twin the hooks of the network; False where it has them already, or there are none.

        They are left out at first: a user's hooks are for the network itself.
        """
        hooks, self.hooks, self._uncut = self.hooks, [], None
        self.memory.is_off = True  # it would leave out what hooks do
        for place, is_first, theirs in hooks:
            ours = dict(place)
            place.clear()
            place.update({**theirs, **ours} if is_first else {**ours, **theirs})
        return bool(hooks)

    def fails_together(self, streams: Sequence[int]) -> Failure | None:
        """Where the twin fails without some units of all of these, and how, or None.

        Streams that have too few units to lose different numbers of them are told apart by further runs, each without
        some of them.
        """
        self.wrong.clear()
        codes = [self.cuts[number][1] for number in streams]
        bits = range(max(codes, default=0).bit_length())
        some = [[n for n, code in zip(streams, codes, strict=True) if code >> bit & 1] for bit in bits]
        return next((failure for each in (streams, *some) if (failure := self.fails(each)) is not None), None)

    def fails(self, streams: Iterable[int]) -> Failure | None:
        """Take some units out of each of these; where the twin fails, and how, or None."""
        masks = [mask.copy() for mask in self.whole.streams]
        self.memory.cut = frozenset(streams)
        for number in self.memory.cut:
            masks[number][-self.cuts[number][0] :] = False  # any units will do: only sizes matter
        left = Kept(tuple(masks), {})
        changes = Changes()
        try:
            with self.mode:
                reduction = Reduction(self.net, self.structure, self.owners, self.whole, left)
                apply_(reduction, _FakeCutter(changes, self.mode, self.small))
            for path in self.corrected:
                module = self.net.get_submodule(path)
                changes.set_(module, "", "forward", partial(_run_correcting, module, self, path, left))
            found = self._run()
        finally:
            changes.undo_()
        if isinstance(found, tuple):
            return found
        if self.training:  # another graph: that it runs is all that can be said
            return None
        if found.outputs != self.outputs:
            return "", "the network's output changes its shape where channels go"
        misfit = None if self._fits(found, left) else self._misfit(found, left)
        return misfit or self._unlike()

    def _unlike(self) -> Failure | None:
        """Where views of one kind would have to be set right in unlike ways."""
        walk, assembly = self.captured.walk, self.captured.assembly
        known = {(v.module, v.before, v.after, v.open, v.axis) for v in views_of(walk, assembly, self.wrong)}
        lost = [w for w in self.wrong if w[2] and w[:5] not in known]
        return (lost[0][0], f"{_code_of(lost[0][0])} makes views of one kind in several ways") if lost else None

    def correct_(self, place: str) -> bool:
        """Set right what the code of a module asks for, and that of its kind, from now on; False if there is no more.

        What goes wrong in a module often shows in one of its layers only.
        """
        modules = {key[0]: self.net.get_submodule(key[0]) for key in self.captured.walk.reshapes}
        for path in (place, place.rpartition(".")[0]):
            kind = type(modules.get(path))
            if path in modules.keys() - self.corrected.keys() and not issubclass(kind, nn.MultiheadAttention):
                like = [p for p, m in modules.items() if type(m) is kind and "forward" not in m.__dict__]
                for each in like:
                    scales = scales_of(self.captured.program, each)
                    self.corrected[each] = tuple((scale.axes, scale.number) for scale in scales)
                    self.memory.forget_(each, self._streams_in(each))
                if path in self.corrected:
                    return True
        return False

    def _streams_in(self, path: str) -> set[int]:
        """The streams that the views of a module have axes of."""
        walk, assembly = self.captured.walk, self.captured.assembly
        values = [value for (module, *_), values in walk.reshapes.items() if module == path for value in values]
        fields = (value.on(axis) for value in values for axis in range(len(value.shape)))
        return {stream for each in fields for stream, _ in assembly.units_on(each)}

    def _run(self) -> Noted | Failure:
        """The shapes that the twin makes; or where it fails, and how."""
        args, kwargs = arguments(self.example)
        self.running.clear()
        self.noted = noted = Noted(self.running)
        try:
            self.net.train()  # what modules cache until they train is made anew
            self.net.train(self.training)
            with self.mode, torch.no_grad(), noted, self.memory.recalling(noted):
                out = tree_leaves(self.net(*args, **kwargs))
        except Exception as error:  # whatever the network's own code raises is the reason that is listed
            place = self.running[-1] if self.running else ""
            return place, f"{_code_of(place)} does not follow: {first_line(error)}"
        noted.outputs = [known_shape(x) for x in out if isinstance(x, Tensor)]
        noted.sorted_()
        self.wrong.update(*noted.wrong.values())
        return noted

    def _fits(self, cut: Noted, left: Kept) -> bool:
        """Each module computes with numbers of the graph, and makes its very views, as large as the structure says.

        Where this is so, nothing has to be compared with the uncut twin.
        """
        noted: Any = (cut.made, cut.facts, self.captured.walk.views)
        made, facts, views = (
            [(place, several) for place, several in found.items() if place not in self.skipped] for found in noted
        )
        return (
            all(self._made(place, left).issuperset(shapes) for place, shapes in made)
            and all(self.facts.get(place, NO_SIZES).issuperset(numbers) for place, numbers in facts)
            and all(cut.views.get(place) == [self._left(value, left) for value in values] for place, values in views)
        )

    def _misfit(self, cut: Noted, left: Kept) -> Failure | None:
        """Where a number is another one, or a view has not become what the structure says.

        Operations may make views, and use numbers, that the graph does not have: the uncut twin shows which.
        """
        if self._uncut is None:
            self.memory.cut = frozenset()
            found = self._run()
            if isinstance(found, tuple):
                return found
            self._uncut = found
        uncut = self._uncut
        for place, facts in cut.facts.items():
            before = uncut.facts.get(place, [])
            is_new = facts != before if len(facts) == len(before) else not set(before).issuperset(facts)
            if is_new:
                return place, f"{_code_of(place)} computes with a number of channels"
        for place, shapes in cut.made.items():
            were, allowed = uncut.made.get(place, []), self._made(place, left)
            is_new = shapes != were if len(shapes) == len(were) else not set(were).issuperset(shapes)
            if is_new and not allowed.issuperset(set(shapes) - set(were)):
                return place, f"{_code_of(place)} computes with a number of channels"
        for place, shapes in cut.views.items():
            viewed = uncut.views.get(place, [])
            if len(shapes) != len(viewed):
                return place, f"{_code_of(place)} computes something else where channels go"
            for was, now in zip(viewed, shapes, strict=True):
                made = [value for value in self.captured.walk.views.get(place, ()) if value.shape == was]
                if made and place not in self.skipped and now not in [self._left(value, left) for value in made]:
                    return place, f"{_code_of(place)} splits channels by a fixed number"
        return None

    def _made(self, place: str, left: Kept) -> set[tuple[int, ...]]:
        """The shapes that tensors made of a shape alone have at a place, as far as the graph shows them."""
        return {self._left(value, left) for value in self.captured.walk.made.get(place, ())}

    def _left(self, value: Value, left: Kept) -> tuple[int, ...]:
        units = [self.captured.assembly.units_on(value.on(axis)) for axis in range(len(value.shape))]
        return Extent("", value.shape, tuple(units)).left(left.streams)


class _Correcting(Corrected):
    """Gives each view of a module the sizes that the structure says, and notes those that were wrong."""

    def __init__(self, twin: _Twin, place: str, left: Kept) -> None:
        super().__init__(Calls(scales=twin.corrected[place]))
        self.twin, self.place, self.left = twin, place, left

    def view(self, x: Tensor, sizes: list[int]) -> tuple[int, ...]:
        kind = x.dim(), len(sizes), left_open(sizes)
        if self.twin.running[-1] != self.place:  # that of a layer inside
            return tuple(sizes)
        # the same views as in the graph, in the same order, however often the module runs
        number = self.twin.noted.count(self.place, kind)
        values = self.twin.captured.walk.reshapes.get((self.place, *kind), [])
        right = self.twin._left(values[number], self.left) if number < len(values) else tuple(sizes)
        if kind[2] or not fits(x, sizes):
            wrong = [axis for axis in range(1, len(sizes) + 1) if sizes[-axis] not in (-1, right[-axis])]
            for axis in wrong:
                self._note(*kind, axis, number)
                sizes[-axis] = right[-axis]
        return tuple(sizes)

    def scale(self, axes: int, number: float) -> float:
        right = super().scale(axes, number)
        if right != number:
            self._note(axes, 0, 0, 0, 0)
        return right

    def _note(self, *wrong: int) -> None:
        self.twin.noted.log.append(("wrong", self.place, (self.place, *wrong)))


def _run_correcting(module: nn.Module, twin: _Twin, place: str, left: Kept, *args: Any, **kwargs: Any) -> Any:
    with _Correcting(twin, place, left):
        return type(module).forward(module, *args, **kwargs)


def _code_of(place: str) -> str:
    return f"the code of {place or 'the network itself'}"


class _FakeCutter(Cutter):
    """Where there are no values, only sizes change, and what was cut once can be had again."""

    def __init__(self, changes: Changes, mode: FakeTensorMode, known: dict[Hashable, Tensor]) -> None:
        super().__init__(None, changes)
        self.mode, self.known = mode, known

    def cut_(self, owners: Sequence[Owner], indices: Indices) -> None:
        tensor = owners[0].tensor
        sizes = [n if index is None else len(index) for n, index in zip(tensor.shape, indices, strict=False)]
        key = (id(tensor), *sizes)
        small = self.known.get(key)
        if small is None:
            small = self.known[key] = without_values(self.mode, tensor, [*sizes, *tensor.shape[len(sizes) :]])
        if isinstance(tensor, nn.Parameter):
            self.changes.set_values_(tensor, small)
        for owner in () if isinstance(tensor, nn.Parameter) else owners:
            self.changes.set_(owner.module, owner.place, owner.key, small)


def _unhooked_(net: nn.Module) -> list[tuple[dict[int, Any], bool, dict[int, Any]]]:
    """Take the hooks off; returns where they belong, whether they run before those that come later, and the hooks."""
    found = []
    for module in net.modules():
        # the twin's own hooks follow which module runs: they are the outermost
        for place, is_first in ((module._forward_hooks, True), (module._forward_pre_hooks, False)):
            if place:
                found.append((place, is_first, dict(place)))
                place.clear()
    return found


def _prepared_(net: nn.Module) -> set[str]:
    """Attention runs another forward once it is cut, so the uncut twin runs it too; the paths of those modules."""
    found = set()
    for path, module in net.named_modules():
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer | nn.TransformerEncoder):
            for key, value in resized(module, Resize({}, (), {})).items():
                setattr(module, key, value)
        if isinstance(module, nn.MultiheadAttention):
            found.add(path)
    return found
