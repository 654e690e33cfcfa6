"""A base as building sees it: its tensors, and a quick way to make networks of its kind around other tensors."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict
from collections.abc import Collection, Mapping
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from spalier.adapters.layers import described
from spalier.adapters.tensors import first_names, tensors_of
from spalier.errors import TaskFileError
from spalier.tasks import fingerprint

_PLAIN = (
    NoneType,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    enum.Enum,
    FunctionType,
    BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.memory_format,
)
_CONTAINERS = ("_parameters", "_buffers", "_modules")


class Base:
    """A frozen network that tasks are built on. It is only read."""

    def __init__(self, net: nn.Module) -> None:
        if not isinstance(net, nn.Module):
            raise TaskFileError("base", f"the base is a {type(net).__name__}, expected a torch.nn.Module")
        if fingerprint.is_adapted_or_pruned(net):
            raise TaskFileError(
                "base", "the base is adapted or pruned already; pass the plain network (detach_ gives it back)"
            )
        self.net = net
        named = tensors_of(net)
        self.ties = first_names(named)
        self.tensors = {name: named[name] for name, first in self.ties.items() if name == first}
        """Every parameter and buffer by its first name."""
        self.modules = dict(net.named_modules())
        self._described = described(net)
        self._architectures: dict[tuple[str, ...], str] = {}
        self._molds = [(module, _Mold(module)) for module in self.modules.values() if not _copies_itself(module)]
        self._others = [module for module in self.modules.values() if _copies_itself(module)]

    def architecture(self, heads: Collection[str]) -> str:
        """The digest of the architecture, without these modules' settings."""
        key = tuple(sorted(heads))
        if key not in self._architectures:
            self._architectures[key] = fingerprint.architecture(self._described, self.ties, key)
        return self._architectures[key]

    def owner(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds a tensor, and the tensor's key there."""
        path, _, key = name.rpartition(".")
        return self.modules[path], key

    def cast(self, tensors: Mapping[str, Tensor]) -> tuple[nn.Module, dict[str, nn.Module]]:
        """A network of the same kind that holds these tensors, in eval mode; and its modules by path.

        What `copy.deepcopy` does, without copying the tensors first, and twenty times as fast.
        """
        memo: dict[int, Any] = {id(self.tensors[name]): tensor for name, tensor in tensors.items()}
        for module, _ in self._molds:
            memo[id(module)] = type(module).__new__(type(module))
        for module in self._others:
            copy.deepcopy(module, memo)
        for module, mold in self._molds:
            memo[id(module)].__dict__.update(mold.filled(memo))
        made = {path: memo[id(module)] for path, module in self.modules.items()}
        for module in made.values():
            module.__dict__["training"] = False
        return made[""], made


class _Mold:
    """What a module's dictionary holds: things that can be shared, and things that need a copy of their own."""

    def __init__(self, module: nn.Module) -> None:
        self._shared = {k: v for k, v in module.__dict__.items() if k not in _CONTAINERS and _is_plain(v)}
        self._own = [(k, v) for k, v in module.__dict__.items() if k not in self._shared]

    def filled(self, memo: dict[int, Any]) -> dict[str, Any]:
        """The dictionary of a copy, tensors and modules taken from ``memo``."""
        found = self._shared.copy()
        for key, value in self._own:
            if key in _CONTAINERS:
                found[key] = type(value)((k, v if v is None else memo[id(v)]) for k, v in value.items())
            elif not value and type(value) in (dict, OrderedDict, set, list):
                found[key] = type(value)()
            else:
                found[key] = copy.deepcopy(value, memo)
        return found


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _copies_itself(module: nn.Module) -> bool:
    """Classes that say themselves how they are copied."""
    kind = type(module)
    return (
        hasattr(kind, "__deepcopy__")
        or kind.__reduce_ex__ is not object.__reduce_ex__
        or kind.__reduce__ is not object.__reduce__
        or "__getstate__" in {name for parent in kind.__mro__[:-1] for name in vars(parent)}
        or kind.__setstate__ is not nn.Module.__setstate__
        or hasattr(kind, "__slots__")
    )
