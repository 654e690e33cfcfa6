"""Tasks: what is saved is what was learned, and what is built is what was trained."""

import copy
import dataclasses
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning import ADAPTERS, IMAGE, learned, places, reloaded, same_state
from safetensors import safe_open
from safetensors.torch import save_file
from support import assert_unchanged, awaken_, snapshot, tiny_cnn
from torch import nn
from trained import EXAMPLE, DigitNet, batches, train_, trained

import spalier as sp
from spalier.adapters.attachment import attachment_of
from spalier.adapters.kinds import Stored
from spalier.errors import AttachmentError, ConfigError, NonFiniteError, PlanError, TaskFileError
from spalier.tasks.format import KEY, forget_digests
from spalier.tasks.numbers import (
    as_numbers,
    bytes_of_values,
    cast_scales,
    in_bytes,
    scales_in_bytes,
    scales_of_bytes,
    values_in_bytes,
    values_of_bytes,
)
from spalier.tasks.rows import LowRank, Matrix
from spalier.tasks.table import Table


@pytest.fixture
def base():
    torch.manual_seed(5)
    return tiny_cnn().double().eval()


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("density", [1, 0.5])
def test_every_adapter_comes_back_to_the_bit(kind, density, base, tmp_path):
    net = learned(base, ADAPTERS[kind], density=density, example=IMAGE.double())
    before = snapshot(base)
    task = reloaded(net, tmp_path)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    built = task.build(base)
    torch.testing.assert_close(built(x), net(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(built(x), sp.fuse(net)(x), rtol=1e-10, atol=1e-10)
    assert [type(m) for m in built.modules()] == [type(m) for m in base.modules()]
    assert places(base).isdisjoint(places(built))
    assert_unchanged(base, before)
    task.apply_(base)
    assert same_state(base, net)
    assert [p.requires_grad for p in base.parameters()] == [p.requires_grad for p in net.parameters()]
    sp.detach_(base)
    assert_unchanged(base, before)


def test_a_task_applied_learns_and_is_pruned_on(base, tmp_path):
    net = learned(base, example=IMAGE.double())
    reloaded(net, tmp_path).apply_(base, example=IMAGE.double())
    assert sp.kept_units(base) == sp.kept_units(net)
    x, y = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(0, 3, (8,))
    for each in (net, base):
        each.train()
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], 0.1)
        nn.functional.cross_entropy(each(x), y).backward()
        optimizer.step()
    assert same_state(net, base)
    structure = attachment_of(base).structure
    kept = sp.kept_units(base)["streams"]["0"][:2]
    for each in (net, base):
        sp.prune_(each, sp.Plan(structure, {"0": kept}))
    assert same_state(net, base)
    assert sp.Task.of(base, "a").to_bytes() == sp.Task.of(net, "a").to_bytes()


@pytest.mark.parametrize("classes", [3, 7, 1])
def test_the_base_may_have_another_head(classes, base, tmp_path):
    net = learned(base, example=IMAGE.double())
    other = copy.deepcopy(base)
    other[8] = nn.Linear(12, classes).double().eval()
    task, x = reloaded(net, tmp_path), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    built = task.build(other)
    torch.testing.assert_close(built(x), net(x))
    assert built[8].out_features == 3
    before = snapshot(other)
    task.apply_(other)
    torch.testing.assert_close(other.eval()(x), net(x))
    assert other[8].out_features == 3
    sp.detach_(other)
    assert_unchanged(other, before)
    if classes != 3:
        with pytest.raises(TaskFileError, match="head for the task's classes"):
            task.apply_(other, example=IMAGE.double())


def test_free_writers_are_spread(tmp_path):
    base = DigitNet(8).eval()
    net = learned(base, example=EXAMPLE, head="fc", free=True)
    assert sp.kept_units(net)["writers"]
    task, x = reloaded(net, tmp_path), torch.randn(3, 1, 8, 8)
    built = task.build(base)
    torch.testing.assert_close(built(x), net(x), rtol=1e-4, atol=1e-5)
    folded = task.build(base, fold=True)
    torch.testing.assert_close(folded(x), net(x), rtol=1e-4, atol=1e-5)
    task.apply_(base)
    assert same_state(base, net)


