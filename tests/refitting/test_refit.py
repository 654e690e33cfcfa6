"""What was learned, in another form: the best that the form can be, on the same base, and able to go on."""

import copy

import numpy as np
import pytest
import torch
from oracles import task_format
from support import assert_unchanged, snapshot, tiny_cnn
from torch import nn
from trained import EXAMPLE, DigitNet, batches

import spalier as sp
from spalier import errors
from spalier.adapters.attachment import attachment_of
from spalier.adapters.kinds import Coded, LowRank
from spalier.refitting import refit

FORMS = [sp.SPLoRA(rank=2, cap=True), sp.SPLoRA(rank=2, kernel="full", cap=True), sp.SPPaRA()]
FORMS += [sp.SPDelta(bits=bits) for bits in (1, 2, 3, 4, 8)] + [sp.SPDelta(bits=2, scales="layer")]


def learn_(net, size=0.02, seed=0):
    """Move everything that learns, as training would: smoothly, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                rows, rest = len(parameter), parameter[0].numel()
                smooth = torch.randn(rows, 3, generator=generator) @ torch.randn(3, rest, generator=generator)
                noise = torch.randn(rows, rest, generator=generator)
                parameter += (size * (smooth + 0.3 * noise)).view(parameter.shape).to(parameter)
            elif parameter.requires_grad:
                parameter += size * torch.randn(parameter.shape, generator=generator).to(parameter)
    return net


def wide(base=None, density=None, writers="coupled", example=EXAMPLE, head="fc"):
    """A network whose weights have all learned, pruned or not, and its base."""
    torch.manual_seed(0)
    base = (base or DigitNet()).eval()
    net = copy.deepcopy(base)
    sp.attach_(net, sp.FineTune(), head=head, example=example)
    learn_(net)
    if density is not None:
        scores = sp.score(net, criterion="weight")
        sp.prune_(net, sp.select(net, scores, channels=density, writers=writers))
    return net.eval(), base


def missing(result):
    return sum(row.error for row in result.rows)


@pytest.mark.parametrize("writers", ["coupled", "free"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_pruned_network_in_another_form(form, writers, tmp_path):
    net, base = wide(density=0.6, writers=writers)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    kept = sp.kept_units(net)
    result = sp.refit_(net, form, batches=batches(2))
    x = batches(1)[0][0]
    out = net(x)
    assert sp.kept_units(net) == kept
    assert result.after < result.before
    assert "weight" in str(result)
    assert f"{result.after:,}" in str(result)
    # masked, fused, stored and applied are one network
    torch.testing.assert_close(sp.fuse(net)(x), out, rtol=1e-4, atol=1e-5)
    task = sp.Task.of(net, "narrow")
    task.save(tmp_path / "narrow.task.safetensors")
    loaded = sp.Task.load(tmp_path / "narrow.task.safetensors")
    torch.testing.assert_close(loaded.build(base)(x), out, rtol=1e-4, atol=1e-5)
    again = copy.deepcopy(base)
    loaded.apply_(again)
    assert torch.equal(again.eval()(x), out)
    # the base was only read, and can be had back
    sp.detach_(net)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_it_goes_on_learning_and_pruning():
    net, base = wide(density=0.6)
    sp.refit_(net, sp.SPDelta(bits=2), batches=batches(2))
    learned = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=3e-3)
    losses = []
    net.train()
    for _ in range(12):
        for x, y in batches(2):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2])
    plan = sp.select(net, sp.score(net, batches(1), loss=nn.functional.cross_entropy), channels=0.4)
    sp.prune_(net, plan, optimizer=optimizer, recover=batches(2))  # which is compared with the masked network
    net.eval()
    x = batches(1)[0][0]
    torch.testing.assert_close(sp.Task.of(net, "on").build(base)(x), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["center", "full"])
def test_low_rank_without_data_is_the_svd(kernel):
    net, base = wide(base=DigitNet().double(), example=EXAMPLE.double())
    deltas = {n: (net.get_parameter(n) - p).detach() for n, p in base.named_parameters() if "conv" in n}
    sp.refit_(net, sp.SPLoRA(rank=1, kernel=kernel))
    for name, delta in deltas.items():
        layer = net.get_submodule(name.removesuffix(".weight"))
        made = (layer.weight_adapter(layer.weight) - layer.weight).detach()
        taps = delta if kernel == "full" else delta[..., delta.shape[2] // 2, delta.shape[3] // 2]
        left = made if kernel == "full" else made[..., delta.shape[2] // 2, delta.shape[3] // 2]
        best = torch.linalg.svdvals(taps.flatten(1))[1:].square().sum()
        torch.testing.assert_close((taps - left).square().sum(), best, rtol=1e-6, atol=1e-9)


def test_with_batches_the_layer_returns_more_of_what_it_did():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 4)).double()
    x = torch.randn(256, 3).double() @ torch.randn(3, 12).double() + 0.1 * torch.randn(256, 12).double()
    found = {}
    for given in (None, [x]):
        net = copy.deepcopy(base)
        sp.attach_(net, sp.FineTune(), head="2")
        learn_(net, 0.3)
        wanted = net[0](x).detach()
        sp.refit_(net, sp.SPLoRA(rank=1), batches=given)
        found[given is None] = float((net[0](x) - wanted).square().mean().detach())
    assert found[False] < 0.8 * found[True]
    # reduced-rank regression, by brute force: the best rank-one map from these inputs to what the base misses
    net = copy.deepcopy(base)
    sp.attach_(net, sp.FineTune(), head="2")
    learn_(net, 0.3)
    target = (net[0](x) - base[0](x)).detach() - (net[0].bias - base[0].bias).detach()
    left, sizes, right = torch.linalg.svd(x @ torch.linalg.lstsq(x, target).solution, full_matrices=False)
    best = float((target - sizes[0] * left[:, :1] @ right[:1]).square().mean())
    assert found[False] <= 1.2 * best + 1e-9  # the ridge holds it back a little


@pytest.mark.parametrize("adapter", [sp.SPLoRA(rank=3), sp.SPPaRA(), sp.SPDelta(bits=4)], ids=str)
def test_from_any_adapter_to_all_weights_and_back(adapter):
    torch.manual_seed(0)
    base = DigitNet().eval()
    net = copy.deepcopy(base)
    sp.attach_(net, adapter, head="fc", example=EXAMPLE)
    learn_(net)
    net.eval()
    x = batches(1)[0][0]
    out = net(x).detach()
    result = sp.refit_(net, sp.FineTune())
    torch.testing.assert_close(net(x), out, rtol=1e-4, atol=1e-5)
    assert missing(result) == 0
    assert all(p.requires_grad for p in net.parameters())
    sp.refit_(net, sp.SPDelta(bits=8))
    torch.testing.assert_close(net(x), out, rtol=0.05, atol=0.05)


def test_biases_and_whatever_no_adapter_fits_stay_as_they_were_learned():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.place = nn.Parameter(torch.zeros(5, 8))
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.GRU(8, 8, batch_first=True))
            self.fc = nn.Linear(8, 3)

        def forward(self, x):
            return self.fc(self.layers(x + self.place)[0].mean(1))

    torch.manual_seed(0)
    base = Net()
    net = copy.deepcopy(base)
    sp.attach_(net, sp.FineTune(), head="fc")
    learn_(net)
    learned = {name: p.detach().clone() for name, p in net.named_parameters()}
    sp.refit_(net, sp.SPDelta(bits=1))
    for name in ("place", "layers.0.bias", "layers.1.weight_ih_l0", "fc.weight"):
        assert torch.equal(net.get_parameter(name), learned[name]), name
        assert net.get_parameter(name).requires_grad, name
    x = torch.randn(2, 5, 8)
    again = copy.deepcopy(base)
    sp.Task.of(net, "t").apply_(again)
    assert torch.equal(again(x), net(x))
    assert torch.equal(base.place, torch.zeros(5, 8))


def test_every_kind_of_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(20, 8, padding_idx=0)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.convs = nn.Sequential(
                nn.Conv1d(8, 8, 3, padding=1, groups=2), nn.Conv1d(8, 8, 3, padding=1, groups=8),
                nn.ConvTranspose1d(8, 6, 2, groups=2),
            )  # fmt: skip
            self.fc = nn.Linear(6, 3)

        def forward(self, x):
            x = self.words(x)
            x = x + self.attention(x, x, x)[0]
            return self.fc(self.convs(x.mT).mean(2))

    x = torch.randint(0, 20, (4, 7), generator=torch.Generator().manual_seed(0))
    for form in (sp.SPDelta(bits=8), sp.SPLoRA(rank=1, kernel="full")):
        torch.manual_seed(0)
        base = Net().eval()
        net = copy.deepcopy(base)
        sp.attach_(net, sp.FineTune(), head="fc")
        learn_(net, 0.1)
        with torch.no_grad():
            net.words.weight[0] = 0  # that row never learns
        out = net(x).detach()
        result = sp.refit_(net, form, batches=[x])
        assert {row.name for row in result.rows} == {
            "words.weight", "attention.in_proj_weight", "attention.out_proj.weight",
            "convs.0.weight", "convs.1.weight", "convs.2.weight",
        }  # fmt: skip
        if isinstance(form, sp.SPDelta):
            torch.testing.assert_close(net(x), out, rtol=0.05, atol=0.02)
        torch.testing.assert_close(sp.Task.of(net, "t").build(base)(x), net(x))
        (net(x) ** 2).sum().backward()
        assert all(p.grad is not None for p in net.parameters() if p.requires_grad)


def test_an_optimizer_is_told():
    net, _ = wide()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
    nn.functional.cross_entropy(net(batches(1)[0][0]), batches(1)[0][1]).backward()
    optimizer.step()
    sp.refit_(net, sp.SPLoRA(rank=2, cap=True), optimizer=optimizer)
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    assert trained == {p for p in net.parameters() if p.requires_grad}
    assert not optimizer.state
    nn.functional.cross_entropy(net(batches(1)[0][0]), batches(1)[0][1]).backward()
    optimizer.step()


# budgets of bytes


def test_a_budget_is_met_to_a_hundredth_and_more_bytes_say_more():
    lost = []
    for budget in (6_000, 12_000, 24_000):
        net, base = wide()
        result = sp.refit_(net, bytes=budget, batches=batches(2))
        task = sp.Task.of(net, "refit")  # another name may take a byte more
        size = len(task.to_bytes(storage="int8-all"))
        assert size == result.after
        assert 0.99 * budget <= size <= budget
        x = batches(1)[0][0]
        torch.testing.assert_close(task.build(base)(x), net(x), rtol=1e-4, atol=1e-5)
        lost.append(missing(result))
        kinds = {type(entry.update) for entry in attachment_of(net).updated}
        assert kinds <= {Coded, LowRank}
    assert lost[0] > lost[1] > lost[2]


def test_a_budget_is_spent_where_the_loss_feels_it():
    net, _ = wide()
    with torch.no_grad():  # nothing of the last block gets through
        net.layers[2].bn2.weight.zero_()
        net.layers[2].bn2.bias.zero_()
    result = sp.refit_(net, bytes=9_000, batches=batches(2))
    spent = {row.name: row.after for row in result.rows}
    assert spent["layers.2.conv2.weight"] == 0
    assert spent["layers.1.conv2.weight"] > 0


def test_a_budget_that_is_more_than_enough():
    net, _ = wide()
    x = batches(1)[0][0]
    out = net(x).detach()
    result = sp.refit_(net, bytes=10_000_000)
    assert result.after < 10_000_000
    torch.testing.assert_close(net(x), out, rtol=0.05, atol=0.05)


def normed(density=None, writers="coupled", base=None):
    """A wide network in float64 whose norms have statistics of their own, and its base."""
    net, base = wide((base or DigitNet()).double(), density, writers, EXAMPLE.double())
    with torch.no_grad():
        for norm in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.2, 3)
            norm.weight.uniform_(0.5, 2)
            norm.bias.uniform_(-2, 2)
    return net, base


@pytest.mark.parametrize(("density", "writers"), [(None, "coupled"), (0.6, "coupled"), (0.6, "free")])
def test_norms_of_the_base_with_moved_statistics_compute_the_same(density, writers, tmp_path):
    net, base = normed(density, writers)
    four, two = (sp.Task.of(net, "norms", base_norms=small) for small in (False, True))
    norms = {name: m for name, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert four.values.numel() - two.values.numel() == 2 * sum(m.num_features for m in norms.values())
    assert len(four.integers) == len(norms)
    assert not two.integers, "how many batches there were is the base's too"
    x = batches(1)[0][0].double()
    torch.testing.assert_close(two.build(base)(x), net(x), rtol=1e-10, atol=1e-10)
    two.save(tmp_path / "two.task.safetensors")
    read = task_format.network(
        tmp_path / "two.task.safetensors", {key: value.numpy() for key, value in base.state_dict().items()}
    )
    built = two.build(base)
    for name in norms:
        for key in ("weight", "bias", "running_mean", "running_var"):
            np.testing.assert_allclose(built.get_submodule(name).__getattr__(key).detach(), read[f"{name}.{key}"])
    # applied, it learns on from there; its norms' weights stay the base's
    on = copy.deepcopy(base)
    two.apply_(on)
    on.train()(x)
    learn_(on)
    again = sp.Task.of(on.eval(), "again")
    assert again.values.numel() == two.values.numel()
    torch.testing.assert_close(again.build(base)(x), on(x), rtol=1e-10, atol=1e-10)


def test_norms_that_statistics_cannot_make_up_for_keep_four_numbers():
    tied = DigitNet()
    tied.layers[1].bn1.weight = tied.layers[1].bn2.weight
    net, base = normed(base=tied)
    with torch.no_grad():
        net.bn1.weight[3] *= -1
        net.layers[0].bn1.weight[0] = 0
        net.layers[0].bn2.weight[1] = 100
    x = batches(1)[0][0].double()
    two = sp.Task.of(net, "norms", base_norms=True)
    torch.testing.assert_close(two.build(base)(x), net(x), rtol=1e-10, atol=1e-10)
    own = {name for row in two.table.rows if row.source == "values" for name in row.names}
    assert {"bn1.weight", "layers.0.bn1.bias", "layers.0.bn2.weight", "layers.1.bn1.weight", "layers.1.bn2.bias"} <= own
    assert not {"layers.0.shortcut.1.weight", "layers.2.bn2.bias"} & own


def test_norms_that_take_means_of_all_batches_keep_their_count():
    base = DigitNet()
    base.bn1.momentum = None
    net, base = normed(base=base)
    net.bn1.num_batches_tracked.fill_(5)
    net.layers[0].bn1.num_batches_tracked.fill_(7)
    two = sp.Task.of(net, "norms", base_norms=True)
    assert two.integers == (5,)
    on = copy.deepcopy(base)
    two.apply_(on)
    assert on.bn1.num_batches_tracked == 5
    assert on.layers[0].bn1.num_batches_tracked == base.layers[0].bn1.num_batches_tracked


def test_what_learns_on_from_norms_of_the_base_is_saved():
    """Where one norm keeps its four numbers, the others' weights stay the base's: no table says that they learn."""
    net, base = normed()
    with torch.no_grad():
        net.layers[0].bn1.weight[0] = 0
    on = copy.deepcopy(base)
    sp.Task.of(net, "norms", base_norms=True).apply_(on)
    assert on.layers[0].bn1.weight.requires_grad
    assert not on.layers[0].bn2.weight.requires_grad
    learn_(on)
    x = batches(1)[0][0].double()
    built = sp.Task.of(on.eval(), "again").build(base)
    torch.testing.assert_close(built(x), on(x), rtol=1e-10, atol=1e-10)


def test_norms_whose_moved_statistics_half_precision_cannot_hold_keep_four_numbers():
    net, _ = normed()
    net.half()
    with torch.no_grad():
        net.bn1.running_var.fill_(3000)
        net.bn1.weight.fill_(1 / 7)
    two = sp.Task.of(net, "norms", base_norms=True)
    assert two.values.isfinite().all()
    own = {name for row in two.table.rows if row.source == "values" for name in row.names}
    assert "bn1.weight" in own
    assert "layers.1.bn1.weight" not in own


def test_counts_of_batches_do_not_make_another_base():
    """Old checkpoints lack them, and what computes the same is the same."""
    net, base = normed()
    two = sp.Task.of(net, "norms", base_norms=True)
    x = batches(1)[0][0].double()
    wanted = two.build(base)(x)
    for norm in (m for m in base.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.num_batches_tracked += 3
    assert torch.equal(two.build(base)(x), wanted)


def test_a_budget_counts_a_head_in_four_bits():
    net, base = normed(0.6)
    result = sp.refit_(net, bytes=6_000, batches=[batches(1)[0][0].double()], storage="int4-head")
    data = sp.Task.of(net, "refit").to_bytes(storage="int4-head")
    assert len(data) == result.after <= 6_000
    assert len(data) < len(sp.Task.of(net, "refit").to_bytes(storage="int8-all"))
    x = batches(1)[0][0].double()
    assert sp.Task.from_bytes(data).build(base)(x).isfinite().all()


def test_a_budget_holds_statistics_alone_and_says_so(monkeypatch):
    net, _ = normed(0.6)
    result = sp.refit_(net, bytes=8_000, batches=[batches(1)[0][0].double()])
    small, large = (sp.Task.of(net, "refit", base_norms=chosen) for chosen in (None, False))
    assert len(small.to_bytes(storage="int8-all")) == result.after <= 8_000
    assert large.values.numel() > small.values.numel()
    with monkeypatch.context() as patched:
        patched.setattr(refit._Work, "_result", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):  # at the very end: it is still so
            sp.refit_(net, sp.FineTune())
    assert sp.Task.of(net, "refit").values.numel() == small.values.numel()
    sp.refit_(net, sp.FineTune())
    assert sp.Task.of(net, "refit").values.numel() > large.values.numel()


def test_bits_of_codes_count_in_a_budget_of_bytes():
    net, _ = wide()
    plan = sp.select(net, sp.score(net, criterion="weight"), channels=0.5)
    before = plan.prediction.task_bytes
    sp.refit_(net, sp.SPDelta(bits=1))
    plan = sp.select(net, sp.score(net, criterion="weight"), channels=0.5)
    assert plan.prediction.task_bytes < before / 4


# what is refused


def refused(error, words, net, *args, **kwargs):
    before = snapshot(net)
    with pytest.raises(error, match=words):
        sp.refit_(net, *args, **kwargs)
    assert_unchanged(net, before)


def test_what_is_refused_changes_nothing():
    net, _ = wide(density=0.3)
    refused(errors.RankError, "can use now.*cap=True", net, sp.SPLoRA(rank=40))
    refused(errors.ConfigError, "an adapter such as", net)
    refused(errors.ConfigError, "and not both", net, sp.SPDelta(), bytes=5000)
    refused(errors.ConfigError, "cannot write", net, sp.LoRA(rank=1))
    refused(errors.ConfigError, "expected one such as", net, sp.SPDelta)
    refused(errors.ConfigError, "bytes", net, bytes=-1)
    refused(errors.BudgetError, "without any delta", net, bytes=100)
    refused(errors.RecoveryError, "there are none", net, sp.SPDelta(), batches=[])
    refused(errors.RecoveryError, "are a int, expected an iterable", net, sp.SPDelta(), batches=5)
    refused(errors.RecoveryError, "batch 0 holds no samples", net, sp.SPDelta(), batches=[torch.zeros(0, 1, 8, 8)])
    refused(errors.RecoveryError, "does not run", net, sp.SPDelta(), batches=[torch.zeros(2, 5, 8, 8)])
    refused(errors.RecoveryError, "NaN", net, bytes=20_000, batches=[torch.full((2, 1, 8, 8), torch.nan)])
    refused(errors.RecoveryError, "NaN", net, sp.SPDelta(), batches=[torch.full((2, 1, 8, 8), torch.nan)])


def test_nothing_learned_and_nan_and_no_adapter():
    net = tiny_cnn()
    with pytest.raises(errors.AttachmentError, match="not adapted"):
        sp.refit_(net, sp.SPDelta())
    sp.attach_(net, sp.FineTune(), head="8")
    refused(errors.AttachmentError, "nothing has been learned", net, sp.SPDelta())
    with torch.no_grad():
        net[0].weight[0] = torch.nan
    refused(errors.NonFiniteError, "NaN", net, sp.SPDelta())


def test_codes_of_a_budget_are_found_in_the_network_again(tmp_path):
    net, base = wide(density=0.6)
    sp.refit_(net, bytes=8_000, batches=batches(2))
    sp.Task.of(net, "spent").save(tmp_path / "spent.task.safetensors", storage="int8-all")
    task = sp.Task.load(tmp_path / "spent.task.safetensors")
    assert task.info.adapter == {"kind": "ByLayer"}
    again = copy.deepcopy(base)
    task.apply_(again, example=EXAMPLE)
    x = batches(1)[0][0]
    torch.testing.assert_close(again.eval()(x), task.build(base)(x), rtol=1e-5, atol=1e-5)
    assert task.build(base)(x).shape == (64, 10)


def test_a_task_that_was_applied_without_an_example_is_refitted_too():
    net, base = wide(density=0.6)
    again = copy.deepcopy(base)
    sp.Task.of(net, "wide").apply_(again)
    sp.refit_(again, sp.SPDelta(bits=4), batches=batches(1))
    x = batches(1)[0][0]
    torch.testing.assert_close(sp.Task.of(again, "narrow").build(base)(x), again.eval()(x), rtol=1e-4, atol=1e-5)
    sp.detach_(again)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), base.state_dict().values(), strict=True))


def test_a_transformer_of_hugging_face():
    from support import TINY
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    sizes = {key: TINY[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
    bert = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes))
    gpt = GPT2ForSequenceClassification(
        GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, num_labels=3, pad_token_id=0)
    )
    x = {"input_ids": torch.randint(1, 50, (4, 7)), "attention_mask": torch.ones(4, 7, dtype=torch.long)}
    for base, head in ((bert, "classifier"), (gpt, "score")):
        base.eval()
        for form in ({"adapter": sp.SPDelta(bits=8)}, {"bytes": 60_000}):
            net = copy.deepcopy(base)
            sp.attach_(net, sp.FineTune(), head=head)
            learn_(net)
            out = net.eval()(**x).logits.detach()
            sp.refit_(net, **form, batches=[x])
            narrow = net(**x).logits
            torch.testing.assert_close(sp.Task.of(net, "t").build(base)(**x).logits, narrow, rtol=1e-4, atol=1e-5)
            if "adapter" in form:
                torch.testing.assert_close(narrow, out, rtol=0.1, atol=0.1)


def test_adapters_by_layer_are_set_by_the_regression_too():
    names = {"layers.0.conv1.weight": sp.SPDelta(bits=1), "layers.1.conv2.weight": sp.SPLoRA(rank=2)}
    errors_of = {}
    for given in (None, batches(2)):
        net, _ = wide()
        result = sp.refit_(net, sp.ByLayer(names), batches=given)
        rows = {row.name: row for row in result.rows}
        assert {name for name, row in rows.items() if row.code != "nothing"} == set(names)
        deltas = {e.name: e.update.stored()[0].values.clone() for e in attachment_of(net).updated}
        errors_of[given is None] = deltas
    for name in ("layers.0.conv1", "layers.1.conv2"):
        assert not torch.equal(errors_of[True][name], errors_of[False][name])


@pytest.mark.parametrize("before", [sp.FineTune(), sp.SPDelta(bits=2)], ids=str)
def test_an_interrupt_leaves_the_network_as_it_was(before, monkeypatch):
    """In the middle of the regression: the same outputs and codes, and an optimizer that trains what is there."""
    net, _ = wide(density=0.6)
    if not isinstance(before, sp.FineTune):
        sp.refit_(net, before)
    x = batches(1)[0][0]
    out, kept = net.eval()(x).detach(), sp.kept_units(net)
    numbers = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(refit, "recover_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sp.refit_(net, sp.SPLoRA(rank=2, cap=True), batches=batches(1), optimizer=optimizer)
    assert torch.equal(net.eval()(x), out)
    assert sp.kept_units(net) == kept
    assert all(torch.equal(p, numbers[name]) for name, p in net.named_parameters())
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    assert trained == {p for p in net.parameters() if p.requires_grad}
