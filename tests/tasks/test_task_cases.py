"""Tasks of networks and users as they are: what reviews and real code have shown."""

import copy
import pickle
import zipfile

import numpy as np
import pytest
import torch
import zoo
from learning import IMAGE, learned
from support import TINY, awaken_, tiny_cnn
from torch import nn

import spalier as sp
from spalier.errors import ConfigError, NetworkError, TaskFileError


@pytest.fixture
def base():
    torch.manual_seed(5)
    return tiny_cnn().double().eval()


def test_every_norm_of_mobile_networks_folds():
    """Behind depthwise convolutions, and at the end of the network too."""
    torch.manual_seed(0)
    base = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 6, 3, groups=2), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
        nn.BatchNorm1d(4),
    ).double().eval()  # fmt: skip
    net = learned(base, example=IMAGE.double(), head="9")
    folded, x = sp.Task.of(net, "a").build(base, fold=True), torch.randn(3, 3, 8, 8).double()
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in folded.modules())
    torch.testing.assert_close(folded(x), net(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("writers", ["coupled", "free"])
def test_norms_that_activate_fold_and_still_activate(writers):
    entry = zoo.by_name("made/activating_norms")
    base, x = entry.make().double(), entry.example().double()
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), example=x, head="head.2")
    awaken_(net, 0.1)
    for share in (0.8, 0.6):  # scored again with channels of its own
        scores = sp.score(net, [(x, torch.tensor([0, 1]))], "taylor", loss=nn.functional.cross_entropy)
        sp.prune_(net, sp.select(net, scores, channels=share, writers=writers))
        assert set(scores.layers) == {"stem"}
        sp.prune_(net, sp.select(net, sp.score(net, criterion="weight"), channels=share - 0.1, writers=writers))
    folded = sp.Task.of(net, "a").build(base, fold=writers == "coupled")
    torch.testing.assert_close(folded(x), net.eval()(x), rtol=1e-9, atol=1e-9)
    if writers == "coupled":
        assert all(norm.weight is None for norm in (folded.first, folded.second, folded.third))


class Listed(nn.Module):
    """A norm that the network holds in a list too, and calls from there."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.steps = [self.conv, self.norm, nn.ReLU()]

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return self.fc(x.mean((2, 3)))


def test_norms_in_lists_fold_too():
    base = Listed().double().eval()
    net = learned(base, example=IMAGE.double(), head="fc")
    x, folded = torch.randn(2, 3, 8, 8).double(), sp.Task.of(net, "a").build(base, fold=True)
    torch.testing.assert_close(folded(x), net(x))
    assert type(folded.norm) is nn.Identity
    assert torch.equal(pickle.loads(pickle.dumps(folded))(x), folded(x))
    base.norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    hooked = sp.Task.of(net, "a").build(base, fold=True)
    assert not torch.allclose(hooked(x), net(x))


@pytest.mark.parametrize("other", [{"nhead": 2}, {"norm_first": True}])
def test_attention_of_another_kind_is_another_base(other):
    def make(**options):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(
            **{"d_model": 16, "nhead": 4, "dim_feedforward": 16, **options}, batch_first=True
        )
        return nn.Sequential(layer, nn.Linear(16, 2)).eval()

    base = make()
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), head="1")
    task = sp.Task.of(net, "a")
    task.build(base)
    with pytest.raises(TaskFileError, match="another architecture"):
        task.build(make(**other))


@pytest.mark.parametrize("density", [1, 0.5])
def test_a_task_applied_without_an_example_is_saved_again(density, base):
    net = learned(base, density=density, example=IMAGE.double())
    task = sp.Task.of(net, "a")
    task.apply_(base)
    assert sp.Task.of(base, "a").to_bytes() == task.to_bytes()
    with torch.no_grad():
        base[8].bias += 1
        base[0].weight_adapter.up += 1
    again = sp.Task.of(base, "a")
    sp.detach_(base)
    built = again.build(base, fold=True)
    torch.testing.assert_close(built[8].bias, net[8].bias + 1)
    assert again.info.density == task.info.density


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_networks_that_are_cast_after_pruning(dtype):
    base = tiny_cnn().eval()
    net = learned(base).to(dtype)
    task = sp.Task.of(net, "a")
    cast = copy.deepcopy(base).to(dtype)
    x = torch.randn(2, 3, 8, 8, dtype=dtype)
    torch.testing.assert_close(task.build(cast)(x), sp.fuse(net)(x), rtol=2e-2, atol=2e-2)
    sp.detach_(net)
    assert {t.dtype for t in net.parameters()} == {dtype}
    assert all(torch.equal(value, cast.state_dict()[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("adapter", "options"),
    [
        (sp.SPLoRA(rank=2), {"norms": False, "head": ["4", "8"]}),
        (sp.FineTune(), {"norms": False, "targets": ["0", "1"]}),
        (sp.FineTune(), {"targets": ["3"], "head": "8"}),
    ],
)
def test_the_same_parameters_learn_after_apply(adapter, options, base):
    net = copy.deepcopy(base)
    sp.attach_(net, adapter, **options)
    flags = {name: p.requires_grad for name, p in net.named_parameters()}
    task = sp.Task.of(net, "a")
    task.apply_(base)
    assert {name: p.requires_grad for name, p in base.named_parameters()} == flags
    assert sp.Task.of(base, "a").to_bytes() == task.to_bytes()


class Masked(nn.Module):
    """A causal mask: infinite, and meant so."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, x):
        return self.two((self.one(x)[:, :, None] + self.mask).softmax(-1).sum(1))


