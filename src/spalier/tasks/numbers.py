"""The numbers of a task as a file has them: adapters' matrices behind one another, codes packed and deflated, scales,
and a task's own values in a byte each.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spalier.adapters.codes import Bytes, are_codes, codes_of, pack, packed_size, top, unpack
from spalier.adapters.kinds import Stored
from spalier.errors import TaskFileError
from spalier.tasks.format import deflate, inflate, largest, quoted
from spalier.tasks.rows import Matrix

MAX_RATIO = 16
"""How many times longer deflated codes may become, so that a small file cannot take much memory."""
SMALL = ("int8-all", "int4-head")
"""Storages in which values have a byte each, or less."""
BYTE_LEVELS, HEAD_LEVELS = 255, 15
"""Of codes that have a byte each, as ``int8`` stores them, and of heads with two in a byte."""


Shapes = Sequence[tuple[int, ...]]


def assembled(stored: Iterable[Stored]) -> dict[str, Any]:
    """Matrices as a task holds them: numbers, packed codes, and scales."""
    numbers: list[Tensor] = []
    scales: list[Tensor] = []
    codes: list[tuple[int, Any]] = []
    for values, scale, levels in stored:
        if scale is None:
            numbers.append(values.flatten().cpu())
        else:
            codes.append((levels, pack(values.cpu().float().numpy(), levels)))
            scales.append(scale.cpu())
    packed = [data for _, data in sorted(codes, key=lambda pair: pair[0])]  # which keeps the table's order
    return {
        "adapters": joined(numbers),
        "codes": torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *packed])),
        "scales": joined(scales),
    }


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One behind the other, in the widest dtype that there is."""
    return torch.cat(list(parts)) if parts else torch.empty(0, device="cpu")


def in_bytes(matrix: Stored) -> Stored:
    """Numbers as 8-bit integers with a scale for each row: the largest of a row is 127 of its scales."""
    if matrix.levels:
        return matrix
    scale = matrix.values.float().abs().amax(1) / 127
    return Stored(codes_of(matrix.values.float(), scale[:, None], BYTE_LEVELS), scale, BYTE_LEVELS)


def as_numbers(matrix: Stored) -> Stored:
    """The numbers that 8-bit integers stand for."""
    if matrix.scale is None or matrix.levels != BYTE_LEVELS:
        return matrix
    wide = matrix.scale if matrix.scale.dtype == torch.float64 else matrix.scale.float()
    return Stored(matrix.values * wide[:, None])


def values_in_bytes(values: Tensor, shapes: Shapes, levels: Sequence[int] = ()) -> Tensor:
    """A task's own values as 8-bit integers, behind a byte for the scale of each vector or row.

    Where all numbers of a row are positive and most or some are small, as running variances are, their roots are what
    is stored, and the scale's highest bit is set: a small variance that became zero would make its channel explode.
    With ``levels`` for each shape, integers of fewer than 255 are packed.
    """
    codes: list[Tensor] = []
    found: list[Tensor] = []
    sizes, levels = _rows(shapes), levels or [BYTE_LEVELS] * len(shapes)
    parts = values.float().split([r * n for r, n in sizes])
    for part, (rows, length), each in zip(parts, sizes, levels, strict=True):
        row = part.view(rows, length)
        most = row.abs().amax(1)
        are_roots = (row.amin(1) >= 0) & ((row.mean(1) < most / 3) | (row.amin(1) < most / 16)) & (each == BYTE_LEVELS)
        codes.append(torch.where(are_roots[:, None], row.abs().sqrt(), row))
        found.append(torch.where(are_roots, -codes[-1].amax(1), most))
    if not found:
        return torch.empty(0, dtype=torch.int8, device="cpu")
    joined = torch.cat(found)
    # the smallest scale that rounds no number to more than the largest integer
    tops = torch.repeat_interleave(torch.tensor([top(n) for n in levels]), torch.tensor([rows for rows, _ in sizes]))
    marks = _steps_below(joined.abs().double() * (tops / (tops + 0.5)), _VALUES, torch.ceil)
    wide = torch.from_numpy(_scales_of(marks.numpy(), _VALUES))
    stored = [marks.view(torch.int8)]
    marks[2:] |= (joined < 0).to(torch.uint8) << 7
    ends = [rows for rows, _ in sizes]
    for part, scale, are_roots, each, shape in zip(
        codes, wide.split(ends), (joined < 0).split(ends), levels, shapes, strict=True
    ):
        shown = (part * (top(each) / scale.clamp(min=1e-36))[:, None]).round().clamp(-top(each), top(each))
        shown += are_roots[:, None] & (part > 0) & (shown == 0)  # a variance next to nothing is still none of zero
        if len(shape) > 1 and bool(part.any()) and float(shown.abs().max()) < top(each) / 2:
            raise TaskFileError(
                "storage",
                f"a matrix whose numbers are {largest(part):.4g} at most is lost beside norms of {largest(values):.4g} "
                "where all share their scales; choose 'int8' or 'bf16'",
            )
        is_byte = each == BYTE_LEVELS
        stored.append(
            shown.to(torch.int8).flatten() if is_byte else torch.from_numpy(pack(shown, each)).view(torch.int8)
        )
    return torch.cat(stored)


