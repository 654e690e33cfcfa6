"""`prune_`: what it cuts, what it keeps, and how it refuses."""

import copy
import pickle

import pytest
import torch
from support import assert_unchanged, awaken_, snapshot, tiny_cnn
from torch import nn

import spalier as sp
from spalier.errors import PlanError, PruneError
from spalier.pruning import prune

IMAGE = torch.randn(2, 3, 8, 8)


def plan(net, keep=None, example=IMAGE, **options):
    return sp.Plan(sp.trace(net, example), keep or {"0": [1, 2, 5], "3": [0, 4, 7, 11]}, **options)


def test_tensors_and_attributes():
    net = tiny_cnn()
    weight, mean = net[3].weight.detach().clone(), net[1].running_mean.clone()
    sp.prune_(net, plan(net))
    assert (net[0].out_channels, net[3].in_channels, net[3].out_channels, net[8].in_features) == (3, 3, 4, 4)
    assert net[1].num_features == 3
    assert torch.equal(net[3].weight, weight[[0, 4, 7, 11]][:, [1, 2, 5]])
    assert torch.equal(net[1].running_mean, mean[[1, 2, 5]])
    assert sp.kept_units(net) == {"streams": {"0": [1, 2, 5], "3": [0, 4, 7, 11]}, "writers": {}}


def test_the_memory_of_what_is_gone_is_free():
    net = tiny_cnn()
    sp.prune_(net, plan(net))
    for tensor in (*net.parameters(), *net.buffers()):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_units_are_those_of_the_base_however_often_one_prunes():
    net = tiny_cnn()
    weight = net[0].weight.detach().clone()
    structure = sp.trace(net, IMAGE)
    sp.prune_(net, sp.Plan(structure, {"0": [1, 2, 5, 7]}))
    sp.prune_(net, sp.Plan(structure, {"0": [2, 7]}))
    assert torch.equal(net[0].weight, weight[[2, 7]])
    with pytest.raises(PlanError, match="unit 1 of '0' is gone already"):
        sp.prune_(net, sp.Plan(structure, {"0": [1, 2]}))


def test_gradients_are_cut_too():
    net = tiny_cnn()
    net(IMAGE).sum().backward()
    grad = net[0].weight.grad
    sp.prune_(net, plan(net))
    assert torch.equal(net[0].weight.grad, grad[[1, 2, 5]])


def test_pruning_often_holds_on_to_the_base_alone():
    net = tiny_cnn()
    structure = sp.trace(net, IMAGE)
    base = net[3].weight
    sp.attach_(net, sp.SPLoRA(rank=2))
    for kept in (6, 4, 2):
        sp.prune_(net, sp.Plan(structure, {"0": range(kept), "3": range(kept)}))
    held = [t for t in net._spalier.pruned.tensors() if t.dim() == 4]
    assert any(t is base for t in held)
    assert len(held) == 2
    sp.detach_(net)
    assert net[3].weight is base


def test_parameters_stay_the_same_objects():
    net = tiny_cnn()
    before = dict(net.named_parameters())
    sp.prune_(net, plan(net))
    assert all(parameter is before[name] for name, parameter in net.named_parameters())


def test_an_adapted_base_is_not_touched():
    net = tiny_cnn()
    base = dict(net.state_dict(keep_vars=True))
    values = {name: tensor.detach().clone() for name, tensor in base.items()}
    sp.attach_(net, sp.SPLoRA(rank=2), head="8")
    awaken_(net)
    sp.prune_(net, plan(net))
    assert net[3].weight_adapter.down.shape == (2, 3)
    assert net[3].weight_adapter.up.shape == (2, 4)
    sp.detach_(net)
    assert sp.kept_units(net) is None
    assert (net[3].in_channels, net[3].out_channels) == (8, 12)
    for name, tensor in net.state_dict(keep_vars=True).items():
        assert tensor is base[name]
        assert torch.equal(tensor, values[name])


@pytest.mark.parametrize(
    "adapter",
    [sp.SPLoRA(rank=2), sp.SPLoRA(rank=2, kernel="full"), sp.SPPaRA(), sp.LoRA(rank=2), sp.FineTune()],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_every_adapter_is_cut(adapter, groups):
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=groups),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 3, groups=groups),
        nn.Flatten(),
        nn.Linear(4 * 6 * 6, 2),
    ).double()
    example = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    structure = sp.trace(net, example)
    sp.attach_(net, adapter)
    awaken_(net)
    learned = sp.count(net).learned
    sp.prune_(net, sp.Plan(structure, {s.name: range(1, s.size) for s in structure.streams}))
    assert torch.allclose(net(example), sp.fuse(net)(example), atol=1e-10)
    updates = {name: p.shape for name, p in net.named_parameters() if "_adapter." in name}
    if isinstance(adapter, sp.LoRA):  # the baseline: whole for ever
        assert updates["2.weight_adapter.down"] == (2, 8)
    else:
        assert sp.count(net).learned < learned
    net(example).sum().backward()
    assert all(p.grad is not None for p in net.parameters() if p.requires_grad)


