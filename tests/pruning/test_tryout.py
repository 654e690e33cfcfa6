"""What users do that nobody thought of first."""

import copy

import pytest
import torch
from support import assert_unchanged, snapshot, tiny_cnn
from torch import nn

import spalier as sp
from spalier.errors import PlanError, PruneError, TraceError

IMAGE = torch.randn(2, 3, 8, 8)
ROWS = torch.randn(4, 6)


def perceptron():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("adapted", [False, True])
def test_a_loss_of_before_is_still_around(adapted):
    net = perceptron()
    structure = sp.trace(net, ROWS)
    if adapted:
        sp.attach_(net, sp.SPLoRA(rank=2), head="4")
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    loss = net(ROWS).square().sum()
    loss.backward()
    optimizer.step()
    sp.prune_(net, sp.Plan(structure, {"0": [0, 1], "2": [3]}), optimizer=optimizer)
    optimizer.zero_grad()
    net(ROWS).square().sum().backward()
    optimizer.step()
    assert loss.isfinite()


def test_a_refused_cut_leaves_a_network_that_trains(monkeypatch):
    net = perceptron()
    plan = sp.Plan(sp.trace(net, ROWS), {"0": [0, 1]})
    loss = net(ROWS).sum()
    monkeypatch.setattr("spalier.pruning.verify.is_close", lambda *_: False)
    with pytest.raises(PruneError):
        sp.prune_(net, plan)
    loss.backward()
    net(ROWS).sum().backward()


def test_free_writers_of_an_adapted_network():
    net = sp.models.resnet18(classes=2, stem="cifar")
    example = torch.randn(1, 3, 16, 16)
    wanted = [w.name for w in sp.trace(net, example).writers]
    sp.attach_(net, sp.SPLoRA(rank=2), head="fc")
    assert [w.name for w in sp.trace(net, example).writers] == wanted != []


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.a(x)
        return self.out(x + self.b(x))


@pytest.mark.parametrize("keep", [[0], [1, 4, 6]])
def test_free_writers_take_inputs_with_more_axes(keep):
    net = Sums().double()
    masked = copy.deepcopy(net)
    gone = [unit for unit in range(8) if unit not in keep]
    with torch.no_grad():
        masked.b.weight[gone] = 0
        masked.b.bias[gone] = 0
    sp.prune_(net, sp.Plan(sp.trace(net, ROWS.double()), {"b": keep}, writers="free"))
    for shape in ((6,), (4, 6), (4, 8, 6), (2, 3, 5, 6)):
        x = torch.randn(shape, dtype=torch.float64)
        assert torch.allclose(net(x), masked(x), atol=1e-12)


def test_free_then_adapted_then_pruned_again_and_detached():
    net = Sums()
    structure = sp.trace(net, ROWS)
    sp.prune_(net, sp.Plan(structure, {"b": [0, 3, 5]}, writers="free"))
    wanted = net(ROWS)
    sp.attach_(net, sp.SPLoRA(rank=2), head="out")
    sp.prune_(net, sp.Plan(structure, {"b": [0, 3]}, writers="free"))
    sp.prune_(net, sp.Plan(structure, {"b": [3]}, writers="free"))
    sp.detach_(net)
    assert torch.equal(net(ROWS), wanted)


