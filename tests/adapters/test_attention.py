"""Attention, and other modules that read the weights of layers without calling these."""

import copy

import pytest
import torch
from support import awaken_
from torch import nn

import spalier as sp
from spalier.adapters.forward import read_layers
from spalier.errors import UnsupportedLayerError


def dense_attention(net, adapted):
    """The same attention with plain weights, made by adding up^T down by hand."""
    plain = copy.deepcopy(net)
    with torch.no_grad():
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            update = getattr(adapted, f"{name}_adapter", None)
            if update is not None:
                getattr(plain, name).add_(update.up.T @ update.down)
        update = getattr(adapted.out_proj, "weight_adapter", None)
        if update is not None:
            plain.out_proj.weight.add_(update.up.T @ update.down)
    return plain


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 10}], ids=["packed", "separate"])
@pytest.mark.parametrize("targets", [None, "*out_proj", lambda n, m: isinstance(m, nn.MultiheadAttention)])
def test_attention_equals_dense_attention(sizes, training, grad, targets):
    base = nn.MultiheadAttention(8, 2, batch_first=True, **sizes).double().train(training)
    net = nn.ModuleDict({"attention": copy.deepcopy(base)})
    sp.attach_(net, sp.SPLoRA(2), targets=targets)
    awaken_(net)
    adapted = net["attention"]
    query = torch.randn(3, 5, 8, dtype=torch.float64)
    if sizes:
        key, value = (torch.randn(3, 4, n, dtype=torch.float64) for n in (6, 10))
    else:
        key = value = query  # self-attention takes PyTorch's fast path in eval without gradients
    want = dense_attention(base, adapted)(query, key, value)
    with torch.set_grad_enabled(grad):
        got = adapted(query, key, value)
        fused = sp.fuse(net)["attention"](query, key, value)
    for a, b, c in zip(got, want, fused, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(c, b, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(got[0], base(query, key, value)[0])


def test_packed_and_separate_projections_are_counted():
    packed, separate = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2, kdim=6, vdim=10)
    assert sp.attach_(packed, sp.SPLoRA(2)).learned == 2 * (8 + 24) + 2 * (8 + 8)
    assert sp.attach_(separate, sp.SPLoRA(2)).learned == 2 * (8 + 8 + 6 + 8 + 10 + 8) + 2 * (8 + 8)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("targets", [None, "*.linear1", "*.out_proj", "*.self_attn"])
def test_the_encoders_inference_fast_path_does_not_go_past_the_adapter(targets, padded):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    net = nn.TransformerEncoder(layer, 2).double()
    base = copy.deepcopy(net).eval()
    sp.attach_(net, sp.SPLoRA(2), targets=targets)
    awaken_(net)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    mask = torch.arange(5) >= torch.tensor([[5], [3], [4]]) if padded else None
    kept = slice(None) if mask is None else ~mask
    want = net.train()(x, src_key_padding_mask=mask)[kept]  # training takes no fast path; dropout is 0
    net.eval()
    with torch.inference_mode():
        got = net(x, src_key_padding_mask=mask)[kept]
        fused = sp.fuse(net)(x, src_key_padding_mask=mask)
        unadapted = base(x, src_key_padding_mask=mask)
    torch.testing.assert_close(got, want.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(fused[kept], want.detach(), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(got, unadapted[kept])


def test_detach_opens_the_fast_path_again():
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    flags = [(net.use_nested_tensor, layer.activation_relu_or_gelu) for layer in net.layers]
    sp.attach_(net, sp.SPLoRA(2))
    fused = sp.fuse(net)
    assert [(fused.use_nested_tensor, layer.activation_relu_or_gelu) for layer in fused.layers] == flags
    sp.detach_(net)
    assert [(net.use_nested_tensor, layer.activation_relu_or_gelu) for layer in net.layers] == flags
    assert not any("forward" in m.__dict__ for m in net.modules())


class Reads(nn.Module):
    """Reads its projection's weight in a helper, and asks another layer only for its dtype."""

    def __init__(self):
        super().__init__()
        self.proj, self.called = nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.xavier_uniform_(self.called.weight)

    def mix(self, x):
        return nn.functional.linear(x, self.proj.weight, self.proj.bias)

    def forward(self, x):
        return self.called(self.mix(x.to(self.called.weight.dtype)))


def test_a_module_that_reads_a_layers_weight_sees_the_adapter():
    net = nn.Sequential(Reads()).double()
    sp.attach_(net, sp.SPLoRA(2))
    awaken_(net)
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(net(x), sp.fuse(net)(x), rtol=1e-12, atol=1e-12)
    net(x).sum().backward()
    assert net[0].proj.weight_adapter.up.grad.abs().sum() > 0
    sp.detach_(net)
    assert "forward" not in net[0].__dict__


def test_only_what_forward_reads_counts_as_read():
    assert list(read_layers(Reads())) == ["proj"]


class FarReader(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4))
        self.body.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x @ self.body.inner.weight


def test_a_weight_that_is_read_from_afar_is_refused():
    net = FarReader()
    with pytest.raises(UnsupportedLayerError, match=r"read by .* from afar, as self\.body\.inner\.weight"):
        sp.attach_(net, sp.SPLoRA(2))
    sp.attach_(net, sp.SPLoRA(2), targets="body.0")
