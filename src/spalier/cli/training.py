"""`spalier train` and `spalier sweep`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from spalier.cli.opening import settings_of, values_of
from spalier.cli.state import State, examples, json_option, pass_state
from spalier.errors import ConfigError

_SET = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting of the run, as in its file; repeatable.",
)


@click.command(
    epilog=examples(
        "spalier train --data digits --network resnet8 --set epochs=2 --set densities=0.5,0.2 --folder runs/digits",
        "spalier train --folder runs/digits          # go on with it, or see what came out",
        "spalier train config.yaml --set seed=3 --folder runs/seed3",
        "spalier train --data folder:my/images --network timm:resnet50 --weights w.safetensors --folder runs/mine",
    )
)
@click.argument("config", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option("--folder", required=True, type=click.Path(file_okay=False), help="Where the run is kept.")
@click.option("--data", help="digits, cifar10, cifar100, flowers102, catsanddogs, folder:PATH or hf:NAME.")
@click.option("--network", help="A network by name; `spalier trace --help` lists the forms.")
@click.option("--weights", type=click.Path(dir_okay=False), help="A file of pretrained weights.")
@click.option("--method", help="splora, sppara, lora or fine-pruning.")
@click.option("--rank", help="The adapters' rank.")
@click.option("--recipe", help="fast or paper.")
@click.option("--seed", type=int, help="Of everything random.")
@_SET
@json_option
@pass_state
def train(state: State, config: str | None, folder: str, settings: tuple[str, ...], **shortcuts: Any) -> None:
    """Learn a task: train, score, prune, recover, down to the last density.

    Settings come from a YAML or TOML file CONFIG, from options, or both. A folder that holds a run already goes on with
    it. The run can be stopped at any moment and goes on from its folder to the same bits.
    """
    from spalier.runs.transfer import TransferPruning

    begun = (Path(folder) / "run.yaml").is_file()
    if shortcuts["rank"] is not None:
        settings = (*settings, f"rank={shortcuts.pop('rank')}")
    if shortcuts["weights"] is not None:
        shortcuts["weights"] = str(Path(shortcuts["weights"]).absolute())  # the run may go on from elsewhere
    given = settings_of(settings, shortcuts)
    if config is None and not given and not begun:
        raise click.UsageError(f"{folder} holds no run yet: give a CONFIG file, or settings such as --data.")
    if config is not None:
        _refuse_empty(config)
    source = config or (folder if begun else None)
    chosen = TransferPruning() if source is None else TransferPruning.load(source)
    results = (chosen.replace(**given) if given else chosen).run(folder, progress=state.shows_progress)
    where = shlex.quote(str(results.folder))
    shown = f"{results}\ntasks: {results.folder / 'tasks'}\nreport: spalier report {where}"
    state.show(shown, {**results.to_dict(), "folder": str(results.folder)})


@click.command(
    epilog=examples(
        "spalier sweep config.yaml --over seed=0,1,2 --over method=splora,fine-pruning --folder sweeps/methods",
        "spalier sweep sweep.yaml --folder sweeps/ranks --jobs 2      # a file with `base` and `over`",
        "spalier report sweeps/methods",
    )
)
@click.argument("config", type=click.Path(exists=True, dir_okay=False))
@click.option("--folder", required=True, type=click.Path(file_okay=False), help="Where the sweep is kept.")
@_SET
@click.option(
    "--over", multiple=True, metavar="KEY=V1,V2", help="Values to go through; repeatable, all combinations."
)
@click.option("--jobs", type=click.IntRange(1), help="How many runs at once.")
@click.option(
    "--place", type=click.Choice(["local", "ray"]), default="local", help="This machine, or a Ray cluster."
)
@click.option(
    "--retries", type=click.IntRange(0), default=1, help="How often a run that fails is tried again."
)
@click.option("--threads", type=click.IntRange(1), help="Of each run.")
@json_option
@pass_state
def sweep(
    state: State,
    config: str,
    folder: str,
    settings: tuple[str, ...],
    over: tuple[str, ...],
    jobs: int | None,
    place: Any,
    retries: int,
    threads: int | None,
) -> int:
    """Carry many runs out, each in a process of its own, and bring their rows together.

    CONFIG is a run's file, with --over, or a sweep's file with `base` and `over`. Runs that fail are tried again from
    their checkpoints and listed at the end; the exit code is 3 then.
    """
    results = _sweep(config, settings, over).run(
        folder, jobs=jobs, place=place, retries=retries, threads=threads, progress=state.shows_progress
    )
    text = f"{results}\nreport: spalier report {shlex.quote(folder)}"
    state.show(text, {"rows": list(results.rows), "failed": dict(results.failed), "folder": folder})
    return 3 if results.failed else 0


def _refuse_empty(config: str) -> None:
    from spalier.runs.fields import read

    if not read(Path(config)):
        raise ConfigError(f"{config} has no settings; expected some, such as data: digits")


def _sweep(config: str, settings: tuple[str, ...], over: tuple[str, ...]) -> Any:
    from spalier.runs.fields import read
    from spalier.runs.sweep import Sweep
    from spalier.runs.transfer import TransferPruning

    _refuse_empty(config)
    if {"base", "over"} <= set(read(Path(config))):
        if settings or over:
            raise click.UsageError(
                f"{config} is a sweep's file, which has settings and values: change them there."
            )
        return Sweep.load(config)
    if not over:
        raise click.UsageError("--over is missing: which values to go through, such as --over seed=0,1,2.")
    base = TransferPruning.load(config)
    given = settings_of(settings, {})
    return Sweep(base.replace(**given) if given else base, dict(map(values_of, over)))
