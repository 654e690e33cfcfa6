"""Few bits for each number: rounding, packing and scales against plain Python, and SPDelta on every kind of layer."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import codes as oracle
from support import assert_unchanged, snapshot, tiny_cnn
from torch import nn
from transformers.pytorch_utils import Conv1D

import spalier as sp
from spalier.adapters import codes
from spalier.adapters.attachment import attachment_of
from spalier.adapters.codes import LEVELS, are_codes, best_scales, codes_of, pack, packed_size, rounded, unpack
from spalier.errors import ConfigError, TargetError, TiedWeightError

ALL = tuple(LEVELS.values())


# packing


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(ALL))
def test_codes_are_packed_and_unpacked(data, levels):
    found = data.draw(st.lists(st.sampled_from(oracle.levels_of(levels)), max_size=50))
    raw = pack(np.array(found, np.float32), levels)
    assert raw.dtype == np.uint8
    assert raw.tolist() == oracle.packed(found, levels)
    assert len(raw) == packed_size(len(found), levels)
    assert are_codes(raw, len(found), levels)
    for dtype in (np.float32, np.float64):
        assert unpack(raw, len(found), levels, dtype).tolist() == found
    memory = np.full(8 * len(raw) + 3, 9, np.float32)
    assert unpack(raw, len(found), levels, np.float32, memory).tolist() == found


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=4), st.integers(1, 32), st.sampled_from(ALL))
def test_only_bytes_that_pack_makes_are_codes(raw, count, levels):
    data = np.frombuffer(raw, np.uint8)
    can_be = len(raw) == packed_size(count, levels)
    again = pack(unpack(data, count, levels), levels) if can_be else None
    assert are_codes(data, count, levels) == (again is not None and np.array_equal(again, data))


def test_bits_that_there_are_not():
    for bits in (0, 5, 16, -1, 1.0, True, "1", None):
        with pytest.raises(ConfigError, match="bits is"):
            sp.SPDelta(bits=bits)


# rounding and scales


@pytest.mark.parametrize("levels", ALL)
def test_codes_are_the_nearest(levels):
    values = torch.randn(4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(levels))
    scale = torch.tensor([0.3, 1.0, 0.02, 0.0], dtype=torch.float64)
    found = codes_of(values, scale[:, None], levels)
    for row, unit, got in zip(values.tolist(), scale.tolist(), found.tolist(), strict=True):
        assert got == [oracle.nearest(value, unit, levels) for value in row]


@pytest.mark.parametrize("levels", ALL)
@pytest.mark.parametrize("has_metric", [False, True])
def test_the_best_of_the_scales_that_are_tried(levels, has_metric):
    """The error is the smallest of all steps; and of all scales for these codes, up to a hundredth."""
    generator = torch.Generator().manual_seed(levels)
    matrix = torch.randn(3, 7, dtype=torch.float64, generator=generator)
    root = torch.randn(7, 7, dtype=torch.float64, generator=generator)
    metric = root @ root.T if has_metric else torch.eye(7, dtype=torch.float64)
    step, scale = best_scales(matrix, levels, metric if has_metric else None)
    tried = codes._steps(matrix, levels, by_row=True)
    for number, row in enumerate(matrix.tolist()):

        def error(unit, by, row=row):
            return oracle.error(row, [oracle.nearest(v, unit, levels) for v in row], by, metric.tolist())

        best = error(float(step[number]), float(scale[number]))
        others = [float(each[number]) for each in tried]
        assert best <= min(error(unit, unit) for unit in others) + 1e-9
        around = [float(scale[number]) * (1 + n / 100) for n in range(-20, 21)]
        assert best <= min(error(float(step[number]), by) for by in around) + 1e-9


def test_one_scale_for_all_rows():
    matrix = torch.randn(5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    step, scale = best_scales(matrix, 3, by_row=False)
    found = best_scales(matrix.view(1, -1), 3)
    assert step.shape == scale.shape == (1,)
    assert torch.equal(step, found[0])
    torch.testing.assert_close(scale, found[1])


@pytest.mark.parametrize("levels", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_of_zeros_and_in_half_precision_are_finite(levels, dtype):
    for matrix in (torch.zeros(2, 4), torch.tensor([[1e-6, 0, 0, 0], [2e-4, 1e-4, 0, 1e-4]])):
        step, scale = best_scales(matrix.to(dtype), levels)
        assert step.dtype == scale.dtype == dtype
        assert step.isfinite().all()
        assert scale.isfinite().all()
        assert codes_of(matrix.to(dtype), step[:, None], levels).isfinite().all()


@pytest.mark.parametrize("levels", ALL)
def test_gradients_go_straight_through(levels):
    """As of values / scale; beyond the outermost level only where that leads back, and nowhere at a scale of 0."""
    values = torch.tensor([-300.0, -0.4, 0.0, 0.3, 300.0], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.5, dtype=torch.float64)
    for direction in (1.0, -1.0):
        (grad,) = torch.autograd.grad(rounded(values, scale, levels).sum() * direction, values)
        wanted = [direction / 0.5] * 5
        wanted[4 if direction < 0 else 0] = 0.0  # a step against the gradient would lead further away
        assert grad.tolist() == wanted
    (grad,) = torch.autograd.grad(rounded(values, torch.zeros((), dtype=torch.float64), levels).sum(), values)
    assert not grad.any()


# every kind of layer


class Words(nn.Module):
    """An embedding whose first row never learns, tied to the layer that gives the answers."""

    def __init__(self):
        super().__init__()
        self.words, self.middle = nn.Embedding(9, 8, padding_idx=0), nn.Linear(8, 8)
        self.answers = nn.Linear(8, 9, bias=False)
        self.answers.weight = self.words.weight

    def forward(self, x):
        return self.answers(self.middle(self.words(x)).relu())


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.middle, self.head = nn.Embedding(9, 8, padding_idx=0), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.middle(self.words(x)).relu().mean(1))


class Attention(nn.Module):
    def __init__(self, kdim=None):
        super().__init__()
        self.first, self.attention = nn.Linear(6, 8), nn.MultiheadAttention(8, 2, batch_first=True, kdim=kdim)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        keys = x[..., :5] if self.attention.kdim == 5 else x
        return self.head((x + self.attention(x, keys, x, need_weights=False)[0]).mean(1))


def convolutional(*layers):
    """Some convolutions from 8 channels to 8, between others."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), *layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6),
        nn.ReLU(), nn.Linear(6, 3),
    )  # fmt: skip