def values_of_bytes(data: Tensor, shapes: Shapes, levels: Sequence[int] = ()) -> Tensor:
    """The numbers that `values_in_bytes` stored."""
    front, count = bytes_of_values(shapes, levels)
    if data.numel() != front + count:
        raise TaskFileError("sizes", f"values has {data.numel():,} bytes, the table says {front + count:,}")
    if not front:
        return torch.empty(0, device="cpu")
    marks, codes = data.numpy()[:front].view(np.uint8), data.numpy()[front:]
    rows, each = zip(*_rows(shapes), strict=True)
    lengths = np.repeat(each, rows)
    tops: Any = np.float32(127)
    if levels:
        codes = _unpacked(codes, shapes, levels)
        tops = np.repeat(np.repeat(np.array([top(n) for n in levels], np.float32), rows), lengths)
    if codes.min() == -128:
        raise TaskFileError("codes", "values hold the integer -128, expected -127 to 127")
    numbers = codes.astype(np.float32)
    numbers /= tops
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found afterwards
        numbers *= np.repeat(_scales_of(marks, _VALUES), lengths)
        np.square(numbers, out=numbers, where=np.repeat(marks[2:] > 127, lengths))
    return torch.from_numpy(numbers)


def _unpacked(data: Any, shapes: Shapes, levels: Sequence[int]) -> Any:
    """Integers that have a byte each, whether they were packed or not."""
    found: list[Any] = []
    for shape, each in zip(shapes, levels, strict=True):
        size = packed_size(math.prod(shape), each)
        part, data = data[:size], data[size:]
        if each != BYTE_LEVELS:
            if not are_codes(part.view(np.uint8), math.prod(shape), each):
                raise TaskFileError("codes", f"values of {each} levels hold digits that these do not have")
            part = unpack(part.view(np.uint8), math.prod(shape), each, np.int8)
        found.append(part)
    return np.concatenate(found)


# scales in a byte: how many steps of an octave they lie below the largest, whose own steps are in front


_VALUES, _CODES = (8, 127), (24, 255)
"""How many steps an octave has, and the largest byte: those of values have a bit for something else."""


def _steps_below(scales: Tensor, grid: tuple[int, int], rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """Scales as bytes: 0 for 0, and from 1 on how many steps below the largest, which is in the first two bytes."""
    each, most = grid
    steps = rounding(scales.double().clamp(min=1e-300).log2() * each)
    highest = steps.max().clamp(-(2**15), 128 * each - 1) if bool((scales > 0).any()) else steps.new_zeros(())
    below = (highest - steps).clamp(0, most - 1) + 1
    front = highest.to(torch.int16).view(1).view(torch.uint8)
    return torch.cat([front, below.where(scales > 0, torch.zeros_like(below)).to(torch.uint8)])


def _scales_of(data: Bytes, grid: tuple[int, int]) -> Any:
    """The scales that bytes stand for, as an array; of values' bytes the highest bit means something else."""
    (highest,), below = np.frombuffer(data[:2].tobytes(), "<i2"), data[2:] & grid[1]
    with np.errstate(over="ignore"):
        scales = np.exp2((int(highest) + 1 - below.astype(np.float64)) / grid[0]).astype(np.float32)
    return np.where(below == 0, np.float32(0), scales)


def scales_in_bytes(scales: Tensor) -> Tensor:
    """Scales of codes in a byte each, to 1.5% of what they are."""
    return _steps_below(scales, _CODES, torch.round)


def scales_of_bytes(data: Tensor) -> Tensor:
    """The scales that `scales_in_bytes` stored."""
    if data.numel() < 3:
        raise TaskFileError("sizes", f"scales has {data.numel()} bytes, expected two, and one for each")
    return torch.from_numpy(_scales_of(data.numpy(), _CODES))


def bytes_of_values(shapes: Shapes, levels: Sequence[int] = ()) -> tuple[int, int]:
    """How many bytes the scales of values of these shapes have, and their numbers."""
    rows = sum(rows for rows, _ in _rows(shapes))
    sizes = map(packed_size, map(math.prod, shapes), levels or [BYTE_LEVELS] * len(shapes))
    return rows + 2 if rows else 0, sum(sizes)


def _rows(shapes: Shapes) -> list[tuple[int, int]]:
    """Rows and their lengths: a vector is one row. What is empty has none."""
    found = [(shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape)) for shape in shapes]
    return [(rows, length) if length else (0, 0) for rows, length in found]


