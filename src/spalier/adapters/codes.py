"""Few bits for each number: rounding to a few levels, learned straight through, and the bytes that hold the codes.

A matrix is coded as ``scale * code``: small whole numbers, and one scale for each row or for all of it. With two levels
a code is -1 or 1, with an odd number L of levels one of ``-(L-1)/2 ... (L-1)/2``. As many codes share a byte as L-ary
digits fit into it: 8 signs, 5 of three levels, 2 of seven or fifteen, 1 of 255.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spalier.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
LEVELS = {1: 2, 2: 3, 3: 7, 4: 15, 8: 255}
"""How many levels a code of so many bits has: with a zero, so that what was not learned costs no error."""


def levels_of(bits: object, known: tuple[int, ...] = tuple(LEVELS)) -> int:
    """The levels of so many bits.

    >>> levels_of(2)
    3
    """
    if type(bits) is not int or bits not in known:
        raise ConfigError(f"bits is {bits!r}, expected {', '.join(map(str, known[:-1]))} or {known[-1]}")
    return LEVELS[bits]


def top(levels: int) -> int:
    """The largest code.

    >>> [top(levels) for levels in LEVELS.values()]
    [1, 1, 3, 7, 127]
    """
    return max(1, (levels - 1) // 2)


def codes_of(values: Tensor, scale: Tensor, levels: int) -> Tensor:
    """The whole numbers, in the values' dtype, that come nearest to values in units of a scale."""
    if levels == 2:
        return torch.where(values < 0, -1.0, 1.0).to(values.dtype)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)
    return torch.where(scale == 0, torch.zeros_like(values), (values / safe).round().clamp(-top(levels), top(levels)))


