"""Plans that meet a budget to one unit, and predictions that come true."""

import copy
import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_unchanged, awaken_, snapshot
from torch import nn
from trained import EXAMPLE, DigitNet

import spalier as sp
from spalier import criteria
from spalier.budget import Meter
from spalier.criteria.score import Scores, normalised
from spalier.errors import BudgetError, ConfigError, PlanError, SpalierError, TargetError
from spalier.pruning.plan import kept_after, kept_of
from spalier.selecting import Order, group


def adapted(rank=4):
    torch.manual_seed(0)
    net = DigitNet(8).eval()
    sp.attach_(net, sp.SPLoRA(rank=rank), head="fc", example=EXAMPLE)
    return awaken_(net, 0.05)


NET = adapted()
STRUCTURE = NET._spalier.structure


def random_scores(seed=0):
    return sp.score(NET, criterion=criteria.Random(seed=seed))


def size_of(plan, kind):
    meter = Meter(NET, STRUCTURE)
    size = {"channels": meter.channels, "weights": meter.parameters, "macs": meter.macs}[kind]
    return size(kept_after(plan, kept_of(NET, STRUCTURE))), size(meter.whole)


def assert_comes_true(net, plan, example):
    """`count` finds what the plan predicts."""
    small = copy.deepcopy(net)
    sp.prune_(small, plan)
    found, predicted = sp.count(small, example), plan.prediction
    assert (found.parameters, found.learned, found.bytes, found.macs) == (
        predicted.parameters,
        predicted.learned,
        predicted.bytes,
        predicted.macs,
    )
    return small


# budgets


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(["channels", "weights", "macs"]),
    share=st.floats(0.15, 1),
    ranking=st.sampled_from(["global", "local"]),
    writers=st.sampled_from(["coupled", "free"]),
    seed=st.integers(0, 5),
)
def test_a_budget_is_met_to_one_unit(kind, share, ranking, writers, seed):
    scores = random_scores(seed)
    plan = sp.select(NET, scores, ranking=ranking, writers=writers, **{kind: share})
    size, whole = size_of(plan, kind)
    assert size <= share * whole + 1e-6
    if kind == "channels" and writers == "free":
        assert size == math.floor(share * whole + 1e-9)  # every unit is one channel
    last = last_to_go(plan, scores, ranking)
    if last is not None:
        name, unit = last
        bigger = sp.Plan(STRUCTURE, {**plan.keep, name: [*plan.keep[name], unit]}, writers=writers)
        assert size_of(bigger, kind)[0] > share * whole  # with it the plan would be too large


STRUCTURE_SIZES = {
    **{s.name: s.size for s in STRUCTURE.streams},
    **{w.name: STRUCTURE.streams[w.stream].size for w in STRUCTURE.writers},
}


def last_to_go(plan, scores, ranking):
    """Of all units that are gone, the one that was worth most, or that its layer gave last."""
    gone = []
    for name, units in plan.keep.items():
        free = plan.writers == "free" and name in {w.name for w in STRUCTURE.writers}
        values = scores[name] if free else scores.of(name)
        left_out = sorted(set(range(len(values))) - set(units))
        if left_out:
            best = max(left_out, key=lambda unit: values[unit])
            gone.append((values[best] if ranking == "global" else len(left_out) / len(values), name, best))
    # of equal shares the last layer's goes last
    order = {name: place for place, name in enumerate(plan.keep)}
    return max(gone, key=lambda each: (each[0], order[each[1]]))[1:] if gone else None


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_least_go_first_and_ties_break_by_index(data):
    """Against the definition: sort all units of all layers, and drop from the bottom."""
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    values = [data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)) for n in sizes]
    groups = [group(str(i), np.array(v, float)) for i, v in enumerate(values)]
    order = Order(groups, "global")
    assert len(order) == sum(sizes) - len(sizes)
    listed = sorted((v, i, -j) for i, layer in enumerate(values) for j, v in enumerate(layer))
    left = {i: set(range(n)) for i, n in enumerate(sizes)}
    for steps in range(len(order) + 1):
        assert {name: set(np.flatnonzero(m)) for name, m in order.masks(steps).items()} == {
            str(i): units for i, units in left.items()
        }
        for entry in listed:  # the least one whose layer has another left
            _, i, j = entry
            if -j in left[i] and len(left[i]) > 1:
                left[i].remove(-j)
                break


