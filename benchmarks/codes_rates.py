"""Optimiser and rate of each way to learn, chosen on samples that are neither learned from nor tested on.

A try is a short schedule down to one density, or a tail. Three rates by SGD and three by AdamW, a factor of three
apart. Of schedules, the worse half of the tries ends before the first prune. Where the best one is the smallest or the
largest rate of its optimiser, the next one is tried too. What does best in a few epochs need not do best in many: the
best tries of fine-pruning, one by each optimiser at least, go the whole schedule, and decide. Tails are tried on the
network that comes of it. Tries are files of their own, below results/codes/rates.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import codes
import spalier as sp
from codes import RANKED
from codes_learning import RATES, SPECS, Learning, Spec, Teacher, accuracy, attach, best_of, tries_of

SEED, FARTHER, FINALISTS = 0, 2, 3
TAILS = {"wide+": "wide+", "free": "free-2", "low-rank": "r8-centre", "bits": "delta-1", "budget": "bytes-20"}
"""Ways to learn, and the contender that is tried for all that learn so."""


@dataclass(frozen=True)
class Try:
    """One optimiser and rate of one way to learn."""

    spec: Spec
    way: str
    optimizer: str
    rate: float
    seed: int = SEED

    @property
    def file(self) -> Path:
        seed = f"-seed{self.seed}" if self.seed else ""
        return RATES / f"{self.spec.name}-{self.way}-{self.optimizer}-{self.rate:g}{seed}.json"

    @property
    def learning(self) -> Learning:
        """The rate of each kind of parameter. In a tail all but the code learns as it does in fine-pruning's tail."""
        if self.seed:
            return Learning(self.optimizer, json.loads(replace(self, seed=SEED).file.read_text())["rates"])
        rates = {"rest": self.rate}
        if self.way in RANKED.values():
            rates["factors"] = self.rate
        elif self.way in ("low-rank", "bits", "budget"):
            rates["rest"] = best_of(self.spec, "wide+", self.optimizer)["rate"]
            rates["factors" if self.way == "low-rank" else "bits"] = self.rate
            # scales learn relative to what they are, which has nothing to do with how large weights are
            rates["gains"] = 1e-3 if self.optimizer == "adamw" else self.rate
        return Learning(self.optimizer, rates)

    def write(self, start: float, found: dict[str, Any]) -> None:
        """``start`` is when it began, in processor seconds."""
        told = {"data": self.spec.name, "way": self.way, "optimizer": self.optimizer, "rate": self.rate}
        told |= {"seed": self.seed} if self.seed else {}
        told |= {"rates": self.learning.rates, **found, "seconds": round(time.process_time() - start, 1)}
        RATES.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(told, indent=1) + "\n")
        print(json.dumps(told), flush=True)


def search(spec: Spec) -> None:
    """Try what has not been tried yet; ways that stand on others come after these."""
    if spec.rates_of or spec.known:
        return
    for way in ("wide", *RANKED.values(), *TAILS):
        first = [
            try_of(spec, way, optimizer, middle * factor)
            for optimizer, middle in spec.tried[way].items()
            for factor in (1 / 3, 1, 3)
        ]
        attempt(first)
        for _ in range(FARTHER):
            best = best_of(spec, way)
            rates = [found["rate"] for found in tries_of(spec, way) if found["optimizer"] == best["optimizer"]]
            if min(rates) < best["rate"] < max(rates):
                break
            attempt([try_of(spec, way, best["optimizer"], best["rate"] * (3 if best["rate"] == max(rates) else 1 / 3))])
        if way == "wide":
            decide(spec)
    for seed in spec.search_seeds[1:]:
        again(spec, seed)


def again(spec: Spec, seed: int) -> None:
    """All tails once more, on another network and split: a few hundred samples tell rates apart badly."""
    tries = [Try(spec, way, t["optimizer"], t["rate"], seed) for way in TAILS for t in tries_of(spec, way)]
    if all(each.file.exists() for each in tries):
        return
    take(spec, seed)
    for each in tries:
        if not each.file.exists():
            tail(each)


