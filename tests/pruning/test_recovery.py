"""Recovery in closed form: exact where it can be, never worse, and worth a lot on a real network."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_unchanged, awaken_, snapshot, tiny_cnn
from torch import nn
from trained import accuracy, batches, trained

import spalier as sp
from spalier.errors import RecoveryError
from spalier.pruning.regression import Moments, reduced

EXAMPLE = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def calibration(count=3, size=40, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 3, 6, 6, dtype=torch.float64, generator=generator) for _ in range(count)]


def adapted(**options):
    torch.manual_seed(0)
    net = tiny_cnn().double().train()
    for x in calibration(seed=7):
        net(x)
    sp.attach_(net.eval(), sp.SPLoRA(rank=3, **options), head="8", example=EXAMPLE)
    return awaken_(net, 0.1)


PLAN = {"0": [0, 2, 3, 5, 7], "3": [0, 1, 4, 5, 8, 9, 11]}


# the regression


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_the_reduced_solution_is_the_best_of_its_rank(data):
    """Against the definition: a singular value decomposition in the metric's own coordinates."""
    rows, columns = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    rank, seed = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 10**6))
    torch.manual_seed(seed)
    best = torch.randn(rows, columns, dtype=torch.float64)
    root = torch.randn(rows, rows + 2, dtype=torch.float64)
    metric = root @ root.T + 0.1 * torch.eye(rows, dtype=torch.float64)
    down, up = reduced(best, metric, rank)
    assert down.shape == (rows, rank)
    assert up.shape == (rank, columns)
    square = torch.linalg.cholesky(metric).T
    u, s, v = torch.linalg.svd(square @ best, full_matrices=False)
    wanted = torch.linalg.solve(square, (u[:, :rank] * s[:rank]) @ v[:rank])
    torch.testing.assert_close(down @ up, wanted, rtol=1e-6, atol=1e-8)


def test_moments_are_those_of_all_rows_at_once():
    x, y = torch.randn(5, 3, 7, dtype=torch.float64), torch.randn(5, 2, 7, dtype=torch.float64)
    for centred in (False, True):
        moments = Moments(centred=centred)
        for part in ((x[:2], y[:2]), (x[2:], y[2:])):
            moments.add(*part)
        rows, wanted = x.transpose(1, 2).reshape(-1, 3), y.transpose(1, 2).reshape(-1, 2)
        if centred:
            rows, wanted = rows - rows.mean(0), wanted - wanted.mean(0)
        gram, cross, power = moments.means()
        torch.testing.assert_close(gram, rows.T @ rows / 35)
        torch.testing.assert_close(cross, rows.T @ wanted / 35)
        torch.testing.assert_close(power, wanted.square().sum() / 35)


@pytest.mark.parametrize("kernel", ["center", "full"])
@pytest.mark.parametrize("stride", [1, 2])
def test_an_adapter_becomes_the_ridge_solution(kernel, stride):
    """One convolution whose input has lost channels, against plain least squares on unfolded patches."""
    torch.manual_seed(0)
    layer, size = nn.Conv2d(6, 4, 3, stride, 1), 4 * (36 // stride**2)
    net = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), layer, nn.Flatten(), nn.Linear(size, 2)).double()
    sp.attach_(net, sp.SPLoRA(rank=9, kernel=kernel), targets="2", head="4", example=EXAMPLE)
    awaken_(net, 0.1)
    given = calibration()
    teacher, x = sp.fuse(net), torch.cat(given)
    wanted = teacher[:3](x)
    keep = [0, 2, 5]
    recovery = sp.Recovery(given, ridge=1e-2, head=False, rows=10**9)
    sp.prune_(net, sp.Plan(net._spalier.structure, {"0": keep}), recover=recovery)
    seen = F.relu(net[0](x))
    base = F.conv2d(seen, net[2].weight, net[2].bias, stride, 1)
    patches = F.unfold(seen, 3, padding=1, stride=stride).unflatten(1, (3, 9))
    features = patches.flatten(1, 2) if kernel == "full" else patches[:, :, 4]
    rows = features.transpose(1, 2).flatten(0, 1)
    missing = (wanted - base).flatten(2).transpose(1, 2).flatten(0, 1)
    first = teacher[2].weight[:, keep] - net[2].weight  # the adapter as it was, cut
    before = (first.flatten(1) if kernel == "full" else first[:, :, 1, 1]).T
    level = 1e-2 * rows.square().mean()
    gram = rows.T @ rows / len(rows) + level * torch.eye(rows.shape[1], dtype=torch.float64)
    best = torch.linalg.solve(gram, rows.T @ missing / len(rows) + level * before)
    found = sp.fuse(net)[2].weight - net[2].weight
    found = (found.flatten(1) if kernel == "full" else found[:, :, 1, 1]).T
    torch.testing.assert_close(found, best, rtol=1e-6, atol=1e-9)


