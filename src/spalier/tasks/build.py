"""From a base and a task to a plain network: cut, add the adapters, put in what the task has of its own, fold norms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from spalier.adapters.attachment import SavingRefused
from spalier.adapters.calls import corrected_with, noting
from spalier.adapters.codes import packed_size, per_byte, top, unpack
from spalier.adapters.geometry import Geometry, fast_path_closed
from spalier.adapters.kinds import add_, low_rank, pointwise
from spalier.errors import TaskFileError
from spalier.networks import name_classes_
from spalier.pruning.modules import (
    NAME,
    Spread,
    attention_with,
    fold_into_,
    may_resize,
    misfit,
    resized_by_shape,
    resized_by_tensors,
    spread_output,
)
from spalier.tasks.base import NUMPY_DTYPES, Base, Outputs, Weight
from spalier.tasks.dry_run import inputs_of, output_shapes, zeros
from spalier.tasks.format import largest, quoted
from spalier.tasks.memory import Pool
from spalier.tasks.rows import Adapted, Cut, Delta, Ints, LowRank, Pointwise
from spalier.tasks.table import Table
from spalier.tasks.task import Task, own_tensors


@torch.no_grad()
def build(task: Task, base: Base, *, fold: bool, share: bool, pool: Pool | None = None) -> nn.Module:
    """The network that a task makes of its base; in a pool's memory if it may share."""
    check_base(task, base)
    with torch.inference_mode(False), np.errstate(all="ignore"):  # what is not finite is found afterwards
        builder = _Builder(task, base, pool or Pool(), share=share)
        modules = base.copy_with(builder.tensors())
        _follow_(task, modules, builder.device)
        if fold:
            fold_(modules, task.table.folds)
    net = modules[""]
    name_classes_(net, task.info.classes)
    is_smaller = any(tuple(cut.shape) != base.tensors[row.names[0]].shape for row, cut in task.cut_rows)
    if hasattr(net, "save_pretrained") and (fold or is_smaller):
        net.__dict__["save_pretrained"] = SavingRefused()
    return net


def bytes_beside(task: Task, base: Base) -> int:
    """How many bytes a network that shares with its base takes beside it."""
    total = sum(8 * len(own) for _, own in task.spreads)  # the indices of gathers
    for row, cut in task.cut_rows:
        total += len(row.names) * math.prod(cut.shape) * base.tensors[row.names[0]].dtype.itemsize
    return total


# does the task fit the base?


def check_base(task: Task, base: Base) -> None:
    """Refuse a base that the task was not learned on; nothing has been changed yet."""
    table = task.table
    if table not in base.fitting:
        _check_table(table, base)
    if base.architecture(table.heads) != task.info.base.architecture:
        raise _misfit(f"the task was learned on another architecture than this {type(base.net).__name__}")
    if base.values_without(table.not_compared) != task.info.base.values:
        raise _misfit("the base has other weights than the one that the task was learned on", code="base-values")
    for row, cut in task.cut_rows:  # masks that lie on one axis together may leave nothing of it
        if 0 in cut.shape and 0 not in row.shape:
            raise TaskFileError("mask", f"the masks leave nothing of {quoted(row.names[0])}")
    fitting = base.fitting.setdefault(table, set())
    counts = tuple([int(mask.sum()) for mask in task.masks])
    # attributes and calls go with the masks of one task
    if table.attributes or table.calls or fitting.isdisjoint((counts, ANY)):
        _check_runs(task, base)
        fitting |= {counts, ANY} if _runs_with_any(task, base) else {counts}


ANY: tuple[int, ...] = ()
"""Stands for whatever counts of units a table's masks leave."""


def _runs_with_any(task: Task, base: Base) -> bool:
    """Whether a table runs where masks of one size leave different numbers of units: then none of them have to agree.

    False where that cannot be tried, and each set of counts is looked at by itself.
    """
    sizes, taken = task.table.sizes, Counter[int]()
    masks = []
    for size in sizes:
        taken[size] += 1
        masks.append(np.arange(size) < size - taken[size])
    if task.table.writers or not all(mask.any() for mask in masks):
        return False
    try:
        _check_runs(replace(task, masks=masks), base)
    except TaskFileError:
        return False
    return True