def test_ranks_that_were_cut_come_back(base, tmp_path):
    net = learned(base, example=IMAGE.double())
    structure = attachment_of(net).structure
    sp.prune_(net, sp.Plan(structure, {}, ranks={"0": [1]}))
    task = reloaded(net, tmp_path)
    assert [row.source.rank for row in task.table.rows if isinstance(row.source, LowRank)] == [1, 2]
    task.apply_(base)
    assert same_state(base, net)


def test_a_network_that_was_never_traced(base, tmp_path):
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), head="8")
    awaken_(net).eval()
    task, x = reloaded(net, tmp_path), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert task.info.density.channels is None
    torch.testing.assert_close(task.build(base)(x), net(x))
    with pytest.raises(TaskFileError, match="traced with an example") as error:
        task.build(base, fold=True)
    assert error.value.code == "fold"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.data())
def test_fast_and_slow_building_agree(data):
    """The way in numpy against PyTorch on each layer, in float64: sizes, kernels, ranks, masks, memory layouts."""
    inputs, outputs = data.draw(st.integers(2, 9)), data.draw(st.integers(2, 9))
    kernel, rank = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.integers(1, 4))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    base = nn.Sequential(
        nn.Conv2d(3, inputs, kernel), nn.ReLU(), nn.Conv2d(inputs, outputs, kernel, bias=False), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(outputs, 2),
    ).double()  # fmt: skip
    if data.draw(st.booleans()):
        base = base.to(memory_format=torch.channels_last)
    density = data.draw(st.sampled_from([0.3, 0.6, 1.0]))
    net = learned(base, sp.SPLoRA(rank=rank), density=density, example=torch.zeros(1, 3, 8, 8).double(), head="6")
    built = sp.Task.of(net, "a").build(base)
    plain = sp.fuse(net)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(built.state_dict()[key], value, rtol=1e-12, atol=1e-12)
        assert built.state_dict()[key].stride() == value.stride() or value.shape[1:2] == (1,) or kernel == 1


# what is built is an ordinary network


def test_built_networks_are_plain(tmp_path):
    base = DigitNet(8).eval()
    net = learned(base, example=EXAMPLE, head="fc")
    built, x = sp.Task.of(net, "a").build(base), torch.randn(2, 1, 8, 8)
    wanted = built(x)
    assert not any(module.training for module in built.modules())
    assert torch.equal(pickle.loads(pickle.dumps(built))(x), wanted)
    assert torch.equal(copy.deepcopy(built)(x), wanted)
    twin = copy.deepcopy(built)
    with torch.no_grad():
        for tensor in twin.state_dict().values():
            tensor.zero_()
    twin.load_state_dict(built.state_dict())
    assert torch.equal(twin(x), wanted)
    torch.save(built.state_dict(), tmp_path / "state.pt")
    twin.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    save_file(built.state_dict(), tmp_path / "state.safetensors")
    assert [(m.in_channels, m.out_channels) for m in built.modules() if isinstance(m, nn.Conv2d)] == [
        (m.weight.shape[1], m.weight.shape[0]) for m in built.modules() if isinstance(m, nn.Conv2d)
    ]
    built.train()
    built(x).sum().backward()
    assert built.conv1.weight.grad is not None


def test_building_costs_the_base_nothing():
    base = DigitNet(8).eval().requires_grad_(False)
    net = learned(base, example=EXAMPLE, head="fc")
    before = snapshot(base)
    task = sp.Task.of(net, "a")
    one, two = task.build(base), task.build(base)
    with torch.no_grad():
        for tensor in one.state_dict().values():
            tensor.zero_()
    assert_unchanged(base, before)
    assert float(sum(p.abs().sum() for p in two.parameters())) > 0
    assert not any(p.requires_grad for p in one.parameters())