def decide(spec: Spec) -> None:
    """Let the best tries of fine-pruning go the whole schedule."""
    ended = sorted((t for t in tries_of(spec, "wide") if "accuracy" in t), key=lambda t: -t["accuracy"])
    of_each = [next(t for t in ended if t["optimizer"] == optimizer) for optimizer in spec.tried["wide"]]
    for found in (of_each + [t for t in ended if t not in of_each])[:FINALISTS]:
        if "by density" not in found:
            whole(try_of(spec, "wide", found["optimizer"], found["rate"]), found)


def take(spec: Spec, seed: int) -> None:
    """Have the network of the best rate of fine-pruning where tails look for it."""
    best = best_of(spec, "wide")
    taken = try_of(spec, "wide", best["optimizer"], best["rate"], seed)
    if not kept(taken).exists():  # work folders are no results: made again where a search goes on elsewhere
        whole(taken, None)
    shutil.copyfile(kept(taken), codes.task_file(replace(spec, is_search=True), min(spec.searched), seed))


def whole(each: Try, found: dict[str, Any] | None) -> None:
    """Go the whole schedule as far as tries go. Without what was found, no figure is written: only the network."""
    trial, start = replace(each.spec, is_search=True), time.process_time()
    net, last = attach(trial, each.seed, sp.FineTune()), min(trial.searched)
    trial = replace(trial, epochs={density: count for density, count in trial.epochs.items() if density >= last})
    by_density = {}
    for density, _, _ in codes.along(net, trial, each.seed, each.learning.at):
        by_density[density] = accuracy(net, trial, each.seed)
    kept(each).parent.mkdir(parents=True, exist_ok=True)
    sp.Task.of(net, trial.name).save(kept(each))
    if found is not None:
        spent = {"whole seconds": round(time.process_time() - start, 1)}
        each.file.write_text(json.dumps({**found, "by density": by_density, **spent}, indent=1) + "\n")
        print(each.file.name, by_density, spent, flush=True)


def try_of(spec: Spec, way: str, optimizer: str, rate: float, seed: int = SEED) -> Try:
    return Try(spec, way, optimizer, float(f"{rate:.1e}"), seed)


def attempt(tries: list[Try]) -> None:
    """All of these, unless their files are there."""
    if all(each.file.exists() for each in tries):
        return
    if tries[0].way in TAILS:
        take(tries[0].spec, SEED)
        for each in tries:
            if not each.file.exists():
                tail(each)
        return
    going = [(schedule(each), each) for each in tries]
    first = [(next(steps), steps, each) for steps, each in going]
    ordered = sorted(first, key=lambda step: -step[0])
    for number, (_, steps, _) in enumerate(ordered):
        if 2 * number < len(ordered):
            for _ in steps:
                pass


def schedule(each: Try) -> Iterator[float]:
    """Learn and prune along the short schedule. After the first block its accuracy; then all of it is written."""
    trial, start = replace(each.spec, is_search=True, epochs=each.spec.searched), time.process_time()
    rank = {way: rank for rank, way in RANKED.items()}.get(each.way)
    net = attach(trial, SEED, sp.FineTune() if rank is None else sp.SPLoRA(rank=rank))
    growing = each.learning.at if each.way == "wide" else lambda _: each.learning
    found: dict[str, Any] = {}
    for density, _, spent in codes.along(net, trial, SEED, growing):
        right = accuracy(net, trial, SEED)
        if density == 1:
            found = {"unpruned": right}
            each.write(start, found)
            yield right
            start = time.process_time() - spent
    each.write(start, {**found, "density": density, "accuracy": right})


def kept(each: Try) -> Path:
    """Where the network of a try is."""
    trial = replace(each.spec, is_search=True)
    return codes.task_file(trial, min(trial.searched), each.seed, f"{each.optimizer}-{each.rate:g}")


def tail(each: Try) -> None:
    start, trial, density = time.process_time(), replace(each.spec, is_search=True), min(each.spec.searched)
    learning, shared = each.learning.at(density), codes.Remembered()
    found = codes.tail(trial, density, TAILS[each.way], each.seed, teacher_of(trial.name, each.seed), learning, shared)
    each.write(start, {"density": density, "accuracy": found["accuracy"]})


@cache
def teacher_of(name: str, seed: int) -> Teacher:
    """What it says of a batch is kept for the next try."""
    trial = replace(SPECS[name], is_search=True)
    return codes.teacher_of(trial, min(trial.searched), seed)
