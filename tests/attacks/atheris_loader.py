"""Coverage-guided fuzzing of the loader: ``python tests/attacks/atheris_loader.py -max_total_time=60``.

It needs ``atheris``, and is no test: it runs until it is stopped, or something other than a `TaskFileError` comes out.
The first byte of an input says how the rest is meant: as a whole file, or as the text of the header, the description
or the table of a file that is sound otherwise, so that chance does not have to guess lengths and checksums. Options
are those of libFuzzer; a folder as last argument keeps the inputs that reached new code.
"""

import copy
import json
import sys
import tempfile
import zlib
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tools")]

with atheris.instrument_imports(include=["spalier.tasks"]):
    import spalier.tasks.store

import torch  # noqa: E402
from support import assert_unchanged, snapshot  # noqa: E402

import spalier  # noqa: E402
from attacks.parts import KINDS as VALID  # noqa: E402
from attacks.parts import Parts, assemble, base, join, pack, split, unpack, valid  # noqa: E402
from spalier.errors import TaskFileError  # noqa: E402

KINDS = ("file", "header", "description", "table", "signed table", "numbers")
FOLDER = Path(tempfile.mkdtemp())


def made(kind: str, storage: str, rest: bytes) -> bytes:
    """The file that an input stands for."""
    if kind == "file":
        return rest
    if kind == "header":
        return join(rest, split(valid(storage))[1])
    parts = unpack(valid(storage))
    if kind == "description":
        return pack(parts, description=rest.decode("utf-8", "replace"))
    del parts.description["table"]
    if kind == "numbers":
        return pack(with_numbers(parts, rest))
    if kind == "signed table":
        parts = signed(parts, rest)
    return pack(parts, table=rest)


def with_numbers(parts: Parts, rest: bytes) -> Parts:
    """The masks, then the adapters, then the rest of the numbers, begin with these bytes."""
    for name, (dtype, raw) in parts.tensors.items():
        parts.tensors[name] = dtype, rest[: len(raw)] + raw[len(rest) :]
        rest = rest[len(raw) :]
    return parts


def signed(parts: Parts, rest: bytes) -> Parts:
    """The description says that the base is right, where the table can be read at all."""
    try:
        parts.table = json.loads(rest)
        parts.sign()
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        pass
    return parts


def seeds(folder: Path) -> None:
    """One input of each kind to begin with."""
    for which, storage in enumerate(VALID):
        header, body = split(valid(storage))
        parts = unpack(valid(storage))
        table = json.dumps(parts.table).encode()
        texts = {
            "file": valid(storage),
            "header": json.dumps(header).encode(),
            "description": json.dumps(parts.description).encode(),
            "table": table,
            "signed table": table,
            "numbers": body[:200],
        }
        for number, kind in enumerate(KINDS):
            (folder / f"{kind} {storage}").write_bytes(bytes([number * len(VALID) + which]) + texts[kind])
    raw = zlib.compress(b"{}")
    (folder / "small").write_bytes(b"\0" + assemble("{}", {"table": ("U8", raw)}))


def attempt(data: bytes) -> None:
    """One input: a network or a `TaskFileError`, with a message that is safe to print."""
    if not data:
        return
    kind, storage = KINDS[data[0] // len(VALID) % len(KINDS)], VALID[data[0] % len(VALID)]
    path = FOLDER / "a.task.safetensors"
    path.write_bytes(made(kind, storage, data[1:]))
    try:
        task = spalier.Task.load(path)
        str(task.info)
        task.build(base(), fold=bool(data[0] & 128))
        task.apply_(copy.deepcopy(base()))
    except TaskFileError as error:
        text = str(error)
        assert len(text) < 500 and text.isprintable(), ascii(text)  # noqa: PT018
    if attempt.count % 500 == 0:
        assert_unchanged(base(), BEFORE)
    attempt.count += 1


attempt.count = 0

if __name__ == "__main__":
    torch.set_num_threads(1)
    BEFORE = snapshot(base())
    CORPUS = Path(tempfile.mkdtemp())
    seeds(CORPUS)
    atheris.Setup([*sys.argv, str(CORPUS)], attempt)
    atheris.Fuzz()
