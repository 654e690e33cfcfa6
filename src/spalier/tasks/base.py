"""Memory of networks that are gone, to build others in: fresh memory costs more than filling it.

A base as building sees it: its tensors, and a quick way to make networks of its kind around other tensors.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import math
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from spalier.adapters.geometry import (
    Geometry,
    described,
    first_names,
    geometries,
    is_uninitialised,
    tensors_of,
)
from spalier.errors import SpalierError, TaskFileError
from spalier.tasks import fingerprint
from spalier.tasks.container import shown
from spalier.tasks.table import Table

IDLE = 2
"""How many pieces are kept that nobody uses."""


class Pool:
    """Lends pieces of memory, and lends them again once whoever had them is gone.

    What is lent is an array; tensors that lie in it, and views of these, keep it alive. When the last of them goes, the
    array goes, and its memory comes back here: until then no one else can have it.
    """

    def __init__(self) -> None:
        self._idle: deque[Any] = deque()  # appended to by finalizers, which may run anywhere: no lock

    def take(self, size: int, dtype: Any) -> Any:
        """An array of so many numbers, holding whatever was there."""
        memory = self._fitting(size * np.dtype(dtype).itemsize)
        # a view of a memoryview is nobody's view: numpy lets slices refer to it, not to what is behind it
        lent = np.frombuffer(memoryview(memory), dtype, size)
        weakref.finalize(lent, self._idle.append, memory).atexit = False
        return lent

    def _fitting(self, size: int) -> Any:
        for _ in range(len(self._idle)):
            try:
                memory = self._idle.popleft()
            except IndexError:  # another thread was quicker
                break
            if size <= memory.nbytes <= 2 * size:
                return memory
            self._idle.append(memory)
        return np.empty(size, np.uint8)

    def trim(self) -> None:
        """Let go of what nobody uses, but for the largest pieces."""
        taken = []
        with contextlib.suppress(IndexError):  # other threads take from it too
            while True:
                taken.append(self._idle.popleft())
        self._idle.extend(sorted(taken, key=lambda memory: -memory.nbytes)[:IDLE])


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


NUMPY = (torch.float32, torch.float64)


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
    axis: int = 1
    """The axis of the array that is the input's."""
    centre: tuple[Any, ...] = ()
    """Where an adapter is added."""
    is_pointwise: bool = False
    """Whether that is the whole weight."""


def _weight(tensor: Tensor, geometry: Geometry) -> Weight:
    largest, limit = fingerprint.known(tensor).largest, torch.finfo(tensor.dtype).max / 2
    tensor = tensor.detach()
    last = tensor.dim() == 4 and not tensor.is_contiguous()
    laid = tensor.permute(0, 2, 3, 1) if last else tensor
    plain = geometry.groups == 1 and not geometry.inputs_first and laid.is_contiguous()
    if not plain or tensor.dtype not in NUMPY or tensor.device.type != "cpu":
        return Weight(geometry, largest, limit)
    every = slice(None)
    centre = (every, *geometry.centre, every) if last else (every, every, *geometry.centre)
    is_pointwise = math.prod(geometry.kernel) == 1
    return Weight(geometry, largest, limit, laid.numpy(), 3 if last else 1, centre, is_pointwise)


