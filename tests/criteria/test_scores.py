"""Every criterion against a slow twin, and what holds of all of them."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zoo
from oracles import scores as oracle
from scipy.stats import spearmanr
from support import assert_unchanged, awaken_, snapshot, tiny_cnn
from torch import nn
from torch.utils._pytree import tree_leaves
from trained import DigitNet, accuracy, batches, learn, trained

import spalier as sp
from spalier import criteria
from spalier.errors import ConfigError, ScoreError, TraceError

EXAMPLE = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DATA_DRIVEN = ["gradient", "taylor", "lrp", "second_order", "movement"]


def data(count=3, size=4, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 3, 6, 6, dtype=dtype, generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def settled_cnn():
    """Adapted, awake, with statistics that are not those of a fresh norm."""
    torch.manual_seed(0)
    net = tiny_cnn().double().train()
    for x, _ in data(4, 8, seed=5):
        net(x)
    for norm in (net[1], net[4]):
        nn.init.uniform_(norm.weight, -1, 1.5)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
    sp.attach_(net.eval(), sp.SPLoRA(rank=2), head="8", example=EXAMPLE)
    return awaken_(net)


def joined(given):
    return torch.cat([x for x, _ in given]), torch.cat([y for _, y in given])


@pytest.mark.parametrize("name", ["taylor", "gradient", "movement"])
def test_first_order_criteria_equal_a_loop_over_samples(name):
    net, given = settled_cnn(), data()
    found = sp.score(net, given, name, loss=F.cross_entropy)
    plain = sp.fuse(net).eval()
    for layer, norm in (("0", "1"), ("3", "4")):
        wanted = getattr(oracle, name)(plain, norm, *joined(given))
        np.testing.assert_allclose(found[layer], wanted.numpy(), rtol=1e-9, atol=1e-14)
    assert found.samples == 12


def test_batches_of_different_sizes_count_every_sample_once():
    net, given = settled_cnn(), data()
    x, y = joined(given)
    uneven = [(x[:7], y[:7]), (x[7:8], y[7:8]), (x[8:], y[8:])]
    for name in DATA_DRIVEN:
        a, b = (sp.score(net, each, name, loss=F.cross_entropy) for each in (given, uneven))
        np.testing.assert_allclose(a["3"], b["3"], rtol=1e-9, err_msg=name)


def test_second_order_equals_the_whole_hessian():
    net, given = settled_cnn(), data(1)
    found = sp.score(net, given, "second_order", loss=F.cross_entropy)
    plain = sp.fuse(net).eval()
    for layer, norm in (("0", "1"), ("3", "4")):
        wanted = oracle.second_order(plain, ["1", "4"], norm, *joined(given))
        np.testing.assert_allclose(found[layer], wanted.numpy(), rtol=1e-8)


@pytest.mark.parametrize("p", [0.5, 1, 2, 3.5])
def test_weight_is_the_norm_of_fused_and_folded_weights(p):
    net = settled_cnn()
    plain = sp.fuse(net)
    found = sp.score(net, criterion=criteria.Weight(p=p))
    for conv, norm in ((plain[0], plain[1]), (plain[3], plain[4])):
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        folded = (conv.weight * scale[:, None, None, None]).flatten(1)
        wanted = folded.abs().pow(p).sum(1).pow(1 / p)
        np.testing.assert_allclose(found["0" if conv is plain[0] else "3"], wanted.detach().numpy())


def test_magnitude_is_the_mean_of_fused_weights():
    net = settled_cnn()
    plain = sp.fuse(net)
    found = sp.score(net, criterion="magnitude")
    np.testing.assert_allclose(found["3"], plain[3].weight.detach().abs().mean((1, 2, 3)).numpy())


def test_literal_weight_looks_at_the_base_alone():
    net = settled_cnn()
    scale = net[4].weight / (net[4].running_var + net[4].eps).sqrt()
    wanted = (net[3].weight * scale[:, None, None, None]).abs().sum((1, 2, 3))
    found = sp.score(net, criterion=criteria.Weight(literal=True))["3"]
    np.testing.assert_allclose(found, wanted.detach().numpy())
    assert not np.allclose(found, sp.score(net, criterion="weight")["3"])


def test_the_literal_definitions_are_the_published_ones():
    """Before the norm, with the batch's statistics, and signs until all is summed; adapters take part."""
    net, given = settled_cnn(), data()
    for norm in (net[1], net[4]):
        norm.eps = 0.3  # or Taylor, too, would be next to nothing
    wanted = oracle.literal_taylor(net, "3", given)
    found = sp.score(net, given, criteria.Taylor(literal=True), loss=F.cross_entropy)
    np.testing.assert_allclose(found["3"], wanted.numpy(), rtol=1e-9)


