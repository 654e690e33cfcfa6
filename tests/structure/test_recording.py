"""Graphs that are recorded: the same as those of `torch.export`, and the network is left as it was."""

import json
import re

import pytest
import torch
import zoo
from torch import nn

import spalier as sp
from spalier.structure import graph, recording

IMAGE = torch.randn(2, 3, 8, 8)
ENTRIES = {entry.name: entry for entry in zoo.ZOO}
EXPORTED = {"made/data_dependent_size", "made/chosen"}
"""Sizes that depend on values: only `torch.export` can follow those."""
LARGE = (
    *("torchvision/resnet18", "torchvision/swin_t", "timm/convnextv2_atto", "timm/xcit_nano_12_p8_224"),
    *("transformers/bert", "transformers/t5", "transformers/llama"),
)


def exported(monkeypatch):
    def refuse(*_):
        raise recording.UnrecordableError("as asked")

    monkeypatch.setattr(graph, "record", refuse)


def without_lines(structure):
    """Export names a line of PyTorch where the recording names the network's own."""
    return re.sub(r" at [^\" ]+:\d+", "", json.dumps(structure.to_dict()))


def captured(net, example):
    return graph.capture(net.eval(), example)


@pytest.mark.parametrize("name", [*(name for name in ENTRIES if name.startswith("made/")), *LARGE])
def test_the_structure_is_that_of_the_exported_graph(name, monkeypatch):
    net, example = ENTRIES[name].make(), ENTRIES[name].example()
    found = sp.trace(net, example)
    exported(monkeypatch)
    assert without_lines(found) == without_lines(sp.trace(net, example))


@pytest.mark.parametrize("name", [*(name for name in ENTRIES if name.startswith("made/")), *LARGE])
def test_what_has_known_sizes_is_recorded(name):
    program = captured(ENTRIES[name].make(), ENTRIES[name].example())
    assert (program.twin is None) == (name in EXPORTED)


class Holding(nn.Module):
    """Code that holds tensors, makes some, keeps one for later, and writes into its buffer."""

    outside = torch.full((8, 1, 1), 0.5)

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 2)
        self.shift, self.kept = torch.randn(8, 1, 1), None
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        x = self.first(x) + torch.tensor([0.25]) + torch.arange(8.0).view(8, 1, 1)
        self.kept = x.relu_() * torch.full_like(x, 2.0)
        low, high = self.kept.split(4, 2)
        return self.last((low - high).mean((2, 3))), torch.zeros(3).to(torch.float64)


def test_constants_and_tensors_that_are_made_are_recorded():
    net = Holding().double()
    program = captured(net, IMAGE.double())
    assert program.twin is not None
    assert sorted(value.shape for value in program.constants.values()) == [(1,)]
    structure = sp.trace(net, IMAGE.double())
    assert [stream.size for stream in structure.streams] == []  # its positions are numbers of channels


class Shifted(nn.Module):
    outside = torch.tensor(0.5, dtype=torch.float64)

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 3)
        self.shift = torch.randn(1, dtype=torch.float64)

    def forward(self, x):
        return self.last((self.first(x) * self.outside + self.shift).clamp(min=0))


def test_values_of_constants_are_those_of_the_network():
    net = Shifted().double()
    program = captured(net, IMAGE.double())
    assert {float(value) for value in program.constants.values()} == {0.5, float(net.shift)}
    sp.prune_(net, sp.Plan(sp.trace(net, IMAGE.double()), {"first": [0, 3, 5]}))  # it compares the two
    assert net.first.out_channels == 3


def test_a_network_is_left_as_it_was():
    net = Holding().train()
    hook = net.first.register_forward_hook(lambda *_: None)
    before = {name: (tensor, tensor.clone()) for name, tensor in net.state_dict(keep_vars=True).items()}
    graph.capture(net, IMAGE)
    assert net.training
    assert net.kept is None
    assert float(net.seen) == 0
    assert list(net.first._forward_hooks) == [hook.id]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules() if m is not net.first)
    for name, tensor in net.state_dict(keep_vars=True).items():
        assert tensor is before[name][0]
        assert torch.equal(tensor, before[name][1])
    assert not torch.compiler.is_exporting()
    assert type(torch.zeros(2) + 1) is torch.Tensor


class Cast(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


class Uncast(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            return super().forward(x)


class Reshaped(nn.Sequential):
    def forward(self, x):
        return super().forward(x).unsqueeze_(1)


@pytest.mark.parametrize(("kind", "is_recorded"), [(Cast, False), (Uncast, True), (Reshaped, False)])
def test_what_cannot_be_recorded_is_exported(kind, is_recorded):
    net = kind(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    assert (captured(net, IMAGE).twin is not None) == is_recorded
    structure = sp.trace(net, IMAGE)
    assert [stream.size for stream in structure.streams] == [8]
    sp.prune_(net, sp.Plan(structure, {"0": [1, 2]}))


class Shared(nn.Module):
    """A layer that has two names is known by the first."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.block = nn.ModuleDict({"inner": self.layer})
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.block["inner"](x).relu())


def test_a_module_with_two_names_goes_by_the_first():
    structure = sp.trace(Shared(), torch.randn(2, 6))
    assert [stream.name for stream in structure.streams] == ["layer"]
    assert {cost.module for cost in structure.costs} == {"layer", "head"}


class Odd(nn.Module):
    """An operation without a rule, on a line of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(torch.cumsum(self.layer(x), 1))


def test_reasons_name_the_lines_of_the_networks_own_code():
    reasons = [frozen.reason for frozen in sp.trace(Odd(), torch.randn(2, 6)).frozen]
    line = Odd.forward.__code__.co_firstlineno + 1
    assert any(f"cumsum at test_recording.py:{line}" in reason for reason in reasons)


def test_reasons_of_layers_alone_name_the_layer():
    structure = sp.trace(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)), torch.randn(2, 6))
    reasons = [frozen.reason for frozen in structure.frozen]
    assert any("linear at linear.py:" in reason for reason in reasons)