IMAGE, TOKENS, SEQUENCE = (2, 3, 9, 9), (2, 5), (2, 4, 6)
NETWORKS = {
    "plain": (lambda: convolutional(nn.Conv2d(8, 8, 3)), IMAGE, "-1"),
    "grouped": (lambda: convolutional(nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 8, 1)), IMAGE, "-1"),
    "depthwise": (lambda: convolutional(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1)), IMAGE, "-1"),
    "transposed": (lambda: convolutional(nn.ConvTranspose2d(8, 8, 3)), IMAGE, "-1"),
    "transposed, grouped": (lambda: convolutional(nn.ConvTranspose2d(8, 8, 3, groups=4)), IMAGE, "-1"),
    "embedding": (Embedded, TOKENS, "head"),
    "attention": (Attention, SEQUENCE, "head"),
    "attention, several weights": (lambda: Attention(kdim=5), SEQUENCE, "head"),
    "Hugging Face": (lambda: nn.Sequential(Conv1D(8, 6), nn.GELU(), Conv1D(6, 8), nn.Linear(6, 3)), SEQUENCE, "-1"),
    "tied": (Words, TOKENS, None),
}


def made(name, dtype=torch.float64):
    """A network, a batch for it, and the name of its head."""
    torch.manual_seed(1)
    make, shape, head = NETWORKS[name]
    net = make().to(dtype).eval()
    head = str(len(net) - 1) if head == "-1" else head
    x = torch.randint(0, 9, shape) if shape == TOKENS else torch.randn(shape, dtype=dtype)
    return net, x, head


def train_(net, x, steps=2):
    learned = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learned, lr=0.5)
    before = [p.detach().clone() for p in learned]
    for _ in range(steps):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in learned)
    assert any(not torch.equal(p, b) for p, b in zip(learned, before, strict=True))


def prune_(net, x, *, free):
    structure = attachment_of(net).structure
    keep = {s.name: [u for u in range(s.size) if u % 3] for s in structure.streams if s.size > 2}
    if free:
        for writer in structure.writers:
            stream = structure.streams[writer.stream]
            keep[writer.name] = keep.get(stream.name, list(range(stream.size)))[::2] or [0]
    sp.prune_(net, sp.Plan(structure, keep, writers="free" if free and structure.writers else "coupled"))


def assert_same(net, other, x):
    """The same network to the bit; what it computes may lie elsewhere in memory, and be summed in another order."""
    one, two = sp.fuse(net).state_dict(), sp.fuse(other).state_dict()
    assert list(one) == list(two)
    assert all(torch.equal(one[key], two[key]) for key in one)
    torch.testing.assert_close(net.eval()(x), other.eval()(x), rtol=1e-12, atol=1e-12)


