"""`spalier demo`, `trace`, `train`, `sweep`, `eval`, `bench`, `report` and `env`."""

from __future__ import annotations

import contextlib
import functools
import platform
import re
import shlex
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import spalier
from spalier.cli import opening
from spalier.cli.console import EXISTING_FILE, EXISTING_FOLDER, FILE, FOLDER, Console, Texts, command
from spalier.cli.opening import base_options, network_options, open_base, settings_option
from spalier.errors import DataError

if TYPE_CHECKING:
    from torch import nn

    from spalier.data import Data
    from spalier.runs.learning import Evaluation
    from spalier.tasks import Task

EVAL_BATCH_SIZE = 256
BACKENDS = "eager,compiled,onnxruntime"


@command()
@click.option("--folder", default="spalier-demo", type=FOLDER, help="Where everything goes.")
@click.option("--seed", default=0, type=click.IntRange(0, 2**63 - 1), help="Of everything random.")
@click.option("--serve", is_flag=True, help="Serve what was learned at the end, with a page to try it on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Where to serve it.")
def demo(console: Console, folder: str, seed: int, serve: bool, port: int) -> None:
    """One pretrained base, three tasks on it, and what they cost, in about a minute.

    Nothing is downloaded. The small ResNet that comes with Spalier knows photographs. It learns three tasks of
    scikit-learn's digits by fine-pruning, each at falling densities, and each is written in two bits a weight too. Then
    the one base switches between all files. A table compares that with a fine-tuned network for each task, and with
    fine-pruning alone; every number is measured here. A folder that holds a demo goes on with it, and what was learned
    there is not learned again.

    Examples:
        spalier demo
        spalier demo --folder elsewhere --seed 1
        spalier demo --serve
    """
    from spalier.cli.demo import NETWORK, run_demo, shown

    found = run_demo(Path(folder), seed, console.note)
    console.show(shown(found), found)
    if serve:
        from spalier.cli.serving import log_requests, serve_here
        from spalier.networks import open_network

        log_requests(as_json=console.as_json, quiet=console.quiet)
        base = open_network(NETWORK, pretrained=True)
        serve_here(base, str(Path(folder) / "tasks"), None, "127.0.0.1", port, None, show=True)


@command()
@click.argument("network")
@network_options
@click.option("--shape", required=True, help="The shape of one input, such as 3,224,224; of a text, its tokens.")
def trace(console: Console, network: str, shape: str, **options: Any) -> None:
    """Show which channels of a NETWORK are coupled or frozen, and why.

    NETWORK is resnet8, resnet20, resnet18, resnet34, resnet50, torchvision:NAME, timm:NAME, hf:NAME, module:function
    (which runs that code), or the folder of a run.

    Examples:
        spalier trace resnet8 --shape 3,32,32
        spalier trace torchvision:vit_b_16 --shape 3,224,224 --json
        spalier trace my_package.networks:make --shape 3,64,64 --option width=32
    """
    net = open_base(network, **options)
    structure = spalier.trace(net, opening.example_of(net, 2, shape))
    console.show(structure, structure.to_dict())


# train, sweep