def test_shared_tensors_are_the_bases_own(base):
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), targets="3", head="8", norms=False)
    shared, own = (sp.Task.of(net, "a").build(base, share=share) for share in (True, False))
    assert shared[0].weight is not base[0].weight
    assert shared[0].weight.data_ptr() == base[0].weight.data_ptr()
    assert own[0].weight is not base[0].weight
    assert places(own).isdisjoint(places(base))
    for net in (shared, own):  # in one piece of memory or not, all tensors have places of their own
        assert len(places(net)) == len(net.state_dict())
    storages = {t.untyped_storage().data_ptr() for t in own.state_dict().values()}
    assert len(storages) == len(own.state_dict())


class Odd(nn.Module):
    """Things that a copy must not share with the original."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.linear = nn.Linear(6, 6)
        self.again = [self.linear]
        self.notes = {"layers": [self.linear], "count": 0}
        self.register_buffer("scale", torch.full((), 2.0), persistent=False)
        self.plain = torch.ones(6)
        self.linear.register_forward_hook(self.note)

    def note(self, module, args, output):
        self.notes["count"] += 1

    def forward(self, x):
        return self.again[0](self.lstm(x)[0]) * self.scale + self.plain


def test_copies_share_nothing_that_can_change():
    base = Odd().eval()
    net = copy.deepcopy(base)
    sp.attach_(net, sp.SPLoRA(rank=2), targets="linear")
    awaken_(net)
    built, x = sp.Task.of(net, "a").build(base), torch.randn(2, 3, 6)
    torch.testing.assert_close(built(x), net(x))
    assert built.again[0] is built.linear
    assert built.notes["layers"][0] is built.linear
    assert built.notes["count"] == 1
    assert base.notes["count"] == 0
    assert built.plain is not base.plain
    built.lstm.flatten_parameters()
    built.lstm.double()
    assert base.lstm.weight_ih_l0.dtype == torch.float32


# folding


def test_folded_norms_compute_the_same(tmp_path):
    base = DigitNet(8).double().eval()
    net = learned(base, example=EXAMPLE.double(), head="fc")
    folded, x = reloaded(net, tmp_path).build(base, fold=True), torch.randn(4, 1, 8, 8).double()
    torch.testing.assert_close(folded(x), net(x), rtol=1e-10, atol=1e-10)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())


class Norms(nn.Module):
    """A batch norm that cannot be folded: something else sees the convolution's output too."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.conv(x)
        return self.fc((x.relu() + self.norm(x)).mean((2, 3)))


def test_norms_that_cannot_be_folded_are_refused():
    base = Norms().eval()
    net = learned(base, density=1, head="fc")
    with pytest.raises(TaskFileError, match="norm cannot be folded") as error:
        sp.Task.of(net, "a").build(base, fold=True)
    assert error.value.code == "fold"


# what a file says and how it is laid out


def test_files_are_small_flat_and_standard(tmp_path):
    base = DigitNet(8)
    path = tmp_path / "digits.task.safetensors"
    task = sp.Task.of(
        learned(base, example=EXAMPLE, head="fc"),
        "digits",
        metrics={"accuracy": 0.97},
        classes=[str(n) for n in range(10)],
        preprocessing={"size": [8, 8], "mean": 0.5},
        licence="Apache-2.0",
        provenance={"data": "digits"},
    )
    size = task.save(path)
    assert size == path.stat().st_size
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"table", "masks", "adapters", "values"}
        assert set(file.metadata()) == {KEY}
        assert all(file.get_tensor(key).dim() == 1 for key in ("table", "masks", "adapters", "values"))
    info = sp.Task.load(path).info
    assert info == task.info
    shown = str(info)
    for word in ("digits", "accuracy", "0.97", "SPLoRA", "Apache-2.0", "10: 0, 1", "channels", "macs"):
        assert word in shown, word
    assert sp.Task.load(path).to_bytes() == path.read_bytes() == task.to_bytes()
    assert info.learned == sp.count(learned(base, example=EXAMPLE, head="fc")).learned


