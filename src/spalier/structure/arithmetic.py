"""Rules for operations that compute: entry by entry, by contraction, or with statistics over an axis.

- *Entry by entry*, axes meet: their labels are one. An axis that meets one without labels must stay.
- *Contractions* are products over lettered axes, summed over some of them (`contract`): linear layers, `matmul`,
  `einsum`, attention. A convolution is one over its channels; with groups, its channels are split into (groups,
  channels), and depthwise convolutions need nothing more.
- *Norms* have parameters that ride on the channels. Where they average over labelled axes, or take a length, the place
  is noted: there the mean is that of what is left. Any other reduction or softmax over a labelled axis freezes it.
- Tensors whose entries are all alike, such as zeros, have as many channels as what they meet.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor
from torch.fx import Node

from spalier.structure.graph import Result, Value, Walk, argument, named, operation, rule, shape_of, sources, unknown
from spalier.structure.labels import Ints

TAPS = "a tap of a kernel"
"""Taps are no channels, and what must stay for this reason is not listed."""

# entry by entry


# PyTorch tags most element-wise operations as pointwise, but not those after the first name here
@rule(
    "pointwise copy addcmul addcdiv lerp masked_fill where hardswish hardsigmoid hardtanh relu6 leaky_relu elu celu "
    "selu softplus mish silu gelu threshold hardshrink softshrink log_sigmoid rrelu square nan_to_num"
)
def pointwise(walk: Walk, node: Node) -> Result:
    """Broadcast, entry by entry."""
    return broadcast(walk, walk.operands(node), shape_of(node))


def broadcast(walk: Walk, values: Sequence[Value], shape: tuple[int, ...]) -> Value:
    """Tensors that are combined entry by entry."""
    if len(values) == 1:
        return Value(shape, values[0].fields, values[0].sources)
    fields = {}
    for axis in range(len(shape)):
        own = [(v, axis - len(shape) + len(v.shape)) for v in values]  # axes are matched from the last one on
        # an axis of size 1 is broadcast: it carries no channels of its own
        sides = [v.on(a) for v, a in own if a >= 0 and v.shape[a] > 1]
        if any(sides):
            fields[axis] = walk.meet(sides)
    return Value(shape, fields, sources(values))


@rule("prelu")
def prelu(walk: Walk, node: Node) -> Result:
    """One slope for each channel, the second axis."""
    value, slope = walk.value(node.args[0]), walk.value(node.args[1])
    return _with_channel_parameters(walk, value, [slope] if slope.shape[0] > 1 else [])


def _with_channel_parameters(walk: Walk, value: Value, parameters: Sequence[Value], axis: int = 1) -> Value:
    """Parameters with one entry for each channel ride on it."""
    fields = dict(value.fields)
    if parameters and value.shape[axis] > 1:
        sides = [value.on(axis), *(p.on(0) for p in parameters)]
        fields[axis] = walk.meet(sides) if any(sides) else []
    return Value(value.shape, fields, sources([value, *parameters]))


# contractions

Operand = tuple[Value, str]
"""A tensor and a letter for each of its axes."""


def contract(
    walk: Walk, operands: Sequence[Operand], out: str, shape: tuple[int, ...], *, counted: bool = True
) -> Value:
    """A product over lettered axes, summed over the letters that ``out`` lacks: every contraction is one.

    Axes of one letter run in parallel, so their labels are one. It costs the product of all sizes.
    """
    met: dict[str, list[Ints]] = {}
    for letter in dict.fromkeys("".join(letters for _, letters in operands)):
        on = [(value, axes.index(letter)) for value, axes in operands if letter in axes]
        sides = [value.on(axis) for value, axis in on if value.shape[axis] > 1]
        met[letter] = walk.meet(sides) if any(sides) else []
        _note_roles(walk, operands, letter, is_kept=letter in out)
    shared = [x for x in met if x not in out and sum(x in axes for _, axes in operands) > 1]
    if counted and shared:  # else it is a product entry by entry, and nothing is accumulated
        _note_cost(walk, operands, met)
    fields = {axis: met[letter] for axis, letter in enumerate(out) if met.get(letter)}
    return Value(shape, fields, sources([value for value, _ in operands]))


def _note_roles(walk: Walk, operands: Sequence[Operand], letter: str, *, is_kept: bool) -> None:
    """A parameter writes the channels that only it has, and reads those that are summed over."""
    if all(value.is_static for value, _ in operands):
        return  # a weight is computed from others; its role shows where it meets the network's input
    for value, axes in operands:
        if value.is_static and letter in axes:
            shared = any(letter in other for v, other in operands if v is not value)
            fields = value.on(axes.index(letter))
            walk.note_role(value, fields, "rider" if shared == is_kept else "writer" if is_kept else "reader")


def _note_cost(walk: Walk, operands: Sequence[Operand], met: dict[str, list[Ints]]) -> None:
    # the axes of one parameter count by what is left of that parameter, the others by their labels; what neither is
    # labelled nor a parameter's is a number
    owned = [(walk.owner(value), letters) for value, letters in operands if walk.owner(value)]
    tensor, own = owned[0] if owned else ("", "")
    others = [letter for letter in met if letter not in own]
    sizes = {x: max(v.shape[axes.index(x)] for v, axes in operands if x in axes) for x in others}
    times = math.prod(sizes[letter] for letter in others if not met[letter])
    walk.note_cost(times, tensor, range(len(own)), [met[letter] for letter in others if met[letter]])


@rule("linear")
def linear(walk: Walk, node: Node) -> Result:
    """``x W^T + b``."""
    value, weight = walk.value(node.args[0]), walk.value(node.args[1])
    batch, shape = _batch_letters(value, 1), shape_of(node)
    axes = "oi" if len(weight.shape) == 2 else "i"  # F.linear takes a vector too
    out = contract(walk, [(value, batch + "i"), (weight, axes)], batch + axes[:-1], shape)
    return broadcast(walk, [out, *walk.given(argument(node, 2, "bias"))], shape)


def _batch_letters(value: Value, others: int) -> str:
    """Letters for the axes in front of the last ones."""
    return "ABCDEFGH"[: len(value.shape) - others]


@rule("matmul mm bmm mv dot vdot")
def matmul(walk: Walk, node: Node) -> Result:
    """The last axis of one with the last but one of the other."""
    return _product(walk, walk.value(node.args[0]), walk.value(node.args[1]), shape_of(node))


def _product(walk: Walk, a: Value, b: Value, shape: tuple[int, ...]) -> Value:
    most = max(len(a.shape), len(b.shape), 2) - 2
    batch = "ABCDEFGH"[:most]  # batch axes are matched from the last one on
    left = batch[most + 2 - len(a.shape) :] + "mk" if len(a.shape) > 1 else "k"
    right = batch[most + 2 - len(b.shape) :] + "kn" if len(b.shape) > 1 else "k"
    out = batch + ("m" if len(a.shape) > 1 else "") + ("n" if len(b.shape) > 1 else "")
    return contract(walk, [(a, left), (b, right)], out, shape)


@rule("addmm baddbmm")
def addmm(walk: Walk, node: Node) -> Result:
    """A bias plus a product."""
    bias, a, b = (walk.value(n) for n in node.args[:3])
    return broadcast(walk, [_product(walk, a, b, shape_of(node)), bias], shape_of(node))


@rule("grouped_mm grouped_mm_fallback _grouped_mm")
def grouped(walk: Walk, node: Node) -> Result:
    """Rows of one matrix, each with one of several others: experts, which are chosen by number and must stay."""
    value, weight, shape = walk.value(node.args[0]), walk.value(node.args[1]), shape_of(node)
    if len(value.shape) != 2 or len(weight.shape) != 3:
        return unknown(walk, node)
    walk.freeze(weight.on(0) + value.on(0))
    walk.grouped.add(walk.place)
    one = Value(weight.shape[1:], {a - 1: weight.on(a) for a in (1, 2)}, weight.sources)
    return contract(walk, [(value, "si"), (one, "io")], "so", shape)


@rule("einsum")
def einsum(walk: Walk, node: Node) -> Result:
    """Any contraction, written out."""
    equation, values = str(node.args[0]).replace(" ", ""), [walk.value(n) for n in argument(node, 1)]
    inputs, arrow, out = equation.partition("->")
    axes = inputs.split(",")
    # implicit outputs, an ellipsis or a diagonal
    if not arrow or "." in equation or any(len(set(a)) < len(a) for a in axes):
        return unknown(walk, node)
    return contract(walk, list(zip(values, axes, strict=True)), out, shape_of(node))


@rule("bilinear")
def bilinear(walk: Walk, node: Node) -> Result:
    """Two inputs and a weight of (out, first, second)."""
    first, second, weight = (walk.value(n) for n in node.args[:3])
    batch = _batch_letters(first, 1)
    operands = [(first, batch + "i"), (second, batch + "j"), (weight, "oij")]
    out = contract(walk, operands, batch + "o", shape_of(node))
    return broadcast(walk, [out, *walk.given(argument(node, 3, "bias"))], shape_of(node))


@rule("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d")
def convolution(walk: Walk, node: Node) -> Result:
    """Channels are contracted inside of each group; pixels and taps must stay."""
    value, weight = walk.value(node.args[0]), walk.value(node.args[1])
    name, shape = operation(node), shape_of(node)
    channel = len(value.shape) - len(weight.shape) + 1  # the batch axis may be missing
    transposed = "transpose" in name or (name == "convolution" and bool(node.args[6]))
    groups = argument(node, 8 if name == "convolution" else 6, "groups", 1)
    # one tap at each pixel: pixels are apart, and may be channels of something else
    is_pointwise = set(weight.shape[2:]) == {1} and _is_all(node, "stride", 1) and _is_all(node, "padding", 0)
    if not is_pointwise:
        walk.freeze_all(value, range(channel + 1, len(value.shape)))
    walk.freeze_all(weight, range(2, len(weight.shape)), TAPS)
    # counted below, with the pixels that this contraction knows nothing of
    made = _grouped(walk, value, channel, weight, groups, transposed, shape[channel])
    last = len(value.shape) if is_pointwise else channel
    batch = {axis: fields for axis, fields in value.fields.items() if axis < last and axis != channel and fields}
    pixels = value.shape if transposed else shape
    plain = math.prod(n for axis, n in enumerate(pixels) if axis != channel and axis not in batch)
    _note_convolution(walk, weight, plain, list(batch.values()))
    out = Value(shape, {**batch, channel: made.on(0)}, made.sources)
    return _with_channel_parameters(walk, out, walk.given(argument(node, 2, "bias")), channel)


def _is_all(node: Node, name: str, number: int) -> bool:
    found = named(node, name)
    return set(found if isinstance(found, list | tuple) else [found]) <= {number}


def _note_convolution(walk: Walk, weight: Value, pixels: int, batch: list[list[Ints]]) -> None:
    """Every entry of the kernel is used once for each pixel; the batch may be one of heads."""
    times = pixels * math.prod(weight.shape[2:])
    if walk.owner(weight):
        walk.note_cost(times, walk.owner(weight), (0, 1), batch)
    else:
        plain = math.prod(n for axis, n in enumerate(weight.shape[:2]) if not weight.on(axis))
        walk.note_cost(times * plain, "", (), [*batch, *(weight.on(axis) for axis in (0, 1) if weight.on(axis))])


def _grouped(
    walk: Walk, value: Value, channel: int, weight: Value, groups: int, transposed: bool, outputs: int
) -> Value:
    """The labels of the output channels, as a value of one axis."""
    inputs = value.shape[channel]
    if groups == 1:
        x = Value((inputs,), {0: value.on(channel)}, value.sources)
        w = Value(weight.shape[:2], {a: weight.on(a) for a in (0, 1)}, weight.sources)
        return contract(walk, [(x, "i"), (w, "io" if transposed else "oi")], "o", (outputs,), counted=False)
    x = Value((groups, inputs // groups), _split(walk, value.on(channel), groups, inputs), value.sources)
    # a weight's first axis runs over all groups, its second over the channels of one
    fields = {**_split(walk, weight.on(0), groups, weight.shape[0]), 2: weight.on(1)}
    w = Value((groups, weight.shape[0] // groups, weight.shape[1]), fields, weight.sources)
    per_group = outputs // groups
    operands = [(x, "gi"), (w, "gio" if transposed else "goi")]
    out = contract(walk, operands, "go", (groups, per_group), counted=False)
    return Value((outputs,), {0: _joined(out.on(0), out.on(1), groups, per_group)}, out.sources)


def _split(walk: Walk, fields: list[Ints], groups: int, size: int) -> dict[int, list[Ints]]:
    return dict(enumerate(walk.split(fields, (groups, size // groups))))


def _joined(rows: list[Ints], columns: list[Ints], groups: int, per_group: int) -> list[Ints]:
    """An axis of (groups, channels) as one again."""
    return [np.repeat(field, per_group) for field in rows] + [np.tile(field, groups) for field in columns]


@rule("embedding")
def embedding(walk: Walk, node: Node) -> Result:
    """Rows are picked by number; columns are what is written."""
    weight, shape = walk.value(node.args[0]), shape_of(node)
    walk.freeze_all(weight, (0,))
    walk.freeze_all(walk.value(node.args[1]))  # the numbers themselves
    walk.note_role(weight, weight.on(1), "writer")
    return Value(shape, {len(shape) - 1: weight.on(1)}, sources(walk.operands(node)))


@rule("scaled_dot_product_attention")
def attention(walk: Walk, node: Node) -> Result:
    """Scores of queries and keys, and a mixture of values."""
    query, key, value = (walk.value(n) for n in node.args[:3])
    if len({len(v.shape) for v in (query, key, value)}) > 1:
        return unknown(walk, node)  # batch axes that broadcast
    if argument(node, 7, "enable_gqa", False):
        key, value = (_repeated(v, query.shape[-3]) for v in (key, value))
    if node.kwargs.get("scale") is None:
        walk.freeze(query.on(-1) + key.on(-1), f"{walk.reason}: it scales by the head size")
    walk.freeze(key.on(-2) + value.on(-2))  # softmax runs over the keys' positions
    batch, shape = _batch_letters(query, 2), (*query.shape[:-1], key.shape[-2])
    scores = contract(walk, [(query, batch + "qe"), (key, batch + "ke")], batch + "qk", shape)
    scores = broadcast(walk, [scores, *walk.given(argument(node, 3, "attn_mask"))], shape)
    return contract(walk, [(scores, batch + "qk"), (value, batch + "kv")], batch + "qv", shape_of(node))


def _repeated(value: Value, heads: int) -> Value:
    """Keys or values of grouped queries, one for each query head."""
    times, axis = heads // value.shape[-3], len(value.shape) - 3
    shape = (*value.shape[:-3], heads, *value.shape[-2:])
    fields = {**value.fields, axis: [np.repeat(f, times) for f in value.on(axis)]}
    return Value(shape, fields, value.sources)


# norms and other statistics


@rule("batch_norm instance_norm _native_batch_norm_legit")
def batch_norm(walk: Walk, node: Node) -> Result:
    """Each channel by itself; its parameters and statistics ride."""
    value = walk.value(node.args[0])
    others = {a: value.on(a) for a in range(len(value.shape)) if a != 1}
    if bool(argument(node, 5, "training")) or node.args[3] is None:  # it takes the mean of what it is given
        if value.is_static:
            walk.note_statistic(node, others)  # a standardised weight: the mean is over its inputs
        else:
            walk.freeze_all(value, others)
    return _with_channel_parameters(walk, value, walk.given(*node.args[1:5]))


@rule("layer_norm rms_norm")
def layer_norm(walk: Walk, node: Node) -> Result:
    """Parameters ride; the statistics are those of what is left."""
    value, over = walk.value(node.args[0]), len(argument(node, 1))
    axes = range(len(value.shape) - over, len(value.shape))
    walk.note_statistic(node, {a: value.on(a) for a in axes})
    return broadcast(walk, [value, *walk.given(*node.args[2:4])], value.shape)


@rule("group_norm")
def group_norm(walk: Walk, node: Node) -> Result:
    """Whole groups, or one position of every group; the statistics are those of what is left."""
    value, groups = walk.value(node.args[0]), int(argument(node, 1))
    walk.freeze_all(value, range(2, len(value.shape)))
    out = _with_channel_parameters(walk, value, walk.given(*node.args[2:4]))
    rows, columns = walk.split(out.on(1), (groups, value.shape[1] // groups))
    # a group that lost some channels, and others not, would leave groups of unlike sizes
    fields = _joined(rows, columns, groups, value.shape[1] // groups)
    walk.note_statistic(node, {1: fields})
    return Value(out.shape, {0: value.on(0), 1: fields}, out.sources)


@rule("_weight_norm")
def weight_norm(walk: Walk, node: Node) -> Result:
    """A direction and a length for each index of one axis, or of none; the direction's own is that of what is left."""
    value, length = walk.value(node.args[0]), walk.value(node.args[1])
    own = named(node, "dim")  # -1 for one length of all
    walk.note_statistic(node, {a: value.on(a) for a in range(len(value.shape)) if a != own})
    return broadcast(walk, [value, length], value.shape)


