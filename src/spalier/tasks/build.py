"""From a base and a task to a plain network: cut, add the adapters, put in what the task has of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spalier.adapters.layers import Geometry
from spalier.adapters.updates import add_, low_rank, pointwise
from spalier.errors import TaskFileError
from spalier.pruning.attributes import attention_with, resized_by_tensors
from spalier.pruning.spread import NAME, Spread, spread_output
from spalier.tasks.base import NUMPY, Base, Weight
from spalier.tasks.fold import fold_
from spalier.tasks.learned import Learned
from spalier.tasks.storage import matrices
from spalier.tasks.table import Frozen, Integers, Ints, LowRank, Pointwise, Row, Values
from spalier.tasks.text import shown


@torch.no_grad()
def build(task: Learned, base: Base, *, fold: bool, share: bool) -> nn.Module:
    """The network that a task makes of its base."""
    check_base(task, base)
    with torch.inference_mode(False), np.errstate(all="ignore"):  # what is not finite is found afterwards
        maker = _Maker(task, base, share=share)
        tensors = {name: tensor for row in task.table.rows for name, tensor in maker.tensors(row)}
        for name, tensor in base.tensors.items():
            if name not in tensors:
                tensors[name] = tensor if share else maker.copied(name)
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


def check_base(task: Learned, base: Base) -> None:
    """Refuse a base that the task was not learned on; nothing has been changed yet."""
    table = task.table
    _check_shapes(task, base)
    if base.architecture(table.heads) != task.description.base.architecture:
        raise TaskFileError(
            "base",
            f"the task was learned on another architecture than this {type(base.net).__name__}; {_ADVICE}",
        )
    if base.values_without(table.own) != task.description.base.values:
        raise TaskFileError(
            "base-values", f"the base has other weights than the one that the task was learned on; {_ADVICE}"
        )


_ADVICE = "load the network and the weights that attach_ was called on"


def _check_shapes(task: Learned, base: Base) -> None:
    for row in task.table.rows:
        for name in row.names:
            tensor = base.tensors.get(name)
            if tensor is None:
                raise TaskFileError("base", f"the base has no tensor {shown(name)}; {_ADVICE}")
            if tensor.shape != row.shape and not (
                name in task.table.own and row.path in task.table.heads and tensor.dim() == len(row.shape)
            ):
                raise TaskFileError(
                    "base",
                    f"{shown(name)} has shape {tuple(tensor.shape)} in the base, expected {row.shape}; {_ADVICE}",
                )
            if tensor.is_floating_point() == isinstance(row.source, Integers):
                raise TaskFileError("base", f"{shown(name)} is {tensor.dtype} in the base; {_ADVICE}")
    table = task.table
    folds = [path for pair in table.folds for path in pair]
    for path in (*(w.module for w in table.writers), *table.attributes, *table.heads, *folds):
        if path not in base.modules:
            raise TaskFileError("base", f"the base has no module {shown(path)}; {_ADVICE}")


class _Maker:
    """Makes the tensors of a network, row by row; the flat tensors of the file are read in that order."""

    def __init__(self, task: Learned, base: Base, *, share: bool) -> None:
        self.task, self.base, self._share = task, base, share
        self.device = next((t.device for t in base.tensors.values()), torch.device("cpu"))
        adapters = task.adapter_values()
        adapters = adapters if adapters.dtype in NUMPY else adapters.float()
        self._peak = float(adapters.abs().max()) if adapters.numel() else 0.0
        self._adapters = adapters.to(self.device)
        self._array = adapters.numpy()
        self._start = 0
        self._arena = _Arena(task, base, share=share)
        sizes = [
            math.prod(task.cuts.of(row).shape) for row in task.table.rows if _is_own(row) for _ in row.keys
        ]
        self._values = iter(task.values.to(self.device, copy=True).split(sizes))
        self._indices: dict[int, Tensor] = {}

    def tensors(self, row: Row) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one row, by name."""
        if isinstance(row.source, Values):
            shape = self.task.cuts.of(row).shape
            for name in row.names:
                yield name, self._value(name, shape)
        elif isinstance(row.source, Integers):
            size = math.prod(row.shape)
            for number, name in enumerate(row.names):
                yield name, self._integers(name, row, row.source.numbers[number * size : (number + 1) * size])
        else:
            for name in row.names:
                whole = self.base.tensors[name]
                made = self._cut(whole, row) if isinstance(row.source, Frozen) else self._adapted(name, row)
                yield name, self._like(name, made)

    def _like(self, name: str, values: Tensor) -> Tensor:
        """Values as a parameter or a buffer, whichever the base has there."""
        learns = self.base.flags[name]
        return values if learns is None else nn.Parameter(values, requires_grad=learns)

    def _value(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Numbers of the task's own."""
        whole, part = self.base.tensors[name], next(self._values)
        part = part if self._share else part.clone()
        if part.dtype != whole.dtype:
            part = part.to(whole.dtype)
            _check_finite(name, part)
        return self._like(name, part if len(shape) == 1 else part.view(shape))

    def _integers(self, name: str, row: Row, numbers: Sequence[int]) -> Tensor:
        whole = self.base.tensors[name]
        try:
            made = torch.tensor(numbers, dtype=whole.dtype, device=whole.device).view(row.shape)
        except (RuntimeError, OverflowError):
            raise TaskFileError(
                "base", f"{shown(name)} is {whole.dtype}, too small for its numbers"
            ) from None
        return self._like(name, self._cut(made, row))

    def _cut(self, tensor: Tensor, row: Row) -> Tensor:
        """What is left of a tensor, in memory of its own."""
        out = tensor.detach()
        for axis, index in enumerate(self.task.cuts.of(row).indices):
            if index is not None:
                out = out.index_select(axis, self._on_device(index))
        return out.clone() if out.data_ptr() == tensor.data_ptr() else out

    def _on_device(self, index: Ints) -> Tensor:
        if id(index) not in self._indices:
            self._indices[id(index)] = torch.from_numpy(index).to(self.device)
        return self._indices[id(index)]

    def copied(self, name: str) -> Tensor:
        """A tensor of the base as it is, in memory of its own."""
        return self._like(name, self.base.tensors[name].detach().clone())

    # weights with adapters

    def _adapted(self, name: str, row: Row) -> Tensor:
        """A cut weight with its adapter added."""
        source, weight = row.source, self.base.weight(name)
        assert isinstance(source, LowRank | Pointwise)
        begin = self._start
        self._start += sum(rows * length for rows, length in source.rows)
        if weight.array is not None and _is_plain(source):
            fused = self._quick(name, row, weight, self._array[begin : self._start])
        else:
            fused = self._any(name, row, weight.geometry, self._adapters[begin : self._start])
        # the largest number that can come out tells nearly always that none overflows, without looking at them
        bound = self._peak if isinstance(source, Pointwise) else source.rank * self._peak * self._peak
        if not weight.largest + bound < weight.limit:
            _check_finite(name, fused)
        return fused

    def _quick(self, name: str, row: Row, weight: Weight, factors: Any) -> Tensor:
        """What most layers are, in numpy, whose calls cost a third of PyTorch's."""
        source, cut = row.source, self.task.cuts.of(row)
        assert isinstance(source, LowRank)
        _check_sizes(name, (source.outputs, source.inputs), cut.shape[:2])
        (outputs, inputs), array = cut.indices[:2], weight.array
        shape = cut.shape if weight.axis == 1 else (cut.shape[0], *cut.shape[2:], cut.shape[1])
        small = self._arena.piece(array.dtype, shape)
        if outputs is not None and inputs is not None:
            rows = self._arena.scratch(array.dtype, (len(outputs), *array.shape[1:]))
            array = array.take(outputs, 0, rows, "clip")
            array.take(inputs, weight.axis, small, "clip")
        elif outputs is not None:
            array.take(outputs, 0, small, "clip")
        elif inputs is not None:
            array.take(inputs, weight.axis, small, "clip")
        else:
            np.copyto(small, array)
        factors = factors.astype(small.dtype, copy=False)
        middle = source.rank * source.inputs
        down, up = factors[:middle].reshape(source.rank, -1), factors[middle:].reshape(source.rank, -1)
        small[weight.centre] += up.T @ down
        made = torch.from_numpy(small)
        return made if weight.axis == 1 else made.permute(0, 3, 1, 2)

    def _any(self, name: str, row: Row, geometry: Geometry, factors: Tensor) -> Tensor:
        """Any layer with any adapter, on any device."""
        source, weight = row.source, self._cut(self.base.tensors[name], row)
        assert isinstance(source, LowRank | Pointwise)
        wide = weight if weight.dtype.itemsize >= 4 else weight.float()
        parts = list(matrices(factors.to(wide.dtype), source.rows))
        pairs = zip(row.shape[:2], self.task.cuts.of(row).indices[:2], strict=True)
        left, outputs, inputs = geometry.cut(
            *(np.arange(n) if index is None else index for n, index in pairs)
        )
        if isinstance(source, Pointwise):
            _check_sizes(name, (source.outputs, source.inputs), (left.outputs, left.inputs // left.groups))
            return add_(wide, pointwise(parts[0], left), left).to(weight.dtype)
        kernel = geometry.kernel if source.taps > 1 else ()
        whole = geometry if source.whole else left
        _check_sizes(
            name,
            (source.inputs, source.taps, source.outputs),
            (whole.inputs, math.prod(kernel), whole.outputs),
        )
        down, up = parts[0].view(source.rank, source.inputs, *kernel), parts[1]
        if source.whole:
            down = down[:, torch.from_numpy(inputs).to(self.device)]
            up = up[:, torch.from_numpy(outputs).to(self.device)]
        return add_(wide, low_rank(down, up, left), left).to(weight.dtype)


class _Arena:
    """Memory for the weights of a network: one piece for all of them if they may share.

    The system hands out fresh memory page by page, which for hundreds of tensors costs more than filling them; of one
    large piece numpy asks for large pages.
    """

    def __init__(self, task: Learned, base: Base, *, share: bool) -> None:
        self._share = share
        sizes: dict[Any, int] = {}
        rows: dict[Any, int] = {}
        for row in task.table.rows:
            if isinstance(row.source, LowRank) and _is_plain(row.source):
                array, cut = base.weight(row.names[0]).array, task.cuts.of(row)
                if array is not None:
                    sizes[array.dtype] = sizes.get(array.dtype, 0) + _aligned(math.prod(cut.shape))
                    if cut.indices[0] is not None and cut.indices[1] is not None:
                        wide = len(cut.indices[0]) * math.prod(row.shape[1:])
                        rows[array.dtype] = max(rows.get(array.dtype, 0), wide)
        self._memory = {dtype: np.empty(size, dtype) for dtype, size in sizes.items()} if share else {}
        self._scratch = {dtype: np.empty(size, dtype) for dtype, size in rows.items()}
        self._used = dict.fromkeys(sizes, 0)

    def piece(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """The next piece."""
        if not self._share:
            return np.empty(shape, dtype)
        start, size = self._used[dtype], math.prod(shape)
        self._used[dtype] += _aligned(size)
        return self._memory[dtype][start : start + size].reshape(shape)

    def scratch(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """A piece that is good until the next is asked for."""
        return self._scratch[dtype][: math.prod(shape)].reshape(shape)


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def _is_plain(source: LowRank | Pointwise) -> bool:
    return isinstance(source, LowRank) and not source.whole and source.taps == 1


def _is_own(row: Row) -> bool:
    return isinstance(row.source, Values)


def _check_sizes(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise TaskFileError("sizes", f"the adapter of {shown(name)} has sizes {found}, expected {expected}")


def _check_finite(name: str, tensor: Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise TaskFileError(
            "overflow",
            f"fusing {shown(name)} gives numbers beyond {tensor.dtype}; build on the base in a wider dtype, "
            "or learn the task again",
        )


def resize_(task: Learned, modules: dict[str, nn.Module]) -> None:
    """Let the sizes that modules hold follow their tensors."""
    for path, value in sizes_left(task, modules).items():
        modules[path].__dict__.update(value)


def sizes_left(task: Learned, modules: dict[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """The attributes that modules need, by path, once their tensors are cut."""
    kept: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[str, Any]] = {}
    for row in task.table.rows:
        cut = task.cuts.of(row)
        if not cut.is_whole or row.path in task.table.heads:
            kept.setdefault(row.path, {}).update(dict.fromkeys(row.keys, cut.indices))
    for path, own in kept.items():
        found[path] = resized_by_tensors(modules[path], own) or {}
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
    olds = base if isinstance(base, tuple) else (base,)
    fits = (
        isinstance(value, tuple) == isinstance(base, tuple)
        and len(news) == len(olds)
        and all(type(old) is int and new <= old for new, old in zip(news, olds, strict=True))
    )
    if not fits:
        raise TaskFileError(
            "base",
            f"{shown(path)}.{shown(key)[1:-1]} is no size of the base that could be {value}",
        )


def _close_fast_paths(
    modules: dict[str, nn.Module], touched: set[nn.Module], found: dict[str, dict[str, Any]]
) -> None:
    """PyTorch's inference fast paths know nothing of attention that has fewer heads."""
    for path, module in modules.items():
        if isinstance(module, nn.TransformerEncoderLayer) and not touched.isdisjoint(module.modules()):
            found.setdefault(path, {})["activation_relu_or_gelu"] = 0
        elif isinstance(module, nn.TransformerEncoder) and not touched.isdisjoint(module.modules()):
            found.setdefault(path, {})["use_nested_tensor"] = False
