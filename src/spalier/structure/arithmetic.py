"""Rules for operations that compute: element by element, by contraction, or with statistics over an axis."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.fx import Node

from spalier.structure.capture import operation
from spalier.structure.labels import Ints
from spalier.structure.walk import Kind, Result, Value, Walk, argument, rule, shape_of, sources, unknown

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
        sides = [
            v.on(axes.index(letter)) for v, axes in operands if letter in axes and _size(v, axes, letter) > 1
        ]
        met[letter] = walk.meet(sides) if any(sides) else []
        _note_roles(walk, operands, letter, letter in out)
    if counted:
        _note_term(walk, operands, met)
    fields = {axis: met[letter] for axis, letter in enumerate(out) if met.get(letter)}
    return Value(shape, fields, sources([value for value, _ in operands]))


def _note_term(walk: Walk, operands: Sequence[Operand], met: dict[str, list[Ints]]) -> None:
    owned = [(walk.owner(value), letters) for value, letters in operands if walk.owner(value)]
    tensor, own = owned[0] if owned else ("", "")
    others = [letter for letter in met if letter not in own]
    sizes = {x: max(_size(v, axes, x) for v, axes in operands if x in axes) for x in others}
    times = math.prod(sizes[letter] for letter in others if not met[letter])
    walk.term(times, tensor, range(len(own)), [met[letter] for letter in others if met[letter]])


def _size(value: Value, axes: str, letter: str) -> int:
    return value.shape[axes.index(letter)]


def _note_roles(walk: Walk, operands: Sequence[Operand], letter: str, kept: bool) -> None:
    """A parameter writes the channels that only it has, and reads those that are summed over."""
    if all(value.is_static for value, _ in operands):
        return
    for value, axes in operands:
        if value.is_static and letter in axes:
            shared = any(letter in other for v, other in operands if v is not value)
            role: Kind = "writer" if kept and not shared else "reader" if shared and not kept else "rider"
            walk.role(value, value.on(axes.index(letter)), role)


# PyTorch tags most element-wise operations as pointwise, but not these
_UNTAGGED = [
    "copy",
    "addcmul",
    "addcdiv",
    "lerp",
    "masked_fill",
    "where",
    "hardswish",
    "hardsigmoid",
    "hardtanh",
    "relu6",
    "leaky_relu",
    "elu",
    "celu",
    "selu",
    "softplus",
    "mish",
    "silu",
    "gelu",
    "threshold",
    "hardshrink",
    "softshrink",
    "log_sigmoid",
    "rrelu",
    "square",
    "nan_to_num",
]


@rule("pointwise", *_UNTAGGED)
def pointwise(walk: Walk, node: Node) -> Result:
    """Broadcast, entry by entry."""
    return broadcast(walk, walk.operands(node), shape_of(node))


def broadcast(walk: Walk, values: Sequence[Value], shape: tuple[int, ...]) -> Value:
    """Tensors that are combined entry by entry."""
    if len(values) == 1:
        return Value(shape, values[0].fields, values[0].sources)
    fields = {}
    for axis in range(len(shape)):
        own = [(v, axis - len(shape) + len(v.shape)) for v in values]
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


def _given(walk: Walk, *nodes: Any) -> list[Value]:
    return [walk.value(n) for n in nodes if isinstance(n, Node)]


# contractions


@rule("linear")
def linear(walk: Walk, node: Node) -> Result:
    """``x W^T + b``."""
    value, weight = walk.value(node.args[0]), walk.value(node.args[1])
    batch = _letters(len(value.shape) - 1)
    shape = shape_of(node)
    axes = "oi" if len(weight.shape) == 2 else "i"
    out = contract(walk, [(value, batch + "i"), (weight, axes)], batch + axes[:-1], shape)
    return broadcast(walk, [out, *_given(walk, argument(node, 2, "bias"))], shape)


def _letters(count: int) -> str:
    return "ABCDEFGH"[:count]


@rule("matmul", "mm", "bmm", "mv", "dot", "vdot")
def matmul(walk: Walk, node: Node) -> Result:
    """The last axis of one with the last but one of the other."""
    return _product(walk, walk.value(node.args[0]), walk.value(node.args[1]), shape_of(node))


def _product(walk: Walk, a: Value, b: Value, shape: tuple[int, ...]) -> Value:
    most = max(len(a.shape), len(b.shape), 2) - 2
    left = _letters(most)[most + 2 - len(a.shape) :] + "mk" if len(a.shape) > 1 else "k"
    right = _letters(most)[most + 2 - len(b.shape) :] + "kn" if len(b.shape) > 1 else "k"
    out = _letters(most) + ("m" if len(a.shape) > 1 else "") + ("n" if len(b.shape) > 1 else "")
    return contract(walk, [(a, left), (b, right)], out, shape)


@rule("addmm", "baddbmm")
def addmm(walk: Walk, node: Node) -> Result:
    """A bias plus a product."""
    bias, a, b = (walk.value(n) for n in node.args[:3])
    return broadcast(walk, [_product(walk, a, b, shape_of(node)), bias], shape_of(node))


@rule("einsum")
def einsum(walk: Walk, node: Node) -> Result:
    """Any contraction, written out."""
    equation, values = str(node.args[0]).replace(" ", ""), [walk.value(n) for n in argument(node, 1)]
    inputs, arrow, out = equation.partition("->")
    axes = inputs.split(",")
    if not arrow or "." in equation or any(len(set(a)) < len(a) for a in axes):
        return unknown(walk, node)
    return contract(walk, list(zip(values, axes, strict=True)), out, shape_of(node))


@rule("bilinear")
def bilinear(walk: Walk, node: Node) -> Result:
    """Two inputs and a weight of (out, first, second)."""
    first, second, weight = (walk.value(n) for n in node.args[:3])
    batch = _letters(len(first.shape) - 1)
    operands = [(first, batch + "i"), (second, batch + "j"), (weight, "oij")]
    out = contract(walk, operands, batch + "o", shape_of(node))
    return broadcast(walk, [out, *_given(walk, argument(node, 3, "bias"))], shape_of(node))


@rule("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(walk: Walk, node: Node) -> Result:
    """Channels are contracted inside of each group; pixels and taps must stay."""
    value, weight = walk.value(node.args[0]), walk.value(node.args[1])
    name, channel = operation(node), len(value.shape) - len(weight.shape) + 1
    transposed = "transpose" in name or (name == "convolution" and bool(node.args[6]))
    groups = int(_groups(node, name))
    reason = walk.reason
    walk.freeze_all(value, range(channel + 1, len(value.shape)))
    walk.reason = TAPS
    walk.freeze_all(weight, range(2, len(weight.shape)))
    walk.reason = reason
    made = _grouped(walk, value, channel, weight, groups, transposed, shape_of(node)[channel])
    pixels = value.shape if transposed else shape_of(node)
    _note_convolution(walk, weight, math.prod(pixels[:channel]) * math.prod(pixels[channel + 1 :]))
    out = Value(shape_of(node), {a: f for a, f in value.fields.items() if a < channel}, made.sources)
    out.fields[channel] = made.on(0)
    return _with_channel_parameters(walk, out, _given(walk, argument(node, 2, "bias")), channel)


def _note_convolution(walk: Walk, weight: Value, pixels: int) -> None:
    """Every entry of the kernel is used once for each pixel."""
    times = pixels * math.prod(weight.shape[2:])
    if walk.owner(weight):
        walk.term(times, walk.owner(weight), (0, 1), [])
    else:
        plain = math.prod(n for axis, n in enumerate(weight.shape[:2]) if not weight.on(axis))
        walk.term(times * plain, "", (), [weight.on(axis) for axis in (0, 1) if weight.on(axis)])


TAPS = "a tap of a kernel"
"""Taps are no channels, and what must stay for this reason is not listed."""


def _groups(node: Node, name: str) -> Any:
    if name == "convolution":
        return node.args[8]
    return argument(node, 6, "groups", 1)


def _grouped(
    walk: Walk, value: Value, channel: int, weight: Value, groups: int, transposed: bool, outputs: int
) -> Value:
    """The labels of the output channels, as a value of one axis."""
    inputs = value.shape[channel]
    origin = sources([value, weight])
    if groups == 1:
        x = Value((inputs,), {0: value.on(channel)}, value.sources)
        w = Value(weight.shape[:2], {a: weight.on(a) for a in (0, 1)}, weight.sources)
        return contract(walk, [(x, "i"), (w, "io" if transposed else "oi")], "o", (outputs,), counted=False)
    x = _split(walk, value.on(channel), groups, inputs, value.sources)
    rows = _split(walk, weight.on(0), groups, weight.shape[0], weight.sources)
    side = {2: weight.on(1)}
    w = Value((*rows.shape, weight.shape[1]), {**rows.fields, **side}, weight.sources)
    product = contract(
        walk,
        [(x, "gi"), (w, "gio" if transposed else "goi")],
        "go",
        (groups, outputs // groups),
        counted=False,
    )
    fields = [np.repeat(f, outputs // groups) for f in product.on(0)] + [
        np.tile(f, groups) for f in product.on(1)
    ]
    return Value((outputs,), {0: fields}, origin)


def _split(walk: Walk, fields: list[Ints], groups: int, size: int, origin: frozenset[str] | None) -> Value:
    rows, columns = walk.split(fields, (groups, size // groups))
    return Value((groups, size // groups), {0: rows, 1: columns}, origin)


@rule("embedding")
def embedding(walk: Walk, node: Node) -> Result:
    """Rows are picked by number; columns are what is written."""
    weight, shape = walk.value(node.args[0]), shape_of(node)
    walk.freeze_all(weight, (0,))
    walk.freeze_all(walk.value(node.args[1]))
    walk.role(weight, weight.on(1), "writer")
    return Value(shape, {len(shape) - 1: weight.on(1)}, sources(walk.operands(node)))


@rule("scaled_dot_product_attention")
def attention(walk: Walk, node: Node) -> Result:
    """Scores of queries and keys, and a mixture of values."""
    query, key, value = (walk.value(n) for n in node.args[:3])
    if len({len(v.shape) for v in (query, key, value)}) > 1:
        return unknown(walk, node)
    batch = _letters(len(query.shape) - 2)
    if argument(node, 7, "enable_gqa", False):
        key, value = (_repeated(v, query.shape[-3]) for v in (key, value))
    if node.kwargs.get("scale") is None:
        reason, walk.reason = walk.reason, f"{walk.reason}: it scales by the head size"
        walk.freeze(query.on(-1) + key.on(-1))
        walk.reason = reason
    walk.freeze(key.on(-2) + value.on(-2))  # softmax
    shape = (*query.shape[:-1], key.shape[-2])
    scores = contract(walk, [(query, batch + "qe"), (key, batch + "ke")], batch + "qk", shape)
    scores = broadcast(walk, [scores, *_given(walk, argument(node, 3, "attn_mask"))], shape)
    return contract(walk, [(scores, batch + "qk"), (value, batch + "kv")], batch + "qv", shape_of(node))


def _repeated(value: Value, heads: int) -> Value:
    """Keys or values of grouped queries, one for each query head."""
    times = heads // value.shape[-3]
    axis = len(value.shape) - 3
    shape = (*value.shape[:-3], heads, *value.shape[-2:])
    fields = {**value.fields, axis: [np.repeat(f, times) for f in value.on(axis)]}
    return Value(shape, fields, value.sources)


# norms and other statistics


@rule("batch_norm", "instance_norm", "_native_batch_norm_legit")
def batch_norm(walk: Walk, node: Node) -> Result:
    """Each channel by itself; its parameters and statistics ride."""
    value = walk.value(node.args[0])
    own_statistics = bool(argument(node, 5, "training")) or node.args[3] is None
    others = {a: value.on(a) for a in range(len(value.shape)) if a != 1}
    if own_statistics and value.is_static:
        walk.statistic(node, others)  # a standardised weight: the mean is over its inputs
    elif own_statistics:
        walk.freeze_all(value, others)
    return _with_channel_parameters(walk, value, _given(walk, *node.args[1:5]))


@rule("layer_norm", "rms_norm")
def layer_norm(walk: Walk, node: Node) -> Result:
    """Parameters ride; the statistics are those of what is left."""
    value, over = walk.value(node.args[0]), len(argument(node, 1))
    axes = range(len(value.shape) - over, len(value.shape))
    walk.statistic(node, {a: value.on(a) for a in axes})
    return broadcast(walk, [value, *_given(walk, *node.args[2:4])], value.shape)


@rule("group_norm")
def group_norm(walk: Walk, node: Node) -> Result:
    """Whole groups, or one position of every group; the statistics are those of what is left."""
    value, groups = walk.value(node.args[0]), int(argument(node, 1))
    walk.freeze_all(value, range(2, len(value.shape)))
    out = _with_channel_parameters(walk, value, _given(walk, *node.args[2:4]))
    rows, columns = walk.split(out.on(1), (groups, value.shape[1] // groups))
    fields = [np.repeat(f, value.shape[1] // groups) for f in rows] + [np.tile(f, groups) for f in columns]
    walk.statistic(node, {1: fields})
    return Value(out.shape, {0: value.on(0), 1: fields}, out.sources)


@rule(
    "mean",
    "sum",
    "amax",
    "amin",
    "std",
    "var",
    "linalg_vector_norm",
    "norm",
    "argmax",
    "argmin",
    "logsumexp",
    "prod",
)
def reduction(walk: Walk, node: Node) -> Result:
    """A labelled axis that is reduced must stay, but for the mean square of a norm that is written by hand."""
    value = walk.value(node.args[0])
    place = {"linalg_vector_norm": 2, "norm": 2}.get(operation(node), 1)
    dims = argument(node, place, "dim")
    axes = [dims] if isinstance(dims, int) else list(dims or range(len(value.shape)))
    axes = [a % len(value.shape) for a in axes if isinstance(a, int)] if value.shape else []
    if _is_mean_square(node):
        walk.statistic(node, {a: value.on(a) for a in axes})
    else:
        walk.freeze_all(value, axes)
    made = node.meta["val"]
    if not isinstance(made, Tensor):
        return unknown(walk, node)
    return _reduced(value, axes, tuple(made.shape))


def _is_mean_square(node: Node) -> bool:
    """``rsqrt(mean(x ** 2) + eps)``, the norm of Llama and T5."""
    squared = node.args[0]
    if operation(node) != "mean" or not isinstance(squared, Node):
        return False
    is_square = operation(squared) == "square" or (operation(squared) == "pow" and squared.args[1:] == (2,))
    users = {user for each in node.users for user in (each, *each.users)}
    return is_square and any(operation(user) == "rsqrt" for user in users)


def _reduced(value: Value, axes: Sequence[int], shape: tuple[int, ...]) -> Value:
    kept = [a for a in range(len(value.shape)) if a not in axes]
    if len(shape) == len(value.shape):
        return Value(shape, {a: value.on(a) for a in kept if value.on(a)}, value.sources)
    return Value(shape, {new: value.on(a) for new, a in enumerate(kept) if value.on(a)}, value.sources)


@rule("softmax", "log_softmax", "cumsum", "_softmax", "_log_softmax", "cumprod")
def along(walk: Walk, node: Node) -> Result:
    """Each entry depends on all others of the axis, so these must stay."""
    value = walk.value(node.args[0])
    walk.freeze_all(value, (int(argument(node, 1)),))
    return Value(value.shape, value.fields, value.sources)


@rule("glu")
def glu(walk: Walk, node: Node) -> Result:
    """One half gates the other."""
    value = walk.value(node.args[0])
    axis = int(argument(node, 1, "dim", -1)) % len(value.shape)
    shape = shape_of(node)
    rows, columns = walk.split(value.on(axis), (2, shape[axis]))
    walk.freeze(rows)
    return Value(shape, {**value.fields, axis: columns}, value.sources)


_SPATIAL = [
    "max_pool",
    "avg_pool",
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "lp_pool",
    "fractional_max_pool",
    "upsample_nearest",
    "upsample_bilinear",
    "upsample_bicubic",
    "upsample_linear",
    "upsample_trilinear",
]


@rule(
    *(
        f"{name}{n}d"
        for name in (*_SPATIAL, "_upsample_nearest_exact", "_upsample_bilinear_aa")
        for n in (1, 2, 3)
    )
)
def spatial(walk: Walk, node: Node) -> Result:
    """Each channel by itself; pixels must stay."""
    value, shape = walk.value(node.args[0]), node.meta["val"]
    if not isinstance(shape, Tensor):
        return unknown(walk, node)
    dims = int(re.findall(r"(\d)d", operation(node))[0])
    first = len(value.shape) - dims
    walk.freeze_all(value, range(first, len(value.shape)))
    return Value(shape_of(node), {a: f for a, f in value.fields.items() if a < first}, value.sources)


@rule(
    "_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size", "sym_size"
)
def nothing(walk: Walk, node: Node) -> Result:
    """A check without a result."""
    return Value(())


@rule(
    *[
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "rand_like",
        "randn_like",
    ]
)
def fresh(walk: Walk, node: Node) -> Result:
    """Takes a shape and no values; what it makes carries no labels."""
    return Value(shape_of(node), {}, frozenset())


@rule("wrap_with_set_grad_enabled", "wrap_with_autocast")
def block(walk: Walk, node: Node) -> Result:
    """A part of the graph under a switch."""
    place = next(i for i, a in enumerate(node.args) if isinstance(a, Node) and a.op == "get_attr")
    return walk.inside(node, argument(node, place), node.args[place + 1 :])
