"""Hostile task files with codes, references to axes, and runs of units."""

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

from attacks.files import Case, _all, _longer, _on, _row, _say, _with_number, nested
from attacks.parts import Parts, assemble, changed, in_one, inside, join, split, unpack, valid
from spalier.tasks.format import deflate

CODED: dict[str, Case] = {}


def _change(name: str, code: str, change: Callable[[Parts], object], kind: str, **how: Any) -> None:
    assert name not in CODED, name
    CODED[name] = Case(lambda: changed(change, kind, **how), code)


def _source(row: int, place: int, value: object) -> Callable[[Parts], object]:
    return lambda parts: parts.table["rows"][row][4].__setitem__(place, value)


def _codes(change: Callable[[bytes], bytes]) -> Callable[[Parts], object]:
    return lambda parts: parts.tensors.update(codes=("U8", change(parts.tensors["codes"][1])))


# levels and digits


def _levels() -> None:
    for levels in (0, 1, 4, 5, 16, 254, 256, -2, 2**31, True, 2.0, "2", None, [2], 10**400):
        _change(f"a delta of {str(levels)[:9]!r} levels", "table", _source(0, 1, levels), "delta")
    for levels in (1, 4, 16, 256, -2, False, 0.0, "7", None, [7]):
        _change(f"factors of {levels!r} levels", "table", _source(4, 3, levels), "by layer")
    for by_row in (2, -1, True, None, "1"):
        _change(f"a delta with by_row {by_row!r}", "table", _source(0, 2, by_row), "delta")
    for levels in (3, 7, 15, 255):
        _change(f"a delta of {levels} levels that lies", "sizes", _source(0, 1, levels), "delta")
    _change("one scale for all that lies", "sizes", _source(0, 2, 0), "delta")
    _change("a scale for each row that lies", "sizes", _source(0, 2, 1), "deflated")
    _change("a delta of other groups", "sizes", _source(0, 3, 2), "delta", signed=True)
    _change("a delta the other way round", "sizes", _source(0, 4, 1), "delta", signed=True)
    _change("a delta of three groups", "table", _source(0, 3, 3), "delta")
    _change("a delta with more", "table", _row(0, 4, ["delta", 2, 1, 1, 0, 0]), "delta")
    _change("a delta with less", "table", _row(0, 4, ["delta", 2, 1, 1]), "delta")
    _change("a delta for two tensors", "table", _row(0, 1, ["weight", "bias"]), "delta")
    _change("a delta on a norm", "table", lambda p: _norm(p), "delta")
    _change("a rank of 2^31-1 in codes", "sizes", _source(4, 1, 2**31 - 1), "by layer")
    _change("2^31-1 taps in codes", "sizes", _source(4, 2, 2**31 - 1), "by layer")


def _norm(parts: Parts) -> None:
    row = next(row for row in parts.table["rows"] if row[4] == ["values"] and len(row[2]) == 1)
    row[1], row[4] = row[1][:1], ["delta", 2, 1, 1, 0]


def _digits() -> None:
    # "by layer" has 108 codes of three levels, five in a byte, then ten and twenty of fifteen, two in a byte
    _change("a digit beyond three levels", "codes", _codes(lambda raw: b"\xf3" + raw[1:]), "by layer")
    _change("a digit beyond fifteen levels", "codes", _codes(lambda raw: raw[:-1] + b"\xe1"), "by layer")
    _change("digits behind the last code", "codes", _codes(lambda raw: raw[:21] + b"\x51" + raw[22:]), "by layer")
    _change("signs behind the last code", "codes", _codes(lambda raw: raw[:13] + b"\xff" + raw[14:]), "delta")
    _change("a byte beyond 255 levels", "codes", _codes(lambda raw: b"\xff" + raw[1:]), "int8")
    for kind in ("delta", "by layer"):
        for by in (1, -1):
            _change(f"codes longer by {by}, {kind}", "sizes", _longer("codes", by), kind)
            _change(f"scales longer by {by}, {kind}", "sizes", _longer("scales", by), kind)
        _change(f"no codes, {kind}", "sizes", lambda parts: parts.tensors.pop("codes"), kind)
        _change(f"no scales, {kind}", "sizes", lambda parts: parts.tensors.pop("scales"), kind)
        for dtype in ("F16", "BF16", "F32", "F64"):
            for number in (float("nan"), float("inf")):
                change = _with_number("scales", dtype, number)
                _change(f"{number} in scales as {dtype}, {kind}", "non-finite", change, kind)
        _change(f"scales of 1e200, {kind}", "overflow", _all("scales", 1e200, "F64"), kind)
        for dtype in ("U8", "I8"):
            ones = lambda parts, d=dtype: parts.set_numbers("scales", [1] * len(parts.numbers("scales")), d)  # noqa: E731
            _change(f"scales as {dtype}, {kind}", "dtype", ones, kind)
    _change("scales beyond floats", "overflow", _all("scales", 3e38, "F32"), "by layer")
    _change("codes as I8", "dtype", lambda p: p.tensors.update(codes=("I8", p.tensors["codes"][1])), "delta")
    _change("codes without need", "sizes", lambda p: p.tensors.update(codes=("U8", b"\0")), "exact")
    _change("bytes among the numbers", "dtype", lambda p: p.tensors.update(adapters=("I8", b"")), "delta")
    _change("numbers without need", "sizes", lambda p: p.set_numbers("adapters", [1.0], "F32"), "delta")


