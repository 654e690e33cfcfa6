"""`spalier task`: look at task files, check them, and make networks of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spalier.cli.opening import SUFFIX, base_options, load, open_base, shape_of, task_files
from spalier.cli.state import State, examples, json_option, pass_state
from spalier.errors import TaskFileError

if TYPE_CHECKING:
    from torch import nn

_OUT = click.Path(dir_okay=False)
_TASK = click.argument("task", metavar="TASK", type=click.Path())


@click.group()
def task() -> None:
    """Task files: list, look into, verify, build, export, push, pull."""


@task.command("list", epilog=examples("spalier task list runs/digits/tasks"))
@click.argument("store", type=click.Path(exists=True, file_okay=False))
@json_option
@pass_state
def list_(state: State, store: str) -> None:
    """All tasks of a folder, with sizes and densities, and what they cost together."""
    from spalier.tasks.store import Store

    opened = Store(_store(store))
    listing = opened.list()
    runs = sorted(path.parent.name for path in Path(store).glob("*/run.yaml"))
    if not listing and runs:
        raise TaskFileError(
            "missing", f"{store} is a folder of runs; name one of them, such as {store}/{runs[0]}"
        )
    entries = [
        {
            "name": e.name,
            "bytes": e.size,
            "error": e.error and e.error.code,
            "info": e.info and e.info.to_dict(),
        }
        for e in listing
    ]
    text = str(listing)
    if any(entry.is_sound for entry in listing):
        text += f"\n\n{opened.report()}"
    state.show(text, {"tasks": entries})


@task.command(epilog=examples("spalier task info runs/digits/tasks/digits-50.task.safetensors"))
@_TASK
@json_option
@pass_state
def info(state: State, task: str) -> None:
    """What a task file says of itself. No code in it runs."""
    file = _one(task)
    found = load(file).info()
    size = file.stat().st_size
    state.show(f"{found}\nfile  {size:,} bytes", {**found.to_dict(), "bytes": size})


@task.command(
    epilog=examples(
        "spalier task verify runs/digits/tasks        # the files",
        "spalier task verify runs/digits/tasks --base runs/digits     # and that they fit the base",
    )
)
@click.argument("tasks", nargs=-1, required=True, metavar="TASK...")
@base_options
@json_option
@pass_state
def verify(state: State, tasks: tuple[str, ...], base: str | None, **network: Any) -> int:
    """Read files to the last byte; with --base, see that its values are those they were learned on, and build them.

    The exit code is 3 where one is not sound.
    """
    from spalier.tasks.task import Task
    from spalier.text import table

    files = task_files(tasks)
    net = None if base is None else open_base(base, **network)
    rows = []
    for file in files:
        error = None
        try:
            found = Task.load(file)
            if net is not None:
                found.build(net, share=True)
        except TaskFileError as wrong:
            error = wrong
        rows.append(
            {
                "file": str(file),
                "sound": error is None,
                "code": error and error.code,
                "error": error and str(error),
            }
        )
    shown = [
        [ascii(row["file"])[1:-1], "sound" if row["sound"] else f"{row['code']}: {row['error']}"]
        for row in rows
    ]
    state.show(table(["file", "state"], shown), {"tasks": rows, "base": base})
    return 0 if all(row["sound"] for row in rows) else 3


@task.command(
    epilog=examples("spalier task build runs/digits/tasks/digits-50.task.safetensors -o small.pt"),
)
@_TASK
@base_options
@click.option(
    "--out", "-o", required=True, type=_OUT, help="small.pt, the network, or .safetensors, its tensors."
)
@click.option("--fold", is_flag=True, help="Fold batch norms into the layers before them.")
@json_option
@pass_state
def build(state: State, task: str, base: str | None, out: str, fold: bool, **network: Any) -> None:
    """Join a task with its base: a small, dense, ordinary network.

    A .pt file is the module itself, as torch.save writes it: to load it, the code of its classes has to be there (that
    of the base's library; Spalier's own for its built-in networks and for free writers). `spalier task export` is for
    machines that have neither.
    """
    import torch
    from safetensors.torch import save

    from spalier import files
    from spalier.counting import count

    ending = _ending(out, (".pt", ".safetensors"), task, network["weights"])
    found, net, small = _built(task, base, fold, network)
    if ending == ".pt":
        import io

        buffer = io.BytesIO()
        torch.save(small, buffer)
        data = buffer.getvalue()
    else:
        data = save({name: value.clone().contiguous() for name, value in small.state_dict().items()})
    files.write(Path(out), data)
    before, after = count(net).parameters, count(small).parameters
    how = (
        f'torch.load("{out}", weights_only=False)'
        if ending == ".pt"
        else "its tensors; the code is the base's"
    )
    state.show(
        f"{out}: {len(data):,} bytes, {after:,} of {before:,} parameters; {how}",
        {"out": out, "bytes": len(data), "parameters": after, "base_parameters": before, "task": found.name},
    )


@task.command(
    epilog=examples(
        "spalier task export runs/digits/tasks/digits-50.task.safetensors -o small.onnx",
        "spalier task export runs/digits/tasks/digits-50.task.safetensors -o small.pt2",
    )
)
@_TASK
@base_options
@click.option(
    "--out", "-o", required=True, type=_OUT, help="net.onnx, net.pt2 (torch.export) or net.pte (ExecuTorch)."
)
@click.option("--shape", help="The shape of one input; by default the task's images.")
@click.option("--fold/--no-fold", default=True, help="Fold batch norms into the layers before them.")
@json_option
@pass_state
def export(
    state: State, task: str, base: str | None, out: str, shape: str | None, fold: bool, **network: Any
) -> None:
    """Write a task's network in a form for other runtimes, run it there, and compare.

    The batch is free in .onnx and .pt2, and 1 in .pte.
    """
    import torch

    from spalier.cli.exporting import EXPORTERS

    ending = _ending(out, tuple(EXPORTERS), task, network["weights"])
    found, _, small = _built(task, base, fold, network)
    torch.manual_seed(0)
    example = torch.randn(1 if ending == ".pte" else 2, *shape_of(shape, [found]))
    runtime, difference, size = EXPORTERS[ending](small, example, Path(out))
    state.show(
        f"{out}: {size:,} bytes; {runtime}'s outputs differ from PyTorch's by {difference:.1g} at most",
        {"out": out, "bytes": size, "runtime": runtime, "difference": difference, "task": found.name},
    )


@task.command(epilog=examples("spalier task push tasks/flowers.task.safetensors someone/flowers-tasks"))
@_TASK
@click.argument("repository")
@click.option("--private", is_flag=True, help="Make the repository private, where it does not exist.")
@json_option
@pass_state
def push(state: State, task: str, repository: str, private: bool) -> None:
    """Upload a task and a card to the Hugging Face hub, with the token of `hf auth login`."""
    from spalier.tasks.store import Store

    file = _one(task)
    address = Store(file.parent).push(file.name.removesuffix(SUFFIX), repository, private=private)
    state.show(address, {"address": address})


@task.command(epilog=examples("spalier task pull someone/flowers-tasks flowers --store tasks"))
@click.argument("repository")
@click.argument("name")
@click.option("--store", default="tasks", type=click.Path(file_okay=False), help="The folder to put it in.")
@click.option("--revision", help="A branch, tag or commit.")
@json_option
@pass_state
def pull(state: State, repository: str, name: str, store: str, revision: str | None) -> None:
    """Download a task from the Hugging Face hub, check it, and add it to a store."""
    from spalier.tasks.store import Store

    options = {} if revision is None else {"revision": revision}
    path = Store(store).pull(repository, name, **options)
    state.show(path, {"path": str(path)})


def _store(folder: str) -> Path:
    inside = Path(folder) / "tasks"
    return inside if (Path(folder) / "run.yaml").is_file() else Path(folder)


def _one(task: str) -> Path:
    files = task_files([task])
    if len(files) != 1:
        raise click.UsageError(f"{task} holds {len(files)} tasks; name one of them, such as {files[0]}.")
    return files[0]


def _built(
    task: str, base: str | None, fold: bool, network: dict[str, Any]
) -> tuple[Any, nn.Module, nn.Module]:
    file = _one(task)
    found = load(file)
    net = open_base(base, file, **network)
    return found, net, found.build(net, fold=fold)


def _ending(out: str, known: tuple[str, ...], *used: str | None) -> str:
    """How a file to write ends; what cannot be written, or would take what is read, is refused before any work."""
    path = Path(out)
    if path.suffix not in known or out.endswith(SUFFIX):
        raise click.BadParameter(
            f"{out!r} is no name for it, expected one that ends in {', '.join(known)}.", param_hint="-o"
        )
    if not path.absolute().parent.is_dir():
        raise click.BadParameter(
            f"there is no folder {path.absolute().parent}; make it first.", param_hint="-o"
        )
    if any(other is not None and path.resolve() == Path(other).resolve() for other in used):
        raise click.BadParameter(f"{out!r} is what is read; give another name.", param_hint="-o")
    return path.suffix
