"""`spalier task`: look at task files, check them, and make networks of them, for PyTorch and for other runtimes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import spalier
from spalier.cli import opening
from spalier.cli.console import EXISTING_FOLDER, FILE, FOLDER, Console, Texts, command
from spalier.cli.opening import SUFFIX, base_options, example_of, load_task, network_options, one_file, open_base
from spalier.errors import NetworkError, TaskFileError

if TYPE_CHECKING:
    from torch import nn

    from spalier.data import Split
    from spalier.inputs import Inputs
    from spalier.tasks import Task

TASK_FILE = click.argument("task", metavar="TASK", type=click.Path())


@click.group()
def task() -> None:
    """Task files: list, look into, verify, build, export, push, pull; from checkpoints and PEFT."""


@command("list", group=task)
@click.argument("store", type=EXISTING_FOLDER)
def list_(console: Console, store: str) -> None:
    """All tasks of a folder, with sizes and densities, and what they cost together.

    Examples:
        spalier task list runs/digits/tasks
    """
    is_run = (Path(store) / "run.yaml").is_file()
    opened = spalier.Store(Path(store) / "tasks" if is_run else store)
    listing = opened.list()
    runs = sorted(path.parent.name for path in Path(store).glob("*/run.yaml"))
    if not listing and runs:
        raise TaskFileError("missing", f"{store} is a folder of runs; name one of them, such as {store}/{runs[0]}")
    text = str(listing)
    if any(entry.is_sound for entry in listing):
        text += f"\n\n{opened.report()}"
    entries = [
        {"name": entry.name, "bytes": entry.size}
        | {"error": entry.error and entry.error.code, "info": entry.info and entry.info.to_dict()}
        for entry in listing
    ]
    console.show(text, {"tasks": entries})


@command(group=task)
@TASK_FILE
def info(console: Console, task: str) -> None:
    """What a task file says of itself. No code in it runs.

    Examples:
        spalier task info runs/digits/tasks/digits-50.task.safetensors
    """
    file = one_file(task)
    found = load_task(file).info
    size = file.stat().st_size
    console.show(f"{found}\nfile  {size:,} bytes", {**found.to_dict(), "bytes": size})


@command(group=task)
@click.argument("tasks", nargs=-1, required=True, metavar="TASK...")
@base_options
def verify(console: Console, tasks: Texts, base: str | None, **network: Any) -> int:
    """Read files to the last byte; with --base, see that its values are those they were learned on, and build them.

    The exit code is 3 where one is not sound.

    Examples:
        spalier task verify runs/digits/tasks        # the files
        spalier task verify runs/digits/tasks --base runs/digits     # and that they fit the base
    """
    from spalier.text import table

    files = opening.task_files(tasks)
    net = None if base is None else open_base(base, **network)
    errors: dict[Path, TaskFileError | None] = dict.fromkeys(files)
    for file in files:
        try:
            found = spalier.Task.load(file)
            if net is not None:
                found.build(net, share=True)
        except TaskFileError as error:
            errors[file] = error
    # A file's name may hold anything, escape codes of terminals too.
    cells = [[ascii(str(file))[1:-1], f"{error.code}: {error}" if error else "sound"] for file, error in errors.items()]
    rows = [
        {"file": str(file), "sound": error is None} | {"code": error and error.code, "error": error and str(error)}
        for file, error in errors.items()
    ]
    console.show(table(["file", "state"], cells), {"tasks": rows, "base": base})
    return 3 if any(errors.values()) else 0


@command(group=task)
@TASK_FILE
@base_options
@click.option("--out", "-o", required=True, type=FILE, help="A .pt (network) or .safetensors (tensors) file.")
@click.option("--fold", is_flag=True, help="Fold batch norms into the layers before them.")
def build(console: Console, task: str, base: str | None, out: str, fold: bool, **network: Any) -> None:
    """Join a task with its base: a small, dense, ordinary network.

    A .pt file is the module itself, as torch.save writes it: to load it, the code of its classes has to be there (that
    of the base's library; Spalier's own for its built-in networks and for free writers). `spalier task export` is for
    machines that have neither.

    Examples:
        spalier task build runs/digits/tasks/digits-50.task.safetensors -o small.pt
    """
    import torch
    from safetensors.torch import save

    from spalier import files

    ending = _checked_out(out, (".pt", ".safetensors"), task, network["weights"])
    file = one_file(task)
    found, net = load_task(file), open_base(base or opening.run_beside(file), **network)
    small = found.build(net, fold=fold)
    if ending == ".pt":
        buffer = io.BytesIO()
        torch.save(small, buffer)
        data, how = buffer.getvalue(), f'torch.load("{out}", weights_only=False)'
    else:
        data = save({name: value.clone().contiguous() for name, value in small.state_dict().items()})
        how = "its tensors; the code is the base's"
    files.write(Path(out), data)
    before, after = spalier.count(net).parameters, spalier.count(small).parameters
    console.show(
        f"{out}: {len(data):,} bytes, {after:,} of {before:,} parameters; {how}",
        {"out": out, "bytes": len(data), "parameters": after, "base_parameters": before, "task": found.name},
    )


@command(group=task)
@TASK_FILE
@click.argument("repository")
@click.option("--private", is_flag=True, help="Make the repository private, where it does not exist.")
def push(console: Console, task: str, repository: str, private: bool) -> None:
    """Upload a task and a card to the Hugging Face hub, with the token of `hf auth login`.

    Examples:
        spalier task push tasks/flowers.task.safetensors someone/flowers-tasks
    """
    file = one_file(task)
    address = spalier.Store(file.parent).push(file.name.removesuffix(SUFFIX), repository, private=private)
    console.show(address, {"address": address})


@command(group=task)
@click.argument("repository")
@click.argument("name")
@click.option("--store", default="tasks", type=FOLDER, help="The folder to put it in.")
@click.option("--revision", help="A branch, tag or commit.")
def pull(console: Console, repository: str, name: str, store: str, revision: str | None) -> None:
    """Download a task from the Hugging Face hub, check it, and add it to a store.

    Examples:
        spalier task pull someone/flowers-tasks flowers --store tasks
    """
    path = spalier.Store(store).pull(repository, name, revision=revision)
    console.show(path, {"path": str(path)})


TASK_OUT = click.option("--out", "-o", required=True, type=FILE, help=f"The file to write: NAME{SUFFIX}.")
TRAINED_ON = click.option(
    "--base", required=True, help="The network that was trained on, with its --weights, or a run."
)


@command("from-checkpoint", group=task)
@click.argument("checkpoint", type=click.Path())
@TRAINED_ON
@network_options
@TASK_OUT
@click.option(
    "--code", help="As in runs: bytes-1/20, bytes-200000, spdelta-1bit, splora-r8; by default a bit a weight."
)
@click.option("--data", help="Data by name, as for train: layers are fit to it, and accuracy on its test samples.")
@click.option("--data-folder", type=FOLDER, help="Where data sets lie.")
@click.option("--samples", type=click.IntRange(1), default=512, help="How many of its training samples.")
def from_checkpoint(
    console: Console, checkpoint: str, base: str, out: str, code: str | None, data: str | None, **options: Any
) -> None:
    """Make a task of a network that was fine-tuned in full: its weights, a file or a folder, against its base's.

    Examples:
        spalier task from-checkpoint tuned.safetensors --base resnet18 --weights w.pth -o tasks/a.task.safetensors
        spalier task from-checkpoint tuned.pth --base runs/a --code bytes-1/50 --data digits -o b.task.safetensors
        spalier task from-checkpoint tuned --base hf:bert --classes 6 --data text:questions -o c.task.safetensors
    """
    from spalier.runs.narrow import form_of

    folder, samples = options.pop("data_folder"), options.pop("samples")
    form = None if code is None else form_of(code)
    _checked_out(out, [SUFFIX], checkpoint)
    net = open_base(base, **options)
    said = _said_of_texts(base, net, Path(checkpoint) / "config.json")
    if data is not None:
        from spalier.data import open_data

        opened = open_data(data, folder=folder, tokenizer=opening.tokenizer_name(base, net))
        said |= {"classes": opened.classes, "preprocessing": opened.preprocessing}
        said["batches"] = _batches(opened.train, samples)
        said["test"] = None if opened.test is None else _batches(opened.test, len(opened.test))
    if form is not None:
        said |= {"adapter": form.adapter, "bytes": form.budget(spalier.count(net).parameters * 4)}
    made = spalier.Task.from_checkpoint(net, checkpoint, name=Path(out).name.removesuffix(SUFFIX), **said)
    size = made.save(out)
    measured = "".join(f"\n{key}: {value:.4g}" for key, value in made.info.metrics.items())
    rows = [] if made.refitted is None else [vars(row) for row in made.refitted.rows]
    shown = "only norms and head have changed" if made.refitted is None else str(made.refitted)
    result = {"out": out, "bytes": size, "metrics": made.info.metrics, "layers": rows}
    console.show(f"{shown}{measured}\n{out}: {size:,} bytes", result)


@command("from-peft", group=task)
@click.argument("folder", type=EXISTING_FOLDER)
@TRAINED_ON
@network_options
@TASK_OUT
def from_peft(console: Console, folder: str, base: str, out: str, **network: Any) -> None:
    """Make a task of a LoRA that PEFT has saved: adapter_config.json and adapter_model.safetensors.

    Examples:
        spalier task from-peft lora --base hf:bert-folder -o tasks/a.task.safetensors
    """
    _checked_out(out, [SUFFIX])
    net = open_base(base, **network)
    said = _said_of_texts(base, net, Path(folder) / "config.json")
    size = spalier.Task.from_peft(folder, net, name=Path(out).name.removesuffix(SUFFIX), **said).save(out)
    console.show(f"{out}: {size:,} bytes", {"out": out, "bytes": size})


def _batches(split: Split, count: int) -> list[Any]:
    """So many samples as they are, in batches."""
    from spalier.data import Loader

    loader = Loader(split, batch_size=min(64, count), augment=False, shuffle=count < len(split), drop_last=False)
    with contextlib.closing(loader):
        return list(itertools.islice(loader.epoch(0), -(-count // 64)))


def _said_of_texts(base: str, net: nn.Module, config: Path) -> dict[str, Any]:
    """What a task of a language model says, where no data do: how texts become tokens, and the checkpoint's classes."""
    tokenizer = opening.tokenizer_of(base, net)
    if tokenizer is None:
        return {}
    said: dict[str, Any] = {"preprocessing": tokenizer.preprocessing(tokenizer.limit, min(tokenizer.limit, 32))}
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a folder of PEFT has none
        labels = json.loads(config.read_text("utf-8")).get("id2label", {})
        names = [str(labels[key]) for key in sorted(labels, key=int)]
        if any(name != f"LABEL_{i}" for i, name in enumerate(names)):  # how transformers says that nobody named them
            said["classes"] = names
    return said


