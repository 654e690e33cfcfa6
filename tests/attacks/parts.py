"""Task files taken apart and put together again, without any of the library's checks."""

import copy
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from support import awaken_, tiny_cnn
from torch import nn

import spalier
from spalier.adapters.attachment import attachment_of
from spalier.tasks.base import Base
from spalier.tasks.format import deflate, words

NUMBERS = {"F16": "e", "F32": "f", "F64": "d", "I8": "b", "U8": "B"}


def example():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@cache
def base() -> nn.Module:
    """The base of every valid file here; no attempt may change it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return tiny_cnn().eval()


ADAPTERS = {
    "splora": spalier.SPLoRA(rank=2),
    "delta": spalier.SPDelta(bits=1),
    "deflated": spalier.SPDelta(bits=2, scales="layer"),  # all codes are 0 to begin with
    "by layer": spalier.ByLayer({"0.weight": spalier.SPDelta(bits=2), "3.weight": spalier.SPLoRA(rank=2)}),
}


@cache
def task(kind: str = "splora") -> spalier.Task:
    """A small task on that base: half of the first stream, and ten of twelve of the second."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        net = copy.deepcopy(base())
        spalier.attach_(net, ADAPTERS[kind], head="8", example=example())
        structure = attachment_of(net).structure
        spalier.prune_(net, spalier.Plan(structure, {"0": [0, 2, 3, 5], "3": range(10)}))
        if kind != "deflated":
            awaken_(net)
        if kind == "by layer":
            factors = net[3].weight_adapter
            factors.levels, factors.down_scale, factors.up_scale = 15, torch.full((2,), 0.1), torch.full((2,), 0.1)
        return spalier.Task.of(net, "a", metrics={"accuracy": 0.5}, classes=["x", "y", "z"])


OLD = {"old": "exact", "old int8": "int8"}
KINDS = ("exact", "int8", "int8-all", "int4-head", "delta", "small", "deflated", "by layer", *OLD)
"""Of valid files: SPLoRA in four storages, codes in four ways, and SPLoRA in format 1."""


@cache
def valid(kind: str = "exact") -> bytes:
    """A valid file: of a kind of adapter, or of SPLoRA in a storage, or that in format 1."""
    if kind in OLD:
        return pack(in_format_1(unpack(valid(OLD[kind]))))
    if kind == "small":
        return task("delta").to_bytes(storage="int8-all")
    return task(kind).to_bytes() if kind in ADAPTERS else task().to_bytes(storage=kind)


@dataclass
class Parts:
    """What a file holds, free to be changed."""

    description: dict[str, Any]
    table: dict[str, Any]
    tensors: dict[str, tuple[str, bytes]]
    """The dtype and the bytes of each tensor but the table."""

    def numbers(self, name: str) -> list[Any]:
        dtype, raw = self.tensors[name]
        return [n for (n,) in struct.iter_unpack("<" + NUMBERS[dtype], raw)]

    def set_numbers(self, name: str, numbers: list[Any], dtype: str | None = None) -> None:
        dtype = dtype or self.tensors[name][0]
        if dtype == "BF16":
            raw = b"".join(struct.pack("<f", n)[2:] for n in numbers)
        else:
            raw = struct.pack(f"<{len(numbers)}{NUMBERS[dtype]}", *numbers)
        self.tensors[name] = dtype, raw

    def sign(self, net: nn.Module | None = None) -> None:
        """Say that the base is the right one, whatever the table says, as a stranger would who has the base."""
        known, table = Base(base() if net is None else net), self.table
        own = {
            ".".join(filter(None, (path, key)))
            for path, keys, _, _, source in table["rows"]
            if source[:1] in (["values"], ["integers"])
            for key in keys
        }
        self.description["base"] = {
            "architecture": known.architecture(table["heads"]),
            "values": known.values_without(frozenset(own)),
        }


def unpack(data: bytes) -> Parts:
    header, body = split(data)
    if "packed" in header:
        text, body = inside(body)
        header = json.loads(text)
    description = json.loads(header.pop("__metadata__")["spalier.task"])
    raw = {name: (spec["dtype"], body[slice(*spec["data_offsets"])]) for name, spec in header.items()}
    table = zlib.decompressobj(zdict=words()).decompress(raw.pop("table")[1])
    return Parts(description, json.loads(table), raw)


def inside(body: bytes) -> tuple[bytes, bytes]:
    """The text of the header inside of a packed file, and what is behind it."""
    short, _ = struct.unpack("<II", body[:8])
    return zlib.decompressobj(zdict=words()).decompress(body[8 : 8 + short]), body[8 + short :]


def in_one(header: bytes, body: bytes, *, lengths: bytes | None = None, raw: bytes | None = None) -> bytes:
    """A packed file of this header and body; its lengths, and the deflated header, may be others."""
    raw = deflate(header) if raw is None else raw
    body = (struct.pack("<II", len(raw), len(header)) if lengths is None else lengths) + raw + body
    only = {"dtype": "U8", "shape": [len(body)], "data_offsets": [0, len(body)]}
    return join({"__metadata__": {"spalier.task": "packed"}, "packed": only}, body)


def plain(data: bytes) -> bytes:
    """A packed file as one that is not."""
    return join(*inside(split(data)[1]))


def in_format_1(parts: Parts) -> Parts:
    """What format 1 has in place of these parts: masks in the rows, no levels, bytes as numbers."""
    parts.description["format"] = 1
    del parts.description["table"]
    axes = [[], *parts.table.pop("axes")]
    for row in parts.table["rows"]:
        row[3] = [axes[number] for number in row[3]]
        if row[4][0] == "low-rank":
            del row[4][3]
    if parts.description["storage"] == "int8":
        _, raw = parts.tensors.pop("codes")
        parts.set_numbers("adapters", [digit - 127 for digit in raw], "I8")
        parts.set_numbers("scales", parts.numbers("scales"), "F32")
    return parts


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the tensors' bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: Any, body: bytes) -> bytes:
    """A container with this header: text as it is, anything else as JSON."""
    if not isinstance(header, str | bytes):
        header = json.dumps(header, separators=(",", ":"))
    raw = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    return struct.pack("<Q", len(raw)) + raw + body


def pack(parts: Parts, *, description: str | None = None, table: str | bytes | None = None) -> bytes:
    """A file of these parts; the description or the table may be given as they are to stand in the file."""
    inflated = table if table is not None else json.dumps(parts.table, separators=(",", ":"))
    if isinstance(inflated, str):
        inflated = inflated.encode("utf-8", "surrogatepass")
    said = {"table": len(inflated), **parts.description}
    text = description if description is not None else json.dumps(said, separators=(",", ":"))
    return assemble(text, {**parts.tensors, "table": ("U8", zlib.compress(inflated))})


def assemble(description: str, tensors: dict[str, tuple[str, bytes]]) -> bytes:
    """Tensors one behind the other, with a header that says so."""
    header: dict[str, Any] = {"__metadata__": {"spalier.task": description}}
    sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
    end, body = 0, b""
    for name, (dtype, raw) in sorted(tensors.items(), key=lambda item: -sizes.get(item[1][0], 1)):
        begin, end = end, end + len(raw)
        shape = [len(raw) // sizes.get(dtype, 1)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        body += raw
    return join(header, body)


def changed(change: Callable[[Parts], object], storage: str = "exact", *, signed: bool = False) -> bytes:
    """A valid file with something in it changed."""
    parts = unpack(valid(storage))
    parts.description.pop("table")
    change(parts)
    if signed:
        parts.sign()
    return pack(parts)
