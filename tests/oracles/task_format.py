"""A second reader of task files, written from docs/task-format.md alone: slow, obvious, in float64."""

import json
import struct
import zlib

import numpy as np

DTYPES = {"U8": np.uint8, "I8": np.int8, "F16": np.float16, "F32": np.float32, "F64": np.float64}


def read(path):
    """The description, the layer table, and the tensors."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    description = json.loads(header.pop("__metadata__")["spalier.task"])
    data = raw[8 + length :]
    tensors = {}
    for name, spec in header.items():
        begin, end = spec["data_offsets"]
        if spec["dtype"] == "BF16":
            half = np.frombuffer(data[begin:end], np.uint16).astype(np.uint32) << 16
            tensors[name] = half.view(np.float32)
        else:
            tensors[name] = np.frombuffer(data[begin:end], DTYPES[spec["dtype"]])
    return description, json.loads(zlib.decompress(tensors["table"].tobytes())), tensors


def masks_of(table, packed):
    sizes = [units for _, units in table["streams"]]
    sizes += [sizes[stream] for _, stream, _, _ in table["writers"]]
    masks, start = [], 0
    for size in sizes:
        masks.append([bool(packed[start + i // 8] >> (i % 8) & 1) for i in range(size)])
        start += -(-size // 8)
    return masks


def stays(axis, size, masks):
    """The indices of an axis that stay."""
    left = []
    for i in range(size):
        keep = True
        for on in axis:
            if isinstance(on, int):
                keep = keep and masks[on][i]
            elif len(on) == 4:
                mask, units, run, _ = on
                keep = keep and masks[mask][i // run % units]
            else:
                unit = on[1][i]
                keep = keep and (unit < 0 or masks[on[0]][unit])
        if keep:
            left.append(i)
    return left


def numbers(tensors, adapters):
    """All numbers of the adapters, given how many rows of which length they have."""
    flat = tensors["adapters"].astype(np.float32 if tensors["adapters"].dtype == np.int8 else np.float64)
    if tensors["adapters"].dtype == np.int8:
        place = 0
        for row, length in enumerate(length for rows, length in adapters for _ in range(rows)):
            flat[place : place + length] *= tensors["scales"][row]
            place += length
    return flat.astype(np.float64)


def sides(shape, left, groups, inputs_first):
    """How many inputs and outputs a weight has left, and how many groups."""
    many = len({index // (shape[0] // groups) for index in left[0]})  # groups that have nothing left are gone
    outer, inner = len(left[0]), len(left[1]) * many
    return (outer, inner, many) if inputs_first else (inner, outer, many)


def matrices(rows, masks):
    """The matrices of all adapters: how many rows each has, and how long these are."""
    found = []
    for _, _, shape, axes, (kind, *sizes) in rows:
        left = [stays(axis, size, masks) for axis, size in zip(axes, shape, strict=True)]
        if kind.startswith("low-rank"):
            rank, taps, groups, inputs_first = sizes
            every = [range(size) for size in shape]
            inputs, outputs, _ = sides(shape, every if kind.endswith("whole") else left, groups, inputs_first)
            found += [(rank, inputs * taps), (rank, outputs)]
        elif kind == "pointwise":
            inputs, outputs, groups = sides(shape, left, *sizes)
            found.append((outputs, inputs // groups))
    return found


def network(path, base):
    """The tensors of the network, by name, from a file and the tensors of the base; outputs on the first axis."""
    description, table, tensors = read(path)
    masks = masks_of(table, tensors["masks"])
    shapes = matrices(table["rows"], masks)
    adapters, values = numbers(tensors, shapes), tensors["values"].astype(np.float64)
    integers = [number for number, times in description.get("integers", []) for _ in range(times)]
    shapes = iter(shapes)

    def take():
        nonlocal adapters
        rows, length = next(shapes)
        made, adapters = adapters[: rows * length].reshape(rows, length), adapters[rows * length :]
        return made

    found = {name: tensor.astype(np.float64) for name, tensor in base.items()}
    for path, keys, shape, axes, (kind, *sizes) in table["rows"]:
        left = [stays(axis, size, masks) for axis, size in zip(axes, shape, strict=True)]
        count = int(np.prod([len(index) for index in left]))
        for key in keys:
            name = f"{path}.{key}" if path else key
            if kind == "values":
                found[name], values = values[:count].reshape([len(i) for i in left]), values[count:]
                continue
            if kind == "integers":
                found[name], integers = (
                    np.array(integers[:count], np.float64).reshape(shape),
                    integers[count:],
                )
                continue
            small = found[name][np.ix_(*left)]
            if kind.startswith("low-rank"):
                rank, taps, groups, inputs_first = sizes
                assert not inputs_first
                down, up = take().reshape(rank, -1, taps), take()
                if kind.endswith("whole"):
                    assert groups == 1
                    down, up = down[:, left[1]], up[:, left[0]]
                add(small, down, up, sides(shape, left, groups, inputs_first)[2])
            elif kind == "pointwise":
                small[(..., *centre(small))] += take()
            found[name] = small
    assert not len(adapters)
    assert not len(values)
    assert not integers
    return found


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
