"""Optimiser and rate of each way to learn, chosen on samples that are neither learned from nor tested on.

A try is the whole way at a smaller scale: a short schedule down to one density, and a tail from the best network of
that. Three rates by SGD and three by AdamW, a factor of three apart; where the best one is the smallest or the largest
of its optimiser, the next one is tried too. Tries are files of their own, below results/codes/rates.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import codes
import spalier as sp
from codes_learning import RATES, SPECS, Learning, Spec, Teacher, accuracy, attach, best_of, tries_of

SEED, FARTHER = 0, 2
TAILS = {"wide+": "wide+", "free": "free-2", "low-rank": "r8-centre", "bits": "delta-1"}
"""Ways to learn, and the contender that is tried for all that learn so."""


def search(spec: Spec) -> None:
    """Try what has not been tried yet; ways that stand on others come after these."""
    narrow = min(spec.searched)
    for way in ("wide", "direct", *TAILS):
        for optimizer, middle in spec.tried[way].items():
            for rate in (middle / 3, middle, middle * 3):
                attempt(spec, way, optimizer, rate)
        for _ in range(FARTHER):
            best = best_of(spec, way)
            rates = [found["rate"] for found in tries_of(spec, way) if found["optimizer"] == best["optimizer"]]
            if min(rates) < best["rate"] < max(rates):
                break
            attempt(spec, way, best["optimizer"], best["rate"] * (3 if best["rate"] == max(rates) else 1 / 3))
        if way == "wide":
            best, trial = best_of(spec, way), replace(spec, is_search=True)
            file = candidate(trial, narrow, best)
            if not file.exists():
                chain(trial, way, Learning(best["optimizer"], best["rates"]), file)
            shutil.copyfile(file, codes.task_file(trial, narrow, SEED))


def attempt(spec: Spec, way: str, optimizer: str, rate: float) -> None:
    """One optimiser and rate, unless its file is there."""
    rate = float(f"{rate:.1e}")
    file = RATES / f"{spec.name}-{way}-{optimizer}-{rate:g}.json"
    if file.exists():
        return
    trial, narrow = replace(spec, is_search=True), min(spec.searched)
    learning = Learning(optimizer, roles(spec, way, optimizer, rate))
    told = {"data": spec.name, "way": way, "optimizer": optimizer, "rate": rate, "rates": learning.rates}
    start = time.process_time()
    if way in TAILS:
        teacher = teacher_of(spec.name)
        shared = codes.Remembered()
        right = codes.tail(trial, narrow, TAILS[way], SEED, teacher, learning.at(narrow), shared)["accuracy"]
    else:
        right = chain(trial, way, learning, candidate(trial, narrow, told))
    found = {**told, "density": narrow, "accuracy": right, "seconds": round(time.process_time() - start, 1)}
    RATES.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found), flush=True)


@cache
def teacher_of(name: str) -> Teacher:
    """What it says of a batch is kept for the next try."""
    trial = replace(SPECS[name], is_search=True)
    return codes.teacher_of(trial, min(trial.searched), SEED)


def roles(spec: Spec, way: str, optimizer: str, rate: float) -> dict[str, float]:
    """The rate of each kind of parameter. In a tail all but the code learns as it does in fine-pruning's tail."""
    if way in ("wide", "wide+", "free"):
        return {"rest": rate}
    if way == "direct":
        return {"factors": rate, "rest": rate}
    rest = best_of(spec, "wide+", optimizer)["rate"]
    if way == "low-rank":
        return {"factors": rate, "rest": rest}
    # scales learn relative to what they are, which has nothing to do with how large weights are
    return {"bits": rate, "gains": 1e-3 if optimizer == "adamw" else rate, "rest": rest}


def candidate(trial: Spec, density: float, told: dict[str, Any]) -> Path:
    return codes.task_file(trial, density, SEED, f"{told['optimizer']}-{told['rate']:g}")


def chain(trial: Spec, way: str, learning: Learning, file: Path) -> float:
    """Learn and prune along the short schedule; the network that comes out goes to a file."""
    net = attach(trial, SEED, sp.FineTune() if way == "wide" else sp.SPLoRA(rank=8))
    growing = learning.at if way == "wide" else lambda _: learning
    for _ in codes.along(net, trial, SEED, growing, trial.searched):
        pass
    if way == "wide":
        file.parent.mkdir(parents=True, exist_ok=True)
        sp.Task.of(net, trial.name).save(file)
    return accuracy(net, trial, SEED)
