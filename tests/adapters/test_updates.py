"""Every kind of layer, adapted, against Eq. 3 written out in loops: outputs, gradients, fused weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.updates import low_rank_delta, pointwise_delta
from support import awaken_
from torch import nn
from transformers.pytorch_utils import Conv1D

import spalier as sp
from spalier.adapters import forward as fast

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def delta_of(layer):
    update = layer.weight_adapter
    if hasattr(update, "residual"):
        return pointwise_delta(layer, update.residual)
    return low_rank_delta(layer, update.down, update.up)


def check_layer(layer, x, adapter, **call):
    """Adapt, and compare with the layer's own forward on a dense weight made by the oracle."""
    layer = layer.double()
    plain = copy.deepcopy(layer)
    sp.attach_(layer, adapter)
    awaken_(layer)
    update = layer.weight_adapter
    if getattr(layer, "padding_idx", None) is not None:  # the row that learns nothing stays at nothing
        with torch.no_grad():
            next(update.parameters())[:, layer.padding_idx] = 0
    leaves = list(update.parameters())
    if x.is_floating_point():
        x = x.double().requires_grad_()
        leaves.append(x)
    got = layer(x, **call)

    parameters = {**dict(plain.named_parameters()), "weight": plain.weight.detach() + delta_of(layer)}
    want = torch.func.functional_call(plain, parameters, (x,), call)
    assert_close(got, want)

    direction = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad(got, leaves, direction), torch.autograd.grad(want, leaves, direction), strict=True
    ):
        assert_close(a, b)
    assert_close(sp.fuse(layer)(x, **call), want)
    assert not layer.weight.requires_grad


@st.composite
def convolutions(draw, transposed=False):
    axes = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    per = st.integers(1, 3)
    depthwise = draw(st.booleans()) and groups > 1
    inputs = groups * (1 if depthwise else draw(per))
    outputs = groups * draw(per)
    each = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * axes))  # noqa: E731
    kernel, stride, dilation = each(1, 4), each(1, 3), each(1, 2)
    options = {"stride": stride, "dilation": dilation, "groups": groups, "bias": draw(st.booleans())}
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    sizes = [r + draw(st.integers(0, 4)) for r in reach]
    if transposed:
        options["padding"] = tuple(draw(st.integers(0, k // 2)) for k in kernel)
        layer = TRANSPOSED[axes](inputs, outputs, kernel, **options)
    else:
        mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
        most = 2 if mode == "zeros" else min(2, min(sizes) - 1)
        options["padding"] = each(0, most)
        if all(s == 1 for s in stride) and draw(st.booleans()):
            options["padding"] = draw(st.sampled_from(["valid", "same"])) if mode == "zeros" else "valid"
        layer = CONVOLUTIONS[axes](inputs, outputs, kernel, padding_mode=mode, **options)
    x = torch.randn(draw(st.integers(1, 3)), inputs, *sizes)
    if axes == 2 and draw(st.booleans()):
        x, layer = (
            x.contiguous(memory_format=torch.channels_last),
            layer.to(memory_format=torch.channels_last),
        )
    if draw(st.booleans()):
        x = x[0]  # unbatched
    return layer, x


adapters = st.one_of(
    st.builds(sp.SPLoRA, st.integers(1, 4), kernel=st.sampled_from(["center", "full"])),
    st.just(sp.SPPaRA()),
    st.builds(sp.LoRA, st.integers(1, 4)),
)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "parallel"])
@settings(max_examples=100, deadline=None)
@given(case=convolutions(), adapter=adapters)
def test_convolution_equals_oracle(fused, case, adapter):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "_fusing_pays", lambda pixels, weight: fused)
        check_layer(*case, adapter)


@settings(max_examples=100, deadline=None)
@given(case=convolutions(transposed=True), adapter=adapters)
def test_transposed_convolution_equals_oracle(case, adapter):
    check_layer(*case, adapter)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "parallel"])
@settings(max_examples=30, deadline=None)
@given(
    inputs=st.integers(1, 6),
    outputs=st.integers(1, 6),
    batch=st.lists(st.integers(1, 4), max_size=3),
    bias=st.booleans(),
    adapter=adapters,
)
def test_linear_equals_oracle(fused, inputs, outputs, batch, bias, adapter):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "_fusing_pays", lambda pixels, weight: fused)
        check_layer(nn.Linear(inputs, outputs, bias=bias), torch.randn(*batch, inputs), adapter)


@settings(max_examples=20, deadline=None)
@given(inputs=st.integers(1, 5), outputs=st.integers(1, 5), adapter=adapters)
def test_transformers_conv1d_equals_oracle(inputs, outputs, adapter):
    check_layer(Conv1D(outputs, inputs), torch.randn(2, 3, inputs), adapter)


@pytest.mark.parametrize("adapter", [sp.SPLoRA(2), sp.SPPaRA(), sp.LoRA(2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}], ids=str)
def test_embedding_equals_oracle(options, adapter):
    check_layer(nn.Embedding(7, 4, **options), torch.tensor([[0, 2, 5], [5, 5, 6]]), adapter)


