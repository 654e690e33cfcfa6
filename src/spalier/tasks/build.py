"""Fold batch norms into the layers before them: the same function with fewer operations.

From a base and a task to a plain network: cut, add the adapters, put in what the task has of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spalier.adapters.geometry import Geometry
from spalier.adapters.kinds import add_, low_rank, pointwise
from spalier.errors import TaskFileError
from spalier.pruning.attributes import attention_with, resized_by_shape, resized_by_tensors
from spalier.pruning.modules import NAME, Spread, fold_into_, spread_output
from spalier.tasks.base import NUMPY, Base, Pool, Weight
from spalier.tasks.container import shown
from spalier.tasks.description import Learned, matrices
from spalier.tasks.fingerprint import largest
from spalier.tasks.table import Cut, Integers, Ints, LowRank, Pointwise, Row, Table, Values

_LAYERS = {
    nn.Linear: 0,
    nn.Conv1d: 0,
    nn.Conv2d: 0,
    nn.Conv3d: 0,
    nn.ConvTranspose1d: 1,
    nn.ConvTranspose2d: 1,
    nn.ConvTranspose3d: 1,
}
"""The axis of each kind's weight that is its output."""
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@torch.no_grad()
def fold_(net: nn.Module, modules: dict[str, nn.Module], pairs: Sequence[tuple[str, str]]) -> None:
    """Fold every batch norm of a network that is in eval mode for good; refuse if one cannot be folded exactly."""
    folded = {modules[norm]: modules[layer] for layer, norm in pairs}
    times = Counter(id(t) for m in net.modules() for t in m._parameters.values() if t is not None)
    for path, module in modules.items():
        if isinstance(module, _BatchNorm) or module in folded:
            reason = _obstacle(module, folded.get(module), times)
            if reason:
                raise TaskFileError(
                    "fold", f"{path} cannot be folded exactly: {reason}; build without fold=True"
                )
    for norm, layer in folded.items():
        fold_into_(layer, norm, _LAYERS[type(layer)])
        _become_identity_(norm)


def _obstacle(norm: Any, layer: Any, times: Counter[int]) -> str:
    """Why a norm cannot be folded; empty if it can."""
    if layer is None:
        return "it is not known that it alone takes the output of one layer (was the network traced with an example?)"
    if type(norm) not in _NORMS or type(layer) not in _LAYERS:
        return f"a {type(norm).__name__} behind a {type(layer).__name__} may do more than the two"
    if norm.running_mean is None or norm.running_var is None:
        return "it has no running statistics"
    if (
        "forward" in layer.__dict__
        or "forward" in norm.__dict__
        or layer._forward_hooks
        or layer._forward_pre_hooks
    ):
        return "calls of its layer are diverted"
    if times[id(layer.weight)] > 1:
        return "its layer shares the weight with another"
    if _LAYERS[type(layer)] and layer.groups > 1:
        return "its layer is a transposed convolution with groups"
    held = (norm.running_mean, norm.running_var, norm.weight, norm.bias, layer.bias)
    if {t.numel() for t in held if t is not None} != {layer.weight.shape[_LAYERS[type(layer)]]}:
        return "it is not for the channels of its layer"
    return ""


def _become_identity_(norm: nn.Module) -> None:
    """Let a norm pass on what it gets, wherever else the network holds it; its hooks and a gather behind it stay."""
    hooks = {
        key: value for key, value in norm.__dict__.items() if key.endswith("_hooks") or key == "_modules"
    }
    norm.__class__ = nn.Identity
    norm.__dict__ = {**nn.Identity().__dict__, **hooks, "training": False}


def build(task: Learned, base: Base, *, fold: bool, share: bool) -> nn.Module:
    """The network that a task makes of its base."""
    return build_and_weigh(task, base, fold=fold, share=share)[0]


