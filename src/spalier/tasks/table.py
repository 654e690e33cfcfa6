"""The layer table: for each tensor of the network, where its values come from and which masks lie on its axes.

It is strict JSON, deflated. What it says can be checked without the base: how long each tensor of the file has to be.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from spalier.errors import TaskFileError
from spalier.tasks.format import check_text, dump_json, parse_json, quoted
from spalier.text import pattern, pattern_of

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Matrices = tuple[tuple[int, int], ...]
"""Matrices that lie behind one another: how many rows each has, and how long these are."""

# bounds on what a hostile file can make a reader do; the table of a ResNet-50 has 15 KB
MAX_TABLE = 1 << 22
MAX_REMEMBERED = 1 << 18
MAX_SIZE = 1 << 40
MAX_INDICES = 1 << 22
"""How many indices all patterns of a table may be for, so that a short one cannot take much memory."""
MAX_INTEGERS = 1 << 16
"""How many integers of its own a task may have."""


@dataclass(eq=False)  # not frozen: a third of the time to make
class Placement:
    """A mask on an axis: index i of the axis goes with unit ``units[i]``, or with unit i where it is None."""

    mask: int
    units: Ints | None = None

    def kept(self, masks: Sequence[Mask]) -> Mask:
        """Which indices of the axis are left."""
        mask = masks[self.mask]
        return mask if self.units is None else (self.units < 0) | mask[self.units]


@dataclass(frozen=True)
class LowRank:
    """A frozen weight plus ``up^T down``: down has (rank, inputs, taps) numbers, then up (rank, outputs)."""

    rank: int
    taps: int
    groups: int
    """Of the layer in the base."""
    inputs_first: bool
    """Whether the weight's first axis is the input's."""
    whole: bool = False
    """True where the factors are for all channels of the base (plain LoRA)."""

    def matrices(self, inputs: int, outputs: int, groups: int) -> Matrices:
        """The factors, for so many channels that are left; a row is what shares a scale."""
        return (self.rank, inputs * self.taps), (self.rank, outputs)


@dataclass(frozen=True)
class Pointwise:
    """A frozen weight plus a matrix of (outputs, inputs / groups), at the centre tap of a kernel."""

    groups: int
    inputs_first: bool
    taps = 1
    whole = False

    def matrices(self, inputs: int, outputs: int, groups: int) -> Matrices:
        """The matrix, for so many channels that are left."""
        return ((outputs, inputs // groups),)


Source = Literal["base", "values", "integers"] | LowRank | Pointwise
"""Where numbers come from: the base alone, the task's own ``values`` or integers, or the base plus an adapter."""


@dataclass(eq=False)
class Row:
    """Tensors of one module that are alike."""

    path: str
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    """Of the whole tensor."""
    axes: tuple[tuple[Placement, ...], ...]
    source: Source

    def __post_init__(self) -> None:
        self.names = tuple(f"{self.path}.{key}" if self.path else key for key in self.keys)
        """The full names of the tensors."""
        self.masks = tuple([_plain_masks(placed) for placed in self.axes])
        """For each axis, the numbers of its masks; None where one does not lie there unit by unit."""
        self.uncut: Cut | None = None
        """What is left where no mask lies on the row, once it is known."""


def _plain_masks(placed: Sequence[Placement]) -> tuple[int, ...] | None:
    return None if any(p.units is not None for p in placed) else tuple([p.mask for p in placed])


@dataclass(eq=False)
class Cut:
    """What is left of the tensors of a row."""

    indices: tuple[Ints | None, ...]
    """Along each axis; None where all of it is left."""
    shape: tuple[int, ...]
    is_whole: bool
    matrices: Matrices
    """Of the row's adapter; none without one."""


class _Cutter:
    """What masks leave of the tensors of a table; axes with the same masks are looked at once."""

    def __init__(self, masks: Sequence[Mask]) -> None:
        self.masks = masks
        self._known: dict[tuple[int, ...] | None, Ints | None] = {(): None}

    def cut(self, row: Row) -> Cut:
        """What is left of a row's tensors."""
        if row.uncut is not None:
            return row.uncut
        known = self._known
        indices = tuple([known[m] if m in known else self._index(row, axis) for axis, m in enumerate(row.masks)])
        shape = tuple([n if i is None else len(i) for n, i in zip(row.shape, indices, strict=True)])
        matrices = () if isinstance(row.source, str) else _matrices(row, row.source, indices[0], shape)
        cut = Cut(indices, shape, shape == row.shape, matrices)
        if not any(row.axes):
            row.uncut = cut
        return cut

    def _index(self, row: Row, axis: int) -> Ints | None:
        """The indices of an axis that are left; None where all are."""
        first, *others = row.axes[axis]
        kept = first.kept(self.masks)
        for placement in others:
            kept = kept & placement.kept(self.masks)
        index = np.flatnonzero(kept)
        found = None if len(index) == row.shape[axis] else index
        masks = row.masks[axis]
        if masks is not None:
            self._known[masks] = found
        return found


