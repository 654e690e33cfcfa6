"""Capture a network's graph with `torch.export`, and run networks without leaving a trace on them.

The graph is that of one forward in eval mode and without adapters: these follow the shapes of the weights that they
update, so they say nothing of the structure. The second half of the file reads nodes of the graph: which operation a
node is, which module calls it, and on which line.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils._pytree import tree_map_only

from spalier.adapters.forward import is_diverted, undivert_
from spalier.adapters.geometry import is_uninitialised
from spalier.errors import ExampleError, TraceError
from spalier.text import first_line


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as positional and keyword arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple | list):
        return tuple(example), {}
    if isinstance(example, Tensor):
        return (example,), {}
    raise ExampleError(
        f"the example is a {type(example).__name__}; expected a tensor, a tuple of arguments or a dict of them"
    )


def capture(net: nn.Module, example: Any) -> ExportedProgram:
    """The graph of one forward in eval mode; the network is left as it was."""
    if is_uninitialised(net):
        raise TraceError("the network has a lazy layer without a shape yet; run one batch through it first")
    args, kwargs = arguments(on_device_of(net, example))
    with as_base(net), torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")  # of PyTorch's own, about its own code
        try:
            return torch.export.export(net, args, kwargs, strict=False)
        except Exception as error:  # export raises a dozen kinds; the caller gets one of ours
            raise _refusal(net, args, kwargs, error) from error


def on_device_of(net: nn.Module, example: Any) -> Any:
    """The example where the network is: on the meta device there is nothing to compute with."""
    first = next(net.parameters(), None)
    if first is None or not first.is_meta:
        return example
    return tree_map_only(Tensor, lambda t: t.to("meta"), example)


def _refusal(net: nn.Module, args: Any, kwargs: Any, error: Exception) -> Exception:
    """The network does not run on the example, or it runs and cannot be captured."""
    try:
        with torch.no_grad():
            net(*args, **kwargs)
    except Exception as inner:  # whatever the network's own code raises
        return ExampleError(
            f"the network does not run on the example: {first_line(inner)}; expected an input that "
            "net(example) takes, or a tuple or dict of them"
        )
    return TraceError(
        f"torch.export cannot capture this network: {first_line(error)}; control flow or shapes that depend on "
        "values have to go, or trace the part that can be captured"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """PyTorch logs errors of fake tensors; here a failure is an answer, and nobody's error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def copied(example: Any) -> Any:
    """An example that nobody else writes into."""
    return tree_map_only(Tensor, lambda t: t.detach().clone(), example)


@contextmanager
def preserved(net: nn.Module) -> Iterator[None]:
    """Run a network and put everything back: buffers that it writes into, random numbers that it draws."""
    held = [
        (m, dict(m._buffers), [b if b is None else b.clone() for b in m._buffers.values()])
        for m in net.modules()
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            yield
        finally:
            for module, buffers, values in held:
                module._buffers.update(buffers)
                for buffer, value in zip(buffers.values(), values, strict=True):
                    if buffer is not None and value is not None and not torch.equal(buffer, value):
                        buffer.copy_(value)


@contextmanager
def in_eval_mode(net: nn.Module) -> Iterator[None]:
    """The network in eval mode for a while; what modules cache until they train is made anew before and after."""
    training = [m.training for m in net.modules()]
    # a switch of the mode drops caches, such as LeViT's table of biases; a network's own train() may return nothing
    net.train()
    net.eval()
    try:
        yield
    finally:
        net.train()
        for module, flag in zip(list(net.modules()), training, strict=True):
            module.training = flag


@contextmanager
def as_base(net: nn.Module) -> Iterator[None]:
    """The network in eval mode and without its adapters, for a while."""
    diverted = [(m, m.__dict__["forward"]) for m in net.modules() if is_diverted(m)]
    for module, _ in diverted:
        undivert_(module)
    try:
        with in_eval_mode(net):
            yield
    finally:
        for module, forward in diverted:
            module.__dict__["forward"] = forward


# nodes of the graph


def operation(node: Node) -> str:
    """The name of a node's operation, in place or not.

    >>> class Fake: target = torch.ops.aten.relu_.default
    >>> operation(Fake)
    'relu'
    """
    packet = getattr(node.target, "overloadpacket", None)
    name = getattr(packet or node.target, "__name__", str(node.target))
    return name if name.startswith("__") else name.rstrip("_")


def placeholders(program: ExportedProgram, names: Mapping[str, str]) -> dict[str, list[Node]]:
    """Where each parameter or buffer comes into the graph, by its first name."""
    signature = program.graph_signature
    owners = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    nodes: dict[str, list[Node]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and owners.get(node.name) in names:
            nodes.setdefault(names[owners[node.name]], []).append(node)
    return nodes


def module_of(node: Node) -> str:
    """The path of the innermost module whose forward calls this operation."""
    stack = node.meta.get("nn_module_stack") or {}
    return next(reversed([path for path, _ in stack.values()]), "") if stack else ""


def source(node: Node) -> str:
    """The operation, and the line of the network's own code that it comes from."""
    lines = (node.meta.get("stack_trace") or "").splitlines()
    frames = [line.strip() for line in lines if line.strip().startswith("File ")]
    own = [f for f in frames if "/torch/nn/" not in f] or frames  # a line of nn.Linear tells nobody anything
    if not own:
        return operation(node)
    file, line, *_ = own[-1].removeprefix("File ").split(", ")
    name = file.strip('"').replace("\\", "/").rsplit("/", 1)[-1]
    return f"{operation(node)} at {name}:{line.removeprefix('line ')}"