@pytest.mark.parametrize(
    ("density", "storage", "limit"),
    [(0.1, "exact", 210_000), (0.1, "int8", 115_000), (1, "exact", 2_085_000)],
)
def test_sizes_of_the_papers_network(density, storage, limit):
    net = sp.models.resnet50(classes=10, stem="cifar")
    sp.attach_(net, sp.SPLoRA(rank=8), head="fc", example=torch.zeros(1, 3, 32, 32))
    structure = attachment_of(net).structure
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.num_batches_tracked.fill_(1234)
    sp.prune_(
        net,
        sp.Plan(structure, {s.name: range(int(s.size * density)) for s in structure.streams}),
        check=False,
    )
    assert len(sp.Task.of(net, "a").to_bytes(storage=storage)) <= limit


def test_bytes_of_a_budget_are_those_of_the_file():
    net = trained()
    scores = sp.score(net, batches(1), "weight")
    plan = sp.select(net, scores, channels=0.4)
    sp.prune_(net, plan)
    task = sp.Task.of(net, "a")
    payload = 4 * (task.adapters.numel() + task.values.numel()) + task.table.mask_bytes
    assert plan.prediction.task_bytes == payload
    assert len(task.to_bytes()) - payload < 3000


# storage


def test_smaller_storages_cost_little_and_say_what(capsys):
    net = train_(trained(), 1, lr=0.01)  # what is committed has 16 bits already
    base = copy.deepcopy(net)
    sp.detach_(base)
    task = sp.Task.of(net, "digits")
    costs = task.storage_costs(base, batches(4))
    print(costs)
    assert "points" in capsys.readouterr().out
    by = {cost.storage: cost for cost in costs}
    assert by["exact"].accuracy == by["fp32"].accuracy
    assert by["exact"].deviation == 0
    for storage in ("fp16", "bf16", "int8", "int8-all", "int4-head"):
        assert abs(by[storage].accuracy - by["exact"].accuracy) < 0.02
        assert 0 < by[storage].deviation < (0.2 if storage == "int4-head" else 0.05)
    assert by["int4-head"].bytes < by["int8-all"].bytes < by["int8"].bytes < by["fp16"].bytes < by["exact"].bytes


@pytest.mark.parametrize("storage", ["fp32", "fp16", "bf16", "int8", "int8-all", "int4-head"])
def test_stored_is_what_the_file_gives(storage, tmp_path):
    base = tiny_cnn().eval()
    net = learned(base)
    path = tmp_path / "a.task.safetensors"
    task = sp.Task.of(net, "a")
    task.save(path, storage=storage)
    x, loaded = torch.randn(2, 3, 8, 8), sp.Task.load(path)
    assert loaded.info.storage == storage
    assert torch.equal(loaded.build(base)(x), task.stored_as(storage).build(base)(x))
    tolerance = {"fp32": 0, "fp16": 1e-3, "int4-head": 2e-2}.get(storage, 1e-2)  # scales of the last: to 1.5%
    for found, wanted in zip(loaded.stored(), task.stored(), strict=True):
        found = as_numbers(found)
        assert float((found.values - wanted.values).abs().max()) <= tolerance * float(wanted.values.abs().max())
    loaded.apply_(base)
    assert [v.shape for v in base.state_dict().values()] == [v.shape for v in net.state_dict().values()]


def test_int8_is_the_obvious_rounding():
    values = torch.tensor([[1.0, -0.5, 0.1], [0.0, 0.0, 0.0]])
    made = in_bytes(Stored(values))
    assert made.values.tolist() == [[127, -64, 13], [0, 0, 0]]  # -63.5 goes to the even neighbour
    assert made.scale.tolist() == pytest.approx([1 / 127, 0])
    assert made.levels == 255
    assert float((as_numbers(made).values - values).abs().max()) <= 0.5 / 127


