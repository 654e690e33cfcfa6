"""The numbers of the paper exactly, and every operation against a formula written out."""

import pytest
import torch
import zoo
from support import assert_unchanged, awaken_, snapshot
from torch import nn

import spalier as sp
from spalier.errors import ExampleError

IMAGE = torch.randn(1, 3, 32, 32)


def splora(make, rank):
    net = make(classes=10, stem="cifar")
    sp.attach_(net, sp.SPLoRA(rank), head="fc")
    return net


@pytest.mark.parametrize(
    ("make", "convolutions", "filters", "parameters", "macs", "flops"),
    [
        (sp.models.resnet50, 53, 26_560, 23_520_842, 1_297_829_888, 1_304_694_784),
        (sp.models.resnet18, 20, 4_800, 11_173_962, 555_422_720, 556_651_520),
    ],
)
def test_the_papers_networks(make, convolutions, filters, parameters, macs, flops):
    net = make(classes=10, stem="cifar")
    found = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    counted = sp.count(net, IMAGE)
    assert len(found) == convolutions
    assert sum(m.out_channels for m in found) == filters
    assert counted.parameters == counted.learned == parameters
    assert counted.macs == macs
    assert counted.flops_paper == flops


@pytest.mark.parametrize("rank", [1, 8, 32])
@pytest.mark.parametrize(
    ("make", "fixed", "per_rank"), [(sp.models.resnet50, 73_610, 49_091), (sp.models.resnet18, 14_730, 8_643)]
)
def test_the_papers_learned_parameters(make, fixed, per_rank, rank):
    assert sp.count(splora(make, rank)).learned == fixed + per_rank * rank


def test_the_numbers_in_the_papers_table():
    assert sp.count(splora(sp.models.resnet50, 8)).learned == 466_338
    assert sp.count(splora(sp.models.resnet50, 32)).learned == 1_644_522


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25])
def test_the_theory_figure(fraction):
    """A 768 x 3072 matrix that keeps a fraction of its rows and columns: SPLoRA learns 3,840 r f."""
    layer = nn.Linear(int(768 * fraction), int(3072 * fraction), bias=False, device="meta")
    assert layer.weight.numel() == fraction**2 * 2_359_296
    sp.attach_(layer, sp.SPLoRA(16))
    assert sp.count(layer).learned == 3_840 * 16 * fraction


def test_an_adapted_network_counts_as_its_fused_one():
    net = splora(sp.models.resnet18, 8)
    plain = sp.fuse(net)
    mine, fused = sp.count(net, IMAGE), sp.count(plain, IMAGE)
    assert (mine.parameters, mine.bytes, mine.macs) == (fused.parameters, fused.bytes, fused.macs)
    assert mine.flops_paper == fused.flops_paper
    tensors = plain.state_dict().values()
    assert fused.bytes == sum(t.numel() * t.element_size() for t in tensors)


def test_by_module():
    counted = sp.count(splora(sp.models.resnet18, 8), IMAGE)
    modules = counted.by_module()
    stem = modules["conv1"]
    assert (stem.parameters, stem.learned, stem.macs) == (1_728, 8 * 67, 1_728 * 1024)
    assert modules["bn1"].flops_paper == 2 * 64 * 1024
    assert modules["fc"].learned == 5_130
    assert not any("adapter" in name for name in modules)
    for key in ("parameters", "learned", "bytes", "macs", "flops_paper"):
        assert sum(getattr(m, key) for m in modules.values()) == getattr(counted, key)


def test_counting_leaves_the_network_as_it_was():
    net = awaken_(splora(sp.models.resnet18, 2), 0.01).train()
    net.layer1.eval()
    before = snapshot(net)
    sp.count(net, IMAGE)
    assert_unchanged(net, before)
    net.eval()
    torch.testing.assert_close(net(IMAGE), sp.fuse(net)(IMAGE), rtol=1e-4, atol=1e-4)


