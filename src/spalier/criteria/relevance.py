"""Layer-wise relevance propagation: rules for operations, as backward passes of their own.

While a network runs under `Relevance`, every operation that relevance can pass through gets a backward pass that
hands on relevance instead of gradients: what an output explains is shared out over the inputs that made it.

- convolutions: alpha 1, beta 0 (positive inputs with positive weights, negative with negative), the bias left out;
- linear layers, sums, averages, products with a constant matrix: epsilon;
- activations and norms pass it on; maxima give it to the winner; data movement moves it;
- attention: the weights are constants, relevance goes through the values;
- a product of two signals: a gate (the smaller one) gets nothing, equals share.

Anything else is refused by name. Sums are conserved but for biases of linear layers and the epsilon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from spalier.errors import ScoreError

EPSILON = 1e-6
Run = Callable[[Tensor], Tensor]
Share = Callable[..., Sequence[Tensor | None]]
"""From the relevance of an operation's output, and its inputs where they are kept, to the relevance of each."""


class Relevance(TorchFunctionMode):
    """Runs a network so that ``backward`` hands on relevance.

    Rules make new tensors. Where the network writes into one instead (``x += y``), the tensor remembers what it has
    become, and whoever uses it later gets that.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, latest, (args, kwargs or {}))
        name = _name(func)
        # "get" reads an attribute such as x.shape; without relevance on the way PyTorch's own function will do
        if name == "get" or not _carries(args, kwargs):
            return func(*args, **kwargs)
        rule = RULES.get(name)
        if rule is None:
            raise ScoreError(
                f"lrp has no rule for {name!r}, which this network calls; use another criterion, such as 'taylor'"
            )
        made = rule(func, *args, **kwargs)
        # PyTorch has not written: the rule made a new tensor. A view would have to change its whole, unseen by us
        if rule is not _move and _writes(func, args, kwargs):
            if args[0]._is_view():
                raise ScoreError(
                    f"lrp cannot follow {name!r} that writes into a part of another tensor; use another criterion, "
                    "such as 'taylor'"
                )
            args[0].__dict__[_NOW] = made
        return made


_NOW = "_spalier_now"
"""The attribute of a tensor that was written into: what it has become."""


def latest(tensor: Tensor) -> Tensor:
    """What a tensor has become in the course of a run."""
    while _NOW in tensor.__dict__:
        tensor = tensor.__dict__[_NOW]
    return tensor


def _writes(func: Any, args: Any, kwargs: Any) -> bool:
    """True where an operation writes into its first argument."""
    name = str(getattr(func, "__name__", ""))
    if "dropout" in name:
        return False  # in eval mode it drops nothing
    if name.startswith("__"):
        return name.startswith("__i") and name.strip("_") in _SPELLINGS
    positional = "norm" not in name and RULES.get(_name(func)) is _pass and any(a is True for a in args[1:])
    return name.endswith("_") or kwargs.get("inplace") is True or positional


def _name(func: Any) -> str:
    """The name of a function or method, in place or not: ``x += y`` is ``add``.

    >>> _name(torch.Tensor.__iadd__), _name(torch.Tensor.__getitem__), _name(torch.relu_)
    ('add', 'getitem', 'relu')
    """
    name = str(getattr(func, "__name__", func)).strip("_")
    return _SPELLINGS.get(name, name)


_SPELLINGS = {
    **dict.fromkeys(("iadd", "radd"), "add"),
    **dict.fromkeys(("isub", "subtract"), "sub"),
    **dict.fromkeys(("imul", "rmul", "multiply"), "mul"),
    **dict.fromkeys(("truediv", "itruediv", "divide", "true_divide"), "div"),
}


def _carries(*values: Any) -> bool:
    """True where relevance can pass through some tensor."""
    return any(isinstance(value, Tensor) and value.requires_grad for value in tree_leaves(values))


class _Rule(torch.autograd.Function):
    """Any operation, and how the relevance of its output is shared out over its inputs."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], share: Share, keeps: bool, *inputs: Tensor) -> Tensor:
        ctx.share = share
        if keeps:
            ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *relevance: Tensor) -> Any:
        return None, None, None, *ctx.share(relevance[0], *ctx.saved_tensors)


