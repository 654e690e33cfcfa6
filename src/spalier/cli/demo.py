"""`spalier demo`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import click

from spalier.cli.state import State, examples, json_option, pass_state


@click.command(epilog=examples("spalier demo", "spalier demo --folder elsewhere --seed 1"))
@click.option(
    "--folder", default="spalier-demo", type=click.Path(file_okay=False), help="Where everything goes."
)
@click.option("--seed", default=0, type=click.IntRange(0, 2**63 - 1), help="Of everything random.")
@json_option
@pass_state
def demo(state: State, folder: str, seed: int) -> None:
    """One base, three tasks, two methods: about a minute, nothing to download.

    A small ResNet learns some of scikit-learn's digits and is frozen. Three further tasks are learned on it as SPLoRA
    task files at falling densities, next to fine-pruning; then the one base switches between them. Every number is
    measured here; a folder that holds a demo goes on with it, and what was learned there is not learned again.
    """
    from spalier.demo import demo as show

    start, before = time.perf_counter(), Path(folder, "runs").exists()
    found = show(
        folder, seed=seed, say=lambda text: state.note(f"[{time.perf_counter() - start:3.0f} s] {text}")
    )
    program, place = _program(), shlex.quote(folder)
    run = f"{place}/runs/4to6-splora"
    told = "learned before, in this folder; measured again in" if before else "made in"
    following = "\n".join(
        [
            f"report: {found.report}   (open it in a browser; {told} {found.seconds:.0f} s)",
            "next:",
            f"  {program} task list {place}/tasks",
            f"  {program} switch {place}/tasks --base {run} --data digits",
            f"  {program} bench {run} {run} --backends eager",
            f"  {program} train --data digits --network resnet8 --folder runs/digits",
        ]
    )
    state.show(f"\n{found}\n\n{following}", found.to_dict())


def _program() -> str:
    """How the command line is called from here: by its name, or by its path where that is not looked up."""
    beside = Path(sys.executable).parent / "spalier"
    return "spalier" if shutil.which("spalier") or not beside.exists() else os.path.relpath(beside)
