"""Low-rank updates at little more than the cost of the frozen layer: hand-written backward passes.

Plain autograd would form the gradient of the whole weight, as dear as in full fine-tuning, to project it on two
thin factors. Here the factors' gradients come from thin matrix products and the weight's is never formed. Of
the two ways to run a layer (Eq. 3), the cheaper is chosen from the shapes alone, so that runs repeat to the bit:

- *fused*: ``W + up^T down`` is formed, the layer runs once, and backward forms it again instead of keeping it;
- *parallel*: the frozen layer runs, and the thin path is accumulated into its output in place.

Both keep for backward what the layer's neighbours keep anyway, the input, and no thin activation.
Factors are rank-major, ``down`` (r, in) and ``up`` (r, out), and thin activations too where they can be: products
that run along the wide side are the fast ones.
Every operation in ``backward`` is differentiable, so second derivatives work too.

`pointwise` is for weights that learn in full, where the native gradient is not to be trusted.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spalier.adapters.geometry import Window


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> Tensor:
    """``x (W + up^T down)^T + bias`` with W frozen; x is (..., in)."""
    out: Tensor = _Linear.apply(*_autocast(x, weight, bias, down, up))  # type: ignore[no-untyped-call]
    return out


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
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor) -> Tensor:
        if _fusing_pays(x.shape[:-1].numel(), weight):
            return _no_view(F.linear(x, torch.addmm(weight, up.T, down), bias))
        out = F.linear(x, weight, bias).contiguous()  # a view could not be accumulated into
        _accumulate_(_columns(out), _project(_columns(x), down), up)
        return _no_view(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, down, up = inputs
        # the fused weight is formed again in backward: it would be as large as the weight itself
        ctx.save_for_backward(x, weight, down, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, down, up = ctx.saved_tensors
        need_x, _, need_bias, *need_factors = ctx.needs_input_grad
        grad_x = grad_down = grad_up = None
        if need_x and _fusing_pays(x.shape[:-1].numel(), weight):
            grad_x = grad @ torch.addmm(weight, up.T, down)
        elif need_x:
            grad_x = (grad @ weight).contiguous()
            _accumulate_(_columns(grad_x), _project(_columns(grad), up), down)
        if any(need_factors):
            grad_down, grad_up = _grad_pointwise(_columns(grad), _columns(x), down, up)
        grad_bias = grad.sum(list(range(grad.dim() - 1))) if need_bias else None
        return grad_x, None, grad_bias, grad_down, grad_up


class _Conv(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, *window: Any
    ) -> Tensor:
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


def _grad_whole_kernel(
    grad: Tensor, x: Tensor, down: Tensor, up: Tensor, at: Window
) -> tuple[Tensor, Tensor]:
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
