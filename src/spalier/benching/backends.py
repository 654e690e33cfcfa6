"""The ways to run a network: eager, compiled by PyTorch, and in onnxruntime."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from spalier.timing import Call, finished

Backend = Literal["eager", "compiled", "onnxruntime"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def obstacle(backend: Backend, device: torch.device) -> str:
    """Why nothing can be measured with a backend here; empty if it can be tried. Imports what the backend needs."""
    if backend == "compiled":
        for name in (
            "torch._dynamo",
            "torch._inductor.compile_fx",
        ):  # else the first contender would be charged
            importlib.import_module(name)
    if backend == "onnxruntime":
        if device.type != "cpu":
            return f"onnxruntime is measured on CPUs, and the base is on {device}"
        return _missing("onnx", "onnxscript", "onnxruntime")
    return ""


def _missing(*names: str) -> str:
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            return f"{error.name} is not installed: pip install spalier[onnx] onnxruntime"
        except Exception as error:  # whatever a broken installation raises
            return f"{name} cannot be imported ({type(error).__name__}: {error}); pip install spalier[onnx] onnxruntime"
    return ""


def runner(backend: Backend, net: nn.Module, x: Tensor, threads: int, folder: Path) -> Call:
    """A call of the network on a batch; what it returns can be given to `tensors_of`.

    Args:
        backend: one that `obstacle` has nothing to say of.
        net: a plain network in eval mode.
        x: the batch.
        threads: for onnxruntime; PyTorch has its own already.
        folder: an empty one, to stay as long as the call is used.
    """
    makers: dict[str, Callable[[], Call]] = {
        "eager": lambda: _eager(net, x),
        "compiled": lambda: _compiled(net, x),
        "onnxruntime": lambda: _onnxruntime(net, x, threads, folder),
    }
    return makers[backend]()


def _eager(net: nn.Module, x: Tensor) -> Call:
    return finished(lambda: net(x), x.device)


def _compiled(net: nn.Module, x: Tensor) -> Call:
    """Compiled for this network and this shape alone.

    Dynamo keeps what it compiled with the code object of the function, so networks of one class would share a cache,
    look through each other's entries at every call and, from the ninth on, silently run eager. A function with a code
    object of its own keeps them apart, and what was compiled goes with it; ``torch._dynamo.reset`` would throw away
    what the other contenders, and the caller, have compiled.
    """

    def call(x: Tensor) -> Any:
        return net(x)

    call.__code__ = call.__code__.replace()
    graphs = _graphs()
    run = _eager(torch.compile(call, dynamic=False), x)  # type: ignore[arg-type]
    run()
    if _graphs() == graphs:
        raise RuntimeError(
            "torch.compile left the network as it is; is it switched off (TORCH_COMPILE_DISABLE)?"
        )
    return run


def _graphs() -> int:
    """How many graphs Dynamo has compiled so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@contextmanager
def compiling() -> Iterator[None]:
    """Errors of the compiler are errors, whatever the caller has set, and so is a network that it gives up."""
    from torch._dynamo import config

    with (
        config.patch(suppress_errors=False, fail_on_recompile_limit_hit=True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of the compiler's own libraries
        yield


def _onnxruntime(net: nn.Module, x: Tensor, threads: int, folder: Path) -> Call:
    import onnxruntime

    x = x.contiguous()  # the only layout it takes; else every call would pay for a copy
    path = str(folder / "net.onnx")
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own libraries
        torch.onnx.export(net, (x,), path, dynamo=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    # else the threads of one contender go on spinning through the next one's turn
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors of what a network returns, in order."""
    from torch.utils._pytree import tree_leaves

    return [torch.as_tensor(leaf) for leaf in tree_leaves(output) if hasattr(leaf, "shape")]


def difference(found: Any, wanted: Any, tolerance: float) -> str:
    """How outputs differ from what they should be, by more than a share of the largest number; empty if they don't."""
    ours, theirs = tensors_of(found), tensors_of(wanted)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        shapes = [[tuple(t.shape) for t in side] for side in (ours, theirs)]
        return f"outputs of shapes {shapes[0]}, expected {shapes[1]} as eager in float32"
    for one, other in zip(ours, theirs, strict=True):
        one, other = one.double().cpu(), other.double().cpu()
        if not one.isfinite().all():
            return "outputs are not finite"
        if not one.numel():
            continue
        off, most = float((one - other).abs().max()), float(other.abs().max())
        if off > tolerance * most:
            share = off / most if most else float("inf")
            return f"outputs differ from eager float32 by {share:.1e} of the largest, expected {tolerance:.0e} or less"
    return ""
