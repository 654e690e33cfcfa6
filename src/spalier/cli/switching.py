"""`spalier switch`: try the tasks of a store out on one base, one after the other."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from spalier.cli.evaluating import accuracy_of, data_of
from spalier.cli.opening import base_options, load, open_base, shape_of, task_files
from spalier.cli.state import State, examples, json_option, pass_state
from spalier.errors import SpalierError, TaskFileError

if TYPE_CHECKING:
    from torch import nn

    from spalier.tasks.switcher import Switcher

_HELP = "a task's name or number switches to it; ls lists them; q ends"


@click.command(
    epilog=examples(
        "spalier switch runs/digits/tasks             # tasks of a run know their base and data",
        "echo digits-50 | spalier switch runs/digits/tasks --json",
    )
)
@click.argument("store", type=click.Path(exists=True, file_okay=False))
@base_options
@click.option("--data", help="Look at these data's test samples after each switch; by default the run's.")
@click.option("--shape", help="The shape of one input; by default the tasks' images.")
@json_option
@pass_state
def switch(
    state: State, store: str, base: str | None, data: str | None, shape: str | None, **network: Any
) -> None:
    """Switch between the tasks of a STORE on one base: type a name, see how long it took and what came of it.

    Names are read from standard input, so it can be scripted.
    """
    from spalier.tasks.switcher import Switcher

    files = task_files([store])
    net = open_base(base, files[0], **network)
    switcher = Switcher(net, files[0].parent)
    names = [file.name.removesuffix(".task.safetensors") for file in files]
    _rehearse(net, files, base, data, shape)
    if not state.as_json:
        state.note("\n".join(f"{number:3}  {name}" for number, name in enumerate(names, 1)) + f"\n{_HELP}")
    switches = []
    while (asked := _asked(state)) is not None:
        name = names[int(asked) - 1] if asked in map(str, range(1, len(names) + 1)) else asked
        if asked in ("ls", "?", "help"):
            click.echo("\n".join(f"{number:3}  {each}" for number, each in enumerate(names, 1)), err=True)
            continue
        try:
            row = _switched(switcher, name, files[0].parent, base, data, shape)
        except SpalierError as error:
            click.echo(f"{' '.join(str(error).split())}; {_HELP}", err=True)
            continue
        switches.append(row)
        if not state.as_json:
            click.echo(_line(row), file=state.out)
    if state.as_json:
        state.show("", {"switches": switches})


def _rehearse(
    net: nn.Module, files: Sequence[Path], base: str | None, data: str | None, shape: str | None
) -> None:
    """See that shape and data fit before anything is asked."""
    import torch

    for file in files:
        try:
            task = load(file)
        except TaskFileError:  # said when it is asked for
            continue
        try:
            with torch.inference_mode():
                net(torch.zeros(1, *shape_of(shape, [task])))
        except RuntimeError as error:
            words = " ".join(str(error).split())[:200]
            raise click.UsageError(
                f"the base does not run on inputs of that shape ({words}); pass --shape."
            ) from error
        if data is not None:
            data_of(task, file, base, data=data)
        return


def _asked(state: State) -> str | None:
    """The next line that says something; None at the end."""
    while True:
        if sys.stdin.isatty():
            click.echo("task> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line or line.strip() in ("q", "quit", "exit"):
            return None
        if line.strip():
            return line.strip()


def _switched(
    switcher: Switcher, name: str, folder: Path, base: str | None, data: str | None, shape: str | None
) -> dict[str, Any]:
    """Activate a task, and look at what is active now."""
    import torch

    start = time.perf_counter()
    net = switcher.activate(name)
    seconds = time.perf_counter() - start
    task = switcher.store.load(name)
    example = torch.zeros(1, *shape_of(shape, [task]))
    times = []
    with torch.inference_mode():
        for _ in range(11):
            begun = time.perf_counter()
            net(example)
            times.append(time.perf_counter() - begun)
    info = task.info()
    row = {
        "task": name,
        "switch_ms": round(1e3 * seconds, 4),
        "latency_ms": round(1e3 * median(times), 4),
        "parameters": sum(p.numel() for p in net.parameters()),
        "macs": info.density.macs and info.density.macs[0] / info.density.macs[1],
    }
    try:
        samples = data_of(task, folder / name, base, data=data)
    except click.UsageError:  # no data were named, and no run is near
        return row
    return row | {"accuracy": accuracy_of(net, samples).accuracy, "data": samples.name}


def _line(row: dict[str, Any]) -> str:
    right = f", {row['accuracy']:.1%} of {row['data']} right" if "accuracy" in row else ""
    share = "" if row["macs"] is None else f", {row['macs']:.1%} of the MACs"
    return (
        f"{row['task']}: switched in {row['switch_ms']:.3f} ms{right}, {row['latency_ms']:.2f} ms a sample, "
        f"{row['parameters']:,} parameters{share}"
    )
