"""The files of a run that a report needs, read with suspicion: another process may still be writing them."""

from __future__ import annotations

import io
import itertools
import json
import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spalier.errors import ConfigError, RunError
from spalier.reporting.model import Epoch, Example, Layer, Scores
from spalier.reporting.naming import clean
from spalier.tasks.files import reason
from spalier.tasks.table import LowRank, Pointwise, Row
from spalier.tasks.task import Task

MAX_SHEET = 1 << 24
MAX_SIDE = 512
MAX_PIXELS = 1 << 24
MAX_TEXT = 1 << 28


def wrong(path: Path, what: str, expected: str) -> RunError:
    """The error for a file that is not what it has to be."""
    return RunError(
        "folder", f"{str(path)!a} {what}; expected {expected}: restore it, or remove it and run again"
    )


def json_of(path: Path, expected: str) -> Any:
    """What a file of JSON holds."""
    try:
        if path.stat().st_size > MAX_TEXT:
            raise wrong(path, "has more than 256 MB", expected)
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise wrong(path, f"cannot be read ({reason(error)})", expected) from error
    except (ValueError, RecursionError) as error:
        raise wrong(path, "is not whole, or no JSON", expected) from error


def number(value: Any) -> float | None:
    """A finite number, or None for whatever else."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if fits else None


def share(value: Any) -> float | None:
    """A number from 0 to 1, or None for whatever else."""
    found = number(value)
    return found if found is not None and 0 <= found <= 1 else None


def blocks(folder: Path) -> list[tuple[int, dict[str, Any]]]:
    """The blocks of a run that are done, in order, by number."""
    found = []
    for path in sorted((folder / "blocks").glob("*.json")):
        if path.stem.isdigit():  # NN.scores.json lie beside them
            block = json_of(path, "what is known of a block")
            _check_block(path, block)
            found.append((int(path.stem), block))
    return found


def _check_block(path: Path, block: Any) -> None:
    expected = "a row, names of classes and their confusion"
    if not isinstance(block, dict) or not isinstance(block.get("row"), dict):
        raise wrong(path, "has no row", expected)
    kinds = {"classes": list, "confusion": dict, "examples": dict}
    for name, kind in kinds.items():
        if block.get(name) is not None and not isinstance(block[name], kind):
            raise wrong(path, f"has {name} of another kind", expected)


def epochs(folder: Path) -> list[Epoch]:
    """The lines of the metrics, one for each epoch; a last line that is not whole is still being written."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text("utf-8", errors="replace").split("\n")
    found = []
    for place, line in enumerate(lines[:-1]):
        try:
            entry = json.loads(line)
            if entry["kind"] == "epoch":
                values = number(entry["loss"]), share(entry["validation"])
                found.append(Epoch(int(entry["block"]), int(entry["step"]), *values))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise wrong(path, f"has a bad line, number {place + 1}", "metrics of a run") from error
    return found


def confusion(block: dict[str, Any], classes: int) -> dict[str, list[list[int]]]:
    """The confusions of a block that fit its classes."""
    found = {}
    for part, counts in (block.get("confusion") or {}).items():
        if counts is None:
            continue
        if not _is_square(counts, classes):
            raise RunError(
                "folder",
                f"a block's confusion of {part} samples does not fit its {classes} classes; expected a square",
            )
        found[part] = counts
    return found


def _is_square(counts: Any, size: int) -> bool:
    rows = counts if isinstance(counts, list) else []
    fit = all(isinstance(row, list) and len(row) == size for row in rows)
    return len(rows) == size and fit and all(type(n) is int and n >= 0 for row in rows for n in row)