def test_values_in_bytes_are_the_obvious_rounding():
    """Against a rounding of each row by itself in float64; reading and writing again changes no bit."""
    shapes = [(7,), (3, 5), (), (0, 4), (40,), (2, 2, 3), (6,), (300,)]
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=generator).flatten() for shape in shapes]
    parts[4] = parts[4].abs() ** 6 + 1e-4  # as running variances are: positive, and few are large
    parts[6].zero_()
    values = torch.cat(parts)
    stored = values_in_bytes(values, shapes)
    assert bytes_of_values(shapes) == (2 + 1 + 3 + 1 + 0 + 1 + 2 + 1 + 1, len(values))
    read = values_of_bytes(stored, shapes)
    assert torch.equal(values_in_bytes(read, shapes), stored)
    start, marks = 0, iter(stored[2:].view(torch.uint8).tolist())
    highest = int(stored[:2].clone().view(torch.int16))
    for part, shape in zip(parts, shapes, strict=True):
        rows = part.double().view(len(part) and (shape[0] if len(shape) > 1 else 1), -1) if len(part) else []
        for row in rows:
            mark, largest = next(marks), float(row.abs().max())
            is_small = float(row.mean()) < largest / 3 or float(row.min()) < largest / 16
            is_root = bool((row >= 0).all()) and is_small and largest > 0
            assert (mark > 127) == is_root
            shown = row.sqrt() if is_root else row
            wide = float(shown.abs().max())
            scale = min((2 ** (k / 8) for k in range(-200, 200) if 2 ** (k / 8) * 127.5 / 127 >= wide), default=0)
            assert (mark % 128 == 0) == (wide == 0)
            if wide:
                assert 2 ** ((highest + 1 - mark % 128) / 8) == pytest.approx(scale)
            steps = (shown / scale * 127).round()
            if is_root:  # no positive number becomes zero
                steps[(row > 0) & (steps == 0)] = 1
            wanted = steps / 127 * scale
            wanted = wanted.square() if is_root else wanted
            torch.testing.assert_close(read[start : start + len(row)].double(), wanted, rtol=1e-6, atol=1e-12)
            start += len(row)
    error = (read - values).abs()
    assert float(error[-346:-306].max()) < 0.01 * float(parts[4].max())


def test_heads_in_four_bits_are_the_obvious_rounding():
    """Two integers of -7 to 7 in a byte, with a scale for each row; what lies around them is as without them."""
    shapes, levels = [(4,), (3, 5), (0, 2), (2, 4), (3,)], [255, 15, 15, 255, 255]
    values = torch.randn(4 + 15 + 8 + 3, generator=torch.Generator().manual_seed(1))
    stored = values_in_bytes(values, shapes, levels)
    assert bytes_of_values(shapes, levels) == (2 + 1 + 3 + 0 + 2 + 1, 4 + 8 + 8 + 3)
    assert stored.numel() == 9 + 23
    read = values_of_bytes(stored, shapes, levels)
    assert torch.equal(values_in_bytes(read, shapes, levels), stored)
    for row, found in zip(values[4:19].double().view(3, 5), read[4:19].double().view(3, 5), strict=True):
        wide = float(row.abs().max())
        scale = min(2 ** (k / 8) for k in range(-200, 200) if 2 ** (k / 8) * 7.5 / 7 >= wide)
        torch.testing.assert_close(found, (row / scale * 7).round() / 7 * scale, rtol=1e-6, atol=1e-12)
    alone = values_of_bytes(values_in_bytes(values, shapes), shapes)
    assert torch.equal(read[:4], alone[:4])
    assert torch.equal(read[19:], alone[19:])
    for wrong, what in ((225, "digits"), (15, "digits")):  # past the last pair, and a digit behind the last number
        broken = stored.clone()
        broken[9 + 4 + 7] = torch.tensor(wrong, dtype=torch.uint8).view(torch.int8)
        with pytest.raises(sp.errors.TaskFileError, match=what):
            values_of_bytes(broken, shapes, levels)