def test_local_ranking_takes_the_same_share_of_each_layer():
    plan = sp.select(NET, random_scores(), channels=0.5, ranking="local")
    for name, units in plan.keep.items():
        assert abs(len(units) - STRUCTURE_SIZES[name] / 2) <= 1


def test_the_papers_steps_of_filters_come_out_exactly():
    """26,560 filters of ResNet-50, 1,328 left after 19 steps of 5%; on the meta device nothing is computed."""
    with torch.device("meta"):
        net = sp.models.resnet50(classes=10, stem="cifar")
    structure = sp.trace(net, torch.empty(1, 3, 32, 32, device="meta"))
    scores = sp.score(net, criterion="random", structure=structure)
    plan = sp.select(net, scores, channels=0.95, writers="free")
    assert (plan.prediction.channels, plan.prediction.channels_base) == (26560 - 1328, 26560)
    plan = sp.select(net, scores, channels=0.05, writers="free")
    assert plan.prediction.channels == 1328


def test_normalisation_and_aggregation_do_what_they_say():
    scores = np.array([1.0, 2.0, np.nan, 5.0])
    wanted = {"none": 1, "sum": 8, "l2": math.sqrt(30), "mean": 8 / 3, "max": 5}
    for how, size in wanted.items():
        np.testing.assert_allclose(normalised(scores, how), scores / size)
    np.testing.assert_array_equal(normalised(np.zeros(3), "sum"), np.zeros(3))
    both = Scores(STRUCTURE, "made", "none", {"x": {"a": np.array([1.0, 4.0]), "b": np.array([3.0, 1.0])}})
    for how in ("sum", "mean", "max"):
        np.testing.assert_allclose(both.of("x", aggregate=how), getattr(np, how)([[1, 4], [3, 1]], axis=0))


def test_the_options_of_a_ranking_change_the_plan():
    scores = sp.score(NET, criterion="weight")
    plans = [
        sp.select(NET, scores, channels=0.4, normalise=how, aggregate=together).keep
        for how, together in itertools.product(("none", "sum", "l2", "max"), ("sum", "max"))
    ]
    assert len({str(plan) for plan in plans}) > 4


@pytest.mark.parametrize("writers", ["coupled", "free"])
@pytest.mark.parametrize("multiple", [4, 8])
def test_widths_become_multiples(multiple, writers):
    plan = sp.select(NET, random_scores(), macs=0.6, round_to=multiple, writers=writers)
    sizes = STRUCTURE_SIZES
    assert all(len(units) % multiple == 0 or len(units) == sizes[name] for name, units in plan.keep.items())
    assert any(len(units) < sizes[name] for name, units in plan.keep.items())
    assert size_of(plan, "macs")[0] <= 0.6 * size_of(plan, "macs")[1]


def test_heads_are_wide_enough_as_they_are():
    """Rounding is of channels: a head of 8 channels is a multiple of 8 by itself."""
    entry = zoo.by_name("transformers/vit")
    net, example = entry.make(), entry.example()
    structure = sp.trace(net, example)
    scores = sp.score(net, criterion="random", structure=structure)
    plan = sp.select(net, scores, channels=0.6, round_to=8)
    kept = kept_after(plan, kept_of(net, structure))
    for stream in structure.streams:
        for m in (m for m in stream.members if m.role == "writer"):
            left = kept.of(structure, m.tensor)[m.axis]
            assert left.all() or left.sum() % 8 == 0


