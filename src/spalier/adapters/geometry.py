"""Which layers can be adapted, and one view of all their weights.

Every supported weight, whatever its parameter looks like, is seen as ``groups`` matrices of (out / groups, in /
groups) entries, each entry a kernel of taps (`Geometry.grouped`). Adapters, fusing and pruning are written for that
view alone. `Window` has the arithmetic of a convolution's stride, padding and dilation. At the end: the tensors of
a network by name.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from spalier.errors import UnsupportedLayerError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Geometry:
    """How a weight parameter maps ``inputs`` channels to ``outputs`` channels."""

    inputs: int
    outputs: int
    groups: int = 1
    kernel: tuple[int, ...] = ()
    inputs_first: bool = False
    """The parameter's first axis is the input's: transposed convolutions, embeddings, Hugging Face's Conv1D."""
    fan_in: int = 0
    """How many inputs one output sums over; 1 for an embedding, which reads one row."""
    padding_idx: int | None = None
    """The row of an embedding that never learns."""

    @property
    def numel(self) -> int:
        """How many entries the weight has."""
        return self.inputs * self.outputs // self.groups * math.prod(self.kernel)

    def largest_rank(self, taps: int) -> int:
        """The largest rank that the matrix of one group can have, where it is for so many taps of the kernel."""
        return min(self.inputs // self.groups * taps, self.outputs // self.groups)

    @property
    def centre(self) -> tuple[int, ...]:
        """The centre tap; of an even kernel, the first one past the middle."""
        return tuple(k // 2 for k in self.kernel)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        sides = (self.inputs, self.outputs) if self.inputs_first else (self.outputs, self.inputs)
        return sides[0], sides[1] // self.groups, *self.kernel

    def grouped(self, weight: Tensor) -> Tensor:
        """The parameter as (groups, out / groups, in / groups, *kernel), a view."""
        per_in, per_out = self.inputs // self.groups, self.outputs // self.groups
        if self.inputs_first:
            return weight.view(self.groups, per_in, per_out, *self.kernel).transpose(1, 2)
        return weight.view(self.groups, per_out, per_in, *self.kernel)

    def cut(self, first: Indices, second: Indices) -> tuple[Geometry, Indices, Indices]:
        """The geometry that is left of a weight, and the outputs and inputs that stay.

        ``first`` and ``second`` are the indices that stay along the first two axes of the parameter.
        """
        import numpy as np

        size = self.shape[0] // self.groups
        groups = np.unique(first // size)
        # the second axis of a grouped weight counts inside of a group: the same ones stay in every group that is left
        inner = (groups[:, None] * self.shape[1] + second).ravel()
        inputs, outputs = (first, inner) if self.inputs_first else (inner, first)
        left = replace(self, inputs=len(inputs), outputs=len(outputs), groups=len(groups))
        return left, outputs, inputs


def geometries(module: nn.Module) -> dict[str, Geometry]:
    """The adaptable weights that ``module`` itself owns, by parameter name; empty for other kinds of module.

    >>> geometries(nn.Conv2d(6, 4, 3, groups=2))["weight"].numel
    108
    >>> geometries(nn.ReLU())
    {}

    A layer of a supported kind whose weight cannot be updated exactly is an error, never left out.
    """
    if isinstance(module, nn.MultiheadAttention):
        found = _of_attention(module)
    elif isinstance(module, _ConvNd | nn.Linear | nn.Embedding) or is_transformers_conv1d(module):
        _check_parameter(module, "weight")
        found = {"weight": _of_weight(module)}
    else:
        return {}
    for name, geometry in found.items():
        _check_parameter(module, name)
        shape = tuple(module.get_parameter(name).shape)
        if shape != geometry.shape:
            raise UnsupportedLayerError(
                f"its {name} has shape {shape}, expected {geometry.shape} of such a layer; leave it out with targets="
            )
    return found


def is_norm(module: nn.Module) -> bool:
    """True for normalisation layers: PyTorch's own, and others by name (LlamaRMSNorm, T5LayerNorm).

    >>> is_norm(nn.GroupNorm(2, 4)), is_norm(nn.Linear(4, 4))
    (True, False)
    """
    if isinstance(module, _NORMS):
        return True
    own = list(module.parameters(recurse=False))
    return "Norm" in type(module).__name__ and bool(own) and all(p.dim() <= 1 for p in own)


_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


def fast_path_closed(module: nn.Module) -> dict[str, Any]:
    """The attributes that close an encoder's inference fast path, which knows nothing of adapters or of fewer heads."""
    if isinstance(module, nn.TransformerEncoderLayer):
        return {"activation_relu_or_gelu": 0}
    return {"use_nested_tensor": False} if isinstance(module, nn.TransformerEncoder) else {}


def is_transformers_conv1d(module: nn.Module) -> bool:
    """Hugging Face's ``Conv1D``, a linear layer with a transposed weight, recognised without importing it."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils" for kind in type(module).__mro__
    )


def _of_weight(module: nn.Module) -> Geometry:
    if isinstance(module, _ConvNd):
        kernel, is_turned = tuple(module.kernel_size), isinstance(module, _ConvTransposeNd)
        fan_in = module.in_channels // module.groups * math.prod(kernel)
        return Geometry(module.in_channels, module.out_channels, module.groups, kernel, is_turned, fan_in)
    if isinstance(module, nn.Linear):
        return Geometry(module.in_features, module.out_features, fan_in=module.in_features)
    weight = module.get_parameter("weight")
    inputs, outputs = weight.shape
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            raise UnsupportedLayerError(
                "an embedding with max_norm rewrites its base weights as it reads them; "
                "expected max_norm=None: unset it, or leave the layer out with targets="
            )
        padding = module.padding_idx
        return Geometry(inputs, outputs, inputs_first=True, fan_in=1, padding_idx=padding)
    return Geometry(inputs, outputs, inputs_first=True, fan_in=inputs)


def _of_attention(module: nn.MultiheadAttention) -> dict[str, Geometry]:
    """The projections that attention owns itself; ``out_proj`` is a Linear of its own."""
    names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    weights = {name: getattr(module, name) for name in names}
    shapes = {name: weight.shape for name, weight in weights.items() if weight is not None}
    return {name: Geometry(inputs, outputs, fan_in=inputs) for name, (outputs, inputs) in shapes.items()}


def _check_parameter(module: nn.Module, name: str) -> None:
    weight = module._parameters.get(name)
    if weight is None:
        raise UnsupportedLayerError(
            f"its {name} is computed, not a parameter (weight normalisation, parametrization or pruning); "
            "make it permanent first (torch.nn.utils.parametrize.remove_parametrizations), "
            "or leave the layer out with targets="
        )
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise UnsupportedLayerError(
            f"its {name} is {weight.dtype}, expected float32, float64, float16 or bfloat16; "
            "dequantise it, or leave the layer out with targets="
        )


def has_weight_hook(module: nn.Module) -> bool:
    """True where PyTorch's own hooks compute a weight before each call: old-style weight norm, spectral norm, pruning.

    >>> has_weight_hook(nn.utils.spectral_norm(nn.Linear(2, 2))), has_weight_hook(nn.Linear(2, 2))
    (True, False)
    """
    return any(type(hook).__module__.startswith("torch.nn.utils") for hook in module._forward_pre_hooks.values())


def plain_tensors(net: nn.Module) -> dict[int, Any]:
    """Tensors that are neither parameters nor buffers, as `copy.deepcopy` is to take them, by their ids.

    It refuses those that were computed with gradients: weights that hooks compute.
    """
    held = (value for module in net.modules() for value in vars(module).values() if isinstance(value, Tensor))
    return {id(value): value.detach().clone() for value in held if not value.is_leaf}


def is_uninitialised(net: nn.Module) -> bool:
    """True where a lazy layer has not seen a batch yet."""
    lazy = (UninitializedParameter, UninitializedBuffer)
    return any(isinstance(tensor, lazy) for tensor in (*net.parameters(), *net.buffers()))


class Added(nn.Module):
    """A module that Spalier puts beside a network's own: adapters, gathers."""


@dataclass(frozen=True)
class Described:
    """A module as it prints itself, sizes and settings included."""

    path: str
    kind: str
    settings: str


def described(net: nn.Module) -> tuple[Described, ...]:
    """Every module of a network, Spalier's own left out."""
    return tuple(
        Described(path, type(module).__qualname__, _settings(module))
        for path, module in net.named_modules()
        if not isinstance(module, Added)
    )


_UNPRINTED = {
    nn.MultiheadAttention: ("num_heads", "dropout", "batch_first", "add_zero_attn"),
    nn.TransformerEncoderLayer: ("norm_first",),
    nn.TransformerDecoderLayer: ("norm_first",),
}
"""Settings that PyTorch's own modules do not print."""


def _settings(module: nn.Module) -> str:
    more = [key for kind, keys in _UNPRINTED.items() if isinstance(module, kind) for key in keys]
    parts = [module.extra_repr(), *(f"{key}={getattr(module, key)}" for key in more)]
    return re.sub("0x[0-9a-f]+", "", ", ".join(filter(None, parts)))


def is_finite(tensor: Tensor) -> bool:
    """True without looking on the meta device, where there is nothing to look at."""
    if tensor.is_floating_point() and tensor.element_size() == 1:
        tensor = tensor.to(torch.float16)  # PyTorch does not look at numbers of 8 bits
    return tensor.is_meta or bool(torch.isfinite(tensor).all())


class Window(NamedTuple):
    """A sliding kernel over zero-padded inputs, one entry per spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def outputs(self, sizes: torch.Size) -> torch.Size:
        """The spatial shape of the output for inputs of these spatial sizes."""
        return torch.Size(
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, pad, dilation in zip(sizes, *self, strict=True)
        )

    def is_aligned(self) -> bool:
        """True where the centre tap of each output meets the input at the same position."""
        centred = (d * (k // 2) == p for k, p, d in zip(self.kernel, self.padding, self.dilation, strict=True))
        odd = (k % 2 == 1 for k in self.kernel)
        return all(s == 1 for s in self.stride) and all(centred) and all(odd)

    def centre_tap(self, x: Tensor) -> Tensor:
        """The inputs that the centre tap meets, one per output position; zero where it meets padding."""
        if self.is_aligned():
            return x
        index, pads = self._centre(x.shape[2:])
        met = (F.pad(x, pads) if any(pads) else x)[index]
        if x.stride(1) == 1:  # what a stride leaves is copied later: keep the channels last
            return met.movedim(1, -1).contiguous().movedim(-1, 1)
        return met

    def centre_view(self, x: Tensor) -> Tensor | None:
        """The same as a view of x, to be written to; None where the centre tap meets padding."""
        index, pads = self._centre(x.shape[2:])
        return None if any(pads) else x[index]

    def _centre(self, sizes: torch.Size) -> tuple[tuple[slice, ...], list[int]]:
        """Where the centre tap meets inputs of these sizes, and the padding that it needs."""
        pads: list[int] = []
        index = [slice(None), slice(None)]
        for size, out, k, s, p, d in zip(sizes, self.outputs(sizes), *self, strict=True):
            first = (k // 2) * d - p
            last = first + (out - 1) * s
            before, after = max(0, -first), max(0, last - size + 1)
            pads = [before, after, *pads]  # F.pad counts axes from the last
            index.append(slice(first + before, last + before + 1, s))
        return tuple(index), pads

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution itself, in one group."""
        out: Tensor = torch.ops.aten.convolution(x, weight, bias, *self._options())
        return out

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, of: Literal["input", "weight"]) -> Tensor:
        """The gradient of the input or of the weight, and of nothing else."""
        mask = [of == "input", of == "weight", False]
        grads = torch.ops.aten.convolution_backward(grad, x, weight, None, *self._options(), mask)
        chosen: Tensor = grads[mask.index(True)]
        return chosen

    def _options(self) -> tuple[Any, ...]:
        """Not transposed, without padding of the output, in one group."""
        return self.stride, self.padding, self.dilation, False, [0] * len(self.kernel), 1


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under all its names, Spalier's own left out."""
    found: dict[str, Tensor] = {}
    for path, module in net.named_modules(remove_duplicate=False):
        if not isinstance(module, Added):
            prefix = f"{path}." if path else ""
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    found[prefix + key] = tensor
    return found


def first_names(tensors: dict[str, Tensor]) -> dict[str, str]:
    """For each name of a tensor, the first name that it goes by."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
