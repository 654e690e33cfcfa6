"""How numbers are stored: exactly, in half precision, or adapters as 8-bit integers with a scale for each row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from spalier.errors import ConfigError, TaskFileError

Storage = Literal["exact", "fp32", "fp16", "bf16", "int8"]
STORAGES: tuple[Storage, ...] = ("exact", "fp32", "fp16", "bf16", "int8")
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float16}

Rows = Sequence[tuple[int, int]]
"""Matrices that lie behind one another: how many rows each has, and how long these are."""


def check_storage(storage: object) -> None:
    """Refuse what is not one of the storages."""
    if storage not in STORAGES:
        raise ConfigError(f"storage is {storage!r}, expected one of {', '.join(map(repr, STORAGES))}")


def stored(values: Tensor, storage: Storage, what: str) -> Tensor:
    """Numbers as they are stored; with ``int8``, whatever is no adapter is stored in half precision."""
    if storage == "exact":
        return values
    cast = values.to(_DTYPES[storage])
    if not bool(torch.isfinite(cast).all()):
        largest = float(values.abs().max())
        raise TaskFileError(
            "storage", f"{what} hold {largest:.4g}, beyond what {storage} can store; choose 'fp32' or 'bf16'"
        )
    return cast


def quantised(values: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """8-bit integers and the scale of each row: the largest of a row is 127 of its scales."""
    codes, scales = [], []
    for matrix in matrices(values.float(), rows):
        scale = matrix.abs().amax(1) / 127
        safe = torch.where(scale == 0, 1.0, scale)
        codes.append((matrix / safe[:, None]).round().clamp(-127, 127).to(torch.int8).flatten())
        scales.append(scale)
    if not codes:
        return values.new_empty(0, dtype=torch.int8), values.new_empty(0, dtype=torch.float32)
    return torch.cat(codes), torch.cat(scales)


def restored(codes: Tensor, scales: Tensor, rows: Rows) -> Tensor:
    """The numbers that 8-bit integers and their scales stand for."""
    out, start = torch.empty(codes.numel(), dtype=torch.float32, device="cpu"), 0
    for codes_of, values in zip(matrices(codes, rows), matrices(out, rows), strict=True):
        torch.mul(codes_of, scales[start : start + len(codes_of), None], out=values)
        start += len(codes_of)
    return out


def matrices(flat: Tensor, rows: Iterable[tuple[int, int]]) -> Iterator[Tensor]:
    """The matrices that lie behind one another in a flat tensor, as views."""
    start = 0
    for count, length in rows:
        yield flat[start : start + count * length].view(count, length)
        start += count * length
