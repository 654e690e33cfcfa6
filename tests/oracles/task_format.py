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


def network(path, base, groups=None):
    """The tensors of the network, by name, from a file and the tensors of the base.

    Weights have their outputs on the first axis; ``groups`` says how many groups a layer has, by its path.
    """
    _, table, tensors = read(path)
    masks = masks_of(table, tensors["masks"])
    shapes = []
    for *_, (kind, *sizes) in table["rows"]:
        if kind.startswith("low-rank"):
            rank, inputs, taps, outputs = sizes
            shapes += [(rank, inputs * taps), (rank, outputs)]
        elif kind == "pointwise":
            shapes.append(tuple(sizes))
    adapters, values = numbers(tensors, shapes), tensors["values"].astype(np.float64)
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
                size = int(np.prod(shape))
                whole, sizes = np.array(sizes[:size], np.float64).reshape(shape), sizes[size:]
            else:
                whole = found[name]
            small = whole[np.ix_(*left)] if left else whole
            if kind in ("low-rank", "low-rank-whole"):
                rank, inputs, taps, outputs = sizes
                down, adapters = (
                    adapters[: rank * inputs * taps].reshape(rank, inputs, taps),
                    adapters[rank * inputs * taps :],
                )
                up, adapters = adapters[: rank * outputs].reshape(rank, outputs), adapters[rank * outputs :]
                many = (groups or {}).get(path, 1)
                many = len(
                    {output // (shape[0] // many) for output in left[0]}
                )  # groups without outputs are gone
                if kind == "low-rank-whole":
                    assert many == 1
                    down, up = down[:, left[1]], up[:, left[0]]
                add(small, down, up, many)
            elif kind == "pointwise":
                matrix, adapters = (
                    adapters[: sizes[0] * sizes[1]].reshape(sizes),
                    adapters[sizes[0] * sizes[1] :],
                )
                small[(..., *centre(small))] += matrix
            found[name] = small
    assert not len(adapters)
    assert not len(values)
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
