"""What a task says of itself: the part of a file that people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from spalier.errors import TaskFileError
from spalier.tasks.fingerprint import Fingerprint
from spalier.tasks.storage import STORAGES, Storage
from spalier.tasks.text import check_name, check_plain, check_text

FORMAT = 1


@dataclass(frozen=True)
class Density:
    """How much of the base is left, three ways: (kept, of), or None where it is not known."""

    channels: tuple[int, int] | None
    """Output channels of the layers that write streams."""
    weights: tuple[int, int] | None
    """Parameters of the network."""
    macs: tuple[int, int] | None
    """Multiply-accumulates of one sample."""


@dataclass(frozen=True)
class Description:
    """What a task is. Print it."""

    name: str
    adapter: Mapping[str, Any]
    """Its kind and its settings."""
    base: Fingerprint
    density: Density
    learned: int
    """How many numbers were learned."""
    storage: Storage = "exact"
    metrics: Mapping[str, float] = field(default_factory=dict)
    classes: Sequence[str] = ()
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    licence: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.name)
        _check("adapter", isinstance(self.adapter.get("kind"), str), "a dict with a kind")
        _check("learned", type(self.learned) is int and 0 <= self.learned < 2**63, "a number")
        _check("storage", self.storage in STORAGES, f"one of {', '.join(STORAGES)}")
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.metrics.values())
        _check("metrics", numbers, "a dict of numbers")
        _check("classes", all(isinstance(c, str) for c in self.classes), "a list of names")
        check_text("licence", self.licence)
        for name in ("adapter", "metrics", "classes", "preprocessing", "provenance"):
            check_plain(name, getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; fields that say nothing are left out."""
        density = {f.name: value for f in fields(Density) if (value := getattr(self.density, f.name))}
        found: dict[str, Any] = {
            "format": FORMAT,
            "name": self.name,
            "adapter": dict(self.adapter),
            "base": {"architecture": self.base.architecture, "values": self.base.values},
            "density": {key: list(pair) for key, pair in density.items()},
            "learned": self.learned,
            "storage": self.storage,
        }
        for name in ("metrics", "preprocessing", "provenance"):
            found |= {name: dict(getattr(self, name))} if getattr(self, name) else {}
        found |= {"classes": list(self.classes)} if self.classes else {}
        found |= {"licence": self.licence} if self.licence else {}
        return found

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Description:
        """What `to_dict` wrote; anything else is an error."""
        if data.get("format") != FORMAT or type(data.get("format")) is not int:
            raise TaskFileError(
                "version",
                f"the file has format {str(data.get('format'))[:30]!a}, expected {FORMAT}: it was written by "
                "another version of Spalier; update this one",
            )
        rest = {key: value for key, value in data.items() if key != "format"}
        needed = {"name", "adapter", "base", "density", "learned", "storage"}
        _check("description", needed <= set(rest), f"the fields {', '.join(sorted(needed))}")
        unknown = set(rest) - {f.name for f in fields(Description)}
        _check("description", not unknown, f"no {str(min(unknown, default=''))[:40]!a}")
        kinds: dict[str, type] = {
            **dict.fromkeys(("adapter", "metrics", "preprocessing", "provenance", "base", "density"), dict),
            **dict.fromkeys(("name", "storage", "licence"), str),
            "classes": list,
        }
        for key, kind in kinds.items():
            _check(key, isinstance(rest.get(key, kind()), kind), f"a {kind.__name__}")
        return Description(
            **{
                **rest,
                "base": _fingerprint(rest["base"]),
                "density": _density(rest["density"]),
                "classes": tuple(rest.get("classes", ())),
            }
        )

    def __str__(self) -> str:
        settings = ", ".join(f"{k}={v}" for k, v in self.adapter.items() if k != "kind")
        lines = [
            ("name", self.name),
            ("adapter", f"{self.adapter['kind']}({settings})"),
            ("learned", f"{self.learned:,} parameters, stored as {self.storage}"),
            *((f.name, _share(getattr(self.density, f.name))) for f in fields(Density)),
            *((key, f"{value:g}") for key, value in self.metrics.items()),
            ("classes", _some(self.classes)),
            *((key, str(value)) for key, value in self.preprocessing.items()),
            ("licence", self.licence or "not stated"),
            *((key, str(value)) for key, value in self.provenance.items()),
            ("base", f"{self.base.architecture[:12]} with values {self.base.values[:12]}"),
        ]
        width = max(len(key) for key, _ in lines)
        return "\n".join(f"{key:{width}}  {value}" for key, value in lines)


def _fingerprint(data: dict[str, Any]) -> Fingerprint:
    hexadecimal = all(
        isinstance(v, str) and len(v) == 64 and set(v) <= set("0123456789abcdef") for v in data.values()
    )
    _check("base", set(data) == {"architecture", "values"} and hexadecimal, "two SHA-256 digests")
    return Fingerprint(data["architecture"], data["values"])


def _density(data: dict[str, Any]) -> Density:
    names = {f.name for f in fields(Density)}
    _check("density", set(data) <= names, f"only {', '.join(sorted(names))}")
    for pair in data.values():
        fits = (
            isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and 0 <= n < 2**63 for n in pair)
        )
        _check("density", fits and pair[0] <= pair[1] and pair[1] > 0, "pairs of kept and of")
    return Density(**{name: tuple(data[name]) if name in data else None for name in names})


def _check(field: str, holds: bool, expected: str) -> None:
    if not holds:
        raise TaskFileError(
            "metadata", f"the description's {field} is not what it has to be: expected {expected}"
        )


def _share(pair: tuple[int, int] | None) -> str:
    return "not known" if pair is None else f"{pair[0]:,} of {pair[1]:,} ({pair[0] / pair[1]:.1%})"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{len(names)}: {shown}" if names else "not stated"
