"""A second reader of task files, written from docs/task-format.md alone: slow, obvious, in float64."""

import json
import re
import struct
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np

DTYPES = {"U8": np.uint8, "I8": np.int8, "F16": np.float16, "F32": np.float32, "F64": np.float64}


def read(path):
    """The description, the layer table, and the tensors."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    if header["__metadata__"] == {"spalier.task": "packed"}:
        assert header["packed"] == {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
        short, length = struct.unpack("<II", data[:8])
        text, data = inflated(data[8 : 8 + short]), data[8 + short :]
        assert len(text) == length
        header = json.loads(text)
    description = json.loads(header.pop("__metadata__")["spalier.task"])
    tensors = {}
    for name, spec in header.items():
        begin, end = spec["data_offsets"]
        if spec["dtype"] == "BF16":
            half = np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16
            tensors[name] = half.view(np.float32)
        else:
            tensors[name] = np.frombuffer(data[begin:end], DTYPES[spec["dtype"]])
    return description, json.loads(inflated(tensors["table"].tobytes())), tensors


def inflated(raw):
    """Text that was deflated with the words at the end of the page."""
    _, _, words = (Path(__file__).parents[2] / "docs" / "task-format.md").read_text().partition("```text\n")
    return zlib.decompressobj(zdict=words.partition("```")[0].encode()).decompress(raw)


def rows_of(version, table):
    """The rows as version 2 would have them, with the masks of each axis in place of its number."""
    if version == 2:
        axes = [[], *table["axes"]]
        return [[path, keys, shape, [axes[n] for n in on], source] for path, keys, shape, on, source in table["rows"]]
    rows = []
    for path, keys, shape, on, source in table["rows"]:
        if source[0] in ("low-rank", "low-rank-whole", "pointwise"):
            source = [*source[:-2], 0, *source[-2:]]
        rows.append([path, keys, shape, on, source])
    return rows


def masks_of(table, packed):
    sizes = [units for _, units in table["streams"]]
    sizes += [sizes[stream] for _, stream, _, _ in table["writers"]]
    masks, start = [], 0
    for size in sizes:
        masks.append([bool(packed[start + i // 8] >> (i % 8) & 1) for i in range(size)])
        start += -(-size // 8)
    return masks


def unit_of(on, index):
    """The mask, and the unit that an index of an axis belongs to; -1 for none."""
    if isinstance(on, int):
        return on, index
    if len(on) == 4:
        mask, units, run, _ = on
        return mask, index // run % units
    mask, entries = on
    if not isinstance(entries[0], list):
        return mask, entries[index]
    for start, unit, count, repeat in entries:
        if start <= index < start + count * repeat:
            return mask, unit + (index - start) // repeat
    return mask, -1


def stays(axis, size, masks):
    """The indices of an axis that stay."""
    left = []
    for i in range(size):
        units = [unit_of(on, i) for on in axis]
        if all(unit < 0 or masks[mask][unit] for mask, unit in units):
            left.append(i)
    return left


def sides(shape, left, groups, inputs_first):
    """How many inputs and outputs a weight has left, and how many groups."""
    many = len({index // (shape[0] // groups) for index in left[0]})  # groups that have nothing left are gone
    outer, inner = len(left[0]), len(left[1]) * many
    return (outer, inner, many) if inputs_first else (inner, outer, many)


def matrices(rows, masks):
    """The matrices of all adapters: rows, their length, levels, and how many scales there are."""
    found = []
    for _, _, shape, axes, (kind, *sizes) in rows:
        left = [stays(axis, size, masks) for axis, size in zip(axes, shape, strict=True)]
        if kind.startswith("low-rank"):
            rank, taps, levels, groups, inputs_first = sizes
            every = [range(size) for size in shape]
            inputs, outputs, _ = sides(shape, every if kind.endswith("whole") else left, groups, inputs_first)
            found += [(rank, inputs * taps, levels, rank), (rank, outputs, levels, rank)]
        elif kind == "pointwise":
            levels, groups, inputs_first = sizes
            inputs, outputs, many = sides(shape, left, groups, inputs_first)
            found.append((outputs, inputs // many, levels, outputs))
        elif kind == "delta":
            levels, by_row, _, _ = sizes
            first, *others = (len(index) for index in left)
            found.append((first, int(np.prod(others)), levels, first if by_row else 1))
    return found


def code_bytes(description, tensors):
    """The bytes of all codes."""
    raw = tensors["codes"].tobytes() if "codes" in tensors else b""
    if "codes" not in description:
        return raw
    data = zlib.decompress(raw)
    assert len(data) == description["codes"] <= 16 * len(raw)
    return data


def codes_of(data, count, levels):
    """Codes from the front of some bytes, and how many bytes they took."""
    many = {2: 8, 3: 5, 7: 2, 15: 2, 255: 1}[levels]
    size = -(-count // many)
    digits = [byte // levels**k % levels for byte in data[:size] for k in range(many)]
    assert all(byte < levels**many for byte in data[:size])
    assert not any(digits[count:])
    return [2 * digit - 1 if levels == 2 else digit - (levels - 1) // 2 for digit in digits[:count]], size


def scales_of(tensors):
    """The scales of codes; those that are bytes are made in float32."""
    found = tensors.get("scales", np.zeros(0))
    return list(np.float32(in_octaves(found, 24)) if found.dtype == np.uint8 else found.astype(np.float64))


def in_octaves(data, steps):
    """Scales from a byte each: steps below the first, of which there are so many in an octave."""
    (highest,) = struct.unpack("<h", data[:2].tobytes())
    return [2 ** ((highest - (int(byte) - 1)) / steps) if byte else 0.0 for byte in data[2:]]


def values_of(description, tensors, rows, masks, heads):
    """The task's own numbers in float64."""
    if description["storage"] not in ("int8-all", "int4-head"):
        assert tensors["values"].dtype != np.int8
        return tensors["values"].astype(np.float64)
    own, found = [], []  # rows and their length, and whether they have a byte for each integer
    for path, keys, shape, axes, (kind, *_) in rows:
        left = [len(stays(axis, size, masks)) for axis, size in zip(axes, shape, strict=True)]
        if kind == "values" and np.prod(left):
            is_packed = description["storage"] == "int4-head" and path in heads and len(left) > 1
            many = (left[0], int(np.prod(left[1:]))) if len(left) > 1 else (1, int(np.prod(left)))
            own += [(*many, is_packed)] * len(keys)
    marks = tensors["values"][: 2 + sum(many for many, _, _ in own)].view(np.uint8)
    data = tensors["values"][len(marks) :]
    scales = iter(in_octaves(np.concatenate([marks[:2], marks[2:] % 128]), 8) if own else [])
    roots = iter(marks[2:] >= 128)
    for many, length, is_packed in own:
        codes, size = data[: many * length].tolist(), many * length
        if is_packed:
            codes, size = codes_of(data.view(np.uint8).tolist(), many * length, 15)
        data = data[size:]
        for row in np.array(codes, np.float64).reshape(many, length):
            part = row / (7 if is_packed else 127) * next(scales)
            found += [part**2 if next(roots) else part]
    assert not len(data)
    return np.concatenate([[], *found])


