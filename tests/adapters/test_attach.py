"""What `attach_` changes and what it leaves alone; what it refuses."""

import copy
import pickle

import pytest
import torch
from support import assert_unchanged, awaken_, snapshot, tiny_cnn
from torch import nn

import spalier as sp
from spalier.errors import (
    AttachmentError,
    ConfigError,
    NonFiniteError,
    RankError,
    TargetError,
    TiedWeightError,
    UnsupportedLayerError,
)

ADAPTERS = [sp.SPLoRA(2), sp.SPLoRA(2, kernel="full"), sp.SPPaRA(), sp.LoRA(2), sp.FineTune()]


def learning(net):
    return {name for name, p in net.named_parameters() if p.requires_grad}


def train_(net, steps=3):
    net.train()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 3, 6, 6)).square().mean().backward()
        optimizer.step()


def test_adapters_norms_and_head_learn_and_nothing_else():
    net = tiny_cnn()
    sp.attach_(net, sp.SPLoRA(2), head="8")
    adapters = {f"{layer}.weight_adapter.{factor}" for layer in (0, 3) for factor in ("down", "up")}
    norms = {f"{layer}.{key}" for layer in (1, 4) for key in ("weight", "bias")}
    assert learning(net) == adapters | norms | {"8.weight", "8.bias"}


def test_norms_stay_frozen_on_request():
    net = tiny_cnn()
    sp.attach_(net, sp.SPLoRA(2), head="8", norms=False)
    assert not any(name.startswith(("1.", "4.")) for name in learning(net))


def test_classes_names_and_base_keys_stay():
    net = tiny_cnn()
    kinds, keys = [type(m) for m in net], list(net.state_dict())
    sp.attach_(net, sp.SPLoRA(2))
    assert [type(m) for m in net] == kinds
    assert [k for k in net.state_dict() if "_adapter." not in k] == keys


@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_the_network_starts_as_the_base(adapter):
    net = tiny_cnn().eval()
    x = torch.randn(2, 3, 6, 6)
    before = net(x)
    sp.attach_(net, adapter, head="8")
    torch.testing.assert_close(net(x), before, rtol=1e-3, atol=1e-3)  # init_range is 1e-4, not 0


@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_base_tensors_are_not_copied_and_stay_bit_identical_through_training(adapter):
    net = tiny_cnn()
    base = dict(net.state_dict(keep_vars=True))
    values = {key: tensor.detach().clone() for key, tensor in base.items()}
    sp.attach_(net, adapter, head="8")
    if not isinstance(adapter, sp.FineTune):
        assert all(net.get_parameter(k) is base[k] for k in ("0.weight", "0.bias", "3.weight"))
    train_(net)
    sp.fuse(net)
    assert all(torch.equal(base[key], values[key]) for key in base)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_detach_gives_the_original_network_back(adapter):
    net = tiny_cnn().eval()
    x = torch.randn(2, 3, 6, 6)
    output, before = net(x), snapshot(net)
    sp.attach_(net, adapter, head="8")
    train_(net)
    sp.detach_(net)
    net.eval()
    assert_unchanged(net, before)
    assert torch.equal(net(x), output)


def test_detach_follows_a_network_that_was_moved():
    net = tiny_cnn()
    values = [p.detach().clone() for p in net.parameters()]
    sp.attach_(net, sp.SPLoRA(2), head="8")
    net.double()
    sp.detach_(net)
    for parameter, value in zip(net.parameters(), values, strict=True):
        assert torch.equal(parameter, value.double())


@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_fused_network_is_plain_and_equal_to_rounding(adapter):
    net = tiny_cnn().double()
    keys = list(net.state_dict())
    sp.attach_(net, adapter, head="8")
    awaken_(net)
    net.double().eval()
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    before = snapshot(net)
    plain = sp.fuse(net)
    torch.testing.assert_close(plain(x), net(x), rtol=1e-12, atol=1e-12)
    assert_unchanged(net, before)
    assert list(plain.state_dict()) == keys
    assert all(p.requires_grad for p in plain.parameters())
    assert not any("spalier" in type(v).__module__ for m in plain.modules() for v in m.__dict__.values())
    shared = {t.data_ptr() for t in net.state_dict().values()} & {t.data_ptr() for t in plain.state_dict().values()}
    assert not shared


