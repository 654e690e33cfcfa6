"""The built-in ResNets are torchvision's, key by key and bit by bit; weights load whole or not at all."""

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import torchvision
from support import assert_unchanged, snapshot

from spalier import models
from spalier.errors import ConfigError, WeightsError

NAMES = ["resnet18", "resnet34", "resnet50"]


@pytest.mark.parametrize("name", NAMES)
def test_equals_torchvision(name):
    theirs = getattr(torchvision.models, name)(num_classes=7).eval()
    mine = getattr(models, name)(classes=7).eval()
    state = theirs.state_dict()
    assert {k: v.shape for k, v in mine.state_dict().items()} == {k: v.shape for k, v in state.items()}
    assert models.load_weights_(mine, state) == models.Loaded((), ())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(mine(x), theirs(x))


@pytest.mark.parametrize("name", NAMES)
def test_the_cifar_stem_is_the_imagenet_stem_pooled(name):
    pretrained = getattr(models, name)(classes=7)
    net = getattr(models, name)(classes=10, stem="cifar")
    head = net.fc.weight.detach().clone()
    report = models.load_weights_(net, pretrained.state_dict())
    assert report == models.Loaded(("conv1.weight",), ("fc.weight", "fc.bias"))
    pooled = F.adaptive_avg_pool2d(pretrained.conv1.weight, 3)
    assert torch.equal(net.conv1.weight, pooled)
    window = pretrained.conv1.weight[:, :, :3, :3].mean((2, 3))  # the first of nine overlapping windows
    torch.testing.assert_close(net.conv1.weight[:, :, 0, 0], window)
    assert torch.equal(net.fc.weight, head)
    assert torch.equal(net.layer4[0].conv1.weight, pretrained.layer4[0].conv1.weight)
    assert net(torch.randn(1, 3, 32, 32)).shape == (1, 10)
    assert net.maxpool(torch.ones(1, 1, 4, 4)).shape == (1, 1, 4, 4)


def test_the_stride_may_sit_on_the_first_convolution():
    with torch.device("meta"):
        net = models.resnet50(stride_on="conv1")
    for stage in (net.layer2, net.layer3, net.layer4):
        assert stage[0].conv1.stride == (2, 2)
        assert stage[0].conv2.stride == (1, 1)
    assert net.layer1[0].conv1.stride == (1, 1)
    assert net(torch.empty(1, 3, 64, 64, device="meta")).shape == (1, 1000)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_from_a_file(tmp_path, suffix):
    source, net = models.resnet18(classes=3), models.resnet18(classes=3)
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save(source.state_dict(), path)
    else:
        safetensors.torch.save_file(source.state_dict(), path)
    models.load_weights_(net, path)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), source.parameters(), strict=True))


def test_half_precision_files_load_into_float32():
    source, net = models.resnet18(classes=3).half(), models.resnet18(classes=3)
    models.load_weights_(net, source.state_dict())
    assert net.conv1.weight.dtype == torch.float32
    assert torch.equal(net.conv1.weight, source.conv1.weight.float())


def test_a_counter_of_shape_one_loads_into_a_scalar():
    state = models.resnet18(classes=3).state_dict()
    state["bn1.num_batches_tracked"] = torch.tensor([7])
    net = models.resnet18(classes=3)
    models.load_weights_(net, state)
    assert net.bn1.num_batches_tracked == 7
    assert net.bn1.num_batches_tracked.shape == ()


class Exploit:
    def __reduce__(self):
        return os.mkdir, ("exploited",)


def bad_weights(kind, folder: Path):
    state = models.resnet18(classes=3).state_dict()
    path = folder / "bad.pth"
    if kind == "missing key":
        state.pop("layer1.0.conv1.weight")
    elif kind == "unexpected key":
        state["extra"] = torch.ones(1)
    elif kind == "wrong shape":
        state["layer1.0.conv1.weight"] = torch.ones(1, 1, 1, 1)
    elif kind == "no file":
        return folder / "absent.safetensors"
    elif kind == "pickled code":
        torch.save({"conv1.weight": Exploit()}, path)
        return path
    elif kind == "whole network":
        torch.save(models.resnet18(classes=3), path)
        return path
    elif kind == "not a mapping":
        torch.save([torch.ones(1)], path)
        return path
    elif kind == "garbage":
        (folder / "bad.safetensors").write_bytes(b"not a safetensors file at all")
        return folder / "bad.safetensors"
    return state


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing key", r"missing layer1\.0\.conv1\.weight, unexpected nothing"),
        ("unexpected key", "unexpected extra"),
        ("wrong shape", r"layer1\.0\.conv1\.weight has shape \(1, 1, 1, 1\), expected \(64, 64, 3, 3\)"),
        ("no file", "no weights file"),
        ("pickled code", "not a checkpoint of plain tensors"),
        ("whole network", "not a checkpoint of plain tensors"),
        ("not a mapping", "are a list"),
        ("garbage", "not a readable safetensors file"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(kind, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = bad_weights(kind, tmp_path)
    net = models.resnet18(classes=3)
    before = snapshot(net)
    with pytest.raises(WeightsError, match=words):
        models.load_weights_(net, weights)
    assert_unchanged(net, before)
    assert not (tmp_path / "exploited").exists()


def test_a_network_on_the_meta_device_takes_no_weights():
    with torch.device("meta"):
        net = models.resnet18(classes=3)
    with pytest.raises(WeightsError, match="meta device"):
        models.load_weights_(net, models.resnet18(classes=3).state_dict())


@pytest.mark.parametrize("weights", [None, 3, {"conv1.weight": "x"}], ids=str)
def test_what_is_no_state_dict_is_refused(weights):
    with pytest.raises(WeightsError, match="expected a state_dict"):
        models.load_weights_(models.resnet18(classes=3), weights)


def test_weights_that_are_not_finite_are_refused():
    state = models.resnet18(classes=3).state_dict()
    state["bn1.weight"][0] = float("nan")
    with pytest.raises(WeightsError, match=r"bn1\.weight holds NaN"):
        models.load_weights_(models.resnet18(classes=3), state)


@pytest.mark.parametrize("options", [{"classes": 0}, {"classes": 2.5}, {"stem": "mnist"}], ids=str)
def test_bad_options(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is"):
        models.resnet18(**options)


def test_a_bad_stride():
    with pytest.raises(ConfigError, match="stride_on is 'conv3'"):
        models.resnet50(stride_on="conv3")


def test_weights_of_a_folder_in_one_file_or_several(tmp_path):
    from safetensors.torch import save_file

    state = {"a": torch.ones(2), "b": torch.zeros(3)}
    save_file(state, tmp_path / "model.safetensors")
    assert set(models.read_weights(tmp_path)) == {"a", "b"}
    index = tmp_path / "model.safetensors.index.json"
    for key, value in state.items():
        save_file({key: value}, tmp_path / f"{key}.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    found = models.read_weights(tmp_path)
    assert all(torch.equal(found[key], value) for key, value in state.items())
    for text, words in (
        (
            json.dumps({"weight_map": {"a": "a.safetensors", "b": "c.safetensors"}}),
            "no weights file at .*c.safetensors",
        ),
        (json.dumps({"weight_map": {"a": "../a.safetensors"}}), "names ../a.safetensors, expected files beside it"),
        ("{", "no index of weights"),
        ("[]", "no index of weights"),
    ):
        index.write_text(text)
        with pytest.raises(WeightsError, match=words):
            models.read_weights(tmp_path)
    with pytest.raises(WeightsError, match=r"no weights file at .*model.safetensors"):
        models.read_weights(tmp_path.parent)
