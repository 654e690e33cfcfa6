"""The numbers of a task as a file has them: adapters' matrices behind one another, codes packed and deflated, scales,
and a task's own values in a byte each.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spalier.adapters.codes import codes_of, pack
from spalier.adapters.kinds import Stored
from spalier.errors import TaskFileError
from spalier.tasks.format import inflate, largest, quoted
from spalier.tasks.rows import Matrix

MAX_RATIO = 16
"""How many times longer deflated codes may become, so that a small file cannot take much memory."""
BYTE_LEVELS = 255
"""Of codes that have a byte each, as ``int8`` stores them."""


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
        "adapters": _joined(numbers),
        "codes": torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *packed])),
        "scales": _joined(scales),
    }


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """In the widest dtype that there is."""
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


def values_in_bytes(values: Tensor, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A task's own values as 8-bit integers, and a scale for each vector or row: its largest number.

    Where all numbers of a row are positive and most are small, as running variances are, their roots are what is
    stored, and the scale is negative.
    """
    parts: list[Tensor] = [torch.empty(0, dtype=torch.int8, device="cpu")]
    scales: list[Tensor] = [torch.empty(0, device="cpu")]
    for part, (rows, length) in zip(
        values.float().split([r * n for r, n in _rows(shapes)]), _rows(shapes), strict=True
    ):
        row = part.view(rows, length)
        most = row.abs().amax(1)
        are_roots = (row.amin(1) >= 0) & (row.mean(1) < most / 3)
        wide = torch.where(are_roots, most.sqrt(), most)
        shown = torch.where(are_roots[:, None], row.abs().sqrt(), row)
        codes = (shown * (127 / wide.clamp(min=1e-38))[:, None]).round()
        parts.append(codes.clamp(-127, 127).to(torch.int8).flatten())
        scales.append(torch.where(are_roots, -wide, wide))
    joined = torch.cat(scales)
    made = joined.to(dtype)
    return torch.cat(parts), made if math.isfinite(largest(made)) else joined


def values_of_bytes(codes: Tensor, scales: Tensor, shapes: Sequence[tuple[int, ...]]) -> Tensor:
    """The numbers that `values_in_bytes` stored."""
    wide = scales.float()
    lengths = torch.tensor([length for rows, length in _rows(shapes) for _ in range(rows)], dtype=torch.int64)
    numbers = codes.float().div_(127).mul_(wide.abs().repeat_interleave(lengths))
    start = 0
    for is_root, length in zip((wide < 0).tolist(), lengths.tolist(), strict=True):
        if is_root:
            numbers[start : start + length].square_()
        start += length
    return numbers


def rows_of_values(shapes: Sequence[tuple[int, ...]]) -> int:
    """How many scales values of these shapes have."""
    return sum(rows for rows, _ in _rows(shapes))


def _rows(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
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


def cast_scales(scales: Tensor, dtype: torch.dtype, shapes: Iterable[Matrix]) -> Tensor:
    """Scales in a dtype; in 32 bits where half precision would move codes by more than a quarter of a step.

    Half precision has few digits for small numbers, and the scales of 8-bit integers are small. The fewer levels codes
    have, the less that matters. Scales that are next to nothing beside the others do not.
    """
    made = cast(scales, dtype, "scales of codes")
    if dtype != torch.float16 or not scales.numel():
        return made
    allowed = torch.cat([torch.full((shape.scales,), 0.25 / (shape.levels or 1)) for shape in shapes])
    allowed = (allowed * scales.abs()).clamp(min=1e-4 * largest(scales) * float(allowed.min()))
    is_close = bool(((made.float() - scales.float()).abs() <= allowed).all())
    return made if is_close else cast(scales, torch.float32, "scales of codes")


def deflated(codes: Tensor) -> tuple[Tensor, int]:
    """Codes as a file has them, and how long they were before; 0 where deflating does not make them shorter."""
    raw = codes.numpy().tobytes()
    tried = [raw]
    for strategy in (zlib.Z_HUFFMAN_ONLY, zlib.Z_DEFAULT_STRATEGY):  # the second finds what repeats, as zeros do
        deflater = zlib.compressobj(9, zlib.DEFLATED, 15, 9, strategy)
        made = deflater.compress(raw) + deflater.flush()
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


def bytes_of_version_1(numbers: Tensor) -> Tensor:
    """8-bit integers as codes of 255 levels: one in a byte, so whatever matrices they are of."""
    return torch.from_numpy(pack(numbers.numpy(), BYTE_LEVELS))


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