def _check_table(table: Table, base: Base) -> None:
    """Whether the base has all that the table names, in the same shapes."""
    for row in table.rows:
        for name in row.names:
            tensor = base.tensors.get(name)
            if tensor is None:
                raise _misfit(f"the base has no tensor {quoted(name)}")
            may_differ = name in table.own and row.path in table.heads and tensor.dim() == len(row.shape)
            if tensor.shape != row.shape and not may_differ:
                shape = tuple(tensor.shape)
                raise _misfit(f"{quoted(name)} has shape {shape} in the base, expected {row.shape}")
            # what is the base's may hold whole numbers or truth values, too
            if row.source != "base" and tensor.is_floating_point() == (row.source == "integers"):
                raise _misfit(f"{quoted(name)} is {tensor.dtype} in the base")
            if not isinstance(row.source, str):
                source, geometry = row.source, base.geometry(name)
                is_same = (source.groups, source.inputs_first) == (geometry.groups, geometry.inputs_first)
                if not is_same or source.taps not in (0, 1, math.prod(geometry.kernel)):
                    raise _misfit(f"the adapter of {quoted(name)} is for another kind of layer", code="sizes")
    folds = [path for pair in table.folds for path in pair]
    for path in (*(w.module for w in table.writers), *table.attributes, *table.calls, *table.heads, *folds):
        if path not in base.modules:
            raise _misfit(f"the base has no module {quoted(path)}")


def _check_runs(task: Task, base: Base) -> None:
    """Whether layers fit together, and the network runs as the base does and returns as much."""
    modules = _hollow(task, base)
    _follow_(task, modules, torch.device("cpu"))
    for path in {row.path for row in task.table.rows}:
        if reason := misfit(modules[path]):
            raise TaskFileError("table", f"what is left of {quoted(path)} does not fit together: {reason}")
    inputs = task.info.inputs
    wanted, views = _outputs_of_base(task, base) if inputs else (None, {})
    _check_calls(task, views)
    if wanted is None:
        return
    try:
        found = output_shapes(modules[""], *inputs_of(inputs))
    except Exception as error:  # whatever the network's own code raises
        message = f"what the task leaves of the base does not run: {quoted(error)}; make the task anew"
        raise TaskFileError("table", message) from error
    if found != wanted:
        message = f"what the task leaves of the base returns {quoted(found)}, expected {quoted(wanted)}"
        raise TaskFileError("table", message)


def _check_calls(task: Task, views: Mapping[str, Collection[tuple[int, ...]]]) -> None:
    """A task may set views right that the base makes, by as much as its masks leave, and no others."""
    shares = _shares(task) if task.table.calls else set()
    for path, calls in task.table.calls.items():
        for *kind, size in calls.views:
            olds = [each[-1] for each in views.get(path, ()) if list(each[:-1]) == kind]
            if not any(Fraction(size, old) in shares for old in olds if size <= old):
                raise TaskFileError(
                    "base",
                    f"the task sets a size of a view in {quoted(path)} to {size}, and what the base makes there on the "
                    f"task's inputs has {quoted(olds)}: no mask leaves that share",
                )


def _outputs_of_base(task: Task, base: Base) -> Outputs:
    """The shapes that the base, with the task's heads, returns; None where it needs values, or other inputs, to run.

    And the views that the modules make whose calls the task sets right.
    """
    heads = {row.names: row.shape for row in task.table.rows if row.path in task.table.heads}
    key = repr((heads, task.info.inputs, sorted(task.table.calls)))
    if key not in base.outputs:
        if len(base.outputs) > 64:  # strangers may ask for ever more
            base.outputs.clear()
        modules = _hollow(task, base, whole=True)
        views: dict[str, set[tuple[int, ...]]] = {path: set() for path in task.table.calls}
        for path, made in views.items():
            modules[path].__dict__["forward"] = noting(modules[path], made)
        try:
            base.outputs[key] = output_shapes(modules[""], *inputs_of(task.info.inputs)), views
        except Exception:  # whatever the base's own code raises: nothing can be said
            base.outputs[key] = None, views
    return base.outputs[key]


