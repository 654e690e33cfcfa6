"""Hostile task files: for each case what makes its bytes, and the code that the loader has to answer with."""

import gzip
import io
import json
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attacks.parts import Parts, assemble, changed, join, pack, split, unpack, valid

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Case:
    """A hostile file, and what has to come of it when it is loaded and built."""

    make: Callable[[], bytes]
    code: str
    fold: bool = False


CASES: dict[str, Case] = {}


def _case(name: str, code: str, make: Callable[[], bytes], *, fold: bool = False) -> None:
    assert name not in CASES, name
    CASES[name] = Case(make, code, fold)


def _change(name: str, code: str, change: Callable[[Parts], object], storage: str = "exact", **how: Any) -> None:
    fold = how.pop("fold", False)
    _case(name, code, lambda: changed(change, storage, **how), fold=fold)


# small helpers


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def _header(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A valid file whose header was changed."""
    header, body = split(valid())
    change(header)
    return join(header, body)


def _header_text(change: Callable[[str], str | bytes]) -> bytes:
    """A valid file whose header's text was changed."""
    header, body = split(valid())
    return join(change(json.dumps(header)), body)


def _described(change: Callable[[str], str]) -> bytes:
    """A valid file whose description's text was changed."""
    parts = unpack(valid())
    return pack(parts, description=change(json.dumps(parts.description)))


def _tabled(change: Callable[[str], str | bytes]) -> bytes:
    """A valid file whose layer table's text was changed."""
    parts = unpack(valid())
    del parts.description["table"]
    return pack(parts, table=change(json.dumps(parts.table, separators=(",", ":"))))


def _raw_table(raw: bytes, length: object) -> bytes:
    """A valid file with these bytes as its deflated table."""
    parts = unpack(valid())
    text = json.dumps({**parts.description, "table": length})
    return assemble(text, {**parts.tensors, "table": ("U8", raw)})


def _set(name: str, key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda header: header[name].update({key: value})


def _say(**fields: object) -> Callable[[Parts], object]:
    return lambda parts: parts.description.update(fields)


def _row(number: int, place: int, value: object) -> Callable[[Parts], object]:
    return lambda parts: parts.table["rows"][number].__setitem__(place, value)


def _tell(**fields: object) -> Callable[[Parts], object]:
    return lambda parts: parts.table.update(fields)


def _with_number(name: str, dtype: str, number: float) -> Callable[[Parts], object]:
    """The last number of a tensor, and its dtype, changed."""
    return lambda parts: parts.set_numbers(name, [*parts.numbers(name)[:-1], number], dtype)


def _longer(name: str, by: int) -> Callable[[Parts], object]:
    def change(parts: Parts) -> None:
        numbers = parts.numbers(name)
        parts.set_numbers(name, numbers[:by] if by < 0 else numbers + numbers[:by])

    return change


def _masks(change: Callable[[bytes], bytes]) -> Callable[[Parts], object]:
    return lambda parts: parts.tensors.update(masks=("U8", change(parts.tensors["masks"][1])))


# the container


def _lengths() -> None:
    for name, length in {"2^60": 2**60, "2^64-1": 2**64 - 1, "0": 0, "1": 1, "2^20+1": 2**20 + 1}.items():
        _case(f"header length {name}", "header-length", lambda n=length: struct.pack("<Q", n) + valid()[8:])
    _case("header beyond the file", "truncated", lambda: struct.pack("<Q", len(valid())) + valid()[8:])
    _case("header one short", "header", lambda: struct.pack("<Q", _header_length() - 9) + valid()[8:])
    _case("empty", "truncated", lambda: b"")
    _case("only a length", "truncated", lambda: valid()[:8])


def _header_length() -> int:
    return struct.unpack("<Q", valid()[:8])[0]


def _shapes() -> None:
    bad = {
        "[0, 2^62]": [0, 2**62],
        "[]": [],
        "negative": [-1],
        "bool": [True],
        "float": [1.0],
        "text": ["1"],
        "2^63": [2**63],
        "null": None,
        "number": 5,
        "dict": {},
        "list": [[1]],
    }
    for name, shape in bad.items():
        _case(f"shape {name}", "header", lambda s=shape: _header(_set("values", "shape", s)))
        if name != "[0, 2^62]":
            _case(f"offsets {name}", "header", lambda s=shape: _header(_set("values", "data_offsets", s)))
    _case("offsets [0, 2^62]", "ranges", lambda: _header(_set("values", "data_offsets", [0, 2**62])))
    _case("shape 2^62", "ranges", lambda: _header(_set("values", "shape", [2**62])))
    _case("shape 2^63-1", "ranges", lambda: _header(_set("values", "shape", [2**63 - 1])))


def _headers() -> None:
    twice = ',"masks":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    texts: dict[str, Callable[[str], str | bytes]] = {
        "a key twice": lambda t: t[:-1] + twice,
        "metadata twice": lambda t: t[:-1] + ',"__metadata__":{}}',
        "a key of a tensor twice": lambda t: t.replace('"dtype"', '"dtype":"U8","dtype"', 1),
        "blanks before the brace": lambda t: "  " + t,
        "a line break before the brace": lambda t: "\n" + t,
        "a byte order mark": lambda t: "\ufeff" + t,
        "garbage behind the brace": lambda t: t + "{}",
        "zeros behind the brace": lambda t: t + "\0\0",
        "NaN": lambda t: t.replace('"shape": [', '"shape": [NaN,', 1),
        "Infinity": lambda t: t.replace('"shape": [', '"shape": [-Infinity,', 1),
        "deep": lambda t: t[:-1] + ',"x":' + nested(100_000) + "}",
        "5000 digits": lambda t: t.replace('"shape": [', '"shape": [' + "9" * 5000 + ",", 1),
        "no UTF-8": lambda t: t.encode().replace(b"masks", b"mask\xff"),
        "a surrogate as bytes": lambda t: t.encode().replace(b"masks", b"mask\xed\xa0\x80"),
        "UTF-16": lambda t: t.encode("utf-16"),
        "a comment": lambda t: "{/* */" + t[1:],
        "single quotes": lambda t: t.replace('"', "'"),
        "only a list": lambda t: "[]",
        "only blanks": lambda t: "   ",
        "only a brace": lambda t: "{ ",
        "nothing in it": lambda t: "{}",
    }
    for name, change in texts.items():
        _case(f"header: {name}", "header", lambda c=change: _header_text(c))
    whole: dict[str, Callable[[dict[str, Any]], object]] = {
        "no metadata": lambda h: h.pop("__metadata__"),
        "more metadata": lambda h: h["__metadata__"].update(more="x"),
        "other metadata": lambda h: h.update(__metadata__={"format": "pt"}),
        "metadata a list": lambda h: h.update(__metadata__=[]),
        "metadata a number": lambda h: h["__metadata__"].update({"spalier.task": 1}),
        "a tensor a list": lambda h: h.update(masks=[]),
        "a tensor null": lambda h: h.update(masks=None),
        "a tensor without shape": lambda h: h["masks"].pop("shape"),
        "a tensor with more": lambda h: h["masks"].update(more=1),
    }
    for name, change in whole.items():
        _case(f"header: {name}", "header", lambda c=change: _header(c))


def _names_of_tensors() -> None:
    spec = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    for name in (
        "weights",
        "Table",
        "masks ",
        "",
        "../masks",
        "\ud800",
        "\x1b[2J",
        "x" * 10_000,
        "__class__",
    ):
        _case(f"tensor named {name[:9]!a}", "tensors", lambda n=name: _header(lambda h: h.update({n: spec})))
    many = {f"{n:x}": 0 for n in range(80_000)}
    _case("80 thousand tensors", "tensors", lambda: _header(lambda h: h.update(many)))
    _case(
        "200 thousand tensors",
        "header-length",
        lambda: _header(lambda h: h.update({f"t{n}": spec for n in range(200_000)})),
    )
    for name in ("masks", "adapters", "values"):
        _change(f"no {name}", "tensors", lambda parts, n=name: parts.tensors.pop(n))
    _case("no table", "tensors", lambda: _without_table())
    _change("no scales", "sizes", lambda parts: parts.tensors.pop("scales"), "int8")


def _without_table() -> bytes:
    parts = unpack(valid())
    return assemble(json.dumps(parts.description), parts.tensors)


def _ranges() -> None:
    def shifted(name: str, by: int) -> Callable[[dict[str, Any]], object]:
        def change(header: dict[str, Any]) -> None:
            header[name]["data_offsets"] = [n + by for n in header[name]["data_offsets"]]

        return change

    def swapped(header: dict[str, Any]) -> None:
        header["values"]["data_offsets"].reverse()

    def same(header: dict[str, Any]) -> None:
        header["table"] = header["masks"]

    _case("bytes behind the tensors", "ranges", lambda: valid() + b"\0")
    _case("a megabyte behind the tensors", "ranges", lambda: valid() + bytes(1 << 20))
    _case("a range backwards", "ranges", lambda: _header(swapped))
    _case("ranges overlap", "ranges", lambda: _header(shifted("values", -4)))
    _case("a gap", "ranges", lambda: _header(shifted("values", 4)))
    _case("one range twice", "ranges", lambda: _header(same))
    _case("a range beyond the file", "truncated", lambda: _header(shifted("masks", 0))[:-1])
    _case("an empty range inside", "ranges", _empty_inside)
    _case("2^62 bytes", "truncated", lambda: _lying(2**62))
    _case("2^40 bytes", "truncated", lambda: _lying(2**40))


def _empty_inside() -> bytes:
    return _header(lambda h: h.update(scales={"dtype": "F32", "shape": [0], "data_offsets": [2, 2]}))


def _lying(size: int) -> bytes:
    """The last tensor is said to have so many bytes, and everything else fits."""
    header, body = split(valid())
    last = max(header, key=lambda n: header[n].get("data_offsets", [0, -1])[1])
    begin = header[last]["data_offsets"][0]
    header[last] |= {"shape": [size - begin], "data_offsets": [begin, size]}
    return join(header, body)


def _dtypes() -> None:
    wrong = {
        "table": ("I8", "F32"),
        "masks": ("I8", "BOOL", "F16"),
        "adapters": ("U8", "I32", "F8_E4M3"),
        "values": ("U8", "I64", "f32"),
    }
    for name, dtypes in wrong.items():
        for dtype in (*dtypes, "", 1, None, True, ["F32"], {"F32": 1}, "\x1b" * 5):
            _case(f"{name} as {dtype!a}", "dtype", lambda n=name, d=dtype: _header(_set(n, "dtype", d)))
    for dtype in ("F16", "F64", "I8"):
        _change(
            f"scales as {dtype} in format 1",
            "dtype",
            lambda parts, d=dtype: parts.set_numbers("scales", [1] * len(parts.numbers("scales")), d),
            "old int8",
        )


# other formats


class Marker:
    """Unpickling it makes a file; that file must never appear."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def pickled(path: Path, protocol: int) -> bytes:
    return pickle.dumps(Marker(path), protocol)


def saved(path: Path, *, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(Marker(path), buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def tarred(mode: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        archive.addfile(tarfile.TarInfo("../../x"), io.BytesIO())
    return buffer.getvalue()


def _foreign() -> None:
    _case("gzip", "foreign", lambda: gzip.compress(valid()))
    _case("tar", "header-length", lambda: tarred("w"))
    _case("tar.gz", "foreign", lambda: tarred("w:gz"))
    _case("JSON", "foreign", lambda: b'{"a": 1}')
    _case("Git LFS", "foreign", lambda: b"version https://git-lfs.github.com/spec/v1\n")
    _case("HTML", "header-length", lambda: b"<!DOCTYPE html><html></html>")
    _case("zeros", "header-length", lambda: bytes(4096))


# the description


def _versions() -> None:
    for name, version in {
        "3": 3,
        "0": 0,
        "text": "1",
        "bool": True,
        "1.0": 1.0,
        "null": None,
        "list": [1],
        "long": "9" * 10_000,
        "escape": "\x1b[2J",
    }.items():
        _change(f"format {name}", "version", _say(format=version))
    _change("format 1 with the table of format 2", "table", _say(format=1))
    _change("format 2 with the table of format 1", "table", _say(format=2), "old")
    _change("no format", "version", lambda parts: parts.description.pop("format"))


def _descriptions() -> None:
    texts: dict[str, Callable[[str], str]] = {
        "a key twice": lambda t: t[:-1] + ',"name":"b"}',
        "an inner key twice": lambda t: t.replace('"kind"', '"kind":"LoRA","kind"'),
        "blanks before the brace": lambda t: " " + t,
        "garbage behind the brace": lambda t: t + "x",
        "NaN": lambda t: t.replace("0.5", "NaN"),
        "Infinity": lambda t: t.replace("0.5", "Infinity"),
        "5000 digits": lambda t: t.replace("0.5", "5" * 5000),
        "deep": lambda t: t.replace("0.5", nested(100_000)),
        "a surrogate": lambda t: t.replace("0.5", '"\ud800"'),
        "a list": lambda t: "[]",
        "nothing": lambda t: "",
    }
    for name, change in texts.items():
        _case(f"description: {name}", "metadata", lambda c=change: _described(c))
    _case(
        "description: a number beyond floats",
        "metadata",
        lambda: _described(lambda t: t.replace("0.5", "1e999")),
    )
    fields: dict[str, dict[str, object]] = {
        "an unknown field": {"more": 1},
        "an unknown field with an escape": {"\x1b[2J": 1},
        "adapter a list": {"adapter": []},
        "adapter without kind": {"adapter": {}},
        "adapter kind a list": {"adapter": {"kind": []}},
        "base a text": {"base": "x"},
        "base without values": {"base": {"architecture": "0" * 64}},
        "base of other digits": {"base": {"architecture": "0" * 64, "values": "G" * 64}},
        "base short": {"base": {"architecture": "0" * 63, "values": "0" * 64}},
        "base of lists": {"base": {"architecture": [0] * 64, "values": ["0"] * 64}},
        "density a list": {"density": []},
        "density of nothing": {"density": {"weights": [0, 0]}},
        "density above one": {"density": {"weights": [2, 1]}},
        "density of bools": {"density": {"weights": [True, True]}},
        "density unknown": {"density": {"x": [1, 2]}},
        "density of three": {"density": {"weights": [1, 2, 3]}},
        "learned negative": {"learned": -1},
        "learned bool": {"learned": True},
        "learned float": {"learned": 1.0},
        "learned of 4000 digits": {"learned": 10**4000},
        "storage unknown": {"storage": "int4"},
        "storage a list": {"storage": ["exact"]},
        "storage a lie": {"storage": "int8"},
        "metrics a list": {"metrics": [1]},
        "metrics of text": {"metrics": {"a": "1"}},
        "metrics of bools": {"metrics": {"a": True}},
        "metrics of 70 bits": {"metrics": {"a": 2**70}},
        "classes a text": {"classes": "abc"},
        "classes of numbers": {"classes": [1, 2]},
        "licence a list": {"licence": []},
        "preprocessing null": {"preprocessing": None},
        "provenance deep": {"provenance": {"a": json.loads(nested(17))}},
    }
    for name, said in fields.items():
        _change(f"description: {name}", "metadata", _say(**said))
    for field in ("name", "adapter", "base", "density", "learned", "storage"):
        _change(f"description: no {field}", "metadata", lambda parts, f=field: parts.description.pop(f))


HOSTILE_TEXT = {
    "terminal escape": "\x1b[2J\x1b]0;x\x07",
    "line break": "a\nb",
    "carriage return": "sound\rbad",
    "backspace": "a\b",
    "NUL": "a\0b",
    "DEL": "a\x7f",
    "C1 control": "a\x9b2J",
    "next line": "a\x85b",
    "right-to-left override": "a\u202eb",
    "isolate": "a\u2066b",
    "right-to-left mark": "a\u200fb",
    "zero-width space": "a\u200bb",
    "zero-width no-break space": "a\ufeffb",
    "soft hyphen": "a\u00adb",
    "line separator": "a\u2028b",
    "tag": "a\U000e0041b",
    "private use": "a\ue000b",
    "no character": "a\uffffb",
    "lone surrogate": "a\ud800b",
}
MARKUP = "<script>alert(1)</script> [x](javascript:y) $(rm -rf /) {{7*7}} %s 'or 1=1 \u200d naïve 花 😀"
"""Text that is no danger to a terminal; it stays text."""


def _texts() -> None:
    for name, text in HOSTILE_TEXT.items():
        places: dict[str, dict[str, object]] = {
            "licence": {"licence": text},
            "classes": {"classes": [text]},
            "metrics": {"metrics": {text: 1}},
            "provenance": {"provenance": {"a": [{"b": text}]}},
            "preprocessing": {"preprocessing": {text: 1}},
            "adapter": {"adapter": {"kind": text}},
        }
        for place, said in places.items():
            _change(f"{name} in {place}", "text", _say(**said))
        _change(f"{name} as name", "name", _say(name=text))
        _change(f"{name} as path", "text", _row(0, 0, text))
        _change(f"{name} as key", "text", _row(1, 1, [text]))
        _change(f"{name} as stream", "text", lambda parts, t=text: parts.table["streams"][0].__setitem__(0, t))
    _change("10 MB of text", "header-length", _say(licence="x" * 10_000_000))


# the table


def _tables() -> None:
    texts: dict[str, Callable[[str], str | bytes]] = {
        "a key twice": lambda t: t[:-1] + ',"heads":[]}',
        "an attribute twice": lambda t: t.replace('"attributes":{}', '"attributes":{"0":{},"0":{}}'),
        "blanks before the brace": lambda t: " " + t,
        "garbage behind the brace": lambda t: t + "]",
        "NaN": lambda t: t.replace('"heads":[', '"heads":[NaN,'),
        "5000 digits": lambda t: t.replace('"heads":[', '"heads":[' + "9" * 5000 + ","),
        "deep": lambda t: t.replace('"heads":[', '"heads":[' + nested(100_000) + ","),
        "no UTF-8": lambda t: t.encode() + b"\xff",
        "a list": lambda t: "[]",
        "only text": lambda t: '"x"',
        "a megabyte of lists": lambda t: t.replace('"heads":[', '"heads":[' + "[]," * 300_000),
    }
    for name, change in texts.items():
        _case(f"table: {name}", "table", lambda c=change: _tabled(c))
    good = unpack(valid())
    raw = zlib.compress(json.dumps(good.table).encode())
    size = len(zlib.decompress(raw))
    lengths = {"0": 0, "negative": -1, "text": str(size), "bool": True, "float": float(size), "null": None}
    for name, length in {**lengths, "2^22+1": 2**22 + 1, "one less": size - 1, "one more": size + 1}.items():
        _case(f"table said to have {name}", "table", lambda n=length: _raw_table(raw, n))
    _case("a zlib bomb", "table", lambda: _raw_table(zlib.compress(bytes(64 << 20), 9), 2**22))
    _case("a zlib bomb of the said size", "table", lambda: _raw_table(zlib.compress(bytes(2**22), 9), 2**22))
    _case("a table cut short", "table", lambda: _raw_table(raw[:-3], size))
    _case("a table with more behind it", "table", lambda: _raw_table(raw + b"x", size))
    _case("a table that is not deflated", "table", lambda: _raw_table(json.dumps(good.table).encode(), size))
    _case("an empty table", "table", lambda: _raw_table(b"", 1))


def _fields_of_table() -> None:
    for field in ("streams", "writers", "rows", "axes", "attributes", "heads", "folds"):
        _change(f"table without {field}", "table", lambda parts, f=field: parts.table.pop(f))
        for kind, value in {"null": None, "text": "x", "number": 1, "[1]": [1], "[[1]]": [[1]]}.items():
            code = "mask" if (field, kind) == ("axes", "[[1]]") else "table"  # which is an axis, and does not fit
            _change(f"{field} {kind}", code, _tell(**{field: value}))
    _change("table with more", "table", _tell(more=1))
    for kind, units in {"0": 0, "negative": -8, "2^31": 2**31, "bool": True, "float": 8.0}.items():
        _change(f"stream of {kind} units", "table", lambda p, u=units: p.table["streams"][0].__setitem__(1, u))
    _change("stream of 2^31-1 units", "mask", lambda p: p.table["streams"][0].__setitem__(1, 2**31 - 1))
    _change("a stream twice", "table", lambda p: p.table["streams"].append(["0", 8]))
    _change("a tensor twice", "table", lambda p: p.table["rows"].append(p.table["rows"][0]))
    _change("a key twice in a row", "table", _row(1, 1, ["bias", "bias"]))
    _change("writer of no stream", "table", _tell(writers=[["w", 2, "0", 1]]))
    _change("writer of stream -1", "table", _tell(writers=[["w", -1, "0", 1]]))
    _change("writer on axis 64", "table", _tell(writers=[["w", 0, "0", 64]]))


def _rows() -> None:
    bad_shapes = {
        "negative": [-8, 3, 3, 3],
        "bool": [8, 3, 3, True],
        "float": [8.0, 3, 3, 3],
        "text": ["8", 3, 3, 3],
        "2^31": [2**31, 3, 3, 3],
        "2^62 numbers": [2**31 - 1, 2**31 - 1, 1, 1],
        "too many axes": [1] * 17,
        "fewer axes": [8],
    }
    for name, shape in bad_shapes.items():
        _change(f"row of shape {name}", "table", _row(0, 2, shape))
    _change("row of fifty thousand axes", "table", _row(0, 2, [2**31 - 1] * 50_000))
    _change("row of another kernel", "base", _row(0, 2, [8, 3, 5, 5]))
    _change("row of more inputs", "sizes", _row(0, 2, [8, 4, 3, 3]))
    _change("row of other order", "mask", _row(0, 2, [3, 8, 3, 3]))
    _change("row without keys", "table", _row(0, 1, []))
    _change("row with a dotted key", "table", _row(0, 1, ["a.b"]))
    _change("row with an empty key", "table", _row(0, 1, [""]))
    for path in ("__class__", "..", "0.__class__", "", "/", "0.", ".0", "../0", "training", "_modules", "00"):
        _change(f"row of path {path!r}", "base", _row(0, 0, path), signed=True)
        _change(f"head {path!r}", "base", lambda p, n=path: p.table["heads"].append(n or "None"))
        _change(f"writer {path!r}", "base", _with_writer(path or "None"))
        _change(f"attribute of {path!r}", "base", _tell(attributes={path or "None": {"x": 1}}))
        _change(f"fold of {path!r}", "base", _tell(folds=[["0", path or "None"], ["3", "4"]]), fold=True)
    for key in ("__class__", "__dict__", "forward", "_parameters", "training", "in_channels", "T"):
        _change(f"row of key {key!r}", "base", _row(0, 1, [key]), signed=True)
    _change("a path of 1000 characters", "base", _row(0, 0, "x" * 1000))
    _change("a path of 1000 emoji", "base", _row(0, 0, "😀" * 1000))
    _change("a path of 1001 characters", "table", _row(0, 0, "x" * 1001))
    _change("a head of 1000 characters", "base", _tell(heads=["x" * 1000]))
    _change("an attribute of 1000 characters", "base", _tell(attributes={"0": {"x" * 1000: 1}}))
    _change("a writer of 1000 characters", "mask", _with_writer("0", "w" * 1000, b"\xff"))
    _change("a row of norms as integers", "table", _row(2, 4, ["integers"]))
    _change("a weight as integers", "base", _integers, signed=True)
    _integer_cases()


def _with_writer(module: str, name: str = "w", mask: bytes = b"\x01") -> Callable[[Parts], object]:
    """A free writer of stream 0, and its mask."""

    def change(parts: Parts) -> None:
        parts.table["writers"] = [[name, 0, module, 1]]
        _masks(lambda raw: raw + mask)(parts)

    return change


def _integers(parts: Parts) -> None:
    parts.table["rows"][1][3:] = [[0], ["integers"]]
    parts.description["integers"] = [[0, 8], *parts.description["integers"]]


def _counted(integers: object) -> Callable[[Parts], object]:
    return lambda parts: parts.description.update(integers=integers)


def _integer_cases() -> None:
    for integers in (
        {},
        "12",
        [1, 2],
        [[1]],
        [[1, 2, 3]],
        [["1", 2]],
        [[1.0, 2]],
        [[True, 2]],
        [[1, -2]],
        [[2**63, 2]],
    ):
        _change(f"integers {integers}", "metadata", _counted(integers))
    for integers in ([[1, 2**60]], [[1, 3]], [[1, 0], [1, 2]]):
        _change(f"integers {integers} for two places", "metadata", _counted(integers))
    for integers in ([], [[1, 1]], [[1, 2], [2, 1]]):
        _change(f"integers {integers} for two places", "sizes", _counted(integers))


def _sources() -> None:
    unknown = (
        [],
        ["pickle"],
        [None],
        ["base", 1],
        ["values", 1],
        ["low-rank"],
        ["low-rank", 2, 1, 0, 1],
        ["low-rank", 2, 1, 0, 3, 0],  # eight outputs are not three groups
        ["low-rank", 2, 1, 1, 0],  # of format 1
        [["base"]],
        ["integers"],
        ["integers", 1],
    )
    wrong = (
        ["low-rank", 0, 1, 0, 1, 0],
        ["low-rank", -1, 1, 0, 1, 0],
        ["low-rank", 2.0, 1, 0, 1, 0],
        ["low-rank", 2, 1, 0, 1, 2],
        ["low-rank", 2, 1, 0, 1, True],
        ["pointwise", 1],
        ["pointwise", 1, 0],
    )
    huge = (["low-rank", 2**31, 1, 0, 1, 0], ["low-rank", True, 1, 0, 1, 0], ["low-rank", 10**400, 1, 0, 1, 0])
    for source in (*unknown, *wrong, *huge):
        _change(f"source {str(source)[:40]}", "table", _row(0, 4, source))
    for source in (
        ["low-rank", 2**31 - 1, 1, 0, 1, 0],
        ["low-rank", 2**31 - 1, 2**31 - 1, 0, 1, 0],
        ["low-rank", 1, 1, 0, 1, 0],
        ["low-rank", 2, 9, 0, 1, 0],
        ["low-rank", 2, 1, 0, 2, 0],
        ["low-rank", 2, 1, 0, 1, 1],  # as many numbers, and the weight the other way round
        ["low-rank", 2, 1, 7, 1, 0],
        ["low-rank-whole", 2, 1, 0, 1, 0],
        ["pointwise", 0, 1, 0],
        ["pointwise", 0, 8, 1],
        ["delta", 2, 1, 1, 0],
        ["values"],
        ["base"],
    ):
        _change(f"source {source} that lies", "sizes", _row(0, 4, source), signed=True)
    for source in (["low-rank", 2**31 - 1, 1, 1, 0], ["low-rank", 2, 9, 1, 0], ["low-rank", 2, 1, 1, 1]):
        _change(f"source {source} that lies in format 1", "sizes", _row(0, 4, source), "old", signed=True)
    for source in (["low-rank", 2, 1, 0, 1, 0], ["delta", 2, 1, 1, 0], ["pointwise", 0, 1, 0], [["base"]]):
        _change(f"source {source} in format 1", "table", _row(0, 4, source), "old")
    _change("an adapter on a bias", "table", _row(1, 4, ["low-rank", 2, 1, 0, 1, 0]))
    _change("an adapter on a norm", "table", _row(2, 4, ["pointwise", 0, 1, 0]))
    _change("a delta on a bias", "table", _row(1, 4, ["delta", 2, 1, 1, 0]))


def _on(masks: object) -> Callable[[Parts], object]:
    """These masks on the axis of a bias of eight numbers, in whichever format."""

    def change(parts: Parts) -> None:
        if "axes" in parts.table:
            parts.table["axes"].append(masks)
            masks_or_number: Any = len(parts.table["axes"])
        else:
            masks_or_number = masks
        parts.table["rows"][1][3] = [masks_or_number]

    return change


def _lie(name: str, code: str, masks: object) -> None:
    """A case for both formats."""
    _change(name, code, _on(masks))
    _change(f"{name} in format 1", code, _on(masks), "old")


def _patterns() -> None:
    for pattern in ([0, 8, 1, 2], [0, 0, 0, 0], [0, 2**31, 2**31, 2**31], [0, 4, 1, 1], [0, 1, 16, 1]):
        _lie(f"pattern {pattern}", "mask", [pattern])
    for pattern in (
        [0],
        [0, 8, 1],
        [0, 8, 1, 1, 1],
        [-1, 8, 1, 1],
        [2, 8, 1, 1],
        [0.0, 8, 1, 1],
        [0, "x"],
        [0, 1],
    ):
        _lie(f"pattern {pattern}", "table", [pattern])
    for units in ([0] * 7, [0] * 9, [], [8] * 8):
        _lie(f"units {units}", "mask", [[0, units]])
    for units in ([-2] * 8, [True] * 8, [0.5] * 8, ["0"] * 8, [2**40] * 8):
        _lie(f"units {units}", "table", [[0, units]])
    for kind in ("exact", "old"):
        where = "" if kind == "exact" else " in format 1"
        _change(f"a pattern of 2^30 indices{where}", "table", lambda p: _add_pattern(p, 2**30), kind)
        many = lambda p: [_add_pattern(p, 2**20) for _ in range(1000)]  # noqa: E731
        _change(f"a thousand patterns{where}", "table", many, kind)
        _change(f"the same mask without end{where}", "table", _many_masks, kind)
    for mask in (-1, 2, 10**9, 1):
        _lie(f"mask {mask} on an axis", "mask", [mask])
    for mask in (True, 0.0, "0", None, {}):
        _lie(f"mask {mask!r} on an axis", "table", [mask])
    _change("masks for fewer axes", "table", _row(0, 3, [1]))


def _add_row(parts: Parts, size: int, masks: list[Any], source: str) -> None:
    """One more tensor of one axis with these masks."""
    on: Any = masks
    if "axes" in parts.table:
        parts.table["axes"].append(masks)
        on = len(parts.table["axes"])
    parts.table["rows"].append(["0", [f"k{len(parts.table['rows'])}"], [size], [on], [source]])


def _add_pattern(parts: Parts, size: int) -> None:
    _add_row(parts, size, [[0, 8, size // 8, 1]], "base")


def _many_masks(parts: Parts) -> None:
    """Axes that all have the same mask, each another number of times: 300 lists of 64 thousand indices."""
    parts.table["streams"].append(["big", 64_000])
    _masks(lambda raw: raw + b"\x7f" * 8000)(parts)
    for count in range(1, 300):
        _add_row(parts, 64_000, [2] * count, "values")


def _attributes() -> None:
    for key in ("__dict__", "__class__", "forward", "training", "_parameters", "weight", "bias", "x", ""):
        _change(f"attribute {key!r}", "base", _tell(attributes={"0": {key: 1}}))
    for key, value in {
        "in_channels": 4,
        "kernel_size": [4, 4],
        "groups": 2,
        "padding": [1],
        "stride": 1,
    }.items():
        _change(f"attribute {key} of {value}", "base", _tell(attributes={"0": {key: value}}))
    _change("attribute groups of [1]", "base", _tell(attributes={"0": {"groups": [1]}}))
    for key, value in {  # all of them sizes of the base, none larger, but not what pruning changes
        "stride": [1, 1],
        "dilation": [1, 1],
        "padding": [1, 1],
        "kernel_size": [1, 1],
        "groups": 1,
        "in_channels": 3,
        "out_channels": 4,
    }.items():
        _change(f"attribute {key}, which the tensors tell", "base", _tell(attributes={"0": {key: value}}))
    for value in (0, -1, True, 1.5, "8", None, [0], [[1]], {}, 2**31):
        _change(f"attribute of {value!r}", "table", _tell(attributes={"0": {"in_channels": value}}))


def _inputs() -> None:
    bad: dict[str, object] = {
        "a list": [],
        "without kwargs": {"args": []},
        "with more": {"args": [], "kwargs": {}, "more": []},
        "args a dict": {"args": {}, "kwargs": {}},
        "kwargs a list": {"args": [], "kwargs": []},
        "a list without a kind": {"args": [[]], "kwargs": {}},
        "a kind that is not known": {"args": [["set", []]], "kwargs": {}},
        "a dtype that is not known": {"args": [["tensor", "qint8", [1]]], "kwargs": {}},
        "a dtype of Python's": {"args": [["tensor", "__class__", [1]]], "kwargs": {}},
        "a negative size": {"args": [["tensor", "float32", [-1]]], "kwargs": {}},
        "a bool for a size": {"args": [["tensor", "float32", [True]]], "kwargs": {}},
        "2^24+1 numbers": {"args": [["tensor", "float32", [2**24 + 1]]], "kwargs": {}},
        "2^25 numbers in two": {"args": [["tensor", "float32", [2**24]]] * 2, "kwargs": {}},
        "2^62 numbers": {"args": [["tensor", "float32", [2**24, 2**24, 2**14]]], "kwargs": {}},
        "17 axes": {"args": [["tensor", "float32", [1] * 17]], "kwargs": {}},
        "deep": {"args": [json.loads('["list",[' * 20 + "]]" * 20)], "kwargs": {}},
        "text with an escape": {"args": ["\x1b[2J"], "kwargs": {}},
    }
    for name, value in bad.items():
        _change(f"inputs: {name}", "text" if "escape" in name else "metadata", _say(inputs=value))
    # what fits for each layer, and not for the one that reads it
    _change("a reader that is not cut", "table", _uncut(4, 1), signed=True)
    _change("a writer that is not cut", "table", _uncut(4, 0), signed=True)
    _change("norms that are not cut", "table", _uncut(2, 0), signed=True)
    _change("a head that is not cut", "table", _uncut(7, 1), signed=True)


def _uncut(number: int, axis: int) -> Callable[[Parts], object]:
    """A row without masks on an axis, and with as many numbers as that takes."""

    def change(parts: Parts) -> None:
        parts.table["rows"][number][3][axis] = 0
        kinds = {"values": "values", "low-rank": "adapters"}
        name = kinds[parts.table["rows"][number][4][0]]
        more = {(4, 1): 8, (4, 0): 4, (2, 0): 16, (7, 1): 6}[number, axis]
        parts.set_numbers(name, parts.numbers(name) + [0.5] * more)

    return change


def _folds() -> None:
    for name, pair in {
        "a norm that is none": ["0", "2"],
        "a layer that is none": ["2", "8"],
        "a head": ["3", "8"],
        "the network": ["", ""],
    }.items():
        _change(f"fold into {name}", "fold", lambda p, n=pair: p.table["folds"].append(n), fold=True)
    _change("fold the wrong layer", "fold", _tell(folds=[["3", "1"], ["0", "4"]]), fold=True)
    _change("fold nothing", "fold", _tell(folds=[]), fold=True)


# masks and numbers


def _bits() -> None:
    _change("masks longer", "mask", _masks(lambda raw: raw + b"\0"))
    _change("masks shorter", "mask", _masks(lambda raw: raw[:-1]))
    _change("no masks at all", "mask", _masks(lambda raw: b""))
    _change("a mask without units", "mask", _masks(lambda raw: b"\0" + raw[1:]))
    _change("bits beyond the units", "mask", _masks(lambda raw: raw[:-1] + b"\xff"))
    _change("a writer beyond its stream", "mask", _with_writer("0", mask=b"\xff"))
    _change("a writer without units", "mask", _with_writer("0", mask=b"\0"))
    _change("other units, as many", "base-values", lambda p: p.description["base"].update(values="0" * 64))
    _change("fewer units", "sizes", _masks(lambda raw: b"\x01" + raw[1:]))
    _change("more units", "sizes", _masks(lambda raw: b"\xff" + raw[1:]))


def _numbers() -> None:
    for name in ("values", "adapters"):
        for dtype in ("F16", "BF16", "F32", "F64"):
            for number in (NAN, INF, -INF):
                change = _with_number(name, dtype, number)
                _change(f"{number} in {name} as {dtype}", "non-finite", change)
        for by in (1, -1):
            _change(f"{name} longer by {by}", "sizes", _longer(name, by))
        _change(f"{name} empty", "sizes", lambda parts, n=name: parts.set_numbers(n, []))
    for number in (NAN, INF, -INF):
        _change(f"{number} in scales", "non-finite", _with_number("scales", "F32", number), "int8")
    for by in (1, -1):
        _change(f"scales longer by {by}", "sizes", _longer("scales", by), "int8")
        _change(f"codes longer by {by}", "sizes", _longer("codes", by), "int8")
        _change(f"scales longer by {by} in format 1", "sizes", _longer("scales", by), "old int8")
        _change(f"codes longer by {by} in format 1", "sizes", _longer("adapters", by), "old int8")
    _change("scales without need", "sizes", lambda p: p.tensors.update(scales=("F32", bytes(4))))
    _change("codes without being said", "metadata", _say(storage="exact"), "old int8")
    _change("int8 that is not said in format 1", "metadata", _say(storage="int8"), "old")
    _change("scales beyond floats", "overflow", _all("scales", 3e38, "F32"), "int8")
    _change("values in bytes in format 1", "metadata", _say(storage="int8-all"), "old int8")
    _change("a byte of values beyond 127", "codes", _with_number("values", "I8", -128), "int8-all")
    _change("values longer than the table says", "sizes", _longer("values", 1), "int8-all")
    _change("a head in bytes instead of four bits", "sizes", _say(storage="int4-head"), "int8-all")
    _change("a head in four bits instead of bytes", "sizes", _say(storage="int8-all"), "int4-head")
    _change("a head in four bits in format 1", "metadata", _say(storage="int4-head"), "old int8")
    _change("values longer than the table says, with a head in four bits", "sizes", _longer("values", 1), "int4-head")
    _change("values in bytes without being said", "dtype", _say(storage="fp16"), "int8-all")
    _change("values that are not in bytes", "dtype", _all("values", 0.5, "F16"), "int8-all")
    _change("scales beyond floats in format 1", "overflow", _all("scales", 3e38, "F32"), "old int8")
    _change("a byte beyond 127 in format 1", "codes", _with_number("adapters", "I8", -128), "old int8")
    _change("adapters beyond floats", "overflow", _all("adapters", 3e38, "F32"))
    _change("adapters of 1e200", "overflow", _all("adapters", 1e200, "F64"))
    _change("adapters of 1e308", "overflow", _all("adapters", 1.7e308, "F64"))
    _change("values of 1e200", "overflow", _all("values", 1e200, "F64"))


def _all(name: str, number: float, dtype: str) -> Callable[[Parts], object]:
    return lambda parts: parts.set_numbers(name, [number] * len(parts.numbers(name)), dtype)


def _cost() -> None:
    """Little text that could take long to read: each has to be refused in no time."""
    keys = [f"k{n}" for n in range(30_000)]
    _change("the last of many keys twice", "table", _row(1, 1, [*keys, "z", "z"]))
    _change(
        "the last of many streams twice",
        "table",
        lambda p: p.table["streams"].extend([k, 1] for k in [*keys, "z", "z"]),
    )
    _change("one head many times", "table", _tell(heads=["8"] * 60_000))


for _group in (
    _lengths,
    _shapes,
    _headers,
    _names_of_tensors,
    _ranges,
    _dtypes,
    _foreign,
    _versions,
    _descriptions,
    _texts,
    _tables,
    _fields_of_table,
    _rows,
    _sources,
    _patterns,
    _attributes,
    _inputs,
    _folds,
    _bits,
    _numbers,
    _cost,
):
    _group()
