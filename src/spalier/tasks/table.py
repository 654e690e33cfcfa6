"""The layer table: for each tensor of the network, where its values come from and which masks lie on its axes.

It is strict JSON, deflated. What it says can be checked without the base: how long each tensor of the file has to be.
Axes with the same masks are written once, and masks that lie on a part of an axis as runs, so that concatenations of
many streams (DenseNets) stay short.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from spalier.adapters.calls import Calls
from spalier.adapters.codes import LEVELS
from spalier.errors import TaskFileError
from spalier.tasks.format import VERSION, check_text, deflate, dump_json, inflate, parse_json, quoted, words
from spalier.tasks.rows import Adapted, Cut, Cutter, Delta, LowRank, Mask, Placement, Pointwise, Row, Run, Source
from spalier.text import pattern, pattern_of

# bounds on what a hostile file can make a reader do; the table of a ResNet-50 has 15 KB
MAX_TABLE = 1 << 22
MAX_REMEMBERED = 1 << 18
MAX_SIZE = 1 << 40
MAX_INDICES = 1 << 22
"""How many indices all patterns of a table may be for, so that a short one cannot take much memory."""
MAX_CALLS = 64
"""How many views and scales of one module a task may set right."""
MAX_INTEGERS = 1 << 16
"""How many integers of its own a task may have."""


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
    calls: dict[str, Calls] = field(default_factory=dict)
    """By module: views and scales that its code gets wrong, and what is right."""

    @cached_property
    def sizes(self) -> list[int]:
        """How many units each mask is for."""
        return [size for _, size in self.streams] + [self.streams[w.stream][1] for w in self.writers]

    @cached_property
    def own(self) -> frozenset[str]:
        """The tensors that the task has of its own."""
        return frozenset(name for row in self.rows if row.source in ("values", "integers") for name in row.names)

    @cached_property
    def not_compared(self) -> frozenset[str]:
        """Tensors whose values in the base do not matter: the task's own, and counts beside statistics of its own."""
        paths = [path for path, _, key in (name.rpartition(".") for name in self.own) if key == "running_mean"]
        return self.own | {f"{path}.num_batches_tracked".removeprefix(".") for path in paths}

    @cached_property
    def in_bytes(self) -> Table:
        """The table of the same task with each number of its adapters in a byte."""
        return self._recoded(0, 255)

    @cached_property
    def in_numbers(self) -> Table:
        """The table of the same task with numbers instead of bytes; codes of a whole weight stay codes."""
        return self._recoded(255, 0)

    def _recoded(self, old: int, new: int) -> Table:
        def made(row: Row) -> Row:
            is_meant = isinstance(row.source, LowRank | Pointwise) and row.source.levels == old
            return row.recoded(new) if is_meant else row

        return replace(self, rows=tuple(map(made, self.rows)))

    @cached_property
    def integers(self) -> int:
        """How many integers the task has of its own."""
        return sum(len(row.keys) * math.prod(row.shape) for row in self.rows if row.source == "integers")

    def cut(self, masks: Sequence[Mask]) -> list[tuple[Row, Cut]]:
        """The rows, with what these masks leave of each."""
        cutter = Cutter(masks)
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
        axes: dict[str, int] = {}
        text = dump_json(
            {
                "streams": self.streams,
                "writers": [[w.name, w.stream, w.module, w.axis] for w in self.writers],
                "rows": [_row_to_json(row, axes) for row in self.rows],
                "axes": [json.loads(axis) for axis in axes],  # after the rows, which have collected them
                "attributes": self.attributes,
                "heads": self.heads,
                "folds": self.folds,
                # few networks have any, and those that do not can be read by earlier versions
                **({"calls": self.calls} if self.calls else {}),
            }
        ).encode("utf-8")
        if len(text) > MAX_TABLE:
            raise _wrong(f"the layer table has {len(text):,} bytes, expected at most {MAX_TABLE:,}")
        raw = deflate(text)
        Table.from_bytes(raw, len(text))  # what could not be read is not written
        return raw, len(text)

    @staticmethod
    def from_bytes(raw: bytes, length: object, version: int = VERSION) -> Table:
        """The table that was written; anything else is an error.

        Tasks that were learned alike on one base have the same table, byte for byte; it is parsed once.
        """
        if type(length) is not int or not 0 < length <= MAX_TABLE:
            raise _wrong(f"the layer table is said to have {quoted(length)} bytes")
        parse = _remembered if length <= MAX_REMEMBERED else _parsed
        return parse(raw, length, version)


def _parsed(raw: bytes, length: int, version: int) -> Table:
    text = inflate("table", "the layer table", raw, length, words() if version > 1 else b"")
    # one look at all of the text saves one at each name
    is_safe = text.isascii() and b"\\" not in text and text.decode("ascii").isprintable()
    return _Parser(parse_json("table", "the layer table", text), version, is_safe=is_safe).table()


_remembered = lru_cache(maxsize=32)(_parsed)


