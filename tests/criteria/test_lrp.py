"""Relevance of whole networks, against zennit and slow oracles; what is sent arrives; the criterion."""

import copy
from contextlib import nullcontext, suppress
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from oracles.relevance import (
    leaf,
    real,
    relevance_at,
    shared_out,
    slow_convolution,
    stable,
)
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
from spalier.criteria.relevance import EPSILON, Relevance
from spalier.errors import ScoreError

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
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
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
    _, got = shared_out(lambda v: F.conv2d(v, weight, torch.ones(2).double()), x, relevance=torch.ones(1, 2, 1, 2))
    torch.testing.assert_close(got, torch.ones_like(got), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "entry",
    zoo.parameters(
        "torchvision/densenet121",
        "torchvision/efficientnet_b0",
        "torchvision/swin_t",
        "torchvision/vit_b_16",
        "timm/nf_resnet26",
    ),
)
def test_folded_and_under_relevance_a_network_computes_what_it_did(entry):
    check_values(entry)


@pytest.mark.parametrize("entry", zoo.parameters("timm/dm_nfnet_f0", "made/in_place"))
def test_a_network_that_drops_what_it_writes_in_place_is_understood_or_refused(entry):
    with suppress(ScoreError):
        check_values(entry)


def check_values(entry):
    net, example = entry.make().double(), entry.example().double()
    twin = folded(net, sp.trace(net, example))
    with torch.no_grad():
        wanted = net(example)
    with Relevance():
        found = twin(example.requires_grad_())
    assert found.requires_grad
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-8, atol=1e-8)


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
