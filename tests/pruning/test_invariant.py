"""Four-way invariant on the zoo: masked ≡ pruned ≡ fused ≡ saved and reloaded, in float64, coupled and free, twice."""

import copy

import numpy as np
import pytest
import torch
import zoo
from oracles.masking import masked_copy
from support import awaken_
from torch.utils._pytree import tree_leaves, tree_map_only

import spalier as sp
from spalier.errors import SpalierError

SPLORA = sp.SPLoRA(rank=2)

# what float32 inside of a float64 network (norms that cast, rotary tables) leaves
COARSE = ("llama", "mistral", "mixtral", "qwen", "gemma", "t5", "whisper")

# a weight divided by its own norm: a row of zeros gives NaN in the oracle, not in the library's own comparison
DIVIDES = ("made/functional_weights",)

# nothing of these can go: recurrent layers, statistics over channels, sizes in the code, weights tied to outputs
WHOLE = (
    "made/channel_statistics",
    "made/fourier",
    "made/gru",
    "made/gru_cell_loop",
    "made/lstm",
    "made/lstm_deep",
    "made/tied_layers",
)


def double(example):
    return tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, example)


def run(net, example):
    args, kwargs = zoo.arguments(example, torch.float64)
    # with gradients on, encoder layers call their norms; their fast path reads the weights past the oracle
    with torch.enable_grad():
        return [t.detach() for t in tree_leaves(net(*args, **kwargs)) if isinstance(t, torch.Tensor)]


def assert_same(found, wanted, name):
    tolerance = 1e-4 if any(part in name for part in COARSE) else 1e-8
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert torch.isfinite(b).all()
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, float(b.abs().max())))


def random_plan(structure, density, rng, *, free, kept):
    """Each stream, or each free writer, keeps about this share of its base's units, of those that are left."""
    sizes = {s.name: s.size for s in structure.streams}
    left = {name: kept["streams"][name] if kept else range(size) for name, size in sizes.items()}
    if free:
        for writer in structure.writers:
            stream = structure.streams[writer.stream].name
            own = (kept or {"writers": {}})["writers"].get(writer.name, left[stream])
            left[writer.name], sizes[writer.name] = own, sizes[stream]
        for stream in {structure.streams[w.stream].name for w in structure.writers}:
            if stream not in {w.name for w in structure.writers}:
                del left[stream]  # as wide as its writers make it
    least = {stream.name: stream.least for stream in structure.streams}
    least |= {w.name: structure.streams[w.stream].least for w in structure.writers}
    keep = {
        name: sorted(
            rng.choice(units, max(least[name], min(len(units), round(sizes[name] * density))), replace=False).tolist()
        )
        for name, units in left.items()
    }
    return sp.Plan(structure, keep, writers="free" if free else "coupled")


def check_reloaded(net, base, example, wanted, folder, name):
    """What is built from the file computes the same; what is applied is the same to the last bit."""
    path = folder / "a.task.safetensors"
    sp.Task.of(net, "a").save(path)
    task = sp.Task.load(path)
    values = {key: value.clone() for key, value in base.state_dict().items()}
    built = task.build(base)
    assert not any(type(m).__module__.startswith("spalier") for m in built.modules() if type(m).__name__ != "Spread")
    assert_same(run(built, example), wanted, name)
    task.apply_(base)
    if any(shape.levels for shape in task.adapter_shapes):  # what was rounded away is not in the file
        assert_equal(sp.fuse(base).state_dict(), sp.fuse(net).state_dict())
    else:
        assert_equal(base.state_dict(), net.state_dict())
    assert_same(run(base.eval(), example), wanted, name)
    sp.detach_(base)
    assert_equal(base.state_dict(), values)


def assert_equal(found, wanted):
    assert list(found) == list(wanted)
    assert all(torch.equal(value, wanted[key]) for key, value in found.items())


def check(name, made, structure, example, *, free, seed, folder, adapter=SPLORA):
    """Prune twice, and compare each time."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    net = copy.deepcopy(made)
    adapted = attach(net, adapter)
    plain = sp.fuse(net) if adapted else made
    before = sum(p.numel() for p in net.parameters())
    for density in (0.7, 0.4):
        sp.prune_(net, random_plan(structure, density, rng, free=free, kept=sp.kept_units(net)))
        pruned = run(net, example)
        if adapted:
            assert_same(run(sp.fuse(net), example), pruned, name)
            check_reloaded(net, copy.deepcopy(made), example, pruned, folder, name)
        masked = masked_copy(plain, structure, sp.kept_units(net))
        if masked is not None and name not in DIVIDES:
            assert_same(pruned, run(masked, example), name)
    assert sum(p.numel() for p in net.parameters()) < before


def attach(net, adapter):
    try:
        sp.attach_(net, adapter)
    except SpalierError:
        return False
    awaken_(net, 0.05)
    return True


CODED = {
    "made/concatenations": sp.SPDelta(bits=1),
    "made/grouped": sp.SPDelta(bits=2),
    "made/transposed_grouped": sp.SPDelta(bits=4, scales="layer"),
    "made/multiplicities": sp.SPDelta(bits=1, scales="layer"),
    "made/unet": sp.SPDelta(bits=3),
    "made/channel_shuffle": sp.SPDelta(bits=8),
    "torchvision/resnet18": sp.SPDelta(bits=1),
    "made/attention_batch_first": sp.SPDelta(bits=2),
    "made/tied_language_model": sp.SPDelta(bits=2),
    "transformers/vit": sp.SPDelta(bits=2, scales="layer"),
    "transformers/gpt2": sp.SPDelta(bits=4),
    "transformers/bert": sp.SPDelta(bits=1),
}


@pytest.mark.parametrize("entry", zoo.parameters())
def test_masked_is_pruned_is_fused_is_reloaded(entry, tmp_path):
    example, made = double(entry.example()), entry.make().double()
    structure = sp.trace(made, example)
    assert bool(structure.streams) == (entry.name not in WHOLE)
    if structure.streams:
        check(entry.name, made, structure, example, free=False, seed=0, folder=tmp_path)
    if structure.writers:
        check(entry.name, made, structure, example, free=True, seed=1, folder=tmp_path)


@pytest.mark.parametrize("name", CODED)
def test_the_same_with_few_bits_for_each_weight(name, tmp_path):
    entry = zoo.by_name(name)
    example, made = double(entry.example()), entry.make().double()
    structure = sp.trace(made, example)
    for free in [False, True] if structure.writers else [False]:
        check(name, made, structure, example, free=free, seed=2, folder=tmp_path, adapter=CODED[name])


def test_concatenations_are_written_as_runs(tmp_path):
    """Each part of an axis has a mask of its own; the table has no list of all indices for it."""
    entry = zoo.by_name("made/concatenations")
    net = entry.make()
    sp.attach_(net, SPLORA, example=entry.example())
    path = tmp_path / "a.task.safetensors"
    sp.Task.of(net, "a").save(path)
    rows = sp.Task.load(path).table.rows
    placed = [placement for row in rows for axis in row.axes for placement in axis]
    found = {run for p in placed for run in p.runs or ()}
    assert {repeat for *_, repeat in found} == {1, 4}
    assert {unit for _, unit, *_ in found} == {0}
    assert all(p.units is None for p in placed)