def test_some_units_stay_everywhere():
    plan = sp.select(NET, random_scores(), channels=0.5, min_keep=4)
    assert min(len(units) for units in plan.keep.values()) >= 4


def test_protected_layers_stay_whole():
    plan = sp.select(NET, random_scores(), channels=0.8, protect=["layers.1.conv1", "layers.2.*"])
    small = copy.deepcopy(NET)
    sp.prune_(small, plan)
    assert small.layers[1].conv1.weight.shape[0] == 16
    assert small.layers[2].conv1.weight.shape[0] == 32
    assert small.layers[0].conv1.weight.shape[0] < 8
    with pytest.raises(TargetError, match="protect"):
        sp.select(NET, random_scores(), channels=0.5, protect="nowhere")


# predictions


@pytest.mark.parametrize("writers", ["coupled", "free"])
@pytest.mark.parametrize("adapter", [sp.SPLoRA(4), sp.SPLoRA(4, kernel="full"), sp.SPPaRA(), sp.LoRA(4), sp.FineTune()])
def test_predictions_come_true(adapter, writers):
    net = DigitNet(8).eval()
    sp.attach_(net, adapter, head="fc", example=EXAMPLE)
    for share in (0.6, 0.3):  # the second time on a network that was pruned before
        plan = sp.select(net, sp.score(net, criterion="weight"), channels=share, writers=writers)
        net = assert_comes_true(net, plan, EXAMPLE)
    text = str(plan)
    assert f"{plan.prediction.parameters:,} of" in text
    assert f"{plan.prediction.macs:,} of" in text


PREDICTED = [
    "torchvision/densenet121", "torchvision/mobilenet_v3_small", "torchvision/vit_b_16", "torchvision/regnet_y_400mf",
    "timm/resnetv2_50x1_bit", "transformers/bert", "transformers/llama", "transformers/gpt2", "made/einsum_attention",
    "made/parametrised", "made/bilinear", "made/pooled_heads", "made/heads_of_one", "made/weight_normed",
]  # fmt: skip


@pytest.mark.parametrize("entry", zoo.parameters(*PREDICTED))
def test_predictions_come_true_in_all_kinds_of_networks(entry):
    net, example = entry.make(), entry.example()
    structure = sp.trace(net, example)
    scores = sp.score(net, criterion="random", structure=structure)
    for options in ({}, {"writers": "free"}, {"min_keep": 1}, {"min_keep": 1, "writers": "free"}):
        assert_comes_true(net, sp.select(net, scores, channels=0.6, **options), example)


def test_predictions_come_true_where_one_unit_is_left():
    """Products over one entry are no longer matrix products for PyTorch; they cost as much as predicted."""
    entry = zoo.by_name("made/pooled_heads")
    net, example = entry.make(), entry.example()
    structure = sp.trace(net, example)
    scores = sp.score(net, criterion="random", structure=structure)
    least = sp.select(net, scores, channels=0.2, ranking="local", min_keep=1, structure=structure)
    assert min(map(len, least.keep.values())) == 1
    assert_comes_true(net, least, example)


# floors


def lopsided():
    """A network whose first layer is worth next to nothing beside its second."""
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    with torch.no_grad():
        net[0].weight.mul_(1e-3)
    structure = sp.trace(net, torch.zeros(2, 4))
    return net, sp.score(net, criterion="weight", structure=structure)


def test_no_layer_collapses_unless_that_is_asked_for():
    net, scores = lopsided()
    plan = sp.select(net, scores, channels=0.3, normalise="none")
    assert len(plan.keep["0"]) == 10  # half of 30% of 64, rounded up
    assert not plan.nearly_gone
    assert "nearly gone" not in str(plan)
    asked = sp.select(net, scores, channels=0.3, normalise="none", min_keep=1)
    assert asked.nearly_gone == {"0": (1, 64)}
    assert "nearly gone: 0 (1 of 64)" in str(asked)
    assert "min_keep=4" in asked.warning()
    assert len(plan.keep["0"]) + len(plan.keep["2"]) == len(asked.keep["0"]) + len(asked.keep["2"])