def test_what_was_frozen_before_is_frozen_after():
    net = tiny_cnn()
    net[0].requires_grad_(False)
    net[1].weight.requires_grad_(False)
    flags = [p.requires_grad for p in net.parameters()]
    sp.attach_(net, sp.SPLoRA(2), head="8")
    assert [p.requires_grad for p in sp.fuse(net).parameters()] == flags
    sp.detach_(net)
    assert [p.requires_grad for p in net.parameters()] == flags


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_adapters_follow_the_layers_dtype(dtype):
    net = tiny_cnn().to(dtype)
    sp.attach_(net, sp.SPLoRA(2), head="8")
    assert {p.dtype for p in net.parameters()} == {dtype}
    awaken_(net, 0.05)
    net.eval()
    x = torch.randn(2, 3, 6, 6, dtype=dtype)
    torch.testing.assert_close(sp.fuse(net)(x), net(x), rtol=0.05, atol=0.05)  # half precision rounds twice


def test_adapters_follow_the_layers_device():
    with torch.device("meta"):
        net = tiny_cnn()
    sp.attach_(net, sp.SPLoRA(2), head="8")
    assert {p.device.type for p in net.parameters()} == {"meta"}
    assert net(torch.empty(2, 3, 6, 6, device="meta")).shape == (2, 3)
    assert {p.device.type for p in sp.fuse(net).parameters()} == {"meta"}


def test_ranks_are_taken_as_asked_even_beyond_a_stem():
    net = tiny_cnn()
    summary = sp.attach_(net, sp.SPLoRA(32), head="8")
    assert net[0].weight_adapter.rank == 32
    assert summary.rows[0].learned == 32 * (3 + 8)
    assert summary.rows[0].is_dear
    assert "(!)" in str(summary)


def test_a_fraction_is_of_the_largest_usable_rank():
    net = nn.Sequential(nn.Linear(8, 20), nn.Linear(20, 4))
    sp.attach_(net, sp.SPLoRA(0.5))
    assert [layer.weight_adapter.rank for layer in net] == [4, 2]


@pytest.mark.parametrize(
    ("layer", "asked", "kernel", "rank"),
    [
        (nn.Conv2d(8, 8, 3, groups=8), 8, "center", 1),
        (nn.Conv2d(8, 16, 3, groups=8), 8, "center", 1),
        (nn.Conv2d(8, 16, 3, groups=8), 8, "full", 2),
        (nn.Conv2d(8, 16, 3, groups=2), 8, "center", 4),
        (nn.Conv2d(8, 16, 3, groups=2), 3, "center", 3),
        (nn.ConvTranspose1d(6, 4, 3, groups=2), 5, "center", 2),
    ],
)
def test_a_grouped_layer_takes_no_more_than_its_groups_can_use(layer, asked, kernel, rank):
    sp.attach_(layer, sp.SPLoRA(asked, kernel=kernel))
    assert layer.weight_adapter.rank == rank


@pytest.mark.parametrize("kernel", ["center", "full"])
def test_cap_lowers_each_rank_to_the_largest_that_pays(kernel):
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 6, 1), nn.Conv2d(6, 1, 1), nn.Linear(100, 100))
    summary = sp.attach_(net, sp.SPLoRA(32, cap=True, kernel=kernel))
    by_name = {row.name: row for row in summary.rows}
    assert not any(row.is_dear for row in summary.rows)
    # stem: 1728 weights; (3 + 64) r, at most 3 useful; whole kernel (27 + 64) r
    assert by_name["0"].rank == (3 if kernel == "center" else 18)
    assert by_name["1"].rank == 5  # 384 // 70
    assert by_name["2"].learns == "frozen (no rank pays)"  # 6 weights, 7 for rank 1
    assert not net[2].weight.requires_grad
    assert by_name["3"].rank == 32


