"""A budget of bytes: the codes that it is spent on against all that could be, and what sizes and errors are made of."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spalier.adapters.codes import pack
from spalier.adapters.geometry import Geometry, geometries
from spalier.adapters.kinds import Coded
from spalier.refitting.approximate import Delta, Metric, added, low_rank_of, rooted
from spalier.refitting.measure import metrics_of
from spalier.refitting.spend import NOTHING, Code, Option, _hull, options_of, size_of, spent, within, written
from spalier.tasks.numbers import deflated


def options(*pairs):
    return [Option(Code("bits", rank=i), float(size), float(error)) for i, (size, error) in enumerate(pairs)]


several = st.lists(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 50)), min_size=1, max_size=4), min_size=1, max_size=4
)


@given(several, st.integers(0, 60))
def test_the_budget_is_spent_as_well_as_could_be(layers, budget):
    hulls = {str(i): _hull(options((0, 60), *pairs)) for i, pairs in enumerate(layers)}
    found = spent(hulls, budget)
    size = sum(option.bytes for option in found.values())
    error = sum(option.error for option in found.values())
    assert size <= budget
    # no choice of the same size or less is better than by what one last step may save
    choices = itertools.product(*hulls.values())
    best = min(sum(o.error for o in each) for each in choices if sum(o.bytes for o in each) <= budget)
    steps = [a.error - b.error for hull in hulls.values() for a, b in itertools.pairwise(hull)]
    assert error <= best + max(steps, default=0) + 1e-9


def test_the_hull_has_what_some_price_makes_the_best():
    hull = _hull(options((0, 10), (1, 9), (2, 4), (3, 5), (4, 3.9), (5, 0)))
    assert [(o.bytes, o.error) for o in hull] == [(0, 10), (2, 4), (5, 0)]


def delta_of(seed=0, outputs=48, inputs=64, kernel=(3, 3), metric=None):
    generator = torch.Generator().manual_seed(seed)
    shape = (outputs, inputs, *kernel)
    base = torch.randn(shape, generator=generator)
    learned = base + 0.05 * torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator)
    geometry = Geometry(inputs, outputs, kernel=kernel, fan_in=inputs * 9)
    return Delta("conv.weight", "conv", geometry, base, learned, metric or Metric())


@pytest.mark.parametrize("levels", [2, 3, 7, 15, 255])
def test_sizes_are_those_of_deflated_codes(levels):
    update = written(delta_of(), Code("bits", levels, step=0.8 if levels < 15 else 0.1))
    ((values, scale, _),) = update.stored()
    real = deflated(torch.from_numpy(pack(values.numpy(), levels)))[0].numel() + 2 * scale.numel()
    assert size_of(update) == pytest.approx(real, rel=0.06)


def test_errors_are_those_of_the_layers_output():
    torch.manual_seed(0)
    x = torch.randn(500, 6) @ torch.randn(6, 6)
    felt = torch.rand(4)
    delta = Delta(
        "fc.weight", "fc", Geometry(6, 4, fan_in=6), torch.randn(4, 6), torch.randn(4, 6), Metric(x.T @ x / 500, felt)
    )
    update = written(delta, Code("bits", 3, step=1.0))
    missing = x @ (delta.values - added(update, delta)).T
    expected = float((missing.square().mean(0) * felt).sum().detach())
    assert delta.error(added(update, delta)) == pytest.approx(expected, rel=1e-4)
    assert delta.error() == pytest.approx(float(((x @ delta.values.T).square().mean(0) * felt).sum()), rel=1e-4)


def test_low_rank_in_a_metric_is_better_there_than_the_svd():
    torch.manual_seed(0)
    mixed = torch.randn(27, 27) * torch.logspace(0, -2, 27)
    felt = torch.logspace(0, -2, 8)
    geometry = Geometry(3, 8, kernel=(3, 3), fan_in=27)
    base, learned = torch.randn(8, 3, 3, 3), torch.randn(8, 3, 3, 3)
    plain = Delta("c.weight", "c", geometry, base, learned)
    measured = Delta("c.weight", "c", geometry, base, learned, Metric(mixed.T @ mixed, felt))
    for rank in (1, 3):
        errors = []
        for each in (plain, measured):
            down, up = low_rank_of(each, rank, whole=True)
            errors.append(measured.error((up.T @ down).view(8, 3, 3, 3)))
        assert errors[1] < 0.85 * errors[0]
        # the best of that rank: an SVD between the roots of both metrics
        root = torch.linalg.cholesky((mixed.T @ mixed).double() + 1e-9 * torch.eye(27).double())
        seen = felt.double().sqrt()[:, None] * measured.values.flatten(1).double() @ root
        best = float(torch.linalg.svdvals(seen)[rank:].square().sum())
        assert errors[1] == pytest.approx(best, rel=1e-2)


def test_options_begin_with_nothing_and_each_pays_for_its_bytes():
    found = options_of(delta_of(outputs=8, inputs=8))
    assert found[0].code == NOTHING
    assert all(a.bytes < b.bytes and a.error > b.error for a, b in itertools.pairwise(found))
    assert found[-1].error < 1e-3 * found[0].error
    unlearned = delta_of(outputs=4, inputs=4)
    unlearned.fused = unlearned.base.clone()
    assert [option.code for option in options_of(unlearned)] == [NOTHING]


def test_signs_come_first():
    """Where signs of all fit, none is farther from its delta than they are; where not, none has more bits."""
    found = {str(seed): options_of(delta_of(seed, outputs=16, inputs=16)) for seed in range(3)}
    delta = delta_of(0, outputs=16, inputs=16)
    signs = written(delta, Code("bits", 2, step=1.0))
    assert found["0"][0].signs == pytest.approx(delta.error(added(signs, delta)), rel=1e-3)
    assert all(o.bytes >= size_of(signs) for each in found.values() for o in each if o.code.kind == "bits")

    def chosen(budget):
        def file_size(codes):
            return sum(round(o.bytes) for n, each in found.items() for o in each if o.code == codes[n])

        codes = within(found, budget, file_size)
        assert 0.9 * budget < file_size(codes) <= budget
        return [option for name, each in found.items() for option in each if option.code == codes[name]]

    assert all(option.error <= option.signs for option in chosen(int(3.5 * size_of(signs))))
    few = chosen(int(2.5 * size_of(signs)))
    assert {option.code.levels for option in few if option.code.kind == "bits"} == {2}
    assert any(option.error > option.signs for option in few)


def test_few_components_are_for_deltas_that_have_no_more():
    torch.manual_seed(0)
    full, thin = delta_of(outputs=64, inputs=64), delta_of(outputs=64, inputs=64)
    thin.fused = thin.base + (torch.randn(64, 2) @ torch.randn(2, 64 * 9)).view(64, 64, 3, 3)
    ranks = [{o.code.rank for o in options_of(each) if o.code.kind == "low-rank"} for each in (full, thin)]
    assert min(ranks[0], default=8) >= 8
    assert 2 in ranks[1]


def test_a_step_of_zero_rows_is_no_step():
    delta = delta_of(outputs=4, inputs=4)
    delta.fused[1] = delta.base[1]
    update = written(delta, Code("bits", 3, step=1.0))
    assert isinstance(update, Coded)
    made = added(update, delta)
    assert not made[1].any()
    assert torch.isfinite(made).all()


def test_what_the_loss_feels_is_the_mean_square_of_its_gradient():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)).double()
    x = torch.randn(32, 2, 4, 4).double()
    found = metrics_of(net, {"0": False, "3": False}, ((x,), {}))
    # sample by sample, with the labels that a generator of seed 0 draws from the predictions
    logits = net(x)
    drawn = torch.multinomial(logits.float().softmax(1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    felt = torch.zeros(3).double()
    for image, label in zip(x, drawn, strict=True):
        hidden = net[0](image[None]).detach().requires_grad_()
        loss = F.cross_entropy(net[3](net[1](hidden).flatten(1)), label[None])
        felt += torch.autograd.grad(loss, hidden)[0].square().sum((0, 2, 3)) / len(x)
    torch.testing.assert_close(found["0"].outputs.double(), felt, rtol=1e-4, atol=1e-9)
    hidden = net[:3](x).detach()
    torch.testing.assert_close(found["3"].gram.double(), hidden.T @ hidden / 32, rtol=1e-5, atol=1e-7)
    patches = F.unfold(x, 3).transpose(1, 2).reshape(-1, 18)
    torch.testing.assert_close(found["0"].gram.double(), patches.T @ patches / len(patches), rtol=1e-5, atol=1e-7)
    assert not any(p.grad is not None for p in net.parameters())


def test_the_errors_of_options_are_those_of_what_is_written():
    torch.manual_seed(0)
    x = torch.randn(400, 72) @ torch.randn(72, 72)
    delta = delta_of(outputs=10, inputs=8, metric=Metric(x.T @ x / 400, torch.rand(10)))
    found = options_of(delta)
    assert {option.code.kind for option in found} == {"nothing", "low-rank", "bits"}
    for option in found[1:]:
        update = written(delta, option.code)
        assert option.error == pytest.approx(delta.error(added(update, delta)), rel=1e-2, abs=1e-4 * found[0].error)
        assert option.bytes == pytest.approx(size_of(update), rel=1e-2)


def test_metrics_of_few_samples_and_of_none():
    """Fewer samples than features, features that are always zero, one direction, nothing at all."""
    torch.manual_seed(0)
    few, one = torch.randn(5, 72) * 1e3, torch.randn(400, 1) @ torch.randn(1, 72) * 1e4
    few[:, :30] = 0
    for x in (few, one, torch.zeros(3, 72)):
        delta = delta_of(outputs=100, inputs=8, metric=Metric((x.T @ x / len(x)).float()))
        metric, root = rooted(delta.metric.gram - 1e-3 * torch.eye(72))
        torch.testing.assert_close(root @ root.T, metric)
        down, up = low_rank_of(delta, 4, whole=True)
        assert torch.isfinite(down).all()
        assert torch.isfinite(up).all()
        assert all(torch.isfinite(torch.tensor(option.error)) for option in options_of(delta))


@pytest.mark.parametrize("layer", [nn.Embedding(30, 6), nn.ConvTranspose1d(6, 5, 3), nn.Conv1d(6, 8, 3, groups=2)])
def test_errors_of_options_are_felt_by_output_on_every_kind_of_layer(layer):
    torch.manual_seed(0)
    geometry = geometries(layer)["weight"]
    base = layer.weight.detach()
    metric = Metric(None, torch.rand(geometry.outputs), 0.3)
    delta = Delta("x.weight", "x", geometry, base, base + 0.1 * torch.randn_like(base), metric)
    expected = (geometry.grouped(delta.values).flatten(2).square().sum(2).flatten() * metric.outputs).sum() * 0.3
    assert delta.error() == pytest.approx(float(expected), rel=1e-5)
    for option in options_of(delta)[1:]:
        update = written(delta, option.code)
        assert option.error == pytest.approx(delta.error(added(update, delta)), rel=1e-2, abs=1e-5 * delta.error())


def test_what_the_loss_feels_of_every_branch():
    """Of layers that the first one is not before, of several calls, of what an activation changes in place, of none."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.twice, self.unheard = (nn.Linear(3, 3) for _ in range(4))
            self.words, self.fc = nn.Embedding(7, 3), nn.Linear(3, 2)

        def forward(self, x, y, tokens):
            self.unheard(x)
            hidden = F.relu(self.a(x), inplace=True) + F.relu(self.b(y), inplace=True) + self.words(tokens)
            return self.fc(self.twice(self.twice(hidden)))

    torch.manual_seed(0)
    net = Net()
    inputs = (torch.randn(8, 3), torch.randn(8, 3), torch.randint(0, 7, (8,)))
    names = ("a", "b", "twice", "unheard", "words", "fc")
    found = metrics_of(net, dict.fromkeys(names, False), (inputs, {}))
    assert all(found[name].outputs.shape == net.get_submodule(name)(inputs[0]).shape[1:] for name in ("a", "b"))
    assert all(bool((found[name].outputs > 0).any()) for name in names if name != "unheard")
    assert not found["unheard"].outputs.any()
    assert found["words"].power == pytest.approx(1 / 7)
    # before the activation, which lets nothing through of what it has set to zero
    drawn = torch.multinomial(net(*inputs).softmax(1), 1, generator=torch.Generator().manual_seed(0))[:, 0]
    before = net.b(inputs[1]).detach().requires_grad_()
    hidden = F.relu(net.a(inputs[0])) + F.relu(before) + net.words(inputs[2])
    loss = F.cross_entropy(net.fc(net.twice(net.twice(hidden))), drawn, reduction="sum")
    (grad,) = torch.autograd.grad(loss, before)
    torch.testing.assert_close(found["b"].outputs, grad.square().mean(0), rtol=1e-4, atol=1e-8)
