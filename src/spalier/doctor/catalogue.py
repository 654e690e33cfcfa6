"""What is looked at, what it is needed for, and what to do where it is not there."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("probes.py")


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One trial: a command whose last line of output says what it found."""

    name: str
    needed_for: str
    remedy: str
    """What to do where it is missing or broken."""
    command: tuple[str, ...]
    packages: tuple[str, ...] = ()
    """The distributions whose versions say what is installed, where nothing is tried."""
    required: bool = False
    slow: bool = False
    """Tried only if there is time."""
    programs: tuple[str, ...] = ()
    """One of these has to be there."""


def _probe(
    script: str,
    needed_for: str,
    remedy: str,
    *,
    name: str = "",
    packages: tuple[str, ...] = (),
    required: bool = False,
    slow: bool = False,
    programs: tuple[str, ...] = (),
) -> Probe:
    command = (
        sys.executable,
        "-P",
        str(SCRIPT),
        script,
    )  # -P: what lies beside the script is not to be imported
    return Probe(
        name=name or script,
        needed_for=needed_for,
        remedy=remedy,
        command=command,
        packages=packages or (script,),
        required=required,
        slow=slow,
        programs=programs,
    )


_TRAIN, _CLI, _ONNX = (f"pip install spalier[{extra}]" for extra in ("train", "cli", "onnx"))

PROBES: tuple[Probe, ...] = (
    _probe("torch", "everything", "pip install torch", required=True),
    _probe("numpy", "everything", "pip install numpy", required=True),
    _probe("safetensors", "task files, weights", "pip install safetensors", required=True),
    _probe("torchvision", "networks called torchvision:NAME", "pip install torchvision"),
    _probe("timm", "networks called timm:NAME", "pip install timm"),
    _probe("transformers", "networks called hf:NAME", "pip install transformers"),
    _probe("accelerate", "runs", _TRAIN),
    _probe(
        "sklearn", "the digits: demo, quick runs", _TRAIN, name="scikit-learn", packages=("scikit-learn",)
    ),
    _probe("pillow", "image data", _TRAIN, name="Pillow", packages=("pillow",)),
    _probe("yaml", "settings of runs", _TRAIN, name="pyyaml", packages=("pyyaml",)),
    _probe("tqdm", "progress bars", _TRAIN),
    _probe("huggingface_hub", "task push, task pull", "pip install spalier[hub]"),
    _probe("onnx", "task export to ONNX", _ONNX, packages=("onnx", "onnxscript")),
    _probe("onnxruntime", "bench in onnxruntime", "pip install onnxruntime"),
    _probe(
        "compiler",
        "bench of compiled networks",
        "install a C++ compiler (g++, clang++ or MSVC), or name one by CXX",
        name="torch.compile",
        packages=("torch",),
        slow=True,
        programs=(os.environ.get("CXX") or "c++", "g++", "clang++", "cl"),
    ),
    _probe("executorch", "task export to ExecuTorch", "pip install executorch", slow=True),
    _probe("ray", "sweeps on a cluster", "pip install spalier[ray]"),
    _probe("lightning", "pruning in Lightning's loop", "pip install lightning", slow=True),
    _probe("tensorboard", "tracking of runs", "pip install tensorboard"),
    _probe("click", "the command line", _CLI),
    _probe("jinja2", "reports", _CLI),
    _probe("resvg_py", "figures as PNG", "pip install spalier[report]"),
    _probe(
        "files",
        "runs, sweeps and stores",
        "point TMPDIR at a local disk, and keep folders of runs on one: some network file systems lack locks",
        name="file locks",
    ),
)
