"""A base as building sees it: its tensors, and a quick way to copy its modules around other tensors."""

from __future__ import annotations

import copy
import enum
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from spalier.adapters.geometry import (
    Geometry,
    described,
    first_names,
    geometries,
    is_uninitialised,
    plain_tensors,
    tensors_of,
)
from spalier.errors import SpalierError, TaskFileError
from spalier.tasks.format import architecture_digest, quoted, summary_of, values_digest, version_of
from spalier.tasks.table import Table

NUMPY_DTYPES = (torch.float32, torch.float64)
"""Weights of these dtypes can be built in numpy, whose calls cost a third of PyTorch's."""


@dataclass(frozen=True)
class Weight:
    """What building needs to know of a weight of the base."""

    geometry: Geometry
    largest: float
    """The largest absolute value."""
    limit: float
    """What no value may come near to."""
    array: Any = None
    """Its numbers, outputs first, where the layer is an ordinary one on the CPU."""
    input_axis: int = 1
    """Of the array."""
    centre: tuple[Any, ...] = ()
    """Where an adapter is added."""
    is_pointwise: bool = False
    """Whether that is the whole weight."""


def _weight(tensor: Tensor, geometry: Geometry) -> Weight:
    limit = torch.finfo(tensor.dtype).max / 2  # far enough from overflow for any rounding
    found = Weight(geometry, summary_of(tensor).largest, limit)
    channels_last = tensor.dim() == 4 and not tensor.is_contiguous()
    laid = tensor.detach().permute(0, 2, 3, 1) if channels_last else tensor.detach()
    is_plain = geometry.groups == 1 and not geometry.inputs_first and laid.is_contiguous()
    if not is_plain or tensor.dtype not in NUMPY_DTYPES or tensor.device.type != "cpu":
        return found
    every = slice(None)
    centre = (every, *geometry.centre, every) if channels_last else (every, every, *geometry.centre)
    is_pointwise = math.prod(geometry.kernel) == 1
    input_axis = 3 if channels_last else 1
    return Weight(geometry, found.largest, limit, laid.numpy(), input_axis, centre, is_pointwise)


Outputs = tuple[list[tuple[int, ...]] | None, dict[str, set[tuple[int, ...]]]]


class Base:
    """A frozen network that tasks are built on. It is only read."""

    def __init__(self, net: nn.Module) -> None:
        net = getattr(net, "_orig_mod", net)  # what torch.compile has wrapped
        if not isinstance(net, nn.Module):
            raise TaskFileError("base", f"the base is a {type(net).__name__}, expected a torch.nn.Module")
        if "_spalier" in net.__dict__ or "_spalier_kept" in net.__dict__:
            raise TaskFileError(
                "base", "the base is adapted or pruned already; pass the plain network (detach_ gives it back)"
            )
        self.net = net
        named = tensors_of(net)
        if is_uninitialised(net) or any(tensor.is_meta for tensor in named.values()):
            raise TaskFileError("base", "tensors of the base have no values yet; load its weights first")
        self.ties = first_names(named)
        self.tensors = {name: named[name] for name, first in self.ties.items() if name == first}
        """Every parameter and buffer by its first name."""
        self.flags = {
            name: tensor.requires_grad if isinstance(tensor, nn.Parameter) else None
            for name, tensor in self.tensors.items()
        }
        """For each parameter whether it learns; None for buffers."""
        self.modules = dict(net.named_modules())
        self.fitting: WeakKeyDictionary[Table, set[tuple[int, ...]]] = WeakKeyDictionary()
        """The tables that were found to fit, and how many units each mask left then."""
        self.outputs: dict[str, Outputs] = {}
        """The shapes that the base returns, and views that it makes, by what it is given."""
        self._described = described(net)
        self._architectures: dict[tuple[str, ...], str] = {}
        self._weights: dict[str, Weight] = {}
        self._values: dict[frozenset[str], tuple[list[Any], str]] = {}
        self._plain = plain_tensors(net)
        # modules that copy themselves may do anything: then all of the network is copied by copy.deepcopy
        self._templates = None
        if not any(map(_copies_itself, self.modules.values())):
            self._templates = [(module, _Template(module)) for module in self.modules.values()]

    def architecture(self, heads: Collection[str]) -> str:
        """The digest of the architecture, without these modules' settings."""
        key = tuple(sorted(heads))
        if key not in self._architectures:
            self._architectures[key] = architecture_digest(self._described, self.ties, key)
        return self._architectures[key]

    def values_without(self, own: frozenset[str]) -> str:
        """The digest of the values that a task takes which has these tensors of its own."""
        taken = {name: tensor for name, tensor in self.tensors.items() if name not in own}
        versions = [version_of(tensor) for tensor in taken.values()]
        if own not in self._values or None in versions or self._values[own][0] != versions:
            self._values[own] = versions, values_digest(taken)
            self._weights = {}
        return self._values[own][1]

    def weight(self, name: str) -> Weight:
        """A weight that adapters update. Call `values_without` first, which notices writes to the base."""
        weights = self._weights  # another thread may begin anew
        if name not in weights:
            weights[name] = _weight(self.tensors[name], self.geometry(name))
        return weights[name]

    def geometry(self, name: str) -> Geometry:
        """How a weight maps channels; an error where no adapter could update it."""
        path, _, key = name.rpartition(".")
        module = self.modules[path]
        try:
            found = geometries(module).get(key)
        except SpalierError as error:
            raise TaskFileError("base", f"{quoted(name)} cannot be adapted: {error}") from None
        if found is None:
            raise TaskFileError("base", f"{quoted(name)} of a {type(module).__name__} cannot be adapted")
        return found

    def copy_with(self, tensors: Mapping[str, Tensor]) -> dict[str, nn.Module]:
        """The modules, by path, of a network of the same kind that holds these tensors, in eval mode.

        What `copy.deepcopy` does, without copying the tensors first, and twenty times as fast.
        """
        memo = self._plain | {id(self.tensors[name]): tensor for name, tensor in tensors.items()}
        try:
            if self._templates is None:
                copy.deepcopy(self.net, memo)
            else:
                for module, _ in self._templates:
                    memo[id(module)] = object.__new__(type(module))
                for module, template in self._templates:
                    template.fill_(memo[id(module)].__dict__, memo)
            made = {path: memo[id(module)] for path, module in self.modules.items()}
        except (TypeError, AttributeError, KeyError, RuntimeError) as error:  # of a module's own code
            raise TaskFileError("base", f"the base cannot be copied: {quoted(error)}") from error
        if self._templates is None:
            _check_held(made, tensors)
            made[""].eval()
        return made


