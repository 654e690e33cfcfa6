"""Does a network that a task makes of its base run at all? Found out from shapes, before it is built.

A table of a stranger may cut a layer and not the one that reads it. Nothing but the base's code knows who reads whom,
so that code runs once, on zeros of the shapes that the file says it was traced with. The layers that take the time
(convolutions, linear layers, norms, attention) check their shapes and compute nothing. It takes some milliseconds, and
unlike PyTorch's meta tensors no second to import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from spalier.errors import TaskFileError

MAX_NUMEL = 1 << 28
"""How many numbers any tensor of a dry run may have."""
MAX_INPUT = 1 << 24
"""How many numbers all inputs may have."""
_NAMES = "float16 bfloat16 float32 float64 complex64 complex128 bool uint8 int8 int16 int32 int64"
_DTYPES = {name: getattr(torch, name) for name in _NAMES.split()}


# inputs as a file has them


def described_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call as plain data, tensors by dtype and shape; empty where a file cannot say that."""
    try:
        found: dict[str, Any] = {"args": [_described(value) for value in args]}
        found |= {"kwargs": {key: _described(value) for key, value in kwargs.items()}}
        inputs_of(found)  # of zeros that take no memory
        return found
    except (TypeError, TaskFileError):
        return {}


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_described(inner) for inner in value]]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return ["dict", {key: _described(inner) for key, inner in value.items()}]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"a {type(value).__name__} is no input that a file can state")


def inputs_of(described: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that `described_inputs` described, of zeros; anything else is an error."""
    args, kwargs = described.get("args"), described.get("kwargs")
    if set(described) != {"args", "kwargs"} or not isinstance(args, list) or not isinstance(kwargs, dict):
        raise _wrong("args and kwargs")
    left = [MAX_INPUT]
    return [_made(value, left) for value in args], {key: _made(value, left) for key, value in kwargs.items()}


def _made(value: Any, left: list[int]) -> Any:
    match value:
        case ["tensor", str(name), list(shape)] if name in _DTYPES:
            if not all(type(n) is int and 0 <= n <= MAX_INPUT for n in shape) or len(shape) > 16:
                raise _wrong("tensors with a shape")
            left[0] -= math.prod(shape)
            if left[0] < 0:
                raise _wrong(f"at most {MAX_INPUT:,} numbers")
            return zeros(shape, _DTYPES[name])
        case ["list" | "tuple" as kind, list(several)]:
            made = [_made(inner, left) for inner in several]
            return made if kind == "list" else tuple(made)
        case ["dict", dict(several)]:
            return {key: _made(inner, left) for key, inner in several.items()}
        case None | bool() | int() | float() | str():
            return value
    raise _wrong("tensors, lists, dicts and plain values")


def _wrong(expected: str) -> TaskFileError:
    return TaskFileError("metadata", f"the description's inputs are not what they have to be: expected {expected}")


# running


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written to."""
    if math.prod(shape) > MAX_NUMEL:
        raise ValueError(f"a tensor of {math.prod(shape):,} numbers, expected at most {MAX_NUMEL:,}")
    kind = _NUMPY.get(dtype)
    return torch.zeros(tuple(shape), dtype=dtype) if kind is None else torch.from_numpy(np.zeros(tuple(shape), kind))


_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16, torch.int64: np.int64}


def output_shapes(net: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The shapes of what a network returns; whatever its code raises where it does not run."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _ShapesOnly():
        found = net(*args, **kwargs)
    return [tuple(value.shape) for value in tree_leaves(found) if isinstance(value, Tensor)]


class _ShapesOnly(TorchFunctionMode):
    """What takes long says only which shape it gives; all else runs, on zeros."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(func)
        if rule is not None and args and isinstance(args[0], Tensor) and args[0].device.type == "cpu":
            shape = rule(*args, **(kwargs or {}))
            if shape == args[0].shape and args[0].is_contiguous():
                return args[0]  # fresh memory is half of what a dry run costs
            if shape is not None:
                return zeros(shape, args[0].dtype)
        return func(*args, **(kwargs or {}))


def _fits(holds: bool, what: str, *shapes: Any) -> None:
    if not holds:
        raise ValueError(f"{what} does not fit {', '.join(str(tuple(s)) for s in shapes)}")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Sequence[int]:
    _fits(x.shape[-1:] == weight.shape[1:], "a linear layer", x.shape, weight.shape)
    _fits(bias is None or bias.shape == weight.shape[:1], "a bias", weight.shape)
    return (*x.shape[:-1], weight.shape[0])


def _convolution(
    x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Sequence[int] | None:
    if x.dim() != weight.dim() or isinstance(padding, str):
        return None  # without a batch, say: PyTorch knows
    outputs = weight.shape[0]
    _fits(x.shape[1] == weight.shape[1] * groups and outputs % groups == 0, "a convolution", x.shape, weight.shape)
    _fits(bias is None or bias.shape == (outputs,), "a bias", weight.shape)
    count = weight.dim() - 2
    steps = [(n,) * count if isinstance(n, int) else tuple(n) for n in (stride, padding, dilation)]
    if any(len(step) != count for step in steps):
        return None
    sizes = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(x.shape[2:], weight.shape[2:], *steps, strict=True)
    ]
    _fits(all(n > 0 for n in sizes), "a kernel", x.shape, weight.shape)
    return (len(x), outputs, *sizes)


def _batch_norm(x: Tensor, *args: Any, **kwargs: Any) -> Sequence[int]:
    for held in (*args[:4], *kwargs.values()):
        _fits(not isinstance(held, Tensor) or held.shape == x.shape[1:2], "a norm", x.shape)
    return x.shape


def _layer_norm(x: Tensor, normalized_shape: Any, *args: Any, **kwargs: Any) -> Sequence[int]:
    shape = tuple(normalized_shape)
    _fits(tuple(x.shape[-len(shape) :]) == shape, "a norm", x.shape, shape)
    for held in (*args[:2], *kwargs.values()):
        _fits(not isinstance(held, Tensor) or tuple(held.shape) == shape, "a norm", shape)
    return x.shape


def _attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Sequence[int] | None:
    is_plain = q.dim() == k.dim() == v.dim() and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    if not is_plain or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        return None
    return (*q.shape[:-1], v.shape[-1])


def _product(x: Tensor, other: Tensor) -> Sequence[int] | None:
    if not isinstance(other, Tensor) or x.dim() != other.dim() or x.dim() < 3 or x.shape[:-2] != other.shape[:-2]:
        return None
    _fits(x.shape[-1] == other.shape[-2], "a product", x.shape, other.shape)
    return (*x.shape[:-1], other.shape[-1])


def _pairwise(x: Tensor, other: Any, **kwargs: Any) -> Sequence[int] | None:
    if kwargs or not isinstance(other, Tensor) or other.dtype != x.dtype:
        return None
    return x.shape if x.shape == other.shape else tuple(torch.broadcast_shapes(x.shape, other.shape))


_RULES: dict[Any, Callable[..., Sequence[int] | None]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d), _convolution),
    F.batch_norm: _batch_norm,
    F.layer_norm: _layer_norm,
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__), _product),
    **dict.fromkeys((torch.add, torch.mul, Tensor.add, Tensor.mul, Tensor.__add__, Tensor.__mul__), _pairwise),
    **dict.fromkeys(
        (F.relu, F.gelu, F.silu, F.softmax, F.dropout, torch.relu, Tensor.relu), lambda x, *args, **kwargs: x.shape
    ),
}
