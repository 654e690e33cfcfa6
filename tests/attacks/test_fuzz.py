"""Files that chance makes: only a `TaskFileError` comes out of loading and building, the base stays, memory is bounded.

Three kinds: the bytes of valid files changed anywhere; values of every kind put anywhere into the header, the
description and the table, and all else made to fit again so that the deeper checks are reached; and random bytes.
"""

import copy
import json
import math
import tempfile
import tracemalloc
import unicodedata
import zlib
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import assert_unchanged, snapshot

import spalier
from attacks.parts import KINDS, Parts, base, in_one, inside, join, pack, split, unpack, valid
from spalier.errors import TaskFileError
from spalier.tasks import SUFFIX
from spalier.tasks.numbers import bytes_of_values
from spalier.tasks.table import Table

MEGABYTES = 64
"""Of memory that Python or numpy may need for a file of at most 100 KB."""
SEEDS = st.integers(0, 2**64 - 1)
"""Each is one file; a number that fails can be tried again alone, with `hypothesis.example`."""


def fuzz(examples):
    """The same examples on each run; how long one may take is bounded by the size of the files."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=slow)


@pytest.fixture(scope="module")
def loads():
    """Load, build and apply some bytes; whatever comes out has to be a network or a `TaskFileError`."""
    net, before = base(), snapshot(base())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a{SUFFIX}"

        def attempt(data, fold=False):
            assert len(data) < 100_000
            path.write_bytes(data)
            tracemalloc.start()
            try:
                task = spalier.Task.load(path)
                built = task.build(net, fold=fold)
                task.apply_(copy.deepcopy(net))
                return built
            except TaskFileError as error:
                text = str(error)
                assert len(text) < 500, text
                assert not [c for c in text if unicodedata.category(c)[0] == "C"], ascii(text)
                return None
            finally:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak < MEGABYTES << 20
                assert path.read_bytes() == data

        yield attempt
    assert_unchanged(net, before)


# bytes


def edited(random):
    """The bytes of a valid file, flipped, put in, taken out, moved or mixed with another's, up to four times."""
    data = bytearray(valid(random.choice(KINDS)))
    for _ in range(random.randint(1, 4)):
        at, length = random.randrange(len(data) or 1), random.randint(1, 40)
        match random.choice(["flip", "set", "insert", "delete", "copy", "splice"]):
            case "flip" if data:
                data[at] ^= 1 << random.randrange(8)
            case "set":
                data[at : at + length] = random.randbytes(length)
            case "insert":
                data[at:at] = random.randbytes(length)
            case "delete":
                del data[at : at + length]
            case "copy":
                data[at:at] = data[: at + length][-length:]
            case "splice":
                data[at:] = valid(random.choice(KINDS))[at:]
    return bytes(data)


@fuzz(500)
@given(SEEDS)
def test_edited_bytes(loads, seed):
    loads(edited(Random(seed)))


