"""LRP against the paper's fixtures, slow oracles and zennit; what is sent arrives; what has no rule is refused."""

import copy
from contextlib import nullcontext, suppress
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_unchanged, snapshot, tiny_cnn
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from trained import batches, trained
from zennit.composites import LayerMapComposite
from zennit.layer import Sum
from zennit.rules import AlphaBeta, Epsilon, Norm, Pass, ZPlus
from zennit.types import Activation, AvgPool, Convolution

import spalier as sp
from spalier.adapters.attachment import attachment_of
from spalier.criteria.lrp import fold_norms_
from spalier.criteria.probe import Probe
from spalier.criteria.relevance import EPSILON, Relevance, latest
from spalier.errors import ScoreError

CONVOLUTIONS = {
    (1, False): F.conv1d,
    (2, False): F.conv2d,
    (1, True): F.conv_transpose1d,
    (2, True): F.conv_transpose2d,
}


def real(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def leaf(values):
    return torch.as_tensor(values, dtype=torch.float64).clone().requires_grad_()


def shared_out(run, *leaves, relevance=None):
    """What was sent, and the relevance of each leaf; the values have to be those of a plain run."""
    plain = run(*[x.detach().clone() for x in leaves])
    with Relevance():
        out = run(*leaves)
    torch.testing.assert_close(out.detach(), plain, rtol=1e-12, atol=1e-12)
    sent = torch.rand(out.shape, dtype=torch.float64) if relevance is None else leaf(relevance).detach()
    out.backward(sent)
    return sent, *[x.grad for x in leaves]


def assert_conserved(run, *leaves, rtol=1e-4):
    sent, *got = shared_out(run, *leaves)
    torch.testing.assert_close(sum(r.sum() for r in got if r is not None), sent.sum(), rtol=rtol, atol=0)
    return got


def relevance_at(net, x, sent=None, context=None, names=None):
    """The relevance at the outputs of modules, all convolutions unless named, and at the input."""
    seen = {}

    def tap(name):
        def hook(module, args, output):
            output.register_hook(lambda r: seen.__setitem__(name, r.clone()))

        return hook

    chosen = {n: m for n, m in net.named_modules() if (n in names if names else isinstance(m, Convolution))}
    handles = [module.register_forward_hook(tap(name)) for name, module in chosen.items()]
    x = x.detach().clone().requires_grad_()
    with context or nullcontext():  # zennit's rules are gone when its context is
        with nullcontext() if context else Relevance():
            out = net(x)
        logits = out.detach()
        out.backward(F.one_hot(logits.argmax(1), logits.shape[1]).to(x) if sent is None else sent)
    for handle in handles:
        handle.remove()
    return {**seen, "input": x.grad}, logits


def stable(z):
    return torch.where(z < 0, z - EPSILON, z + EPSILON)


def by_contribution(contributions, z, relevance):
    """Each input's share of each output, added up: contributions are (inputs, outputs)."""
    return (contributions * (relevance / stable(z))).sum(1)


def matrix_of(linear, shape):
    """What a linear map does to each unit vector, one at a time: (inputs, outputs)."""
    size = int(np.prod(shape))
    return torch.stack([linear(unit.view(1, *shape)).flatten() for unit in torch.eye(size).double()])


def slow_convolution(linear, x, relevance):
    """Alpha 1, beta 0, from the full matrix, sample by sample."""
    matrix = matrix_of(linear, x.shape[1:])
    rows = []
    for sample, above in zip(x, relevance, strict=True):
        positive = (sample.flatten()[:, None] * matrix).clamp(min=0)
        rows.append(by_contribution(positive, positive.sum(0), above.flatten()).view(sample.shape))
    return torch.stack(rows)


# the fixtures of the notes


def test_the_convolution_of_the_notes():
    x, weight = leaf([[[[2.0]], [[-1.0]]]]), torch.tensor([[1.0, -2.0], [3.0, 1.0]]).double()[..., None, None]
    with Relevance():
        out = F.conv2d(x, weight, torch.tensor([5.0, -7.0]).double())
    out.backward(torch.tensor([4.0, 6.0]).double().view(1, 2, 1, 1))
    torch.testing.assert_close(x.grad.flatten(), torch.tensor([8.0, 2.0]).double(), rtol=1e-6, atol=0)


def test_the_linear_layer_of_the_notes():
    x = leaf([[3.0, 1.0]])
    with Relevance():
        out = F.linear(x, torch.tensor([[1.0, -2.0]]).double(), torch.tensor([0.5]).double())
    out.backward(torch.ones(1, 1).double())
    wanted = torch.tensor([[1.9999987, -1.3333324]]).double()
    torch.testing.assert_close(x.grad, wanted, rtol=0, atol=6e-8)


def test_the_sum_of_the_notes():
    a, b = leaf([3.0]), leaf([-1.0])
    with Relevance():
        out = a + b
    out.backward(torch.ones(1).double())
    got = torch.cat([a.grad, b.grad])
    torch.testing.assert_close(got, torch.tensor([1.4999993, -0.4999998]).double(), rtol=0, atol=6e-8)


# one convolution against the full matrix


@st.composite
def convolutions(draw):
    dimensions, transposed = draw(st.sampled_from(sorted(CONVOLUTIONS)))
    groups, kernel = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    inputs, outputs = (groups * draw(st.integers(1, 2)) for _ in range(2))
    stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    reach = dilation * (kernel - 1)
    padding = draw(st.integers(0, reach // 2 if transposed else 2))
    smallest = 1 + (2 * padding if transposed else max(0, reach - 2 * padding))
    size = draw(st.integers(smallest, smallest + 2))
    torch.manual_seed(draw(st.integers(0, 1000)))
    sides = [kernel] * dimensions
    weight = real(*((inputs, outputs // groups) if transposed else (outputs, inputs // groups)), *sides)
    x = real(2, inputs, *[size] * dimensions)
    sign = draw(st.sampled_from(["any", "positive", "negative", "sparse"]))
    x = {"any": x, "positive": x.abs(), "negative": -x.abs(), "sparse": x * (x > 0.7)}[sign]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return CONVOLUTIONS[dimensions, transposed], x, weight, real(outputs), options


@settings(max_examples=120, deadline=None)
@given(convolutions())
def test_any_convolution_shares_out_by_contributions_of_the_right_sign(drawn):
    convolve, x, weight, bias, options = drawn
    sent, got = shared_out(lambda v: convolve(v, weight, bias, **options), x.clone().requires_grad_())
    wanted = slow_convolution(lambda v: convolve(v, weight, **options), x, sent)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def test_a_convolution_with_a_computed_kernel_is_refused():
    with Relevance(), pytest.raises(ScoreError, match="kernel is computed"):
        F.conv2d(leaf(real(1, 2, 4, 4)), leaf(real(3, 2, 3, 3)))


# whole networks against zennit


class Residual(nn.Module):
    """A block that zennit understands: every operation is a module."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )
        self.sum = Sum()
        self.relu2 = nn.ReLU()

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        return self.relu2(self.sum(torch.stack([out, self.shortcut(x)], -1)))


def plain_cnn():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3),
        nn.ReLU(),
        nn.AvgPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(8 * 2 * 2, 10),
        nn.ReLU(),
        nn.Linear(10, 4),
    )


def odd_cnn():
    """Grouped, depthwise, strided, padded and dilated; signals of both signs."""
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8),
        nn.GELU(),
        nn.Conv2d(8, 12, (3, 1), padding=(2, 0), dilation=(2, 1), bias=False),
        nn.LeakyReLU(),
        nn.ConvTranspose2d(12, 6, 3, stride=2, padding=1, groups=3),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d((2, 3)),
        nn.Flatten(),
        nn.Linear(36, 4),
    )


def residual_net():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        Residual(6, 6, 1),
        Residual(6, 10, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(10, 4),
    )


def by_zennit(rule):
    """Zennit with the notes' epsilon; biases of convolutions are left out, those of linear layers are not."""
    layers = [
        (Convolution, rule),
        (nn.Linear, Epsilon(epsilon=EPSILON)),
        ((AvgPool, Sum), Norm(stabilizer=EPSILON)),
        (Activation, Pass()),
    ]
    return LayerMapComposite(layers)


RULES = {
    "zplus": lambda: ZPlus(stabilizer=EPSILON, zero_params="bias"),
    "alpha1_beta0": lambda: AlphaBeta(1.0, 0.0, stabilizer=EPSILON, zero_params="bias"),
}


def settled(net, x):
    """In float64, with statistics and biases that matter, and norms that turn some channels over."""
    zoo.randomise_(net)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.data[::3] *= -1
    return zoo.settle_(net.eval(), x.float()).double().requires_grad_(False)


def folded_by_torch(net):
    """Zennit's own way to merge norms leaves their epsilon in; PyTorch's does not."""
    net = copy.deepcopy(net)
    for parent in net.modules():
        children = list(parent.named_children())
        for (name, layer), (after, norm) in pairwise(children):
            if isinstance(norm, nn.BatchNorm2d):
                setattr(parent, name, fuse_conv_bn_eval(layer, norm))
                setattr(parent, after, nn.Identity())
    return net


def folded(net, structure=None):
    probe = Probe(net, structure or attachment_of(net).structure)
    twin = probe.twin()
    fold_norms_(twin, probe)
    return twin.eval()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("build", [plain_cnn, odd_cnn, residual_net])
def test_every_convolution_gets_what_zennit_gives_it(build, rule):
    x = real(5, 4 if build is odd_cnn else 3, 10, 10)
    net = settled(build(), x)
    twin = folded(net, sp.trace(net, x))
    sent = real(5, 4)
    got, logits = relevance_at(twin, x, sent)
    plain = folded_by_torch(net)
    wanted, same = relevance_at(plain, x, sent, by_zennit(RULES[rule]()).context(plain))
    torch.testing.assert_close(logits, same, rtol=1e-10, atol=1e-10)
    assert got.keys() == wanted.keys()
    for name, relevance in wanted.items():
        assert relevance.abs().max() > 0
        size = float(relevance.abs().max())
        torch.testing.assert_close(got[name] / size, relevance / size, rtol=1e-9, atol=1e-9, msg=name)


def test_scores_are_those_of_zennit():
    x, y = real(6, 3, 10, 10), torch.tensor([0, 1, 2, 3, 0, 1])
    net = settled(residual_net(), x)
    scores = sp.score(net, [(x[:4], y[:4]), (x[4:], y[4:])], "lrp", structure=sp.trace(net, x))
    sent = F.one_hot(y, 4).double()
    plain = folded_by_torch(net)
    wanted, _ = relevance_at(plain, x, sent, by_zennit(RULES["zplus"]()).context(plain))
    layers = [layer for parts in scores.layers.values() for layer in parts]
    assert sorted(layers) == sorted(name for name in wanted if name != "input")
    for layer in layers:
        np.testing.assert_allclose(scores[layer], wanted[layer].abs().sum((2, 3)).mean(0), rtol=1e-7)


# conservation on real networks


def held_by_the_dead(layer, x, relevance):
    """What each sample's relevance loses at a convolution: outputs to which nothing contributes keep what they hold."""
    parts = [(x.clamp(min=0), layer.weight.clamp(min=0)), (x.clamp(max=0), layer.weight.clamp(max=0))]
    z = sum(layer._conv_forward(part, weight, None) for part, weight in parts)
    return (relevance * (z == 0)).flatten(1).sum(1)


def check_conservation(twin, x, cuts, head):
    """At each full cut of the network arrives what the head sends, but for what dead outputs above it hold."""
    inputs = {}
    layers = {name: m for name, m in twin.named_modules() if isinstance(m, nn.Conv2d)}
    handles = [
        m.register_forward_pre_hook(lambda m, args, name=name: inputs.__setitem__(name, args[0].detach()))
        for name, m in layers.items()
    ]
    seen, logits = relevance_at(twin, x, names={*layers, *cuts})
    for handle in handles:
        handle.remove()
    chosen = logits.argmax(1)
    z = logits.gather(1, chosen[:, None])[:, 0]
    arrived = (z - head.bias[chosen]) / stable(z)  # the head's bias keeps its share
    held = torch.zeros_like(arrived)
    waiting = [*layers]
    for cut, above in reversed(cuts.items()):
        for name in [name for name in waiting if name.startswith(above)]:
            waiting.remove(name)
            held += held_by_the_dead(layers[name], inputs[name], seen[name])
        total = seen[cut].flatten(1).sum(1)
        torch.testing.assert_close(total, arrived - held, rtol=1e-4, atol=0, msg=cut)  # epsilons of sums
    assert not waiting
    return held


def test_what_is_sent_arrives_at_every_cut_of_a_trained_network():
    x = torch.cat([images for images, _ in batches(1, 32)]).double()
    twin = folded(trained(0).double())
    cuts = {
        "input": ("conv1",),
        "bn1": ("layers.0",),
        "layers.0": ("layers.1",),
        "layers.1": ("layers.2",),
        "layers.2": ("none",),
    }
    held = check_conservation(twin, x, cuts, twin.fc)
    assert held.abs().max() > 1e-3  # far more than the tolerance: the account is needed, and right


def test_what_is_sent_arrives_at_every_cut_of_resnet18():
    from torchvision.models import resnet18

    net = resnet18(num_classes=10)
    for _ in range(3):
        net(torch.randn(8, 3, 64, 64))
    net = net.double().eval()
    x = real(3, 3, 64, 64)
    twin = folded(net, sp.trace(net, x))
    blocks = [f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]
    names = ["maxpool", *blocks]
    cuts = {"input": ("conv1",), **dict(zip(names, [*blocks, "none"], strict=True))}
    check_conservation(twin, x, cuts, twin.fc)


def test_an_output_to_which_nothing_contributes_swallows_its_relevance():
    x = leaf(torch.ones(1, 1, 1, 2))
    weight = torch.tensor([-1.0, 2.0]).double().view(2, 1, 1, 1)
    _, got = shared_out(
        lambda v: F.conv2d(v, weight, torch.ones(2).double()), x, relevance=torch.ones(1, 2, 1, 2)
    )
    torch.testing.assert_close(got, torch.ones_like(got), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        "torchvision/densenet121",
        "torchvision/efficientnet_b0",
        "torchvision/swin_t",
        "torchvision/vit_b_16",
        "timm/nf_resnet26",
    ],
)
def test_folded_and_under_relevance_a_network_computes_what_it_did(name):
    check_values(zoo.by_name(name))


@pytest.mark.parametrize("name", ["timm/dm_nfnet_f0", "made/in_place"])
def test_a_network_that_drops_what_it_writes_in_place_is_understood_or_refused(name):
    with suppress(ScoreError):
        check_values(zoo.by_name(name))


def check_values(entry):
    net, example = entry.make().double(), entry.example().double()
    twin = folded(net, sp.trace(net, example))
    with torch.no_grad():
        wanted = net(example)
    with Relevance():
        found = twin(example.requires_grad_())
    assert found.requires_grad
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-8, atol=1e-8)


# operation by operation


def test_a_concatenation_hands_each_part_its_own():
    a, b = leaf(real(2, 3, 4, 4)), leaf(real(2, 5, 4, 4))
    sent, first, second = shared_out(lambda a, b: torch.cat([a, b], 1), a, b)
    assert torch.equal(torch.cat([first, second], 1), sent)


@pytest.mark.parametrize("size", [{"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}])
def test_max_pooling_gives_all_to_the_winner(size):
    x = leaf(real(2, 3, 6, 6))
    sent, got = shared_out(lambda v: F.max_pool2d(v, **size), x)
    _, winners = F.max_pool2d(x.detach(), **size, return_indices=True)
    wanted = torch.zeros(2, 3, 36).double().scatter_add_(2, winners.flatten(2), sent.flatten(2))
    torch.testing.assert_close(got, wanted.view_as(got))


@pytest.mark.parametrize(
    "pool",
    [
        lambda v: F.avg_pool2d(v, 3, 2, 1),
        lambda v: F.adaptive_avg_pool2d(v, (2, 3)),
        lambda v: v.mean((2, 3)),
        lambda v: v.sum(1),
        lambda v: F.interpolate(v, scale_factor=2, mode="bilinear"),
    ],
)
def test_averages_and_sums_share_out_by_contribution(pool):
    x = leaf(real(2, 3, 6, 6))
    sent, got = shared_out(pool, x)
    matrix = matrix_of(pool, (3, 6, 6))
    for i in range(2):
        contributions = x[i].detach().flatten()[:, None] * matrix
        wanted = by_contribution(contributions, contributions.sum(0), sent[i].flatten())
        torch.testing.assert_close(got[i].flatten(), wanted, rtol=1e-7, atol=1e-9)


def residual_in_place(x):
    out = F.conv2d(x, kernel(3, 3), padding=1)
    out += x
    return F.relu(out, inplace=True)


def kernel(outputs, inputs):
    """Above zero, so that nothing is dead."""
    return torch.linspace(0.1, 1, outputs * inputs * 9).double().view(outputs, inputs, 3, 3)


def test_a_residual_sum_in_place_conserves():
    assert_conserved(residual_in_place, leaf(real(2, 3, 5, 5).abs()))


def test_a_residual_sum_in_place_shares_by_size():
    x = leaf([[2.0, -1.0, 5.0]])

    def run(v):
        out = v * 3
        out += v
        return out

    sent, got = shared_out(run, x)
    torch.testing.assert_close(got, sent, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "activation",
    [
        lambda v: F.relu(v, inplace=True),
        torch.relu_,
        nn.ReLU(inplace=True),
        nn.Hardswish(inplace=True),
        lambda v: F.leaky_relu(v, 0.2, True),
        nn.GELU(),
        lambda v: F.layer_norm(v, v.shape[1:]),
        lambda v: v.clamp_(-1, 1),
        nn.BatchNorm2d(3).double().eval(),
        lambda v: -v,
        lambda v: v + 3,
        lambda v: 2 * v,
        lambda v: v / 7,
    ],
)
def test_activations_norms_and_numbers_pass_relevance_on(activation):
    x = leaf(real(2, 3, 4, 4))
    sent, got = shared_out(lambda v: activation(v * 1), x)
    assert torch.equal(got, sent)


@pytest.mark.parametrize(
    "operation",
    [
        lambda a, b: torch.add(a, b, alpha=3),
        lambda a, b: a.add(b, alpha=0.25),
        lambda a, b: a - b,
        lambda a, b: torch.sub(a, b, alpha=3),
        lambda a, b: torch.rsub(a, b, alpha=3),
        lambda a, b: torch.addcmul(a, b, torch.full_like(b, 2.0), value=3),
        lambda a, b: sum([a, b]),
        lambda a, b: a * b,
        lambda a, b: a @ b,
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        lambda a, b: a * torch.sigmoid(a) + b,
    ],
    ids=[
        "add_3",
        "add_quarter",
        "sub",
        "sub_3",
        "rsub_3",
        "addcmul_3",
        "sum",
        "mul",
        "matmul",
        "einsum",
        "swish",
    ],
)
def test_two_signals_share_all_there_is(operation):
    a, b = leaf(real(2, 4, 4).abs() + 5), leaf(real(2, 4, 4).abs() + 0.1)
    assert_conserved(operation, a, b)


@pytest.mark.parametrize("factor", [0.5, 2.0, -1.0])
def test_a_scaled_term_gets_its_share_of_the_sum_and_no_more(factor):
    a, b = leaf([4.0]), leaf([1.0])
    _, first, second = shared_out(lambda a, b: torch.add(a, b, alpha=factor), a, b, relevance=[1.0])
    wanted = torch.tensor([4 / (4 + factor), factor / (4 + factor)]).double()
    torch.testing.assert_close(torch.cat([first, second]), wanted, rtol=1e-5, atol=0)


def added_in_place(x):
    y = x * 2
    y.add_(x)
    return y


def rectified_in_place(x):
    y = x - 1
    F.relu(y, inplace=True)
    return y


def rectified_beside_a_shortcut(x):
    y = x - 1
    return F.relu(y, inplace=True) * 2 + y  # the shortcut is rectified too


@pytest.mark.parametrize("run", [added_in_place, rectified_in_place, rectified_beside_a_shortcut])
def test_what_is_written_in_place_is_honoured_or_refused_never_lost(run):
    x = real(3, 4)
    with suppress(ScoreError):
        with Relevance():
            out = run(x.clone().requires_grad_())
        torch.testing.assert_close(latest(out).detach(), run(x))


def test_a_gate_gets_nothing():
    down, up = real(2, 4), real(4, 2)
    seen = {}

    def run(x):
        gate = F.linear(F.relu(F.linear(x.mean((2, 3)), down)), up)
        if gate.requires_grad:
            gate.register_hook(lambda r: seen.__setitem__("gate", r))
        return x * torch.sigmoid(gate)[:, :, None, None]

    sent, got = shared_out(run, leaf(real(2, 4, 5, 5)))
    assert torch.equal(got, sent)
    assert "gate" not in seen or not seen["gate"].any()


def test_the_gate_of_a_real_block_scores_nothing_and_the_rest_something():
    from torchvision.ops import SqueezeExcitation

    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        SqueezeExcitation(8, 4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    x = torch.randn(4, 3, 8, 8)
    scores = sp.score(net, [x], "lrp", structure=sp.trace(net, x))
    assert not scores["2.fc1"].any()
    assert scores["0"].any()


def by_hand(query, key, value):
    weights = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1)
    return F.dropout(weights, 0.1, training=False) @ value


@pytest.mark.parametrize("attention", [F.scaled_dot_product_attention, by_hand])
def test_attention_sends_relevance_through_the_values(attention):
    query, key, value = (leaf(real(2, 3, 5, 4)) for _ in range(3))
    sent, *got = shared_out(attention, query, key, value)
    assert all(r is None or not r.any() for r in got[:2])
    weights = (query @ key.transpose(-2, -1) / 2).softmax(-1).detach()
    contributions = weights[..., None] * value.detach()[:, :, None]  # of each key to each query's output
    wanted = (contributions / stable(contributions.sum(3, keepdim=True)) * sent[:, :, :, None]).sum(2)
    torch.testing.assert_close(got[2], wanted, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(got[2].sum(), sent.sum(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("attention", [F.scaled_dot_product_attention, by_hand])
def test_a_whole_attention_block_conserves(attention):
    project, out = real(24, 8).abs(), real(8, 8).abs()

    def run(x):
        parts = F.linear(x, project).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = attention(*parts).transpose(1, 2).reshape(2, 5, 8)
        return x + F.linear(mixed, out)

    assert_conserved(run, leaf(real(2, 5, 8).abs()))


@pytest.mark.parametrize(
    "move",
    [
        lambda v: v.view(2, -1),
        lambda v: v.permute(0, 2, 3, 1).reshape(2, 24, 2),
        lambda v: torch.cat(v.chunk(3, 1)[::-1], 1),
        lambda v: torch.stack(v.unbind(1), -1),
        lambda v: v[:, [2, 0, 1], ::2],
        lambda v: F.pad(v, (1, 2)).roll(1, 3),
        lambda v: v.expand(2, 3, 4, 4)[:, :, None].repeat(1, 1, 2, 1, 1),
        lambda v: v.unfold(2, 2, 1),
        lambda v: v.double().to(torch.float64).contiguous().clone(),
        lambda v: torch.where(torch.ones(4).bool(), v, 0.0),
    ],
)
def test_data_movement_moves_relevance(move):
    x = leaf(torch.arange(96.0).view(2, 3, 4, 4))
    sent, got = shared_out(move, x)
    came_from = move(x.detach()).flatten()
    is_data = came_from != 0 if len(came_from) > 96 else torch.ones_like(came_from, dtype=torch.bool)
    wanted = torch.zeros(96).double()
    for place, value in zip(came_from[is_data].long(), sent.flatten()[is_data], strict=True):
        wanted[place] += value
    # zeros may be padding as well as the first entry
    torch.testing.assert_close(got.flatten()[1:], wanted[1:], rtol=1e-12, atol=0)


# what has no rule


class Odd(nn.Module):
    """A network that calls something that relevance cannot pass through."""

    def __init__(self, operation):
        super().__init__()
        self.conv0, self.conv1, self.conv2 = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Conv2d(6, 6, 3)
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(6, 4)
        self.operation = operation

    def forward(self, x):
        x = self.operation(self.norm(self.conv1(F.relu(self.conv0(x)))))
        return self.head(self.conv2(x).mean((2, 3)))


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (torch.abs, "abs"),
        (lambda x: x.sin(), "sin"),
        (lambda x: torch.fft.rfft(x).real, "fft_rfft"),
        (lambda x: torch.cumprod(x, 1), "cumprod"),
    ],
)
def test_an_operation_without_a_rule_is_refused_by_name(operation, name):
    net, x = Odd(operation).train(), torch.randn(2, 3, 10, 10)
    structure = sp.trace(net, x)
    before = snapshot(net)
    with pytest.raises(ScoreError, match=f"no rule for '{name}'"):
        sp.score(net, [x], "lrp", structure=structure)
    assert_unchanged(net, before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert all(p.grad is None for p in net.parameters())


def test_an_operation_without_a_rule_is_let_be_where_no_relevance_passes():
    with Relevance():
        assert torch.equal(torch.abs(torch.tensor([-1.0])), torch.ones(1))


# the criterion


def slow_scores(net, images, classes):
    """The tiny network, layer by layer; its second convolution from the full matrix, the norm folded by hand."""
    first = net[2](net[1](net[0](images)))
    second = net[5](net[4](net[3](first)))
    pooled, head, norm = second.mean((2, 3)), net[8], net[4]
    logits = head(pooled).gather(1, classes[:, None])
    at_pooled = pooled * head.weight[classes] / stable(logits)
    positions = second.shape[2] * second.shape[3]
    at_second = second / positions * (at_pooled / stable(pooled))[:, :, None, None]
    weight = net[3].weight * (norm.weight / (norm.running_var + norm.eps).sqrt())[:, None, None, None]
    at_first = slow_convolution(lambda v: F.conv2d(v, weight, stride=2, padding=1), first, at_second)
    return {"0": at_first.abs().sum((2, 3)).mean(0), "3": at_second.abs().sum((2, 3)).mean(0)}


@pytest.fixture
def tiny():
    x = torch.randn(7, 3, 6, 6, dtype=torch.float64)
    net = settled(tiny_cnn(), x)
    return net, x, sp.trace(net, x)


def assert_scores(scores, wanted):
    for name, values in wanted.items():
        np.testing.assert_allclose(scores[name], values.numpy(), rtol=1e-7, atol=1e-10)


def test_scores_are_those_of_the_slow_oracle(tiny):
    net, x, structure = tiny
    y = torch.tensor([0, 1, 2, 2, 1, 0, 0])
    before = snapshot(net)
    scores = sp.score(net, [(x[:4], y[:4]), (x[4:], y[4:])], "lrp", structure=structure)
    assert_scores(scores, slow_scores(net, x, y))
    assert scores.samples == 7
    assert_unchanged(net, before)


def test_without_targets_the_largest_output_is_explained(tiny):
    net, x, structure = tiny
    largest = net(x).argmax(1)
    scores = sp.score(net, [x], "lrp", structure=structure)
    assert_scores(scores, slow_scores(net, x, largest))
    named = sp.score(net, [(x, largest)], "lrp", structure=structure)
    assert_scores(scores, {name: torch.from_numpy(named[name]) for name in ("0", "3")})


def test_scores_depend_on_the_targets(tiny):
    net, x, structure = tiny
    found = [sp.score(net, [(x, torch.full((7,), c))], "lrp", structure=structure)["0"] for c in range(3)]
    assert not np.allclose(found[0], found[1])
    assert not np.allclose(found[1], found[2])


def test_of_how_batches_are_cut_nothing_depends(tiny):
    net, x, structure = tiny
    y = torch.arange(7) % 3
    whole = sp.score(net, [(x, y)], "lrp", structure=structure)
    single = sp.score(net, [(x[i : i + 1], y[i : i + 1]) for i in range(7)], "lrp", structure=structure)
    for name in ("0", "3"):
        np.testing.assert_allclose(whole[name], single[name], rtol=1e-9)


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
def test_scores_are_the_same_wherever_they_are_asked_for(tiny, context):
    net, x, structure = tiny
    with context():
        found = sp.score(net, [x], "lrp", structure=structure)
    np.testing.assert_allclose(found["0"], sp.score(net, [x], "lrp", structure=structure)["0"])


@pytest.mark.parametrize(
    "targets",
    [
        torch.rand(7),
        torch.zeros(7, 3),
        torch.zeros(6, dtype=torch.long),
        torch.full((7,), 3),
        torch.full((7,), -1),
        torch.zeros(7, 1, dtype=torch.long),
        [0] * 7,
        "cat",
    ],
)
def test_targets_that_are_no_class_numbers_are_refused(tiny, targets):
    net, x, structure = tiny
    before = snapshot(net)
    with pytest.raises(ScoreError, match="targets of batch 0 are not class numbers below 3"):
        sp.score(net, [(x, targets)], "lrp", structure=structure)
    assert_unchanged(net, before)


def test_a_network_that_ends_in_a_softmax_is_refused():
    net, x = nn.Sequential(*tiny_cnn(), nn.Softmax(1)).eval(), torch.randn(2, 3, 6, 6)
    with pytest.raises(ScoreError, match="let it return logits"):
        sp.score(net, [x], "lrp", structure=sp.trace(net, x))


def test_outputs_that_are_no_logits_are_refused():
    net, x = tiny_cnn()[:6].eval(), torch.randn(2, 3, 6, 6)
    with pytest.raises(ScoreError, match=r"expected \(samples, classes\)"):
        sp.score(net, [x], "lrp", structure=sp.trace(net, x))


def test_an_adapted_network_is_scored_as_its_fused_copy():
    net = trained(0)
    scores = sp.score(net, batches(1, 32), "lrp")
    images, labels = batches(1, 32)[0]
    sent = F.one_hot(labels, 10).float()
    seen, _ = relevance_at(folded(net), images, sent)
    layers = [layer for parts in scores.layers.values() for layer in parts]
    assert layers
    for layer in layers:
        np.testing.assert_allclose(scores[layer], seen[layer].abs().sum((2, 3)).mean(0), rtol=1e-3)
