"""`spalier eval`, and how good a built network is on data by name."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spalier.cli.opening import base_options, named, open_base, run_beside, run_in, task_files
from spalier.cli.state import State, examples, json_option, pass_state
from spalier.errors import DataError
from spalier.text import table

if TYPE_CHECKING:
    from torch import nn

    from spalier.data.data import Data
    from spalier.runs.evaluating import Evaluation
    from spalier.tasks.task import Task

BATCH = 256


@click.command(
    "eval",
    epilog=examples(
        "spalier eval runs/digits                     # every task of a run, on the run's test samples",
        "spalier eval tasks/flowers-30.task.safetensors --base resnet50 --weights w.safetensors --data flowers102",
    ),
)
@click.argument("tasks", nargs=-1, required=True, metavar="TASK...")
@base_options
@click.option("--data", help="Data by name, as for train; by default those of the run.")
@click.option("--data-folder", type=click.Path(file_okay=False), help="Where data sets lie.")
@click.option(
    "--part", type=click.Choice(["test", "validation", "train"]), default="test", help="Which samples."
)
@click.option("--size", type=click.IntRange(1), help="The side of the images; by default the task's.")
@json_option
@pass_state
def eval_(
    state: State,
    tasks: tuple[str, ...],
    base: str | None,
    data: str | None,
    data_folder: str | None,
    part: str,
    size: int | None,
    **network: Any,
) -> None:
    """Build tasks and see how good they are.

    TASK is a task file, a folder of them, or a run. The classes of each task say which samples count.
    """
    files = list(dict.fromkeys(file.resolve() for file in task_files(tasks)))
    bases: dict[str, nn.Module] = {}
    rows: list[dict[str, Any]] = []
    for (name, task), file in zip(named(files).items(), files, strict=True):
        where = base or run_beside(file)
        if where not in bases:
            bases[where] = open_base(where, **network)
        net = bases[where]
        samples = data_of(task, file, base, data=data, folder=data_folder, size=size)
        seen = accuracy_of(task.build(net), samples, part)
        rows.append(
            {"task": name, "data": samples.name, "part": part, "samples": seen.samples}
            | {"accuracy": seen.accuracy, "loss": seen.loss, "said": task.info().metrics.get("accuracy")}
        )
        state.note(f"{name}: {seen.accuracy:.1%}")
    shown = [
        [
            r["task"],
            r["data"],
            f"{r['samples']:,}",
            f"{r['accuracy']:.1%}",
            f"{r['loss']:.4f}",
            _percent(r["said"]),
        ]
        for r in rows
    ]
    state.show(table(["task", "data", part, "right", "loss", "in the file"], shown), {"tasks": rows})


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def data_of(
    task: Task,
    file: Path,
    base: str | None,
    *,
    data: str | None,
    folder: str | None = None,
    size: int | None = None,
) -> Data:
    """The samples that a task is for: data by name, or those of the run that it lies in, of its classes."""
    from spalier.data.open import open_data

    options: dict[str, Any] = {"validation": 0.1}
    run = run_in(file.resolve().parent.parent) or (run_in(Path(base)) if base else None)
    if data is None and run is None:
        raise click.UsageError("--data is missing: which samples to look at, such as --data digits.")
    if run is not None and data in (None, run.data):  # the very parts that it was learned from
        data = run.data
        options |= {
            "folder": run.data_folder,
            "validation": run.validation_split,
            "seed": run.seed,
            "limit": run.max_train_samples,
        }
        options |= {"skip_bad": run.skip_bad, "cache": run.cache_folder}
    assert data is not None
    info = task.info()
    learned_at = info.preprocessing.get("size")
    found = open_data(
        data,
        **{
            **options,
            "folder": folder or options.get("folder"),
            "size": size or (learned_at if type(learned_at) is int else None),
            "classes": tuple(info.classes) or None,
        },
    )
    if info.classes and found.classes != tuple(info.classes):
        raise DataError(
            f"{data} gives the classes {', '.join(found.classes[:5])}..., and the task's outputs are "
            f"{', '.join(info.classes[:5])}..., in another order; expected the data that it was learned from"
        )
    return found


def accuracy_of(net: nn.Module, data: Data, part: str = "test") -> Evaluation:
    """How good a network is on a part of some data."""
    import torch

    from spalier.data.loader import Loader
    from spalier.runs.evaluating import evaluate

    samples = getattr(data, part)
    if samples is None:
        raise click.UsageError(f"{data.name} has no {part} samples; pass another --part.")
    loader = Loader(samples, batch_size=BATCH, shuffle=False, augment="none", drop_last=False)
    try:
        return evaluate(
            net.eval(), loader.epoch(0), len(data.classes), torch.device("cpu"), contextlib.nullcontext
        )
    finally:
        loader.close()