def _hollow(task: Task, base: Base, *, whole: bool = False) -> dict[str, nn.Module]:
    """The modules of the base with zeros for what a task makes of their numbers, cut or whole."""
    shapes = {name: row.shape if whole else cut.shape for row, cut in task.cut_rows for name in row.names}
    made: dict[str, Tensor] = {}
    for name, tensor in base.tensors.items():
        shape = shapes.get(name, tensor.shape)
        if base.flags[name] is not None:  # nobody writes to them, so one number will do
            one = torch.zeros((), dtype=tensor.dtype, device="cpu")
            made[name] = nn.Parameter(one.expand(shape), requires_grad=False)
        elif name in shapes or tensor.is_floating_point():
            made[name] = zeros(shape, tensor.dtype)
        else:
            made[name] = tensor.detach().to("cpu", copy=True)  # indices, which zeros are not always
    return base.copy_with(made)


def _follow_(task: Task, modules: dict[str, nn.Module], device: torch.device) -> None:
    """Let attributes and gathers follow the tensors."""
    for path, attributes in resized_attributes(task, modules).items():
        modules[path].__dict__.update(attributes)
    for writer, own in task.spreads:
        module = modules[writer.module]
        module.add_module(NAME, Spread(own, writer.axis).to(device).eval())
        module.register_forward_hook(spread_output)


def _misfit(message: str, code: str = "base") -> TaskFileError:
    return TaskFileError(code, f"{message}; load the network and the weights that attach_ was called on")


# the tensors of a network


