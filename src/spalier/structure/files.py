"""A structure as plain data: stable JSON, and a cache by the network's fingerprint."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spalier.errors import TraceError
from spalier.structure.coding import FORMAT, decoded, to_dict
from spalier.structure.costs import Cost
from spalier.structure.sites import Site
from spalier.structure.streams import Frozen, Member, Placed, Stream
from spalier.structure.structure import Extent, Structure
from spalier.structure.writers import FreeWriter


def from_dict(data: Mapping[str, Any]) -> Structure:
    """The structure that `to_dict` wrote down; it has no graph, so `prune_` needs ``check=False`` with it."""
    if data.get("format") != FORMAT:
        raise TraceError(
            f"the structure has format {data.get('format')!r}, expected {FORMAT}; trace the network again"
        )
    shapes = {name: tuple(shape) for name, shape in data["shapes"].items()}
    streams = tuple(
        Stream(s["name"], s["units"], tuple(Member(t, a, role, decoded(u)) for t, a, role, u in s["members"]))
        for s in data["streams"]
    )
    return Structure(
        data["fingerprint"],
        shapes,
        {name: data["ties"].get(name, name) for name in shapes},
        frozenset(data["parameters"]),
        streams,
        tuple(Frozen(*entry) for entry in data["frozen"]),
        tuple(
            FreeWriter(n, s, tuple((t, x) for t, x in members), m, a)
            for n, s, members, m, a in data["writers"]
        ),
        tuple(Extent(m, tuple(sizes), tuple(map(_placed, placed))) for m, sizes, placed in data["extents"]),
        tuple(
            Site(writer, stream, module, side, axis, _placed(placed), norm)
            for writer, stream, module, side, axis, placed, norm in data["sites"]
        ),
        tuple(
            Cost(module, times, tensor, tuple(axes), tuple(sizes), tuple(map(_placed, placed)))
            for module, times, tensor, axes, sizes, placed in data["costs"]
        ),
        tuple((layer, norm) for layer, norm in data["folds"]),
    )


def _placed(entries: list[Any]) -> Placed:
    return tuple((stream, decoded(units)) for stream, units in entries)


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
            Path(name).replace(self.folder / f"{structure.fingerprint}.json")
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
