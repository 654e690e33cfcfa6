"""What `trace` finds, what it freezes and why, and what it refuses."""

import copy
import json
import pickle

import pytest
import torch
import zoo
from support import assert_unchanged, snapshot, tiny_cnn
from torch import nn

import spalier as sp
from spalier.errors import ExampleError, PlanError, TargetError, TraceError
from spalier.structure.structure import Cache, from_dict

IMAGE = torch.randn(2, 3, 8, 8)


def streams(structure):
    return {stream.name: stream.size for stream in structure.streams}


def test_a_plain_network():
    structure = sp.trace(tiny_cnn(), IMAGE)
    assert streams(structure) == {"0": 8, "3": 12}
    first = structure["0"]
    assert first.writers == ("0.weight",)
    assert first.readers == ("3.weight",)
    assert set(first.riders) == {"0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"}
    assert {(f.tensor, f.axis, f.count) for f in structure.frozen} == {
        ("0.weight", 1, 3),
        ("8.weight", 0, 3),
        ("8.bias", 0, 3),
    }
    assert "an output of the network" in {f.reason for f in structure.frozen}
    assert structure.prunable == pytest.approx(1 - 3 / sum(p.numel() for p in tiny_cnn().parameters()))


def test_the_reason_has_the_operation_and_the_line():
    structure = sp.trace(sp.models.resnet18(classes=2, stem="cifar"), torch.randn(1, 3, 16, 16))
    reason = next(f.reason for f in structure.frozen if f.tensor == "conv1.weight")
    assert reason.startswith("conv2d at models.py:")


def test_printed():
    text = str(sp.trace(tiny_cnn(), IMAGE))
    assert text.splitlines()[0].split() == ["stream", "units", "writers", "readers", "riders"]
    assert "20 units in 2 streams; 99.7% of the weights can go" in text
    assert "3 of 3" in text


def test_resnet50_residual_streams_have_many_writers():
    structure = sp.trace(sp.models.resnet50(classes=10, stem="cifar"), torch.randn(1, 3, 16, 16))
    assert structure["layer1.0.conv3"].size == 256
    assert len(structure["layer1.0.conv3"].writers) == 4
    assert len(structure.frozen) == 3
    assert {w.name for w in structure.writers} >= {
        "layer1.0.conv3",
        "layer1.0.downsample.0",
        "layer4.2.conv3",
    }


@pytest.mark.parametrize(
    ("name", "stream", "units"),
    [
        ("transformers/bert", "bert.encoder.layer.0.attention.self.query", 4),  # heads
        ("transformers/bert", "bert.encoder.layer.0.attention.self.query#2", 8),  # positions in every head
        ("timm/deit_tiny_distilled_patch16_224", "blocks.0.attn.qkv", 4),
        ("torchvision/vit_b_16", "encoder.layers.encoder_layer_0.self_attention", 4),
        ("transformers/llama", "model.layers.0.self_attn.q_proj#2", 2),  # each with its group of query heads
        ("transformers/llama", "model.layers.0.mlp.gate_proj", 64),
    ],
)
def test_attention_in_heads_and_gated_units(name, stream, units):
    entry = zoo.by_name(name)
    assert streams(sp.trace(entry.make(), entry.example()))[stream] == units


def test_head_sizes_stay_where_attention_scales_by_them():
    entry = zoo.by_name("timm/deit_tiny_distilled_patch16_224")
    structure = sp.trace(entry.make(), entry.example())
    assert "blocks.0.attn.qkv#2" not in structure.index


@pytest.mark.parametrize(("name", "views"), [("constant_view", 1), ("constant_groups", 1), ("borrowers", 8)])
def test_views_with_sizes_of_their_own_are_set_right(name, views):
    entry = zoo.by_name(f"made/{name}")
    structure = sp.trace(entry.make(), entry.example())
    assert len(structure.views) == views
    assert not any("does not follow" in f.reason for f in structure.frozen)
    assert structure.prunable > 0.98
    assert from_dict(json.loads(json.dumps(structure.to_dict()))).to_dict() == structure.to_dict()


def test_a_fixed_number_of_groups_is_frozen():
    entry = zoo.by_name("made/channel_shuffle")
    structure = sp.trace(entry.make(), entry.example())
    assert any("by a fixed number" in f.reason for f in structure.frozen)
    assert structure.streams


