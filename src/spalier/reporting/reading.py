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
from spalier.files import reason
from spalier.reporting.model import Epoch, Example, Layer, Scores
from spalier.reporting.naming import clean
from spalier.tasks.table import LowRank, Pointwise, Row
from spalier.tasks.task import Task

MAX_SHEET = 1 << 24
MAX_SIDE = 512
MAX_PIXELS = 1 << 24
MAX_TEXT = 1 << 28
LEAST, MOST = 1e-100, 1e15
"""What numbers of a run lie between, zero aside; beyond, nothing was measured and nothing can be drawn."""


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


def number(value: Any, path: Path) -> float | None:
    """A finite number, or None for whatever else; one that is too large to be true is refused."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value and not LEAST < abs(value) < MOST:  # ints of any size compare with floats
        raise wrong(
            path,
            "has a number that is too large or too small to be true",
            f"sizes from {LEAST:g} to {MOST:g}",
        )
    return value


def amount(value: Any, path: Path) -> float | None:
    """A number that is not negative, or None."""
    found = number(value, path)
    if found is not None and found < 0:
        raise wrong(path, f"has the amount {found:g}", "none below 0")
    return found


def share(value: Any) -> float | None:
    """A number from 0 to 1, or None for whatever else."""
    is_share = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    return value if is_share else None


def is_count(value: Any) -> bool:
    """Whether something is a whole number that can be drawn."""
    return type(value) is int and 0 <= value < MOST


def target(block: dict[str, Any], path: Path) -> float | None:
    """The density, or bytes, that a block was to lead to."""
    found = number(block["row"].get("target"), path)
    if found is not None and found <= 0:
        raise wrong(path, f"has the target {found:g}", "one above 0")
    return found


def blocks(folder: Path) -> list[tuple[int, Path, dict[str, Any]]]:
    """The blocks of a run that are done, in order: number, file, what it says."""
    found, names = [], dict[str, Path]()
    paths = [p for p in (folder / "blocks").glob("*.json") if p.stem.isascii() and p.stem.isdecimal()]
    for path in sorted(paths, key=lambda p: (int(p.stem), p.name)):  # NN.scores.json lie beside them
        block = json_of(path, "what is known of a block")
        _check_block(path, block)
        name = str(block["row"].get("task"))
        if name in names:
            raise wrong(
                path, f"has the task {name!a}, and so has {names[name].name!a}", "a task for each block"
            )
        names[name] = path
        found.append((int(path.stem), path, block))
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
    try:
        if path.stat().st_size > MAX_TEXT:
            raise wrong(path, "has more than 256 MB", "metrics of a run")
        lines = path.read_text("utf-8", errors="replace").split("\n")
    except OSError as error:
        raise wrong(path, f"cannot be read ({reason(error)})", "metrics of a run") from error
    found = []
    for place, line in enumerate(lines[:-1]):
        try:
            entry = json.loads(line)
            if entry["kind"] == "epoch":
                found.append(_epoch(path, entry))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise wrong(path, f"has a bad line, number {place + 1}", "metrics of a run") from error
    return found


def _epoch(path: Path, entry: dict[str, Any]) -> Epoch:
    block, step = entry["block"], entry["step"]
    if not is_count(block) or not is_count(step):
        raise ValueError
    return Epoch(block, step, number(entry["loss"], path), share(entry["validation"]))


def confusion(path: Path, block: dict[str, Any], classes: int) -> dict[str, list[list[int]]]:
    """The confusions of a block that fit its classes."""
    found = {}
    for part, counts in (block.get("confusion") or {}).items():
        if counts is None:
            continue
        if not _is_square(counts, classes):
            what = f"has a confusion of {clean(str(part))!a} samples that does not fit its {classes} classes"
            raise wrong(path, what, f"{classes} rows of {classes} counts")
        found[part] = counts
    return found


def _is_square(counts: Any, size: int) -> bool:
    rows = counts if isinstance(counts, list) else []
    fit = all(isinstance(row, list) and len(row) == size for row in rows)
    return len(rows) == size and fit and all(is_count(n) for row in rows for n in row)


def scores(folder: Path, block: int) -> Scores | None:
    """How the units of a block were scored before its prune; older runs do not say."""
    path = folder / "blocks" / f"{block:02}.scores.json"
    if not path.exists():
        return None
    found = json_of(path, "the scores of a block")
    try:
        streams = {clean(name): (list(c["kept"]), list(c["removed"])) for name, c in found["streams"].items()}
        edges = [float(number(edge, path) or 0) for edge in found["edges"]]
        counts = [n for pair in streams.values() for side in pair for n in side]
        if not all(map(is_count, [*counts, found["samples"]])):
            raise ValueError
        sizes = {len(side) for pair in streams.values() for side in pair}
        rising = all(0 < a < b for a, b in itertools.pairwise(edges))
        if sizes - {len(edges) + 1} or len(edges) < 2 or not rising:
            raise ValueError
        return Scores(clean(str(found["criterion"])), found["samples"], edges, streams)
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
