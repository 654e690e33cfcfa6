"""Sizes that a module's code holds: a task sets those that pruning changes, as its masks imply, and no others."""

import copy
from dataclasses import replace

import pytest
import torch
import zoo
from oracles import task_format
from support import awaken_
from torch import nn

import spalier as sp
from spalier.errors import TaskFileError
from spalier.pruning import modules
from spalier.tasks import SUFFIX

IMAGE = torch.zeros(1, 3, 16, 16)


def pruned_task(base, example, **attached):
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), example=example, **attached)
    structure = sp.trace(base, example)
    sp.prune_(net, sp.Plan(structure, {s.name: range(max(1, s.size // 2)) for s in structure.streams}))
    return sp.Task.of(awaken_(net), "a")


def with_attributes(task, attributes):
    return sp.Task.from_bytes(replace(task, table=replace(task.table, attributes=attributes)).to_bytes())


@pytest.mark.parametrize(("key", "value"), [("stride", (1, 1)), ("dilation", (1, 1)), ("padding", (1, 1))])
def test_strides_are_the_bases(key, value):
    """Every stride of a ResNet as 1 would make it dozens of times slower, and its tensors would not show it."""
    base = sp.models.resnet8(classes=3).eval()
    task = pruned_task(base, IMAGE, head="fc")
    layers = [path for path, m in base.named_modules() if isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1)]
    hostile = with_attributes(task, {path: {key: value} for path in layers})
    for attempt in (hostile.build, hostile.apply_):
        with pytest.raises(TaskFileError, match=f"{key}.*pruning does not change") as error:
            attempt(base)
        assert error.value.code == "base"
    assert not hasattr(base, "_spalier")


@pytest.mark.parametrize("name", ["made/attention_batch_first", "transformers/vit", "transformers/bert"])
def test_heads_are_as_many_as_the_masks_leave(name, tmp_path):
    entry = zoo.by_name(name)
    base = entry.make()
    task = pruned_task(base, entry.example())
    assert task.table.attributes
    task.build(base)
    found = dict(base.named_modules())
    path = tmp_path / f"a{SUFFIX}"
    task.save(path)
    read = task_format.attributes(path, lambda p, key: (type(found[p]).__name__, getattr(found[p], key)))
    assert read == task.table.attributes
    path, values = next(iter(task.table.attributes.items()))
    key = next(key for key in values if "heads" in key)
    size = getattr(found[path], key)
    assert 2 * values[key] == size == 4
    with pytest.raises(TaskFileError, match="no mask leaves that share") as error:
        with_attributes(task, {**task.table.attributes, path: {**values, key: 3}}).build(base)
    assert error.value.code == "base"


class Halves(nn.Module):
    """A layer of its own kind, whose code holds a size under a name that says nothing."""

    def __init__(self, size):
        super().__init__()
        self.n, self.linear = size, nn.Linear(4, size)

    def forward(self, x):
        return self.linear(x).view(len(x), self.n).relu()


def test_what_users_say_of_their_modules_holds_for_files_too(monkeypatch):
    monkeypatch.setattr(modules, "_TABLE", dict(modules._TABLE))
    base = nn.Sequential(Halves(8), nn.Linear(8, 2)).eval()
    x = torch.randn(3, 4)
    sp.resizes(Halves)(lambda module, resize: {"n": len(module.linear.weight)})
    task = pruned_task(base, x)
    assert task.table.attributes == {"0": {"n": 4}}
    assert task.build(base)(x).shape == (3, 2)
    del modules._TABLE[Halves]
    with pytest.raises(TaskFileError, match=r"spalier\.resizes"):
        task.build(base)
