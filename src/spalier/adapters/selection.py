"""Which modules a caller means: by pattern, by predicate, or all that can be adapted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from spalier.adapters.layers import Geometry, geometries
from spalier.errors import ConfigError, TargetError, UnsupportedLayerError

Predicate = Callable[[str, nn.Module], bool]
Targets = str | Sequence[str] | Predicate | None

SUPPORTED = (
    "Linear, Conv1d/2d/3d, ConvTranspose1d/2d/3d, Embedding, MultiheadAttention and Hugging Face's Conv1D"
)


class Names:
    """Every module of a network once, with all the names that it goes by."""

    def __init__(self, net: nn.Module) -> None:
        self.of: dict[nn.Module, list[str]] = {}
        for name, module in net.named_modules(remove_duplicate=False):
            self.of.setdefault(module, []).append(name)

    def first(self, module: nn.Module) -> str:
        """The name to call a module by."""
        return self.of[module][0] or "(the network itself)"

    def under(self, pattern: str) -> list[nn.Module]:
        """The modules that a pattern names, and everything inside of them."""
        return [m for m, names in self.of.items() if any(_is_within(n, pattern) for n in names)]

    def unmatched(self, what: str, pattern: str) -> TargetError:
        """The error for a pattern that matches nothing, with names that are close to it."""
        known = [name for names in self.of.values() for name in names if name]
        close = get_close_matches(pattern, known, n=3) or known[:3]
        return TargetError(
            f"{what} {pattern!r} matches no module of the network; "
            f"expected a name or a pattern such as {', '.join(map(repr, close)) or 'none: it has no modules'}"
        )


def patterns_of(what: str, value: str | Sequence[str]) -> list[str]:
    """One pattern or several, as a list; anything else is an error."""
    patterns = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else None
    if not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise ConfigError(
            f"{what} is {value!r}, expected a name, a pattern such as 'layer4.*', or a list of them"
        )
    return patterns


def select_named(names: Names, what: str, value: str | Sequence[str] | None) -> set[nn.Module]:
    """The modules under each pattern; a pattern that matches none is an error."""
    chosen: set[nn.Module] = set()
    for pattern in patterns_of(what, value) if value is not None else []:
        found = names.under(pattern)
        if not found:
            raise names.unmatched(what, pattern)
        chosen.update(found)
    return chosen


def select_adaptable(
    names: Names, targets: Targets, excluded: set[nn.Module]
) -> dict[nn.Module, dict[str, Geometry]]:
    """The layers to adapt, with the geometry of their weights, in the network's order."""
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
    found = {m: _geometries(names, m) for m in chosen if m not in excluded}
    return {module: weights for module, weights in found.items() if weights}


def _under_each(names: Names, patterns: list[str], excluded: set[nn.Module]) -> list[nn.Module]:
    chosen: set[nn.Module] = set()
    for pattern in patterns:
        found = names.under(pattern)
        if not found:
            raise names.unmatched("target", pattern)
        if not any(_could_adapt(m) for m in found if m not in excluded):
            kinds = ", ".join(sorted({type(m).__name__ for m in found}))
            where = " outside of the head" if excluded & set(found) else ""
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


def _geometries(names: Names, module: nn.Module) -> dict[str, Geometry]:
    try:
        return geometries(module)
    except UnsupportedLayerError as error:
        kind = type(module).__name__
        raise UnsupportedLayerError(f"{names.first(module)} ({kind}) cannot be adapted: {error}") from None


def _is_within(name: str, pattern: str) -> bool:
    """True where the pattern matches a module's name or that of any module around it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: n + 1]), pattern) for n in range(len(parts)))