def test_a_floor_that_nobody_asked_for_is_in_nobodys_way():
    net, scores = lopsided()
    assert sum(map(len, sp.select(net, scores, channels=0.03).keep.values())) == 3  # less than three of each layer
    with pytest.raises(BudgetError, match="cannot be reached"):
        sp.select(net, scores, channels=0.03, min_keep=3)


# ranks


def test_ranks_shrink_by_importance():
    net = adapted(rank=6)
    plan = sp.select(net, rank=0.5)
    assert not plan.keep
    sizes = {name: len(kept) for name, kept in plan.ranks.items()}
    assert sum(sizes.values()) == sum(6 for _ in sizes) // 2
    assert len(set(sizes.values())) > 1
    small = assert_comes_true(net, plan, EXAMPLE)
    for entry in small._spalier.updated:
        assert entry.update.rank == sizes[entry.name]
    assert "rank" in str(plan)


def test_channels_and_ranks_in_one_plan():
    net = adapted(rank=6)
    plan = sp.select(net, sp.score(net, criterion="weight"), channels=0.5, rank=0.5, ranking="local")
    assert all(len(kept) == 3 for kept in plan.ranks.values())
    assert_comes_true(net, plan, EXAMPLE)


# bytes


@pytest.mark.parametrize(("limit", "options"), [(7_000, {}), (4_000, {}), (5_000, {"rank": 0.5})])
def test_a_task_of_so_many_bytes(limit, options):
    plan = sp.select(NET, random_scores(), bytes=limit, **options)
    assert plan.prediction.task_bytes <= limit
    assert plan.prediction.task_bytes > 0.9 * limit
    assert_comes_true(NET, plan, EXAMPLE)


def test_without_scores_ranks_alone_make_room():
    meter = Meter(NET, STRUCTURE)
    whole = meter.task_bytes(meter.whole, {})
    plan = sp.select(NET, bytes=int(0.8 * whole))
    assert not plan.keep
    assert plan.prediction.task_bytes <= 0.8 * whole


# latency


@pytest.mark.slow
def test_a_budget_of_time_is_measured():
    net = sp.models.resnet18(classes=10, stem="cifar").eval()
    structure = sp.trace(net, torch.randn(1, 3, 32, 32))
    scores = sp.score(net, criterion="weight", structure=structure)
    plan = sp.select(net, scores, latency=0.6, example=torch.randn(2, 3, 32, 32), ranking="local")
    assert 0 < plan.prediction.latency <= 0.6 * plan.prediction.latency_base
    assert plan.prediction.channels < plan.prediction.channels_base
    assert "measured" in str(plan)


def test_a_plan_that_is_no_faster_warns(monkeypatch):
    """On a machine where everything takes as long as everything else."""
    monkeypatch.setattr("spalier.budget.seconds", lambda nets, *_: [1.0] * len(nets))
    with pytest.warns(UserWarning, match="will not be faster"):
        sp.select(NET, random_scores(), latency=1.0)
    refused("latency=0.5 cannot be reached: .* 1.000 was measured", random_scores(), latency=0.5)


def test_what_is_measured_corrects_the_table(monkeypatch):
    """The table says that half the channels take half the time; the whole network takes longer than that."""
    meter = Meter(NET, STRUCTURE)
    whole = meter.channels(meter.whole)
    monkeypatch.setattr("spalier.budget.Latency._measured_layers", lambda self: ({}, 1.0))

    def timed(self, plan, _):
        left = meter.channels(kept_after(plan, meter.kept)) / whole
        return 0.3 + 0.7 * left, 1.0

    monkeypatch.setattr("spalier.budget.Latency._timed", timed)
    plan = sp.select(NET, random_scores(), latency=0.6)
    assert 0.55 < plan.prediction.latency <= 0.6


