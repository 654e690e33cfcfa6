"""Without extras the library works, and whatever needs one says which, before anything is learned or written."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from reported import write_run
from running import quick
from support import tiny_cnn

import spalier as sp
from spalier.cli.serving import serve_here
from spalier.data import open_data
from spalier.errors import SpalierError
from spalier.networks import open_network
from spalier.serve import app

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MODULES = {
    "pillow": "PIL",
    "python-multipart": "python_multipart",
    "pyyaml": "yaml",
    "resvg-py": "resvg_py",
    "scikit-learn": "sklearn",
}
"""Modules of libraries that are called otherwise."""


def libraries():
    """The modules of what the extras for users install, and the extra of each."""
    found = {}
    for extra in ("cli", "hub", "onnx", "ray", "report", "serve", "train"):
        for name in (Requirement(line).name for line in EXTRAS[extra]):
            if name != "spalier":
                found[MODULES.get(name, name)] = f"spalier[{extra}]"
    return found


def image_folder(folder):
    from PIL import Image

    (folder / "cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "cat" / "1.png")
    return folder


def export_task(ending):
    """By the command line; what it says of an error."""
    from spalier.cli.task_commands import _export

    _export(tiny_cnn().eval(), torch.zeros(2, 3, 8, 8), Path(f"net{ending}"), {})


def bench(folder):
    timed = sp.bench(tiny_cnn().eval(), {}, torch.zeros(1, 3, 8, 8), batches=(1,), backends=("onnxruntime",))
    raise SpalierError(str(timed))


def integration(name):
    specification = importlib.util.find_spec(f"spalier.integrations.{name}")
    specification.loader.exec_module(importlib.util.module_from_spec(specification))


USES = {
    "PIL": [lambda f: open_data(f"folder:{f / 'images'}").train.fetch([0], None), lambda f: run()],
    "accelerate": [lambda f: run()],
    "huggingface_hub": [lambda f: sp.Store(f / "store").pull("owner/name", "task")],
    "jinja2": [lambda f: sp.report(f / "report", "page.html")],
    "onnx": [lambda f: export_task(".onnx"), bench],
    "onnxruntime": [lambda f: export_task(".onnx"), bench],
    "onnxscript": [lambda f: export_task(".onnx"), bench],
    "ray": [lambda f: sp.Sweep(quick(), over={"seed": [0]}).run("sweep", place="ray")],
    "resvg_py": [lambda f: sp.report(f / "report", "page.html", figures="figures")],
    "sklearn": [lambda f: open_data("digits")],
    "tqdm": [lambda f: run(progress=True)],
    "yaml": [lambda f: quick().to_yaml(), lambda f: run()],
    "fastapi": [lambda f: app(tiny_cnn(), f / "store")],
    "prometheus_client": [lambda f: app(tiny_cnn(), f / "store")],
    "python_multipart": [lambda f: app(tiny_cnn(), f / "store")],
    "uvicorn": [lambda f: serve_here(tiny_cnn(), str(f / "store"), None, "127.0.0.1", 0, None)],
    # what no extra installs, since networks and data of others need it
    "datasets": [lambda f: open_data("hf:owner/name")],
    "executorch": [lambda f: export_task(".pte")],
    "lightning": [lambda f: integration("lightning")],
    "timm": [lambda f: open_network("timm:test_vit")],
    "torchvision": [
        lambda f: open_network("torchvision:resnet18"),
        lambda f: open_data("torchvision:CIFAR10"),
    ],
    "transformers": [lambda f: open_network("hf:owner/name"), lambda f: integration("transformers")],
}
"""What needs a library."""


def run(progress=False):
    quick(epochs=1, densities=()).run("run", progress=progress)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("installation")
    write_run(made / "report")
    image_folder(made / "images")
    return made


def test_every_library_of_the_extras_is_here():
    assert set(libraries()) == {*USES, "click"} - {
        "datasets",
        "executorch",
        "lightning",
        "timm",
        "torchvision",
        "transformers",
    }


@pytest.mark.parametrize(
    ("library", "use"), [pair for name, uses in USES.items() for pair in [(name, use) for use in uses]]
)
def test_what_is_missing_is_named(library, use, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hidden = {library, "pytorch_lightning"} if library == "lightning" else {library}
    for name in {*sys.modules, *hidden}:
        if name.partition(".")[0] in hidden:
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises((SpalierError, ModuleNotFoundError)) as caught:
        use(folder)
    wanted = libraries().get(library, library)
    assert re.search(rf"pip install '?{re.escape(wanted)}'?(\W|$)", str(caught.value)), caught.value
    assert not list(tmp_path.rglob("metrics.jsonl"))  # written at the end of an epoch


BARE = """
import sys
import spalier
from spalier.networks import open_network
for name in spalier.__all__:
    getattr(spalier, name)
import torch
net = open_network("resnet8", classes=3, width=4)
example = torch.randn(1, 3, 8, 8)
spalier.attach_(net, spalier.SPLoRA(rank=2), head="fc", example=example)
spalier.prune_(net, spalier.select(net, spalier.score(net, criterion="weight"), channels=0.5))
spalier.Task.of(net, "small").save("small.task.safetensors")
spalier.detach_(net)
small = spalier.Task.load("small.task.safetensors").build(net)
assert small(example).shape == (1, 3)
assert not {"click", "yaml", "PIL", "sklearn", "accelerate", "jinja2"} & set(sys.modules)
"""


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment(tmp_path):
    """With torch, numpy and safetensors, and what torch brings, and nothing else."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    call([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)])
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    (place,) = (tmp_path / "venv").rglob("site-packages")
    call([*pip, "--python", str(python), "install", "--no-deps", str(wheel)])
    expose(place, "torch", "numpy", "safetensors")
    call([str(python), "-I", "-c", BARE], cwd=tmp_path)
    command = subprocess.run(
        [python.with_name("spalier"), "--help"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert command.returncode == 1
    assert command.stderr.strip().endswith("pip install 'spalier[cli]'")


def expose(place, *names):
    """Let an environment see distributions of this one, and what they depend on; links need no room."""
    from importlib.metadata import distribution

    needed, seen = list(names), set()
    while needed:
        name = needed.pop()
        if name in seen:
            continue
        seen.add(name)
        found = distribution(name)
        tops = {Path(str(file)).parts[0] for file in found.files} - {"..", "__pycache__"}
        for top in tops:
            if not (place / top).exists():
                (place / top).symlink_to(found.locate_file(top))
        needed += [
            one.name
            for one in map(Requirement, found.requires or [])
            if not one.marker or one.marker.evaluate({"extra": ""})
        ]


def call(command, **options):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, **options)
    assert done.returncode == 0, done.stdout + done.stderr