def numbers(description, tensors, shapes, scales):
    """The matrices of all adapters, in float64."""
    found = [None] * len(shapes)
    if description["format"] == 1 and description["storage"] == "int8":
        flat = [int(code) for code in tensors["adapters"]]
        for number, (rows, length, _, _) in enumerate(shapes):
            found[number], flat = np.array(flat[: rows * length], float).reshape(rows, length), flat[rows * length :]
            found[number], scales = found[number] * np.array(scales[:rows])[:, None], scales[rows:]
        assert not flat
        assert not scales
        return found
    flat, data = tensors["adapters"].astype(np.float64), code_bytes(description, tensors)
    for levels in (2, 3, 7, 15, 255):
        for number, shape in enumerate(shapes):
            if shape[2] == levels:
                found[number], size = codes_of(data, shape[0] * shape[1], levels)
                data = data[size:]
    for number, (rows, length, levels, many) in enumerate(shapes):
        if not levels:
            found[number], flat = flat[: rows * length].reshape(rows, length), flat[rows * length :]
        else:
            codes = np.array(found[number], np.float32 if levels == 255 else np.float64).reshape(rows, length)
            found[number] = (codes * np.array(scales[:many])[:, None]).astype(np.float64)  # a byte's in float32
            scales = scales[many:]
    assert not len(flat)
    assert not data
    assert not scales
    return found


def network(path, base):
    """The tensors of the network, by name, from a file and the tensors of the base."""
    description, table, tensors = read(path)
    masks, rows = masks_of(table, tensors["masks"]), rows_of(description["format"], table)
    values = values_of(description, tensors, rows, masks, table["heads"])
    adapters = numbers(description, tensors, matrices(rows, masks), scales_of(tensors))
    integers = [number for number, times in description.get("integers", []) for _ in range(times)]
    found = {name: tensor.astype(np.float64) for name, tensor in base.items()}
    for path, keys, shape, axes, (kind, *sizes) in rows:
        left = [stays(axis, size, masks) for axis, size in zip(axes, shape, strict=True)]
        count = int(np.prod([len(index) for index in left]))
        for key in keys:
            name = f"{path}.{key}" if path else key
            if kind == "values":
                found[name], values = values[:count].reshape([len(i) for i in left]), values[count:]
            elif kind == "integers":
                found[name] = np.array(integers[:count], np.float64).reshape(shape)
                integers = integers[count:]
            else:
                small = found[name][np.ix_(*left)]
                adapt(small, kind, sizes, shape, left, adapters)
                found[name] = small
    assert not adapters
    assert not len(values)
    assert not integers
    return found


