"""How an adapted layer runs: its class stays, and its ``forward`` sees ``W + ΔW`` instead of W.

Two other designs were weighed. Wrapper modules change names, keys and classes, so code that reads ``layer.weight``
or asks ``isinstance`` breaks. Parametrizations keep the class, but rename the weight's key and form the whole
gradient. An instance's ``forward`` changes nothing that others look at, survives deepcopy, pickle, torch.compile
and torch.export, and is undone by deleting one entry.

- Low-rank updates of layers whose forward is PyTorch's own take the fast path (`spalier.adapters.fast`).
- Everything else, subclasses with a forward of their own among them, runs its class's forward on a shallow replica that
  holds the fused weight. The layer itself is never touched, so threads may share it.
- Some modules read the weights of layers inside of them and never call these: `nn.MultiheadAttention` its ``out_proj``,
  torchvision's Swin attention ``qkv`` and ``proj``. An adapter on such a layer would be passed by in silence, so they
  run on a replica whose children hold fused weights. What a module reads shows in the source of its ``forward`` and of
  the methods that this calls. A weight that is fetched in another way (by index, by ``getattr``, by a function outside
  of the class) does not show there; comparing ``fuse(net)`` with ``net`` on a batch tells.
- Strided 1x1 convolutions whose weight learns keep clear of a fault in PyTorch's CPU kernels (`is_strided_pointwise`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from spalier.adapters import fast
from spalier.adapters.geometry import Window, is_transformers_conv1d
from spalier.adapters.kinds import LowRank, Update
from spalier.errors import AttachmentError

# self.a.b.some_weight, but not where only its dtype, device or shape is asked for
_READ = re.compile(
    r"\bself\.((?:\w+\.)+)(\w*weight)\b(?!\s*\.\s*(?:dtype|device|shape|size|ndim|dim|numel|requires_grad|is_)\w*)"
)
_MENTIONED = re.compile(r"\bself\.(\w+)")


def read_layers(module: nn.Module) -> dict[str, nn.Module]:
    """The layers inside of ``module`` whose weights its own forward reads, by their path from it.

    >>> list(read_layers(nn.MultiheadAttention(4, 2)))
    ['out_proj']
    >>> read_layers(nn.Sequential(nn.Linear(4, 4)))
    {}
    """
    paths = _read_paths(type(module))  # type: ignore[arg-type]  # classes are hashable
    return {path: layer for path in sorted(paths) for layer in _at(module, path)}


def _at(module: nn.Module, path: str) -> Iterable[nn.Module]:
    for name in path.split("."):
        child = module._modules.get(name)
        if child is None:
            return ()
        module = child
    return (module,)


@cache
def _read_paths(kind: type[nn.Module]) -> frozenset[str]:
    sources = {name: _without_aliases(text) for name, text in _sources(kind).items()}
    reached, waiting = set(), ["forward"]
    while waiting:
        name = waiting.pop()
        if name in sources and name not in reached:
            reached.add(name)
            waiting += _MENTIONED.findall(sources[name])
    found = (match for name in reached for match in _READ.findall(sources[name]))
    return frozenset(path.rstrip(".") for path, _ in found)


def _without_aliases(text: str) -> str:
    """``p = self.proj`` and then ``p.weight`` reads as ``self.proj.weight``."""
    for alias, path in re.findall(r"\b(\w+)\s*=\s*(self(?:\.\w+)+)\s*$", text, re.MULTILINE):
        text = re.sub(rf"(?<![\w.]){alias}\.", f"{path}.", text)
    return text


def _sources(kind: type[nn.Module]) -> dict[str, str]:
    """The source of each method, with those that it reaches by ``super()``; empty where Python has no source."""
    found: dict[str, str] = {}
    for base in kind.__mro__:
        if base is nn.Module:
            break
        for name, value in vars(base).items():
            function = value.fget if isinstance(value, property) else value
            if inspect.isfunction(function) and ("super()" in found.get(name, "super()")):
                try:
                    text = inspect.getsource(function)
                except (OSError, TypeError):
                    text = ""
                found[name] = found.get(name, "").replace("super()", "") + text
    return found


def adapter_name(weight: str) -> str:
    """The attribute that holds the update of a layer's parameter.

    >>> adapter_name("weight")
    'weight_adapter'
    """
    return f"{weight}_adapter"


def updates(layer: nn.Module) -> dict[str, Update]:
    """The updates that sit on ``layer`` itself, by the name of the parameter that each updates."""
    suffix = adapter_name("")
    return {
        name.removesuffix(suffix): child
        for name, child in layer._modules.items()
        if isinstance(child, Update) and name.endswith(suffix)
    }


Reads = tuple[tuple[str, Any], ...]


def adapted_reads(layer: nn.Module) -> Reads:
    """The adapted layers whose weights ``layer`` reads, and those that they read in turn: ((name, reads), ...)."""
    read = ((path, child, adapted_reads(child)) for path, child in read_layers(layer).items())
    return tuple((path, inner) for path, child, inner in read if inner or updates(child))


def divert_(layer: nn.Module) -> None:
    """Let calls of ``layer`` see its fused weights."""
    reads = adapted_reads(layer)
    layer.forward = partial(run_reader, layer, reads) if reads else partial(_way_of(layer), layer)


def is_diverted(layer: nn.Module) -> bool:
    """True where calls of ``layer`` see fused weights."""
    forward = layer.__dict__.get("forward")
    return isinstance(forward, partial) and forward.func.__module__ == __name__


def undivert_(layer: nn.Module) -> None:
    """Let calls of ``layer`` run without updates again."""
    layer.__dict__.pop("forward", None)
    if OWN_FORWARD in layer.__dict__:
        layer.forward = partial(layer.__dict__[OWN_FORWARD], layer)


OWN_FORWARD = "_spalier_forward"
"""The attribute of a layer whose class cannot compute it any more: a function of the layer and its inputs."""


def _way_of(layer: nn.Module) -> Callable[..., Any]:
    if not isinstance(updates(layer).get("weight"), LowRank):
        strided = isinstance(layer, nn.Conv2d) and is_strided_pointwise(layer) and layer.groups == 1
        return run_strided if strided and _is_plain(layer) else run_any  # type: ignore[arg-type]
    if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
        return run_linear
    if isinstance(layer, nn.Embedding) and type(layer).forward is nn.Embedding.forward:
        # scaling by frequency needs the gradient of the whole table
        return run_any if layer.scale_grad_by_freq else run_embedding
    if is_transformers_conv1d(layer) and type(layer).__name__ == "Conv1D":
        return run_conv1d
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.groups == 1 and _is_plain(layer):
        return run_conv
    return run_any


def _is_plain(layer: _ConvNd) -> bool:
    own = next(kind for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(layer, kind))
    same_forward = type(layer).forward is own.forward
    return same_forward and type(layer)._conv_forward is own._conv_forward


def run_linear(layer: nn.Linear, input: Tensor) -> Tensor:
    """`nn.Linear` with a low-rank update."""
    if layer.weight.requires_grad:  # somebody unfroze the base, and fast.py forms no gradient for it
        return run_any(layer, input)  # type: ignore[no-any-return]
    down, up = _factors(layer, inputs_first=False)
    return fast.linear(input, layer.weight, layer.bias, down, up)


def run_conv1d(layer: Any, x: Tensor) -> Tensor:
    """Hugging Face's ``Conv1D`` with a low-rank update: a linear layer whose weight lies the other way."""
    if layer.weight.requires_grad:
        return run_any(layer, x)  # type: ignore[no-any-return]
    down, up = _factors(layer, inputs_first=True)
    return fast.linear(x, layer.weight.T, layer.bias, down, up)


