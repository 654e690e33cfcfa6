"""One trial of each library, each run as a process of its own: ``python -P probes.py NAME``.

A library may crash the interpreter or never come back from its import; then only its own trial ends. Nothing of Spalier
is imported here, so a trial costs what its library costs. The last line of the output is what was found, as JSON.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

MARK = "spalier-doctor:"
Found = dict[str, str]
"""``version`` and ``detail``."""


class Lacking(Exception):
    """Something is not there that is no Python package; and what to do."""


def _version(*names: str) -> str:
    found = [metadata.version(name) for name in names]
    return found[0] if len(found) == 1 else ", ".join(map(" ".join, zip(names, found, strict=True)))


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(what)


def numpy() -> Found:
    """A product."""
    import numpy as np

    _expect(float((np.ones((2, 3)) @ np.ones((3, 2))).sum()) == 12, "a product of matrices is wrong")
    return {"version": np.__version__, "detail": "multiplies"}


def torch() -> Found:
    """A convolution, forward and backward, in the ordinary layout."""
    import torch

    layer = torch.nn.Conv2d(3, 8, 3, padding=1)
    x = torch.ones(2, 3, 8, 8)
    layer(x).sum().backward()
    gradient = layer.weight.grad
    inside = gradient is not None and bool(
        (gradient[:, :, 1, 1] == 2 * 8 * 8).all()
    )  # the centre sees every pixel
    _expect(inside, "the gradient of a convolution is wrong")
    devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("MPS")
    capability = torch.backends.cpu.get_cpu_capability()
    detail = f"convolves forward and backward; {torch.get_num_threads()} threads, {capability}"
    return {"version": torch.__version__, "detail": f"{detail}, {', '.join(devices) or 'no GPU'}"}


def safetensors() -> Found:
    """There and back."""
    import numpy as np
    import safetensors
    from safetensors.numpy import load, save

    back = load(save({"a": np.arange(3)}))["a"]
    _expect(back.tolist() == [0, 1, 2], "what was saved does not come back")
    return {"version": safetensors.__version__, "detail": "saves and loads"}


def torchvision() -> Found:
    """A compiled operator, which is what a build for another PyTorch lacks."""
    import torch
    import torchvision

    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    kept = torchvision.ops.nms(boxes, torch.ones(1), 0.5)
    _expect(kept.tolist() == [0], "nms is wrong")
    return {"version": torchvision.__version__, "detail": "its compiled operators run"}


def timm() -> Found:
    """Its list of networks."""
    import timm

    count = len(timm.list_models())
    _expect(count > 0, "it has no networks")
    return {"version": timm.__version__, "detail": f"{count:,} networks"}


def transformers() -> Found:
    """Whether it takes this PyTorch; networks are imported when they are asked for."""
    import transformers

    _expect(transformers.utils.is_torch_available(), "it does not take this PyTorch; is that too old for it?")
    return {"version": transformers.__version__, "detail": "imports, and takes this PyTorch"}


def accelerate() -> Found:
    """An accelerator of one process."""
    import accelerate

    device = accelerate.Accelerator(cpu=True).device
    return {"version": accelerate.__version__, "detail": f"one process on {device}"}


def sklearn() -> Found:
    """The digits, which come with it."""
    import sklearn
    from sklearn.datasets import load_digits

    count = len(load_digits().target)
    _expect(count == 1797, f"{count} digits instead of 1797")
    return {"version": sklearn.__version__, "detail": "1,797 digits load"}


def pillow() -> Found:
    """An image to bytes and back."""
    import PIL
    from PIL import Image

    for kind in ("PNG", "JPEG"):
        file = io.BytesIO()
        Image.new("RGB", (8, 8), (200, 100, 50)).save(file, kind)
        red = Image.open(file).convert("RGB").getpixel((4, 4))
        _expect(
            isinstance(red, tuple) and abs(red[0] - 200) < 9, f"a {kind} image comes back in other colours"
        )
    return {"version": PIL.__version__, "detail": "encodes and decodes PNG and JPEG"}


def yaml() -> Found:
    """There and back."""
    import yaml

    _expect(yaml.safe_load(yaml.safe_dump({"a": [1]})) == {"a": [1]}, "what was written does not come back")
    return {"version": yaml.__version__, "detail": "writes and reads"}


def tqdm() -> Found:
    """A bar that is not shown."""
    from tqdm import tqdm

    _expect(list(tqdm([1, 2], disable=True)) == [1, 2], "it loses what it counts")
    return {"version": _version("tqdm"), "detail": "imports"}


def huggingface_hub() -> Found:
    """Its client, without calling anybody."""
    from huggingface_hub import HfApi

    HfApi()
    return {"version": _version("huggingface_hub"), "detail": "imports; the hub was not called"}


def onnx() -> Found:
    """A network of two layers, exported and, if there is an onnxruntime, run."""
    import onnx
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
    x = torch.ones(1, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "net.onnx")
        torch.onnx.export(net, (x,), path, dynamo=True, verbose=False)
        onnx.checker.check_model(path)
        detail = "exports two layers"
        try:
            import onnxruntime
        except Exception:  # it has a trial of its own
            return {"version": _version("onnx", "onnxscript"), "detail": detail}
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    _expect(torch.allclose(torch.from_numpy(found), net(x), atol=1e-5), "onnxruntime computes something else")
    return {
        "version": _version("onnx", "onnxscript"),
        "detail": f"{detail}, and onnxruntime computes the same",
    }


def onnxruntime() -> Found:
    """What it can run on."""
    import onnxruntime

    providers = onnxruntime.get_available_providers()
    _expect("CPUExecutionProvider" in providers, f"it runs on {', '.join(providers)}, and not on CPUs")
    return {"version": onnxruntime.__version__, "detail": ", ".join(providers)}


def compiler() -> Found:
    """A small function, compiled."""
    import torch

    x = torch.linspace(0, 1, 64)
    made = torch.compile(lambda t: t.sin() + t.cos() ** 2)
    _expect(torch.allclose(made(x), x.sin() + x.cos() ** 2), "a compiled function computes something else")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    _expect(
        graphs > 0, "torch.compile left the function as it is; is it switched off (TORCH_COMPILE_DISABLE)?"
    )
    return {"version": torch.__version__, "detail": "compiles a function"}


def executorch() -> Found:
    """A layer, lowered and run."""
    import torch
    from executorch.exir import to_edge
    from executorch.runtime import Runtime

    layer, x = torch.nn.Linear(3, 2).eval(), torch.ones(1, 3)
    program = to_edge(torch.export.export(layer, (x,))).to_executorch()
    method = Runtime.get().load_program(program.buffer).load_method("forward")
    _expect(torch.allclose(method.execute([x])[0], layer(x), atol=1e-5), "it computes something else")
    return {"version": _version("executorch"), "detail": "lowers and runs a layer"}


def ray() -> Found:
    """Its import; nothing is started."""
    import ray

    return {"version": ray.__version__, "detail": "imports; no cluster was started"}


def lightning() -> Found:
    """A trainer."""
    import lightning
    import lightning.pytorch

    lightning.pytorch.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    return {"version": lightning.__version__, "detail": "makes a trainer"}


def tensorboard() -> Found:
    """A file of events."""
    event = importlib.import_module("tensorboard.compat.proto.event_pb2")
    files = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    with tempfile.TemporaryDirectory() as folder:
        writer = files.EventFileWriter(folder)
        writer.add_event(event.Event(step=1))
        writer.close()
        _expect(any(file.stat().st_size for file in Path(folder).iterdir()), "it wrote nothing")
    return {"version": _version("tensorboard"), "detail": "writes events"}


def click() -> Found:
    """A command."""
    import click

    _expect(
        click.Command("a", callback=lambda: 3).main([], standalone_mode=False) == 3, "a command does nothing"
    )
    return {"version": _version("click"), "detail": "runs a command"}


def jinja2() -> Found:
    """A template."""
    import jinja2

    text = jinja2.Template("{{ a }}").render(a=3)
    _expect(text == "3", "a template comes out wrong")
    return {"version": _version("jinja2"), "detail": "renders a template"}


def resvg_py() -> Found:
    """Text, which needs fonts."""
    import resvg_py

    head = '<svg xmlns="http://www.w3.org/2000/svg" width="60" height="20"><rect width="60" height="20" fill="white"/>'
    families = "Arial, Helvetica, Liberation Sans, DejaVu Sans, Noto Sans, sans-serif"
    text = f'<text x="2" y="15" font-size="14" font-family="{families}">text</text>'
    empty, written = (bytes(resvg_py.svg_to_bytes(svg_string=f"{head}{t}</svg>")) for t in ("", text))
    _expect(empty.startswith(b"\x89PNG"), "it makes no PNG")
    if empty == written:
        raise Lacking(
            f"it draws, but no text: there is none of {families}", "install a font: DejaVu, Liberation, Noto"
        )
    return {"version": _version("resvg_py"), "detail": "draws, text too"}


def files() -> Found:
    """Locks that exclude, files that reach the disk, in the folder for temporary files."""
    import fcntl
    import os

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "a"
        with path.open("wb") as one, path.open("rb") as other:
            fcntl.flock(one, fcntl.LOCK_EX)
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                raise RuntimeError("two locks are held on one file")
            one.write(b"a")
            one.flush()
            os.fsync(one.fileno())
        path.replace(Path(name) / "b")
        handle = os.open(name, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return {"version": "", "detail": f"locks exclude and fsync works in {Path(name).parent}"}


PROBES: dict[str, Callable[[], Found]] = {
    probe.__name__: probe
    for probe in (
        *(
            numpy,
            torch,
            safetensors,
            torchvision,
            timm,
            transformers,
            accelerate,
            sklearn,
            pillow,
            yaml,
            tqdm,
        ),
        *(huggingface_hub, onnx, onnxruntime, compiler, executorch, ray, lightning, tensorboard),
        *(click, jinja2, resvg_py, files),
    )
}


_OWN = {"pillow": {"PIL"}, "onnx": {"onnx", "onnxscript"}, "files": {"fcntl"}}
"""The modules of a trial where they are called otherwise."""


def attempt(name: str) -> dict[str, Any]:
    """What a trial found, or what went wrong."""
    try:
        return {"state": "works", **PROBES[name]()}
    except ModuleNotFoundError as error:
        module = (error.name or str(error)).partition(".")[0]
        if module in _OWN.get(name, {name}):
            return {"state": "missing", "detail": f"{module} is not installed"}
        return {"state": "broken", "detail": f"it needs {module}, which is not installed", "needs": module}
    except Lacking as error:
        detail, remedy = error.args
        return {"state": "broken", "detail": detail, "remedy": remedy}
    except Exception as error:  # whatever a broken installation raises
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {"state": "broken", "detail": f"{type(error).__name__}: {lines[0] if lines else ''}"}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(f"\n{MARK}{json.dumps(attempt(sys.argv[1]))}", flush=True)
