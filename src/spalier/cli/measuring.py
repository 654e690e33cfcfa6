"""`spalier bench`: a base and its tasks, side by side."""

from __future__ import annotations

from typing import Any

import click

from spalier.cli.opening import named, network_options, open_base, shape_of, task_files
from spalier.cli.state import State, examples, json_option, pass_state

BACKENDS = ("eager", "compiled", "onnxruntime")


def _numbers(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.BadParameter(f"{value!r}, expected numbers such as 1,64.")
    return found


def _backends(ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    found = tuple(value.split(","))
    unknown = [name for name in found if name not in BACKENDS]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r}, expected some of {','.join(BACKENDS)}.")
    return found


@click.command(
    epilog=examples(
        "spalier bench runs/digits runs/digits --backends eager --batch 1,64",
        "spalier bench timm:resnet50 tasks/flowers-30.task.safetensors --weights w.safetensors --shape 3,224,224",
    )
)
@click.argument("base")
@click.argument("tasks", nargs=-1, required=True, metavar="TASK...")
@network_options
@click.option("--batch", "batches", default="1,64", callback=_numbers, help="How many samples at once.")
@click.option(
    "--backends", default=",".join(BACKENDS), callback=_backends, help="Some of eager,compiled,onnxruntime."
)
@click.option("--rounds", type=click.IntRange(6), default=15, help="How many turns each network has.")
@click.option("--threads", type=click.IntRange(1, 256), help="By default what PyTorch has.")
@click.option("--fold", is_flag=True, help="Fold the tasks' batch norms.")
@click.option("--shape", help="The shape of one input; by default the tasks' images.")
@json_option
@pass_state
def bench(
    state: State,
    base: str,
    tasks: tuple[str, ...],
    batches: tuple[int, ...],
    backends: tuple[Any, ...],
    rounds: int,
    threads: int | None,
    fold: bool,
    shape: str | None,
    **network: Any,
) -> None:
    """Measure latency and throughput of a base and of tasks built on it, in turns.

    BASE is a network's name, or the folder of a run. TASK is a task file, a folder of them, or a run. A smaller network
    that is not faster here is said to be no faster.
    """
    import torch

    from spalier.benching.measuring import bench as measure

    files = task_files(tasks)
    net = open_base(base, **network)
    found = named(files)
    torch.manual_seed(0)
    example = torch.randn(1, *shape_of(shape, list(found.values())))
    say = state.note if state.shows_progress else None
    options: dict[str, Any] = {"rounds": rounds, "threads": threads, "fold": fold, "progress": say}
    results = measure(net, found, example, batches=batches, backends=backends, **options)
    state.show(results, results.to_dict())