@rule(
    "mean sum nansum nanmean amax amin max min aminmax std var std_mean var_mean median nanmedian mode kthvalue all "
    "any linalg_vector_norm norm frobenius_norm argmax argmin logsumexp prod count_nonzero"
)
def reduction(walk: Walk, node: Node) -> Result:
    """A labelled axis that is reduced must stay, but for norms that are written by hand."""
    if named(node, "other") is not None:  # the larger of two
        return pointwise(walk, node)
    value, dims = walk.value(node.args[0]), named(node, "dim")
    axes = [dims] if isinstance(dims, int) else list(dims or range(len(value.shape)))
    axes = [a % len(value.shape) for a in axes if isinstance(a, int)] if value.shape else []
    if _is_mean_square(node) or _is_length(node):
        walk.note_statistic(node, {a: value.on(a) for a in axes})
    else:
        walk.freeze_all(value, axes)
    left = [a for a in range(len(value.shape)) if a not in axes]

    def reduced(made: Tensor) -> Value:
        places = left if made.dim() == len(value.shape) else range(len(left))  # keepdim, or not
        fields = {place: value.on(a) for place, a in zip(places, left, strict=True) if value.on(a)}
        return Value(tuple(made.shape), fields, value.sources)

    return _each(node, reduced)


def _each(node: Node, made: Callable[[Tensor], Value]) -> Result:
    """What an operation returns: a tensor, or several, such as the largest entries and their places."""
    found = node.meta["val"]
    return made(found) if isinstance(found, Tensor) else [made(each) for each in found]