def test_the_literal_gradient_cancels():
    """A batch norm in train mode does not care about shifts, so the sum is rounding noise."""
    net, given = settled_cnn(), data()
    found = sp.score(net, given, criteria.Gradient(literal=True), loss=F.cross_entropy)
    honest = sp.score(net, given, "gradient", loss=F.cross_entropy)
    assert found["3"].max() < 1e-12 < 1e-6 < honest["3"].max()


def test_an_adapted_network_scores_as_its_fused_one():
    net, given = settled_cnn(), data()
    plain, structure = sp.fuse(net), net._spalier.structure
    for name in criteria.CRITERIA:
        a = sp.score(net, given, name, loss=F.cross_entropy)
        b = sp.score(plain, given, name, loss=F.cross_entropy, structure=structure)
        for layer in ("0", "3"):
            np.testing.assert_allclose(a[layer], b[layer], rtol=1e-9, atol=1e-15, err_msg=name)


@pytest.mark.parametrize("writers", ["coupled", "free"])
def test_a_pruned_network_scores_as_a_network_of_that_size(writers):
    """Units that are gone are NaN; the others score as in the smaller network itself."""
    net = trained()
    plan = sp.select(net, sp.score(net, criterion="weight"), channels=0.6, writers=writers)
    sp.prune_(net, plan)
    kept = sp.kept_units(net)
    given = batches(1, 8)
    found = sp.score(net, given, "taylor", loss=F.cross_entropy)
    plain = sp.fuse(net).eval()
    for layer, norm in (("layers.1.conv1", "layers.1.bn1"), ("layers.2.conv2", "layers.2.bn2")):
        own = kept["writers"].get(layer) or next(
            units
            for stream, units in kept["streams"].items()
            if layer in sp.score(net, criterion="weight").layers[stream]
        )
        alive = np.flatnonzero(np.isfinite(found[layer]))
        assert alive.tolist() == own
        np.testing.assert_allclose(found[layer][alive], oracle.taylor(plain, norm, *given[0]).numpy(), rtol=1e-3)


@pytest.mark.parametrize("name", list(criteria.CRITERIA))
def test_scores_repeat_and_leave_the_network_alone(name):
    net, given = settled_cnn(), data()
    net.train()
    net[0].weight_adapter.up.grad = torch.ones_like(net[0].weight_adapter.up)
    before, state = snapshot(net), torch.get_rng_state()
    a, b = (sp.score(net, given, name, loss=F.cross_entropy) for _ in range(2))
    assert_unchanged(net, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert net[0].weight_adapter.up.grad.eq(1).all()
    assert all(np.array_equal(a[layer], b[layer]) for layer in ("0", "3"))
    assert all(np.isfinite(a[layer]).all() and a[layer].dtype == np.float64 for layer in ("0", "3"))


def test_random_scores_follow_their_seed():
    net = settled_cnn()
    a, b, c = (sp.score(net, criterion=criteria.Random(seed=s))["3"] for s in (1, 1, 2))
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


@pytest.mark.parametrize("name", ["weight", "magnitude", *DATA_DRIVEN])
def test_single_precision_ranks_as_double(name):
    net = trained()
    given = batches(2)
    wide = copy.deepcopy(net).double()
    a = sp.score(net, given, name, loss=F.cross_entropy)
    b = sp.score(wide, [(x.double(), y) for x, y in given], name, loss=F.cross_entropy)
    for stream, parts in a.layers.items():
        for layer, scores in parts.items():
            assert spearmanr(scores, b.layers[stream][layer]).statistic > 0.99, layer


def test_the_published_gradient_is_rounding_noise():
    net = trained()
    given, literal = batches(2), criteria.Gradient(literal=True)
    a = sp.score(net, given, literal, loss=F.cross_entropy)
    b = sp.score(net.double(), [(x.double(), y) for x, y in given], literal, loss=F.cross_entropy)
    found = [spearmanr(a[layer], b[layer]).statistic for layer in ("layers.1.conv1", "layers.2.conv1")]
    assert max(found) < 0.9


def test_units_of_several_channels_add_up():
    """A head is one unit: its score is that of all its channels together."""
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).double()
    structure = sp.trace(net, EXAMPLE)
    found = sp.score(net, data(1), "taylor", loss=F.cross_entropy, structure=structure)
    np.testing.assert_allclose(found["0"], oracle.taylor(net, "0", *joined(data(1))).numpy(), rtol=1e-9)
    heads = zoo.by_name("transformers/vit")
    vit, example = heads.make(), heads.example()
    structure = sp.trace(vit, example)
    scored = sp.score(vit, [example], "taylor", loss=lambda out: out.logits.square().mean(), structure=structure)
    assert all(len(s) == structure[n].size for n, parts in scored.layers.items() for s in parts.values())