def test_a_small_variance_among_large_ones_stays_what_it_is():
    variances = torch.tensor([5.15, 4.8, 0.0171, 3.9, 4.4])  # of a ResNet-50: as integers of their own, the third was 0
    read = values_of_bytes(values_in_bytes(variances, [(5,)]), [(5,)])
    torch.testing.assert_close(read.sqrt(), variances.sqrt(), rtol=0.06, atol=0)
    alike = torch.tensor([1.0, 0.7, 0.4])  # nothing small: roots would be half as fine
    assert values_in_bytes(alike, [(3,)]).view(torch.uint8)[2] <= 127
    next_to_nothing = torch.tensor([1e5, 0.02, 0.0])  # rounded to zero the second would be the inverse of an epsilon
    read = values_of_bytes(values_in_bytes(next_to_nothing, [(3,)]), [(3,)])
    assert 0.02 < read[1] < read[0] / 110**2
    assert read[2] == 0


@pytest.mark.parametrize("storage", ["int8-all", "int4-head"])
def test_a_file_is_what_stored_as_says_and_saves_the_same_again(storage):
    """Short rows without a negative number are rounded across the limits of what decides on roots."""
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 400))
    sp.attach_(net, sp.SPLoRA(rank=1), head="1")
    with torch.no_grad():
        net[1].weight.copy_(torch.rand(400, 3, generator=torch.Generator().manual_seed(0)))
    task = sp.Task.of(net, "head")
    file = task.to_bytes(storage=storage)
    read = sp.Task.from_bytes(file)
    assert torch.equal(read.values, task.stored_as(storage).values)
    assert read.to_bytes() == read.to_bytes(storage=storage) == file
    other = "int8-all" if storage == "int4-head" else "int4-head"
    assert torch.equal(sp.Task.from_bytes(read.to_bytes(storage=other)).values, read.stored_as(other).values)
    changed = dataclasses.replace(read, values=-read.values)  # not what was read
    torch.testing.assert_close(sp.Task.from_bytes(changed.to_bytes()).values, -read.values, atol=0.1, rtol=0)


