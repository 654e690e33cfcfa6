"""The safetensors container, parsed strictly: a length, a JSON header, and tensors that fill the rest exactly."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spalier.errors import TaskFileError
from spalier.tasks.files import opened, read_exactly
from spalier.tasks.text import dump, parse

KEY = "spalier.task"
"""The entry of the container's metadata that describes the task."""
MAX_HEADER = 1 << 20
MAX_BYTES = 1 << 32

DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
TENSORS: dict[str, frozenset[str]] = {
    "table": frozenset({"U8"}),
    "masks": frozenset({"U8"}),
    "adapters": _FLOATS | {"I8"},
    "scales": frozenset({"F32"}),
    "values": _FLOATS,
}
"""The tensors of a task file, all of one axis, and the dtypes that each may have."""
_FOREIGN = {
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"\x1f\x8b": "a gzip archive",
    b"GGUF": "a GGUF file",
    b"\x89HDF": "an HDF5 file",
    b"{": "JSON text",
    b"version ": "a pointer of Git LFS; fetch the file itself",
}


@dataclass(frozen=True)
class Contents:
    """What a container holds."""

    description: dict[str, Any]
    tensors: dict[str, Tensor]
    size: int


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: str
    count: int
    begin: int
    end: int


def read(path: Path, limit: int = MAX_BYTES) -> Contents:
    """Read a task file once, and trust nothing in it."""
    with opened(path) as (file, size):
        if size > limit:
            raise TaskFileError("too-large", f"the file has {size:,} bytes, more than the limit of {limit:,}")
        start = bytes(read_exactly(file, min(size, 9)))
        length = _header_length(start, size)
        entries, description = _parsed(start[8:] + bytes(read_exactly(file, length - 1)), size - 8 - length)
        data = read_exactly(file, size - 8 - length)
    return Contents(description, {e.name: _tensor(e, data) for e in entries}, size)


def _header_length(start: bytes, size: int) -> int:
    (length,) = struct.unpack("<Q", start[:8].ljust(8, b"\xff"))
    is_ours = 2 <= length <= MAX_HEADER and start[8:] in (b"", b"{")  # a length may look like a pickle
    for magic, what in _FOREIGN.items():
        if start.startswith(magic) and not is_ours:
            raise TaskFileError(
                "foreign", f"the file is {what}, expected a task file (NAME.task.safetensors)"
            )
    if len(start) < 8:
        raise TaskFileError("truncated", f"the file has {size} bytes, too few for a task file")
    if length > MAX_HEADER or length < 2:
        raise TaskFileError(
            "header-length", f"the header is said to have {length:,} bytes, expected 2 to {MAX_HEADER:,}"
        )
    if 8 + length > size:
        raise TaskFileError("truncated", f"the header needs {8 + length:,} bytes, and the file has {size:,}")
    return int(length)


def _parsed(header: bytes, size: int) -> tuple[list[_Entry], dict[str, Any]]:
    found = parse("header", "the header", header.rstrip(b" "))
    if not isinstance(found, dict):
        raise TaskFileError("header", "the header is a list, expected names and tensors")
    metadata = found.pop("__metadata__", None)
    if not isinstance(metadata, dict) or set(metadata) != {KEY} or not isinstance(metadata[KEY], str):
        raise TaskFileError(
            "header", f"the file has no metadata {KEY!r} (and nothing else): it is no task file"
        )
    description = parse("metadata", "the description", metadata[KEY].encode("utf-8", "surrogatepass"))
    if not isinstance(description, dict):
        raise TaskFileError("metadata", "the description is a list, expected fields and values")
    unknown = sorted(set(found) - set(TENSORS))
    if unknown:
        raise TaskFileError(
            "tensors", f"the file holds {unknown[0][:60]!a}, expected only {', '.join(TENSORS)}"
        )
    entries = sorted((_entry(name, spec) for name, spec in found.items()), key=lambda e: (e.begin, e.end))
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise TaskFileError("ranges", f"{entry.name} begins at {entry.begin}, expected {end}")
        end = entry.end
    if end > size:
        raise TaskFileError(
            "truncated", f"the tensors need {end:,} bytes, and the file has {size:,} for them"
        )
    if end < size:
        raise TaskFileError("ranges", f"{size - end:,} bytes at the end belong to no tensor")
    return entries, description


def _entry(name: str, spec: object) -> _Entry:
    if not isinstance(spec, dict) or set(spec) != {"dtype", "shape", "data_offsets"}:
        raise TaskFileError("header", f"{name} lacks dtype, shape or data_offsets, or has more")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in TENSORS[name]:
        raise TaskFileError(
            "dtype", f"{name} is {str(dtype)[:20]!a}, expected {' or '.join(sorted(TENSORS[name]))}"
        )
    if not (_whole(shape, 1) and _whole(offsets, 2)):
        raise TaskFileError("header", f"{name} has another shape or range than one axis, from begin to end")
    count, (begin, end) = shape[0], offsets
    if end - begin != count * DTYPES[dtype].itemsize:
        raise TaskFileError("ranges", f"{name} has {count} numbers in {end - begin} bytes")
    return _Entry(name, dtype, count, begin, end)


def _whole(values: object, count: int) -> bool:
    """True for a list of so many whole numbers of at most 63 bits."""
    return (
        isinstance(values, list)
        and len(values) == count
        and all(type(v) is int and 0 <= v < 2**63 for v in values)
    )


def _tensor(entry: _Entry, data: bytearray) -> Tensor:
    dtype = DTYPES[entry.dtype]
    if not entry.count:
        return torch.empty(0, dtype=dtype, device="cpu")
    if entry.begin % dtype.itemsize:  # only a stranger's file
        return torch.frombuffer(bytearray(data[entry.begin : entry.end]), dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=entry.count, offset=entry.begin)


def pack(description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """A container of these tensors, the widest numbers first so that all are aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, list(TENSORS).index(name)))
    header: dict[str, Any] = {"__metadata__": {KEY: dump(description)}}
    end, parts = 0, []
    for name in order:
        tensor = tensors[name].detach().cpu().contiguous()
        begin, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": [tensor.numel()],
            "data_offsets": [begin, end],
        }
        parts.append(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    text = dump(header).encode("utf-8")
    text += b" " * (math.ceil(len(text) / 8) * 8 - len(text))
    if len(text) > MAX_HEADER:
        raise TaskFileError(
            "text", f"the description has {len(text):,} bytes, expected at most {MAX_HEADER:,}; shorten it"
        )
    return b"".join([struct.pack("<Q", len(text)), text, *parts])