@pytest.mark.parametrize(
    "name", ["transposed_weights", "zeros", "largest", "lengths", "sampled", "chosen", "pool_and_unpool"]
)
def test_operations_that_leave_channels_apart_freeze_nothing(name):
    entry = zoo.by_name(f"made/{name}")
    structure = sp.trace(entry.make(), entry.example())
    # what is left are colours, classes, and the numbers that say where to sample
    ends = {("stem.0.weight", 1), ("down.0.weight", 1)}
    inner = [f for f in structure.frozen if (f.tensor, f.axis) not in ends and f.reason != "an output of the network"]
    assert [f for f in inner if not f.tensor.startswith("where.")] == []


def test_a_standardised_layer_keeps_two_inputs():
    entry = zoo.by_name("made/standardised")
    net = entry.make()
    structure = sp.trace(net, entry.example())
    assert {stream.name: stream.least for stream in structure.streams} == {"stem.0": 2, "one": 1, "two": 1}
    with pytest.raises(PlanError, match=r"1 unit of 'stem.0'; at least 2"):
        sp.prune_(net, sp.Plan(structure, {"stem.0": [3]}))
    scores = sp.score(net, criterion="weight", structure=structure)
    least = sp.select(net, scores, structure=structure, channels=0.2)
    assert {name: len(units) for name, units in least.keep.items()}["stem.0"] == 2
    sp.prune_(net, least)


class ZerosRead(nn.Module):
    """Channels that nothing writes, as many as the code says."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(8, 2)

    def forward(self, x):
        return self.two(torch.cat([self.one(x), x.new_zeros(len(x), 2)], 1))


def test_zeros_that_nothing_writes_stay():
    structure = sp.trace(ZerosRead(), torch.randn(1, 4))
    assert streams(structure) == {"one": 6}
    assert ("two.weight", 1, 2) in {(f.tensor, f.axis, f.count) for f in structure.frozen}


class ZerosOfAConstant(nn.Module):
    """The code has the number of channels as a constant."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.two(self.one(x) + torch.zeros(len(x), 6))


def test_zeros_of_a_constant_size_freeze_what_they_meet():
    structure = sp.trace(ZerosOfAConstant(), torch.randn(2, 4))
    assert structure.streams == ()
    assert any("does not follow" in f.reason for f in structure.frozen)