ZOO = [
    "torchvision/densenet121", "torchvision/googlenet", "torchvision/mobilenet_v3_small", "torchvision/vit_b_16",
    "timm/seresnet18", "timm/convnextv2_atto", "transformers/bert", "transformers/llama",
    "made/attention_sequence_first",
]  # fmt: skip


@pytest.mark.parametrize("entry", zoo.parameters(*ZOO))
def test_all_kinds_of_networks_are_scored(entry):
    net, example = entry.make(), entry.example()
    structure = sp.trace(net, example)
    given = [example] if isinstance(example, dict) else [(example,)]

    def loss(output, *_):
        return sum(t.square().mean() for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad)

    for criterion in ("weight", "taylor", "gradient"):
        found = sp.score(net, given, criterion, loss=loss, structure=structure)
        values = [s for parts in found.layers.values() for s in parts.values()]
        assert sum(len(next(iter(parts.values()))) for parts in found.layers.values()) == structure.units
        assert all(np.isfinite(s).all() for s in values)
        assert any(s.std() > 0 for s in values)


# criteria of one's own


def test_a_criterion_of_ones_own_takes_ten_lines():
    class Loudness(criteria.ActivationCriterion):
        needs_gradients = False

        def of_activations(self, values, gradients):
            return values.abs().mean(1)

    class Spread(criteria.WeightCriterion):
        def of_weights(self, weights):
            return weights.std(1)

    net, given = settled_cnn(), data()
    plain = sp.fuse(net)
    found = sp.score(net, given, Loudness())
    with torch.no_grad():
        wanted = plain[:5](joined(given)[0]).abs().mean((0, 2, 3))
    np.testing.assert_allclose(found["3"], wanted.numpy())
    assert found.criterion == "loudness"
    assert np.isfinite(sp.score(net, criterion=Spread())["0"]).all()


def test_a_criterion_that_says_nothing_is_named():
    class Silent(criteria.WeightCriterion):
        pass

    class Mute(criteria.ActivationCriterion):
        pass

    class Nothing(criteria.Criterion):
        pass

    for criterion in (Silent(), Mute(), Nothing()):
        with pytest.raises(ScoreError, match=f"{type(criterion).__name__} does not say"):
            sp.score(settled_cnn(), data(), criterion, loss=F.cross_entropy)


def test_a_criterion_that_answers_wrongly_is_named():
    class Short(criteria.WeightCriterion):
        def of_weights(self, weights):
            return weights[1:].sum(1)

    with pytest.raises(ScoreError, match="short gives '0' scores of shape"):
        sp.score(settled_cnn(), criterion=Short())


# bad input


def refused(match, net, *args, error=ScoreError, **kwargs):
    before = snapshot(net)
    with pytest.raises(error, match=match):
        sp.score(net, *args, **kwargs)
    assert_unchanged(net, before)