class _Builder:
    """Makes the tensors of a network, row by row; the flat tensors of the file are read in that order."""

    def __init__(self, task: Task, base: Base, pool: Pool, *, share: bool) -> None:
        self.task, self.base, self._share = task, base, share
        self.device = next((t.device for t in base.tensors.values()), torch.device("cpu"))
        adapters, scales = (t if t.dtype in NUMPY_DTYPES else t.float() for t in (task.adapters, task.scales))
        highest = max((top(shape.levels) for shape in task.adapter_shapes if shape.levels), default=0)
        self._peak = max(largest(adapters), highest * largest(scales))
        self._array, self._codes, self._scales = adapters.numpy(), task.codes.numpy(), scales.numpy()
        self._places = iter(task.places)
        self._arena = _Arena(task, base, pool, share=share)
        self._values = own_tensors(task, "values", task.values.to(self.device, copy=True))
        integers = torch.tensor(task.integers, dtype=torch.int64, device=self.device)
        self._integers = own_tensors(task, "integers", integers)
        self._indices: dict[int, Tensor] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and buffer of the network, by its first name."""
        made: dict[str, Tensor] = {}
        for row, cut in self.task.cut_rows:
            for name in row.names:
                if row.source == "base":
                    tensor = self._cut(self.base.tensors[name], cut)
                elif isinstance(row.source, str):
                    tensor = self._own(name, next(self._values if row.source == "values" else self._integers))
                else:
                    tensor = self._adapted(name, row.source, cut)
                made[name] = self._like_base(name, tensor)
        for name, tensor in self.base.tensors.items():
            if name not in made:
                made[name] = self._like_base(name, tensor.detach() if self._share else tensor.detach().clone())
        return made

    def _like_base(self, name: str, values: Tensor) -> Tensor:
        """Values as a parameter or a buffer, whichever the base has there; what is shared is for running only."""
        learns = self.base.flags[name]
        return values if learns is None else nn.Parameter(values, requires_grad=learns and not self._share)

    def _own(self, name: str, found: Tensor) -> Tensor:
        """A tensor of the task's own, in the base's dtype."""
        dtype = self.base.tensors[name].dtype
        made = found if found.dtype == dtype else found.to(dtype)
        if made is not found and found.is_floating_point():
            _check_finite(name, made)
        elif made is not found and not torch.equal(made.to(torch.int64), found):
            raise TaskFileError("base", f"{quoted(name)} is {dtype}, too small for its numbers")
        return made if self._share else made.clone()

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

    def _adapted(self, name: str, source: Adapted, cut: Cut) -> Tensor:
        """A cut weight with its adapter added."""
        weight, parts = self.base.weight(name), self._parts(cut)
        if weight.array is not None and _is_quick(source, weight):
            fused = self._fused_in_numpy(weight, cut, parts)
        else:
            fused = self._fused(name, source, weight.geometry, cut, parts)
        # the largest number that can come out tells nearly always that none overflows, without looking at them
        bound = source.rank * self._peak * self._peak if isinstance(source, LowRank) else self._peak
        if not weight.largest + bound < weight.limit:
            _check_finite(name, fused)
        return fused

    def _parts(self, cut: Cut) -> list[Any]:
        """The matrices of an adapter, as arrays."""
        parts = []
        for rows, length, levels, scales in cut.matrices:
            number, code, scale = next(self._places)
            count = rows * length
            if not levels:
                parts.append(self._array[number : number + count].reshape(rows, length))
                continue
            size, dtype = packed_size(count, levels), self._scales.dtype
            # there may be many codes for all of a weight, and memory that was used before is quicker
            memory = self._arena.unpacked(size * per_byte(levels), dtype) if len(cut.matrices) == 1 else None
            found = unpack(self._codes[code : code + size], count, levels, dtype, memory).reshape(rows, length)
            found *= self._scales[scale : scale + scales, None]
            parts.append(found)
        return parts

    def _fused_in_numpy(self, weight: Weight, cut: Cut, parts: list[Any]) -> Tensor:
        """What most layers are, in numpy, whose calls cost a third of PyTorch's."""
        (outputs, inputs), array, axis = cut.indices[:2], weight.array, weight.input_axis
        shape = cut.shape if axis == 1 else (cut.shape[0], *cut.shape[2:], cut.shape[1])
        small = self._arena.piece(array.dtype, shape)
        # "clip" lets numpy write into ``out`` directly; the indices are within bounds anyway
        if outputs is not None and inputs is not None:
            rows = self._arena.scratch(array.dtype, (len(outputs), *array.shape[1:]))
            array.take(outputs, 0, rows, "clip").take(inputs, axis, small, "clip")
        elif outputs is not None:
            array.take(outputs, 0, small, "clip")
        elif inputs is not None:
            array.take(inputs, axis, small, "clip")
        elif not weight.is_pointwise:
            np.copyto(small, array)
        source = array if cut.is_whole and weight.is_pointwise else small
        if len(parts) == 2:
            down, up = (part.astype(small.dtype, copy=False) for part in parts)
            delta = self._arena.scratch(array.dtype, (up.shape[1], down.shape[1]))
            np.matmul(up.T, down, out=delta)  # (out, r) @ (r, in)
        else:
            delta = parts[0].astype(small.dtype, copy=False)
        if delta.size == small.size:  # every tap, in the order of the parameter
            delta = delta.reshape(cut.shape)
            delta = delta if axis == 1 else delta.transpose(0, 2, 3, 1)
            np.add(source, delta, out=small)
        else:
            np.add(source[weight.centre], delta, out=small[weight.centre])
        made = torch.from_numpy(small)
        return made if axis == 1 else made.permute(0, 3, 1, 2)

    def _fused(self, name: str, source: Adapted, geometry: Geometry, cut: Cut, parts: list[Any]) -> Tensor:
        """Any layer with any adapter, on any device."""
        weight = self._cut(self.base.tensors[name], cut)
        wide = weight if weight.dtype.itemsize >= 4 else weight.float()
        factors = [torch.from_numpy(part).to(self.device, wide.dtype) for part in parts]
        if isinstance(source, Delta):
            return (wide + factors[0].view(wide.shape)).to(weight.dtype)
        pairs = zip(geometry.shape[:2], cut.indices[:2], strict=True)
        left, outputs, inputs = geometry.cut(*(np.arange(n) if i is None else i for n, i in pairs))
        if isinstance(source, Pointwise):
            return add_(wide, pointwise(factors[0], left), left).to(weight.dtype)
        down, up = factors
        kernel = geometry.kernel if source.taps > 1 else ()
        down = down.view(source.rank, (geometry if source.whole else left).inputs, *kernel)
        if source.whole:
            down = down[:, torch.from_numpy(inputs).to(self.device)]
            up = up[:, torch.from_numpy(outputs).to(self.device)]
        return add_(wide, low_rank(down, up, left), left).to(weight.dtype)