def _row_to_json(row: Row, axes: dict[str, int]) -> list[Any]:
    placed = [[_placement_to_json(p) for p in placements] for placements in row.axes]
    refs = [axes.setdefault(dump_json(axis), len(axes) + 1) if axis else 0 for axis in placed]
    source: list[Any]
    match row.source:
        case LowRank(rank, taps, groups, inputs_first, whole, levels):
            source = ["low-rank-whole" if whole else "low-rank", rank, taps, levels, groups, int(inputs_first)]
        case Pointwise(groups, inputs_first, levels):
            source = ["pointwise", levels, groups, int(inputs_first)]
        case Delta(levels, by_row, groups, inputs_first):
            source = ["delta", levels, int(by_row), groups, int(inputs_first)]
        case kind:
            source = [kind]
    return [row.path, row.keys, row.shape, refs, source]


def _placement_to_json(placement: Placement) -> int | list[Any]:
    if placement.runs is not None:
        return [placement.mask, placement.runs]
    units = placement.units
    if units is None:
        return placement.mask
    return [placement.mask, *(pattern_of(units) or [units.tolist()])]


_LENGTHS = {
    1: {"low-rank": 4, "low-rank-whole": 4, "pointwise": 2},
    2: {"low-rank": 5, "low-rank-whole": 5, "pointwise": 3, "delta": 4},
}
"""How many numbers each kind of adapter has in a row of a table of each format."""