class Unknown(nn.Module):
    """An operation without a rule in the middle."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.two(torch.sort(self.one(x), dim=-1).values)


def test_an_operation_without_a_rule_freezes():
    structure = sp.trace(Unknown(), torch.randn(1, 4))
    assert structure.streams == ()
    assert any(f.reason.startswith("sort at test_trace.py:") for f in structure.frozen)


@pytest.mark.parametrize("example", [(IMAGE,), [IMAGE], {"input": IMAGE}])
def test_examples_of_every_kind(example):
    assert streams(sp.trace(tiny_cnn(), example)) == {"0": 8, "3": 12}


def test_frozen_weights_and_the_meta_device_make_no_difference():
    wanted = sp.trace(tiny_cnn(), IMAGE).to_dict()
    assert sp.trace(tiny_cnn().requires_grad_(False), IMAGE).to_dict() == wanted
    with torch.device("meta"):
        empty = tiny_cnn()
    assert sp.trace(empty, IMAGE).to_dict() == wanted


def test_adapters_make_no_difference():
    net = tiny_cnn()
    wanted = sp.trace(net, IMAGE).to_dict()
    sp.attach_(net, sp.SPLoRA(rank=2))
    assert sp.trace(net, IMAGE).to_dict() == wanted


def test_the_network_is_left_as_it_was():
    net = tiny_cnn()
    net[1].eval()
    before = snapshot(net)
    sp.trace(net, IMAGE)
    assert_unchanged(net, before)


def test_more_can_be_frozen():
    assert streams(sp.trace(tiny_cnn(), IMAGE, freeze="3")) == {}
    assert streams(sp.trace(tiny_cnn(), IMAGE, freeze="8")) == {"0": 8}
    by_kind = sp.trace(tiny_cnn(), IMAGE, freeze=lambda name, module: isinstance(module, nn.Linear))
    assert streams(by_kind) == {"0": 8}
    assert "as asked" in {f.reason for f in by_kind.frozen}
    with pytest.raises(TargetError, match="matches no module"):
        sp.trace(tiny_cnn(), IMAGE, freeze="nothing")


def test_plain_data_is_stable_and_comes_back():
    structure = sp.trace(tiny_cnn(), IMAGE)
    data = structure.to_dict()
    text = json.dumps(data)
    assert json.dumps(sp.trace(copy.deepcopy(tiny_cnn()), IMAGE).to_dict()) == text
    assert json.dumps(from_dict(json.loads(text)).to_dict()) == text
    assert pickle.loads(pickle.dumps(structure)).to_dict() == data
    with pytest.raises(TraceError, match="format"):
        from_dict({**data, "format": 99})


@pytest.mark.parametrize("name", ["torchvision/resnext50_32x4d", "transformers/bert", "torchvision/shufflenet_v2_x0_5"])
def test_plain_data_of_odd_structures(name):
    entry = zoo.by_name(name)
    structure = sp.trace(entry.make(), entry.example())
    assert from_dict(json.loads(json.dumps(structure.to_dict()))).to_dict() == structure.to_dict()


def test_cached(tmp_path, monkeypatch):
    net = tiny_cnn()
    wanted = sp.trace(net, IMAGE, cache=tmp_path)
    monkeypatch.setattr("spalier.tracing.find", None)  # would be called
    found = sp.trace(net, IMAGE, cache=tmp_path)
    assert found.to_dict() == wanted.to_dict()
    assert [p.suffix for p in tmp_path.iterdir()] == [".json"]
    sp.prune_(net, sp.Plan(found, {"0": [0, 1]}))
    assert net[0].out_channels == 2


def test_a_damaged_cache_is_made_anew(tmp_path):
    wanted = sp.trace(tiny_cnn(), IMAGE, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    for damage in (b"", b"{", b"[]", b'{"format": 1}', file.read_bytes()[:100]):
        file.write_bytes(damage)
        assert Cache(tmp_path).get(wanted.fingerprint) is None
        assert sp.trace(tiny_cnn(), IMAGE, cache=tmp_path).to_dict() == wanted.to_dict()


def test_predicates_of_the_same_code_are_told_apart(tmp_path):
    for name, wanted in (("8", {"0": 8}), ("0", {"3": 12})):
        found = sp.trace(tiny_cnn(), IMAGE, freeze=lambda path, _, name=name: path == name, cache=tmp_path)
        assert streams(found) == wanted


def test_another_constant_in_a_forward_has_another_fingerprint():
    marks = set()
    for factor in ("2", "3"):
        space = {"nn": nn}
        exec(
            f"class Scaled(nn.Linear):\n    def forward(self, x): return super().forward(x) * {factor}.5",
            space,
        )
        space["Scaled"].forward.__globals__["Scaled"] = space["Scaled"]
        marks.add(sp.trace(space["Scaled"](2, 2), torch.randn(1, 2)).fingerprint)
    assert len(marks) == 2


def test_another_network_has_another_fingerprint():
    one = sp.trace(tiny_cnn(), IMAGE).fingerprint
    assert sp.trace(tiny_cnn(classes=4), IMAGE).fingerprint != one
    assert sp.trace(tiny_cnn(), torch.randn(1, 3, 8, 8)).fingerprint != one
    assert sp.trace(tiny_cnn(), IMAGE, freeze="8").fingerprint != one


@pytest.mark.parametrize(
    "example", [torch.randn(2, 4, 8, 8), torch.randn(2, 3), (IMAGE, IMAGE), {"x": IMAGE}, (), "image", None]
)
def test_an_example_that_does_not_fit(example):
    net = tiny_cnn()
    before = snapshot(net)
    with pytest.raises(ExampleError, match="expected"):
        sp.trace(net, example)
    assert_unchanged(net, before)


@pytest.mark.parametrize("entry", zoo.UNTRACEABLE, ids=lambda entry: entry.name)
def test_a_network_that_cannot_be_captured(entry):
    with pytest.raises(TraceError, match="cannot capture"):
        sp.trace(entry.make(), entry.example())


def test_a_lazy_layer():
    with pytest.raises(TraceError, match="lazy"):
        sp.trace(nn.LazyLinear(3), torch.randn(1, 2))