def test_masks_may_be_infinite():
    base = Masked().eval()
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=1), head="two")
    x = torch.randn(2, 4)
    torch.testing.assert_close(sp.Task.of(net, "a").build(base)(x), sp.fuse(net)(x))


def test_heads_with_dropout_and_buffers_are_the_tasks_own():
    def make(classes, rate):
        torch.manual_seed(0)
        body = tiny_cnn()[:8]
        head = nn.Sequential(nn.Dropout(rate), nn.Linear(12, classes))
        head.register_buffer("temperature", torch.full((1,), rate))
        return nn.Sequential(*body, head).eval()

    base, x = make(100, 0.1), torch.randn(2, 3, 8, 8)
    net = learned(make(3, 0.5), density=1, head="8")
    torch.testing.assert_close(sp.Task.of(net, "a").build(base)(x), net(x))


class Alone(nn.Module):
    """Copies itself, and forgets what it was told of tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def __deepcopy__(self, memo):
        made = Alone()
        made.load_state_dict(self.state_dict())
        memo[id(self)] = made
        memo[id(self.linear)] = made.linear
        return made

    def forward(self, x):
        return self.linear(x)


class Locked(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        import threading

        self.lock = threading.Lock()


@pytest.mark.parametrize("kind", [Alone, Locked])
def test_modules_that_cannot_be_copied_are_named(kind):
    base, other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), kind())
    sp.attach_(base, sp.SPLoRA(rank=1))
    task = sp.Task.of(base, "a")
    sp.detach_(base)
    from spalier.tasks.base import Base

    with pytest.raises(TaskFileError) as error:
        Base(other).copy_with({name: tensor.clone() for name, tensor in Base(other).tensors.items()})
    assert error.value.code == "base"
    assert task.name == "a"


def test_traced_modules_are_bases_too():
    base = torch.fx.symbolic_trace(tiny_cnn().eval())
    net = torch.fx.symbolic_trace(tiny_cnn().eval())
    net.load_state_dict(base.state_dict())
    x = torch.randn(2, 3, 8, 8)
    task = sp.Task.of(learned_in_place(net), "a")
    torch.testing.assert_close(task.build(base)(x), net(x))


def learned_in_place(net):
    sp.attach_(net, sp.SPLoRA(rank=2), head="8")
    return awaken_(net).eval()


@pytest.mark.parametrize("storage", ["exact", "int8"])
def test_other_default_devices_and_modes(storage, base, tmp_path):
    net = learned(base, example=IMAGE.double())
    path = tmp_path / "a.task.safetensors"
    sp.Task.of(net, "a").save(path, storage=storage)
    x = torch.randn(2, 3, 8, 8).double()
    wanted = sp.Task.load(path).build(base)(x)
    with torch.device("meta"):
        assert torch.equal(sp.Task.load(path).build(base)(x), wanted)
    with torch.inference_mode():
        sp.Task.load(path).apply_(base)
    assert not any(p.is_inference() for p in base.parameters())
    base.train()(x).sum().backward()


def test_compiled_bases_are_unwrapped(base):
    net = learned(base, example=IMAGE.double())
    x = torch.randn(2, 3, 8, 8).double()
    torch.testing.assert_close(sp.Task.of(net, "a").build(torch.compile(base))(x), net(x))


def test_descriptions_take_what_users_have(base, tmp_path):
    net = learned(base, density=1, example=IMAGE.double())
    task = sp.Task.of(
        net,
        "a",
        metrics={"accuracy": np.float32(0.5), "loss": torch.tensor(2.0), "epochs": np.int64(3)},
        classes=(name for name in ("katze", "猫", "गाय")),
        provenance={"file": tmp_path},
        licence=None,
    )
    assert task.info.metrics == {"accuracy": 0.5, "loss": 2.0, "epochs": 3}
    assert task.info.classes == ("katze", "猫", "गाय")
    assert "learned" in repr(task)
    for wrong in ({"metrics": [1]}, {"provenance": "x"}, {"classes": "cat"}, {"preprocessing": 3}):
        with pytest.raises(TaskFileError):
            sp.Task.of(net, "a", **wrong)
    with pytest.raises(ConfigError):
        sp.Task.of(net, "a", structure=3)
    for wrong in (None, -1, "1"):
        with pytest.raises(ConfigError):
            sp.Task.load(tmp_path / "a.task.safetensors", limit=wrong)
    with pytest.raises(TaskFileError):
        task.save(None)


def test_a_smaller_network_of_transformers_refuses_save_pretrained(tmp_path):
    """Its configuration has the base's sizes: what it writes could not be loaded."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(**TINY, num_labels=3)
    base = transformers.ViTForImageClassification(config).eval()
    net = copy.deepcopy(base)
    example = {"pixel_values": torch.randn(2, 3, 32, 32)}
    sp.attach_(net, sp.SPLoRA(rank=2), head="classifier", example=example)
    whole = sp.Task.of(net, "whole").build(base)
    assert "save_pretrained" not in vars(sp.fuse(net))
    sp.prune_(net, sp.select(net, sp.score(net, None, "weight"), channels=0.5))
    small = sp.Task.of(net, "small").build(base)
    for each in (small, copy.deepcopy(small), sp.fuse(net)):
        with pytest.raises(NetworkError, match=r"smaller than its configuration.*Task\.save.*torch\.save"):
            each.save_pretrained(tmp_path / "small")
    assert not (tmp_path / "small").exists()
    torch.save(small, tmp_path / "small.pt")
    with zipfile.ZipFile(tmp_path / "small.pt") as archive:  # whoever loads it needs nothing of ours
        (pickled,) = (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    assert b"spalier.tasks" not in pickled
    loaded = torch.load(tmp_path / "small.pt", weights_only=False)
    with torch.no_grad():
        torch.testing.assert_close(loaded(**example).logits, small(**example).logits)
    assert "save_pretrained" not in vars(base)
    whole.save_pretrained(tmp_path / "whole")  # what has the base's sizes can be loaded
    again = transformers.ViTForImageClassification.from_pretrained(tmp_path / "whole")
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(**example).logits, whole(**example).logits)
