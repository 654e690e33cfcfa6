"""Strided 1x1 convolutions with few inputs, whose native weight gradient corrupts memory in channels-last layout."""

import copy
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import spalier as sp

ADAPTERS = {
    "fine": sp.FineTune(),
    "sppara": sp.SPPaRA(init_range=0.1),
    "splora": sp.SPLoRA(rank=3, init_range=0.1),
    "whole": sp.SPLoRA(rank=3, init_range=0.1, kernel="full"),
    "lora": sp.LoRA(rank=3),
}


class Refused(TorchDispatchMode):
    """Ends where PyTorch would call the faulty kernel, before it is called."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            _, x, weight, _, stride, *_, mask = args
            pointwise = weight.shape[2:].numel() == 1 and max(stride) > 1 and weight.shape[1] < 16
            channels_last = x.stride(1) == 1 or weight.stride(3) > 1
            assert not (mask[1] and pointwise and channels_last), f"{tuple(x.shape)} by {tuple(weight.shape)}"
        return func(*args, **(kwargs or {}))


def channels_last(x):
    """With strides that say so of one channel too, as in the middle of a network."""
    return x.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)


def learned(net):
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def gradients(net, x):
    net.zero_grad()
    x = x.detach().requires_grad_()
    out = net(x)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    return {"out": out, "x": x.grad, **{name: p.grad for name, p in learned(net).items()}}


def assert_same_as_ordinary(net, x):
    """Against the same network, undisturbed, in float64 and in the ordinary layout."""
    reference = copy.deepcopy(net).double()
    expected = gradients(reference, x.double().contiguous())
    net.to(memory_format=torch.channels_last)
    with Refused():
        found = gradients(net, channels_last(x))
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("inputs", [1, 5, 13, 15])
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_faulty_kernel_is_never_called(name, inputs):
    net = nn.Sequential(nn.Conv2d(3, inputs, 3, padding=1), nn.ReLU(), nn.Conv2d(inputs, 7, 1, stride=2))
    sp.attach_(net, ADAPTERS[name])
    assert_same_as_ordinary(net, torch.randn(2, 3, 8, 8))


def test_the_plain_layer_would_call_it():
    layer = nn.Conv2d(5, 7, 1, stride=2).to(memory_format=torch.channels_last)
    with Refused(), pytest.raises(AssertionError, match=r"\(2, 5, 8, 8\) by \(7, 5, 1, 1\)"):
        gradients(layer, channels_last(torch.randn(2, 5, 8, 8)))


class Hard(nn.Conv2d):
    """A stride that is written in the code."""

    def forward(self, x):
        return F.conv2d(x, self.weight * 2, self.bias, (2, 2))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(1, 7, 1, stride=2),
        Hard(5, 7, 1, stride=2),
        nn.Conv2d(5, 7, 1, stride=(1, 2), bias=False),
        nn.Conv2d(5, 7, 1, stride=2, padding=1),
        nn.Conv2d(5, 7, 1, stride=2, padding=1, padding_mode="circular"),
        nn.Conv2d(6, 8, 1, stride=2, groups=2),
        nn.ConvTranspose2d(5, 7, 1, stride=2, output_padding=1),
        nn.Conv2d(16, 7, 1, stride=2),
    ],
    ids=["one-input", "own-forward", "one-side", "padded", "circular", "grouped", "transposed", "wide"],
)
@pytest.mark.parametrize("name", ["fine", "sppara", "whole"])
def test_in_every_kind_of_layer(name, layer):
    net = nn.Sequential(copy.deepcopy(layer))
    sp.attach_(net, ADAPTERS[name])
    assert_same_as_ordinary(net, torch.randn(2, layer.in_channels, 8, 8))


def test_one_sample_by_keyword():
    net = nn.Sequential(nn.Conv2d(5, 7, 1, stride=2))
    plain = copy.deepcopy(net)
    sp.attach_(net, sp.FineTune())
    x = torch.randn(5, 8, 8)
    torch.testing.assert_close(net[0](input=x), plain[0](input=x))


def test_second_derivatives():
    net = nn.Sequential(nn.Conv2d(2, 3, 1, stride=2)).double()
    sp.attach_(net, sp.FineTune())
    weight, bias = net[0].weight.detach(), net[0].bias.detach()
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)

    def run(x, weight, bias):
        return torch.func.functional_call(net, {"0.weight": weight, "0.bias": bias}, (x,))

    assert torch.autograd.gradgradcheck(run, (x, weight.requires_grad_(), bias.requires_grad_()))


def test_layers_that_learn_are_the_same_after_detaching():
    net = nn.Sequential(nn.Conv2d(5, 7, 1, stride=2), nn.Conv2d(7, 7, 3, stride=2))
    sp.attach_(net, sp.FineTune())
    assert ["forward" in layer.__dict__ for layer in net] == [True, False]
    assert not any("forward" in layer.__dict__ for layer in sp.fuse(net))
    sp.detach_(net)
    assert not any("forward" in layer.__dict__ for layer in net)


def test_a_narrow_network_exports_and_compiles_to_a_graph():
    net = nn.Sequential(nn.Conv2d(5, 7, 1, stride=2))
    sp.attach_(net, sp.FineTune())
    x = torch.randn(2, 5, 8, 8)
    torch.testing.assert_close(torch.export.export(net, (x,)).module()(x), net(x))
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x))


def run(code):
    """In a process of its own, which may crash or hang."""
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=200)


def test_no_step_crashes():
    """The shapes that crashed most readily, in loops of the user's own."""
    result = run(
        """
        import torch
        from torch import nn
        import spalier as sp

        torch.set_num_threads(1)  # with more the fault shows as a hang
        for adapter in sp.FineTune(), sp.SPPaRA(), sp.LoRA(rank=2, kernel="full"):
            for inputs in (1, 2, 5, 7, 8, 13, 15):
                for outputs, size in ((7, 64), (24, 112 if inputs == 13 else 32)):
                    net = nn.Sequential(nn.Conv2d(3, inputs, 1), nn.Conv2d(inputs, outputs, 1, stride=2))
                    net.to(memory_format=torch.channels_last)
                    sp.attach_(net, adapter)
                    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1e-3)
                    x = torch.randn(16, 3, size, size).contiguous(memory_format=torch.channels_last)
                    for _ in range(2):
                        net(x).square().mean().backward()
                        optimizer.step()
        print("survived")
        """
    )
    assert (result.returncode, result.stdout) == (0, "survived\n"), result.stderr