def _shared(run: Callable[..., Tensor], share: Share, *inputs: Tensor) -> Tensor:
    made: Tensor = _Rule.apply(run, share, True, *inputs)  # type: ignore[no-untyped-call]
    return made


def _passed(run: Callable[..., Tensor], *inputs: Tensor, shares: Sequence[float] = (1.0,)) -> Tensor:
    """Hand relevance on as it is, or a share of it to each of several inputs, which need not be kept."""
    shapes = [x.shape for x in inputs]

    def share(relevance: Tensor) -> list[Tensor | None]:
        if shares == (1.0,):
            return [relevance]
        sizes = zip(shares, shapes, strict=True)
        return [(relevance * part).sum_to_size(shape) if part else None for part, shape in sizes]

    made: Tensor = _Rule.apply(run, share, False, *inputs)  # type: ignore[no-untyped-call]
    return made


def _by_size(relevance: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two terms, each with its share of the sum."""
    # formed again instead of kept: a sum costs less than the memory of one more activation
    share = _over(relevance, a + b)
    return (a * share).sum_to_size(a.shape), (b * share).sum_to_size(b.shape)


def _in_halves(func: Any) -> Share:
    """Two signals contracted with each other; each gets half, by what it contributed."""

    def share(relevance: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (a, b)]
            z = func(*leaves)
            sent = torch.autograd.grad(z, leaves, _over(relevance, z.detach().clone()) / 2)
        return a * sent[0], b * sent[1]

    return share


def _over(relevance: Tensor, z: Tensor) -> Tensor:
    """Relevance over a sum of contributions, which is written into: it is a tensor of the rule's own."""
    # epsilon has the sign of z, so that it moves every denominator away from zero
    small = torch.full((), EPSILON, dtype=z.dtype, device=z.device)
    return torch.div(relevance, z.add_(torch.copysign(small, z)), out=z)


def _back(linear: Run, x: Tensor, above: Callable[[Tensor], Tensor]) -> Tensor:
    """``x`` times what a linear operation sends back of a function of its output."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        z = linear(leaf)
        (sent,) = torch.autograd.grad(z, leaf, above(z.detach()))
    return _times(sent, x)


def _times(sent: Tensor, x: Tensor) -> Tensor:
    """What was sent back is the rule's own, unless it is a view of something shared."""
    return sent.mul_(x) if sent.is_contiguous() or sent.stride() == x.stride() else sent * x


def _epsilon(linear: Run) -> Share:
    """Each input gets what it contributed, over the sum of all contributions."""
    return lambda relevance, x: [_back(linear, x, lambda z: _over(relevance, z.clone()))]


def _alpha_beta(run: Callable[[Tensor, Tensor], Tensor], weight: Tensor) -> Share:
    """Only contributions of the right sign count: positive with positive, negative with negative."""

    def share(relevance: Tensor, x: Tensor) -> list[Tensor]:
        positive = weight.clamp(min=0)
        if _is_positive(x):  # behind a rectifier; no contribution is negative then
            return [_back(lambda v: run(v, positive), x, lambda z: torch.div(relevance, z.add_(EPSILON), out=z))]
        parts = [(x.clamp(min=0), positive), (x.clamp(max=0), weight.clamp(max=0))]
        with torch.enable_grad():
            leaves = [part.requires_grad_() for part, _ in parts]
            z = [run(leaf, w) for leaf, (_, w) in zip(leaves, parts, strict=True)]
            # both parts are sums of products of equal signs, so z is positive and epsilon needs no sign
            above = relevance / (z[0] + z[1]).detach().add_(EPSILON)
            sent = torch.autograd.grad(z, leaves, [above, above])
        return [_times(sent[0], leaves[0].detach()).add_(sent[1] * leaves[1].detach())]

    return share


def _is_positive(x: Tensor) -> bool:
    """True without a negative entry; read in the order in which it lies in memory, or it would be copied first."""
    lies = x.permute(0, 2, 3, 1) if x.dim() == 4 and x.stride(1) == 1 else x
    return bool(lies.min() >= 0)


# the rules, by the names of operations: each runs the operation so that its backward pass shares out relevance

Rule = Callable[..., Any]


def _convolution(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    if not x.requires_grad or weight.requires_grad:
        raise ScoreError("lrp has no rule for a convolution whose kernel is computed; use another criterion")
    share = _alpha_beta(lambda v, w: func(v, w, None, *args, **kwargs), weight)
    return _shared(lambda v: func(v, weight, bias, *args, **kwargs), share, x)


def _linear(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Linear in its first argument, which alone carries relevance; a bias takes its share and keeps it."""
    if _carries(args, kwargs) or not isinstance(x, Tensor) or not x.requires_grad:
        raise ScoreError(f"lrp has no rule for {_name(func)!r} of computed weights; use another criterion")

    def run(v: Tensor) -> Tensor:
        made: Tensor = func(v, *args, **kwargs)
        return made

    return _shared(run, _epsilon(run), x)


def _matmul(func: Any, a: Tensor, b: Tensor) -> Tensor:
    if not b.requires_grad:
        return _linear(func, a, b)
    if not a.requires_grad:
        return _linear(lambda v, u: func(u, v), b, a)
    return _shared(func, _in_halves(func), a, b)


def _addmm(func: Any, bias: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    """A bias takes its share and keeps it, as in a linear layer."""
    if b.requires_grad or bias.requires_grad or not a.requires_grad:
        raise ScoreError("lrp has no rule for 'addmm' of computed weights; use another criterion")
    return _linear(lambda v: func(bias, v, b, **kwargs), a)


def _einsum(func: Any, equation: str, *operands: Any) -> Tensor:
    given = list(operands[0] if len(operands) == 1 and not isinstance(operands[0], Tensor) else operands)
    carrying = [i for i, x in enumerate(given) if x.requires_grad]
    if len(carrying) == 2 and len(given) == 2:
        product = partial(func, equation)
        return _shared(product, _in_halves(product), *given)
    if len(carrying) > 1:
        raise ScoreError("lrp has no rule for 'einsum' of several signals; use another criterion")
    place = carrying[0]
    return _linear(lambda v: func(equation, *given[:place], v, *given[place + 1 :]), given[place])


def _glu(func: Any, x: Tensor, dim: int = -1) -> Tensor:
    """One half gates the other."""
    signal, gate = x.chunk(2, dim)
    return _mul(func, signal, torch.sigmoid(gate.detach()))


def _attention(func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not value.requires_grad:
        return _constant(func, query, key, value, *args, **kwargs)
    # a softmax has no rule that conserves relevance, so the attention weights count as constants
    query, key = query.detach(), key.detach()
    return _linear(lambda v: func(query, key, v, *args, **kwargs), value)


def _pass(func: Any, x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Activations and norms."""
    others, named = _detached(args), _detached(kwargs)
    named.pop("inplace", None)
    run = _out_of_place(func)
    return _passed(lambda v: run(v, *_without_inplace(run, others), **named), x)


def _constant(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """What only weighs or scales signals: it gets no relevance."""
    with torch.no_grad():
        made: Tensor = func(*_detached(args), **_detached(kwargs))
    return made


def _move(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Data movement: the gradient of a move is the move of relevance."""
    return func(*args, **kwargs)


def _summed(a: Any, b: Any) -> Tensor:
    if not isinstance(a, Tensor):
        a, b = b, a
    if not isinstance(b, Tensor):  # a number shifts every entry alike
        return _passed(lambda v: v + b, a)
    return _shared(torch.add, _by_size, a, b)


def _sub(func: Any, a: Any, b: Any, *, alpha: float = 1) -> Tensor:
    return _summed(a, _scaled(b, -alpha))


def _scaled(x: Any, by: float) -> Any:
    """A multiple of something explains as much as it."""
    if by == 1:
        return x
    return _passed(lambda v: v * by, x) if isinstance(x, Tensor) and x.requires_grad else x * by


def _mul(func: Any, a: Any, b: Any, **kwargs: Any) -> Tensor:
    if not isinstance(a, Tensor) or not a.requires_grad:
        a, b = b, a
    if not isinstance(b, Tensor) or not b.requires_grad:
        keeps_shape = not isinstance(b, Tensor) or torch.broadcast_shapes(a.shape, b.shape) == a.shape
        return _passed(lambda v: v * b, a) if keeps_shape else _passed(torch.mul, a, b, shares=(1.0, 0.0))
    # a gate, as in squeeze-and-excitation, has fewer numbers than what it gates
    shares = (0.5, 0.5) if a.numel() == b.numel() else (1.0, 0.0) if a.numel() > b.numel() else (0.0, 1.0)
    return _passed(torch.mul, a, b, shares=shares)


def _div(func: Any, a: Any, b: Any, **kwargs: Any) -> Tensor:
    """The denominator is a scale."""
    scale = b.detach() if isinstance(b, Tensor) else b
    if not isinstance(a, Tensor) or not a.requires_grad:
        return _constant(func, a, b, **kwargs)
    return _mul(func, a, 1 / scale)


def _detached(values: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, values)


def _out_of_place(func: Any) -> Any:
    """``relu_`` writes into what others may still need."""
    name = str(getattr(func, "__name__", ""))
    if name.endswith("_") and not name.startswith("__"):
        plain = name.rstrip("_")
        return getattr(torch.nn.functional, plain, None) or getattr(torch, plain, None) or getattr(Tensor, plain)
    return func


def _without_inplace(func: Any, args: Any) -> Any:
    """``F.relu(x, True)`` and its like have the switch as their last positional argument."""
    if "norm" in str(getattr(func, "__name__", "")):
        return args
    return tuple(False if value is True else value for value in args)


# Entries stay where they are, so the relevance of an output is that of its input.
_PASSING = """
relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardtanh softplus tanh sigmoid hardsigmoid logsigmoid prelu
threshold clamp clamp_min square pow neg batch_norm layer_norm group_norm rms_norm instance_norm normalize
dropout log_softmax dropout1d dropout2d dropout3d feature_dropout alpha_dropout feature_alpha_dropout
"""
# Entries move, or one of several is chosen; autograd sends relevance back the way that they came.
_MOVING = """
view view_as reshape reshape_as flatten unflatten permute transpose swapaxes movedim t contiguous clone cat concat
concatenate stack split chunk tensor_split unbind getitem index_select narrow select squeeze unsqueeze expand expand_as
repeat repeat_interleave tile roll flip pad to float double half bfloat16 type type_as masked_fill where gather
take_along_dim maximum minimum pixel_shuffle pixel_unshuffle unfold channel_shuffle max amax boolean_dispatch
"""
# These ask about a tensor, or make one that no relevance reaches.
_ASKING = """
size dim numel len stride is_contiguous is_floating_point is_complex register_hook detach ndimension element_size
has_names new_zeros new_ones new_full new_empty new_tensor zeros_like ones_like full_like empty_like eq ne lt le gt ge
argmax item tolist
"""
_DIMENSIONS = (1, 2, 3)
RULES: dict[str, Rule] = {
    **dict.fromkeys([f"conv{t}{n}d" for t in ("", "_transpose") for n in _DIMENSIONS], _convolution),
    **dict.fromkeys(["linear", "mean", "sum", "interpolate", "upsample", "cumsum"], _linear),
    **dict.fromkeys([f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in _DIMENSIONS], _linear),
    **dict.fromkeys([f"{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in _DIMENSIONS], _move),
    **dict.fromkeys([f"max_pool{n}d_with_indices" for n in _DIMENSIONS], _move),
    **dict.fromkeys(["matmul", "bmm", "mm"], _matmul),
    **dict.fromkeys(["softmax", "rsqrt", "sqrt", "reciprocal", "std", "var", "norm"], _constant),
    **dict.fromkeys(_PASSING.split(), _pass),
    **dict.fromkeys(_MOVING.split(), _move),
    **dict.fromkeys(_ASKING.split(), _move),
    "scaled_dot_product_attention": _attention,
    "addmm": _addmm,
    "einsum": _einsum,
    "glu": _glu,
    "addcmul": lambda func, a, b, c, value=1: _summed(a, _scaled(_mul(func, b, c), value)),
    "add": lambda func, a, b, alpha=1, **kwargs: _summed(a, _scaled(b, alpha)),
    "sub": _sub,
    "rsub": lambda func, a, b, **kwargs: _sub(func, b, a, **kwargs),
    "mul": _mul,
    "div": _div,
}
