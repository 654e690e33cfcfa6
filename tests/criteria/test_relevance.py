"""The rules of relevance, operation by operation: fixtures, slow oracles, totals, and refusals."""

from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.relevance import (
    assert_conserved,
    by_contribution,
    leaf,
    matrix_of,
    real,
    shared_out,
    slow_convolution,
    stable,
)
from support import assert_unchanged, snapshot
from torch import nn

import spalier as sp
from spalier.criteria.relevance import Relevance, latest
from spalier.errors import ScoreError

CONVOLUTIONS = {
    (1, False): F.conv1d,
    (2, False): F.conv2d,
    (1, True): F.conv_transpose1d,
    (2, True): F.conv_transpose2d,
}


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
