"""Weights that several layers share: they are adapted together or not at all, and stay one tensor."""

from __future__ import annotations

from torch import nn

from spalier.adapters.layers import Geometry, geometries
from spalier.adapters.selection import Names
from spalier.errors import TiedWeightError

Owner = tuple[nn.Module, str]


def check_ties(names: Names, adapted: dict[nn.Module, set[str]], learned: set[nn.Module]) -> None:
    """Refuse a selection that would tear tied weights apart."""
    for owners in _shared(names):
        treatments = {_treatment(owner, adapted, learned) for owner in owners}
        if len(treatments) > 1:
            raise TiedWeightError(
                f"{_listed(names, owners)} share one weight but would be treated differently "
                f"({', '.join(sorted(treatments))}); select all of them alike, or untie them first"
            )
        if treatments == {"adapted"} and not _agree([geometries(m)[key] for m, key in owners]):
            raise TiedWeightError(
                f"{_listed(names, owners)} share one weight but read it in different shapes; "
                "leave them out with targets="
            )


def _shared(names: Names) -> list[list[Owner]]:
    owners: dict[int, list[Owner]] = {}
    for module in names.of:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, key))
    return [found for found in owners.values() if len(found) > 1]


def _treatment(owner: Owner, adapted: dict[nn.Module, set[str]], learned: set[nn.Module]) -> str:
    module, key = owner
    if module in learned:
        return "learned"
    return "adapted" if key in adapted.get(module, ()) else "frozen"


def _agree(shapes: list[Geometry]) -> bool:
    """The same geometry, or one matrix read both ways, as between an embedding and the output layer."""
    straight = {(g.inputs, g.outputs) if g.inputs_first else (g.outputs, g.inputs) for g in shapes}
    rest = {(g.groups, g.kernel) for g in shapes}
    mixed = len({g.inputs_first for g in shapes}) > 1
    return len(straight) == 1 and len(rest) == 1 and not (mixed and any(g.kernel for g in shapes))


def _listed(names: Names, owners: list[Owner]) -> str:
    return " and ".join(f"{names.first(module)}.{key}" for module, key in owners)