# bad input


def refused(match, *args, error=BudgetError, net=NET, **kwargs):
    before = snapshot(net)
    with pytest.raises(error, match=match):
        sp.select(net, *args, **kwargs)
    assert_unchanged(net, before)


@pytest.mark.parametrize("value", [0, -0.1, 1.0001, float("nan")])
def test_shares_outside_their_range_are_refused(value):
    for kind in ("channels", "weights", "macs", "latency", "rank"):
        refused(f"{kind} is", random_scores(), **{kind: value})
    refused("bytes is", random_scores(), bytes=0.5)


def test_budgets_that_cannot_be_say_what_can():
    refused(r"cannot be reached: .* 0\.\d+ is left", random_scores(), channels=0.02)
    refused("cannot be reached", random_scores(), channels=0.25, min_keep=7)
    refused("bytes=10 cannot be reached", random_scores(), bytes=10)
    refused("expected one budget", random_scores(), channels=0.5, macs=0.5)
    refused("no budget was given", random_scores())
    refused("needs scores", channels=0.5, error=PlanError)
    refused("no adapter here", rank=0.5, net=DigitNet(8), structure=STRUCTURE)


def test_options_that_are_not_known_are_refused():
    for options in (
        {"ranking": "globl"},
        {"writers": "free?"},
        {"normalise": "l3"},
        {"aggregate": "min"},
        {"min_keep": 0},
        {"round_to": 1.5},
    ):
        refused(next(iter(options)), random_scores(), channels=0.5, error=ConfigError, **options)


def test_scores_from_before_a_prune_are_refused():
    net = copy.deepcopy(NET)
    scores = random_scores()
    sp.prune_(net, sp.select(net, scores, channels=0.5))
    with pytest.raises(PlanError, match="score it again"):
        sp.select(net, scores, channels=0.4)


def test_a_network_goes_down_step_by_step():
    """Units are counted in the base, and shares are of the base, however often one prunes."""
    net = copy.deepcopy(NET)
    for share in (0.8, 0.6, 0.4, 0.2):
        scores = sp.score(net, [(torch.randn(4, 1, 8, 8), torch.randint(0, 10, (4,)))], loss=F.cross_entropy)
        plan = sp.select(net, scores, channels=share, writers="free")
        sp.prune_(net, plan)
        assert plan.prediction.density["channels"] <= share
        assert plan.prediction.density["channels"] > share - 0.02
    assert issubclass(BudgetError, SpalierError)


# what a review found


def test_macs_that_the_structure_does_not_know_count_too():
    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.gru = torch.nn.Linear(6, 8), torch.nn.GRU(8, 8, batch_first=True)
            self.b, self.c = torch.nn.Linear(8, 40), torch.nn.Linear(40, 3)

        def forward(self, x):
            return self.c(torch.relu(self.b(self.gru(self.a(x))[0][:, -1])))

    net = Recurrent()
    example = torch.randn(2, 5, 6)
    structure = sp.trace(net, example)
    scores = sp.score(net, criterion="weight", structure=structure)
    whole = sp.count(net, example).macs
    plan = sp.select(net, scores, macs=0.95)
    small = assert_comes_true(net, plan, example)
    assert 0.9 * whole < sp.count(small, example).macs <= 0.95 * whole


def test_a_share_of_ranks_is_of_those_that_they_began_with():
    net = adapted(rank=8)
    for _ in range(2):
        sp.prune_(net, sp.select(net, rank=0.5, ranking="local"))
        assert all(entry.update.rank == 4 for entry in net._spalier.updated)


def test_free_then_coupled():
    net = copy.deepcopy(NET)
    sp.prune_(net, sp.select(net, random_scores(), channels=0.7, writers="free"))
    plan = sp.select(net, sp.score(net, criterion="weight"), channels=0.5, writers="coupled")
    assert_comes_true(net, plan, EXAMPLE)


