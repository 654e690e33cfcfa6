"""How an adapted layer runs: its class stays, and its ``forward`` sees ``W + ΔW`` instead of W.

Two other designs were weighed. Wrapper modules change names, keys and classes, so code that reads ``layer.weight``
or asks ``isinstance`` breaks. Parametrizations keep the class, but rename the weight's key and form the whole
gradient. An instance's ``forward`` changes nothing that others look at, survives deepcopy, pickle, torch.compile
and torch.export, and is undone by deleting one entry.

- Low-rank updates of layers whose forward is PyTorch's own take the fast path, the second half of this file.
- Everything else, subclasses with a forward of their own among them, runs its class's forward on a shallow replica that
  holds the fused weight. The layer itself is never touched, so threads may share it.
- Some modules read the weights of layers inside of them and never call these: `nn.MultiheadAttention` its ``out_proj``,
  torchvision's Swin attention ``qkv`` and ``proj``. An adapter on such a layer would be passed by in silence, so they
  run on a replica whose children hold fused weights. What a module reads shows in the source of its ``forward`` and of
  the methods that this calls. A weight that is fetched in another way (by index, by ``getattr``, by a function outside
  of the class) does not show there; comparing ``fuse(net)`` with ``net`` on a batch tells.
- Strided 1x1 convolutions whose weight learns keep clear of a fault in PyTorch's CPU kernels (`is_strided_pointwise`).

The fast path has hand-written backward passes, at little more than the cost of the frozen layer. Plain autograd would
form the gradient of the whole weight, as dear as in full fine-tuning, to project it on two thin factors. Here the
factors' gradients come from thin matrix products, and the weight's is never formed. Of the two ways to run a layer
(Eq. 3), the cheaper is chosen from the shapes alone, so that runs repeat to the bit:

- *fused*: ``W + up^T down`` is formed, the layer runs once, and backward forms it again instead of keeping it;
- *parallel*: the frozen layer runs, and the thin path is accumulated into its output in place.

Both keep for backward what the layer's neighbours keep anyway, the input or what that was made of, and nothing thin.
Factors are rank-major, ``down`` (r, in) and ``up`` (r, out), and thin activations too where they can be: products
that run along the wide side are the fast ones.
Every operation in ``backward`` is differentiable, so second derivatives work too.

`pointwise` is for weights that learn in full, where the native gradient is not to be trusted.
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
    if layer.weight.requires_grad:  # somebody unfroze the base, and the fast path forms no gradient for it
        return run_any(layer, input)  # type: ignore[no-any-return]
    down, up = _factors(layer, inputs_first=False)
    return linear(input, layer.weight, layer.bias, down, up)


def run_conv1d(layer: Any, x: Tensor) -> Tensor:
    """Hugging Face's ``Conv1D`` with a low-rank update: a linear layer whose weight lies the other way."""
    if layer.weight.requires_grad:
        return run_any(layer, x)  # type: ignore[no-any-return]
    down, up = _factors(layer, inputs_first=True)
    return linear(x, layer.weight.T, layer.bias, down, up)


def run_embedding(layer: nn.Embedding, input: Tensor) -> Tensor:
    """`nn.Embedding` with a low-rank update."""
    if layer.weight.requires_grad:
        return run_any(layer, input)  # type: ignore[no-any-return]
    down, up = _factors(layer, inputs_first=True)
    return embedding(input, layer.weight, down, up, layer.padding_idx)


def run_conv(layer: _ConvNd, input: Tensor) -> Tensor:
    """An ungrouped convolution with a low-rank update."""
    if layer.weight.requires_grad:
        return run_any(layer, input)  # type: ignore[no-any-return]
    down, up = _factors(layer, inputs_first=False)
    batched, window = _batched(layer, input)
    out = conv(batched, layer.weight, layer.bias, down, up, window)
    return out if batched.dim() == input.dim() else out.squeeze(0)


def run_strided(layer: nn.Conv2d, input: Tensor) -> Tensor:
    """A strided 1x1 convolution of one group whose weight learns, itself or by any update."""
    if not _overruns(layer):
        return run_any(layer, input)  # type: ignore[no-any-return]
    twin: Any = _replica(layer, ())
    batched, window = _batched(layer, input)
    out = pointwise(batched, twin.weight, twin.bias, window)
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
# Low-rank updates never ask for that gradient (`spalier.adapters.forward`).
_VECTOR = 16


def is_strided_pointwise(layer: nn.Module) -> bool:
    """True for 1x1 convolutions with a stride: once pruned to few inputs, their native weight gradient is faulty."""
    return isinstance(layer, nn.Conv2d | nn.ConvTranspose2d) and max(layer.kernel_size) == 1 and max(layer.stride) > 1


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


# -- the fast path ----------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> Tensor:
    """``x (W + up^T down)^T + bias`` with W frozen; x is (..., in)."""
    operands = _autocast(x, weight, bias, down, up)
    made_of = _made_of(x) if operands[0] is x else None
    out: Tensor = _Linear.apply(*operands, made_of)  # type: ignore[no-untyped-call]
    return out


