"""Tables that are changed at random, and signed: what builds has to run, and to return what the base returns.

``SPALIER_MUTATIONS`` is how many for each network; a thousand take some minutes.
"""

import contextlib
import copy
import os
from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest
import torch
from support import assert_unchanged, awaken_, snapshot
from torch import nn
from trained import EXAMPLE, DigitNet

import spalier as sp
from attacks.parts import Parts, pack, unpack
from attacks.test_fuzz import fit, mutate
from spalier.errors import TaskFileError
from spalier.tasks.base import Base
from spalier.tasks.build import check_base
from spalier.tasks.rows import Placement

COUNT = int(os.environ.get("SPALIER_MUTATIONS", "60"))


class Mobile(nn.Module):
    """Inverted residuals: pointwise, depthwise, gated, pointwise, and a sum."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.expand, self.deep = nn.Conv2d(8, 16, 1, bias=False), nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(16), nn.BatchNorm2d(16), nn.BatchNorm2d(8)])
        self.down, self.up = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project, self.fc = nn.Conv2d(16, 8, 1, bias=False), nn.Linear(8, 4)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        y = self.norms[0](self.expand(x)).clamp(0, 6)
        y = self.norms[1](self.deep(y)).clamp(0, 6)
        y = y * self.up(self.down(y.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return self.fc((x + self.norms[2](self.project(y))).mean((2, 3)))


class Attention(nn.Module):
    """Attention whose code holds the number of heads."""

    def __init__(self, width, heads):
        super().__init__()
        self.num_heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """A vision transformer with one block of its own and one of PyTorch's."""

    def __init__(self):
        super().__init__()
        self.patches, self.positions = nn.Conv2d(3, 16, 4, 4), nn.Parameter(torch.randn(1, 4, 16))
        self.norms = nn.ModuleList([nn.LayerNorm(16) for _ in range(3)])
        self.one, self.two = Attention(16, 4), nn.MultiheadAttention(16, 4, batch_first=True)
        self.wide, self.narrow, self.fc = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        x = x + self.one(self.norms[0](x))
        y = self.norms[1](x)
        x = x + self.two(y, y, y, need_weights=False)[0]
        return self.fc((x + self.narrow(nn.functional.gelu(self.wide(self.norms[2](x))))).mean(1))


class Dense(nn.Module):
    """Each layer reads all that came before it; then a transition."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(14), nn.BatchNorm2d(20)])
        self.layers = nn.ModuleList([nn.Conv2d(8, 6, 3, 1, 1), nn.Conv2d(14, 6, 3, 1, 1)])
        self.change, self.fc = nn.Conv2d(20, 10, 1), nn.Linear(10, 4)

    def forward(self, x):
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = torch.cat([x, layer(norm(x).relu())], 1)
        return self.fc(self.change(self.norms[2](x).relu()).relu().mean((2, 3)))


IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
NETWORKS = {
    "residual": (lambda: DigitNet(8), EXAMPLE),
    "mobile": (Mobile, IMAGE),
    "transformer": (Transformer, IMAGE),
    "dense": (Dense, IMAGE),
}


@cache
def prepared(name):
    """The base, an example, and the bytes of two tasks on it: half of everything, and with free writers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        make, example = NETWORKS[name]
        base = make().eval()
        files = []
        for free in (False, True):
            net = copy.deepcopy(base)
            sp.attach_(net, sp.SPLoRA(rank=2), head="fc", example=example)
            structure, random = sp.trace(base, example), np.random.default_rng(0)
            names = {s.name: s.size for s in structure.streams}
            if free and structure.writers:
                names |= {w.name: structure.streams[w.stream].size for w in structure.writers}
                names = {n: size for n, size in names.items() if n in structure.free_writers}
            keep = {n: random.choice(size, max(1, round(0.6 * size)), replace=False) for n, size in names.items()}
            sp.prune_(net, sp.Plan(structure, keep, writers="free" if free and structure.writers else "coupled"))
            files.append(sp.Task.of(awaken_(net), "a").to_bytes())
    return base, example, files


