"""One call from a network and data to a task, and the way back."""

import logging

import pytest
import torch
from running import Small
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spalier as sp
from spalier.data import Data
from spalier.errors import ConfigError, RunError, TargetError

SHORT = {"epochs": 8, "epochs_per_prune": 5, "refit_epochs": 1, "batch_size": 32}


def digits(first, last):
    """Some of scikit-learn's digits 0 to 2 as a dataset."""
    found = load_digits(n_class=3)
    images = torch.tensor(found.images / 8 - 1, dtype=torch.float32)[:, None].repeat(1, 3, 1, 1)
    return TensorDataset(images[first:last], torch.tensor(found.target)[first:last])


def network():
    torch.manual_seed(0)
    return Small(classes=3, width=16)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A base, as it was before; the task that was learned on it, in a folder of its own; the samples of the test."""
    base, folder = network(), tmp_path_factory.mktemp("adapted") / "run"
    before = {name: value.clone() for name, value in base.state_dict().items()}
    task = sp.adapt(base, DataLoader(digits(0, 300)), 0.5, test=digits(300, 500), folder=folder, name="three", **SHORT)
    return base, before, task, folder


def test_a_task_comes_back_with_its_numbers(learned):
    base, before, task, _ = learned
    kept, of = task.info.density.channels
    assert 0.4 < kept / of <= 0.5
    assert task.info.metrics["accuracy"] > 0.8
    assert {"validation", "accuracy"} <= task.info.metrics.keys()
    assert base.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
    images, labels = digits(300, 500).tensors
    with torch.no_grad():
        right = (task.build(base)(images).argmax(1) == labels).double().mean()
    assert float(right) == pytest.approx(task.info.metrics["accuracy"], abs=0.011)


def test_saved_and_loaded_it_is_the_same_network(learned, tmp_path):
    base, _, task, _ = learned
    file = tmp_path / "three.task.safetensors"
    task.save(file)
    images = digits(0, 8).tensors[0]
    assert torch.equal(sp.load(base, file)(images), task.build(base)(images))


def test_a_folder_keeps_the_run(learned):
    base, _, task, folder = learned
    again = sp.adapt(base, DataLoader(digits(0, 300)), 0.5, test=digits(300, 500), folder=folder, name="three", **SHORT)
    assert again.to_bytes() == task.to_bytes()
    assert sp.Store(folder / "tasks").load("three-50").name == task.name
    with pytest.raises(RunError, match="begun with other settings"):
        sp.adapt(base, digits(0, 300), 0.4, test=digits(300, 500), folder=folder, name="three", **SHORT)


@pytest.mark.parametrize("target", [0, 1, 1.5, -1, "half"])
def test_a_target_is_a_share(target):
    with pytest.raises(ConfigError, match="target is"):
        sp.adapt(network(), digits(0, 20), target)


def test_what_cannot_be_is_refused_before_anything_is_trained():
    with pytest.raises(TargetError, match="pass head="):
        sp.adapt(nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU()), digits(0, 20))
    with pytest.raises(RunError, match="3 classes"):
        sp.adapt(Small(classes=7), digits(0, 20))
    with pytest.raises(ConfigError, match="has a test split"):
        sp.adapt(network(), Data.of(digits(0, 20)), test=digits(20, 30))
    with pytest.raises(ConfigError, match="leave it out"):
        sp.adapt("resnet8", "digits", test=digits(20, 30))
    with pytest.raises(ConfigError, match="no setting"):
        sp.adapt(network(), digits(0, 20), epoch=3)


# attach_ finds the head, and one line says what learns


def test_a_head_can_be_looked_for():
    net = network()
    assert "head" in str(sp.attach_(net, sp.SPLoRA(rank=2), head="auto")).splitlines()[-2]
    with pytest.raises(TargetError, match="pass head="):
        sp.attach_(nn.Sequential(nn.Conv2d(3, 3, 3)), sp.SPLoRA(rank=2), head="auto")


def test_a_head_that_nobody_named_is_asked_for(caplog):
    with caplog.at_level(logging.INFO, "spalier"):
        sp.attach_(network(), sp.SPLoRA(rank=2))
    assert "fc looks like the classifier" in caplog.text
    assert "head='fc'" in caplog.text


def test_one_line_says_what_learns(capsys):
    net = network()
    sp.attach_(net, sp.SPLoRA(rank=2), head="fc")
    sp.print_trainable_parameters(net)
    learned = sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert f"trainable params: {learned:,} || all params: {sp.count(net).parameters:,} ||" in capsys.readouterr().out