@command("to-peft", group=task)
@TASK_FILE
@click.argument("folder", type=FOLDER)
@base_options
def to_peft(console: Console, task: str, folder: str, base: str | None, **network: Any) -> None:
    """Write an unpruned low-rank task as a folder for PEFT. Embeddings and Conv1D need --base.

    Examples:
        spalier task to-peft tasks/a.task.safetensors lora
    """
    load_task(one_file(task)).to_peft(folder, None if base is None else open_base(base, **network))
    console.show(f"{folder}: PeftModel.from_pretrained(base, {folder!r})", {"folder": folder})


def _checked_out(out: str, known: Sequence[str], *read: str | None) -> str:
    """How a file to write ends; what cannot be written, or would replace what is read, is refused before any work."""
    path = Path(out)
    ending = SUFFIX if out.endswith(SUFFIX) else path.suffix
    if ending not in known:
        found = f"{out!r} is no name for it, expected one that ends in {', '.join(known)}."
        raise click.BadParameter(found, param_hint="-o")
    if not path.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.absolute().parent}; make it first.", param_hint="-o")
    if any(other is not None and path.resolve() == Path(other).resolve() for other in read):
        raise click.BadParameter(f"{out!r} is what is read; give another name.", param_hint="-o")
    return ending


# export: a file is written, run by its runtime, and compared with PyTorch

