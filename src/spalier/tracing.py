"""`trace`: find what can be pruned in a network, and say what cannot, and why.

The graph says which channels are coupled (`spalier.structure`). It does not show whether the code that made it would
run with fewer: a view may be written with a constant, or with the width of another tensor. So there is a dry run. A
twin of fake tensors, which computes shapes alone, loses some units of every stream and runs. If it fails, if its views
have other shapes than the structure says, or if it computes with other numbers than the whole twin, the streams that
are to blame are frozen, with the reason. Streams that meet lose different numbers of units: sizes that are equal by
chance would hide a failure.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from spalier.adapters.attachment import MARK, Changes, owners_of
from spalier.adapters.calls import Calls, Corrected, fits, left_open
from spalier.adapters.geometry import plain_tensors
from spalier.errors import TraceError
from spalier.pruning.modules import Resize, resized
from spalier.pruning.plan import PRUNED_MARK, Indices, Kept, Reduction, whole
from spalier.pruning.prune import Cutter, apply_
from spalier.pruning.verify import follow_calls
from spalier.structure.arithmetic import fresh
from spalier.structure.graph import CAPTURING, RULES, Value, arguments, as_base, module_of, on_device_of, quiet
from spalier.structure.streams import Extent, scales_of, views_of
from spalier.structure.structure import UNUSED, Cache, Freeze, Structure, find, fingerprint, without
from spalier.text import first_line


def trace(
    net: nn.Module, example: Any, *, freeze: Freeze = None, cache: str | os.PathLike[str] | None = None
) -> Structure:
    """Find the streams of ``net``: coupled channels, who writes and reads them, and what has to stay.

    The network is captured with `torch.export` in eval mode, frozen or not, adapted or not, and left as it was. Then a
    twin without values shows whether its own code runs with fewer channels. What is not understood, or does not follow,
    is frozen, with the operation and the line as the reason. Several threads take turns.

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
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # late: it brings sympy along

        assert structure.captured is not None
        self.structure, self.captured = structure, structure.captured
        # with a ShapeEnv, as in torch.export: sizes that depend on values are symbols instead of errors
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        self.net = _copied(net, self.mode)
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
        self._uncut: _Noted | None = None
        self.corrected: dict[str, tuple[tuple[int, float], ...]] = {}
        """The modules whose calls are set right, and what tensors are scaled with in them."""
        self.wrong: set[Wrong] = set()
        """What they got wrong, without some units of all streams."""
        self.counts: dict[Any, int] = {}
        self.facts = _facts_of_graph(self.captured.program)
        made = tree_leaves(self.captured.program.graph.output_node().args[0])
        values = [node.meta["val"] for node in made if isinstance(node, Node)]
        self.outputs = [_shape(value) for value in values if isinstance(value, Tensor)]

    def hook_(self) -> bool:
        """Give the twin the hooks of the network; False where it has them already, or there are none.

        They are left out at first: a user's hooks are for the network itself.
        """
        hooks, self.hooks, self._uncut = self.hooks, [], None
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
        for number in streams:
            masks[number][-self.cuts[number][0] :] = False  # any units will do: only sizes matter
        left = Kept(tuple(masks), {})
        changes = Changes()
        try:
            with self.mode:
                reduction = Reduction(self.net, self.structure, self.owners, self.whole, left)
                apply_(reduction, _FakeCutter(None, changes))
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
                if path in self.corrected:
                    return True
        return False

    def _run(self) -> _Noted | Failure:
        """The shapes that the twin makes; or where it fails, and how."""
        args, kwargs = arguments(self.example)
        self.running.clear()
        self.counts.clear()
        noted = _Noted(self.running)
        try:
            self.net.train()  # what modules cache until they train is made anew
            self.net.train(self.training)
            with self.mode, torch.no_grad(), noted:
                out = tree_leaves(self.net(*args, **kwargs))
        except Exception as error:  # whatever the network's own code raises is the reason that is listed
            place = self.running[-1] if self.running else ""
            return place, f"{_code_of(place)} does not follow: {first_line(error)}"
        noted.outputs = [_shape(x) for x in out if isinstance(x, Tensor)]
        return noted

    def _fits(self, cut: _Noted, left: Kept) -> bool:
        """Each module computes with numbers of the graph, and makes its very views, as large as the structure says.

        Where this is so, nothing has to be compared with the uncut twin.
        """
        shapes = all(
            self._made(place, left).issuperset(made) for place, made in cut.made.items() if place not in self.skipped
        )
        numbers = shapes and all(
            self.facts.get(place, _NO_SIZES).issuperset(facts)
            for place, facts in cut.facts.items()
            if place not in self.skipped
        )
        return numbers and all(
            cut.views.get(place) == [self._left(value, left) for value in values]
            for place, values in self.captured.walk.views.items()
            if place not in self.skipped
        )

    def _misfit(self, cut: _Noted, left: Kept) -> Failure | None:
        """Where a number is another one, or a view has not become what the structure says.

        Operations may make views, and use numbers, that the graph does not have: the uncut twin shows which.
        """
        if self._uncut is None:
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
        self.wrong: set[Wrong] = twin.wrong

    def view(self, x: Tensor, sizes: list[int]) -> tuple[int, ...]:
        kind = x.dim(), len(sizes), left_open(sizes)
        if self.twin.running[-1] != self.place:  # that of a layer inside
            return tuple(sizes)
        # the same views as in the graph, in the same order, however often the module runs
        number = self.twin.counts[self.place, kind] = self.twin.counts.get((self.place, kind), -1) + 1
        values = self.twin.captured.walk.reshapes.get((self.place, *kind), [])
        right = self.twin._left(values[number], self.left) if number < len(values) else tuple(sizes)
        if kind[2] or not fits(x, sizes):
            wrong = [axis for axis in range(1, len(sizes) + 1) if sizes[-axis] not in (-1, right[-axis])]
            self.wrong |= {(self.place, *kind, axis, number) for axis in wrong}
            for axis in wrong:
                sizes[-axis] = right[-axis]
        return tuple(sizes)

    def scale(self, axes: int, number: float) -> float:
        right = super().scale(axes, number)
        if right != number:
            self.wrong.add((self.place, axes, 0, 0, 0, 0))
        return right