@command()
@click.argument("config", required=False, type=EXISTING_FILE)
@click.option("--folder", required=True, type=FOLDER, help="Where the run is kept.")
@click.option("--data", help="digits, torchvision:NAME, hf:NAME, folder:PATH or text:PATH.")
@click.option("--network", help="A network by name; `spalier trace --help` lists the forms.")
@click.option("--weights", type=FILE, help="A file of pretrained weights.")
@click.option("--pretrained/--random", default=None, help="Whether to load the weights that its library has.")
@click.option("--method", help="spdelta, splora, sppara, lora or fine-pruning.")
@click.option("--rank", help="The adapters' rank.")
@click.option("--recipe", help="fast or paper.")
@click.option("--epochs", type=int, help="Before the first prune.")
@click.option("--batch-size", type=int, help="Samples in a batch.")
@click.option("--size", "image_size", type=int, help="The side of the images.")
@click.option("--lr", type=float, help="The learning rate.")
@click.option("--device", help="cpu, cuda, cuda:1, mps; by default what there is.")
@click.option("--seed", type=int, help="Of everything random.")
@settings_option
@opening.settings_list_option
def train(console: Console, config: str | None, folder: str, settings: Texts, rank: str | None, **named: Any) -> None:
    """Learn a task: train, score, prune and recover.

    This goes on down to the last density. Settings come from a YAML or TOML file CONFIG, from options, or both. A
    folder that holds a run already goes on with it. The run can be stopped at any moment and goes on from its folder to
    the same bits.

    Examples:
        spalier train --data digits --folder runs/digits         # on the small base that comes with Spalier
        spalier train --folder runs/digits                       # go on with it, or see what came out
        spalier train config.yaml --seed 3 --folder runs/seed3
        spalier train --data folder:my/images --network timm:resnet18 --pretrained --folder runs/mine
        spalier train --data text:my/questions.csv --network hf:my/minilm --folder runs/questions
    """
    begun = (Path(folder) / "run.yaml").is_file()
    if rank is not None:  # 8, or 0.25 of the largest rank: --set knows how to read it
        settings = (*settings, f"rank={rank}")
    changed = opening.settings_of(settings, named)
    if config is None and not changed and not begun:
        raise click.UsageError(f"{folder} holds no run yet: give a CONFIG file, or settings such as --data.")
    if config is not None:
        opening.read_config(config)
    source = config or (folder if begun else None)
    run = spalier.TransferPruning() if source is None else spalier.TransferPruning.load(source)
    results = (run.replace(**changed) if changed else run).run(folder, progress=not console.quiet)
    console.show(results, {**results.to_dict(), "folder": str(results.folder)})


@command()
@click.argument("config", type=EXISTING_FILE)
@click.option("--folder", required=True, type=FOLDER, help="Where the sweep is kept.")
@settings_option
@click.option("--over", multiple=True, metavar="KEY=V1,V2", help="Values to go through, in all combinations.")
@click.option("--jobs", type=click.IntRange(1), default=1, help="How many runs at once on this machine.")
@click.option("--place", type=click.Choice(["local", "ray"]), default="local", help="Here, or on a Ray cluster.")
@click.option("--threads", type=click.IntRange(1), help="Of each run.")
def sweep(console: Console, config: str, folder: str, settings: Texts, over: Texts, **options: Any) -> int:
    """Carry many runs out and bring their rows together.

    CONFIG is a run's file, with --over, or a sweep's file with `base` and `over`. Runs that fail are listed at the end;
    the exit code is 3 then, and the same command resumes them.

    Examples:
        spalier sweep config.yaml --over seed=0,1,2 --over method=splora,fine-pruning --folder sweeps/methods
        spalier sweep sweep.yaml --folder sweeps/ranks --jobs 2      # a file with `base` and `over`
        spalier report sweeps/methods
    """
    if {"base", "over"} <= set(opening.read_config(config)):
        if settings or over:
            raise click.UsageError(f"{config} is a sweep's file: change its settings and values there.")
        chosen = spalier.Sweep.load(config)
    elif not over:
        raise click.UsageError("--over is missing: which values to go through, such as --over seed=0,1,2.")
    else:
        base, changed = spalier.TransferPruning.load(config), opening.settings_of(settings, {})
        values = dict(map(opening.values_of, over))
        chosen = spalier.Sweep(base.replace(**changed) if changed else base, values)
    results = chosen.run(folder, progress=not console.quiet, **options)
    text = f"{results}\nreport: spalier report {shlex.quote(folder)}"
    console.show(text, {"rows": list(results.rows), "failed": dict(results.failed), "folder": folder})
    return 3 if results.failed else 0


# eval


