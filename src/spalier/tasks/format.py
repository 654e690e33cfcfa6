"""The outer layers of a task file: names, text, strict JSON, the safetensors container, and the digests of its base.

A container is a length, a JSON header, and tensors that fill the rest of the file exactly. docs/task-format.md
specifies all of it. Files come from strangers: everything is checked before it is used, and before memory is taken.

A task names its base by two digests: one of the architecture, one of the values that the task takes from it. Norms and
heads that a task has of its own do not count, so networks for 10 and for 1,000 classes are the same base.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from spalier.adapters.geometry import Described
from spalier.errors import TaskFileError
from spalier.files import read_exactly
from spalier.text import is_hidden

VERSION = 2
"""Of the format that is written; all earlier ones are read."""
SUFFIX = ".task.safetensors"
KEY = "spalier.task"
"""The entry of the container's metadata that describes the task."""
MAX_NAME = 100  # with the suffix far below the 255 bytes that file systems allow
MAX_DEPTH = 16
MAX_HEADER = 1 << 20  # parsed as a whole, so it is bounded before it is read
MAX_BYTES = 1 << 32

DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
TENSORS: dict[str, frozenset[str]] = {
    "table": frozenset({"U8"}),
    "masks": frozenset({"U8"}),
    "adapters": _FLOATS | {"I8"},
    "codes": frozenset({"U8"}),
    "scales": _FLOATS | {"U8"},
    "values": _FLOATS | {"I8"},
}
"""The tensors of a task file, all of one axis, and the dtypes that each may have."""
PACKED = "packed"
"""The only tensor of a small file, and its description: the header inside of it is deflated."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
_FOREIGN = {
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    **{bytes([0x80, protocol]): "a pickle" for protocol in range(2, 6)},
    b"\x1f\x8b": "a gzip archive",
    b"GGUF": "a GGUF file",
    b"\x89HDF": "an HDF5 file",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x89PNG": "a PNG image",
    b"GIF8": "a GIF image",
    b"RIFF": "a RIFF file, such as a WebP image",
    b"%PDF": "a PDF document",
    b"\x7fELF": "a program",
    b"{": "JSON text",
    b"version ": "a pointer of Git LFS; fetch the file itself",
}


def check_name(name: object) -> str:
    """A task's name, which is also the name of its file on every file system.

    >>> check_name("flowers-102")
    'flowers-102'
    """
    rule = f"expected 1 to {MAX_NAME} of the letters a-z, A-Z, digits, '-', '_' and '.', a letter or digit first"
    if not isinstance(name, str):
        raise TaskFileError("name", f"a task's name is a {type(name).__name__}, {rule}")
    if len(name) > MAX_NAME:
        raise TaskFileError("name", f"the name {name[:20]!a}... has {len(name)} characters, {rule}")
    if not _NAME.fullmatch(name) or ".." in name or name.endswith("."):
        raise TaskFileError("name", f"{name!a} cannot be a task's name: {rule}, and no two dots in a row")
    if _RESERVED.fullmatch(name):
        raise TaskFileError("name", f"{name!a} is reserved by an operating system; choose another name")
    if name.lower().endswith((".task", ".safetensors")):
        raise TaskFileError("name", f"{name!a} ends like the file's own suffix; leave that out")
    return name


def check_text(what: str, text: str) -> str:
    """Text that is safe to print: no control characters, no terminal escapes, nothing that turns the line around."""
    if text.isascii() and text.isprintable():
        return text
    for character in text:
        if is_hidden(character):
            raise TaskFileError(
                "text",
                f"{what} has the character U+{ord(character):04X}, expected printable text: control characters, "
                "line breaks, terminal escapes and direction marks are refused",
            )
    return text


def check_plain(what: str, value: Any, depth: int = 0) -> None:
    """Refuse all but plain data with safe text: what JSON can hold, finite, and not too deep."""
    if depth > MAX_DEPTH:
        raise TaskFileError("metadata", f"{what} is nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        check_text(what, value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TaskFileError("metadata", f"{what} has the key {key!r}, expected text")
            check_text(what, key)
            check_plain(what, inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            check_plain(what, inner, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise TaskFileError("metadata", f"{what} holds {value}, expected finite numbers")
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise TaskFileError("metadata", f"{what} holds a number of more than 64 bits")
    elif not (value is None or isinstance(value, int | float)):
        raise TaskFileError(
            "metadata", f"{what} holds a {type(value).__name__}, expected text, numbers, lists and dicts of them"
        )


def quoted(value: object) -> str:
    """What a stranger wrote, as a message may show it: short, in quotes, and in ASCII."""
    return ascii(str(value)[:60])[:100]


def parse_json(code: str, what: str, raw: bytes) -> Any:
    """JSON, strictly: UTF-8, no key twice, no NaN, nothing before the value."""
    try:
        if raw[:1] not in (b"{", b"["):
            raise ValueError("it does not begin with { or [")
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "it is nested too deep"
        raise TaskFileError(code, f"{what} is not strict JSON: {ascii(reason)[1:-1][:120]}") from None


@cache
def words() -> bytes:
    """Words that most headers and tables have: the dictionary that they are deflated with."""
    return Path(__file__).with_name("words.txt").read_bytes()


def deflate(data: bytes, strategy: int = zlib.Z_DEFAULT_STRATEGY, dictionary: bytes | None = None) -> bytes:
    """The same in fewer bytes; with the words that headers and tables have, unless another dictionary is given."""
    deflater = zlib.compressobj(9, zlib.DEFLATED, 15, 9, strategy, words() if dictionary is None else dictionary)
    return deflater.compress(data) + deflater.flush()


def inflate(code: str, what: str, raw: bytes, length: int, dictionary: bytes = b"") -> bytes:
    """What deflated data hold, where that has exactly this length."""
    inflater = zlib.decompressobj(zdict=dictionary)
    try:
        data = inflater.decompress(raw, length)  # never more than the length, whatever the data say
    except zlib.error:
        raise TaskFileError(code, f"{what} is not deflated data") from None
    if len(data) != length or not inflater.eof or inflater.unused_data or inflater.unconsumed_tail:
        raise TaskFileError(code, f"{what} does not inflate to {length:,} bytes")
    return data


def dump_json(value: Any) -> str:
    """JSON without blanks; equal data give equal text."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


