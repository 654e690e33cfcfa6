"""A structure as plain data: stable JSON, and a cache by the network's fingerprint."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spalier.errors import TraceError
from spalier.structure.labels import Ints
from spalier.structure.streams import Frozen, Member, Placed, Stream
from spalier.structure.structure import Extent, Structure
from spalier.structure.writers import FreeWriter

FORMAT = 1


def to_dict(structure: Structure) -> dict[str, Any]:
    """A structure as JSON can hold it; equal structures give equal data."""
    return {
        "format": FORMAT,
        "fingerprint": structure.fingerprint,
        "shapes": {name: list(shape) for name, shape in sorted(structure.shapes.items())},
        "ties": {name: first for name, first in sorted(structure.names.items()) if name != first},
        "parameters": sorted(structure.parameters),
        "streams": [
            {
                "name": stream.name,
                "units": stream.size,
                "members": [[m.tensor, m.axis, m.role, _coded(m.units)] for m in stream.members],
            }
            for stream in structure.streams
        ],
        "frozen": [[f.tensor, f.axis, f.count, f.size, f.reason] for f in structure.frozen],
        "writers": [
            [w.name, w.stream, [list(member) for member in w.members], w.module, w.axis]
            for w in structure.writers
        ],
        "extents": [
            [e.module, list(e.sizes), [[[stream, _coded(u)] for stream, u in placed] for placed in e.placed]]
            for e in structure.extents
        ],
    }


def from_dict(data: Mapping[str, Any]) -> Structure:
    """The structure that `to_dict` wrote down; it has no graph, so `prune_` needs ``check=False`` with it."""
    if data.get("format") != FORMAT:
        raise TraceError(f"the structure has format {data.get('format')!r}, expected {FORMAT}; trace the network again")
    shapes = {name: tuple(shape) for name, shape in data["shapes"].items()}
    streams = tuple(
        Stream(s["name"], s["units"], tuple(Member(t, a, role, _decoded(u)) for t, a, role, u in s["members"]))
        for s in data["streams"]
    )
    return Structure(
        data["fingerprint"],
        shapes,
        {name: data["ties"].get(name, name) for name in shapes},
        frozenset(data["parameters"]),
        streams,
        tuple(Frozen(*entry) for entry in data["frozen"]),
        tuple(FreeWriter(n, s, tuple((t, x) for t, x in members), m, a) for n, s, members, m, a in data["writers"]),
        tuple(Extent(m, tuple(sizes), tuple(map(_placed, placed))) for m, sizes, placed in data["extents"]),
    )


def _placed(entries: list[Any]) -> Placed:
    return tuple((stream, _decoded(units)) for stream, units in entries)


def _coded(units: Ints) -> list[int] | dict[str, int]:
    """Units along an axis; nearly always each of n in turn, for a run of indices each, the whole several times over."""
    count = int(units.max()) + 1
    for run in (1, int((units != units[0]).argmax()) or len(units)):
        if len(units) % (count * run) == 0:
            times = len(units) // (count * run)
            if np.array_equal(units, _pattern(count, run, times)):
                return {"units": count, "run": run, "times": times}
    return [int(unit) for unit in units]


def _decoded(code: list[int] | dict[str, int]) -> Ints:
    return _pattern(code["units"], code["run"], code["times"]) if isinstance(code, dict) else np.array(code)


def _pattern(units: int, run: int, times: int) -> Ints:
    return np.tile(np.repeat(np.arange(units), run), times)


class Cache:
    """Structures in a folder, one JSON file for each fingerprint."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def get(self, fingerprint: str) -> Structure | None:
        """The structure of a network with this fingerprint; None if it is not there, or not whole."""
        try:
            data = json.loads((self.folder / f"{fingerprint}.json").read_text("utf-8"))
            structure = from_dict(data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, TraceError):
            return None
        return structure if structure.fingerprint == fingerprint else None

    def put(self, structure: Structure) -> None:
        """Write a structure down, all of it or nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(to_dict(structure), separators=(",", ":"))
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".json")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, self.folder / f"{structure.fingerprint}.json")
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