class _Parser:
    """Plain data into a table, each part checked."""

    def __init__(self, data: Any, version: int, *, is_safe: bool) -> None:
        self.data, self.version = data, version
        self.is_safe = is_safe
        """Whether no text in it can hold more than printable ASCII."""
        self.sizes: list[int] = []
        self.axes: list[Any] = []
        """The masks of each axis that rows refer to, as the file has them."""
        self._indices = self._integers = 0
        self._counted: set[tuple[int, ...]] = set()
        self._placements: dict[int, Placement] = {}
        self._axes: dict[tuple[int, int], tuple[Placement, ...]] = {}

    def table(self) -> Table:
        fields = {"streams", "writers", "rows", "attributes", "heads", "folds"}
        fields |= {"axes"} if self.version > 1 else set()
        if not isinstance(self.data, dict) or self.data.keys() - {"calls"} != fields:
            raise _wrong(f"the layer table has other fields than {', '.join(sorted(fields))}")
        streams = tuple((self._text(name), self._size(units)) for name, units in self._lists("streams", 2))
        self._check_unique("stream", [name for name, _ in streams])
        writers = tuple(
            Writer(self._text(n), self._number(s, 0, len(streams) - 1), self._text(m), self._number(a, -64, 63))
            for n, s, m, a in self._lists("writers", 4)
        )
        self._check_unique("writer", [w.name for w in writers])
        self.sizes = [size for _, size in streams] + [streams[w.stream][1] for w in writers]
        self.axes = [self._list(axis) for axis in self._list(self.data.get("axes", []))]
        rows = tuple(self._row(*entry) for entry in self._lists("rows", 5))
        self._check_unique("tensor", [name for row in rows for name in row.names])
        if len({number for number, _ in self._axes}) < len(self.axes):  # what nobody looks at could hold anything
            raise _wrong("an axis lies on no tensor")
        folds = tuple((self._text(a), self._text(b)) for a, b in self._lists("folds", 2))
        heads = tuple(self._text(path) for path in self._list(self.data["heads"]))
        self._check_unique("head", list(heads))
        self._check_unique("norm to fold", [norm for _, norm in folds])
        return Table(streams, writers, rows, self._attributes(), heads, folds, self._calls())

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
        read = self._axis if self.version == 1 else self._referred
        placed = tuple(read(axis, n) for axis, n in zip(axes, sizes, strict=True))
        row = Row(where, names, sizes, placed, self._source(self._list(source), names, sizes, placed))
        row.refs = None if self.version == 1 else tuple(axes)
        return row

    def _referred(self, ref: Any, size: int) -> tuple[Placement, ...]:
        """The masks on an axis, by its number in the list of axes; 0 for none."""
        number = self._number(ref, 0, len(self.axes))
        if not number:
            return ()
        if (number, size) not in self._axes:
            self._axes[number, size] = self._axis(self.axes[number - 1], size)
        return self._axes[number, size]

    def _axis(self, several: Any, size: int) -> tuple[Placement, ...]:
        """The masks on an axis.

        What it takes to cut is bounded: one mask alone costs what it has in the file, several on one axis more.
        """
        masks = [on[0] if isinstance(on, list) and on else on for on in self._list(several)]
        if len(several) > 1:
            if not all(type(mask) is int for mask in masks) or len(set(masks)) < len(masks):
                raise _wrong("a mask lies on an axis twice, or is no number")
            is_plain = masks == several  # equal axes with plain masks are cut once
            if not is_plain or tuple(masks) not in self._counted:
                self._count_indices(size * sum(not _has_runs(on) for on in several))
            if is_plain:
                self._counted.add(tuple(masks))
        if any(map(_has_runs, several)):  # runs count their indices themselves, and need an axis to lie on
            self._count_indices(size)
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
        elif len(entry) == 2 and self.version > 1 and _has_runs(entry):
            mask = self._number(entry[0], 0, len(self.sizes) - 1)
            return Placement(mask, runs=self._runs(entry[1], self.sizes[mask], size))
        elif len(entry) == 2:
            mask = entry[0]
            units = np.array([self._number(u, -1, 2**31) for u in self._list(entry[1])], np.int64)
        else:
            raise _wrong("a mask lies on an axis in a way that is not known")
        self._number(mask, 0, len(self.sizes) - 1)
        if len(units) != size or (len(units) and units.max() >= self.sizes[mask]):
            raise TaskFileError("mask", f"a mask of {self.sizes[mask]} units does not fit an axis of {size}")
        return Placement(mask, units)

    def _runs(self, entries: list[Any], units: int, size: int) -> tuple[Run, ...]:
        """Runs on an axis of that size, of a mask with so many units; one begins where the one before has ended."""
        found: list[Run] = []
        end = 0
        for entry in entries:
            if len(self._list(entry)) != 4:
                raise _wrong(f"a run of a mask has {len(entry)} numbers, expected 4")
            start, unit = self._number(entry[0], 0, 2**31), self._number(entry[1], 0, 2**31)
            count, repeat = self._size(entry[2]), self._size(entry[3])
            if start < end or start + count * repeat > size or unit + count > units:
                raise TaskFileError("mask", f"a run of {count} units does not fit an axis of {size}")
            self._count_indices(count * repeat)
            end = start + count * repeat
            found.append((start, unit, count, repeat))
        return tuple(found)

    def _source(self, data: list[Any], keys: tuple[str, ...], shape: tuple[int, ...], axes: tuple[Any, ...]) -> Source:
        kind, *numbers = data or [None]
        if kind in ("base", "values") and not numbers:
            return kind  # type: ignore[no-any-return]
        if kind == "integers" and not numbers and not any(axes):
            self._integers += len(keys) * math.prod(shape)
            if self._integers > MAX_INTEGERS:
                raise _wrong(f"the task has more than {MAX_INTEGERS:,} integers of its own")
            return "integers"
        lengths = _LENGTHS[self.version]
        if isinstance(kind, str) and lengths.get(kind) == len(numbers) and len(keys) == 1 and len(shape) >= 2:
            *sizes, groups, order = numbers
            inputs_first = bool(self._number(order, 0, 1))
            if shape[0] % self._size(groups) == 0:
                return self._adapted(kind, sizes, groups, inputs_first)
        raise _wrong(f"numbers come from {quoted(data)}, which is not known")

    def _adapted(self, kind: str, sizes: list[Any], groups: int, inputs_first: bool) -> Adapted:
        if kind == "delta":
            levels, by_row = sizes
            return Delta(self._levels(levels), bool(self._number(by_row, 0, 1)), groups, inputs_first)
        last = 0 if self.version == 1 else sizes.pop()  # 0 for numbers, which have no levels
        levels = last if type(last) is int and last == 0 else self._levels(last)
        if kind == "pointwise":
            return Pointwise(groups, inputs_first, levels)
        rank, taps = (self._size(n) for n in sizes)
        return LowRank(rank, taps, groups, inputs_first, kind == "low-rank-whole", levels)

    def _levels(self, value: Any) -> int:
        if type(value) is not int or value not in LEVELS.values():
            raise _wrong(f"codes have {quoted(value)} levels, expected {', '.join(map(str, LEVELS.values()))}")
        return value

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

    def _calls(self) -> dict[str, Calls]:
        calls = self.data.get("calls", {})
        if not isinstance(calls, dict) or ("calls" in self.data and not calls):
            raise _wrong("the calls are no lists of views and scales by module")
        found = {}
        for path, entry in calls.items():
            if len(self._list(entry)) != 2 or sum(len(self._list(part)) for part in entry) > MAX_CALLS:
                raise _wrong(f"the calls of {quoted(path)} are no views and scales, or more than {MAX_CALLS}")
            views, scales = entry
            found[self._text(path)] = Calls(tuple(map(self._view, views)), tuple(map(self._scale, scales)))
        return found

    def _view(self, entry: Any) -> tuple[int, int, int, int, int]:
        if len(self._list(entry)) != 5:
            raise _wrong(f"a view has {len(entry)} numbers, expected 5")
        before, after = (self._number(n, 0, 16) for n in entry[:2])
        return before, after, self._number(entry[2], 0, after), self._number(entry[3], 1, after), self._size(entry[4])

    def _scale(self, entry: Any) -> tuple[int, float]:
        if len(self._list(entry)) != 2 or type(entry[1]) is not float or not 0 < abs(entry[1]) < math.inf:
            raise _wrong(f"{quoted(entry)} stands where a number of axes and a scale are expected")
        return self._number(entry[0], 0, 16), entry[1]

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


def _has_runs(entry: Any) -> bool:
    """Whether a placement is written as runs: a mask, and a list of lists."""
    is_pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list)
    return is_pair and bool(entry[1]) and isinstance(entry[1][0], list)


def _wrong(message: str) -> TaskFileError:
    return TaskFileError("table", message)
