"""Whatever cannot be saved is refused by attach_, before anything is learned; long concatenations can be saved."""

import copy

import pytest
import torch
from support import assert_unchanged, awaken_, snapshot, tiny_cnn
from torch import nn

import spalier as sp
from spalier.errors import SpalierError
from spalier.tasks import table

IMAGE = torch.zeros(2, 3, 8, 8)


def refused(net, match, example=None, **options):
    before = snapshot(net)
    with pytest.raises(SpalierError, match=match):
        sp.attach_(net, sp.SPLoRA(rank=2), example=example, **options)
    assert_unchanged(net, before)
    assert not any("_spalier" in module.__dict__ for module in net.modules())


@pytest.mark.parametrize("example", [None, IMAGE])
def test_a_table_that_is_too_long(example, monkeypatch):
    monkeypatch.setattr(table, "MAX_TABLE", 300)
    refused(tiny_cnn(), "the layer table has .* bytes, expected at most 300", example)


def test_patterns_for_too_many_indices(monkeypatch):
    monkeypatch.setattr(table, "MAX_INDICES", 100)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 4))
    refused(net, "the masks are for more than 100 indices", IMAGE)
    sp.attach_(net, sp.SPLoRA(rank=2))  # without streams there are no masks


def named(name):
    net = nn.Sequential()
    net.add_module(name, tiny_cnn())
    return net


def test_names_that_a_file_cannot_have():
    refused(named("a\x07b"), r"the character U\+0007")
    refused(named("x" * 1000), "stands where a name is expected")


class Odd(nn.Module):
    """A norm whose weight is of a kind of its own."""

    def __init__(self, weight):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.norm.extra = nn.Parameter(weight)

    def forward(self, x):
        return self.norm(self.first(x))


@pytest.mark.parametrize(
    ("weight", "match"),
    [
        (torch.zeros([1] * 17), "17 axes"),
        (torch.zeros(4, dtype=torch.complex64), "complex64.* a task file cannot hold it"),
    ],
)
def test_tensors_that_a_file_cannot_hold(weight, match):
    refused(Odd(weight), match)


def test_numbers_of_eight_bits_cannot_learn():
    with pytest.raises(SpalierError, match=r"float8_e4m3fn.* a task file cannot hold it"):
        sp.attach_(Odd(torch.zeros(4, dtype=torch.float8_e4m3fn)), sp.SPLoRA(rank=2))


def test_what_is_not_the_tasks_own_may_be_of_any_kind():
    net = Odd(torch.zeros(4, dtype=torch.complex64))
    base = copy.deepcopy(net)
    sp.attach_(net, sp.SPLoRA(rank=2), norms=False)
    x = torch.randn(3, 4)
    torch.testing.assert_close(sp.Task.of(awaken_(net), "a").build(base)(x), net.eval()(x))


class Dense(nn.Module):
    """Each layer reads what all before it have written, as in a DenseNet."""

    def __init__(self, layers=40):
        super().__init__()
        self.stem, self.fc = nn.Conv2d(3, 4, 1), nn.Linear(4 + 4 * layers, 3)
        self.layers = nn.ModuleList([nn.Conv2d(4 + 4 * n, 4, 1) for n in range(layers)])

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x).relu()], 1)
        return self.fc(x.mean((2, 3)))


def check_saved(base, example, head, most):
    """Half of each stream: the file comes back as the same network, and its table is short."""
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), head=head, example=example)
    structure = sp.adapters.attachment.attachment_of(net).structure
    keep = {s.name: range(max(1, s.size // 2)) for s in structure.streams}
    sp.prune_(net, sp.Plan(structure, keep), check=False)
    task = sp.Task.from_bytes(sp.Task.of(awaken_(net), "a").to_bytes())
    assert len(task.table.to_bytes()[0]) < most
    with torch.no_grad():
        torch.testing.assert_close(task.build(base)(example), net.eval()(example), rtol=1e-3, atol=1e-4)


def test_inputs_that_are_too_large_to_state_are_left_out():
    net = nn.Sequential(nn.Linear(2**12, 4), nn.ReLU(), nn.Linear(4, 2))
    base = copy.deepcopy(net)
    x = torch.zeros(2**12 + 1, 2**12)
    sp.attach_(net, sp.SPLoRA(rank=2), example=x)
    task = sp.Task.of(net, "a")
    assert not task.info.inputs
    task.build(base)


def test_forty_concatenations():
    torch.manual_seed(0)
    check_saved(Dense().eval(), torch.randn(2, 3, 4, 4), "fc", 3_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head", "size"), [("densenet169", "classifier", 64), ("inception_resnet_v2", "classif", 96)]
)
def test_networks_with_hundreds_of_concatenations(name, head, size):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    check_saved(timm.create_model(name, num_classes=3).eval(), torch.randn(1, 3, size, size), head, 10_000)
