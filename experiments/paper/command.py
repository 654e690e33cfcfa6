"""The experiments of the paper, one command each.

    python3 dev.py paper table --scale mini
    python3 dev.py paper all --scale mini
    python3 dev.py paper status        # what is committed, and how long the rest will take

Every cell is a run; it is carried out once, and its results become a file of its own. Started in several processes,
they share the work: a cell that another one works on is left to it. One that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

import torch

import spalier as sp
from experiments.paper.carry_out import HERE, RESULTS, Place, carry_out, write
from experiments.paper.cells import experiments, in_order
from experiments.paper.found import Found
from experiments.paper.measures import counts, latency, speeds, storage
from experiments.paper.page import write_page
from experiments.paper.protocol import WEIGHTS, protocol_of

MEASURES = {"counts": counts, "speeds": speeds, "latency": latency, "storage": storage}
"""What is no run: counts of the paper's network, how fast networks learn, how fast those that were learned are."""


def main(words: list[str] | None = None) -> int:
    """Carry out what the command line asks for."""
    asked = _parser().parse_args(words)
    torch.set_num_threads(asked.threads)
    if asked.experiment == "page" and asked.scale != "mini":
        print("error: docs/paper.md is about the mini scale; leave --scale out", file=sys.stderr)
        return 2
    work = Path(asked.work).resolve()
    committed = RESULTS if asked.experiment in ("page", "status") else work / "results"
    place = Place(
        protocol_of(asked.scale),
        Path(asked.data).resolve(),
        Path(asked.weights).resolve(),
        work / asked.scale,
        Path(asked.results or committed).resolve() / asked.scale,
    )
    if asked.experiment in (*MEASURES, "page"):
        return _measured(asked.experiment, place)
    found = experiments(place.protocol)
    if asked.experiment == "status":
        print("\n".join(status(place)))
        return 0
    cells = in_order(found if asked.experiment == "all" else {asked.experiment: found[asked.experiment]})
    cells = [cell for cell in cells if all(part in cell.name for part in asked.only)]
    if asked.list:
        for cell in cells:
            print(cell.name)
        return 0
    try:
        failed = carry_out(cells, place)
    except sp.errors.SpalierError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    for name, why in failed.items():
        print(f"failed: {name}: {why}", file=sys.stderr)
    return 1 if failed else 0


def status(place: Place) -> list[str]:
    """Of each experiment: how many cells are there, and how long the others will take, by those of the same data.

    The seconds of cells that share a first block hold it too, so the estimate is an upper one.
    """
    found = Found.load(place.results)
    seconds: dict[str, list[float]] = {}
    for cell in found.cells:
        seconds.setdefault(cell["labels"]["data"], []).append(cell["rows"][-1]["seconds"])
    there = {cell["cell"] for cell in found.cells}
    lines = []
    for name, cells in experiments(place.protocol).items():
        missing = [cell for cell in in_order({name: cells}) if cell.name not in there]
        known = [statistics.median(seconds[cell.data]) for cell in missing if cell.data in seconds]
        guess = f"about {sum(known) / 3600:.1f} h on one thread" if len(known) == len(missing) else "not known how long"
        rest = f"; {len(missing)} missing, {guess}" if missing else ""
        lines.append(f"{name}: {len(cells) - len(missing)} of {len(cells)} cells{rest}")
    return lines


def _measured(what: str, place: Place) -> int:
    """What is no run: counts, latencies, and the page itself."""
    try:
        if what == "page":
            write_page(HERE.parents[1] / "docs", place.results, place.protocol)
        else:
            write(place.results / f"{what}.json", MEASURES[what](place))
    except (sp.errors.SpalierError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["all", *experiments(protocol_of("mini")), *MEASURES, "status", "page"]
    parser.add_argument("experiment", choices=names)
    parser.add_argument("--scale", choices=["full", "mini"], default="mini")
    parser.add_argument("--data", default=os.environ.get("SPALIER_DATA", "data"), help="folder of data sets")
    parser.add_argument("--weights", default=os.environ.get(WEIGHTS, "weights"), help="folder of pretrained weights")
    parser.add_argument("--work", default="paper-runs", help="folder for the runs")
    parser.add_argument("--results", help="folder for the results of cells; by default results in that of the runs")
    parser.add_argument("--only", nargs="+", default=[], help="only cells whose names contain all of this")
    parser.add_argument("--threads", type=int, default=1, help="threads of this process")
    parser.add_argument("--list", action="store_true", help="name the cells, and run none")
    return parser
