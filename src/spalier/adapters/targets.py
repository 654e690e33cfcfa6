"""Which modules of a network a caller means: by name, by pattern, by predicate, or all that can be adapted.

Layers that share one weight have to be treated alike, since they stay one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from spalier.adapters.geometry import Geometry, geometries
from spalier.adapters.kinds import Adapter, ByLayer
from spalier.errors import ConfigError, TargetError, TiedWeightError, UnsupportedLayerError
from spalier.text import near

Predicate = Callable[[str, nn.Module], bool]
Targets = str | Sequence[str] | Predicate | None

SUPPORTED = "Linear, Conv1d/2d/3d, ConvTranspose1d/2d/3d, Embedding, MultiheadAttention and Hugging Face's Conv1D"


class Names:
    """Every module of a network once, with all the names that it goes by."""

    def __init__(self, net: nn.Module) -> None:
        self.of: dict[nn.Module, list[str]] = {}
        for name, module in net.named_modules(remove_duplicate=False):
            self.of.setdefault(module, []).append(name)

    def first(self, module: nn.Module) -> str:
        """The name to call a module by."""
        return self.of[module][0] or "(the network itself)"


def patterns_of(what: str, value: str | Sequence[str]) -> list[str]:
    """One pattern or several, as a list; anything else is an error."""
    patterns = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else None
    if not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise ConfigError(f"{what} is {value!r}, expected a name, a pattern such as 'layer4.*', or a list of them")
    return patterns


def select_named(names: Names, what: str, value: str | Sequence[str] | None) -> set[nn.Module]:
    """The modules that each pattern names, and all inside of them; a pattern that matches none is an error."""
    chosen: set[nn.Module] = set()
    for pattern in patterns_of(what, value) if value is not None else []:
        found = [m for m, several in names.of.items() if any(_is_within(name, pattern) for name in several)]
        if not found:
            known = [name for several in names.of.values() for name in several if name]
            raise TargetError(
                f"{what} {pattern!r} matches no module of the network; expected a name or a pattern such as "
                f"{near(pattern, known)}"
            )
        chosen.update(found)
    return chosen


def select_adaptable(
    names: Names, targets: Targets, excluded: set[nn.Module]
) -> tuple[dict[nn.Module, dict[str, Geometry]], dict[nn.Module, str]]:
    """The layers to adapt, with the geometry of their weights, in the network's order; and those that cannot be.

    A layer that is named and cannot be adapted is an error, and so is a network that has no others.
    """
    if targets is None:
        chosen: Iterable[nn.Module] = names.of
    elif callable(targets) and not isinstance(targets, str):
        chosen = [m for m in names.of if m not in excluded and _could_adapt(m) and targets(names.of[m][0], m)]
        if not chosen:
            raise TargetError(
                f"the targets predicate chose no layer; it was asked for each {SUPPORTED} outside of the head"
            )
    else:
        chosen = _under_each(names, patterns_of("targets", targets), excluded)
    found: dict[nn.Module, dict[str, Geometry]] = {}
    refused: dict[nn.Module, str] = {}
    for module in chosen:
        if module not in excluded:
            try:
                found[module] = geometries(module)
            except UnsupportedLayerError as error:
                refused[module] = str(error)
    found = {module: weights for module, weights in found.items() if weights}
    if refused and (targets is not None or not found):
        module, why = next(iter(refused.items()))
        raise UnsupportedLayerError(f"{names.first(module)} ({type(module).__name__}) cannot be adapted: {why}")
    # the table says what was found, in a few words
    return found, {module: re.split("[,;]", why)[0] for module, why in refused.items()}


def _under_each(names: Names, patterns: list[str], excluded: set[nn.Module]) -> list[nn.Module]:
    chosen: set[nn.Module] = set()
    for pattern in patterns:
        found = select_named(names, "target", pattern)
        if not any(_could_adapt(m) for m in found if m not in excluded):
            kinds = ", ".join(sorted({type(m).__name__ for m in found}))
            where = " outside of the head" if excluded & found else ""
            raise UnsupportedLayerError(
                f"target {pattern!r} holds no layer that can be adapted{where}, but {kinds}; expected {SUPPORTED}"
            )
        chosen.update(found)
    return [module for module in names.of if module in chosen]


def _could_adapt(module: nn.Module) -> bool:
    try:
        return bool(geometries(module))
    except UnsupportedLayerError:
        return True  # of a supported kind: to be reported, not passed over


def _is_within(name: str, pattern: str) -> bool:
    """True where the pattern matches a module's name or that of any module around it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: n + 1]), pattern) for n in range(len(parts)))


Owner = tuple[nn.Module, str]
Keys = Mapping[nn.Module, set[str]]


def check_ties(names: Names, adapted: Keys, learned: set[nn.Module], also: Keys) -> None:
    """Refuse a selection that would tear tied weights apart."""
    for owners in _shared(names):
        treatments = {_treatment(*owner, adapted, learned, also) for owner in owners}
        if len(treatments) > 1:
            raise TiedWeightError(
                f"{_ties_listed(names, owners)} share one weight but would be treated differently "
                f"({', '.join(sorted(treatments))}); select all of them alike, or untie them first"
            )
        if treatments == {"adapted"} and not _agree([geometries(m)[key] for m, key in owners]):
            raise TiedWeightError(
                f"{_ties_listed(names, owners)} share one weight but read it in different shapes; "
                "leave them out with targets="
            )


def _shared(names: Names) -> list[list[Owner]]:
    owners: dict[int, list[Owner]] = {}
    for module in names.of:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, key))
    return [found for found in owners.values() if len(found) > 1]


def _treatment(module: nn.Module, key: str, adapted: Keys, learned: set[nn.Module], also: Keys) -> str:
    if module in learned or key in also.get(module, ()):
        return "learned"
    return "adapted" if key in adapted.get(module, ()) else "frozen"


def _agree(shapes: list[Geometry]) -> bool:
    """The same geometry, or one matrix read both ways, as between an embedding and the output layer."""
    straight = {(g.inputs, g.outputs) if g.inputs_first else (g.outputs, g.inputs) for g in shapes}
    rest = {(g.groups, g.kernel) for g in shapes}
    mixed = len({g.inputs_first for g in shapes}) > 1
    return len(straight) == 1 and len(rest) == 1 and not (mixed and any(g.kernel for g in shapes))


def _ties_listed(names: Names, owners: list[Owner]) -> str:
    return " and ".join(f"{names.first(module)}.{key}" for module, key in owners)


AdapterOf = Callable[[nn.Module, str], Adapter | None]


def adapters_of(names: Names, adapter: Adapter | ByLayer, chosen: Mapping[nn.Module, Iterable[str]]) -> AdapterOf:
    """The adapter of each weight of the layers that were chosen; of a `ByLayer`, by any name that the weight has."""
    if not isinstance(adapter, ByLayer):
        return lambda layer, weight: adapter
    by_layer = adapter
    named: dict[str, int] = {}  # tied weights are one, whichever of them is named
    for layer, weights in chosen.items():
        for weight in weights:
            mark = id(layer.get_parameter(weight))
            named |= {f"{path}.{weight}" if path else weight: mark for path in names.of[layer]}
    for name in by_layer.adapters:
        if name not in named:
            raise TargetError(
                f"ByLayer names {name!r}, which is no weight that can be adapted here; expected names such as "
                f"{near(name, named)}"
            )
    found = {named[name]: each for name, each in by_layer.adapters.items()}
    return lambda layer, weight: found.get(id(layer.get_parameter(weight)))