@pytest.mark.parametrize("adapter", [sp.SPPaRA(), sp.FineTune()])
def test_bytes_of_adapters_without_ranks(adapter):
    net = DigitNet(8).eval()
    sp.attach_(net, adapter, head="fc", example=EXAMPLE)
    meter = Meter(net, net._spalier.structure)
    limit = meter.task_bytes(meter.whole, {}) // 2
    plan = sp.select(net, sp.score(net, criterion="weight"), bytes=limit)
    assert 0.9 * limit < plan.prediction.task_bytes <= limit


def test_protected_adapters_keep_their_rank():
    net = torch.nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval()
    sp.attach_(net, sp.SPLoRA(rank=4), example=torch.randn(2, 3, 8))
    plan = sp.select(net, rank=0.7, protect="self_attn")
    assert "self_attn.in_proj_weight" not in plan.ranks
    assert plan.ranks


def test_a_budget_of_what_cannot_be_counted_is_refused():
    structure = dataclasses.replace(STRUCTURE, example=None)
    net = DigitNet(8).eval()
    scores = sp.score(net, criterion="weight", structure=structure)
    refused("cannot be counted", scores, macs=0.5, net=net)
    assert sp.select(net, scores, channels=0.5).prediction.macs is None


# free writers, then coupled ones


class Sums(torch.nn.Module):
    def __init__(self, is_called):
        super().__init__()
        self.a, self.b, self.out = torch.nn.Linear(6, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
        self.is_called = is_called

    def forward(self, x):
        x = self.a(x)
        # a layer that is not called is neither free nor seen
        return self.out(x + (self.b(x) if self.is_called else F.linear(x, self.b.weight, self.b.bias)))


@pytest.mark.parametrize("criterion", ["weight", "taylor", "random"])
@pytest.mark.parametrize(
    ("is_called", "keep"), [(True, {"b": [0]}), (True, {"a": [1, 4], "b": [2, 3, 4]}), (False, {"a": [0, 3]})]
)
def test_coupled_after_free(criterion, is_called, keep):
    torch.manual_seed(0)
    rows, targets = torch.randn(4, 6).double(), torch.tensor([0, 1, 0, 1])
    net = Sums(is_called).double()
    structure = sp.trace(net, rows)
    sp.prune_(net, sp.Plan(structure, keep, writers="free"))
    scores = sp.score(net, [(rows, targets)], criterion=criterion, loss=F.cross_entropy, structure=structure)
    whole = set(sp.kept_units(net)["streams"]["a"])
    for share, ranking in itertools.product((0.5, 0.3, 0.26), ("global", "local")):
        plan = sp.select(net, scores, weights=share, ranking=ranking)
        pruned = copy.deepcopy(net)
        sp.prune_(pruned, plan)
        left = sp.kept_units(pruned)
        assert 0 < len(left["streams"]["a"]) <= len(whole)
        assert all(left["writers"].get(name, left["streams"]["a"]) for name in keep)


def test_a_free_writer_keeps_one_of_its_own_units():
    torch.manual_seed(0)
    rows = torch.randn(4, 6).double()
    net = Sums(is_called=True).double()
    structure = sp.trace(net, rows)
    sp.prune_(net, sp.Plan(structure, {"b": [0]}, writers="free"))
    values = np.arange(8.0)  # its one unit is the least of all
    scores = Scores(structure, "made", "none", {"a": {"a": values, "b": np.where(values == 0, 0, np.nan)}})
    sp.prune_(copy.deepcopy(net), sp.select(net, scores, weights=0.3))
    assert sp.select(net, scores, weights=0.3).keep["a"][0] == 0
    with pytest.raises(PlanError, match=r"empties 'b'.* units of its own, 0: keep one of these"):
        sp.prune_(net, sp.Plan(structure, {"a": [5, 6]}))