@torch.no_grad()
def build_and_weigh(
    task: Learned, base: Base, *, fold: bool, share: bool, pool: Pool | None = None
) -> tuple[nn.Module, int]:
    """The network, and how many bytes it takes beside the base; made in a pool's memory if it may share."""
    check_base(task, base)
    with torch.inference_mode(False), np.errstate(all="ignore"):  # what is not finite is found afterwards
        maker = _Maker(task, base, pool or Pool(), share=share)
        tensors: dict[str, Tensor] = {}
        for row, cut in task.pieces:
            maker.make_(row, cut, tensors)
        taken = sum(tensor.nbytes for tensor in tensors.values())
        for name, tensor in base.tensors.items():
            if name not in tensors:
                tensors[name] = maker.as_it_is(name)
                taken += 0 if share else tensor.nbytes
        net, modules = base.cast(tensors)
        resize_(task, modules)
        for number, writer in enumerate(task.table.writers, start=len(task.table.streams)):
            own = task.masks[number][task.masks[writer.stream]]
            module = modules[writer.module]
            module.add_module(NAME, Spread(own, writer.axis).to(maker.device).eval())
            module.register_forward_hook(spread_output)
        if fold:
            fold_(net, modules, task.table.folds)
    return net, taken + sum(8 * int(task.masks[w.stream].sum()) for w in task.table.writers)


def check_base(task: Learned, base: Base) -> None:
    """Refuse a base that the task was not learned on; nothing has been changed yet."""
    table = task.table
    if table not in base.fitting:
        _check_fits(table, base)
        base.fitting.add(table)
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


def _check_fits(table: Table, base: Base) -> None:
    """Whether the base has all that the table names, in the same shapes."""
    for row in table.rows:
        for name in row.names:
            tensor = base.tensors.get(name)
            if tensor is None:
                raise TaskFileError("base", f"the base has no tensor {shown(name)}; {_ADVICE}")
            has_own = name in table.own and row.path in table.heads and tensor.dim() == len(row.shape)
            if tensor.shape != row.shape and not has_own:
                raise TaskFileError(
                    "base",
                    f"{shown(name)} has shape {tuple(tensor.shape)} in the base, expected {row.shape}; {_ADVICE}",
                )
            if tensor.is_floating_point() == isinstance(row.source, Integers):
                raise TaskFileError("base", f"{shown(name)} is {tensor.dtype} in the base; {_ADVICE}")
            if isinstance(row.source, LowRank | Pointwise):
                _check_geometry(name, row.source, base.geometry(name))
    folds = [path for pair in table.folds for path in pair]
    for path in (*(w.module for w in table.writers), *table.attributes, *table.heads, *folds):
        if path not in base.modules:
            raise TaskFileError("base", f"the base has no module {shown(path)}; {_ADVICE}")


def _check_geometry(name: str, source: LowRank | Pointwise, geometry: Geometry) -> None:
    found = source.groups, source.inputs_first, source.taps if isinstance(source, LowRank) else 1
    taps = math.prod(geometry.kernel)
    if found not in (
        (geometry.groups, geometry.inputs_first, 1),
        (geometry.groups, geometry.inputs_first, taps),
    ):
        raise TaskFileError(
            "sizes", f"the adapter of {shown(name)} is for another kind of layer than the base has; {_ADVICE}"
        )


