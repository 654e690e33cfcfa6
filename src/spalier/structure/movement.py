"""Rules for operations that move data: views, permutations, concatenations, slices.

They run on the labels themselves, so that the labels end up where the data does. Where code picks entries by number, or
takes parts of unequal sizes, all labels of that axis must stay: with one channel less the same numbers would mean other
entries.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from spalier.adapters.calls import left_open
from spalier.structure.graph import Result, Value, Walk, argument, named, operation, rule, shape_of, sources, unknown
from spalier.structure.labels import NONE, Ints


@rule(
    "alias clone contiguous detach dropout feature_dropout alpha_dropout lift_fresh_copy to type_as _to_copy fill zero"
)
def same(walk: Walk, node: Node) -> Result:
    """Nothing moves; but what is dropped even in eval mode is drawn anew."""
    if "dropout" in operation(node) and argument(node, 2, "train"):
        return unknown(walk, node)
    value = walk.value(node.args[0])
    return Value(value.shape, value.fields, value.sources)


@rule("view reshape flatten unflatten squeeze unsqueeze reshape_as view_as _unsafe_view")
def reshape(walk: Walk, node: Node) -> Result:
    """The same entries in the same order."""
    value, shape = walk.value(node.args[0]), shape_of(node)
    # an axis that stays whole keeps its labels; only the others are split or joined
    kept = {axis: _new_place(value.shape, axis, shape) for axis in value.fields}
    others = Value(value.shape, {a: f for a, f in value.fields.items() if kept[a] is None}, value.sources)
    out = walk.moved(others, lambda field: field.reshape(shape), shape)
    for axis, place in kept.items():
        if place is not None:
            out.fields[place] = value.fields[axis] + out.fields.get(place, [])
    walk.note_sizes(out)
    if operation(node) not in ("squeeze", "unsqueeze"):
        walk.views.setdefault(walk.place, []).append(out)
        asked = argument(node, 1)
        if isinstance(asked, list | tuple) and len(asked) == len(shape):
            key = (walk.place, len(value.shape), len(shape), left_open(asked))
            walk.reshapes.setdefault(key, []).append(out)
    return out


def _new_place(old: tuple[int, ...], axis: int, new: tuple[int, ...]) -> int | None:
    """Where an axis is after a reshape that leaves it whole."""
    if -1 in old[:axis]:  # how many entries are in front of it depends on values: those behind it will do
        place = _new_place(old[::-1], len(old) - 1 - axis, new[::-1]) if -1 not in old[axis:] else None
        return None if place is None else len(new) - 1 - place
    # entries are in the same order, so it is the axis of its size with as many entries in front of it
    before = math.prod(old[:axis])
    for place, size in enumerate(new):
        if before == 1 and size == old[axis]:
            return place
        if before % size:
            return None
        before //= size
    return None


@rule(
    "permute transpose mT t numpy_T mH matrix_H adjoint swapaxes swapdims movedim moveaxis flip repeat tile "
    "repeat_interleave"
)
def run_itself(walk: Walk, node: Node) -> Result:
    """Whatever the operation does, it does the same to labels."""
    function: Any = node.target

    def move(field: Tensor) -> Tensor:
        moved: Tensor = function(field, *node.args[1:], **node.kwargs)
        return moved

    return walk.moved(walk.value(node.args[0]), move, shape_of(node))


@rule("expand expand_as broadcast_to")
def expand(walk: Walk, node: Node) -> Result:
    """The same entry at each index of an axis: any of them may go, with those of the tensor that it is made to fit."""
    value, shape = walk.value(node.args[0]), shape_of(node)
    out = walk.moved(value, lambda field: field.expand(shape), shape)
    sizes = (1,) * (len(shape) - len(value.shape)) + value.shape
    widened = [axis for axis, size in enumerate(shape) if size != sizes[axis]]
    if operation(node) == "expand_as":
        like = walk.value(node.args[1])
        out.fields.update({axis: like.on(axis) for axis in widened if like.on(axis)})
    elif not value.fields:  # what has labels is repeated by a fixed number: keys for grouped queries
        out.fields.update(walk.any_labels(shape, widened))
    return out


@rule("channel_shuffle")
def channel_shuffle(walk: Walk, node: Node) -> Result:
    """Seen as (groups, channels), transposed."""
    value, groups = walk.value(node.args[0]), int(argument(node, 1))
    per_group = value.shape[1] // groups
    rows, columns = walk.split(value.on(1), (groups, per_group), is_view=True)
    walk.freeze(rows)  # their number is a setting, so whole groups cannot go
    # channel (g, c) lands at (c, g)
    fields = [np.tile(r, per_group) for r in rows] + [np.repeat(c, groups) for c in columns]
    return Value(value.shape, {**value.fields, 1: fields}, value.sources)


@rule("pixel_shuffle pixel_unshuffle native_channel_shuffle")
def pixels(walk: Walk, node: Node) -> Result:
    """Channels become pixels, or the other way round; pixels stay."""
    value, factor = walk.value(node.args[0]), int(argument(node, 1))
    channel, area = len(value.shape) - 3, factor * factor
    walk.freeze_all(value, (channel + 1, channel + 2))
    out = Value(shape_of(node), {a: f for a, f in value.fields.items() if a < channel}, value.sources)
    if node.target is torch.ops.aten.pixel_unshuffle.default:
        out.fields[channel] = [np.repeat(f, area) for f in value.on(channel)]
    else:
        kept, within = walk.split(value.on(channel), (value.shape[channel] // area, area))
        walk.freeze(within)  # the pixels that a channel becomes
        out.fields[channel] = kept
    return out


@rule("cat concat concatenate")
def concatenate(walk: Walk, node: Node) -> Result:
    """Along the axis labels stand side by side; along the others they are the same in every part."""
    parts = [walk.value(n) for n in argument(node, 0) if shape_of(n) != (0,)]  # PyTorch lets empty ones pass
    axis = argument(node, 1, "dim", 0) % len(shape_of(node))
    fields = _met(walk, parts, skip=axis)
    most = max(len(part.on(axis)) for part in parts)
    # parts may have unlike numbers of fields; those that are missing have no labels
    filled = [part.on(axis) + [np.full(part.shape[axis], NONE)] * most for part in parts]
    if most:
        fields[axis] = [np.concatenate([each[index] for each in filled]) for index in range(most)]
    return Value(shape_of(node), fields, sources(parts))


@rule("stack")
def stack(walk: Walk, node: Node) -> Result:
    """A new axis without labels; along the others labels are the same in every part."""
    parts = [walk.value(n) for n in argument(node, 0)]
    axis = argument(node, 1, "dim", 0) % len(shape_of(node))
    fields = {a + (a >= axis): f for a, f in _met(walk, parts).items()}
    return Value(shape_of(node), fields, sources(parts))


def _met(walk: Walk, parts: list[Value], skip: int | None = None) -> dict[int, list[Ints]]:
    """The fields of axes that are the same in every part."""
    axes = [axis for axis in range(len(parts[0].shape)) if axis != skip]
    labelled = [axis for axis in axes if any(part.on(axis) for part in parts)]
    return {axis: walk.meet([part.on(axis) for part in parts]) for axis in labelled}


@rule("chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split")
def split(walk: Walk, node: Node) -> Result:
    """Equal parts are rows of a rectangle, which loses whole columns only; unequal ones must stay."""
    value = walk.value(node.args[0])
    axis = argument(node, 2, "dim", 0) % len(value.shape)
    shapes = [tuple(part.shape) for part in node.meta["val"]]
    columns: list[Ints] = []
    if len({shape[axis] for shape in shapes}) == 1:
        rows, columns = walk.split(value.on(axis), (len(shapes), shapes[0][axis]))
        walk.freeze(rows)  # the code asks for so many parts
    else:
        walk.freeze(value.on(axis))
    parts: list[Value] = [Value(shape, {**value.fields, axis: columns}, value.sources) for shape in shapes]
    for each in (value, *parts):  # code may hold the size of the whole, or of a part
        walk.note_sizes(Value(each.shape, {axis: each.on(axis)}))
    return parts


@rule("slice")
def slice_(walk: Walk, node: Node) -> Result:
    """One of several equal parts, or every n-th entry; anything else must stay."""
    value, shape = walk.value(node.args[0]), shape_of(node)
    axis = argument(node, 1, "dim", 0) % len(value.shape)
    size, taken = value.shape[axis], shape[axis]
    fields = dict(value.fields)
    if size != taken and value.on(axis):
        start = argument(node, 2, "start", 0) or 0
        start, step = start + size * (start < 0), argument(node, 4, "step", 1)
        fields[axis] = _part(walk, value.on(axis), size, taken, start, step)
    return Value(shape, fields, value.sources)


def _part(walk: Walk, fields: list[Ints], size: int, taken: int, start: int, step: int) -> list[Ints]:
    if step == 1 and taken > 1 and size % taken == 0 and start % taken == 0:  # a row of (parts, taken)
        rows, columns = walk.split(fields, (size // taken, taken))
        walk.freeze(rows)
        return columns
    if step > 1 and taken > 1 and size % step == 0 and taken == size // step:  # a column of (taken, step)
        rows, columns = walk.split(fields, (taken, step))
        walk.freeze(columns)
        return rows
    walk.freeze(fields)
    return []


@rule("select")
def select(walk: Walk, node: Node) -> Result:
    """Picked by its number, so all must stay."""
    if not node.users:  # the code asks for its shape alone
        return walk.plain(node)
    value = walk.value(node.args[0])
    return _without(walk, value, argument(node, 1, "dim", 0), shape_of(node))


@rule("unbind")
def unbind(walk: Walk, node: Node) -> Result:
    """Taken apart by number, so all must stay."""
    value, axis = walk.value(node.args[0]), argument(node, 1, "dim", 0)
    return [_without(walk, value, axis, tuple(part.shape)) for part in node.meta["val"]]


def _without(walk: Walk, value: Value, axis: int, shape: tuple[int, ...]) -> Value:
    axis %= len(value.shape)
    walk.freeze(value.on(axis))
    return Value(shape, {a - (a > axis): f for a, f in value.fields.items() if a != axis}, value.sources)


@rule("getitem")
def getitem(walk: Walk, node: Node) -> Result:
    """One of several results."""
    parts, index = walk.values.get(argument(node, 0)), node.args[1]
    if isinstance(parts, list) and isinstance(index, int) and index < len(parts):
        return parts[index]
    return walk.plain(node)


@rule("index")
def index(walk: Walk, node: Node) -> Result:
    """Axes that are indexed by tensors must stay; the others go on where the indexed axes are neighbours."""
    value, indices = walk.value(node.args[0]), list(argument(node, 1))
    indexed: list[int] = []
    axis = 0
    for each in indices:
        # a mask stands for as many axes as it has itself
        taken = each.meta["val"].dim() if each is not None and each.meta["val"].dtype == torch.bool else 1
        indexed += range(axis, axis + taken) if each is not None else ()
        axis += taken
    for each in node.all_input_nodes[1:]:
        walk.freeze_all(walk.value(each))
    if not indexed or indexed[-1] - indexed[0] >= len(indexed):  # then PyTorch puts the result's new axes first
        return unknown(walk, node)
    walk.freeze_all(value, indexed)
    shape = shape_of(node)
    # indices of several axes put these in the place of the indexed ones
    shift = len(shape) - len(value.shape)
    fields = {a + (shift if a > indexed[-1] else 0): f for a, f in value.fields.items() if a not in indexed}
    # the matrix of an expert, whichever is chosen, is a weight
    is_weight = value.is_static and len(value.shape) - len(indexed) > 1
    return Value(shape, fields, value.sources if is_weight else sources(walk.operands(node)))


@rule("gather take_along_dim")
def gather(walk: Walk, node: Node) -> Result:
    """Entries are picked along one axis, which must stay; along the others each index has its own."""
    value, dim = walk.value(node.args[0]), named(node, "dim")
    places = walk.value(named(node, "index") or named(node, "indices"))
    if dim is None or len(places.shape) != len(value.shape):
        return unknown(walk, node)
    walk.freeze_all(value, (dim,))
    walk.freeze_all(places, (dim,))
    fields = {}
    for axis in set(range(len(value.shape))) - {dim % len(value.shape)}:
        if value.shape[axis] != places.shape[axis]:  # the first ones of more, or one for all
            walk.freeze(value.on(axis) + places.on(axis))
        elif value.on(axis) or places.on(axis):
            fields[axis] = walk.meet([value.on(axis), places.on(axis)])
    return Value(shape_of(node), fields, sources([value, places]))


@rule("index_select")
def index_select(walk: Walk, node: Node) -> Result:
    """The indexed axis must stay."""
    value, axis = walk.value(node.args[0]), int(argument(node, 1))
    walk.freeze_all(value, (axis,))
    walk.freeze_all(walk.value(node.args[2]))
    kept = {a: f for a, f in value.fields.items() if a != axis % len(value.shape)}
    return Value(shape_of(node), kept, value.sources)


@rule("pad constant_pad_nd")
def pad(walk: Walk, node: Node) -> Result:
    """Padding has no labels; what is padded with copies of itself must stay."""
    value, widths = walk.value(node.args[0]), list(argument(node, 1))
    constant = argument(node, 2, "mode", "constant") == "constant" or "constant_pad" in str(node.target)
    fields = dict(value.fields)
    for index in range(len(widths) // 2):  # pairs of widths, the last axis first
        axis, around = len(value.shape) - 1 - index, tuple(widths[2 * index : 2 * index + 2])
        if not any(around) or not value.on(axis):
            continue
        if constant:
            fields[axis] = [F.pad(torch.from_numpy(f), around, value=NONE).numpy() for f in value.on(axis)]
        else:
            walk.freeze(value.on(axis))
            del fields[axis]
    return Value(shape_of(node), fields, value.sources)


@rule("roll")
def roll(walk: Walk, node: Node) -> Result:
    """By a fixed number of places, so a labelled axis must stay."""
    value = walk.value(node.args[0])
    walk.freeze_all(value, argument(node, 2, "dims") or range(len(value.shape)))
    return Value(value.shape, value.fields, value.sources)


@rule("im2col")
def im2col(walk: Walk, node: Node) -> Result:
    """Each channel becomes a run of taps."""
    value, shape = walk.value(node.args[0]), shape_of(node)
    channel = len(shape) - 2
    walk.freeze_all(value, (channel + 1, channel + 2))
    fields = {a: f for a, f in value.fields.items() if a < channel}
    fields[channel] = [np.repeat(f, shape[channel] // len(f)) for f in value.on(channel)]
    return Value(shape, fields, value.sources)


@rule("col2im")
def col2im(walk: Walk, node: Node) -> Result:
    """The other way round: a run of taps becomes a channel, and taps stay."""
    value, shape = walk.value(node.args[0]), shape_of(node)
    axis, channel = len(value.shape) - 2, len(shape) - 3
    walk.freeze_all(value, (axis + 1,))
    kept, taps = walk.split(value.on(axis), (shape[channel], value.shape[axis] // shape[channel]))
    walk.freeze(taps)
    fields = {a: f for a, f in value.fields.items() if a < axis}
    return Value(shape, {**fields, channel: kept}, value.sources)