def test_bad_batches_are_refused():
    net, given = settled_cnn(), data()
    loss = F.cross_entropy
    refused("there are none", net, [], "taylor", loss=loss)
    refused("none were given", net, None, "taylor", loss=loss)
    refused("a Tensor was given", net, given[0][0], "taylor", loss=loss)
    refused("a int was given; expected an iterable", net, 5, "taylor", loss=loss)
    refused("batch 0 is a int", net, [3], "taylor", loss=loss)
    refused("batch 0 holds no samples", net, [(torch.empty(0, 3, 6, 6).double(), given[0][1])], loss=loss)
    refused("does not run on batch 1", net, [given[0], (given[0][0][:, :2], given[0][1])], loss=loss)
    refused("the loss fails on batch 0", net, [(given[0][0],)], loss=loss)
    bad = given[1][0].clone()
    bad[0, 0, 0, 0] = float("nan")
    refused("batch 1 is nan, its inputs", net, [given[0], (bad, given[1][1])], "taylor", loss=loss)


def test_what_is_not_finite_names_layer_and_batch():
    class Broken(criteria.ActivationCriterion):
        def of_activations(self, values, gradients):
            return values.mean(1) / 0

    net = settled_cnn()
    refused(r"'\d' has scores that are NaN or infinite in batch 0", net, data(), Broken(), loss=F.cross_entropy)
    with torch.no_grad():
        net[3].weight[2, 0, 0, 0] = float("inf")
    refused("'3' has scores that are NaN or infinite", net, criterion="weight")
    net, given = settled_cnn(), data()
    huge = (given[1][0] * 1e200, given[1][1])
    with torch.no_grad():
        net[3].weight *= 1e200
    refused(
        "loss of batch 1 is nan, first not finite at '3'",
        net,
        [given[0], huge],
        "taylor",
        loss=F.cross_entropy,
    )


def test_losses_that_say_nothing_are_refused():
    net, given = settled_cnn(), data()
    refused("without a loss", net, given, "taylor")
    refused("does not depend on the network", net, given, "taylor", loss=lambda out, y: out.detach().sum())
    refused("does not depend on the network", net, given, "taylor", loss=lambda out, y: torch.tensor(1.0))
    refused("expected one number", net, given, "taylor", loss=lambda out, y: out)
    refused("the loss of batch 0 is nan", net, given, "taylor", loss=lambda out, y: out.sum() * float("nan"))


def test_unknown_names_and_networks_are_refused():
    net = settled_cnn()
    refused("expected one of weight, magnitude", net, criterion="tailor", error=ConfigError)
    refused("attach_ an example", tiny_cnn(), criterion="weight", error=TraceError)
    with pytest.raises(ScoreError, match="expected a name such as"):
        sp.score(net, criterion="weight")["nowhere"]
    with pytest.raises(ConfigError, match="expected a positive number"):
        criteria.Weight(p=0)


def test_a_stream_that_cannot_be_seen_is_named():
    entry = zoo.by_name("made/bare_parameters")
    net, structure = entry.make(), sp.trace(entry.make(), entry.example())
    refused(
        "pass through no module",
        net,
        [(entry.example(),)],
        "taylor",
        loss=lambda o: o.sum(),
        structure=structure,
    )
    assert np.isfinite(sp.score(net, criterion="weight", structure=structure)["one_weight"]).all()


# on a real task


DRAWS = 5


@pytest.fixture(scope="module")
def accuracies():
    """Percent right at 50% and 30% of channels for three networks, norms recalibrated and nothing trained."""
    return {name: [_accuracies(name, seed) for seed in range(3)] for name in [*DATA_DRIVEN, "random"]}


def _accuracies(name, seed):
    """In one shot, coupled writers by the sum of their scores; of random scores the mean over several draws."""
    net, given, rows = trained(seed), batches(16), []
    for draw in range(DRAWS if name == "random" else 1):
        chosen = criteria.Random(seed=draw) if name == "random" else name
        scores = sp.score(net, given, chosen, loss=F.cross_entropy)
        for channels in (0.5, 0.3):
            small = copy.deepcopy(net)
            norms = sp.Recovery(given[:8], adapters=False, head=False)
            sp.prune_(small, sp.select(small, scores, channels=channels, aggregate="sum"), recover=norms, check=False)
            rows.append(accuracy(small))
    return np.array(rows).reshape(-1, 2).mean(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", DATA_DRIVEN)
def test_every_data_driven_criterion_beats_random(name, accuracies):
    gains = np.array(accuracies[name]) - np.array(accuracies["random"])
    assert (gains > 0).all(), gains
    assert (gains.mean(0) > [10, 6]).all(), gains


@pytest.mark.slow
def test_training_comes_to_such_a_network():
    assert accuracy(learn(3)) > 93


def test_the_network_of_these_tests_is_a_real_one():
    assert accuracy(trained()) > 93
    assert accuracy(DigitNet()) < 30


# what a review found


def encoder(batch_first):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=batch_first)
            self.embed, self.layer, self.head = nn.Linear(5, 8), layer, nn.Linear(8, 3)

        def forward(self, x):
            x = self.embed(x)
            x = self.layer(x) if batch_first else self.layer(x.transpose(0, 1)).transpose(0, 1)
            return self.head(x.mean(1))

    torch.manual_seed(0)
    return Net().double().eval()