EXPORT_OUT = "A .onnx, .pt2 (torch.export) or .pte (ExecuTorch) file; with --to a folder."
TOLERANCE = 1e-3
"""How far outputs of a runtime may be from PyTorch's, as a share of the largest."""


@command(group=task)
@click.argument("tasks", nargs=-1, required=True, metavar="TASK...")
@base_options
@click.option("--out", "-o", required=True, type=click.Path(), help=EXPORT_OUT)
@click.option("--to", type=click.Choice(["onnx", "torch.export", "executorch"]), help="Write all tasks into a folder.")
@click.option("--shape", help="The shape of one input, or how many tokens; by default the task's.")
@click.option("--fold/--no-fold", default=True, help="Fold batch norms into the layers before them.")
def export(console: Console, tasks: Texts, base: str | None, out: str, to: str | None, **options: Any) -> int:
    """Write tasks' networks in a form for other runtimes, run them there, and compare.

    The batch is free in .onnx and .pt2, and the number of tokens too; in .pte both are fixed, the batch to 1. An .onnx
    file has the task's name, classes, preprocessing and SHA-256 in its metadata (spalier.*), a .pt2 file in its extra
    file spalier.json; neither holds a sample. With --to, every task of a store or a run becomes a file in a folder,
    beside a manifest.json that says of each what a program needs to run it: its file and digest, its inputs, its
    classes, and how good it is. The exit code is 3 where a task cannot be exported.

    Examples:
        spalier task export runs/digits/tasks/digits-50.task.safetensors -o small.onnx
        spalier task export runs/digits/tasks/digits-50.task.safetensors -o small.pt2
        spalier task export runs/digits --to onnx -o edge
    """
    from spalier import files
    from spalier.errors import SpalierError
    from spalier.text import table

    shape, fold = options.pop("shape"), options.pop("fold")
    paths, endings = opening.task_files(tasks), {"onnx": ".onnx", "torch.export": ".pt2", "executorch": ".pte"}
    if to is None:
        if len(paths) > 1:
            raise click.UsageError("there are several tasks: pass --to, such as --to onnx, and a folder.")
        ending, outs = _checked_out(out, tuple(EXPORTERS), tasks[0], options["weights"]), [Path(out)]
    else:
        Path(out).mkdir(parents=True, exist_ok=True)
        ending = endings[to]
        outs = [Path(out) / f"{path.name.removesuffix(SUFFIX)}{ending}" for path in paths]
    opened, runtime = functools.cache(functools.partial(open_base, **options)), EXPORTERS[ending][0]
    entries: list[dict[str, Any]] = []
    for path, made in zip(paths, outs, strict=True):
        try:
            found = load_task(path)
            small = found.build(opened(base or opening.run_beside(path)), fold=fold)
            entries.append(_export_task(found, small, path, made, shape))
            console.note(f"{found.name}: {entries[-1]['bytes']:,} bytes")
        except SpalierError as error:
            if to is None:
                raise
            entries.append({"task": path.name.removesuffix(SUFFIX), "error": f"{error.code}: {error}"})
    if to is None:
        entry = entries[0]
        words = f"{runtime}'s outputs differ from PyTorch's by {entry['difference']:.1g} at most"
        console.show(f"{out}: {entry['bytes']:,} bytes; {words}", {"out": out, "runtime": runtime, **entry})
        return 0
    manifest = {"runtime": runtime, "spalier": spalier.__version__, "tasks": entries}
    files.write(Path(out) / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
    cells = [
        [entry["task"], "-", "-", entry["error"]]
        if "error" in entry
        else [entry["task"], entry["file"], f"{entry['bytes']:,}", f"{entry['difference']:.1g}"]
        for entry in entries
    ]
    console.show(table(["task", "file", "bytes", "differs by"], cells), {"folder": out, **manifest})
    return 3 if any("error" in entry for entry in entries) else 0


def _export_task(task: Task, net: nn.Module, path: Path, out: Path, shape: str | None) -> dict[str, Any]:
    """Write a task's network; what programs need to know of it."""
    from spalier.inputs import tensors_of

    info, is_fixed = task.info, out.suffix == ".pte"
    # torch.export takes an axis of size 1 for a constant, so a free batch is exported with 2 samples.
    example = example_of(net, 1 if is_fixed else 2, shape, [task])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    said = {"classes": list(info.classes), "preprocessing": info.preprocessing}
    words = {"task": task.name, "licence": info.licence, "sha256": digest, "version": spalier.__version__}
    words |= {name: json.dumps(value) for name, value in said.items()}  # ONNX knows nothing but text
    difference = _export(net, example, out, words)
    made = {"sha256": hashlib.sha256(out.read_bytes()).hexdigest(), "bytes": out.stat().st_size, "task_sha256": digest}
    inputs = [1 if is_fixed else None, *tensors_of(example)[0].shape[1:]]  # None is a batch of any size
    shown = {"input": inputs, **said, "metrics": info.metrics, "difference": difference}
    return {"task": task.name, "file": out.name, **made, **shown}


def _export(net: nn.Module, example: Inputs, out: Path, said: Mapping[str, str]) -> float:
    """Write a network; how far the runtime's outputs are from PyTorch's. A wrong file is not kept."""
    import torch

    from spalier import files
    from spalier.inputs import call, tensors_of
    from spalier.networks import logits_of
    from spalier.text import import_optional

    runtime, libraries, write = EXPORTERS[out.suffix]
    with tempfile.TemporaryDirectory() as folder, _quiet_exporters(), torch.no_grad():
        for library in libraries:  # an exporter that misses one may fail in words of its own
            import_optional(library, f"{out.suffix} files", NetworkError)
        draft = Path(folder) / out.name
        try:
            found = logits_of(write(net, example, draft, said)(example))
        except Exception as error:  # exporters raise kinds of their own for whatever a network does
            words = " ".join(str(error).split())[:300]
            raise NetworkError(
                f"{runtime} cannot take the network with inputs of {tuple(tensors_of(example)[0].shape)}: {words}; "
                "pass the --shape that it was learned with, or another kind of file"
            ) from error
        wanted = logits_of(call(net, example))
        difference = float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))
        if not difference < TOLERANCE:  # NaN is not smaller either
            raise NetworkError(
                f"{runtime}'s outputs differ from PyTorch's by {difference:.2g} of the largest; expected less than "
                f"{TOLERANCE:g}: nothing was written"
            )
        data = draft.read_bytes()
    files.write(out, data)
    return difference