def test_what_can_be_restored_is_restored_exactly():
    """A channel that is twice another one is not missed."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        net[0].weight[3], net[0].bias[3] = 2 * net[0].weight[1], 2 * net[0].bias[1]
    x = torch.randn(50, 5, dtype=torch.float64)
    sp.attach_(net, sp.SPLoRA(rank=1), targets="2", head="4", example=x)
    wanted = net(x)
    report = sp.prune_(net, sp.Plan(net._spalier.structure, {"0": [0, 1, 2]}), recover=sp.Recovery([x], ridge=1e-12))
    torch.testing.assert_close(net(x), wanted, rtol=1e-3, atol=1e-5)
    assert report.layers["2"][1] < 1e-9 < report.layers["2"][0]


def test_the_head_is_solved_in_full():
    """Least squares with a bias, as any textbook has it."""
    net, given = adapted(), calibration()
    x = torch.cat(given)
    wanted = net(x)
    recovery = sp.Recovery(given, norms=False, adapters=False, ridge=1e-12)
    sp.prune_(net, sp.Plan(net._spalier.structure, PLAN), recover=recovery)
    seen = net[:8](x).detach()
    rows = torch.cat([seen, torch.ones(len(seen), 1, dtype=torch.float64)], 1)
    best = torch.linalg.lstsq(rows, wanted.detach()).solution
    torch.testing.assert_close(net[8].weight.detach(), best[:-1].T, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(net[8].bias.detach(), best[-1], rtol=1e-4, atol=1e-6)


def test_norms_take_the_statistics_of_what_they_now_see():
    net, given = adapted(), calibration()
    recovery = sp.Recovery(given, adapters=False, head=False)
    report = sp.prune_(net, sp.Plan(net._spalier.structure, PLAN), recover=recovery)
    x = torch.cat(given)
    seen = net[0](x)
    torch.testing.assert_close(net[1].running_mean, seen.mean((0, 2, 3)))
    torch.testing.assert_close(net[1].running_var, seen.transpose(0, 1).flatten(1).var(1))
    assert (report.norms, report.layers, report.samples) == (2, {}, 120)
    assert net[1].momentum == 0.1
    assert not net[1].training


@pytest.mark.parametrize("adapter", [sp.SPLoRA(3), sp.SPLoRA(3, kernel="full"), sp.SPPaRA(), sp.FineTune()])
def test_no_layer_misses_more_than_before(adapter):
    torch.manual_seed(0)
    net = tiny_cnn().double().train()
    for x in calibration(seed=7):
        net(x)
    sp.attach_(net.eval(), adapter, head="8", example=EXAMPLE)
    report = sp.prune_(net, sp.Plan(net._spalier.structure, PLAN), recover=calibration())
    assert set(report.layers) == {"0", "3", "8"}
    assert all(now <= was + 1e-9 for was, now in report.layers.values())
    assert report.layers["8"][1] < report.layers["8"][0]
    assert "missing after the cut" in str(report)


def test_it_needs_no_labels_and_repeats():
    made = []
    for batch in (
        calibration(),
        [(x, torch.zeros(len(x))) for x in calibration()],
        [(x,) for x in calibration()],
    ):
        net = adapted()
        sp.prune_(net, sp.Plan(net._spalier.structure, PLAN), recover=batch)
        made.append(net(EXAMPLE))
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


def test_learned_parameters_stay_the_same_objects():
    net = adapted().train()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1, momentum=0.9)
    net(EXAMPLE).sum().backward()
    optimizer.step()
    before = [id(p) for p in net.parameters() if p.requires_grad]
    sp.prune_(net, sp.Plan(net._spalier.structure, PLAN), optimizer=optimizer, recover=calibration())
    assert [id(p) for p in net.parameters() if p.requires_grad] == before
    assert all(m.training for m in net.modules())
    net(EXAMPLE).sum().backward()
    optimizer.step()
    sp.detach_(net)
    assert net[3].weight.shape == (12, 8, 3, 3)


def test_layers_that_cannot_be_solved_are_listed():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 8)
            self.c = nn.Conv1d(8, 8, 1, groups=2)
            self.fc = nn.Linear(8, 2)

        def forward(self, x):
            x = self.b(F.relu(self.b(F.relu(self.a(x)))))
            return self.fc(F.relu(self.c(x[:, :, None])[:, :, 0]))

    net = Net().double()
    x = torch.randn(30, 4, dtype=torch.float64)
    sp.attach_(net, sp.SPLoRA(rank=2), head="fc", example=x)
    stream = next(s for s in net._spalier.structure.streams if s.size > 2)
    keep = {stream.name: range(stream.size - 1)}
    report = sp.prune_(net, sp.Plan(net._spalier.structure, keep), recover=[x])
    assert report.skipped == {"b": "it runs 2 times in one forward", "c": "its channels are in groups"}
    assert set(report.layers) == {"a", "fc"}


def test_a_network_without_adapters_gets_new_statistics():
    net = tiny_cnn().double()
    plan = sp.Plan(sp.trace(net, EXAMPLE), PLAN)
    weight = net[8].weight.detach()[:, PLAN["3"]].clone()
    report = sp.prune_(net, plan, recover=calibration())
    assert (report.norms, report.layers) == (2, {})
    assert torch.equal(net[8].weight, weight)


# bad input


def test_bad_calibration_is_refused_and_nothing_is_changed():
    net = adapted()
    before, plan = snapshot(net), sp.Plan(net._spalier.structure, PLAN)
    for recover, match in (
        ([], "there are none"),
        (calibration()[0], "expected an iterable"),
        (5, "are a int, expected an iterable"),
        ([3], "calibration batch 0 is a int"),
        ([calibration()[0], calibration()[0][:0]], "calibration batch 1 holds no samples"),
        ([calibration()[0], calibration()[0][:, :, :4]], "cannot be put together"),
        ([torch.randn(4, 2, 6, 6, dtype=torch.float64)], "does not run on the calibration batches"),
        ([torch.full((4, 3, 6, 6), float("nan"), dtype=torch.float64)], "NaN or infinite"),
    ):
        with pytest.raises(RecoveryError, match=match):
            sp.prune_(net, plan, recover=recover)
        assert_unchanged(net, before)
    for options, match in (
        ({"ridge": 0}, "ridge"),
        ({"rows": 0}, "rows"),
        ({"norms": False, "adapters": False, "head": False}, "nothing"),
    ):
        with pytest.raises(RecoveryError, match=match):
            sp.Recovery(calibration(), **options)


def test_an_interrupt_in_the_middle_rolls_back(monkeypatch):
    net = adapted()
    before = snapshot(net)

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("spalier.pruning.recovery.set_best_", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sp.prune_(net, sp.Plan(net._spalier.structure, PLAN), recover=calibration())
    assert_unchanged(net, before)
    monkeypatch.undo()
    sp.prune_(net, sp.Plan(net._spalier.structure, PLAN), recover=calibration())


# on a real network


SLOW = pytest.mark.slow


@pytest.mark.parametrize("channels", [pytest.param(0.7, marks=SLOW), 0.5, pytest.param(0.3, marks=SLOW)])
def test_each_part_of_it_raises_accuracy_before_any_training(channels):
    rows = np.array([_accuracies(channels, seed) for seed in range(3)])
    assert (rows[:, 1] > rows[:, 0]).all(), rows  # (a) over nothing
    assert (rows[:, 3] > rows[:, 1] + 3).all(), rows  # (b) over (a) alone
    assert rows[:, 2].mean() > rows[:, 1].mean(), rows  # of (b), the adapters without the head


def _accuracies(channels, seed):
    """Percent right after a prune in one shot: nothing done, norms, adapters too, head too."""
    net, given = trained(seed), batches(8)
    plan = sp.select(net, sp.score(net, given, "taylor", loss=F.cross_entropy), channels=channels)
    options = [
        None,
        sp.Recovery(given, adapters=False, head=False),
        sp.Recovery(given, head=False),
        sp.Recovery(given),
    ]
    row = []
    for recovery in options:
        small = copy.deepcopy(net)
        sp.prune_(small, plan, recover=recovery)
        row.append(accuracy(small))
    return row


# what a review found


def test_a_network_that_was_pruned_freely_before_is_recovered_as_any_other():
    """What a writer returns is looked at before a gather spreads it."""
    net, given = trained(), batches(4)
    scores = sp.score(net, given, "taylor", loss=F.cross_entropy)
    sp.prune_(net, sp.select(net, scores, channels=0.7, writers="free"), recover=given)
    scores = sp.score(net, given, "taylor", loss=F.cross_entropy)
    plan = sp.select(net, scores, channels=0.5, writers="free")
    report = sp.prune_(net, plan, recover=given)
    assert all(now <= was + 1e-6 for was, now in report.layers.values())
    assert accuracy(net) > 60


def test_tied_layers_are_left_alone():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Embedding(16, 16), nn.Linear(16, 12), nn.Linear(12, 16)
            self.d = nn.Linear(16, 16, bias=False)
            self.d.weight = self.a.weight

        def forward(self, x):
            return self.d(self.c(torch.relu(self.b(self.a(x)))))

    net = Tied().double()
    x = torch.randint(0, 16, (30, 5))
    sp.attach_(net, sp.SPLoRA(rank=2), example=x)
    name = next(s.name for s in net._spalier.structure.streams if s.size == 12)
    report = sp.prune_(net, sp.Plan(net._spalier.structure, {name: range(8)}), recover=[x])
    assert report.skipped == {"a": "it shares its weight", "d": "it shares its weight"}
    assert set(report.layers) == {"b", "c"}


def test_inputs_are_put_together_by_name():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.fc = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

        def forward(self, x, shift, mask=None):
            x = self.norm(self.a(x) + shift)
            return self.fc(x if mask is None else x * mask)

    def means(given):
        torch.manual_seed(0)
        net = Two().double().eval()
        plan = sp.Plan(sp.trace(net, given[0]), {})
        sp.prune_(net, plan, recover=given)
        return net.norm.running_mean

    torch.manual_seed(1)
    x, shift = (torch.randn(10, n, dtype=torch.float64) for n in (4, 6))
    one = [{"x": x[:5], "shift": shift[:5]}, {"x": x[5:], "shift": shift[5:]}]
    other = [{"x": x[:5], "shift": shift[:5]}, {"shift": shift[5:], "x": x[5:]}]
    assert torch.equal(means(one), means(other))
    mask = torch.ones(6, dtype=torch.float64)  # no samples there
    assert torch.equal(means([{**each, "mask": mask} for each in one]), means(one))


def test_without_norms_a_shift_is_fitted_too():
    net, given = adapted(), calibration()
    x, teacher = torch.cat(given), sp.fuse(net)
    wanted = teacher[:4](x)[:, PLAN["3"]]
    missing = {}
    for name, recovery in (("nothing", None), ("fitted", sp.Recovery(given, norms=False, head=False))):
        small = copy.deepcopy(net)
        sp.prune_(small, sp.Plan(small._spalier.structure, PLAN), recover=recovery)
        missing[name] = (small[:4](x) - wanted).square().mean().item()
    assert missing["fitted"] < missing["nothing"]


def test_an_optimizer_begins_anew_with_what_was_set():
    net = adapted().train()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1, momentum=0.9)
    net(EXAMPLE).sum().backward()
    optimizer.step()
    sp.prune_(net, sp.Plan(net._spalier.structure, PLAN), optimizer=optimizer, recover=calibration())
    assert net[3].weight_adapter.down not in optimizer.state
    assert net[4].weight in optimizer.state


def test_a_network_that_was_saved_in_between_goes_on():
    import pickle

    net = adapted()
    sp.prune_(net, sp.Plan(net._spalier.structure, {"0": [0, 2, 3, 5, 7]}))
    loaded = pickle.loads(pickle.dumps(net))
    structure = loaded._spalier.structure
    report = sp.prune_(loaded, sp.Plan(structure, {"3": [0, 1, 4]}), recover=calibration())
    assert report.norms == 2
    assert loaded[3].weight.shape == (3, 5, 3, 3)