class _Rounded(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, scale: Tensor, levels: int) -> Tensor:
        return codes_of(values, scale, levels)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, scale, ctx.levels = inputs
        ctx.save_for_backward(values, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        values, scale = ctx.saved_tensors
        # straight through; but what lies beyond the outermost level may only come back
        inside = values.abs() <= (top(ctx.levels) + 0.5) * scale
        safe = torch.where(scale == 0, torch.ones_like(scale), scale)
        passed = torch.where(inside | (values * grad > 0), grad / safe, torch.zeros_like(grad))
        return torch.where(scale == 0, torch.zeros_like(grad), passed), None, None


def rounded(values: Tensor, scale: Tensor, levels: int) -> Tensor:
    """The codes of values; their gradient is that of ``values / scale``, as if nothing had been rounded.

    >>> values = torch.tensor([-0.9, 0.2, 0.6], requires_grad=True)
    >>> codes = rounded(values, torch.tensor(0.5), 3)
    >>> codes.sum().backward()
    >>> codes.tolist(), values.grad.tolist()
    ([-1.0, 0.0, 1.0], [0.0, 2.0, 2.0])
    """
    out: Tensor = _Rounded.apply(values, scale, levels)  # type: ignore[no-untyped-call]
    return out


# codes in bytes


@cache
def per_byte(levels: int) -> int:
    """How many codes share a byte.

    >>> [per_byte(levels) for levels in (2, 3, 7, 15, 255)]
    [8, 5, 2, 2, 1]
    """
    count = 1
    while levels ** (count + 1) <= 256:
        count += 1
    return count


def packed_size(count: int, levels: int) -> int:
    """How many bytes so many codes take."""
    return -(-count // per_byte(levels))


def pack(codes: Any, levels: int) -> Bytes:
    """Codes as bytes: the first of those that share a byte is its lowest digit.

    >>> pack(np.array([1, 0, -1]), 3).tolist()
    [5]
    """
    flat = np.asarray(codes).ravel()
    if levels == 2:
        return np.packbits(flat > 0, bitorder="little")
    each = per_byte(levels)
    digits = np.zeros(packed_size(len(flat), levels) * each, np.uint8)
    digits[: len(flat)] = flat.astype(np.int16) + top(levels)
    packed = digits[::each].copy()
    for place in range(1, each):
        packed += digits[place::each] * np.uint8(levels**place)  # a byte holds the sum of all
    return packed


def unpack(data: Bytes, count: int, levels: int, dtype: Any = np.float32, memory: Any = None) -> Any:
    """The first ``count`` codes in these bytes, as an array of that dtype, in memory that is given or fresh.

    >>> unpack(np.array([5], np.uint8), 3, 3).tolist()
    [1.0, 0.0, -1.0]
    """
    table = _table(levels, np.dtype(dtype).str)
    out = None if memory is None else memory[: table.shape[1] * len(data)].reshape(len(data), table.shape[1])
    return table.take(data, 0, out, "clip").ravel()[:count]


@cache
def _table(levels: int, dtype: str) -> Any:
    """For each byte, the codes in it."""
    digits = np.arange(256)[:, None] // levels ** np.arange(per_byte(levels)) % levels
    return (2 * digits - 1 if levels == 2 else digits - top(levels)).astype(dtype)


def are_codes(data: Bytes, count: int, levels: int) -> bool:
    """Whether these bytes are what `pack` makes of so many codes: no digit too large, zeros behind the last."""
    each = per_byte(levels)
    if len(data) != packed_size(count, levels):
        return False
    if not count:
        return True
    if levels**each < 256 and int(data.max()) >= levels**each:
        return False
    last = count - (len(data) - 1) * each  # codes in the last byte
    return bool(int(data[-1]) < levels**last)


# scales


_CLIPPINGS = {2: (1.0,), 3: (0.6, 0.8, 1.0, 1.2, 1.4, 1.7), 7: (0.35, 0.45, 0.55, 0.65, 0.8, 1.0)}
_FINER = (0.25, 0.32, 0.4, 0.5, 0.6, 0.75, 1.0)


@torch.no_grad()
def best_scales(
    matrix: Tensor, levels: int, metric: Tensor | None = None, *, by_row: bool = True, free: bool = True
) -> tuple[Tensor, Tensor]:
    """The step to round by, and the scale to multiply codes with, that leave the least error of a few that are tried.

    Args:
        matrix: (rows, length).
        levels: of the codes.
        metric: (length, length); errors are ``e metric e^T``, or plain squares.
        by_row: whether each row has a scale of its own, or all have one.
        free: whether the scale may differ from the step; the best one is then known in closed form.
    """
    if matrix.dtype.itemsize < 4:  # half precision has no room for sums of squares
        step, scale = best_scales(matrix.float(), levels, metric, by_row=by_row, free=free)
        return step.to(matrix.dtype), scale.to(matrix.dtype)
    found: tuple[Tensor, Tensor, Tensor] | None = None
    for step in _steps(matrix, levels, by_row=by_row):
        codes = codes_of(matrix, step[:, None], levels)
        scale, saved = scale_of(codes, matrix, metric, by_row=by_row, given=None if free else step)
        if found is None:
            found = step, scale, saved
        else:
            better = saved > found[2]
            found = tuple(torch.where(better, a, b) for a, b in zip((step, scale, saved), found, strict=True))  # type: ignore[assignment]
    assert found is not None
    return found[0], found[1]


def scale_of(
    codes: Tensor, matrix: Tensor, metric: Tensor | None, *, by_row: bool, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What codes are best multiplied with, and how much of each row's square (or of all) that takes away."""
    seen = codes if metric is None else codes @ metric
    cross, power = (seen * matrix).sum(1), (seen * codes).sum(1)
    if not by_row:
        cross, power = cross.sum(0, keepdim=True), power.sum(0, keepdim=True)
    scale = (cross / power.clamp(min=1e-30)).clamp(min=0) if given is None else given
    return scale, 2 * scale * cross - scale**2 * power


def _steps(matrix: Tensor, levels: int, *, by_row: bool) -> list[Tensor]:
    """The distances of neighbouring levels to try, by the size of a typical number."""
    if not by_row:
        matrix = matrix.reshape(1, -1)
    size = matrix.abs().mean(1) if levels == 2 else matrix.square().mean(1).sqrt()
    largest = matrix.abs().amax(1)
    if levels > 31:
        return [largest / top(levels)]
    tried = [largest / top(levels)] if levels > 3 else []
    return [*tried, *(size * clip for clip in _CLIPPINGS.get(levels, _FINER))]