def dead_units_(net):
    """Hidden units 1 and 3 do nothing, and never will: what comes in and what goes out is zero."""
    with torch.no_grad():
        net[0].weight[[1, 3]] = 0
        net[0].bias[[1, 3]] = 0
        net[2].weight[:, [1, 3]] = 0


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
        lambda p: torch.optim.Adagrad(p, 0.1),
    ],
    ids=["sgd", "adamw", "rmsprop", "adagrad"],
)
def test_training_goes_on_as_if_nothing_else_had_changed(make):
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    dead_units_(net)
    twin = copy.deepcopy(net)
    data = [torch.randn(8, 4, dtype=torch.float64) for _ in range(6)]
    optimizer, other = make(net.parameters()), make(twin.parameters())
    for step, x in enumerate(data):
        if step == 3:
            keep = [0, 2, 4, 5]
            sp.prune_(net, plan(net, {"0": keep}, x), optimizer=optimizer)
        for each, mover in ((net, optimizer), (twin, other)):
            mover.zero_grad()
            each(x).square().mean().backward()
            mover.step()
    assert torch.allclose(net[0].weight, twin[0].weight[keep], atol=1e-12)
    assert torch.allclose(net[2].weight, twin[2].weight[:, keep], atol=1e-12)
    assert torch.allclose(net[2].bias, twin[2].bias, atol=1e-12)


def test_optimizer_state_of_another_layout_is_refused():
    net = tiny_cnn()
    optimizer = torch.optim.Adafactor(net.parameters())
    net(IMAGE).sum().backward()
    optimizer.step()
    chosen, before = plan(net), snapshot(net)
    with pytest.raises(PruneError, match="Adafactor keeps"):
        sp.prune_(net, chosen, optimizer=optimizer)
    assert_unchanged(net, before)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.one, self.two = (
            nn.Conv2d(3, 6, 1),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.Conv2d(6, 6, 3, padding=1),
        )
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.norm(self.one(x).relu())
        x = x + self.two(x)
        return self.head(x.mean((2, 3)))


FREE = {"stem": [0, 1], "one": [1, 2], "two": [4]}


def test_free_writers_keep_channels_of_their_own():
    net = Residual().double()
    example = IMAGE.double()
    with torch.no_grad():
        wanted = copy.deepcopy(net)
        for layer, keep in ((wanted.stem, [0, 1]), (wanted.one, [1, 2]), (wanted.two, [4])):
            gone = [c for c in range(6) if c not in keep]
            layer.weight[gone] = 0
            layer.bias[gone] = 0
        wanted.norm.weight[[0, 3, 4, 5]] = 0
        wanted.norm.bias[[0, 3, 4, 5]] = 0
        wanted.eval()
    sp.prune_(net, plan(net, FREE, example, writers="free"))
    assert [layer.out_channels for layer in (net.stem, net.one, net.two)] == [2, 2, 1]
    assert net.head.in_features == 4  # the union: 0, 1, 2, 4
    assert torch.allclose(net.eval()(example), wanted(example), atol=1e-12)
    assert sp.kept_units(net)["writers"] == {"stem": [0, 1], "one": [1, 2], "two": [4]}


def test_free_writers_export_compile_copy_and_pickle():
    net = Residual().eval()
    sp.prune_(net, plan(net, FREE, writers="free"))
    wanted = net(IMAGE)
    for other in (
        copy.deepcopy(net),
        pickle.loads(pickle.dumps(net)),
        torch.export.export(net, (IMAGE,)).module(),
        torch.compile(net, backend="eager"),
    ):
        assert torch.allclose(other(IMAGE), wanted, atol=1e-6)
    again = copy.deepcopy(net)
    again.load_state_dict(net.state_dict())


def test_a_writer_must_be_named_as_free():
    net = Residual()
    with pytest.raises(PlanError, match="writers='free'"):
        plan(net, {"one": [0, 1]})


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ({"0": []}, "empties '0'"),
        ({"0": [1, 1]}, "unit 1 of '0' is named twice"),
        ({"0": [8]}, "unit 8 of '0' does not exist"),
        ({"0": [-1]}, "unit -1"),
        ({"0": [0.5]}, "expected whole numbers"),
        ({"0": [True]}, "expected whole numbers"),
        ({"conv1": [0]}, "'conv1' is no stream"),
        ({"1": [0]}, "no stream"),
    ],
)
def test_bad_plans(keep, message):
    with pytest.raises(PlanError, match=message):
        sp.Plan(sp.trace(tiny_cnn(), IMAGE), keep)