def added_by_hand(update, weight):
    """``weight + scale code``, entry by entry."""
    flat, out = update.delta.detach().flatten(1), weight.detach().clone().flatten(1)
    for row in range(len(flat)):
        unit = update.scale[row if len(update.scale) > 1 else 0].item()
        gain = update.gain[row if len(update.gain) > 1 else 0].item()
        for column in range(flat.shape[1]):
            out[row, column] += unit * gain * oracle.nearest(flat[row, column].item(), unit, update.levels)
    return out.view(weight.shape)


@pytest.mark.parametrize("free", [False, True], ids=["coupled", "free"])
@pytest.mark.parametrize(
    "adapter", [sp.SPDelta(bits=1), sp.SPDelta(bits=2, scales="layer"), sp.SPDelta(bits=4)], ids=str
)
@pytest.mark.parametrize("name", NETWORKS)
def test_learned_pruned_fused_saved_built_and_applied(name, adapter, free, tmp_path):
    base, x, head = made(name)
    net = copy.deepcopy(base)
    sp.attach_(net, adapter, head=head, example=x)
    train_(net, x)
    for entry in attachment_of(net).updated:
        torch.testing.assert_close(
            sp.fuse(net).get_submodule(entry.name).get_parameter(entry.weight),
            added_by_hand(entry.update, entry.layer.get_parameter(entry.weight)),
            rtol=0,
            atol=1e-12,
        )
    prune_(net, x, free=free)
    train_(net.train(), x)
    net.eval()
    wanted = net(x).detach()
    torch.testing.assert_close(sp.fuse(net)(x), wanted, rtol=1e-9, atol=1e-9)
    path = tmp_path / "a.task.safetensors"
    sp.Task.of(net, "a").save(path)
    torch.testing.assert_close(sp.Task.load(path).build(base)(x), wanted, rtol=1e-9, atol=1e-9)
    before = snapshot(base)
    sp.Task.load(path).apply_(base)
    assert_same(base, net, x)
    again = sp.Task.of(base, "a")
    for one, other in zip(again.stored(), sp.Task.load(path).stored(), strict=True):
        assert torch.equal(one.values * one.scale[:, None], other.values * other.scale[:, None])
    sp.detach_(base)
    assert_unchanged(base, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["plain", "grouped", "embedding", "Hugging Face"])
def test_half_precision(name, dtype, tmp_path):
    base, x, head = made(name, dtype)
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPDelta(bits=2, init_range=0.5), head=head, example=x)
    path = tmp_path / "a.task.safetensors"
    sp.Task.of(net, "a").save(path)
    built = sp.Task.load(path).build(base)
    fused = sp.fuse(net).state_dict()
    for key, value in built.state_dict().items():
        assert value.dtype == fused[key].dtype
        torch.testing.assert_close(value, fused[key], rtol=1e-2, atol=1e-3)
    sp.Task.load(path).apply_(base)
    assert_same(base, net, x)


def test_the_padding_row_learns_nothing():
    for scales in ("row", "layer"):
        net, x, head = made("embedding")
        sp.attach_(net, sp.SPDelta(bits=1, scales=scales, init_range=0.5), head=head)
        train_(net, x, steps=5)
        assert torch.equal(sp.fuse(net).words.weight[0], net.words.weight[0])
        assert not torch.equal(sp.fuse(net).words.weight[1], net.words.weight[1])


def test_weights_of_zeros_can_learn():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    nn.init.zeros_(net[1].weight)
    sp.attach_(net, sp.SPDelta(bits=1))
    assert (net[1].weight_adapter.scale > 0).all()
    with pytest.raises(ConfigError, match="init_range is 0"):
        sp.SPDelta(init_range=0)


def test_one_row_that_is_left_has_one_scale(tmp_path):
    """Of a layer with one scale for all, pruned to one output: whose scale it is cannot be told, and need not."""
    base = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    net, x = copy.deepcopy(base), torch.randn(2, 4).double()
    sp.attach_(net, sp.SPDelta(bits=2, scales="layer"), head="2", example=x)
    train_(net, x)
    sp.prune_(net, sp.Plan(attachment_of(net).structure, {"0": [1]}))
    path = tmp_path / "a.task.safetensors"
    sp.Task.of(net, "a").save(path)
    sp.Task.load(path).apply_(base)
    assert_same(base, net, x)


# factors that are coded


def coded_(net, levels, name="3"):
    """Round the factors of one layer, as `refit_` does."""
    update = net.get_submodule(name).weight_adapter
    with torch.no_grad():
        for factor in (update.down, update.up):
            factor.normal_(0, 0.3)
        update.down_scale = update.down.abs().flatten(1).amax(1) / codes.top(levels)
        update.up_scale = update.up.abs().amax(1) / codes.top(levels)
    update.levels = levels
    return update