def _is_quick(source: Adapted, weight: Weight) -> bool:
    if isinstance(source, Pointwise) or source.whole:
        return False
    return source.taps <= 1 or weight.input_axis == 1


def _check_finite(name: str, tensor: Tensor) -> None:
    if not math.isfinite(largest(tensor)):
        raise TaskFileError(
            "overflow",
            f"fusing {quoted(name)} gives numbers beyond {tensor.dtype}; build on the base in a wider dtype, "
            "or learn the task again",
        )


# memory


class _Arena:
    """Memory for the weights of a network: one piece for all of them if they may share.

    The system hands out fresh memory page by page, which for hundreds of tensors costs more than filling them; of one
    large piece numpy asks for large pages.
    """

    def __init__(self, task: Task, base: Base, pool: Pool, *, share: bool) -> None:
        self._share = share
        sizes: Counter[Any] = Counter()
        widest: dict[Any, int] = {}
        unpacked = 0
        for row, cut in task.cut_rows:
            if not isinstance(row.source, str):
                weight = base.weight(row.names[0])
                array = weight.array
                if len(cut.matrices) == 1 and (levels := cut.matrices[0].levels):
                    unpacked = max(unpacked, cut.matrices[0].bytes * per_byte(levels))
                if array is not None and _is_quick(row.source, weight):
                    sizes[array.dtype] += _aligned(math.prod(cut.shape))
                    cut_twice = cut.indices[0] is not None and cut.indices[1] is not None
                    rest = row.shape[1:] if cut_twice else cut.shape[1:]
                    width = cut.shape[0] * (math.prod(rest) if cut_twice or row.source.taps != 1 else cut.shape[1])
                    widest[array.dtype] = max(widest.get(array.dtype, 0), width)
        self._memory = {dtype: pool.take(size, dtype) for dtype, size in sizes.items()} if share else {}
        self._scratch = {dtype: pool.take(size, dtype) for dtype, size in widest.items()}
        self._used = dict.fromkeys(sizes, 0)
        self._unpacked = pool.take(unpacked * 8, np.uint8)

    def piece(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """The next piece."""
        if not self._share:
            return np.empty(shape, dtype)
        start, size = self._used[dtype], math.prod(shape)
        self._used[dtype] += _aligned(size)
        return self._memory[dtype][start : start + size].reshape(shape)

    def unpacked(self, count: int, dtype: Any) -> Any:
        """Memory for so many codes, that is good until the next is asked for."""
        return self._unpacked.view(dtype)[:count]

    def scratch(self, dtype: Any, shape: tuple[int, ...]) -> Any:
        """A piece that is good until the next is asked for."""
        return self._scratch[dtype][: math.prod(shape)].reshape(shape)


def _aligned(size: int) -> int:
    """Round up to 16 numbers: at least 64 bytes, a cache line."""
    return -(-size // 16) * 16


# sizes that modules hold


def resized_attributes(task: Task, modules: dict[str, nn.Module]) -> dict[str, dict[str, Any]]:
    """The attributes that modules need, by path, once their tensors are cut."""
    kept: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[str, Any]] = {}
    for row, cut in task.cut_rows:
        if not cut.is_whole or row.path in task.table.heads:
            kept.setdefault(row.path, {}).update(dict.fromkeys(row.keys, cut.indices))
            if "weight" in row.keys and (quick := resized_by_shape(modules[row.path], cut.shape)):
                found[row.path] = quick
    for path, own in kept.items():
        if path not in found:
            found[path] = resized_by_tensors(modules[path], own) or {}
    shares = _shares(task) if task.table.attributes else set()
    for path, values in task.table.attributes.items():
        module = modules[path]
        for key, value in values.items():
            _check_attribute(path, key, value, module, shares)
        if isinstance(module, nn.MultiheadAttention):
            heads = values.get("num_heads", module.num_heads)
            assert isinstance(heads, int)
            found[path] = attention_with(module, heads)
        else:
            found.setdefault(path, {}).update(values)
    for path, calls in task.table.calls.items():
        found.setdefault(path, {}).update(corrected_with(modules[path], calls))
    # PyTorch's inference fast paths know nothing of attention that has fewer heads
    touched = {modules[path] for path in kept}
    for path, module in modules.items():
        if (closed := fast_path_closed(module)) and not touched.isdisjoint(module.modules()):
            found.setdefault(path, {}).update(closed)
    return found


def _shares(task: Task) -> set[Fraction]:
    """What masks leave of units, and of axes that several of them may lie on."""
    found = {Fraction(int(mask.sum()), len(mask)) for mask in task.masks}
    for row, cut in task.cut_rows:
        found |= {Fraction(left, size) for left, size in zip(cut.shape, row.shape, strict=True) if left < size}
    return found | {Fraction(1)}


def _check_attribute(
    path: str, key: str, value: int | tuple[int, ...], module: nn.Module, shares: Collection[Fraction]
) -> None:
    """A task may make sizes smaller that pruning makes smaller, by as much as its masks do, and nothing else."""
    name, base = quoted(f"{path}.{key}"), module.__dict__.get(key)
    news = value if isinstance(value, tuple) else (value,)
    olds = base if isinstance(base, tuple) else (base,)
    fits = isinstance(value, tuple) == isinstance(base, tuple) and len(news) == len(olds)
    if not fits or not all(type(old) is int and new <= old for new, old in zip(news, olds, strict=True)):
        raise TaskFileError("base", f"{name} is no size of the base that could be {value}")
    if not may_resize(module, key):
        raise TaskFileError(
            "base",
            f"the task sets {name}, which pruning does not change, expected heads or widths that tensors do not tell; "
            "if the module is your own, say how it follows (spalier.resizes) before you load the task",
        )
    if not all(Fraction(new, old) in shares for new, old in zip(news, olds, strict=True)):
        raise TaskFileError("base", f"{name} is {base} in the base and {value} in the task: no mask leaves that share")


# folding: a batch norm into the layer before it


_OUTPUT_AXES: dict[type[nn.Module], int] = {
    **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), 0),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), 1),
}
"""The axis of each kind's weight that is its output."""
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@torch.no_grad()
def fold_(modules: dict[str, nn.Module], pairs: Sequence[tuple[str, str]]) -> None:
    """Fold every batch norm of a network that is in eval mode for good; refuse if one cannot be folded exactly."""
    folded = {modules[norm]: modules[layer] for layer, norm in pairs}
    times = Counter(id(t) for m in modules.values() for t in m._parameters.values() if t is not None)
    for path, module in modules.items():
        if isinstance(module, _BatchNorm) or module in folded:
            reason = _obstacle(module, folded.get(module), times)
            if reason:
                raise TaskFileError("fold", f"{path} cannot be folded exactly: {reason}; build without fold=True")
    for norm, layer in folded.items():
        fold_into_(layer, norm, _OUTPUT_AXES[type(layer)])


def _obstacle(norm: Any, layer: Any, times: Counter[int]) -> str:
    """Why a norm cannot be folded; empty if it can."""
    if layer is None:
        return "it is not known that it alone takes the output of one layer (was the network traced with an example?)"
    if not isinstance(norm, _NORMS) or type(layer) not in _OUTPUT_AXES:
        return f"a {type(norm).__name__} behind a {type(layer).__name__} may do more than the two"
    if norm.running_mean is None or norm.running_var is None:
        return "it has no running statistics"
    is_diverted = "forward" in layer.__dict__ or "forward" in norm.__dict__
    if is_diverted or layer._forward_hooks or layer._forward_pre_hooks:
        return "calls of its layer are diverted"
    if times[id(layer.weight)] > 1:
        return "its layer shares the weight with another"
    axis = _OUTPUT_AXES[type(layer)]
    if axis and layer.groups > 1:
        return "its layer is a transposed convolution with groups"
    held = (norm.running_mean, norm.running_var, norm.weight, norm.bias, layer.bias)
    if {t.numel() for t in held if t is not None} != {layer.weight.shape[axis]}:
        return "it is not for the channels of its layer"
    return ""
