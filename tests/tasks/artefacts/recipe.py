"""How the task files of this folder were made: bases and learned numbers from whole-number arithmetic alone.

Every number is a small multiple of a power of two, so any version of PyTorch makes the same bits of it. The files are
never written anew: later versions have to read them as they are. Those of `FORMAT_1` were written by version 0.1.0.
``python tests/tasks/artefacts/recipe.py FOLDER`` writes files of the present code, to compare.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spalier as sp
from spalier.adapters.attachment import attachment_of
from spalier.adapters.kinds import Coded, LowRank

HERE = Path(__file__).parent


class Residual(nn.Module):
    """A residual block, whose sum couples channels; its writers can be pruned freely."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down, self.fc = nn.Conv2d(8, 12, 3, stride=2), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = self.down(x + self.block(x)).relu()
        return self.fc(x.mean((2, 3)))


def plain() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2, bias=False),
        nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4),
    )  # fmt: skip


def grouped() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=8),
        nn.Flatten(), nn.Linear(8 * 16, 6), nn.ReLU(), nn.Linear(6, 4),
    )  # fmt: skip


class Concatenated(nn.Module):
    """Channels of several layers side by side, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 1), nn.Conv2d(14, 10, 3)
        self.norm, self.up, self.fc = nn.BatchNorm2d(24), nn.ConvTranspose2d(24, 9, 2), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = torch.cat([x, self.one(x)], 1)
        x = self.norm(torch.cat([self.two(x), x[:, :, 1:-1, 1:-1]], 1)).relu()
        return self.fc(self.up(x).relu().mean((2, 3)))


def wide() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 4)
    )


def attention() -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Linear(16, 4))


@dataclass(frozen=True)
class Recipe:
    """One file: a base, what is learned on it, and how it is stored."""

    make: Callable[[], nn.Module]
    adapter: Any
    storage: str
    head: str
    shape: tuple[int, ...] = (2, 3, 8, 8)
    writers: str = "coupled"
    said: dict[str, Any] = field(default_factory=dict)
    coded: dict[str, int] = field(default_factory=dict)
    """The levels of factors, by weight."""
    sparse: bool = False
    """Whether most codes are 0, so that deflating makes them shorter."""


FORMAT_1 = {
    "splora-fp32": Recipe(
        Residual,
        sp.SPLoRA(rank=2),
        "fp32",
        "fc",
        writers="free",
        said={
            "metrics": {"accuracy": 0.75},
            "classes": ["ant", "bee", "cat", "dög"],
            "preprocessing": {"size": [8, 8], "mean": 0.5},
            "licence": "CC-BY-4.0",
            "provenance": {"data": "none"},
        },
    ),
    "sppara-fp16": Recipe(grouped, sp.SPPaRA(), "fp16", "8"),
    "finetune-exact": Recipe(plain, sp.FineTune(), "exact", "8"),
    "lora-int8": Recipe(plain, sp.LoRA(rank=2, kernel="full"), "int8", "8"),
    "attention-int8": Recipe(attention, sp.SPLoRA(rank=3), "int8", "1", shape=(2, 5, 16)),
}
FORMAT_2 = {
    "delta-1-bit": Recipe(Residual, sp.SPDelta(bits=1), "exact", "fc", writers="free"),
    "delta-2-bits": Recipe(wide, sp.SPDelta(bits=2, scales="layer"), "fp16", "5", sparse=True),
    "delta-4-bits": Recipe(grouped, sp.SPDelta(bits=4), "bf16", "8"),
    "delta-attention": Recipe(attention, sp.SPDelta(bits=3), "fp32", "1", shape=(2, 5, 16)),
    "by-layer": Recipe(
        Concatenated,
        sp.ByLayer(
            {
                "stem.weight": sp.SPPaRA(),
                "one.weight": sp.SPLoRA(rank=2),
                "two.weight": sp.SPLoRA(rank=3, kernel="full"),
                "up.weight": sp.SPDelta(bits=2),
            }
        ),
        "exact",
        "fc",
        coded={"one.weight": 255, "two.weight": 15},
    ),
    "sppara-int8": Recipe(grouped, sp.SPPaRA(), "int8", "8"),
    "whole-int8": Recipe(plain, sp.LoRA(rank=2, kernel="full"), "int8", "8"),
    "delta-packed": Recipe(Residual, sp.SPDelta(bits=2), "int8-all", "fc", writers="free"),
    "splora-packed": Recipe(plain, sp.SPLoRA(rank=2), "int8-all", "8"),
    "head-packed": Recipe(plain, sp.SPDelta(bits=1), "int4-head", "8"),
}
RECIPES = {**FORMAT_1, **FORMAT_2}


def numbers(shape: tuple[int, ...], salt: int) -> Tensor:
    """Multiples of 1/128 between -0.25 and 0.25."""
    count = torch.Size(shape).numel()
    index = torch.arange(count, dtype=torch.int64) + salt * 101
    return ((index * index * 7 + index * 37) % 65 - 32).float().div(128).reshape(shape)


@torch.no_grad()
def fill_(net: nn.Module, salt: int, learned_only: bool = False) -> None:
    """Give each tensor its numbers, in the order of the network."""
    learns = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    for place, (name, tensor) in enumerate(net.state_dict(keep_vars=True).items(), start=salt):
        is_parameter = isinstance(tensor, nn.Parameter)
        if learned_only and is_parameter and name not in learns:
            continue
        if name.endswith("num_batches_tracked"):
            tensor.fill_(place)
        elif name.endswith(("running_var", "adapter.gain")):
            tensor.copy_(numbers(tuple(tensor.shape), place) + 1)
        elif name.endswith("adapter.scale"):
            tensor.copy_(numbers(tuple(tensor.shape), place).abs() + 1 / 64)
        else:
            tensor.copy_(numbers(tuple(tensor.shape), place))


@torch.no_grad()
def code_(net: nn.Module, recipe: Recipe) -> None:
    """Round factors to levels, and leave few codes that are not 0, where a recipe says so."""
    for entry in attachment_of(net).updated:
        update = entry.update
        if isinstance(update, LowRank) and f"{entry.name}.{entry.weight}" in recipe.coded:
            update.levels = recipe.coded[f"{entry.name}.{entry.weight}"]
            update.down_scale = numbers((update.rank,), 5).abs() / 8 + 1 / 512
            update.up_scale = numbers((update.rank,), 6).abs() / 8 + 1 / 512
        elif isinstance(update, Coded) and recipe.sparse:
            update.delta *= (torch.arange(update.delta.numel()) % 11 == 0).view(update.delta.shape)


def base_of(name: str) -> nn.Module:
    net = RECIPES[name].make()
    fill_(net, salt=1)
    return net.eval()


def input_of(name: str) -> Tensor:
    return numbers(RECIPES[name].shape, salt=3)


def task_of(name: str) -> sp.Task:
    """The task, learned by writing numbers, and pruned to about two thirds of each stream."""
    recipe, net = RECIPES[name], base_of(name)
    sp.attach_(net, recipe.adapter, head=recipe.head, example=input_of(name))
    fill_(net, salt=2, learned_only=True)
    code_(net, recipe)
    structure = attachment_of(net).structure
    assert structure is not None
    keep = {s.name: [u for u in range(s.size) if u % 3 != 1] for s in structure.streams}
    if recipe.writers == "free":
        for writer in structure.writers:
            keep[writer.name] = keep[structure.streams[writer.stream].name][::2]
    sp.prune_(net, sp.Plan(structure, keep, writers=recipe.writers))
    return sp.Task.of(net, name, **recipe.said)


def path_of(name: str) -> Path:
    return HERE / f"{name}.task.safetensors"


if __name__ == "__main__":
    folder, outputs = Path(sys.argv[1]), {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, recipe in RECIPES.items():
        path = folder / path_of(name).name
        path.write_bytes(task_of(name).to_bytes(storage=recipe.storage))
        with torch.no_grad():
            outputs[name] = sp.Task.load(path).build(base_of(name))(input_of(name)).flatten().tolist()
    (folder / "outputs.json").write_text(json.dumps(outputs, indent=1) + "\n")