def _is_length(node: Node) -> bool:
    """The Euclidean length, which zeros add nothing to."""
    name, order = operation(node), named(node, "ord" if operation(node) == "linalg_vector_norm" else "p")
    return name in ("linalg_vector_norm", "norm") and order in (2, None) and bool(named(node, "dim"))


def _is_mean_square(node: Node) -> bool:
    """``rsqrt(mean(x ** 2) + eps)``, the norm of Llama and T5."""
    squared = node.args[0]
    if operation(node) != "mean" or not isinstance(squared, Node):
        return False
    is_square = operation(squared) == "square" or (operation(squared) == "pow" and squared.args[1:] == (2,))
    users = {user for each in node.users for user in (each, *each.users)}  # eps may be added in between
    return is_square and any(operation(user) == "rsqrt" for user in users)


@rule("softmax log_softmax cumsum _softmax _log_softmax cumprod logcumsumexp cummax cummin sort argsort topk")
def along(walk: Walk, node: Node) -> Result:
    """Each entry depends on all others of the axis, so these must stay."""
    value, axis = walk.value(node.args[0]), int(named(node, "dim"))
    walk.freeze_all(value, (axis,))

    def kept(made: Tensor) -> Value:  # of the largest ones there are fewer
        fields = {a: f for a, f in value.fields.items() if made.shape[a] == value.shape[a]}
        return Value(tuple(made.shape), fields, value.sources)

    return _each(node, kept)


