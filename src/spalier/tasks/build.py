"""From a base and a task to a plain network: cut, add the adapters, put in what the task has of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from spalier.adapters.layers import Geometry, geometries
from spalier.adapters.updates import add_, low_rank, pointwise
from spalier.errors import SpalierError, TaskFileError
from spalier.pruning.attributes import attention_with, resized_by_tensors
from spalier.pruning.spread import NAME, Spread, spread_output
from spalier.tasks import fingerprint
from spalier.tasks.base import Base
from spalier.tasks.fold import fold_
from spalier.tasks.storage import matrices
from spalier.tasks.table import Base as FromBase
from spalier.tasks.table import Integers, LowRank, Mask, Pointwise, Row, Values

if TYPE_CHECKING:
    from spalier.tasks.task import Task

Indices = tuple[Tensor | None, ...]


@torch.no_grad()
def build(task: Task, base: Base, *, fold: bool, share: bool) -> nn.Module:
    """The network that a task makes of its base."""
    check_base(task, base)
    with torch.inference_mode(False):
        maker = _Maker(task, base)
        tensors = {name: tensor for row in task.table.rows for name, tensor in maker.tensors(row)}
        for name, tensor in base.tensors.items():
            if name not in tensors:
                tensors[name] = tensor if share else _like(tensor, tensor.detach().clone())
        net, modules = base.cast(tensors)
        resize_(task, modules)
        for number, writer in enumerate(task.table.writers, start=len(task.table.streams)):
            own = task.masks[number][task.masks[writer.stream]]
            module = modules[writer.module]
            module.add_module(NAME, Spread(own, writer.axis).to(maker.device).eval())
            module.register_forward_hook(spread_output)
        if fold:
            fold_(net, modules, task.table.folds)
    return net


def check_base(task: Task, base: Base) -> None:
    """Refuse a base that the task was not learned on; nothing has been changed yet."""
    table = task.table
    _check_shapes(task, base)
    if base.architecture(table.heads) != task.description.base.architecture:
        raise TaskFileError(
            "base", f"the task was learned on another architecture than this {type(base.net).__name__}; {_ADVICE}"
        )
    own = {name for row in table.rows if isinstance(row.source, Values | Integers) for name in row.names}
    taken = {name: tensor for name, tensor in base.tensors.items() if name not in own}
    if fingerprint.values(taken) != task.description.base.values:
        raise TaskFileError(
            "base-values", f"the base has other weights than the one that the task was learned on; {_ADVICE}"
        )


_ADVICE = "load the network and the weights that attach_ was called on"


def _check_shapes(task: Task, base: Base) -> None:
    for row in task.table.rows:
        for name in row.names:
            tensor = base.tensors.get(name)
            if tensor is None:
                raise TaskFileError("base", f"the base has no tensor {ascii(name)}; {_ADVICE}")
            has_own = row.path in task.table.heads and isinstance(row.source, Values | Integers)
            if tuple(tensor.shape) != row.shape and not (has_own and tensor.dim() == len(row.shape)):
                raise TaskFileError(
                    "base",
                    f"{ascii(name)} has shape {tuple(tensor.shape)} in the base, expected {row.shape}; {_ADVICE}",
                )
            if tensor.is_floating_point() == isinstance(row.source, Integers):
                raise TaskFileError("base", f"{ascii(name)} is {tensor.dtype} in the base; {_ADVICE}")
    paths = [w.module for w in task.table.writers] + list(task.table.attributes) + list(task.table.heads)
    for path in paths:
        if path not in base.modules:
            raise TaskFileError("base", f"the base has no module {ascii(path)}; {_ADVICE}")


class _Maker:
    """Makes the tensors of a network, row by row; the flat tensors of the file are read in that order."""

    def __init__(self, task: Task, base: Base) -> None:
        self.task, self.base = task, base
        self.device = next((t.device for t in base.tensors.values()), torch.device("cpu"))
        adapters, self._values = task.adapter_values().to(self.device), task.values.to(self.device)
        rows = [shape for row in task.table.rows for shape in adapter_rows(row)]
        self._matrices = matrices(adapters, rows)
        self._peak = float(adapters.abs().max()) if adapters.numel() else 0.0
        self._start = 0
        self._known: dict[int, Tensor | None] = {}

    def tensors(self, row: Row) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one row, by name."""
        if isinstance(row.source, Values):
            shape = self.task.table.shape_left(row, self.task.masks)
            for name in row.names:
                yield name, self._value(name, shape)
        elif isinstance(row.source, Integers):
            size = math.prod(row.shape)
            for number, name in enumerate(row.names):
                yield name, self._integers(name, row, row.source.numbers[number * size : (number + 1) * size])
        else:
            indices = self.indices(row)
            for name in row.names:
                whole = self.base.tensors[name]
                tensor = _cut(whole.detach(), indices)
                if not isinstance(row.source, FromBase):
                    tensor = self._fused(name, row, tensor)
                yield name, _like(whole, tensor)

    def indices(self, row: Row) -> Indices:
        """The indices that stay along each axis; None where all do."""
        found: list[Tensor | None] = []
        for size, placed in zip(row.shape, row.axes, strict=True):
            if len(placed) == 1 and placed[0].units is None:
                found.append(self._of_mask(placed[0].mask))
            else:
                left = None
                for placement in placed:
                    kept = placement.kept(self.task.masks, size)
                    left = kept if left is None else left & kept
                found.append(None if left is None or left.all() else self._index(left))
        return tuple(found)

    def _of_mask(self, number: int) -> Tensor | None:
        if number not in self._known:
            mask = self.task.masks[number]
            self._known[number] = None if mask.all() else self._index(mask)
        return self._known[number]

    def _index(self, mask: Mask) -> Tensor:
        return torch.from_numpy(np.flatnonzero(mask)).to(self.device)

    def _value(self, name: str, shape: tuple[int, ...]) -> Tensor:
        whole, size = self.base.tensors[name], math.prod(shape)
        part = self._values[self._start : self._start + size]
        self._start += size
        made = part.to(whole.dtype, copy=True).view(shape)
        if whole.dtype.itemsize < part.dtype.itemsize:
            _check_finite(name, made)
        return _like(whole, made)

    def _integers(self, name: str, row: Row, numbers: Sequence[int]) -> Tensor:
        whole = self.base.tensors[name]
        try:
            made = torch.tensor(numbers, dtype=whole.dtype, device=whole.device).view(row.shape)
        except (RuntimeError, OverflowError):
            raise TaskFileError("base", f"{ascii(name)} is {whole.dtype}, too small for its numbers") from None
        return _like(whole, _cut(made, self.indices(row)))

    def _fused(self, name: str, row: Row, weight: Tensor) -> Tensor:
        """A cut weight, in memory of its own, with its adapter added."""
        source = row.source
        assert isinstance(source, LowRank | Pointwise)
        geometry, outputs, inputs = self._geometry(name, row)
        factors = [next(self._matrices) for _ in source.rows]
        wide = weight if weight.dtype.itemsize >= 4 else weight.float()
        parts = [f.to(wide.dtype) for f in factors]
        if isinstance(source, Pointwise):
            _check_sizes(name, (source.outputs, source.inputs), (geometry.outputs, geometry.inputs // geometry.groups))
            delta = pointwise(parts[0], geometry)
            peak = self._peak
        else:
            delta = _low_rank(name, source, parts, geometry, outputs, inputs)
            peak = source.rank * self._peak**2
        fused = add_(wide, delta, geometry).to(weight.dtype)
        # the largest number that can come out tells nearly always that none overflows, without looking at them
        if not fingerprint.known(self.base.tensors[name]).largest + peak < torch.finfo(weight.dtype).max / 2:
            _check_finite(name, fused)
        return fused

    def _geometry(self, name: str, row: Row) -> tuple[Geometry, Any, Any]:
        """The geometry of what is left of a weight, and its outputs and inputs, counted in the base."""
        module, key = self.base.owner(name)
        try:
            whole = geometries(module).get(key)
        except SpalierError as error:
            raise TaskFileError("base", f"{ascii(name)} cannot be adapted: {error}") from None
        if whole is None:
            raise TaskFileError("base", f"{ascii(name)} of a {type(module).__name__} cannot be adapted")
        kept = self.task.table.kept(row, self.task.masks)
        first, second = (
            np.arange(n) if k is None else np.flatnonzero(k) for n, k in zip(row.shape[:2], kept[:2], strict=True)
        )
        return whole.cut(first, second)


def _low_rank(
    name: str, source: LowRank, factors: list[Tensor], geometry: Geometry, outputs: Any, inputs: Any
) -> Tensor:
    down, up = factors
    taps = math.prod(geometry.kernel) if source.taps > 1 else 1
    if source.whole:
        if source.inputs <= inputs.max() or source.outputs <= outputs.max() or source.taps != taps:
            _check_sizes(name, (source.inputs, source.taps, source.outputs), (len(inputs), taps, len(outputs)))
        down = down.view(source.rank, source.inputs, taps)[:, torch.from_numpy(inputs).to(down.device)]
        up = up[:, torch.from_numpy(outputs).to(up.device)]
    else:
        _check_sizes(name, (source.inputs, source.taps, source.outputs), (geometry.inputs, taps, geometry.outputs))
    kernel = geometry.kernel if taps > 1 else ()
    return low_rank(down.reshape(source.rank, geometry.inputs, *kernel), up, geometry)


def adapter_rows(row: Row) -> tuple[tuple[int, int], ...]:
    """The matrices of a row's adapter; none where it has no adapter."""
    return row.source.rows if isinstance(row.source, LowRank | Pointwise) else ()


def _cut(tensor: Tensor, indices: Indices) -> Tensor:
    """What is left of a tensor, in memory of its own and in its layout."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    if not axes:
        return tensor.clone()
    last = (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    out = tensor.permute(0, 2, 3, 1) if last else tensor
    for axis in axes:
        index = indices[axis]
        assert index is not None
        out = out.index_select((0, 3, 1, 2)[axis] if last else axis, index)
    return out.permute(0, 3, 1, 2) if last else out


def _like(original: Tensor, values: Tensor) -> Tensor:
    if isinstance(original, nn.Parameter):
        return nn.Parameter(values, requires_grad=original.requires_grad)
    return values


def _check_sizes(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise TaskFileError("sizes", f"the adapter of {ascii(name)} has sizes {found}, expected {expected}")


def _check_finite(name: str, tensor: Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise TaskFileError(
            "overflow",
            f"fusing {ascii(name)} gives numbers beyond {tensor.dtype}; build on the base in a wider dtype, "
            "or learn the task again",
        )


def resize_(task: Task, modules: dict[str, nn.Module]) -> None:
    """Let the sizes that modules hold follow their tensors."""
    for path, value in sizes_left(task, modules).items():
        modules[path].__dict__.update(value)


def sizes_left(task: Task, modules: dict[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """The attributes that modules need, by path, once their tensors are cut."""
    kept: dict[str, dict[str, Any]] = {}
    for row in task.table.rows:
        left = task.table.kept(row, task.masks)
        if row.path in task.table.heads or any(mask is not None for mask in left):
            indices = tuple(None if mask is None else np.flatnonzero(mask) for mask in left)
            kept.setdefault(row.path, {}).update(dict.fromkeys(row.keys, indices))
    found = {path: resized_by_tensors(modules[path], own) or {} for path, own in kept.items()}
    for path, values in task.table.attributes.items():
        module = modules[path]
        for key, value in values.items():
            _check_attribute(path, key, value, module.__dict__.get(key))
        if isinstance(module, nn.MultiheadAttention):
            heads = values.get("num_heads", module.num_heads)
            assert isinstance(heads, int)
            found[path] = attention_with(module, heads)
        else:
            found.setdefault(path, {}).update(values)
    _close_fast_paths(modules, {modules[path] for path in kept}, found)
    return found


def _check_attribute(path: str, key: str, value: int | tuple[int, ...], base: object) -> None:
    """A task may make sizes smaller, and nothing else."""
    news = value if isinstance(value, tuple) else (value,)
    olds = base if isinstance(base, tuple) and isinstance(value, tuple) else (base,)
    fits = len(news) == len(olds) and all(
        type(old) is int and new <= old for new, old in zip(news, olds, strict=True)
    )
    if not fits:
        raise TaskFileError("base", f"{ascii(path)}.{ascii(key)[1:-1]} is no size of the base that could be {value}")


def _close_fast_paths(
    modules: dict[str, nn.Module], touched: set[nn.Module], found: dict[str, dict[str, Any]]
) -> None:
    """PyTorch's inference fast paths know nothing of attention that has fewer heads."""
    for path, module in modules.items():
        if isinstance(module, nn.TransformerEncoderLayer) and not touched.isdisjoint(module.modules()):
            found.setdefault(path, {})["activation_relu_or_gelu"] = 0
        elif isinstance(module, nn.TransformerEncoder) and not touched.isdisjoint(module.modules()):
            found.setdefault(path, {})["use_nested_tensor"] = False