def run_embedding(layer: nn.Embedding, input: Tensor) -> Tensor:
    """`nn.Embedding` with a low-rank update."""
    if layer.weight.requires_grad:
        return run_any(layer, input)  # type: ignore[no-any-return]
    down, up = _factors(layer, inputs_first=True)
    return fast.embedding(input, layer.weight, down, up, layer.padding_idx)


def run_conv(layer: _ConvNd, input: Tensor) -> Tensor:
    """An ungrouped convolution with a low-rank update."""
    if layer.weight.requires_grad:
        return run_any(layer, input)  # type: ignore[no-any-return]
    down, up = _factors(layer, inputs_first=False)
    batched, window = _batched(layer, input)
    out = fast.conv(batched, layer.weight, layer.bias, down, up, window)
    return out if batched.dim() == input.dim() else out.squeeze(0)


def run_strided(layer: nn.Conv2d, input: Tensor) -> Tensor:
    """A strided 1x1 convolution of one group whose weight learns, itself or by any update."""
    if not _overruns(layer):
        return run_any(layer, input)  # type: ignore[no-any-return]
    twin: Any = _replica(layer, ())
    batched, window = _batched(layer, input)
    out = fast.pointwise(batched, twin.weight, twin.bias, window)
    return out if batched.dim() == input.dim() else out.squeeze(0)