def test_summary_says_what_learns():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.LSTM(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    summary = sp.attach_(net, sp.SPLoRA(1), head="3")
    assert [(row.name, row.learns) for row in summary.rows] == [
        ("0", "adapter"),
        ("1", "frozen"),
        ("2", "norm"),
        ("3", "head"),
    ]
    assert summary.learned == sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert f"learned: {summary.learned} of {summary.parameters}" in str(summary)


def test_fine_tuning_learns_everything_by_default():
    net = sp.models.resnet18(classes=10, stem="cifar")
    assert sp.attach_(net, sp.FineTune(), head="fc").learned == 11_173_962
    assert learning(net) == set(dict(net.named_parameters()))


# Targets


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        (None, ["a.0", "a.1", "b"]),
        ("b", ["b"]),
        ("a", ["a.0", "a.1"]),
        ("a.*", ["a.0", "a.1"]),
        ("*.1", ["a.1"]),
        (["b", "a.0"], ["a.0", "b"]),
        (lambda name, module: isinstance(module, nn.Linear) and module.out_features == 5, ["b"]),
    ],
)
def test_targets(targets, adapted):
    net = nn.ModuleDict({"a": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), "b": nn.Linear(4, 5)})
    summary = sp.attach_(net, sp.SPLoRA(1), targets=targets)
    assert [row.name for row in summary.rows if row.learns == "adapter"] == adapted
    assert not any(p.requires_grad for n, p in net.named_parameters() if "_adapter." not in n)


def test_fine_tuning_by_target_leaves_the_rest_frozen():
    net = tiny_cnn()
    sp.attach_(net, sp.FineTune(), targets="3", norms=False)
    assert learning(net) == {"3.weight"}


# Ties


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.body(self.embed(x)))


@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_tied_weights_stay_tied(adapter):
    net = Tied().double()
    sp.attach_(net, adapter)
    awaken_(net)
    x = torch.tensor([[1, 4, 10]])
    assert net.out.weight is net.embed.weight
    net(x).square().sum().backward()
    plain = sp.fuse(net)
    assert plain.out.weight is plain.embed.weight
    torch.testing.assert_close(plain(x), net(x), rtol=1e-12, atol=1e-12)
    sp.detach_(net)
    assert net.out.weight is net.embed.weight