def test_a_plan_for_another_network():
    net, other = tiny_cnn(), sp.models.resnet18(classes=2, stem="cifar")
    before = snapshot(other)
    with pytest.raises(PlanError, match="another network"):
        sp.prune_(other, plan(net))
    assert_unchanged(other, before)
    wide = tiny_cnn(classes=9)
    with pytest.raises(PlanError, match=r"8\.weight has shape"):
        sp.prune_(wide, plan(net))


def test_a_network_that_was_changed_since_it_was_traced():
    net = tiny_cnn()
    chosen = plan(net)
    net[3] = nn.Conv2d(8, 10, 3)
    before = snapshot(net)
    with pytest.raises(PlanError, match="changed since it was traced"):
        sp.prune_(net, chosen)
    assert_unchanged(net, before)


class Counts(nn.Module):
    """Its code counts channels, which neither a shape nor a number shows."""

    def __init__(self):
        super().__init__()
        self.one, self.scale, self.two = nn.Conv2d(3, 8, 1), PerChannel(), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        return self.two(self.scale(self.one(x)))


class PerChannel(nn.Module):
    def forward(self, x):
        return x.tanh() if x.shape[1] == 8 else x.sigmoid()


def test_a_mismatch_rolls_everything_back_and_names_the_module():
    net = Counts()
    net(IMAGE).sum().backward()
    grads = [p.grad for p in net.parameters()]
    chosen, before = plan(net, {"one": [0, 1]}), snapshot(net)
    with pytest.raises(PruneError, match=r"scale \(PerChannel\) is the first to differ; nothing was changed") as caught:
        sp.prune_(net, chosen)
    assert "protect=['one'] to select" in str(caught.value)
    assert_unchanged(net, before)
    assert net.one.out_channels == 8
    assert all(p.grad is grad for p, grad in zip(net.parameters(), grads, strict=True))


def test_the_check_would_find_a_wrong_cut(monkeypatch):
    """The comparison can fail: cut one channel too far to the left, and it does."""
    net = tiny_cnn()
    chosen, before = plan(net, {"3": [1, 2, 3]}), snapshot(net)
    right = prune.cut
    monkeypatch.setattr(
        prune, "cut", lambda t, i: right(t, tuple(None if x is None else x - (t.dim() == 2) for x in i))
    )
    with pytest.raises(PruneError, match=r"8 \(Linear\) is the first to differ"):
        sp.prune_(net, chosen)
    assert_unchanged(net, before)


def test_interrupted_in_the_middle(monkeypatch):
    net = tiny_cnn()
    chosen, before = plan(net), snapshot(net)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("spalier.pruning.prune.verify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sp.prune_(net, chosen)
    assert_unchanged(net, before)


class Widened(nn.Module):
    """A module of a user's own that holds a size under a name that nobody could guess."""

    def __init__(self, size):
        super().__init__()
        self.n, self.gain = size, nn.Parameter(torch.randn(size))

    def forward(self, x):
        if x.shape[1] != self.n:
            raise ValueError("other channels")
        return x * self.gain.view(1, -1, 1, 1)


def test_users_extend_the_table():
    net = nn.Sequential(nn.Conv2d(3, 8, 1), Widened(8), nn.Conv2d(8, 2, 1))
    assert sp.trace(net, IMAGE).streams == ()
    sp.resizes(Widened)(lambda module, resize: {"n": len(module.gain)})
    sp.prune_(net, plan(net, {"0": [1, 4]}))
    assert net[1].n == 2


def test_attention_with_fewer_heads_takes_masks():
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).double().eval()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    structure = sp.trace(net, x)
    sp.prune_(net, sp.Plan(structure, {"self_attn": [0, 2]}))
    assert (net.self_attn.num_heads, net.self_attn.head_dim, net.self_attn.embed_dim) == (2, 4, 16)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    whole = net(x, src_key_padding_mask=padding)
    assert torch.isfinite(whole).all()
    shorter = net(x[1:, :3])
    assert torch.allclose(whole[1:, :3], shorter, atol=1e-10)
    first = net(x[:, :1], src_mask=causal[:1, :1])
    assert torch.allclose(net(x, src_mask=causal)[:, :1], first, atol=1e-10)
    with torch.no_grad():
        assert torch.allclose(net(x), net.train(False)(x))


def test_on_the_meta_device():
    with torch.device("meta"):
        net = tiny_cnn()
    sp.prune_(net, plan(net))
    assert net[3].weight.shape == (4, 3, 3, 3)


def test_printed():
    assert str(plan(tiny_cnn())).splitlines() == ["stream  kept  of", "     0     3   8", "     3     4  12"]
