"""How numbers are stored: exactly, in half precision, or adapters as 8-bit integers with a scale for each row.

What a task says of itself: the part of a file that people read.

What a task has learned: flat tensors, masks, and the table that says what they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, Self

import torch
from torch import Tensor

from spalier.errors import ConfigError, TaskFileError
from spalier.tasks import container
from spalier.tasks.container import check_name, check_plain, check_text
from spalier.tasks.fingerprint import Fingerprint, largest
from spalier.tasks.table import Cut, Mask, Matrices, Row, Table, Values

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


FORMAT = 1


@dataclass(frozen=True)
class Density:
    """How much of the base is left, three ways: (kept, of), or None where it is not known."""

    channels: tuple[int, int] | None
    """Output channels of the layers that write streams."""
    weights: tuple[int, int] | None
    """Parameters of the network."""
    macs: tuple[int, int] | None
    """Multiply-accumulates of one sample."""


@dataclass(frozen=True)
class Description:
    """What a task is. Print it."""

    name: str
    adapter: Mapping[str, Any]
    """Its kind and its settings."""
    base: Fingerprint
    density: Density
    learned: int
    """How many numbers were learned."""
    storage: Storage = "exact"
    metrics: Mapping[str, float] = field(default_factory=dict)
    classes: Sequence[str] = ()
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    licence: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.name)
        _check("adapter", isinstance(self.adapter.get("kind"), str), "a dict with a kind")
        _check("learned", type(self.learned) is int and 0 <= self.learned < 2**63, "a number")
        _check("storage", self.storage in STORAGES, f"one of {', '.join(STORAGES)}")
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.metrics.values())
        _check("metrics", numbers, "a dict of numbers")
        _check("classes", all(isinstance(c, str) for c in self.classes), "a list of names")
        check_text("licence", self.licence)
        for name in ("adapter", "metrics", "classes", "preprocessing", "provenance"):
            check_plain(name, getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; fields that say nothing are left out."""
        density = {f.name: value for f in fields(Density) if (value := getattr(self.density, f.name))}
        found: dict[str, Any] = {
            "format": FORMAT,
            "name": self.name,
            "adapter": dict(self.adapter),
            "base": {"architecture": self.base.architecture, "values": self.base.values},
            "density": {key: list(pair) for key, pair in density.items()},
            "learned": self.learned,
            "storage": self.storage,
        }
        for name in ("metrics", "preprocessing", "provenance"):
            found |= {name: dict(getattr(self, name))} if getattr(self, name) else {}
        found |= {"classes": list(self.classes)} if self.classes else {}
        found |= {"licence": self.licence} if self.licence else {}
        return found

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Description:
        """What `to_dict` wrote; anything else is an error."""
        if data.get("format") != FORMAT or type(data.get("format")) is not int:
            raise TaskFileError(
                "version",
                f"the file has format {str(data.get('format'))[:30]!a}, expected {FORMAT}: it was written by "
                "another version of Spalier; update this one",
            )
        rest = {key: value for key, value in data.items() if key != "format"}
        needed = {"name", "adapter", "base", "density", "learned", "storage"}
        _check("description", needed <= set(rest), f"the fields {', '.join(sorted(needed))}")
        unknown = set(rest) - {f.name for f in fields(Description)}
        _check("description", not unknown, f"no {str(min(unknown, default=''))[:40]!a}")
        kinds: dict[str, type] = {
            **dict.fromkeys(("adapter", "metrics", "preprocessing", "provenance", "base", "density"), dict),
            **dict.fromkeys(("name", "storage", "licence"), str),
            "classes": list,
        }
        for key, kind in kinds.items():
            _check(key, isinstance(rest.get(key, kind()), kind), f"a {kind.__name__}")
        return Description(
            **{
                **rest,
                "base": _fingerprint(rest["base"]),
                "density": _density(rest["density"]),
                "classes": tuple(rest.get("classes", ())),
            }
        )

    def __str__(self) -> str:
        settings = ", ".join(f"{k}={v}" for k, v in self.adapter.items() if k != "kind")
        lines = [
            ("name", self.name),
            ("adapter", f"{self.adapter['kind']}({settings})"),
            ("learned", f"{self.learned:,} parameters, stored as {self.storage}"),
            *((f.name, _share(getattr(self.density, f.name))) for f in fields(Density)),
            *((key, f"{value:g}") for key, value in self.metrics.items()),
            ("classes", _some(self.classes)),
            *((key, str(value)) for key, value in self.preprocessing.items()),
            ("licence", self.licence or "not stated"),
            *((key, str(value)) for key, value in self.provenance.items()),
            ("base", f"{self.base.architecture[:12]} with values {self.base.values[:12]}"),
        ]
        width = max(len(key) for key, _ in lines)
        return "\n".join(f"{key:{width}}  {value}" for key, value in lines)