@pytest.mark.parametrize("name", DATA_DRIVEN)
def test_it_does_not_matter_where_samples_are_counted(name):
    """Sequences first or batches first, in batches of any size: the same network has the same scores."""
    x, y = torch.randn(8, 7, 5, dtype=torch.float64), torch.randint(0, 3, (8,))
    uneven = [(x[:6], y[:6]), (x[6:], y[6:])]
    found = []
    for batch_first in (True, False):
        net = encoder(batch_first)
        structure = sp.trace(net, x[:2])
        found.append(sp.score(net, uneven, name, loss=F.cross_entropy, structure=structure))
    for stream, parts in found[0].layers.items():
        for layer, scores in parts.items():
            np.testing.assert_allclose(scores, found[1].layers[stream][layer], rtol=1e-7, atol=1e-12, err_msg=layer)


def test_a_norm_behind_two_layers_is_nobodys():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(4, 6)
            self.norm, self.fc = nn.BatchNorm1d(6), nn.Linear(6, 2)

        def forward(self, x):
            return self.fc(F.relu(self.norm(self.a(x)) + self.norm(self.b(0 * x))))

    net = Net().double().eval()
    nn.init.zeros_(net.b.bias)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 2, (6,))
    found = sp.score(net, [(x, y)], "taylor", loss=F.cross_entropy, structure=sp.trace(net, x))
    assert found["b"].max() < 1e-12 < found["a"].max()


def test_norms_without_statistics_and_transposed_groups_are_weighed():
    first = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU(), nn.Linear(6, 2))
    x = torch.randn(3, 4)
    found = sp.score(first, criterion="weight", structure=sp.trace(first, x))
    np.testing.assert_allclose(found["0"], first[0].weight.detach().abs().sum(1).numpy(), rtol=1e-6)
    second = nn.Sequential(nn.ConvTranspose2d(4, 12, 2, groups=2), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 2, 1))
    nn.init.uniform_(second[1].weight)
    structure = sp.trace(second, torch.randn(1, 4, 3, 3))
    scale = (second[1].weight / (1 + second[1].eps) ** 0.5).view(2, 6)
    wanted = (second[0].weight.view(2, 2, 6, 4).abs() * scale[:, None, :, None]).sum((1, 3)).detach()
    for name, values in sp.score(second, criterion="weight", structure=structure).layers.items():
        axis = 1 if structure[name].size == 2 else 0  # whole groups, or one position of every group
        np.testing.assert_allclose(values["0"], wanted.sum(axis).numpy(), rtol=1e-5)


def test_half_precision_does_not_underflow():
    net = settled_cnn().float()
    given = [(x.float(), y) for x, y in data()]
    wide = sp.score(net, given, "taylor", loss=F.cross_entropy)
    narrow = sp.score(
        copy.deepcopy(net).bfloat16(), [(x.bfloat16(), y) for x, y in given], "taylor", loss=F.cross_entropy
    )
    assert spearmanr(wide["3"], narrow["3"]).statistic > 0.9


def test_labels_in_a_dict_are_what_relevance_explains():
    entry = zoo.by_name("transformers/bert")
    net, example = entry.make(), dict(entry.example())
    structure = sp.trace(net, example)
    labels = torch.zeros(len(next(iter(example.values()))), dtype=torch.long)
    found = sp.score(net, [{**example, "labels": labels}], "lrp", structure=structure)
    assert found.samples == len(labels)


def test_wrapped_networks_are_named():
    net = nn.DataParallel(tiny_cnn())
    refused("net.module", net, criterion="weight", error=ConfigError)