@rule("glu")
def glu(walk: Walk, node: Node) -> Result:
    """One half gates the other."""
    value, shape = walk.value(node.args[0]), shape_of(node)
    axis = int(argument(node, 1, "dim", -1)) % len(value.shape)
    halves, columns = walk.split(value.on(axis), (2, shape[axis]))
    walk.freeze(halves)  # there are always two
    return Value(shape, {**value.fields, axis: columns}, value.sources)


# the rest


def _in_every_dimension(names: str) -> str:
    return " ".join(f"{name}{dims}d" for name in names.split() for dims in (1, 2, 3))


@rule(
    _in_every_dimension(
        "max_pool avg_pool adaptive_avg_pool adaptive_max_pool lp_pool fractional_max_pool upsample_nearest "
        "_upsample_nearest_exact upsample_linear upsample_bilinear _upsample_bilinear_aa upsample_trilinear "
        "upsample_bicubic"
    )
    + " max_pool2d_with_indices max_pool3d_with_indices"
)
def spatial(walk: Walk, node: Node) -> Result:
    """Each channel by itself; pixels must stay."""
    value = walk.value(node.args[0])
    first = len(value.shape) - int(re.findall(r"(\d)d", operation(node))[0])
    walk.freeze_all(value, range(first, len(value.shape)))
    fields = {a: f for a, f in value.fields.items() if a < first}
    # some return the places of the largest pixels too
    return _each(node, lambda made: Value(tuple(made.shape), fields, value.sources))