def change(random: Random, parts: Parts) -> None:
    """Change something that tables are about: which masks lie where, what comes from where, what a module holds."""
    table = parts.table
    row, other = (random.choice(table["rows"]) for _ in range(2))
    match random.choice(["mask", "mask", "mask", "swap", "drop", "source", "shape", "size", "writer", "bits", "any"]):
        case "mask" if row[3]:
            row[3][random.randrange(len(row[3]))] = random.randrange(len(table["axes"]) + 1)
        case "swap":
            row[3], other[3] = other[3], row[3]
        case "drop":
            table["rows"].remove(row)
        case "source":
            row[4] = random.choice([["base"], ["values"], other[4]])
        case "shape" if row[2]:
            row[2][random.randrange(len(row[2]))] += random.choice([-1, 1, 2])
        case "size" if table["attributes"]:
            random.choice(list(table["attributes"].values()))["num_heads"] = random.randint(1, 4)
        case "writer" if table["writers"]:
            writer, place = random.choice(table["writers"]), random.randrange(1, 4)
            writer[place] = random.choice(table["writers"])[2] if place == 2 else random.randint(-2, 4)
        case "bits":
            dtype, raw = parts.tensors["masks"]
            at = random.randrange(len(raw))
            parts.tensors["masks"] = dtype, raw[:at] + bytes([random.randrange(256)]) + raw[at + 1 :]
        case _:
            mutate(random, table)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_builds_runs(name):
    base, example, files = prepared(name)
    before, whole, built = snapshot(base), base(example).shape, 0
    for seed in range(COUNT):
        random = Random(f"{name} {seed}")
        parts = unpack(random.choice(files))
        del parts.description["table"]
        with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError, ValueError):  # changed enough
            for _ in range(random.randint(1, 2)):
                change(random, parts)
        fit(parts, base)
        try:
            task = sp.Task.from_bytes(pack(parts))
            net = task.build(base)
        except TaskFileError:
            continue
        built += 1
        classes = next((row.shape[0] for row in task.table.rows if row.path == "fc"), whole[1])
        assert net(example).shape == (len(example), classes), seed
        again = copy.deepcopy(base)
        try:
            task.apply_(again)
        except TaskFileError:
            continue
        assert again.eval()(example).shape == (len(example), classes), seed
    assert built > COUNT // 100
    assert_unchanged(base, before)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_not_changed_builds(name):
    base, example, files = prepared(name)
    for data in files:
        assert sp.Task.from_bytes(data).info.inputs
        parts = unpack(data)
        del parts.description["table"]
        fit(parts, base)
        assert sp.Task.from_bytes(pack(parts)).build(base)(example).isfinite().all()


def test_a_table_that_fitted_once_is_looked_at_again():
    """Two masks that have to leave equally many units: one file does that, and the next of the same table does not."""
    base, _, files = prepared("mobile")
    task = sp.Task.from_bytes(files[0])
    number = next(n for n, (stream, _) in enumerate(task.table.streams) if stream == "stem")
    count = len(task.masks)

    def own_mask(row):
        """What `project` writes into the sum has a mask of its own."""
        if row.path not in ("project", "norms.2") or not row.axes:
            return row
        swapped = [tuple(Placement(count) if p.mask == number else p for p in on) for on in row.axes]
        return replace(row, axes=(swapped[0], *row.axes[1:]))

    table = replace(
        task.table,
        streams=(*task.table.streams, ("twin", task.table.streams[number][1])),
        rows=tuple(map(own_mask, task.table.rows)),
    )
    same = replace(task, table=table, masks=[*task.masks, task.masks[number]])
    less = task.masks[number].copy()
    less[np.flatnonzero(less)[0]] = False
    other = replace(task, table=table, masks=[*task.masks, less])
    known = Base(base)
    check_base(same, known)
    with pytest.raises(TaskFileError, match="does not run") as error:
        check_base(other, known)
    assert error.value.code == "table"
    check_base(same, known)