def test_the_one_update_of_a_tied_weight_gathers_both_gradients():
    net = Tied().double()
    summary = sp.attach_(net, sp.SPLoRA(2))
    awaken_(net)
    assert net.out.weight_adapter is net.embed.weight_adapter
    assert summary.learned == sum(p.numel() for p in net.parameters() if p.requires_grad)
    x = torch.tensor([[1, 4, 10]])
    update = net.embed.weight_adapter
    dense = net.embed.weight.detach() + update.down.T @ update.up
    hidden = net.body.weight_adapter(net.body.weight)
    want = (dense[x] @ hidden.T + net.body.bias) @ dense.T
    for a, b in zip(
        torch.autograd.grad(net(x).sum(), list(update.parameters())),
        torch.autograd.grad(want.sum(), list(update.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{"targets": "embed"}, {"head": "out"}], ids=str)
def test_tied_weights_are_not_torn_apart(options):
    net = Tied()
    before = snapshot(net)
    with pytest.raises(TiedWeightError, match=r"embed\.weight and out\.weight share one weight"):
        sp.attach_(net, sp.SPLoRA(2), **options)
    assert_unchanged(net, before)


def test_a_tied_head_can_be_named_whole():
    net = Tied()
    sp.attach_(net, sp.SPLoRA(2), head=["out", "embed"])
    assert net.out.weight is net.embed.weight
    assert net.out.weight.requires_grad


def test_a_module_with_two_names_is_adapted_once():
    shared = nn.Linear(4, 4).double()
    net = nn.Sequential(shared, nn.ReLU(), shared)
    sp.attach_(net, sp.SPLoRA(2), targets="2")
    awaken_(net)
    x = torch.randn(3, 4, dtype=torch.float64)
    weight = shared.weight_adapter(shared.weight)
    want = torch.relu(x @ weight.T + shared.bias) @ weight.T + shared.bias
    leaves = list(shared.weight_adapter.parameters())
    torch.testing.assert_close(net(x), want, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(net(x).sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


# Copies


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_an_adapted_network_can_be_copied(clone):
    net = tiny_cnn().double().eval()
    sp.attach_(net, sp.SPLoRA(2), head="8")
    awaken_(net)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    twin = clone(net)
    assert torch.equal(twin(x), net(x))
    awaken_(twin, 2.0)
    assert not torch.equal(twin(x), net(x))
    torch.testing.assert_close(sp.fuse(twin)(x), twin(x), rtol=1e-12, atol=1e-12)
    sp.detach_(twin)
    assert net[0].weight_adapter is not None


def test_state_dict_round_trip():
    net, other = tiny_cnn().eval(), tiny_cnn().eval()
    for each in (net, other):
        sp.attach_(each, sp.SPLoRA(2), head="8")
    awaken_(net)
    other.load_state_dict(net.state_dict())
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(other(x), net(x))


# Refusals


def weight_normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("make", "adapter", "options", "error", "words"),
    [
        (tiny_cnn, sp.SPLoRA(2), {"targets": "conv9"}, TargetError, "'conv9' matches no module"),
        (tiny_cnn, sp.SPLoRA(2), {"targets": ["0", "nope.*"]}, TargetError, "'nope.*' matches no module"),
        (tiny_cnn, sp.SPLoRA(2), {"head": "fc"}, TargetError, "head 'fc' matches no module"),
        (tiny_cnn, sp.SPLoRA(2), {"targets": "2"}, UnsupportedLayerError, "ReLU"),
        (tiny_cnn, sp.SPLoRA(2), {"targets": "8", "head": "8"}, UnsupportedLayerError, "outside of the head"),
        (tiny_cnn, sp.SPLoRA(2), {"targets": lambda n, m: False}, TargetError, "predicate chose no layer"),
        (tiny_cnn, sp.SPLoRA(2), {"targets": 3}, ConfigError, "targets is 3"),
        (tiny_cnn, sp.SPLoRA(2), {"targets": []}, ConfigError, "targets is \\[\\]"),
        (tiny_cnn, sp.SPLoRA(2), {"norms": "yes"}, ConfigError, "norms is 'yes'"),
        (tiny_cnn, sp.SPLoRA, {}, ConfigError, "expected one such as SPLoRA"),
        (tiny_cnn, "lora", {}, ConfigError, "adapter is 'lora'"),
        (tiny_cnn, sp.SPLoRA(0.1), {}, RankError, "0 \\(Conv2d\\): the fraction 0.1 of 3"),
        (
            lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)),
            sp.SPLoRA(2),
            {},
            TargetError,
            "nothing to adapt",
        ),
        (lambda: nn.Sequential(nn.Linear(1, 1)), sp.SPLoRA(2, cap=True), {}, TargetError, "no rank pays"),
        (lambda: nn.Sequential(nn.ReLU()), sp.FineTune(), {}, TargetError, "nothing to fine-tune"),
        (weight_normed, sp.SPLoRA(1), {"targets": "0"}, UnsupportedLayerError, "0 .*computed, not a parameter"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), sp.SPLoRA(1), {}, UnsupportedLayerError, "lazy layer"),
        (lambda: nn.Embedding(3, 3, max_norm=1.0), sp.SPLoRA(1), {}, UnsupportedLayerError, "max_norm"),
    ],
)
def test_bad_input_is_refused_and_nothing_changes(make, adapter, options, error, words):
    net = make()
    lazy = any(isinstance(p, nn.parameter.UninitializedParameter) for p in net.parameters())
    before = None if lazy else snapshot(net)
    with pytest.raises(error, match=words):
        sp.attach_(net, adapter, **options)
    if before is not None:
        assert_unchanged(net, before)