class _Entry(NamedTuple):
    """Where a tensor lies behind the header."""

    begin: int
    end: int
    name: str
    dtype: str


def unpack_container(file: BinaryIO, size: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of a container of so many bytes."""
    # the length and the header's first byte, which tell other formats from this one
    start = bytes(read_exactly(file, min(size, 9)))
    length = _header_length(start, size)
    header = start[8:] + bytes(read_exactly(file, length - 1))
    found, left = _named(header), size - 8 - length
    if found.get("__metadata__") == {KEY: PACKED}:
        header = _packed_header(file, found, left)
        found, left = _named(header), size - file.tell()
    description, entries = _parse_header(found, left)
    data = read_exactly(file, left)
    return description, {entry.name: _tensor(entry, data) for entry in entries}


def _packed_header(file: BinaryIO, outer: dict[str, Any], size: int) -> bytes:
    """The header inside of a file's only tensor, which has to be all of what is left."""
    _placed({name: spec for name, spec in outer.items() if name != "__metadata__"}, size, {PACKED: frozenset({"U8"})})
    if size < 8:
        raise TaskFileError("truncated", f"a packed file has {size} bytes behind its header, too few for another")
    short, length = struct.unpack("<II", read_exactly(file, 8))
    if short > size - 8 or length > MAX_HEADER:
        raise TaskFileError(
            "header-length", f"the packed header is said to have {short:,} bytes, and {length:,} in all"
        )
    return inflate("header", "the packed header", bytes(read_exactly(file, short)), length, words())


def _header_length(start: bytes, size: int) -> int:
    (length,) = struct.unpack("<Q", start[:8].ljust(8, b"\xff"))
    is_ours = 2 <= length <= MAX_HEADER and start[8:] in (b"", b"{")  # a length may look like a pickle
    for magic, what in _FOREIGN.items():
        if start.startswith(magic) and not is_ours:
            raise TaskFileError("foreign", f"the file is {what}, expected a task file (NAME.task.safetensors)")
    if len(start) < 8:
        raise TaskFileError("truncated", f"the file has {size} bytes, too few for a task file")
    if not 2 <= length <= MAX_HEADER:
        raise TaskFileError(
            "header-length", f"the header is said to have {length:,} bytes, expected 2 to {MAX_HEADER:,}"
        )
    if 8 + length > size:
        raise TaskFileError("truncated", f"the header needs {8 + length:,} bytes, and the file has {size:,}")
    return int(length)


def _named(header: bytes) -> dict[str, Any]:
    found = parse_json("header", "the header", header.rstrip(b" "))
    if not isinstance(found, dict):
        raise TaskFileError("header", "the header is a list, expected names and tensors")
    return found


def _parse_header(found: dict[str, Any], size: int) -> tuple[dict[str, Any], list[_Entry]]:
    metadata = found.pop("__metadata__", None)
    if not isinstance(metadata, dict) or set(metadata) != {KEY} or not isinstance(metadata[KEY], str):
        what = f"safetensors of {len(found):,} tensors ({', '.join(map(quoted, islice(found, 2))) or 'none'})"
        raise TaskFileError(
            "header",
            f"the file is {what} whose metadata are not {KEY!r} alone: weights of a network, not a task; expected "
            f"NAME{SUFFIX}, as Task.save and runs write it",
        )
    # lone surrogates are legal in JSON; as bytes they are no UTF-8, so the description is refused
    description = parse_json("metadata", "the description", metadata[KEY].encode("utf-8", "surrogatepass"))
    if not isinstance(description, dict):
        raise TaskFileError("metadata", "the description is a list, expected fields and values")
    return description, _placed(found, size, TENSORS)


def _placed(found: Mapping[str, Any], size: int, known: Mapping[str, frozenset[str]]) -> list[_Entry]:
    """The tensors, which have to lie one behind the other and fill so many bytes."""
    entries = sorted(_entry(name, spec, known) for name, spec in found.items())
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise TaskFileError("ranges", f"{entry.name} begins at {entry.begin}, expected {end}")
        end = entry.end
    if end > size:
        raise TaskFileError("truncated", f"the tensors need {end:,} bytes, and the file has {size:,} for them")
    if end < size:
        raise TaskFileError("ranges", f"{size - end:,} bytes at the end belong to no tensor")
    return entries


def _entry(name: str, spec: object, known: Mapping[str, frozenset[str]]) -> _Entry:
    if name not in known:
        raise TaskFileError("tensors", f"the file holds {quoted(name)}, expected only {', '.join(known)}")
    if not isinstance(spec, dict) or set(spec) != {"dtype", "shape", "data_offsets"}:
        raise TaskFileError("header", f"{name} lacks dtype, shape or data_offsets, or has more")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in known[name]:
        raise TaskFileError("dtype", f"{name} is {quoted(dtype)}, expected {' or '.join(sorted(known[name]))}")
    if not (is_sizes(shape, 1) and is_sizes(offsets, 2)):
        raise TaskFileError("header", f"{name} has another shape or range than one axis, from begin to end")
    begin, end = offsets
    if end - begin != shape[0] * DTYPES[dtype].itemsize:
        raise TaskFileError("ranges", f"{name} has {shape[0]} numbers in {end - begin} bytes")
    return _Entry(begin, end, name, dtype)


def is_sizes(values: object, count: int) -> bool:
    """True for a list of so many integers from 0 to 2^63 - 1."""
    # not isinstance: True is an int, too
    return isinstance(values, list) and len(values) == count and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _tensor(entry: _Entry, data: bytearray) -> Tensor:
    dtype = DTYPES[entry.dtype]
    count = (entry.end - entry.begin) // dtype.itemsize
    if not count:
        return torch.empty(0, dtype=dtype, device="cpu")
    if entry.begin % dtype.itemsize:  # not aligned: no file of ours
        return torch.frombuffer(data[entry.begin : entry.end], dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=entry.begin)


def pack_container(description: Mapping[str, Any], tensors: Mapping[str, Tensor], *, packed: bool = False) -> bytes:
    """A container of these tensors, the widest numbers first so that all are aligned; or of one, with all inside."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {KEY: dump_json(description)}}
    end, parts = 0, []
    present = [name for name in TENSORS if name in tensors]
    for name in sorted(present, key=lambda name: -tensors[name].dtype.itemsize):
        tensor = tensors[name].detach().cpu().contiguous()
        begin, end = end, end + tensor.nbytes
        shape = [tensor.numel()]
        header[name] = {"dtype": names[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
        parts.append(tensor.view(torch.uint8).numpy().tobytes())
    text = dump_json(header).encode("utf-8")
    if len(text) > MAX_HEADER - 8:
        raise TaskFileError(
            "text", f"the description has {len(text):,} bytes, expected at most {MAX_HEADER - 8:,}; shorten it"
        )
    if packed:
        raw = deflate(text)
        parts = [struct.pack("<II", len(raw), len(text)), raw, *parts]
        size = sum(map(len, parts))
        only = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
        text = dump_json({"__metadata__": {KEY: PACKED}, PACKED: only}).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *parts])


# -- which base a task belongs to


@dataclass(frozen=True)
class Fingerprint:
    """Which base a task was learned on: two digests, as the functions below make them."""

    architecture: str
    values: str


@dataclass(frozen=True)
class Density:
    """How much of the base is left, three ways: (kept, of), or None where it is not known."""

    channels: tuple[int, int] | None
    """Output channels of the layers that write streams."""
    weights: tuple[int, int] | None
    """Parameters of the network."""
    macs: tuple[int, int] | None
    """Multiply-accumulates of one sample."""


def architecture_digest(modules: Iterable[Described], ties: Mapping[str, str], heads: Collection[str]) -> str:
    """Of modules in their order, with class and settings, and of all tensors' names with those that are tied."""
    digest = hashlib.sha256()
    for module in modules:
        settings = "" if module.path in heads else module.settings
        digest.update(f"{module.path}\t{module.kind}\t{settings}\n".encode())
    for name, first in ties.items():
        if name.rpartition(".")[0] not in heads:
            digest.update(f"{name}\t{first}\n".encode())
    return digest.hexdigest()


def values_digest(tensors: Mapping[str, Tensor]) -> str:
    """Of the tensors that a task takes from its base, by their first names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name}\t{dtype}\t{list(tensor.shape)}\t{summary_of(tensor).digest}\n".encode())
    return digest.hexdigest()


class Summary(NamedTuple):
    """What was found out about a tensor's values."""

    digest: str
    largest: float
    version: tuple[int, int] | None


_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()


def summary_of(tensor: Tensor) -> Summary:
    """The digest of a tensor's values, remembered until PyTorch counts a write to it."""
    version = version_of(tensor)
    found: Summary | None = _KNOWN.get(tensor)
    if version is not None and found is not None and found.version == version:
        return found
    flat = tensor.detach().cpu().contiguous().flatten()
    digest = hashlib.sha256(flat.view(torch.uint8).numpy().data if flat.numel() else b"").hexdigest()
    made = Summary(digest, largest(tensor), version)
    if version is not None:
        _KNOWN[tensor] = made
    return made


def version_of(tensor: Tensor) -> tuple[int, int] | None:
    """What changes with every write to a tensor that PyTorch counts; None where it counts none."""
    return None if tensor.is_inference() else (tensor._version, tensor.data_ptr())


def forget_digests() -> None:
    """Look at all values again: whoever writes through ``.data`` or numpy goes past PyTorch's count of writes."""
    _KNOWN.clear()


def largest(tensor: Tensor) -> float:
    """The largest absolute value; NaN or infinite where one of them is."""
    if not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    low, high = (float(end) for end in torch.aminmax(tensor.detach()))
    return math.nan if math.isnan(low + high) else max(abs(low), abs(high))


def plain_dict(what: str, value: object) -> dict[str, Any]:
    """A mapping of plain data, or nothing."""
    if value is not None and not isinstance(value, Mapping):
        raise TaskFileError("metadata", f"{what} is a {type(value).__name__}, expected a dict")
    return {key: plain(inner) for key, inner in (value or {}).items()}


def plain(value: Any) -> Any:
    """Plain data: scalars of numpy and PyTorch become numbers, paths text."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def share_text(pair: tuple[int, int] | None) -> str:
    """How much is kept, in words.

    >>> share_text((1, 4))
    '1 of 4 (25.0%)'
    """
    return "not known" if pair is None else f"{pair[0]:,} of {pair[1]:,} ({pair[0] / pair[1]:.1%})"


def fingerprint_of(data: dict[str, Any]) -> Fingerprint:
    """Of a description that was read."""
    are_digests = all(isinstance(v, str) and len(v) == 64 and set(v) <= set("0123456789abcdef") for v in data.values())
    check_field("base", set(data) == {"architecture", "values"} and are_digests, "two SHA-256 digests")
    return Fingerprint(**data)


def density_of(data: dict[str, Any]) -> Density:
    """Of a description that was read."""
    names = [f.name for f in fields(Density)]
    check_field("density", set(data) <= set(names), f"only {', '.join(names)}")
    for pair in data.values():
        check_field("density", is_sizes(pair, 2) and pair[0] <= pair[1] > 0, "pairs of kept and of")
    return Density(**{name: tuple(data[name]) if name in data else None for name in names})


def known_version(found: object) -> int:
    """The format of a file, if it is one that can be read."""
    if type(found) is not int or not 1 <= found <= VERSION:
        raise TaskFileError(
            "version",
            f"the file has format {quoted(found)}, expected 1 to {VERSION}: it was written by another version of "
            "Spalier; update this one",
        )
    return found


def check_field(field: str, holds: bool, expected: str) -> None:
    """Refuse a description whose field is not what it has to be."""
    if not holds:
        raise TaskFileError("metadata", f"the description's {field} is not what it has to be: expected {expected}")