class Attention(nn.Module):
    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("net", "shapes", "macs"),
    [
        (nn.Linear(5, 7), [(2, 3, 5)], 3 * 35),
        (nn.Linear(5, 7, bias=False), [(2, 5)], 35),
        (nn.Conv1d(4, 6, 3), [(2, 4, 10)], 8 * 6 * 4 * 3),
        (nn.Conv2d(4, 6, (3, 2), stride=2, groups=2), [(2, 4, 9, 8)], 4 * 4 * 6 * 2 * 6),
        (nn.Conv3d(2, 3, 2), [(2, 2, 3, 3, 3)], 8 * 3 * 2 * 8),
        (nn.ConvTranspose2d(4, 6, 3), [(2, 4, 5, 5)], 25 * 4 * 6 * 9),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), [(2, 4, 5, 5)], 25 * 4 * 3 * 9),
        (Attention(), [(2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8)], 4 * 6 * 5 * (8 + 8)),
        (nn.Embedding(9, 4), None, 0),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_macs_of_each_operation(net, shapes, macs, device):
    example = (torch.zeros(2, 3, dtype=torch.long),) if shapes is None else tuple(torch.randn(s) for s in shapes)
    counted = sp.count(net.to(device), tuple(x.to(device) for x in example))
    assert counted.macs == macs


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_is_counted_on_the_cpu_with_and_without_fast_path(heads):
    tokens, width, hidden = 6, 8, 16
    layer = nn.TransformerEncoderLayer(width, heads, hidden, batch_first=True).eval()
    per_token = 4 * width * width + 2 * width * hidden
    want = tokens * per_token + 2 * tokens * tokens * width
    example = torch.randn(3, tokens, width)
    assert sp.count(layer, example).macs == want
    sp.attach_(layer, sp.SPLoRA(2))
    assert sp.count(layer, example).macs == want
    assert sp.count(layer.train(), example).macs == want


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind):
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    net = kind(8, 16, num_layers=2)
    want = 7 * gates * 16 * ((8 + 16) + (16 + 16))
    assert sp.count(net, torch.randn(7, 3, 8), samples=3).macs == want


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_what_a_parametrization_computes_is_no_samples(samples):
    """A spectral norm multiplies weights, 25 times here, which no two samples can share."""
    norms = nn.utils.parametrizations
    net = nn.Sequential(norms.weight_norm(nn.Linear(3, 4)), norms.spectral_norm(nn.Linear(4, 5)))
    counted = sp.count(net, torch.randn(samples, 3))
    assert counted.macs == 3 * 4 + 4 * 5
    assert counted.by_module()["1.parametrizations.weight"].parameters == 20


class Products(nn.Module):
    def forward(self, a, b, c):
        return torch.baddbmm(c, a, b).sum() + torch.einsum("bij,bjk->ik", a, b) + torch.addbmm(c[0], a, b)


def test_batched_products():
    a, b, c = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.randn(2, 3, 5)
    assert sp.count(Products(), (a, b, c), samples=1).macs == 3 * (2 * 3 * 4 * 5)


def test_bilinear():
    net = nn.Bilinear(3, 4, 5)
    assert sp.count(net, (torch.randn(2, 3), torch.randn(2, 4))).macs == 5 * 3 * 4 + 5 * 4


def test_a_single_vector_is_counted():
    assert sp.count(nn.Linear(4, 5), torch.randn(4), samples=1).macs == 20


def test_examples_as_tuples_and_dicts():
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 5, 8)
    assert sp.count(Attention(), (q, k, k)).macs == sp.count(Attention(), {"q": q, "k": k, "v": k}).macs


def test_tied_weights_count_once():
    net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    net[1].weight = net[0].weight
    assert sp.count(net).parameters == 28
    sp.attach_(net, sp.SPLoRA(2))
    assert sp.count(net).learned == 2 * (7 + 4)


def test_without_an_example_nothing_computed_is_claimed():
    counted = sp.count(nn.Linear(2, 2))
    assert counted.macs is None
    assert counted.flops_paper is None
    assert str(counted).splitlines()[-1].split() == ["total", "6", "6", "24", "-", "-"]


@pytest.mark.parametrize(
    ("net", "example", "options", "error", "words"),
    [
        (nn.Linear(4, 5), torch.randn(2, 3), {}, ExampleError, "does not run through the network"),
        (nn.Linear(4, 5), 3.0, {}, ExampleError, "the example is a float; expected a tensor"),
        (nn.Linear(4, 5), (3.0,), {}, ExampleError, "no tensor with samples"),
        (nn.Linear(4, 5), torch.randn(2, 4), {"samples": 0}, ExampleError, "samples is 0"),
        (nn.Linear(4, 5), torch.randn(2, 4), {"samples": 3}, ExampleError, "do not divide by 3"),
    ],
)
def test_bad_input(net, example, options, error, words):
    with pytest.raises(error, match=words):
        sp.count(net, example, **options)


def test_a_failing_example_leaves_the_network_as_it_was():
    net = splora(sp.models.resnet18, 2).train()
    before = snapshot(net)
    with pytest.raises(ExampleError):
        sp.count(net, torch.randn(1, 5, 32, 32))
    assert_unchanged(net, before)


def test_a_network_whose_parameters_are_handed_to_its_modules_is_counted():
    """PyTorch's counter stumbles over the class token of CaiT as long as it learns."""
    entry = zoo.by_name("timm/cait_xxs24_224")
    net = entry.make().requires_grad_(True)
    found = sp.count(net, entry.example())
    assert found.macs == sp.count(entry.make().requires_grad_(False), entry.example()).macs > 0
    assert found.learned == found.parameters
    assert all(p.requires_grad for p in net.parameters())