def test_rows_of_zeros_are_zeros_and_lost_matrices_are_refused():
    shapes, levels = [(3,), (2, 4)], [255, 15]
    values = torch.tensor([1.0, 2, 3, 0, 0, 0, 0, 0.5, -0.25, 0.5, 0.5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = values_of_bytes(values_in_bytes(values, shapes, levels), shapes, levels)
    assert not read[3:7].any()
    assert read[7:].all()
    values[:3] *= 1e5  # scales reach 55,000 times below the largest
    with pytest.raises(sp.errors.TaskFileError, match=r"0\.5 at most is lost beside norms of 3e\+05") as raised:
        values_in_bytes(values, shapes, levels)
    assert raised.value.code == "storage"


def test_bytes_of_values_hold_large_and_small_numbers():
    for numbers in ([1e6, -2e6], [3e38, -1e38], [3.4e38, 3.0e38], [1e-30, 2e-30], [0.0, 0.0]):
        made = values_of_bytes(values_in_bytes(torch.tensor(numbers), [(2,)]), [(2,)])
        assert made.tolist() == pytest.approx(numbers, rel=0.09 if 3.4e38 in numbers else 0.02)  # the largest floats
    assert not values_in_bytes(torch.empty(0), []).numel()
    assert not values_of_bytes(torch.empty(0, dtype=torch.int8), []).numel()


def test_scales_in_bytes_are_within_half_a_step():
    generator = torch.Generator().manual_seed(0)
    scales = torch.cat([torch.rand(500, generator=generator) * 10.0 ** torch.arange(-3, 2).repeat(100), torch.zeros(3)])
    stored = scales_in_bytes(scales)
    assert (stored.dtype, len(stored)) == (torch.uint8, 505)
    made = scales_of_bytes(stored)
    assert torch.equal(scales_in_bytes(made), stored)
    kept = scales > scales.max() * 2**-10.5
    assert 300 < int(kept.sum()) < 500
    assert float((made[kept].double() / scales[kept].double()).log2().abs().max()) <= 1 / 48 + 1e-9
    assert not made[-3:].any()
    small = torch.tensor([1.0, 1e-9])  # too small beside the largest: the smallest that there is
    assert scales_of_bytes(scales_in_bytes(small)).tolist() == pytest.approx([1, 2 ** (-254 / 24)])


@pytest.mark.parametrize(("levels", "in_bytes"), [(2, True), (3, True), (7, True), (15, True), (255, False)])
def test_scales_are_in_bytes_where_codes_hardly_move(levels, in_bytes):
    """255 levels are finer than that."""
    scales = torch.linspace(0.1, 0.2, 40)
    made = cast_scales(scales, torch.float16, [Matrix(40, 9, levels, 40)], "int8-all")
    assert made.dtype == (torch.float32 if in_bytes else torch.float16)
    assert torch.equal(scales_of_bytes(scales_in_bytes(made)), made) == in_bytes
    assert float((made.float() / scales - 1).abs().max()) <= 0.25 / levels
    smallest = cast_scales(scales, torch.float16, [Matrix(40, 9, levels, 40)], "int4-head")
    assert torch.equal(scales_of_bytes(scales_in_bytes(smallest)), smallest)  # whatever the levels
    assert float((smallest / scales - 1).abs().max()) <= 0.015
    assert cast_scales(scales, torch.float16, [Matrix(40, 9, levels, 40)], "int8").dtype == torch.float16


def test_storage_that_cannot_hold_a_number_is_refused(tmp_path):
    base = tiny_cnn()
    net = learned(base, density=1)
    with torch.no_grad():
        net[1].running_var[0] = 1e6
    task = sp.Task.of(net, "a")
    with pytest.raises(TaskFileError, match="1e\\+06, beyond what fp16") as error:
        task.save(tmp_path / "a.task.safetensors", storage="fp16")
    assert error.value.code == "storage"
    assert not list(tmp_path.iterdir())
    assert task.storage_costs(base, [(torch.randn(2, 3, 8, 8), torch.zeros(2).long())])[2].error is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_bases(dtype, tmp_path):
    base = tiny_cnn().to(dtype).eval()
    net = learned(base, density=1, example=IMAGE.to(dtype))
    task = reloaded(net, tmp_path)
    assert task.adapters.dtype == dtype
    for key, value in sp.fuse(net).state_dict().items():
        torch.testing.assert_close(task.build(base).state_dict()[key], value, rtol=1e-2, atol=1e-3)
    task.apply_(base)
    assert same_state(base, net)


# the base is the right one


def changed(base, change):
    other = copy.deepcopy(base)
    with torch.no_grad():
        change(other)
    return other


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda net: net[0].weight.view(-1)[3].add_(1e-9), "base-values"),
        (lambda net: net[0].bias[1].mul_(1.0000001), "base-values"),
        (lambda net: setattr(net[3], "stride", (1, 1)), "base"),
        (lambda net: setattr(net[1], "eps", 1e-3), "base"),
        (lambda net: net.__setitem__(2, nn.GELU()), "base"),
        (lambda net: net.__setitem__(3, nn.Conv2d(8, 12, 5, 2, 2, bias=False).double()), "base"),
        (lambda net: net.append(nn.Identity()), "base"),
    ],
)
def test_another_base_is_refused(change, code, base):
    task = sp.Task.of(learned(base, example=IMAGE.double()), "a")
    other = changed(base, change)
    before = snapshot(other)
    for attempt in (task.build, task.apply_):
        with pytest.raises(TaskFileError) as error:
            attempt(other)
        assert error.value.code == code
        assert_unchanged(other, before)


def test_what_the_task_has_of_its_own_may_differ(base):
    net = learned(base, example=IMAGE.double())
    other = changed(base, lambda net: [net[1].weight.zero_(), net[8].weight.zero_(), net[4].running_var.zero_()])
    x = torch.randn(2, 3, 8, 8).double()
    torch.testing.assert_close(sp.Task.of(net, "a").build(other)(x), net(x))