def cast(values: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """Numbers in a dtype that holds all of them."""
    made = values.to(dtype)
    if not math.isfinite(largest(made)):
        name = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, "fp32")
        raise TaskFileError(
            "storage", f"{what} hold {largest(values):.4g}, beyond what {name} can store; choose 'fp32' or 'bf16'"
        )
    return made


def cast_scales(scales: Tensor, dtype: torch.dtype, shapes: Sequence[Matrix], storage: str) -> Tensor:
    """Scales in a dtype, or as bytes can hold them; in 32 bits where that would move codes by too much.

    Half precision has few digits for small numbers, and the scales of 8-bit integers are small.
    """
    if storage in SMALL and scales.numel():
        made = scales_of_bytes(scales_in_bytes(scales))
        if _are_near(made, scales, shapes, _OFF if storage == "int4-head" else 0.0):
            return made
    made = cast(scales, dtype, "scales of codes")
    if dtype != torch.float16 or not scales.numel() or _are_near(made, scales, shapes):
        return made
    return cast(scales, torch.float32, "scales of codes")


_OFF = 0.015
"""The share by which scales of the smallest storage may be off, whatever their codes, which are only added."""


def _are_near(made: Tensor, scales: Tensor, shapes: Sequence[Matrix], least: float = 0.0) -> bool:
    """Whether codes move by a quarter of a step at most, or by the least share.

    The fewer levels codes have, the less their scales matter. Those that are next to nothing beside the others do not.
    """
    allowed = torch.cat([torch.full((shape.scales,), max(0.25 / (shape.levels or 1), least)) for shape in shapes])
    allowed = (allowed * scales.abs()).clamp(min=1e-4 * largest(scales) * float(allowed.min()))
    return bool(((made.float() - scales.float()).abs() <= allowed).all())


def deflated(codes: Tensor) -> tuple[Tensor, int]:
    """Codes as a file has them, and how long they were before; 0 where deflating does not make them shorter."""
    raw = codes.numpy().tobytes()
    tried = [raw]
    for strategy in (zlib.Z_HUFFMAN_ONLY, zlib.Z_DEFAULT_STRATEGY):  # the second finds what repeats, as zeros do
        made = deflate(raw, strategy, b"")
        # inflating takes as long as all the rest of loading, which a few bytes are not worth
        if len(made) < 0.95 * len(raw) - 32 and len(raw) <= MAX_RATIO * len(made):
            tried.append(made)
    best = min(tried, key=len)
    if best is raw:
        return codes, 0
    return torch.frombuffer(bytearray(best), dtype=torch.uint8), len(raw)


def inflated(codes: Tensor, length: object, expected: int) -> Tensor:
    """Codes that were deflated; the table tells how long they are before memory is taken for them."""
    if type(length) is not int or length != expected or not expected:
        raise TaskFileError("sizes", f"codes are said to have {quoted(length)} bytes, the table says {expected:,}")
    if expected > MAX_RATIO * codes.numel():
        raise TaskFileError("sizes", f"{codes.numel():,} bytes are to inflate to {expected:,}, over {MAX_RATIO} times")
    data = inflate("codes", "what codes hold", codes.numpy().tobytes(), expected)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def expanded(found: Any, count: int) -> tuple[int, ...]:
    """Integers from pairs of a number and how often it comes, as many as the table has places for."""
    pairs: list[Any] = found if isinstance(found, list) else [None]
    for pair in pairs:
        fits = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        if not fits or not -(2**63) <= pair[0] < 2**63 or not 0 < pair[1] <= count:
            raise TaskFileError("metadata", "the description's integers are no pairs of a number and its times")
    if sum(times for _, times in pairs) != count:
        raise TaskFileError("sizes", f"the description's integers are not the {count} that the table has")
    return tuple(number for number, times in pairs for _ in range(times))