HEADS, SIZES = r"heads?$|_heads?_|^nhead", r"shape"
WIDTHS = r"dim|chan|chs|feature|width|hidden|plane|d_model|embed|head_size|split_size|proj"
OTHERS = r"patch|image|img|window|kernel|class|vocab|seq|pos|max|min|axis|num_dim|ndim|^dim_?$|^_"


def attributes(path, size_of):
    """The attributes that a file sets, by module; ``size_of`` tells a module's class and what the base has there."""
    description, table, tensors = read(path)
    masks, rows = masks_of(table, tensors["masks"]), rows_of(description["format"], table)
    shares = {Fraction(sum(mask), len(mask)) for mask in masks} | {Fraction(1)}
    for _, _, shape, axes, _ in rows:
        lefts = [len(stays(axis, size, masks)) for axis, size in zip(axes, shape, strict=True)]
        shares |= {Fraction(left, size) for left, size in zip(lefts, shape, strict=True) if size}
    for module, values in table["attributes"].items():
        for key, value in values.items():
            kind, base = size_of(module, key)
            if kind == "MultiheadAttention":
                assert key == "num_heads"
            elif kind in ("LayerNorm", "RMSNorm"):
                assert key == "normalized_shape"
            else:
                assert any(re.search(names, key) for names in (HEADS, SIZES, WIDTHS))
                assert not re.search(OTHERS, key)
            pairs = zip(value, base, strict=True) if isinstance(value, list) else [(value, base)]
            assert all(Fraction(new, old) in shares for new, old in pairs)
    return table["attributes"]


def calls(path):
    """What is set right in modules' code, by module: views and scales."""
    _, table, _ = read(path)
    found = table.get("calls", {})
    for views, scales in found.values():
        assert len(views) + len(scales) <= 64
        assert all(0 < axis <= after and open <= after and size > 0 for _, after, open, axis, size in views)
        assert all(number for _, number in scales)
    return found


def view_of(views, shape, sizes):
    """The sizes that a view of a tensor gets, where the code asks for these."""
    right = list(sizes)
    for before, after, open, axis, size in views:
        if (before, after) == (len(shape), len(sizes)) and open == (after - sizes.index(-1) if -1 in sizes else 0):
            right[after - axis] = size
    is_open = -1 in sizes
    return right if is_open or np.prod(right) == np.prod(shape) else list(sizes)


def adapt(small, kind, sizes, shape, left, adapters):
    """Add the next of the adapters to what is left of a weight."""
    if kind == "delta":
        small += adapters.pop(0).reshape(small.shape)
    elif kind != "base":
        *_, groups, inputs_first = sizes
        many = sides(shape, left, groups, inputs_first)[2]
        weight = turned(small, many) if inputs_first else small
        if kind == "pointwise":
            weight[(..., *centre(weight))] += adapters.pop(0)
        else:
            rank, taps, *_ = sizes
            down, up = adapters.pop(0).reshape(rank, -1, taps), adapters.pop(0)
            if kind.endswith("whole"):
                assert groups == 1
                inputs, outputs = (left[0], left[1]) if inputs_first else (left[1], left[0])
                down, up = down[:, inputs], up[:, outputs]
            add(weight, down, up, many)
        if inputs_first:
            small[...] = turned(weight, many)


def turned(weight, groups):
    """A weight of (inputs, outputs / groups, *kernel) as (outputs, inputs / groups, *kernel), or the other way."""
    return np.concatenate([part.swapaxes(0, 1) for part in np.split(weight, groups)])


def centre(weight):
    return [k // 2 for k in weight.shape[2:]]


def add(weight, down, up, groups):
    """Add ``up^T down`` to a weight of (outputs, inputs / groups, *kernel), one entry after the other."""
    outputs, inputs = weight.shape[0], weight.shape[1]
    for o in range(outputs):
        group = o // (outputs // groups)
        for i in range(inputs):
            for tap in range(down.shape[2]):
                total = sum(up[k, o] * down[k, group * inputs + i, tap] for k in range(len(up)))
                if down.shape[2] == 1:
                    weight[(o, i, *centre(weight))] += total
                else:
                    weight[(o, i, *np.unravel_index(tap, weight.shape[2:]))] += total