def _check_held(modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Whether modules that copy themselves have taken their tensors."""
    for name, tensor in tensors.items():
        path, _, key = name.rpartition(".")
        module = modules[path]
        if module._parameters.get(key, module._buffers.get(key)) is not tensor:
            raise TaskFileError("base", f"a module of the base copies itself, and loses {quoted(name)}")


class _Template:
    """What a module's dictionary holds: things that can be shared, and things that need a copy of their own."""

    def __init__(self, module: nn.Module) -> None:
        self._shared: dict[str, Any] = {"training": False}
        self._held: list[tuple[str, list[tuple[str, int | None]]]] = []
        self._empty: list[tuple[str, type[Any]]] = []
        self._copied: list[tuple[str, Any]] = []
        for key, value in module.__getstate__().items():  # without what torch.compile has put there
            if key in ("_parameters", "_buffers", "_modules") and type(value) is dict and value:
                self._held.append((key, [(k, None if v is None else id(v)) for k, v in value.items()]))
            elif type(value) in (dict, OrderedDict, set, list) and not value:
                self._empty.append((key, type(value)))
            elif _is_immutable(value):
                self._shared.setdefault(key, value)
            else:
                self._copied.append((key, value))

    def fill_(self, state: dict[str, Any], memo: dict[int, Any]) -> None:
        """Fill the dictionary of a copy, tensors and modules taken from ``memo``."""
        state.update(self._shared)
        for key, kind in self._empty:
            state[key] = kind()
        for key, held in self._held:
            state[key] = {k: None if mark is None else memo[mark] for k, mark in held}
        for key, value in self._copied:
            state[key] = copy.deepcopy(value, memo)


_IMMUTABLE = (
    *(NoneType, bool, int, float, complex, str, bytes, type, enum.Enum, FunctionType, BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.memory_format),
)


def _is_immutable(value: object) -> bool:
    return isinstance(value, _IMMUTABLE) or (isinstance(value, tuple) and all(map(_is_immutable, value)))


_COPYING = frozenset(("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__deepcopy__", "__slots__"))


def _copies_itself(module: nn.Module) -> bool:
    """Whether a class says itself how it is copied.

    What PyTorch's own modules say is for files of old versions, but for recurrent layers.
    """
    says = [parent for parent in type(module).__mro__[:-1] if not _COPYING.isdisjoint(vars(parent))]
    return any(not p.__module__.startswith("torch.nn.modules.") or issubclass(p, nn.RNNBase) for p in says)