@contextlib.contextmanager
def _quiet_exporters() -> Iterator[None]:
    """Without what exporters print and log of themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _arguments(example: Inputs) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Positional and keyword arguments of an exporter, and which of their axes are free: samples, and tokens."""
    import torch

    batch = torch.export.Dim("batch")
    if not isinstance(example, dict):
        return (example,), {}, ({0: batch},)
    axes = {0: batch, 1: torch.export.Dim.DYNAMIC}  # from 2 to as many as it has positions
    return (), example, dict.fromkeys(example, axes)


def _write_onnx(net: nn.Module, example: Inputs, path: Path, said: Mapping[str, str]) -> Callable[[Inputs], Any]:
    import torch

    from spalier.benching import onnx_session
    from spalier.inputs import tensors_of

    _, _, free = _arguments(example)
    told = {f"spalier.{name}": value for name, value in said.items()}
    session = onnx_session(net, example, path, said=told, free=free)
    names = [given.name for given in session.get_inputs()]
    return lambda x: torch.from_numpy(
        session.run(None, {n: t.numpy() for n, t in zip(names, tensors_of(x), strict=True)})[0]
    )


def _write_program(net: nn.Module, example: Inputs, path: Path, said: Mapping[str, str]) -> Callable[[Inputs], Any]:
    import torch

    from spalier.inputs import call

    args, kwargs, free = _arguments(example)
    program = torch.export.export(net, args, kwargs, dynamic_shapes=free)
    program.example_inputs = None  # torch.export would store the sample itself
    torch.export.save(program, path, extra_files={"spalier.json": json.dumps(dict(said))})
    loaded = torch.export.load(path).module()
    return lambda x: call(loaded, x)


def _write_executorch(net: nn.Module, example: Inputs, path: Path, _: Mapping[str, str]) -> Callable[[Inputs], Any]:
    import torch
    from executorch.exir import to_edge
    from executorch.runtime import Runtime

    from spalier.inputs import tensors_of

    args, kwargs, _ = _arguments(example)
    path.write_bytes(to_edge(torch.export.export(net, args, kwargs)).to_executorch().buffer)
    method = Runtime.get().load_program(path).load_method("forward")
    assert method is not None
    # The runtime reuses its output's memory.
    return lambda x: method.execute(tensors_of(x))[0].clone()


EXPORTERS = {
    ".onnx": ("onnxruntime", ("onnx", "onnxscript", "onnxruntime"), _write_onnx),
    ".pt2": ("torch.export", (), _write_program),
    ".pte": ("ExecuTorch", ("executorch.exir", "executorch.runtime"), _write_executorch),
}
"""By the ending of the file: the runtime's name, the libraries it needs, and how to write and load it."""