def test_writes_to_the_base_are_noticed(base):
    task = sp.Task.of(learned(base, example=IMAGE.double()), "a")
    task.build(base)
    with torch.no_grad():
        base[0].weight.mul_(2)
    with pytest.raises(TaskFileError, match="other weights"):
        task.build(base)
    with torch.no_grad():
        base[0].weight.mul_(0.5)
    task.build(base)
    base[0].weight.data.mul_(2)  # past PyTorch's count
    forget_digests()
    with pytest.raises(TaskFileError, match="other weights"):
        task.build(base)


def test_adapted_pruned_and_foreign_bases_are_refused(base):
    net = learned(base, example=IMAGE.double())
    task = sp.Task.of(net, "a")
    empty = tiny_cnn().to("meta")
    lazy = nn.Sequential(nn.LazyLinear(3))
    for wrong in (net, sp.fuse(net), "net", None, empty, lazy):
        with pytest.raises(TaskFileError) as error:
            task.build(wrong)
        assert error.value.code == "base"


# what cannot be a task


def test_plain_and_diverged_networks_are_no_tasks(base):
    with pytest.raises(AttachmentError):
        sp.Task.of(base, "a")
    net = learned(base, example=IMAGE.double())
    with torch.no_grad():
        net[8].bias[0] = float("nan")
    with pytest.raises(NonFiniteError):
        sp.Task.of(net, "a")


def test_a_structure_that_was_lost_is_asked_for(base):
    net = learned(base, example=IMAGE.double())
    structure = attachment_of(net).structure
    attachment_of(net).structure = None
    with pytest.raises(PlanError, match="structure="):
        sp.Task.of(net, "a")
    assert sp.Task.of(net, "a", structure=structure).table.streams


@pytest.mark.parametrize(
    "options",
    [
        {"metrics": {"accuracy": float("nan")}},
        {"metrics": {"accuracy": "high"}},
        {"classes": [1, 2]},
        {"classes": ["a\x1b[31m"]},
        {"licence": "a\nb"},
        {"provenance": {"author": object()}},
        {"preprocessing": {"\u202e": 1}},
    ],
)
def test_descriptions_that_could_not_be_read_are_not_written(options, base):
    net = learned(base, density=1, example=IMAGE.double())
    with pytest.raises(TaskFileError) as error:
        sp.Task.of(net, "a", **options)
    assert error.value.code in ("metadata", "text")


def test_bad_arguments(base, tmp_path):
    task = sp.Task.of(learned(base, density=1, example=IMAGE.double()), "a")
    with pytest.raises(ConfigError, match="int4"):
        task.save(tmp_path / "a.task.safetensors", storage="int4")
    for name in ("a.safetensors", "a.pt", "..task.safetensors"):
        with pytest.raises(TaskFileError) as error:
            task.save(tmp_path / name)
        assert error.value.code == "name"
    with pytest.raises(TaskFileError) as error:
        sp.Task.load(tmp_path / "none.task.safetensors")
    assert error.value.code == "missing"
    with pytest.raises(TaskFileError):
        sp.Task.load(None)
    assert not list(tmp_path.iterdir())


def test_tables_survive_text_and_patterns():
    net = trained()
    table = sp.Task.of(net, "a").table
    raw, length = table.to_bytes()
    again = Table.from_bytes(raw, length)
    assert again.to_bytes() == (raw, length)
    assert again.own == table.own


def test_a_trained_task_is_right_when_it_comes_back(tmp_path):
    from trained import accuracy

    net = trained()
    base = copy.deepcopy(net)
    sp.detach_(base)
    scores = sp.score(net, batches(2), "taylor", loss=nn.functional.cross_entropy)
    sp.prune_(net, sp.select(net, scores, channels=0.5), recover=batches(4))
    train_(net, 2, lr=0.02)
    path = tmp_path / "digits.task.safetensors"
    sp.Task.of(net, "digits").save(path)
    assert accuracy(sp.Task.load(path).build(base)) == accuracy(net) > 90