class Base:
    """A frozen network that tasks are built on. It is only read."""

    def __init__(self, net: nn.Module) -> None:
        net = getattr(net, "_orig_mod", net)  # what torch.compile has wrapped
        if not isinstance(net, nn.Module):
            raise TaskFileError("base", f"the base is a {type(net).__name__}, expected a torch.nn.Module")
        if fingerprint.is_adapted_or_pruned(net):
            raise TaskFileError(
                "base",
                "the base is adapted or pruned already; pass the plain network (detach_ gives it back)",
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
        self._described = described(net)
        self._architectures: dict[tuple[str, ...], str] = {}
        self._weights: dict[str, Weight] = {}
        self.fitting: WeakSet[Table] = WeakSet()
        """The tables that were found to fit."""
        self._values: dict[frozenset[str], tuple[list[Any], str]] = {}
        everything = self.modules.values()
        self._molds = None if any(map(_copies_itself, everything)) else [(m, _Mold(m)) for m in everything]

    def architecture(self, heads: Collection[str]) -> str:
        """The digest of the architecture, without these modules' settings."""
        key = tuple(sorted(heads))
        if key not in self._architectures:
            self._architectures[key] = fingerprint.architecture(self._described, self.ties, key)
        return self._architectures[key]

    def values_without(self, own: frozenset[str]) -> str:
        """The digest of the values that a task takes which has these tensors of its own."""
        taken = {name: tensor for name, tensor in self.tensors.items() if name not in own}
        versions = [fingerprint.version(tensor) for tensor in taken.values()]
        if own not in self._values or None in versions or self._values[own][0] != versions:
            self._values[own] = versions, fingerprint.values(taken)
            self._weights = {}
        return self._values[own][1]

    def weight(self, name: str) -> Weight:
        """A weight that adapters update. `values_without` has to look first."""
        weights = self._weights  # another thread may begin anew
        if name not in weights:
            weights[name] = _weight(self.tensors[name], self.geometry(name))
        return weights[name]

    def geometry(self, name: str) -> Geometry:
        """How a weight maps channels; an error where no adapter could update it."""
        module, key = self.owner(name)
        try:
            found = geometries(module).get(key)
        except SpalierError as error:
            raise TaskFileError("base", f"{shown(name)} cannot be adapted: {error}") from None
        if found is None:
            raise TaskFileError("base", f"{shown(name)} of a {type(module).__name__} cannot be adapted")
        return found

    def owner(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds a tensor, and the tensor's key there."""
        path, _, key = name.rpartition(".")
        return self.modules[path], key

    def cast(self, tensors: Mapping[str, Tensor]) -> tuple[nn.Module, dict[str, nn.Module]]:
        """A network of the same kind that holds these tensors, in eval mode; and its modules by path.

        What `copy.deepcopy` does, without copying the tensors first, and twenty times as fast.
        """
        memo: dict[int, Any] = {id(self.tensors[name]): tensor for name, tensor in tensors.items()}
        try:
            if self._molds is None:
                copy.deepcopy(self.net, memo)
            else:
                self._fill(memo)
            made = {path: memo[id(module)] for path, module in self.modules.items()}
        except (
            TypeError,
            AttributeError,
            KeyError,
            RuntimeError,
        ) as error:  # whatever a module's own code raises
            raise TaskFileError("base", f"the base cannot be copied: {shown(str(error))}") from error
        if self._molds is None:
            _check_arrived(made, tensors)
            made[""].eval()
        return made[""], made

    def _fill(self, memo: dict[int, Any]) -> None:
        assert self._molds is not None
        for module, _ in self._molds:
            memo[id(module)] = object.__new__(type(module))
        for module, mold in self._molds:
            mold.fill_(memo[id(module)].__dict__, memo)


def _check_arrived(made: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Whether modules that copy themselves have taken their tensors."""
    for name, tensor in tensors.items():
        path, _, key = name.rpartition(".")
        module = made[path]
        if module._parameters.get(key, module._buffers.get(key)) is not tensor:
            raise TaskFileError("base", f"a module of the base copies itself, and loses {shown(name)}")


class _Mold:
    """What a module's dictionary holds: things that can be shared, and things that need a copy of their own."""

    def __init__(self, module: nn.Module) -> None:
        state = module.__getstate__()  # without what torch.compile has put there
        self._shared: dict[str, Any] = {"training": False}
        self._held: list[tuple[str, list[tuple[str, int | None]]]] = []
        self._empty: list[tuple[str, type[Any]]] = []
        self._other: list[tuple[str, Any]] = []
        for key, value in state.items():
            if key in _CONTAINERS and type(value) is dict and value:
                self._held.append((key, [(k, None if v is None else id(v)) for k, v in value.items()]))
            elif type(value) in (dict, OrderedDict, set, list) and not value:
                self._empty.append((key, type(value)))
            elif _is_plain(value):
                self._shared.setdefault(key, value)
            else:
                self._other.append((key, value))

    def fill_(self, state: dict[str, Any], memo: dict[int, Any]) -> None:
        """Fill the dictionary of a copy, tensors and modules taken from ``memo``."""
        state.update(self._shared)
        for key, kind in self._empty:
            state[key] = kind()
        for key, held in self._held:
            state[key] = {k: None if mark is None else memo[mark] for k, mark in held}
        for key, value in self._other:
            state[key] = copy.deepcopy(value, memo)


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _copies_itself(module: nn.Module) -> bool:
    """Classes that say themselves how they are copied; what PyTorch's own say of old versions' files is no matter."""
    kind = type(module)
    says = [
        parent
        for parent in kind.__mro__[:-1]
        if not {
            "__getstate__",
            "__setstate__",
            "__reduce__",
            "__reduce_ex__",
            "__deepcopy__",
            "__slots__",
        }.isdisjoint(vars(parent))
    ]
    return any(not p.__module__.startswith("torch.nn.modules.") or issubclass(p, nn.RNNBase) for p in says)