def test_embedding_keeps_its_padding_row_through_training():
    net = nn.Sequential(nn.Embedding(5, 3, padding_idx=1))
    sp.attach_(net, sp.SPLoRA(2))
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.tensor([0, 1, 2])).square().sum().backward()
        optimizer.step()
    assert torch.equal(net(torch.tensor([1])), torch.zeros(1, 3))
    assert net(torch.tensor([0])).abs().sum() > 0


def test_transposed_convolution_takes_output_size():
    layer = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1)
    check_layer(layer, torch.randn(2, 3, 5, 5), sp.SPLoRA(2), output_size=[10, 10])


@pytest.mark.parametrize("kernel", ["center", "full"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradcheck_to_second_order(kernel, fused, layout, monkeypatch):
    monkeypatch.setattr(fast, "_fusing_pays", lambda pixels, weight: fused)
    layer = nn.Conv2d(2, 3, 3, padding=1, dtype=torch.float64).to(memory_format=layout)
    sp.attach_(layer, sp.SPLoRA(2, kernel=kernel))
    awaken_(layer)
    x = torch.randn(2, 2, 4, 3, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    update = layer.weight_adapter

    def run(x, down, up):
        return torch.func.functional_call(layer, {"weight_adapter.down": down, "weight_adapter.up": up}, (x,))

    inputs = (x, update.down, update.up)
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("fused", [True, False])
def test_gradcheck_of_linear_to_second_order(fused, monkeypatch):
    monkeypatch.setattr(fast, "_fusing_pays", lambda pixels, weight: fused)
    factors = [torch.randn(2, n, dtype=torch.float64, requires_grad=True) for n in (3, 4)]
    x, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 5, 3), (4,)))
    weight = torch.randn(4, 3, dtype=torch.float64)
    run = lambda x, bias, down, up: fast.linear(x, weight, bias, down, up)  # noqa: E731
    assert torch.autograd.gradcheck(run, (x, bias, *factors))
    assert torch.autograd.gradgradcheck(run, (x, bias, *factors))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(3, 4), (0, 3)), (nn.Linear(3, 4), (0, 5, 3)), (nn.Conv2d(3, 4, 3), (0, 3, 6, 6))],
)
@pytest.mark.parametrize("fused", [True, False])
def test_an_empty_batch(layer, shape, fused, monkeypatch):
    monkeypatch.setattr(fast, "_fusing_pays", lambda pixels, weight: fused)
    check_layer(copy.deepcopy(layer), torch.randn(shape), sp.SPLoRA(2))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shape", [(3, 2, 4), (3, 2, 5, 4)])
def test_inputs_and_gradients_in_any_memory_order(shape, fused, monkeypatch):
    monkeypatch.setattr(fast, "_fusing_pays", lambda pixels, weight: fused)
    layer = nn.Linear(shape[0], 5)
    check_layer(layer, torch.randn(shape).movedim(0, -1), sp.SPLoRA(2))
    x = torch.randn(shape, dtype=torch.float64).movedim(0, -1)
    sp.detach_(layer)
    layer.double()
    sp.attach_(layer, sp.SPLoRA(2))
    awaken_(layer)
    leaves = list(layer.weight_adapter.parameters())
    got = torch.autograd.grad(layer(x).mean(), leaves)  # the gradient of a mean is one number, expanded
    want = torch.autograd.grad(F.linear(x, layer.weight_adapter(layer.weight), layer.bias).mean(), leaves)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b)


def test_large_activations_take_the_same_gradients(monkeypatch):
    monkeypatch.setattr(fast, "_LARGE", 0)
    layer = nn.Conv2d(6, 40, 1).to(memory_format=torch.channels_last)
    x = torch.randn(2, 6, 5, 5).contiguous(memory_format=torch.channels_last)
    check_layer(layer, x, sp.SPLoRA(1))


def test_a_thawed_weight_still_gets_its_gradient():
    layer = nn.Conv2d(3, 4, 3, dtype=torch.float64)
    sp.attach_(layer, sp.SPLoRA(2))
    awaken_(layer)
    layer.weight.requires_grad_(True)
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    layer(x).sum().backward()
    dense = (layer.weight.detach() + delta_of(layer).detach()).requires_grad_()
    F.conv2d(x, dense, layer.bias).sum().backward()
    assert_close(layer.weight.grad, dense.grad)


def test_a_layer_with_its_own_forward_keeps_it():
    class Standardised(nn.Conv2d):
        """Weight standardisation, as in NFNets and BiT."""

        def forward(self, x):
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return F.conv2d(x, weight / weight.std((1, 2, 3), keepdim=True), self.bias, self.stride, self.padding)

    check_layer(Standardised(3, 4, 3, padding=1), torch.randn(2, 3, 5, 5), sp.SPLoRA(2))


def test_the_choice_between_fused_and_parallel_depends_on_shapes_alone():
    weight = torch.empty(64, 64, 3, 3)
    assert fast._fusing_pays(10_000, weight)
    assert not fast._fusing_pays(16, weight)