def _run_correcting(module: nn.Module, twin: _Twin, place: str, left: Kept, *args: Any, **kwargs: Any) -> Any:
    with _Correcting(twin, place, left):
        return type(module).forward(module, *args, **kwargs)


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
        for key, value in module.__dict__.items():  # tensors that are neither parameters nor buffers
            if isinstance(value, Tensor):
                module.__dict__[key] = mode.from_tensor(value, static_shapes=True)
    return twin


class _FakeCutter(Cutter):
    """Where there are no values, only sizes change."""

    def _cut(self, tensor: Tensor, indices: Indices) -> Tensor:
        sizes = [n if index is None else len(index) for n, index in zip(tensor.shape, indices, strict=False)]
        return tensor.new_empty([*sizes, *tensor.shape[len(sizes) :]])


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


# what a twin computes with

Fact = Hashable
"""A number, the shape of a tensor that is made of nothing, or the values of a constant."""
_NO_SIZES: frozenset[Fact] = frozenset((0, float("inf"), float("-inf")))
"""What operations fill masks with on their own."""


class _Noted(TorchDispatchMode):
    """Notes the shapes that views make, and the numbers that operations take, by the module that asks for them."""

    def __init__(self, running: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = running
        self.views: dict[str, list[tuple[int, ...]]] = {}
        self.facts: dict[str, list[Fact]] = {}
        self.made: dict[str, list[tuple[int, ...]]] = {}
        """Shapes of tensors that are made of a shape alone."""
        self.outputs: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        # what is computed from constants alone has values, which the network's code may ask for
        is_constant = bool(given) and not any(isinstance(a, FakeTensor) for a in given)
        with unset_fake_temporarily() if is_constant else nullcontext():
            # the kernel takes more than PyTorch says of it without values
            out = _grouped(*args[:2]) if func is torch.ops.aten._grouped_mm.default else func(*args, **(kwargs or {}))
        if func in _VIEWS:
            self.views.setdefault(self.running[-1], []).append(_shape(out))
        elif _kind_of(func)[1] and 0 not in (shape := _shape(out)) and shape:  # else it holds nothing of a size
            self.made.setdefault(self.running[-1], []).append(shape)
        if facts := _facts(func, args, kwargs or {}, out):
            self.facts.setdefault(self.running[-1], []).extend(facts)
        return out


def _grouped(x: Tensor, weights: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], (x @ weights[0]).shape[-1]))


_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def _facts_of_graph(program: ExportedProgram) -> dict[str, set[Fact]]:
    """What each module's code computes with in the whole network, so far as the graph shows it."""
    lifted = program.graph_signature.inputs_to_lifted_tensor_constants
    found: dict[str, set[Fact]] = {}

    def value(node: Node) -> Any:
        return program.constants[lifted[node.name]] if node.name in lifted else node.meta.get("val")

    for graph in program.graph_module.modules():
        for node in graph.graph.nodes if isinstance(graph, GraphModule) else ():
            if isinstance(node.target, OpOverload):
                args, kwargs = map_aggregate((node.args, node.kwargs), lambda a: value(a) if isinstance(a, Node) else a)
                facts = _facts(node.target, args, kwargs, node.meta.get("val"))
                found.setdefault(module_of(node), set(_NO_SIZES)).update(facts)
    return found


def _facts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> list[Fact]:
    """What an operation takes beside the network's own tensors, and that is no size of what it makes."""
    is_pointwise, is_fresh, numbers = _kind_of(func)
    found: list[Fact] = []
    takes_tensor = False
    for key, value in itertools.chain(enumerate(args), kwargs.items()):
        if isinstance(value, Tensor):
            takes_tensor = True
            if not isinstance(value, FakeTensor):
                found.append(_constant(value))
        elif isinstance(value, float | complex) or (type(value) is int and (is_pointwise or key in numbers)):
            found.append(value if value == value else "nan")
        elif isinstance(value, list | tuple):
            takes_tensor = takes_tensor or any(isinstance(each, Tensor) for each in value)
    if isinstance(made, Tensor) and not is_fresh and not takes_tensor:
        shape = _shape(made)
        found += [("shape", *shape)] if shape and 0 not in shape else []  # else it holds nothing of a size
    return found


@functools.cache
def _kind_of(func: Any) -> tuple[bool, bool, frozenset[int | str]]:
    """Whether it computes entry by entry; whether it makes a tensor of a shape alone; where it takes numbers."""
    schema = func._schema.arguments
    numbers = [(place, each.name) for place, each in enumerate(schema) if "number" in str(each.type)]
    name = func.overloadpacket.__name__.rstrip("_")
    is_fresh = RULES.get(name) is fresh
    return torch.Tag.pointwise in func.tags, is_fresh, frozenset(key for keys in numbers for key in keys)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """A shape; -1 for an axis whose size depends on values, as in the graph."""
    return tuple(n if isinstance(n, int) else -1 for n in tensor.shape)


def _constant(tensor: Tensor) -> Fact:
    with unset_fake_temporarily():
        few = tensor.reshape(-1).tolist() if tensor.numel() <= 16 else [hash(tensor.detach().cpu().numpy().tobytes())]
    return ("values", *tensor.shape, *(n if n == n else "nan" for n in few))