@pytest.mark.parametrize("adapter", [sp.SPLoRA(rank=4), sp.SPLoRA(rank=4, kernel="full"), sp.LoRA(rank=4)], ids=str)
@pytest.mark.parametrize("levels", ALL)
def test_coded_factors_are_pruned_saved_and_applied(adapter, levels, tmp_path):
    torch.manual_seed(0)
    base, x = tiny_cnn().double().eval(), torch.randn(2, 3, 8, 8).double()
    net = copy.deepcopy(base)
    sp.attach_(net, adapter, head="8", example=x)
    update, structure = coded_(net, levels), attachment_of(net).structure
    train_(net, x)
    sp.prune_(net, sp.Plan(structure, {"0": [0, 2, 3, 5], "3": range(10)}, ranks={"3": [0, 2, 3]}))
    assert update.rank == len(update.down_scale) == len(update.up_scale) == 3
    wanted = net(x).detach()
    torch.testing.assert_close(sp.fuse(net)(x), wanted, rtol=1e-9, atol=1e-9)
    path = tmp_path / "a.task.safetensors"
    sp.Task.of(net, "a").save(path)
    task = sp.Task.load(path)
    assert [shape.levels for shape in task.adapter_shapes] == [0, 0, levels, levels]
    torch.testing.assert_close(task.build(base)(x), wanted, rtol=1e-9, atol=1e-9)
    task.apply_(base)
    assert base[3].weight_adapter.levels == levels
    torch.testing.assert_close(base.eval()(x), wanted, rtol=1e-12, atol=1e-12)
    train_(base, x)


# an adapter for each weight


def test_an_adapter_for_each_weight(tmp_path):
    torch.manual_seed(0)
    base, x = (
        convolutional(nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 3)).double().eval(),
        torch.randn(IMAGE).double(),
    )
    net = copy.deepcopy(base)
    chosen = {
        "0.weight": sp.SPDelta(bits=2),
        "2.weight": sp.SPLoRA(rank=2, kernel="full"),
        "3.weight": sp.LoRA(rank=3),
        "7.weight": sp.SPPaRA(),
    }
    summary = sp.attach_(net, sp.ByLayer(chosen), head="9", example=x)
    assert "0" in str(summary)
    kinds = {e.name: type(e.update).__name__ for e in attachment_of(net).updated}
    assert kinds == {"0": "Coded", "2": "LowRank", "3": "LowRank", "7": "Pointwise"}
    train_(net, x)
    prune_(net, x, free=False)
    path = tmp_path / "a.task.safetensors"
    sp.Task.of(net, "a").save(path)
    wanted = net.eval()(x).detach()
    torch.testing.assert_close(sp.Task.load(path).build(base)(x), wanted, rtol=1e-9, atol=1e-9)
    sp.Task.load(path).apply_(base)
    assert_same(base, net, x)


def test_a_name_that_matches_no_weight_is_an_error():
    for name in ("nowhere.weight", "0", "0.bias", "1.weight", "8.weight", ""):
        net = tiny_cnn()
        before = snapshot(net)
        with pytest.raises(TargetError, match="no weight that can be adapted") as caught:
            sp.attach_(net, sp.ByLayer({"0.weight": sp.SPLoRA(rank=1), name: sp.SPLoRA(rank=1)}), head="8")
        assert repr(name) in str(caught.value)
        assert "'0.weight'" in str(caught.value)
        assert_unchanged(net, before)


def test_what_is_no_adapter_is_an_error():
    for wrong in (None, 5, "splora", sp.SPLoRA, sp.FineTune(), sp.ByLayer()):
        with pytest.raises(ConfigError, match=r"0\.weight"):
            sp.ByLayer({"0.weight": wrong})


@pytest.mark.parametrize("name", ["words.weight", "answers.weight"])
def test_a_tied_weight_goes_by_any_of_its_names(name, tmp_path):
    base, x, _ = made("tied")
    net = copy.deepcopy(base)
    sp.attach_(net, sp.ByLayer({name: sp.SPDelta(bits=4)}), example=x)
    assert net.words.weight_adapter is net.answers.weight_adapter
    train_(net, x)
    path = tmp_path / "a.task.safetensors"
    sp.Task.of(net, "a").save(path)
    sp.Task.load(path).apply_(base)
    assert_same(base, net, x)


def test_tied_weights_are_named_alike():
    net, _, _ = made("tied")
    with pytest.raises(TiedWeightError):
        sp.attach_(net, sp.ByLayer({"words.weight": sp.SPDelta(bits=4)}), targets="words")