class _Maker:
    """Makes the tensors of a network, row by row; the flat tensors of the file are read in that order."""

    def __init__(self, task: Learned, base: Base, pool: Pool, *, share: bool) -> None:
        self.task, self.base, self._share = task, base, share
        self.device = next((t.device for t in base.tensors.values()), torch.device("cpu"))
        adapters = task.adapter_values()
        adapters = adapters if adapters.dtype in NUMPY else adapters.float()
        self._peak = largest(adapters)
        self._adapters = adapters.to(self.device)
        self._array = adapters.numpy()
        self._start = 0
        self._arena = _Arena(task, base, pool, share=share)
        sizes = [
            size
            for row, cut in task.pieces
            if isinstance(row.source, Values)
            for size in [math.prod(cut.shape)] * len(row.keys)
        ]
        self._values = iter(task.values.to(self.device, copy=True).split(sizes))
        self._integers = torch.tensor(task.integers, dtype=torch.int64, device=self.device)
        self._scalars = iter(self._integers.unbind())
        self._counted = 0
        self._indices: dict[int, Tensor] = {}

    def make_(self, row: Row, cut: Cut, made: dict[str, Tensor]) -> None:
        """Make the tensors of one row."""
        source = row.source
        for name in row.names:
            if isinstance(source, Values):
                tensor = self._value(name, cut.shape)
            elif isinstance(source, LowRank | Pointwise):
                tensor = self._adapted(name, source, cut)
            elif isinstance(source, Integers):
                tensor = self._whole_numbers(name, cut.shape)
            else:
                tensor = self._cut(self.base.tensors[name], cut)
            made[name] = self._like(name, tensor)

    def _like(self, name: str, values: Tensor) -> Tensor:
        """Values as a parameter or a buffer, whichever the base has there; what is shared is for running only."""
        learns = self.base.flags[name]
        return values if learns is None else nn.Parameter(values, requires_grad=learns and not self._share)

    def _value(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Numbers of the task's own."""
        dtype = self.base.tensors[name].dtype
        part: Tensor = next(self._values)
        part = part if self._share else part.clone()
        if part.dtype != dtype:
            part = part.to(dtype)
            _check_finite(name, part)
        return part if len(shape) == 1 else part.view(shape)

    def _whole_numbers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        dtype, size = self.base.tensors[name].dtype, math.prod(shape)
        if shape == () and self.task.table.has_scalars_only:  # counts of batches: quicker
            part: Tensor = next(self._scalars)
        else:
            part = self._integers[self._counted : self._counted + size].view(shape)
        self._counted += size
        if dtype == torch.int64:
            return part if self._share else part.clone()
        made: Tensor = part.to(dtype)
        if not torch.equal(made.to(torch.int64), part):
            raise TaskFileError("base", f"{shown(name)} is {dtype}, too small for its numbers")
        return made

    def _cut(self, tensor: Tensor, cut: Cut) -> Tensor:
        """What is left of a tensor, in memory of its own."""
        out = tensor.detach()
        for axis, index in enumerate(cut.indices):
            if index is not None:
                out = out.index_select(axis, self._on_device(index))
        return out.clone() if out.data_ptr() == tensor.data_ptr() else out

    def _on_device(self, index: Ints) -> Tensor:
        if id(index) not in self._indices:
            self._indices[id(index)] = torch.from_numpy(index).to(self.device)
        return self._indices[id(index)]

    def as_it_is(self, name: str) -> Tensor:
        """A tensor of the base: an object of its own, in the same memory if they may share."""
        tensor = self.base.tensors[name].detach()
        return self._like(name, tensor if self._share else tensor.clone())

    # weights with adapters

    def _adapted(self, name: str, source: LowRank | Pointwise, cut: Cut) -> Tensor:
        """A cut weight with its adapter added."""
        weight, begin = self.base.weight(name), self._start
        self._start += sum([rows * length for rows, length in cut.matrices])
        if weight.array is not None and isinstance(source, LowRank) and _is_plain(source):
            fused = self._quick(weight, cut, self._array[begin : self._start])
        else:
            fused = self._any(name, source, weight.geometry, cut, self._adapters[begin : self._start])
        # the largest number that can come out tells nearly always that none overflows, without looking at them
        bound = self._peak if isinstance(source, Pointwise) else source.rank * self._peak * self._peak
        if not weight.largest + bound < weight.limit:
            _check_finite(name, fused)
        return fused

    def _quick(self, weight: Weight, cut: Cut, factors: Any) -> Tensor:
        """What most layers are, in numpy, whose calls cost a third of PyTorch's."""
        (outputs, inputs), array = cut.indices[:2], weight.array
        shape = cut.shape if weight.axis == 1 else (cut.shape[0], *cut.shape[2:], cut.shape[1])
        small = self._arena.piece(array.dtype, shape)
        if outputs is not None and inputs is not None:
            rows = self._arena.scratch(array.dtype, (len(outputs), *array.shape[1:]))
            array.take(outputs, 0, rows, "clip").take(inputs, weight.axis, small, "clip")
        elif outputs is not None:
            array.take(outputs, 0, small, "clip")
        elif inputs is not None:
            array.take(inputs, weight.axis, small, "clip")
        elif not weight.is_pointwise:
            np.copyto(small, array)
        (rank, length), (_, height) = cut.matrices
        factors = factors.astype(small.dtype, copy=False)
        down, up = (
            factors[: rank * length].reshape(rank, length),
            factors[rank * length :].reshape(rank, height),
        )
        delta = np.matmul(up.T, down, out=self._arena.scratch(array.dtype, (height, length)))
        untouched = cut.is_whole and weight.is_pointwise
        np.add((array if untouched else small)[weight.centre], delta, out=small[weight.centre])
        made = torch.from_numpy(small)
        return made if weight.axis == 1 else made.permute(0, 3, 1, 2)

    def _any(
        self, name: str, source: LowRank | Pointwise, geometry: Geometry, cut: Cut, factors: Tensor
    ) -> Tensor:
        """Any layer with any adapter, on any device."""
        weight = self._cut(self.base.tensors[name], cut)
        wide = weight if weight.dtype.itemsize >= 4 else weight.float()
        parts = list(matrices(factors.to(wide.dtype), cut.matrices))
        pairs = zip(geometry.shape[:2], cut.indices[:2], strict=True)
        left, outputs, inputs = geometry.cut(
            *(np.arange(n) if index is None else index for n, index in pairs)
        )
        if isinstance(source, Pointwise):
            return add_(wide, pointwise(parts[0], left), left).to(weight.dtype)
        whole = geometry if source.whole else left
        down = parts[0].view(source.rank, whole.inputs, *(geometry.kernel if source.taps > 1 else ()))
        up = parts[1]
        if source.whole:
            down = down[:, torch.from_numpy(inputs).to(self.device)]
            up = up[:, torch.from_numpy(outputs).to(self.device)]
        return add_(wide, low_rank(down, up, left), left).to(weight.dtype)


class _Arena:
    """Memory for the weights of a network: one piece for all of them if they may share.

    The system hands out fresh memory page by page, which for hundreds of tensors costs more than filling them; of one
    large piece numpy asks for large pages.
    """

    def __init__(self, task: Learned, base: Base, pool: Pool, *, share: bool) -> None:
        self._share = share
        sizes: dict[Any, int] = {}
        rows: dict[Any, int] = {}
        for row, cut in task.pieces:
            if isinstance(row.source, LowRank) and _is_plain(row.source):
                array = base.weight(row.names[0]).array
                if array is not None:
                    sizes[array.dtype] = sizes.get(array.dtype, 0) + _aligned(math.prod(cut.shape))
                    twice = cut.indices[0] is not None and cut.indices[1] is not None
                    wide = cut.shape[0] * (math.prod(row.shape[1:]) if twice else cut.shape[1])
                    rows[array.dtype] = max(rows.get(array.dtype, 0), wide)
        self._memory = {dtype: pool.take(size, dtype) for dtype, size in sizes.items()} if share else {}
        self._scratch = {dtype: pool.take(size, dtype) for dtype, size in rows.items()}
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


def _is_plain(source: LowRank) -> bool:
    return not source.whole and source.taps == 1


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
    for row, cut in task.pieces:
        if not cut.is_whole or row.path in task.table.heads:
            kept.setdefault(row.path, {}).update(dict.fromkeys(row.keys, cut.indices))
            if "weight" in row.keys and (quick := resized_by_shape(modules[row.path], cut.shape)):
                found[row.path] = quick
    for path, own in kept.items():
        if path not in found:
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