def _matrices(row: Row, source: LowRank | Pointwise, first: Ints | None, shape: tuple[int, ...]) -> Matrices:
    """The matrices of an adapter, where ``first`` are the indices left on the weight's first axis."""
    if source.whole:
        first, shape = None, row.shape
    groups = source.groups
    if groups > 1 and first is not None:  # groups that have nothing left are gone
        groups = len(np.unique(first // (row.shape[0] // groups)))
    outer, inner = shape[0], shape[1] * groups
    inputs, outputs = (outer, inner) if source.inputs_first else (inner, outer)
    return source.matrices(inputs, outputs, groups)


@dataclass(frozen=True)
class Writer:
    """A layer that keeps fewer channels than the stream it writes into; a gather spreads them."""

    name: str
    stream: int
    module: str
    axis: int


@dataclass(frozen=True, eq=False)
class Table:
    """Everything that says what the numbers of a task file are."""

    streams: tuple[tuple[str, int], ...]
    """The name of each stream, and how many units it has."""
    writers: tuple[Writer, ...]
    """Free writers; their masks come after those of the streams."""
    rows: tuple[Row, ...]
    attributes: dict[str, dict[str, int | tuple[int, ...]]]
    """By module: sizes that its code holds and that its tensors do not tell."""
    heads: tuple[str, ...]
    """Modules of which the task has its own, whatever the base has there."""
    folds: tuple[tuple[str, str], ...]
    """Layers and the batch norms that alone take their outputs."""

    @cached_property
    def sizes(self) -> list[int]:
        """How many units each mask is for."""
        return [size for _, size in self.streams] + [self.streams[w.stream][1] for w in self.writers]

    @cached_property
    def own(self) -> frozenset[str]:
        """The tensors that the task has of its own."""
        return frozenset(name for row in self.rows if row.source in ("values", "integers") for name in row.names)

    @cached_property
    def integers(self) -> int:
        """How many integers the task has of its own."""
        return sum(len(row.keys) * math.prod(row.shape) for row in self.rows if row.source == "integers")

    def cut(self, masks: Sequence[Mask]) -> list[tuple[Row, Cut]]:
        """The rows, with what these masks leave of each."""
        cutter = _Cutter(masks)
        return [(row, cutter.cut(row)) for row in self.rows]

    @property
    def mask_bytes(self) -> int:
        """How many bytes the packed masks have."""
        return sum(math.ceil(size / 8) for size in self.sizes)

    def unpack(self, packed: npt.NDArray[np.uint8]) -> list[Mask]:
        """The masks: bit i % 8 of byte i // 8 is unit i, and each mask begins with a byte of its own."""
        if len(packed) != self.mask_bytes:
            raise TaskFileError("mask", f"the masks have {len(packed)} bytes, expected {self.mask_bytes}")
        bits = np.unpackbits(packed, bitorder="little").astype(bool)
        masks, start = [], 0
        for number, size in enumerate(self.sizes):
            end = start + math.ceil(size / 8) * 8
            mask = bits[start : start + size]
            if bits[start + size : end].any():
                raise TaskFileError("mask", f"mask {number} has bits beyond its {size} units")
            if not mask.any():
                raise TaskFileError("mask", f"mask {number} keeps none of its {size} units")
            masks.append(mask)
            start = end
        for number, writer in enumerate(self.writers, start=len(self.streams)):
            if (masks[number] & ~masks[writer.stream]).any():
                raise TaskFileError(
                    "mask", f"the writer {quoted(writer.name)} keeps units that its stream does not have"
                )
        return masks

    def pack(self, masks: Sequence[Mask]) -> npt.NDArray[np.uint8]:
        """The masks as bytes."""
        packed = [np.packbits(mask, bitorder="little") for mask in masks]
        return np.concatenate(packed) if packed else np.zeros(0, np.uint8)

    def to_bytes(self) -> tuple[bytes, int]:
        """Deflated JSON, and how long it was before."""
        text = dump_json(
            {
                "streams": self.streams,
                "writers": [[w.name, w.stream, w.module, w.axis] for w in self.writers],
                "rows": [_row_to_json(row) for row in self.rows],
                "attributes": self.attributes,
                "heads": self.heads,
                "folds": self.folds,
            }
        ).encode("utf-8")
        if len(text) > MAX_TABLE:
            raise _wrong(f"the layer table has {len(text):,} bytes, expected at most {MAX_TABLE:,}")
        raw = zlib.compress(text, 9)
        Table.from_bytes(raw, len(text))  # what could not be read is not written
        return raw, len(text)

    @staticmethod
    def from_bytes(raw: bytes, length: object) -> Table:
        """The table that was written; anything else is an error.

        Tasks that were learned alike on one base have the same table, byte for byte; it is parsed once.
        """
        if type(length) is not int or not 0 < length <= MAX_TABLE:
            raise _wrong(f"the layer table is said to have {quoted(length)} bytes")
        return _remembered(raw, length) if length <= MAX_REMEMBERED else _parsed(raw, length)


def _parsed(raw: bytes, length: int) -> Table:
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(raw, length)  # never more than the length, whatever the data say
    except zlib.error:
        raise _wrong("the layer table is not deflated data") from None
    if len(text) != length or not inflate.eof or inflate.unused_data or inflate.unconsumed_tail:
        raise _wrong(f"the layer table does not inflate to {length:,} bytes")
    # one look at all of the text saves one at each name
    is_safe = text.isascii() and b"\\" not in text and text.decode("ascii").isprintable()
    return _Parser(parse_json("table", "the layer table", text), is_safe=is_safe).table()


_remembered = lru_cache(maxsize=32)(_parsed)


def _row_to_json(row: Row) -> list[Any]:
    axes = [[_placement_to_json(p) for p in placed] for placed in row.axes]
    source: list[Any]
    match row.source:
        case LowRank(rank, taps, groups, inputs_first, whole):
            source = ["low-rank-whole" if whole else "low-rank", rank, taps, groups, int(inputs_first)]
        case Pointwise(groups, inputs_first):
            source = ["pointwise", groups, int(inputs_first)]
        case kind:
            source = [kind]
    return [row.path, row.keys, row.shape, axes, source]


def _placement_to_json(placement: Placement) -> int | list[Any]:
    units = placement.units
    if units is None:
        return placement.mask
    return [placement.mask, *(pattern_of(units) or [units.tolist()])]


class _Parser:
    """Plain data into a table, each part checked."""

    def __init__(self, data: Any, *, is_safe: bool) -> None:
        self.data = data
        self.is_safe = is_safe
        """Whether no text in it can hold more than printable ASCII."""
        self.sizes: list[int] = []
        self._indices = self._integers = 0
        self._counted: set[tuple[int, ...]] = set()
        self._placements: dict[int, Placement] = {}

    def table(self) -> Table:
        fields = {"streams", "writers", "rows", "attributes", "heads", "folds"}
        if not isinstance(self.data, dict) or set(self.data) != fields:
            raise _wrong(f"the layer table has other fields than {', '.join(sorted(fields))}")
        streams = tuple((self._text(name), self._size(units)) for name, units in self._lists("streams", 2))
        self._check_unique("stream", [name for name, _ in streams])
        writers = tuple(
            Writer(self._text(n), self._number(s, 0, len(streams) - 1), self._text(m), self._number(a, -64, 63))
            for n, s, m, a in self._lists("writers", 4)
        )
        self._check_unique("writer", [w.name for w in writers])
        self.sizes = [size for _, size in streams] + [streams[w.stream][1] for w in writers]
        rows = tuple(self._row(*entry) for entry in self._lists("rows", 5))
        self._check_unique("tensor", [name for row in rows for name in row.names])
        folds = tuple((self._text(a), self._text(b)) for a, b in self._lists("folds", 2))
        heads = tuple(self._text(path) for path in self._list(self.data["heads"]))
        self._check_unique("head", list(heads))
        self._check_unique("norm to fold", [norm for _, norm in folds])
        return Table(streams, writers, rows, self._attributes(), heads, folds)

    def _row(self, path: Any, keys: Any, shape: Any, axes: Any, source: Any) -> Row:
        where = self._text(path)
        sizes = tuple(self._list(shape))
        if len(sizes) > 16 or len(self._list(axes)) != len(sizes):
            raise _wrong(f"{quoted(where)} has {len(sizes)} axes, and masks for {len(axes)}")
        if not all(type(n) is int and 0 <= n < 2**31 for n in sizes) or math.prod(sizes) > MAX_SIZE:
            raise _wrong(f"{quoted(where)} is said to have the shape {quoted(sizes)}")
        names = tuple(self._text(key) for key in self._list(keys))
        if not names or any("." in name or not name for name in names):
            raise _wrong(f"{quoted(where)} has no keys, or keys with dots")
        placed = tuple(self._axis(self._list(axis), n) for axis, n in zip(axes, sizes, strict=True))
        return Row(where, names, sizes, placed, self._source(self._list(source), names, sizes, placed))

    def _axis(self, several: list[Any], size: int) -> tuple[Placement, ...]:
        """The masks on an axis.

        What it takes to cut is bounded: one mask alone costs what it has in the file, several on one axis more.
        """
        if len(several) > 1:
            masks = [on[0] if isinstance(on, list) and on else on for on in several]
            if not all(type(mask) is int for mask in masks) or len(set(masks)) < len(masks):
                raise _wrong("a mask lies on an axis twice, or is no number")
            is_plain = masks == several  # equal axes with plain masks are cut once
            if not is_plain or tuple(masks) not in self._counted:
                self._count_indices(size * len(several))
            if is_plain:
                self._counted.add(tuple(masks))
        return tuple([self._placement(on, size) for on in several])

    def _count_indices(self, count: int) -> None:
        self._indices += count
        if self._indices > MAX_INDICES:
            raise _wrong(f"the masks are for more than {MAX_INDICES:,} indices")

    def _placement(self, data: Any, size: int) -> Placement:
        if type(data) is int:
            if not (0 <= data < len(self.sizes) and self.sizes[data] == size):
                raise TaskFileError("mask", f"mask {data} does not fit an axis of {size}")
            return self._placements.setdefault(data, Placement(data))
        entry = self._list(data)
        if len(entry) == 4:
            mask, count, run, times = (self._number(n, 0, 2**31) for n in entry)
            if count * run * times != size or not size:
                raise TaskFileError("mask", f"a pattern of {count * run * times} indices lies on an axis of {size}")
            self._count_indices(size)
            units = pattern(count, run, times)
        elif len(entry) == 2:
            mask = entry[0]
            units = np.array([self._number(u, -1, 2**31) for u in self._list(entry[1])], np.int64)
        else:
            raise _wrong("a mask lies on an axis in a way that is not known")
        self._number(mask, 0, len(self.sizes) - 1)
        if len(units) != size or (len(units) and units.max() >= self.sizes[mask]):
            raise TaskFileError("mask", f"a mask of {self.sizes[mask]} units does not fit an axis of {size}")
        return Placement(mask, units)

    def _source(self, data: list[Any], keys: tuple[str, ...], shape: tuple[int, ...], axes: tuple[Any, ...]) -> Source:
        kind, *numbers = data or [None]
        if kind in ("base", "values") and not numbers:
            return kind  # type: ignore[no-any-return]
        if kind == "integers" and not numbers and not any(axes):
            self._integers += len(keys) * math.prod(shape)
            if self._integers > MAX_INTEGERS:
                raise _wrong(f"the task has more than {MAX_INTEGERS:,} integers of its own")
            return "integers"
        known = ("low-rank", 4), ("low-rank-whole", 4), ("pointwise", 2)
        if (kind, len(numbers)) in known and len(keys) == 1 and len(shape) >= 2:
            *sizes, groups = [self._size(n) for n in numbers[:-1]]
            inputs_first = bool(self._number(numbers[-1], 0, 1))
            if shape[0] % groups == 0:
                if kind == "pointwise":
                    return Pointwise(groups, inputs_first)
                rank, taps = sizes
                return LowRank(rank, taps, groups, inputs_first, kind == "low-rank-whole")
        raise _wrong(f"numbers come from {quoted(data)}, which is not known")

    def _attributes(self) -> dict[str, dict[str, int | tuple[int, ...]]]:
        attributes = self.data["attributes"]
        if not isinstance(attributes, dict) or not all(isinstance(v, dict) for v in attributes.values()):
            raise _wrong("the attributes are no dicts of sizes by module")
        return {
            self._text(path): {
                self._text(key): tuple(map(self._size, value)) if isinstance(value, list) else self._size(value)
                for key, value in values.items()
            }
            for path, values in attributes.items()
        }

    # kinds of values

    def _lists(self, field: str, length: int) -> Iterator[list[Any]]:
        for entry in self._list(self.data[field]):
            if not isinstance(entry, list) or len(entry) != length:
                raise _wrong(f"an entry of {field} has another length than {length}")
            yield entry

    def _list(self, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise _wrong(f"{quoted(value)} stands where a list is expected")
        return value

    def _text(self, value: Any) -> str:
        if not isinstance(value, str) or len(value) > 1000:
            raise _wrong(f"{quoted(value)} stands where a name is expected")
        return value if self.is_safe else check_text("the layer table", value)

    def _size(self, value: Any) -> int:
        return self._number(value, 1, 2**31 - 1)

    def _number(self, value: Any, least: int, most: int) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _wrong(f"{quoted(value)} stands where a number from {least} to {most} is expected")
        return value

    def _check_unique(self, what: str, names: list[str]) -> None:
        if len(set(names)) < len(names):
            twice = Counter(names).most_common(1)[0][0]
            raise _wrong(f"the {what} {quoted(twice)} occurs twice")


def _wrong(message: str) -> TaskFileError:
    return TaskFileError("table", message)