def _batched(layer: _ConvNd, input: Tensor) -> tuple[Tensor, Window]:
    """The input with an axis for samples, padded as far as a window cannot say it, and the window."""
    batched = input if input.dim() == layer.weight.dim() else input.unsqueeze(0)
    batched, padding = padded(layer, batched)
    return batched, Window(layer.kernel_size, layer.stride, padding, layer.dilation)


def run_any(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Any layer with any update: its own forward on the fused weight, gradients by autograd."""
    return run_reader(layer, (), *args, **kwargs)


def run_reader(layer: nn.Module, reads: Reads, *args: Any, **kwargs: Any) -> Any:
    """A module that reads the weights of layers inside of it: its own forward on fused ones."""
    twin = _replica(layer, reads)
    if _overruns(layer):  # its own forward: in the contiguous layout the native kernels are sound
        twin.__dict__["weight"] = _contiguous(twin.weight)
        twin._parameters.pop("weight", None)
        args = tuple(map(_contiguous, args))
        kwargs = {key: _contiguous(value) for key, value in kwargs.items()}
    before = dict(twin.__dict__)
    forward = layer.__dict__.get(OWN_FORWARD, type(layer).forward)
    out = forward(twin, *args, **kwargs)
    if not torch.compiler.is_compiling():  # which does not trace writes to __dict__
        for key, value in twin.__dict__.items():  # what forward has noted on itself belongs to the layer
            if before.get(key, _ABSENT) is not value:
                layer.__dict__[key] = value
    return out


_ABSENT = object()


# The weight gradient of a strided 1x1 convolution in channels-last layout writes past its memory on x86 CPUs when the
# layer has fewer inputs than a vector register holds floats: 8 with AVX2, 16 with AVX-512. Crashes, hangs and wrong
# gradients follow, often steps later. The fault is oneDNN's (uxlfoundation/oneDNN#6035; in PyTorch 2.13, oneDNN 3.12):
# it copies the inputs that the stride leaves to a buffer of (positions, inputs) floats, but begins each piece at
# position * 8 or 16. Pruning brings such layers about. tools/strided_convolutions.py shows which shapes fail.
# Low-rank updates never ask for that gradient (`spalier.adapters.fast`).
_VECTOR = 16


def is_strided_pointwise(layer: nn.Module) -> bool:
    """True for 1x1 convolutions with a stride: once pruned to few inputs, their native weight gradient is faulty."""
    return (
        isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)
        and max(layer.kernel_size) == 1
        and max(layer.stride) > 1
    )


def _overruns(layer: Any) -> bool:
    """Whether it has become so narrow. By shapes alone, as layouts and devices may change from call to call."""
    # the second axis has the inputs; the outputs of a transposed convolution, which are the inputs of its gradient
    return is_strided_pointwise(layer) and layer.weight.shape[1] < _VECTOR


def _contiguous(value: Any) -> Any:
    """A copy of a tensor; with one channel, contiguous() could leave the strides of channels-last."""
    return value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value


def _factors(layer: nn.Module, *, inputs_first: bool) -> tuple[Tensor, Tensor]:
    update: LowRank = layer.weight_adapter  # type: ignore[assignment]
    return update.factors(inputs_first=inputs_first)


def padded(layer: _ConvNd, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The input and the zero padding that is left to the convolution."""
    none = (0,) * len(layer.kernel_size)
    if layer.padding_mode != "zeros":
        return F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), none
    if not isinstance(layer.padding, str):
        return x, layer.padding
    if layer.padding == "valid":
        return x, none
    sides = layer._reversed_padding_repeated_twice  # "same": (before, after) from the last axis
    if sides[::2] == sides[1::2]:
        return x, tuple(sides[::2][::-1])
    return F.pad(x, sides), none


def _replica(layer: nn.Module, reads: Reads) -> nn.Module:
    """A shallow twin of ``layer`` that holds the fused weights as plain tensors."""
    twin = layer.__new__(type(layer))
    twin.__dict__ = layer.__dict__.copy()
    twin.__dict__.pop("forward", None)
    twin._parameters = layer._parameters.copy()
    twin._modules = layer._modules.copy()
    for name, update in updates(layer).items():
        weight = twin._parameters.pop(name, None)
        if weight is None:
            raise AttachmentError(
                f"the {name} of an adapted {type(layer).__name__} is no longer a parameter (pruned or "
                "parametrized since attach_?); undo that first"
            )
        twin.__dict__[name] = update(weight)
    if isinstance(layer, nn.Embedding):
        twin.__dict__["sparse"] = False  # the fused table is no leaf, and its gradient dense
    for name, inner in reads:
        twin._modules[name] = _replica(layer.get_submodule(name), inner)
    return twin