@rule(_in_every_dimension("max_unpool"))
def unpool(walk: Walk, node: Node) -> Result:
    """Pixels of a channel go where the places of that channel say."""
    value, places = walk.value(node.args[0]), walk.value(node.args[1])
    first = len(value.shape) - int(re.findall(r"(\d)d", operation(node))[0])
    for each in (value, places):
        walk.freeze_all(each, range(first, len(value.shape)))
    met = broadcast(walk, [value, places], value.shape)
    return Value(shape_of(node), {a: f for a, f in met.fields.items() if a < first}, met.sources)


@rule("grid_sampler grid_sampler_2d grid_sampler_3d")
def grid_sample(walk: Walk, node: Node) -> Result:
    """Each channel by itself, at the pixels that the grid says."""
    value, grid = walk.value(node.args[0]), walk.value(node.args[1])
    walk.freeze_all(value, (0, *range(2, len(value.shape))))
    walk.freeze_all(grid)
    return Value(shape_of(node), {1: value.on(1)}, sources([value, grid]))


@rule("_assert_tensor_metadata _assert_async _assert_scalar sym_constrain_range_for_size sym_size")
def nothing(walk: Walk, node: Node) -> Result:
    """A check without a result."""
    return Value(())


@rule("zeros_like ones_like full_like empty_like")
def like(walk: Walk, node: Node) -> Result:
    """As many entries as the other has, all alike."""
    return Value(shape_of(node), walk.value(node.args[0]).fields, _made_of_nothing(node))


@rule("new_zeros new_ones new_full new_empty zeros ones full empty")
def fresh(walk: Walk, node: Node) -> Result:
    """Entries that are all alike, as many as the code says."""
    shape = shape_of(node)
    made = Value(shape, walk.any_labels(shape, range(len(shape))), _made_of_nothing(node))
    walk.made.setdefault(walk.place, []).append(made)
    return made


def _made_of_nothing(node: Node) -> frozenset[str] | None:
    """The sources of a tensor that is made of nothing; of what the code writes into later, nothing is known."""
    return None if _is_written(node) else frozenset()


def _is_written(node: Node) -> bool:
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        # a view of it, or an operation in its place
        alias = schema.arguments[0].alias_info if schema and user.args and user.args[0] is node else None
        if alias is not None and (alias.is_write or _is_written(user)):
            return True
    return False


@rule("wrap_with_set_grad_enabled wrap_with_autocast")
def block(walk: Walk, node: Node) -> Result:
    """A part of the graph under a switch."""
    place = next(i for i, a in enumerate(node.args) if isinstance(a, Node) and a.op == "get_attr")
    return walk.inside(node, argument(node, place), node.args[place + 1 :])