@pytest.mark.parametrize("key", ["0.weight", "3.weight", "4.weight", "8.bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused(key, value):
    net = tiny_cnn()
    with torch.no_grad():
        net.get_parameter(key).view(-1)[-1] = value
    before = snapshot(net)
    with pytest.raises(NonFiniteError, match=key):
        sp.attach_(net, sp.SPLoRA(2), head="8")
    assert_unchanged(net, before)


def test_adapting_twice_is_refused():
    net = tiny_cnn()
    sp.attach_(net, sp.SPLoRA(2), head="8")
    before = snapshot(net)
    for again in (net, nn.Sequential(net), net[0]):
        with pytest.raises(AttachmentError, match="already"):
            sp.attach_(again, sp.SPLoRA(2))
    assert_unchanged(net, before)


@pytest.mark.parametrize("call", [sp.fuse, sp.detach_])
def test_a_network_that_is_not_adapted_is_refused(call):
    with pytest.raises(AttachmentError, match="not adapted"):
        call(tiny_cnn())
    with pytest.raises(AttachmentError, match="not adapted"):
        call("resnet")


def test_an_attribute_in_the_adapters_place_is_refused():
    net = tiny_cnn()
    net[3].weight_adapter = "mine"
    before = snapshot(net)
    with pytest.raises(AttachmentError, match="3 has an attribute weight_adapter of its own"):
        sp.attach_(net, sp.SPLoRA(2))
    assert_unchanged(net, before)


def test_a_forward_on_the_instance_is_not_displaced():
    net = tiny_cnn()
    net[3].forward = net[3].forward
    before = snapshot(net)
    with pytest.raises(UnsupportedLayerError, match=r"3 .* has a forward of its own on the instance"):
        sp.attach_(net, sp.SPLoRA(2))
    assert_unchanged(net, before)
    sp.attach_(net, sp.SPLoRA(2), targets="0")


def test_a_wrapper_is_told_apart():
    net = tiny_cnn()
    sp.attach_(net, sp.SPLoRA(2))
    with pytest.raises(AttachmentError, match="wraps the adapted network"):
        sp.fuse(nn.DataParallel(net))


def test_a_tensor_is_not_a_network():
    with pytest.raises(ConfigError, match="net is a Tensor"):
        sp.attach_(torch.ones(2), sp.SPLoRA(2))


def test_fusing_what_diverged_is_refused():
    net = tiny_cnn()
    sp.attach_(net, sp.SPLoRA(2), head="8")
    with torch.no_grad():
        net[3].weight_adapter.up[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"3\.weight_adapter\.up"):
        sp.fuse(net)


def test_overflow_while_fusing_is_refused():
    net = nn.Sequential(nn.Linear(2, 2)).half()
    sp.attach_(net, sp.SPLoRA(1))
    with torch.no_grad():
        for factor in net[0].weight_adapter.parameters():
            factor.fill_(300.0)  # 90,000 is past the largest float16
    with pytest.raises(NonFiniteError, match=r"beyond torch\.float16"):
        sp.fuse(net)


@pytest.mark.parametrize("rank", [0, -1, 0.0, -0.5, 1.5, float("nan"), True, "8", None])
def test_bad_ranks(rank):
    with pytest.raises(RankError, match="rank is"):
        sp.SPLoRA(rank)


@pytest.mark.parametrize(
    "options",
    [
        {"init_range": -1.0},
        {"init_range": float("nan")},
        {"init_range": "x"},
        {"kernel": "middle"},
        {"cap": 1},
    ],
    ids=str,
)
def test_bad_options(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is"):
        sp.SPLoRA(8, **options)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")  # still in use
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm, nn.utils.spectral_norm])
def test_a_computed_weight_is_left_frozen_and_listed(norm):
    net = nn.Sequential(norm(nn.Linear(3, 3)), nn.Linear(3, 3))
    summary = sp.attach_(net, sp.SPLoRA(1))
    assert {row.name: row.learns for row in summary.rows if row.name in "01"} == {
        "0": "frozen (its weight is computed)",
        "1": "adapter",
    }
    x = torch.randn(2, 3)
    torch.testing.assert_close(sp.fuse(net)(x), net(x))


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")])
@pytest.mark.parametrize("example", [None, torch.zeros(2, 3, 8, 8)])
def test_what_wraps_a_network_is_refused_before_anything_is_learned(wrap, example):
    """Its tensors have other names there, and no base could be built from a task with these."""
    net = tiny_cnn()
    with pytest.raises(AttachmentError, match=r"wraps the network .*Sequential.* attach_ on the network itself"):
        sp.attach_(wrap(net), sp.SPLoRA(rank=2), example=example)
    sp.attach_(net, sp.SPLoRA(rank=2))  # nothing was changed
