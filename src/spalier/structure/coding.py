"""A structure as plain data that JSON can hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from spalier._runs import pattern, pattern_of
from spalier.structure.labels import Ints

FORMAT = 3


def to_dict(structure: Any) -> dict[str, Any]:
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
            [e.module, list(e.sizes), [_placed(placed) for placed in e.placed]] for e in structure.extents
        ],
        "sites": [
            [s.writer, s.stream, s.module, s.side, s.axis, _placed(s.placed), s.norm] for s in structure.sites
        ],
        "costs": [
            [c.module, c.times, c.tensor, list(c.axes), list(c.sizes), [_placed(p) for p in c.placed]]
            for c in structure.costs
        ],
        "folds": [list(pair) for pair in structure.folds],
    }


def _placed(placed: Any) -> list[Any]:
    return [[stream, _coded(units)] for stream, units in placed]


def _coded(units: Ints) -> list[int] | dict[str, int]:
    """Units along an axis, as a pattern if they are one."""
    found = pattern_of(units)
    return [int(unit) for unit in units] if found is None else dict(zip(_FIELDS, found, strict=True))


_FIELDS = ("units", "run", "times")


def decoded(code: list[int] | dict[str, int]) -> Ints:
    """Units along an axis, as they were before they were written down."""
    return pattern(*(code[field] for field in _FIELDS)) if isinstance(code, dict) else np.array(code)