def _fingerprint(data: dict[str, Any]) -> Fingerprint:
    hexadecimal = all(
        isinstance(v, str) and len(v) == 64 and set(v) <= set("0123456789abcdef") for v in data.values()
    )
    _check("base", set(data) == {"architecture", "values"} and hexadecimal, "two SHA-256 digests")
    return Fingerprint(data["architecture"], data["values"])


def _density(data: dict[str, Any]) -> Density:
    names = {f.name for f in fields(Density)}
    _check("density", set(data) <= names, f"only {', '.join(sorted(names))}")
    for pair in data.values():
        fits = (
            isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and 0 <= n < 2**63 for n in pair)
        )
        _check("density", fits and pair[0] <= pair[1] and pair[1] > 0, "pairs of kept and of")
    return Density(**{name: tuple(data[name]) if name in data else None for name in names})


def _check(field: str, holds: bool, expected: str) -> None:
    if not holds:
        raise TaskFileError(
            "metadata", f"the description's {field} is not what it has to be: expected {expected}"
        )


def _share(pair: tuple[int, int] | None) -> str:
    return "not known" if pair is None else f"{pair[0]:,} of {pair[1]:,} ({pair[0] / pair[1]:.1%})"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{len(names)}: {shown}" if names else "not stated"


@dataclass(frozen=True, eq=False, repr=False)
class Learned:
    """The contents of a task file."""

    description: Description
    table: Table
    masks: list[Mask]
    adapters: Tensor
    """The numbers of all adapters in the order of the table, as they are stored."""
    scales: Tensor
    """With 8-bit storage, the scale of each row of each adapter."""
    values: Tensor
    """Norms with their statistics, biases, the head: all that is the task's own."""
    integers: tuple[int, ...] = ()
    """Whole numbers of the task's own: how many batches a norm has seen."""

    def __repr__(self) -> str:
        said = self.description
        return f"{type(self).__name__}({said.name!r}, {said.learned:,} learned, stored as {said.storage})"

    def stored_as(self, storage: Storage) -> Self:
        """The task as it is after it has been stored so: ``"fp16"``, ``"bf16"``, ``"int8"`` lose precision.

        ``"int8"`` stores adapters as integers with a scale for each row, and the rest in half precision.
        """
        check_storage(storage)
        description = replace(self.description, storage=storage)
        values = stored(self.values, storage, "norms or head")
        if storage == "int8":
            codes, scales = quantised(self.adapter_values(), self.adapter_rows)
            return replace(self, description=description, adapters=codes, scales=scales, values=values)
        adapters = stored(self.adapter_values(), storage, "adapters")
        return replace(
            self,
            description=description,
            adapters=adapters,
            scales=torch.empty(0, device="cpu"),
            values=values,
        )

    def to_bytes(self, *, storage: Storage = "exact") -> bytes:
        """The contents of the task's file."""
        task = self if storage == "exact" else self.stored_as(storage)
        raw, length = task.table.to_bytes()
        tensors = {
            "table": torch.frombuffer(bytearray(raw), dtype=torch.uint8),
            "masks": torch.from_numpy(task.table.pack(task.masks)),
            "adapters": task.adapters,
            "values": task.values,
        }
        if task.scales.numel():
            tensors["scales"] = task.scales
        fields = {**task.description.to_dict(), "table": length}
        if task.integers:
            fields["integers"] = [[number, len(list(run))] for number, run in groupby(task.integers)]
        return container.pack(fields, tensors)

    def adapter_values(self) -> Tensor:
        """The numbers of all adapters."""
        return restored(self.adapters, self.scales, self.adapter_rows) if self._is_coded else self.adapters

    @property
    def _is_coded(self) -> bool:
        return self.adapters.dtype == torch.int8

    @cached_property
    def pieces(self) -> list[tuple[Row, Cut]]:
        """The rows of the table, with what the masks leave of each."""
        return self.table.cut(self.masks)

    @cached_property
    def adapter_rows(self) -> Matrices:
        """The matrices of all adapters: how many rows each has, and how long these are."""
        return tuple([shape for _, cut in self.pieces for shape in cut.matrices])

    def check(self) -> None:
        """Refuse numbers that the table has no place for, or that are none."""
        count = sum(rows * length for rows, length in self.adapter_rows)
        scales = sum(rows for rows, _ in self.adapter_rows) if self._is_coded else 0
        own = sum(
            len(row.keys) * math.prod(cut.shape) for row, cut in self.pieces if isinstance(row.source, Values)
        )
        for what, tensor, expected in (
            ("adapters", self.adapters, count),
            ("scales", self.scales, scales),
            ("values", self.values, own),
        ):
            if tensor.numel() != expected:
                raise TaskFileError(
                    "sizes", f"{what} has {tensor.numel():,} numbers, the table says {expected:,}"
                )
            if not math.isfinite(largest(tensor)):
                raise TaskFileError("non-finite", f"{what} holds NaN or infinite numbers")
        if self._is_coded != (self.description.storage == "int8"):
            raise TaskFileError(
                "metadata", f"the storage is said to be {self.description.storage}, and is not"
            )
