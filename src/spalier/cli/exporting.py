"""Networks as files for other runtimes: each is written, run there, and compared with PyTorch."""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spalier import files
from spalier.errors import NetworkError
from spalier.networks import logits_of

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOLERANCE = 1e-3
Exported = tuple[str, float, int]
"""The runtime's name, how far its outputs are from PyTorch's, and the bytes of the file."""


def _export(
    net: nn.Module, example: Tensor, out: Path, runtime: str, write: Callable[[Path], Callable[[Tensor], Any]]
) -> Exported:
    """Write beside, run, compare; only then the file is put in its place."""
    import torch

    with tempfile.TemporaryDirectory() as folder, _quiet(), torch.no_grad():
        draft = Path(folder) / out.name
        try:
            found = logits_of(write(draft)(example))
        except ImportError as error:
            raise NetworkError(
                f"{runtime} is not installed ({error}); pip install {_PACKAGES[out.suffix]}"
            ) from error
        except Exception as error:  # exporters raise kinds of their own for whatever a network does
            words = " ".join(str(error).split())[:300]
            raise NetworkError(
                f"{runtime} cannot take the network with inputs of {tuple(example.shape)}: {words}; pass the --shape "
                "that it was learned with, or another kind of file"
            ) from error
        wanted = logits_of(net(example))
        difference = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))
        if not difference < _TOLERANCE:
            raise NetworkError(
                f"{runtime}'s outputs differ from PyTorch's by {difference:.2g} of the largest; expected less than "
                f"{_TOLERANCE:g}: nothing was written"
            )
        data = draft.read_bytes()
    files.write(out, data)
    return runtime, difference, len(data)


_PACKAGES = {".onnx": "spalier[onnx]", ".pte": "executorch", ".pt2": "torch"}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters print of themselves."""
    noisy = [
        logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "root", "torchao")
    ]
    levels = [logger.level for logger in noisy]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in noisy:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(noisy, levels, strict=True):
                logger.setLevel(level)


def _batches() -> Any:
    import torch

    return ({0: torch.export.Dim("batch")},)


def onnx(net: nn.Module, example: Tensor, out: Path) -> Exported:
    """As ONNX, run by onnxruntime."""

    def write(path: Path) -> Callable[[Tensor], Any]:
        import onnxruntime
        import torch

        options: dict[str, Any] = {"dynamo": True, "verbose": False, "external_data": False}
        torch.onnx.export(net, (example,), str(path), dynamic_shapes=_batches(), **options)
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])

    return _export(net, example, out, "onnxruntime", write)


def program(net: nn.Module, example: Tensor, out: Path) -> Exported:
    """As a program of torch.export."""

    def write(path: Path) -> Callable[[Tensor], Any]:
        import torch

        torch.export.save(torch.export.export(net, (example,), dynamic_shapes=_batches()), path)
        loaded: Callable[[Tensor], Any] = torch.export.load(path).module()
        return loaded

    return _export(net, example, out, "torch.export", write)


def executorch(net: nn.Module, example: Tensor, out: Path) -> Exported:
    """As a program of ExecuTorch, run by its own runtime."""

    def write(path: Path) -> Callable[[Tensor], Any]:
        import torch
        from executorch.exir import to_edge
        from executorch.runtime import Runtime

        made = to_edge(torch.export.export(net, (example,))).to_executorch()
        path.write_bytes(made.buffer)
        method = Runtime.get().load_program(path).load_method("forward")
        assert method is not None
        return lambda x: method.execute([x])[0].clone()

    return _export(net, example, out, "ExecuTorch", write)


EXPORTERS: Mapping[str, Callable[[nn.Module, Tensor, Path], Exported]] = {
    ".onnx": onnx,
    ".pt2": program,
    ".pte": executorch,
}