def _of_format_1() -> None:
    _change("codes in format 1", "tensors", lambda p: p.tensors.update(codes=("U8", b"")), "old")
    _change("codes of bytes in format 1", "tensors", lambda p: p.tensors.update(codes=("U8", b"\1")), "old int8")
    _change("deflated codes in format 1", "metadata", _say(codes=1), "old")
    _change("axes in format 1", "table", lambda p: p.table.update(axes=[]), "old")
    _change("a number for an axis in format 1", "table", _row(1, 3, [0]), "old")
    _change("runs in format 1", "table", _on([[0, [[0, 0, 8, 1]]]]), "old")


# codes that are deflated


def _deflated() -> None:
    size = unpack(valid("deflated")).description["codes"]
    for name, length in {"0": 0, "negative": -1, "text": str(size), "bool": True, "float": float(size)}.items():
        _change(f"codes said to have {name}", "sizes", _say(codes=length), "deflated")
    _change("codes said to have one more", "sizes", _say(codes=size + 1), "deflated")
    _change("codes said to have one less", "sizes", _say(codes=size - 1), "deflated")
    _change("codes said to have 2^62", "sizes", _say(codes=2**62), "deflated")
    _change("codes that are not said to be deflated", "sizes", lambda p: p.description.pop("codes"), "deflated")
    _change("codes that are said to be deflated", "codes", _said, "delta")
    _change("numbers that are said to be deflated", "sizes", _say(codes=0), "exact")
    makes: dict[str, Callable[[bytes], bytes]] = {
        "inflate to more than is said": lambda raw: zlib.compress(zlib.decompress(raw) + bytes(1 << 20), 9),
        "inflate to one more": lambda raw: zlib.compress(zlib.decompress(raw) + b"y", 9),
        "inflate to one less": lambda raw: zlib.compress(zlib.decompress(raw)[:-1], 9),
        "are cut short": lambda raw: raw[:-3],
        "have more behind them": lambda raw: raw + b"x",
        "have another behind them": lambda raw: raw + raw,
        "are garbage": lambda raw: b"\x78\xda" + bytes(range(20)),
        "have a wrong checksum": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
        "are deflated twice": lambda raw: zlib.compress(raw),
        "are gzip": lambda raw: b"\x1f\x8b" + raw[2:],
        "hold digits beyond three levels": lambda raw: zlib.compress(b"\xff" + zlib.decompress(raw)[1:], 9),
    }
    for name, make in makes.items():
        _change(f"codes that {name}", "codes", _codes(make), "deflated")
    _change("no bytes that are said to be deflated", "sizes", _codes(lambda raw: b""), "deflated")
    CODED["codes that inflate to 256 MiB"] = Case(_bomb, "sizes")


def _said(parts: Parts) -> None:
    parts.description["codes"] = len(parts.tensors["codes"][1])


