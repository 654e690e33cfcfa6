"""Awkward networks and awkward users: each test is named after a fault that was found once."""

import copy

import pytest
import torch
import torch.nn.functional as F
from support import assert_unchanged, awaken_, snapshot, tiny_cnn
from torch import nn
from torch.nn.utils import prune

import spalier as sp
from spalier.adapters import attachment
from spalier.errors import AttachmentError, ConfigError, NonFiniteError, TargetError, UnsupportedLayerError


def assert_adapted_equals_fused(net, *inputs):
    net.double().eval()
    awaken_(net)
    torch.testing.assert_close(net(*inputs), sp.fuse(net)(*inputs), rtol=1e-10, atol=1e-10)


def vectors(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# Modules that read weights


class Inherits(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


class ReadsByAlias(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        p = self.proj
        return x @ p.weight.T


class ReadsAndCalls(nn.Module):
    """Reads the weight of an attention that in turn reads that of its out_proj."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0] * self.attention.in_proj_weight.norm()


class OwnEncoderLayer(nn.TransformerEncoderLayer):
    def forward(self, x):
        return F.linear(x, self.linear1.weight)


@pytest.mark.parametrize(
    "net",
    [Inherits(4, 2, batch_first=True), ReadsByAlias(), ReadsAndCalls(), OwnEncoderLayer(4, 2, 8)],
    ids=repr,
)
def test_a_reader_is_not_passed_by(net):
    net = nn.Sequential(copy.deepcopy(net))
    sp.attach_(net, sp.SPLoRA(2))
    assert_adapted_equals_fused(net, vectors(2, 3, 4))


class Notes(nn.Conv2d):
    """Notes things on itself as it runs."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        self.last = x
        return super().forward(x)


def test_what_forward_notes_on_itself_is_kept():
    layer = Notes(2, 2, 1)
    sp.attach_(layer, sp.SPLoRA(1))
    x = torch.randn(1, 2, 3, 3)
    layer(x)
    layer(x)
    assert layer.calls == 2
    assert layer.last is x
    assert isinstance(layer._parameters["weight"], nn.Parameter)


def test_a_weight_of_another_shape_is_refused():
    class Turned(nn.Linear):
        def __init__(self):
            super().__init__(3, 4)
            self.weight = nn.Parameter(torch.randn(3, 4))

    with pytest.raises(UnsupportedLayerError, match=r"shape \(3, 4\), expected \(4, 3\)"):
        sp.attach_(Turned(), sp.SPLoRA(1))


def test_pruning_with_torch_after_attaching_is_noticed():
    net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
    sp.attach_(net, sp.SPLoRA(1))
    prune.l1_unstructured(net[0], "weight", amount=0.5)
    with pytest.raises(AttachmentError, match="no longer a parameter"):
        net(torch.randn(1, 4, 5, 5))
    with pytest.raises(AttachmentError, match="no longer a parameter"):
        sp.fuse(net)


# The base, and the way back


def test_buffers_of_frozen_norms_come_back_too():
    net = tiny_cnn()
    before = snapshot(net)
    sp.attach_(net, sp.SPLoRA(2), norms=False)
    net.train()(torch.randn(4, 3, 6, 6))
    sp.detach_(net)
    assert_unchanged(net, before)


def test_weights_that_were_assigned_after_attaching():
    net = tiny_cnn()
    sp.attach_(net, sp.SPLoRA(2), head="8")
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    assert all(p.requires_grad for p in sp.fuse(net).parameters())
    sp.detach_(net)
    assert all(p.requires_grad for p in net.parameters())


def test_a_layer_that_came_after_attaching():
    net = tiny_cnn()
    sp.attach_(net, sp.SPLoRA(2), head="8")
    net.append(nn.Linear(3, 2))
    plain = sp.fuse(net)
    assert plain[9].weight.requires_grad
    sp.detach_(net)
    assert net(torch.randn(2, 3, 6, 6)).shape == (2, 2)


def test_materialised_after_attaching_on_the_meta_device():
    with torch.device("meta"):
        net = tiny_cnn()
    sp.attach_(net, sp.SPLoRA(2), head="8")
    net.to_empty(device="cpu")
    net.load_state_dict({k: torch.ones_like(v) for k, v in net.state_dict().items()})
    assert sp.fuse(net)[0].weight.device.type == "cpu"
    sp.detach_(net)
    assert {p.device.type for p in net.parameters()} == {"cpu"}


def test_detached_on_the_meta_device():
    net = tiny_cnn()
    sp.attach_(net, sp.SPLoRA(2), head="8")
    net.to("meta")
    sp.detach_(net)
    assert {p.device.type for p in net.parameters()} == {"meta"}


def test_a_replaced_module_is_noticed():
    net = tiny_cnn()
    sp.attach_(net, sp.SPLoRA(2), head="8")
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    sp.fuse(net)
    before = snapshot(net)
    with pytest.raises(AttachmentError, match="replaced or removed since attach_"):
        sp.detach_(net)
    assert_unchanged(net, before)
    net[0] = nn.Conv2d(3, 8, 3)
    with pytest.raises(AttachmentError, match="replaced or removed"):
        sp.fuse(net)


def test_parts_and_neighbours_of_an_adapted_network_are_refused():
    net = tiny_cnn()
    sp.attach_(net, sp.SPLoRA(2), targets="0")
    for again in (net[3], nn.Sequential(net[3], nn.Linear(2, 2))):
        with pytest.raises(AttachmentError, match="adapted already"):
            sp.attach_(again, sp.SPLoRA(2))
    with pytest.raises(AttachmentError, match="a part of an adapted network"):
        sp.fuse(net[0])
    sp.detach_(net)
    sp.attach_(net[3], sp.SPLoRA(2))


def test_a_stale_gradient_does_not_move_the_base():
    net = tiny_cnn()
    net(torch.randn(2, 3, 6, 6)).sum().backward()
    weight, value = net[0].weight, net[0].weight.detach().clone()
    sp.attach_(net, sp.SPLoRA(2))
    torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1).step()
    assert torch.equal(weight, value)


def test_running_out_of_memory_changes_nothing(monkeypatch):
    def fail(tensor):
        raise MemoryError

    net = tiny_cnn()
    before = snapshot(net)
    monkeypatch.setattr(attachment, "_learned_copy", fail)
    with pytest.raises(MemoryError):
        sp.attach_(net, sp.FineTune())
    assert_unchanged(net, before)


# Counts and checks


def test_a_tied_layer_with_a_bias_counts_its_adapter_once():
    net = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    net[1].weight = net[0].weight
    summary = sp.attach_(net, sp.SPLoRA(2))
    assert summary.learned == sp.count(net).learned == 2 * (11 + 6)


def test_a_users_own_child_is_not_taken_for_an_adapter():
    layer = nn.Linear(2, 2)
    layer.weight_adapter = nn.Linear(4, 4)
    assert sp.count(layer).parameters == 6 + 20
    with pytest.raises(AttachmentError, match="an attribute weight_adapter of its own"):
        sp.attach_(layer, sp.SPLoRA(1))


def test_diverged_statistics_are_not_fused():
    net = tiny_cnn()
    sp.attach_(net, sp.SPLoRA(2))
    net[1].running_mean[0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"1\.running_mean"):
        sp.fuse(net)


def test_complex_parameters_are_refused_before_they_learn():
    """No task file could hold them."""
    layer = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(AttachmentError, match=r"complex64.* a task file cannot hold it"):
        sp.attach_(layer, sp.FineTune())
    assert all(p.requires_grad for p in layer.parameters())  # as it was


def test_a_head_without_parameters_is_refused():
    with pytest.raises(TargetError, match="no parameters that could learn"):
        sp.attach_(tiny_cnn(), sp.SPLoRA(2), head="2")


def test_a_class_as_targets_is_refused():
    with pytest.raises(ConfigError, match="targets is the class Linear"):
        sp.attach_(tiny_cnn(), sp.SPLoRA(2), targets=nn.Linear)


def test_a_lazy_layer_elsewhere_is_refused():
    net = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d())
    with pytest.raises(UnsupportedLayerError, match="lazy layer"):
        sp.attach_(net, sp.SPLoRA(1), targets="0")


def test_a_sparse_embedding_learns_densely():
    net = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    sp.attach_(net, sp.SPPaRA())
    net(torch.tensor([1, 2])).sum().backward()
    assert net[0].weight_adapter.residual.grad.abs().sum() > 0


def test_naming_a_head_in_a_deep_network_takes_no_longer_than_not_naming_it():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(400)))
    calls = []
    original = sp.adapters.attach.select_named
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sp.adapters.attach, "select_named", lambda *a: calls.append(a) or original(*a))
        sp.attach_(net, sp.SPLoRA(1), head="399")
    assert len(calls) == 1


@pytest.mark.parametrize("tokens", [3, 400])  # fused and parallel
def test_an_activation_in_place_after_a_linear_layer(tokens):
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)).double()
    sp.attach_(net, sp.SPLoRA(rank=2))
    awaken_(net)
    x = torch.randn(2, tokens, 16, dtype=torch.float64)
    assert torch.allclose(net(x), sp.fuse(net)(x), atol=1e-12)
    net(x).sum().backward()
    assert net[0].weight_adapter.down.grad.abs().sum() > 0