@command("eval")
@click.argument("tasks", nargs=-1, required=True, metavar="TASK...")
@base_options
@click.option("--data", help="Data by name, as for train; by default those of the run.")
@click.option("--data-folder", type=FOLDER, help="Where data sets lie.")
@click.option("--part", type=click.Choice(["test", "validation", "train"]), default="test", help="Which samples.")
@click.option("--image-size", type=click.IntRange(1), help="The side of the images; by default the task's.")
def eval_(console: Console, tasks: Texts, base: str | None, part: str, **options: Any) -> None:
    """Build tasks and measure their accuracy.

    TASK is a task file, a folder of them, or a run. The classes of each task say which samples count.

    Examples:
        spalier eval runs/digits                     # every task of a run, on the run's test samples
        spalier eval flowers-30.task.safetensors --base resnet50 --weights w.pth --data torchvision:Flowers102
    """
    from spalier.text import table

    given = {name: options.pop(name) for name in ("data", "data_folder", "image_size")}
    files, rows = opening.task_files(tasks), []
    opened = functools.cache(functools.partial(open_base, **options))
    for (name, task), file in zip(opening.load_tasks(files).items(), files, strict=True):
        net = opened(base or opening.run_beside(file))
        samples = _data_of(task, file, base, {name: value for name, value in given.items() if value is not None})
        found = _evaluate(task.build(net), samples, part)
        measured = {"accuracy": found.accuracy, "loss": found.loss, "recorded": task.info.metrics.get("accuracy")}
        rows.append({"task": name, "data": samples.name, "part": part, "samples": found.samples, **measured})
        console.note(f"{name}: {found.accuracy:.1%}")
    forms = {"task": "{}", "data": "{}", "samples": "{:,}"}
    forms |= {"accuracy": "{:.1%}", "loss": "{:.4f}", "recorded": "{:.1%}"}
    cells = [["-" if row[key] is None else form.format(row[key]) for key, form in forms.items()] for row in rows]
    console.show(table(["task", "data", part, "accuracy", "loss", "in the file"], cells), {"tasks": rows})


def _data_of(task: Task, file: Path, base: str | None, given: dict[str, Any]) -> Data:
    """The samples of a task's classes: from data by name, or from those of the run that it lies in."""
    from spalier.runs import Settings
    from spalier.runs.run import open_samples

    run = opening.run_in(file.resolve().parent.parent) or (opening.run_in(Path(base)) if base else None)
    if run is None and "data" not in given:
        raise click.UsageError("--data is missing: which samples to look at, such as --data digits.")
    if run is None or given.get("data", run.data) != run.data:  # else the same split that the task was learned with
        run = Settings(network=base or "") if run is None else Settings(network=run.network, tokenizer=run.tokenizer)
    said, classes = task.info.preprocessing, tuple(task.info.classes)
    learned = {"image_size": said.get("size"), "max_length": said.get("max_length"), "classes": classes or None}
    found = open_samples(run.replace(**{**learned, **given}))
    if classes and found.classes != classes:
        raise DataError(
            f"{found.name} gives the classes {', '.join(found.classes[:5])}..., and the task's outputs are "
            f"{', '.join(classes[:5])}..., in another order; expected the data that it was learned from"
        )
    if found.preprocessing.get("tokenizer_digest") != said.get("tokenizer_digest"):
        raise DataError(
            f"{run.tokenizer or run.network} has another tokenizer than the one that {task.name} was learned with "
            f"({said.get('tokenizer')}); expected the same base"
        )
    return found


def _evaluate(net: nn.Module, data: Data, part: str) -> Evaluation:
    import torch

    from spalier.data import Loader
    from spalier.runs.learning import evaluate

    samples = getattr(data, part)
    if samples is None:
        raise click.UsageError(f"{data.name} has no {part} samples; pass another --part.")
    loader = Loader(samples, batch_size=EVAL_BATCH_SIZE, shuffle=False, drop_last=False)
    with contextlib.closing(loader):
        batches = loader.epoch(0)
        return evaluate(net.eval(), batches, len(data.classes), torch.device("cpu"), contextlib.nullcontext)


# bench, report