def scores(folder: Path, block: int) -> Scores | None:
    """How the units of a block were scored before its prune; older runs do not say."""
    path = folder / "blocks" / f"{block:02}.scores.json"
    if not path.exists():
        return None
    found = json_of(path, "the scores of a block")
    try:
        streams = {clean(name): (list(c["kept"]), list(c["removed"])) for name, c in found["streams"].items()}
        edges = [float(edge) for edge in found["edges"]]
        if any(type(n) is not int or n < 0 for pair in streams.values() for counts in pair for n in counts):
            raise ValueError
        sizes = {len(counts) for pair in streams.values() for counts in pair}
        rising = all(0 < a < b < math.inf for a, b in itertools.pairwise(edges))
        if sizes - {len(edges) + 1} or len(edges) < 2 or not rising:
            raise ValueError
        return Scores(clean(str(found["criterion"])), int(found["samples"]), edges, streams)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise wrong(path, "has other fields", "counts of scores between rising edges") from error


def examples(folder: Path, number: int, block: dict[str, Any]) -> list[Example]:
    """The images of a block that lie on its sheet, one by one; none where they cannot be shown."""
    path, said = folder / "blocks" / f"{number:02}.png", block.get("examples")
    if not said or not path.exists():
        return []
    try:
        side, columns, items = int(said["side"]), int(said["columns"]), list(said["items"])
        told = [(int(i["label"]), int(i["guess"]), float(i["confidence"])) for i in items]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise wrong(path.with_suffix(".json"), "has other examples", "their labels and guesses") from error
    classes = range(len(block.get("classes") or []))
    if any(label not in classes or guess not in classes or not 0 <= sure <= 1 for label, guess, sure in told):
        raise wrong(path.with_suffix(".json"), "has examples of other classes", "their numbers")
    tiles = _tiles(path, side, columns, len(told))
    return [Example(*each, png) for each, png in zip(told, tiles, strict=True)]


def _tiles(path: Path, side: int, columns: int, count: int) -> list[bytes]:
    """The pieces of a sheet, written anew, so that nothing of its file but pixels gets into a page."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(
            "images on a report need Pillow, which is not installed: pip install spalier[train]"
        ) from None
    expected = f"a PNG with {count} tiles of {side} pixels in rows of {columns}"
    raw = path.read_bytes() if path.stat().st_size <= MAX_SHEET else b""
    whole = (side * columns, side * math.ceil(count / max(columns, 1)))
    is_large = not 0 < side <= MAX_SIDE or not 0 < columns <= MAX_SIDE or math.prod(whole) > MAX_PIXELS
    if is_large or _size(raw) != whole:
        raise wrong(path, "is no sheet of these examples", expected)
    try:
        with Image.open(io.BytesIO(raw), formats=["PNG"]) as image:
            sheet = image.convert("RGB")
    except Exception as error:  # whatever a decoder makes of a broken file
        raise wrong(path, f"cannot be decoded ({type(error).__name__})", expected) from error
    corners = [(side * (i % columns), side * (i // columns)) for i in range(count)]
    return [_png(sheet.crop((x, y, x + side, y + side))) for x, y in corners]


def _png(image: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def _size(png: bytes) -> tuple[int, int] | None:
    """The sides of a PNG, None for whatever else."""
    if png[:8] != b"\x89PNG\r\n\x1a\n" or png[12:16] != b"IHDR" or len(png) < 24:
        return None
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def layers(task: Task) -> list[Layer]:
    """The layers of the base with the channels that a task keeps of each, in the order of the network."""
    return list(_layers(task))


def _layers(task: Task) -> Iterator[Layer]:
    heads = task.table.heads
    for row in task.table.rows:
        if len(row.shape) < 2 or row.path in heads:
            continue
        for key in row.keys:
            if key.endswith("weight"):
                name = row.path if key == "weight" else f"{row.path}.{key}".strip(".")
                yield Layer(name, _kept(row, task.masks))


def _kept(row: Row, masks: Sequence[Any]) -> Any:
    source = row.source
    axis = int(isinstance(source, LowRank | Pointwise) and source.inputs_first)
    kept = np.ones(row.shape[axis], bool)
    for placement in row.axes[axis]:
        kept = kept & placement.kept(masks)
    return kept
