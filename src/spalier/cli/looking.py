"""`spalier trace`, `spalier report` and `spalier doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spalier.cli.opening import network_options, open_base
from spalier.cli.opening import shape_of as shape_from
from spalier.cli.state import State, examples, json_option, pass_state


@click.command(
    epilog=examples(
        "spalier trace resnet8 --shape 3,32,32",
        "spalier trace torchvision:vit_b_16 --shape 3,224,224 --json",
        "spalier trace my_package.networks:make --shape 3,64,64 --option width=32",
    )
)
@click.argument("network")
@network_options
@click.option("--shape", required=True, help="The shape of one input, such as 3,224,224.")
@json_option
@pass_state
def trace(state: State, network: str, shape: str, **options: Any) -> None:
    """Show which channels of a NETWORK are coupled, what is frozen, and why.

    NETWORK is resnet8, resnet20, resnet18, resnet34, resnet50, torchvision:NAME, timm:NAME, hf:NAME, module:function
    (which runs that code), or the folder of a run.
    """
    import torch

    from spalier.tracing import trace as find

    net = open_base(network, **options)
    structure = find(net, torch.zeros(2, *shape_from(shape)))
    state.show(structure, structure.to_dict())


@click.command(
    epilog=examples(
        "spalier report runs/digits                   # writes runs/digits/report.html",
        "spalier report sweeps/methods -o methods.html --figures figures",
    )
)
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
@click.option("--out", "-o", type=click.Path(dir_okay=False), help="By default FOLDER/report.html.")
@click.option(
    "--figures", type=click.Path(file_okay=False), help="Write every figure as SVG, PNG and CSV there."
)
@json_option
@pass_state
def report(state: State, folder: str, out: str | None, figures: str | None) -> None:
    """Make one page of a FOLDER: a run, a sweep, a store of tasks, or a folder of runs. It needs no network."""
    from spalier.reporting.write import report as write

    if figures:
        state.note("drawing every figure three times: SVG, PNG, CSV")
    path = write(folder, out, figures=figures)
    made = sorted(str(file) for file in Path(figures).iterdir()) if figures else []
    more = f"\nfigures: {figures} ({len(made)} files)" if figures else ""
    state.show(f"report: {path}{more}", {"report": str(path), "figures": made})


@click.command(epilog=examples("spalier doctor", "spalier doctor --thorough --json"))
@click.option("--thorough", is_flag=True, help="Also what takes long, such as torch.compile.")
@json_option
@pass_state
def doctor(state: State, thorough: bool) -> int:
    """Tell what is installed and what works, by trying it. The exit code is 3 where something needed does not work."""
    from spalier.doctor import examine

    found = examine(quick=not thorough, progress=lambda entry: state.note(f"{entry.name}: {entry.state}"))
    state.show(found, found.to_dict())
    return 0 if found.is_sound else 3