def _bomb() -> bytes:
    """All that the table says fits: a rank of millions, of codes that are all alike."""
    parts = unpack(valid("by layer"))
    rank = 2**30 // 14 * 2
    parts.table["rows"][4][4][1] = rank
    parts.table["rows"][4][4][3] = 2
    deflater = zlib.compressobj(9)
    data = b"".join(deflater.compress(bytes(1 << 24)) for _ in range(64)) + deflater.flush()
    text = json.dumps(parts.table).encode()
    parts.description |= {"table": len(text), "codes": rank * 14 // 8 + 22}
    raw = {**parts.tensors, "codes": ("U8", data), "table": ("U8", zlib.compress(text))}
    return assemble(json.dumps(parts.description), raw)


# files that are packed, with scales in bytes


def _front(name: str, raw: bytes) -> Callable[[Parts], object]:
    """The first bytes of a tensor are these."""

    def change(parts: Parts) -> None:
        dtype, before = parts.tensors[name]
        parts.tensors[name] = dtype, raw + before[len(raw) :]

    return change


def _scales_in_bytes() -> None:
    most = struct.pack("<h", 2**15 - 1)
    _change("scales of values beyond floats", "non-finite", _front("values", most), "small")
    roots = struct.pack("<h", 100 * 8) + bytes([129] * 10)  # 2^100 is a number, and its square is not
    _change("roots beyond floats", "non-finite", _front("values", roots), "small")
    _change("scales in bytes beyond floats", "non-finite", _front("scales", most), "small")
    for by in (1, -1):
        _change(f"scales in bytes longer by {by}", "sizes", _longer("scales", by), "small")
        _change(f"values in bytes longer by {by}", "sizes", _longer("values", by), "small")
    for count in (0, 1, 2):
        few = lambda parts, n=count: parts.tensors.update(scales=("U8", bytes(n)))  # noqa: E731
        _change(f"scales of {count} bytes", "sizes", few, "small")
    _change("no scales in bytes", "sizes", lambda parts: parts.tensors.pop("scales"), "small")
    _change("values of no bytes", "sizes", lambda parts: parts.tensors.update(values=("I8", b"")), "small")
    _change("scales in bytes of another storage", "dtype", _all("scales", 1, "U8"), "int8")
    _change("scales in bytes of format 1", "dtype", _all("scales", 1, "U8"), "old int8")


def _pack(name: str, code: str, make: Callable[[bytes, bytes], bytes]) -> None:
    """A case that is made of the text of the header inside of a packed file, and of what is behind it."""
    CODED[f"packed: {name}"] = Case(lambda: make(*inside(split(valid("small"))[1])), code)


def _packed() -> None:
    texts: dict[str, Callable[[bytes], bytes]] = {
        "a key twice": lambda t: t[:-1] + b',"masks":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        "blanks before the brace": lambda t: b" " + t,
        "garbage behind the brace": lambda t: t + b"{}",
        "no UTF-8": lambda t: t.replace(b"masks", b"mask\xff"),
        "a list": lambda t: b"[]",
        "no metadata": lambda t: b'{"masks"' + t.partition(b'"masks"')[2],
        "packed once more": lambda t: b'{"__metadata__":{"spalier.task":"packed"}}',
        "nothing": lambda t: b"",
        "nested deep": lambda t: t[:-1] + b',"x":' + nested(100_000).encode() + b"}",
    }
    for name, change in texts.items():
        code = "metadata" if name == "packed once more" else "header"
        _pack(f"{name} in the header", code, lambda t, body, c=change: in_one(c(t), body))
    for name, lengths in {
        "2^32-1 and 2^32-1": (2**32 - 1,) * 2,
        "2^32-1": (2**32 - 1, 9),
        "2^20+1": (9, 2**20 + 1),
    }.items():
        raw = struct.pack("<II", *lengths)
        _pack(f"a header of {name} bytes", "header-length", lambda t, body, r=raw: in_one(t, body, lengths=r))
    for by in (1, -1):
        longer = lambda t, body, n=by: in_one(t, body, lengths=struct.pack("<II", len(deflate(t)), len(t) + n))  # noqa: E731
        _pack(f"a header longer by {by}", "header", longer)
        shorter = lambda t, body, n=by: in_one(t, body, lengths=struct.pack("<II", len(deflate(t)) + n, len(t)))  # noqa: E731
        _pack(f"a deflated header longer by {by}", "header", shorter)
    _pack("a header that is not deflated", "header", lambda t, body: in_one(t, body, raw=t))
    _pack(
        "a header that inflates to 64 MiB", "header", lambda t, body: in_one(t, body, raw=zlib.compress(bytes(1 << 26)))
    )
    other = zlib.compressobj(zdict=b'{"__metadata__"')
    strange = other.compress(b"{}") + other.flush()
    _pack("a header with another dictionary", "header", lambda t, body: in_one(b"{}", body, raw=strange))
    _pack("bytes behind", "ranges", lambda t, body: in_one(t, body + b"\0"))
    _pack("bytes too few", "truncated", lambda t, body: in_one(t, body[:-1]))
    _pack("bytes behind it all", "ranges", lambda t, body: valid("small") + b"\0")
    _pack("cut short", "truncated", lambda t, body: valid("small")[:-1])
    outer = {"__metadata__": {"spalier.task": "packed"}}
    spec = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    _pack("nothing in it", "ranges", lambda t, body: join(outer, body))
    _pack("four bytes", "truncated", lambda t, body: join({**outer, "packed": spec}, bytes(4)))
    _pack("another dtype", "dtype", lambda t, body: join({**outer, "packed": {**spec, "dtype": "I8"}}, bytes(4)))
    _pack("another tensor", "tensors", lambda t, body: join({**outer, "masks": spec}, bytes(4)))
    _pack(
        "a tensor of that name in a plain file",
        "tensors",
        lambda t, body: join({**json.loads(t), "packed": spec}, body),
    )
    CODED["a table of format 1 with a dictionary"] = Case(_old_with_words, "table")


def _old_with_words() -> bytes:
    parts = unpack(valid("old"))
    text = json.dumps(parts.table).encode()
    said = json.dumps({**parts.description, "table": len(text)})
    return assemble(said, {**parts.tensors, "table": ("U8", deflate(text))})


# axes and runs


def _axes() -> None:
    for ref in (-1, 99, 2**31, 10**400, True, 1.0, "1", None, [1], [], {}):
        _change(f"a reference to axis {str(ref)[:9]!r}", "table", _row(1, 3, [ref]), "exact")
    _change("an axis that no tensor has", "table", lambda p: p.table["axes"].append([0]), "exact")
    _change("an empty axis that no tensor has", "table", lambda p: p.table["axes"].append([]), "exact")
    _change("an axis that is a number", "table", lambda p: p.table["axes"].append(0), "exact")
    _change("an axis of another size", "mask", _row(1, 3, [2]), "exact")


def _runs() -> None:
    fits = [0, 0, 8, 1]
    for name, runs in {
        "overlap": [[0, 0, 4, 1], [3, 4, 4, 1]],
        "go backwards": [[4, 4, 4, 1], [0, 0, 4, 1]],
        "are twice": [fits, fits],
        "leave the axis": [[1, 0, 8, 1]],
        "begin behind the axis": [[8, 0, 1, 1]],
        "repeat beyond the axis": [[0, 0, 8, 2]],
        "go beyond the units": [[0, 1, 8, 1]],
        "begin behind the units": [[0, 8, 1, 1]],
        "have a huge start": [[2**31, 0, 1, 1]],
        "have a huge unit": [[0, 2**31 - 1, 1, 1]],
        "have a huge count": [[0, 0, 2**31 - 1, 1]],
        "repeat for ever": [[0, 0, 1, 2**31 - 1]],
    }.items():
        _change(f"runs that {name}", "mask", _on([[0, runs]]), "exact")
    for runs in (
        [[0, 0, 0, 1]],
        [[0, 0, 1, 0]],
        [[-1, 0, 1, 1]],
        [[0, -1, 1, 1]],
        [[0, 0, 1]],
        [[0, 0, 1, 1, 1]],
        [[0, 0, True, 1]],
        [[0, 0, 1.0, 1]],
        [[0, 0, 2**31, 1]],
        [[2**31 + 1, 0, 1, 1]],
        [fits, 0],
        [fits, [fits]],
        [[]],
        [[[]]],
    ):
        _change(f"runs {runs}", "table", _on([[0, runs]]), "exact")
    for mask in (-1, 2, True, None, "0", 0.0):
        _change(f"runs of mask {mask!r}", "table", _on([[mask, [fits]]]), "exact")
    _change("runs and the same mask", "table", _on([[0, [fits]], 0]), "exact")
    _change("runs of 2^31-1 indices", "table", lambda p: _add_runs(p, 2**31 - 1), "exact")
    _change("a thousand axes of runs", "table", lambda p: [_add_runs(p, 2**20 + n) for n in range(1000)], "exact")
    _change("one axis of runs in a thousand sizes", "table", _many_sizes, "exact")
    _change("many runs", "table", _many_runs, "exact")


def _add_runs(parts: Parts, size: int) -> None:
    """A tensor of one axis, with a run of one unit at its front."""
    parts.table["axes"].append([[0, [[0, 0, 1, 1]]]])
    _add_tensor(parts, size, len(parts.table["axes"]))


def _add_tensor(parts: Parts, size: int, axis: int) -> None:
    parts.table["rows"].append(["0", [f"k{len(parts.table['rows'])}"], [size], [axis], ["base"]])


def _many_sizes(parts: Parts) -> None:
    _add_runs(parts, 2**16)
    for extra in range(1, 1000):
        _add_tensor(parts, 2**16 + extra, len(parts.table["axes"]))


def _many_runs(parts: Parts) -> None:
    """Runs of one index, on as many masks as may be: each counts."""
    runs = [[n, 0, 1, 1] for n in range(100_000)]
    for extra in range(50):
        if not extra:
            parts.table["axes"].append([[0, runs]])
        _add_tensor(parts, 100_000 + extra, len(parts.table["axes"]))


for _group in (_levels, _digits, _of_format_1, _deflated, _scales_in_bytes, _packed, _axes, _runs):
    _group()