# A transformer's widest activation is what GELU, or a gate's product, returns. Both keep what they took for their own
# backward pass. So the layer behind them keeps that too instead of their result, and calls them again in its own
# backward: the same kernel on the same numbers, to the bit. What a norm returns is kept: its node does not say by which
# epsilon it was made.
_MAKERS: dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]] = {
    "GeluBackward0": (("self",), F.gelu),
    "SiluBackward0": (("self",), F.silu),
    "MulBackward0": (("self", "other"), torch.mul),
}


def _made_of(x: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]] | None:
    """How to make an activation again from what is kept anyway; None where it has to be kept itself."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None  # which decide themselves what is kept
    node = x.grad_fn
    names, make = _MAKERS.get("" if node is None else node.name(), ((), torch.mul))
    # what was written to since is something else; what a hook keeps (checkpointing, offloading) is not to be had now
    raw = [getattr(node, f"_raw_saved_{name}") for name in names]
    if not raw or x._version or any(getattr(each, "unpack_hook", each) is not None for each in raw):
        return None
    kept = tuple(getattr(node, f"_saved_{name}") for name in names)
    if not all(type(each) is Tensor and each.dtype == x.dtype for each in kept):
        return None
    return (partial(make, approximate=node._saved_approximate) if make is F.gelu else make), kept  # type: ignore[union-attr]


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, window: Window) -> Tensor:
    """A convolution with ``W + up^T down``, W frozen, one group; x is (batch, in, ...).

    ``down`` of shape (r, in) updates the centre tap, (r, in, *kernel) the whole kernel.
    """
    if window.kernel == (1,) * len(window.kernel):
        down = down.flatten(1)  # the one tap is the whole kernel
    operands = _autocast(x, weight, bias, down, up)
    out: Tensor = _Conv.apply(*operands, *window)  # type: ignore[no-untyped-call]
    return out


def pointwise(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """A 1x1 convolution in one group whose weight learns, without the native gradient of that weight."""
    out: Tensor = _Pointwise.apply(*_autocast(x, weight, bias), *window)  # type: ignore[no-untyped-call]
    return out


def embedding(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, padding_idx: int | None) -> Tensor:
    """Rows x of ``W + down^T up`` with W frozen; only the rows that are read are ever formed."""
    thin = F.embedding(x, down.T, padding_idx)  # (..., r)
    return F.embedding(x, weight) + thin @ up


def _autocast(*tensors: Tensor | None) -> Any:
    """Cast the operands as autocast would, outside of the custom functions: their backward runs without it."""
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


_LARGE = 1 << 22  # elements; measured: smaller activations stay in the caches, where batched products win


def _fusing_pays(pixels: int, weight: Tensor) -> bool:
    """Forming the fused weight, memory-bound, costs about as much as the thin path over this many pixels."""
    outputs, inputs = weight.shape[:2]
    return pixels * (inputs + outputs) > weight.numel()


def _no_view(out: Tensor) -> Tensor:
    """The same memory, not as a view of a matrix: an activation that works in place may follow."""
    made: Tensor = torch.ops.aten._unsafe_view(out, out.shape) if out.dim() > 2 else out
    return made


class _Linear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, made_of: Any) -> Tensor:
        if _fusing_pays(x.shape[:-1].numel(), weight):
            return _no_view(F.linear(x, torch.addmm(weight, up.T, down), bias))
        out = F.linear(x, weight, bias).contiguous()  # a view could not be accumulated into
        _accumulate_(_columns(out), _project(_columns(x), down), up)
        return _no_view(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, down, up, made_of = inputs
        ctx.make, kept = made_of or (None, (x,))
        # the fused weight is formed again in backward: it would be as large as the weight itself
        ctx.save_for_backward(weight, down, up, *kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight, down, up, *kept = ctx.saved_tensors
        need_x, _, need_bias, *need_factors = ctx.needs_input_grad[:5]
        grad_x = grad_down = grad_up = None
        if need_x and _fusing_pays(grad.shape[:-1].numel(), weight):
            grad_x = grad @ torch.addmm(weight, up.T, down)
        elif need_x:
            grad_x = (grad @ weight).contiguous()
            _accumulate_(_columns(grad_x), _project(_columns(grad), up), down)
        if any(need_factors):
            x = ctx.make(*kept) if ctx.make else kept[0]
            grad_down, grad_up = _grad_pointwise(_columns(grad), _columns(x), down, up)
        grad_bias = grad.sum(list(range(grad.dim() - 1))) if need_bias else None
        return grad_x, None, grad_bias, grad_down, grad_up, None


class _Conv(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, *window: Any) -> Tensor:
        at = Window(*window)
        if down.dim() > 2 or _fusing_pays(len(x) * at.outputs(x.shape[2:]).numel(), weight):
            return at.convolve(x, _fused(weight, down, up), bias)
        out = at.convolve(x, weight, bias)
        _accumulate_(_positions(out), _project(at.centre_tap(x).flatten(2), down), up)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, down, up, *ctx.window = inputs
        ctx.save_for_backward(x, weight, down, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, down, up = ctx.saved_tensors
        at = Window(*ctx.window)
        need_x, _, need_bias, *need_factors = ctx.needs_input_grad[:5]
        grad_x = grad_down = grad_up = None
        if need_x:
            grad_x = _grad_input(grad, x, weight, down, up, at)
        if any(need_factors) and down.dim() > 2:
            grad_down, grad_up = _grad_whole_kernel(grad, x, down, up, at)
        elif any(need_factors):
            grad_down, grad_up = _grad_pointwise(grad.flatten(2), at.centre_tap(x).flatten(2), down, up)
        grad_bias = grad.sum([0, *range(2, grad.dim())]) if need_bias else None
        return grad_x, None, grad_bias, grad_down, grad_up, *(None for _ in ctx.window)


class _Pointwise(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *window: Any) -> Tensor:
        return Window(*window).convolve(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, *ctx.window = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        at = Window(*ctx.window)
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_x = at.backward(grad, x, weight, of="input") if need_x else None
        grad_weight = None
        if need_weight:
            grad_weight = _correlate(grad.flatten(2), at.centre_tap(x).flatten(2)).view(weight.shape)
        grad_bias = grad.sum([0, *range(2, grad.dim())]) if need_bias else None
        return grad_x, grad_weight, grad_bias, *(None for _ in ctx.window)


def _fused(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """``W + up^T down`` (Eq. 3), in W's memory layout."""
    if down.dim() > 2:
        return weight + (up.T @ down.flatten(1)).view(weight.shape)
    if weight.shape[2:].numel() == 1:
        return torch.addmm(weight.flatten(1), up.T, down).view(weight.shape)
    fused = weight.clone()
    tap = fused
    for k in weight.shape[2:]:
        tap = tap.select(2, k // 2)
    tap.addmm_(up.T, down)
    return fused


def _grad_input(grad: Tensor, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, at: Window) -> Tensor:
    many = _fusing_pays(len(grad) * grad.shape[2:].numel(), weight)
    if many or down.dim() > 2 or at.centre_view(x) is None:
        return at.backward(grad, x, _fused(weight, down, up), of="input")
    grad_x = at.backward(grad, x, weight, of="input")
    thin = _project(grad.flatten(2), up)
    if at.is_aligned():
        _accumulate_(_positions(grad_x), thin, down)
    else:
        met = at.centre_view(grad_x)
        assert met is not None  # as it was for x, of the same shape
        met += torch.bmm(thin.mT, down.expand(len(thin), -1, -1)).mT.reshape(met.shape)
    return grad_x


def _grad_whole_kernel(grad: Tensor, x: Tensor, down: Tensor, up: Tensor, at: Window) -> tuple[Tensor, Tensor]:
    # the whole kernel of ``down`` is a convolution to r channels, so its gradient is an ordinary one with r outputs
    thin_grad = _project(grad.flatten(2), up).view(len(grad), len(up), *grad.shape[2:])
    grad_down = at.backward(thin_grad, x, down, of="weight")
    return grad_down, _correlate(at.convolve(x, down, None).flatten(2), grad.flatten(2))


# The thin products, on activations as (batch, channels, positions). A sum over all positions is a batch of products
# and a sum: several times faster on CPUs than one product with so few rows, and the same code for both layouts.


def _grad_pointwise(grad: Tensor, x: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of both factors, where each output position meets one input position."""
    inputs, outputs, rank = x.shape[1], grad.shape[1], len(down)
    if inputs * outputs <= 4 * rank * (inputs + outputs):  # one square product beats four thin ones
        pointwise = _correlate(x, grad)  # (in, out)
        return up @ pointwise.T, down @ pointwise
    return _correlate(_project(grad, up), x), _correlate(_project(x, down), grad)


def _project(x: Tensor, factor: Tensor) -> Tensor:
    """(batch, channels, positions) by (r, channels): (batch, r, positions)."""
    if x.numel() > _LARGE and x.stride(1) == 1:  # past the caches, oneDNN's pointwise convolution is faster
        return F.conv2d(x.unsqueeze(2), factor[:, :, None, None]).squeeze(2)
    return torch.bmm(factor.expand(len(x), -1, -1), x)


def _correlate(a: Tensor, b: Tensor) -> Tensor:
    """Sum over batch and positions of a b^T: (channels of a, channels of b)."""
    return torch.bmm(a, b.mT).sum(0)


def _accumulate_(out: Tensor, thin: Tensor, factor: Tensor) -> None:
    """Add ``thin`` (batch, r, positions) by (r, channels) to ``out`` (batch, channels, positions), in place."""
    if out.stride(1) == 1:
        out.mT.baddbmm_(thin.mT, factor.expand(len(out), -1, -1))
    else:
        out.baddbmm_(factor.T.expand(len(out), -1, -1), thin)


def _columns(x: Tensor) -> Tensor:
    """(batch, ..., channels) as (batch, channels, positions), a view where x is contiguous."""
    return (x.flatten(1, -2) if x.dim() > 2 else x.view(1, x.shape[:-1].numel(), x.shape[-1])).mT


def _positions(x: Tensor) -> Tensor:
    """(batch, channels, ...) as (batch, channels, positions): always a view, to be written to."""
    return x.view(*x.shape[:2], x.shape[2:].numel())