@fuzz(100)
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes(loads, data, has_length):
    loads((len(data) // 2).to_bytes(8, "little") + data if has_length else data)


# structure

NUMBERS = [
    -1,
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    12,
    15,
    255,
    2**31 - 1,
    2**31,
    2**53,
    2**62,
    2**63,
    2**64,
    -(2**63),
    10**30,
    0.5,
    1e300,
]
WORDS = [
    *("", "0", "1", "2", "3", "4", "8", "weight", "bias", "running_var", "num_batches_tracked", "a", "kind"),
    *("base", "values", "integers", "low-rank", "low-rank-whole", "pointwise", "delta", "exact", "int8", "fp16"),
    *("SPLoRA", "SPDelta", "ByLayer", "FineTune", "bits", "scales", "codes", "axes", "row", "layer"),
    *("F32", "F64", "F16", "BF16", "I8", "U8", "groups", "in_channels", "stride", "num_features", "eps"),
    *("__class__", "training", "..", "\x1b[2J", "\ud800", "\u202e", "x" * 900, "😀" * 900, "é", "1", "[]"),
]


def anything(random, depth=0):
    """A value of any kind that JSON has."""
    match random.choice(["number", "number", "word", "word", "none", "bool", "list", "dict"]):
        case "number":
            return random.choice(NUMBERS)
        case "word":
            return random.choice(WORDS)
        case "bool":
            return random.random() < 0.5
        case "list" if depth < 4:
            return [anything(random, depth + 1) for _ in range(random.randrange(5))]
        case "dict" if depth < 4:
            return {random.choice(WORDS): anything(random, depth + 1) for _ in range(random.randrange(3))}
    return None


def places(value, found=None, path=()):
    """The ways to all that lies in nested data."""
    found = [] if found is None else found
    found.append(path)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        places(inner, found, (*path, key))
    return found


def mutate(random, value):
    """Put something else somewhere: a value, its neighbour, nothing, the same twice, or a new entry."""
    ways = places(value)[1:]
    if not ways:
        return
    *way, key = random.choice(ways)
    holder = value
    for step in way:
        holder = holder[step]
    match random.choice(["set", "nudge", "nudge", "drop", "double", "add", "move"]):
        case "set":
            holder[key] = anything(random)
        case "nudge" if type(holder[key]) is int:
            holder[key] += random.choice([-1, 1, 1, 2**31, -(2**31)])
        case "drop":
            del holder[key]
        case "double" if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        case "add" if isinstance(holder, list):
            holder.append(anything(random))
        case "add" | "double":
            holder[random.choice(WORDS)] = anything(random)
        case "move" if isinstance(holder, list):
            random.shuffle(holder)


@fuzz(250)
@given(SEEDS)
def test_mutated_headers(loads, seed):
    random = Random(seed)
    data = valid(random.choice(KINDS))
    header, body = split(data)
    is_packed = "packed" in header and random.random() < 0.5
    if is_packed:  # the header inside
        text, body = inside(body)
        header = json.loads(text)
    for _ in range(random.randint(1, 3)):
        mutate(random, header)
    loads(in_one(json.dumps(header).encode(), body) if is_packed else join(header, body))


@fuzz(250)
@given(SEEDS)
def test_mutated_descriptions(loads, seed):
    random = Random(seed)
    parts = unpack(valid(random.choice(KINDS)))
    del parts.description["table"]
    for _ in range(random.randint(1, 3)):
        mutate(random, parts.description)
    loads(pack(parts))


@fuzz(700)
@given(SEEDS)
def test_mutated_tables(loads, seed):
    random = Random(seed)
    parts = unpack(valid(random.choice(KINDS)))
    del parts.description["table"]
    for _ in range(random.randint(1, 3)):
        mutate(random, parts.table)
    fit(parts)
    loads(pack(parts), fold=random.random() < 0.5)


def fit(parts: Parts, net=None) -> None:
    """Make masks and numbers as many as the table asks for, and sign it, where it is sound enough for that."""
    try:
        table = Table.from_bytes(*_deflated(parts.table), parts.description["format"])
        size = table.mask_bytes
        if size < 10_000:
            raw = parts.tensors["masks"][1].ljust(size, b"\x01")[:size]
            parts.tensors["masks"] = "U8", raw
            _fit_numbers(parts, table, table.unpack(np.frombuffer(raw, np.uint8)))
        parts.sign(net)
    except (TaskFileError, KeyError, TypeError, ValueError):
        pass  # the loader has to say so too


def _deflated(table):
    text = json.dumps(table).encode()
    return zlib.compress(text), len(text)


def _fit_numbers(parts, table, masks):
    pieces = table.cut(masks)
    own = sum(len(row.keys) * math.prod(cut.shape) for row, cut in pieces if row.source == "values")
    shapes = [shape for _, cut in pieces for shape in cut.matrices]
    counts = {
        "values": own,
        "adapters": sum(shape.numel for shape in shapes if not shape.levels),
        "codes": sum(shape.bytes for shape in shapes),
        "scales": sum(shape.scales for shape in shapes),
    }
    if parts.tensors["values"][0] == "I8":
        own = [(r.path, c.shape) for r, c in pieces if r.source == "values" for _ in r.keys]
        heads = table.heads if parts.description["storage"] == "int4-head" else ()
        levels = [15 if path in heads and len(shape) > 1 else 255 for path, shape in own]
        counts["values"] = sum(bytes_of_values([shape for _, shape in own], levels))
    if parts.tensors.get("scales", ("", b""))[0] == "U8":
        counts["scales"] += 2
    if parts.description["format"] == 1 and "scales" in parts.tensors:
        counts |= {"codes": 0, "scales": sum(shape.rows for shape in shapes)}
    if "codes" in parts.description:
        parts.tensors["codes"] = "U8", zlib.decompress(parts.tensors["codes"][1])
        del parts.description["codes"]
    for name, count in counts.items():
        if count and name not in parts.tensors:
            parts.tensors[name] = ("U8", b"") if name == "codes" else ("F32", b"")
        if name in parts.tensors and count < 4000:
            filler = [0] if parts.tensors[name][0] in ("U8", "I8") else [0.5]  # a byte of zeros is always a code
            found = parts.numbers(name)
            parts.set_numbers(name, (found * (count // 20 + 1) or filler * count)[:count])