class Auxiliary(nn.Module):
    """A head that only training uses reads the stream too."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 8), nn.Linear(8, 4)
        self.aux = nn.Linear(16, 4)

    def forward(self, x):
        hidden = self.a(x).relu()
        out = self.c(self.b(hidden).relu())
        return out + self.aux(hidden) if self.training else out


def test_what_only_training_reads_stays():
    net = Auxiliary()
    structure = sp.trace(net, ROWS)
    assert list(structure.index) == ["b"]
    sp.prune_(net, sp.Plan(structure, {"b": [0]}))
    net.train()(ROWS).sum().backward()


class Counts(nn.Module):
    """The number of channels is a number in its arithmetic."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.a(x)
        return self.b(hidden * hidden.shape[-1] ** -0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_code_that_computes_with_a_number_of_channels_is_frozen(dtype):
    structure = sp.trace(Counts().to(dtype), ROWS.to(dtype))
    assert structure.streams == ()
    assert any("computes with a number of channels" in f.reason for f in structure.frozen)


def test_nothing_to_compare_is_an_error():
    net = perceptron()
    with torch.no_grad():
        net[4].bias[:] = float("nan")
    plan, before = sp.Plan(sp.trace(net, ROWS), {"0": [0]}), snapshot(net)
    with pytest.raises(PruneError, match="no finite number"):
        sp.prune_(net, plan)
    assert_unchanged(net, before)
    with pytest.raises(PruneError, match="no finite number"):
        sp.prune_(perceptron(), sp.Plan(sp.trace(perceptron(), torch.randn(0, 6)), {"0": [0]}))


def test_the_example_is_the_callers():
    net, example = perceptron(), torch.randn(4, 6)
    structure = sp.trace(net, example)
    example.fill_(float("nan"))
    sp.prune_(net, sp.Plan(structure, {"0": [0, 1]}))


def test_under_inference_mode():
    net = perceptron()
    with torch.inference_mode():
        sp.prune_(net, sp.Plan(sp.trace(net, ROWS), {"0": [0, 1]}))
    net(ROWS).sum().backward()


def test_tracing_what_is_pruned():
    net = perceptron()
    sp.prune_(net, sp.Plan(sp.trace(net, ROWS), {"0": [0, 1]}))
    with pytest.raises(TraceError, match="pruned already"):
        sp.trace(net, ROWS)


class Notes(nn.Module):
    """Counts its calls, draws random numbers, writes into its input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        torch.rand(1)
        return self.b(self.a(x.mul_(2)))


def test_a_forward_with_side_effects():
    net, example = Notes(), torch.randn(4, 6)
    values, state = example.clone(), torch.get_rng_state()
    sp.prune_(net, sp.Plan(sp.trace(net, example), {"a": [0, 1]}))
    assert net.calls.item() == 0
    assert torch.equal(example, values)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_train_that_returns_nothing():
    class Frozen(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()

    net = Frozen(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    assert sp.trace(net, ROWS).units == 8


def test_hooks_see_the_network_alone():
    net, seen = perceptron(), []
    net[0].register_forward_hook(lambda module, args, output: seen.append(output.shape[-1]))
    sp.trace(net, ROWS)
    assert set(seen) <= {8}


@pytest.mark.parametrize("units", [torch.tensor([0, 1]), (u for u in [1, 0]), range(2), {0, 1}])
def test_units_of_every_kind(units):
    assert sp.Plan(sp.trace(perceptron(), ROWS), {"0": units}).keep == {"0": (0, 1)}


@pytest.mark.parametrize("units", [(u for u in [0.5, 1.7]), [float("inf")], torch.tensor([0.5]), (u for u in [True])])
def test_units_that_are_none(units):
    with pytest.raises(PlanError, match="whole numbers"):
        sp.Plan(sp.trace(perceptron(), ROWS), {"0": units})


def test_optimizers_that_cannot_be():
    net = perceptron()
    plan = sp.Plan(sp.trace(net, ROWS), {"0": [0]})
    for optimizer, message in (
        (torch.optim.SGD(tiny_cnn().parameters(), 0.1), "trains no parameter"),
        (torch.optim.LBFGS(net.parameters()), "LBFGS"),
    ):
        with pytest.raises(PruneError, match=message):
            sp.prune_(net, plan, optimizer=optimizer)
    assert net[0].out_features == 8


def test_an_example_of_the_wrong_kind_of_number():
    net = tiny_cnn()
    plan = sp.Plan(sp.trace(net, IMAGE), {"0": [0]})
    with pytest.raises(PruneError, match="does not run on the example"):
        sp.prune_(net.double(), plan)