@command()
@click.argument("base")
@click.argument("tasks", nargs=-1, required=True, metavar="TASK...")
@network_options
@click.option("--batch", default="1,64", help="How many samples at once.")
@click.option("--backends", default=BACKENDS, help=f"Some of {BACKENDS}.")
@click.option("--rounds", type=click.IntRange(6), default=15, help="How many turns each network has.")
@click.option("--threads", type=click.IntRange(1, 256), help="By default what PyTorch has.")
@click.option("--fold", is_flag=True, help="Fold the tasks' batch norms.")
@click.option("--shape", help="The shape of one input, or how many tokens; by default the tasks'.")
def bench(
    console: Console, base: str, tasks: Texts, batch: str, backends: str, shape: str | None, **others: Any
) -> None:
    """Measure latency and throughput of a base and its tasks, in turns.

    BASE is a network's name, or the folder of a run. TASK is a task file, a folder of them, or a run. A smaller network
    that is not faster here is said to be no faster.

    Examples:
        spalier bench runs/digits runs/digits --backends eager --batch 1,64
        spalier bench timm:resnet50 tasks/flowers-30.task.safetensors --weights w.safetensors --shape 3,224,224
    """
    options = {name: others.pop(name) for name in ("rounds", "threads", "fold")}
    options |= {"batches": opening.numbers(batch, "--batch", "1,64"), "backends": backends.split(",")}
    if not set(options["backends"]) <= set(BACKENDS.split(",")):
        raise click.BadParameter(f"{backends!r}, expected some of {BACKENDS}.", param_hint="--backends")
    files = opening.task_files(tasks)
    net = open_base(base, **others)
    opened = opening.load_tasks(files)
    example = opening.example_of(net, 1, shape, list(opened.values()))
    results = spalier.bench(net, opened, example, progress=console.note, **options)
    console.show(results, results.to_dict())


@command()
@click.argument("folder", type=EXISTING_FOLDER)
@click.option("--out", "-o", type=FILE, help="By default FOLDER/report.html.")
@click.option("--figures", type=FOLDER, help="Write every figure as SVG, PNG and CSV there.")
def report(console: Console, folder: str, out: str | None, figures: str | None) -> None:
    """Make one page of a run, a sweep, a store or a folder of runs.

    It needs no network, and nothing to be computed again.

    Examples:
        spalier report runs/digits                   # writes runs/digits/report.html
        spalier report sweeps/methods -o methods.html --figures figures
    """
    if figures:
        console.note("drawing every figure three times: SVG, PNG, CSV")
    path = spalier.report(folder, out, figures=figures)
    made = sorted(str(file) for file in Path(figures).iterdir()) if figures else []
    more = f"\nfigures: {figures} ({len(made)} files)" if figures else ""
    console.show(f"report: {path}{more}", {"report": str(path), "figures": made})


# env

EXTRAS = ("train", "hub", "onnx", "cli", "serve", "ray", "report")
"""Those that others include come first."""
OTHERS = ("torchvision", "timm", "transformers", "datasets", "lightning", "tensorboard", "executorch")
"""Libraries of no extra: networks and data by name, pruning in Lightning's loop, tracking, export."""


def libraries() -> dict[str, str]:
    """All that Spalier can use, and what pip installs for it."""
    lines = metadata.requires("spalier") or ()
    required = [match.groups() for line in lines if (match := re.match(r"([\w-]+)[^;]*(?:;.*extra == .(\w+))?", line))]
    found: dict[str, str] = {}
    for extra in (*reversed(EXTRAS), None):
        found |= {name: f"spalier[{extra}]" if extra else name for name, its in required if its == extra}
    return {name: pip for name, pip in found.items() if name != "spalier"} | {name: name for name in OTHERS}


@command()
def env(console: Console) -> None:
    """Show versions, devices, and which libraries are missing. Add this to a report of a defect.

    Examples:
        spalier env
        spalier env --json
    """
    from spalier.text import table

    found: dict[str, Any] = {"spalier": spalier.__version__, "python": platform.python_version()}
    found["system"] = f"{platform.system()} {platform.machine()}"
    try:
        import torch

        from spalier.timing import describe_machine

        device = torch.accelerator.current_accelerator() or torch.device("cpu")
        found |= describe_machine(device, torch.get_num_threads())
    except Exception as error:  # whatever a broken installation of torch raises
        found["torch"] = f"cannot be imported: {type(error).__name__}: {error}"
    to_install = libraries()
    versions = {name: _version(name) for name in to_install}
    lines = [f"{name}: {value}" for name, value in found.items()]
    rows = [[n, versions[n] or "missing", "" if versions[n] else f"pip install '{to_install[n]}'"] for n in versions]
    shown = table(["library", "version", "to install it"], rows)
    console.show("\n".join([*lines, "", shown]), {**found, "libraries": versions})


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
